import pytest

from kdtrain.config import ObjectiveConfig
from kdtrain.errors import UsageError
from kdtrain.training.schedule import alpha


@pytest.mark.parametrize("shape,quarter", [("constant", 0.8), ("linear", 0.65), ("cosine", 0.8 - 0.6 * 0.14644661)])
def test_alpha_goes_from_its_start_at_the_first_step_to_its_end_after_the_last(shape, quarter):
    config = ObjectiveConfig(alpha=0.8, alpha_end=0.2, alpha_schedule=shape)
    assert alpha(1, 100, config) == 0.8
    assert alpha(26, 100, config) == pytest.approx(quarter)
    assert alpha(101, 100, config) == pytest.approx(0.8 if shape == "constant" else 0.2)


def test_an_objective_distils_if_alpha_is_above_0_at_any_step():
    assert ObjectiveConfig(alpha=0.5).distils
    assert ObjectiveConfig(alpha=0.0, alpha_end=0.5, alpha_schedule="linear").distils
    assert not ObjectiveConfig(alpha=0.0, alpha_end=0.5).distils


@pytest.mark.parametrize("option", ["alpha", "alpha_end"])
def test_an_alpha_outside_0_to_1_is_refused(option):
    with pytest.raises(UsageError, match=f"--{option.replace('_', '-')} 1.5 is outside 0 to 1"):
        ObjectiveConfig(**{option: 1.5})
