"""The learning rate and a scheduled alpha at every step."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kdtrain.config.sections import ObjectiveConfig, OptimizerConfig
from kdtrain.errors import UsageError
from kdtrain.objective.alpha import build_alpha
from kdtrain.training.schedule import decay_start, decay_steps, learning_rate, validation_interval, warmup_steps

SCHEDULES = ("cosine", "wsd", "constant")


def rates(total, **options):
    config = OptimizerConfig(**{"lr": 1.0, "min_lr": 0.0, "warmup_steps": 0, **options})
    return [learning_rate(step, total, config) for step in range(1, total + 1)]


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_warm_up_is_linear_from_zero_to_the_peak(schedule):
    assert rates(100, lr_schedule=schedule, warmup_steps=4)[:4] == [0.25, 0.5, 0.75, 1.0]


def test_cosine_is_halfway_down_in_the_middle_and_at_the_smallest_rate_at_the_end():
    found = rates(12, lr_schedule="cosine", warmup_steps=2, min_lr=0.2)
    assert found[1] == 1.0
    assert found[6] == pytest.approx(0.6)
    assert found[-1] == pytest.approx(0.2)


def test_constant_stays_at_the_peak():
    assert rates(9, lr_schedule="constant") == [1.0] * 9


@pytest.mark.parametrize("shape, middle", [("linear", 0.5), ("cosine", 0.5), ("1-sqrt", 1 - 0.5**0.5)])
def test_wsd_is_stable_until_its_decay_and_then_has_its_shape(shape, middle):
    found = rates(20, lr_schedule="wsd", decay_steps=4, decay_shape=shape)
    assert found[:16] == [1.0] * 16
    assert found[17] == pytest.approx(middle)
    assert found[-1] == pytest.approx(0.0, abs=1e-12)


def test_a_warm_up_that_reaches_into_the_decay_is_finished_first():
    found = rates(10, lr_schedule="wsd", warmup_steps=5, decay_steps=8, decay_shape="linear")
    assert found[4:] == pytest.approx([1.0, 0.8, 0.6, 0.4, 0.2, 0.0])
    assert decay_start(10, OptimizerConfig(warmup_steps=5, decay_steps=8)) == 5


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("total, peak", [(30, 15), (200, 100), (400, 200), (1000, 200), (3, 1), (2, 1), (1, 1)])
def test_the_warm_up_takes_at_most_half_of_the_run(schedule, total, peak):
    found = rates(total, lr_schedule=schedule, warmup_steps=200)
    assert found.index(1.0) == peak - 1 and found[: peak - 1] == sorted(found[: peak - 1])
    assert warmup_steps(total, OptimizerConfig()) == peak


def test_a_run_shorter_than_the_interval_of_validations_validates_at_least_four_times():
    assert validation_interval(1000, 250) == validation_interval(250, 250) == 250
    for total in range(4, 250):
        every = validation_interval(total, 250)
        assert len({*range(every, total + 1, every), total}) >= 4
    assert [validation_interval(total, 250) for total in (1, 3, 7, 150, 249)] == [1, 1, 1, 37, 62]


def test_the_decay_of_wsd_is_a_fifth_of_all_steps_unless_given():
    assert decay_steps(100, OptimizerConfig()) == 20
    assert decay_steps(3, OptimizerConfig()) == 1
    assert decay_steps(100, OptimizerConfig(decay_steps=7)) == 7
    assert decay_steps(5, OptimizerConfig(decay_steps=7)) == 5


@given(
    st.sampled_from(SCHEDULES),
    st.sampled_from(["cosine", "linear", "1-sqrt"]),
    st.integers(1, 60),
    st.integers(0, 70),
    st.none() | st.integers(1, 70),
)
def test_the_rate_rises_then_never_rises_again_and_stays_within_its_bounds(schedule, shape, total, warmup, decay):
    found = rates(total, lr_schedule=schedule, decay_shape=shape, warmup_steps=warmup, decay_steps=decay, min_lr=0.1)
    peak = min(warmup, max(total // 2, 1))
    after = found[max(peak - 1, 0) :]
    assert found[:peak] == sorted(found[:peak])
    assert after == sorted(after, reverse=True)
    assert all(0 < rate <= 1 for rate in found)
    assert all(rate >= 0.1 - 1e-9 for rate in after)


@pytest.mark.parametrize("shape,quarter", [("constant", 0.8), ("linear", 0.65), ("cosine", 0.8 - 0.6 * 0.14644661)])
def test_alpha_goes_from_its_start_at_the_first_step_to_its_end_at_the_last(shape, quarter):
    end = {} if shape == "constant" else {"alpha_end": 0.2}
    config = ObjectiveConfig(alpha=0.8, alpha_schedule=shape, **end)
    alpha, seen = build_alpha(config, 101, [True]), []
    for step in (0, 25, 100):
        alpha.set_step(step)
        seen.append(alpha.value())
    assert seen == [0.8, pytest.approx(quarter), pytest.approx(0.8 if shape == "constant" else 0.2)]
    assert build_alpha(config, 101, [False]).value() == 0.0


def test_an_objective_distils_if_alpha_is_above_0_at_any_step():
    assert ObjectiveConfig(alpha=0.5).distils
    assert ObjectiveConfig(alpha=0.0, alpha_end=0.5, alpha_schedule="linear").distils
    with pytest.raises(UsageError, match="alpha-end has no effect without --alpha-schedule"):
        ObjectiveConfig(alpha=0.0, alpha_end=0.5)
