"""The gradient of a step is the same for any micro-batch x accumulation x ranks, with uneven masks."""

import importlib.util
from pathlib import Path

import pytest
from safetensors.torch import load_file

from kdtrain.testing import run_ranks

SCRIPT = Path(__file__).parent / "ranks_script.py"
spec = importlib.util.spec_from_file_location("ranks_script", SCRIPT)
step = importlib.util.module_from_spec(spec)
spec.loader.exec_module(step)


@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory):
    """The folder of the gradients of two ranks."""
    folder = tmp_path_factory.mktemp("ranks")
    run_ranks(SCRIPT, 2, folder)
    return folder


@pytest.mark.parametrize("divergence, mode", step.CASES)
def test_the_gradient_does_not_depend_on_micro_batches_accumulation_and_ranks(two_ranks, divergence, mode):
    whole = step.gradients(divergence, mode, rank=0, world=1, micro=step.SEQUENCES)
    assert 0 < whole["tokens"] < step.SEQUENCES * step.SEQ_LEN
    assert whole["loss.temperature.theta"].abs() > 1e-6
    cuts = {f"one rank, {micro}": step.gradients(divergence, mode, 0, 1, micro) for micro in (1, 2, 4)}
    cuts |= {f"two ranks, {micro}": load_file(two_ranks / f"{divergence}-{micro}.safetensors") for micro in (1, 2, 4)}
    for name, cut in cuts.items():
        assert cut.keys() == whole.keys()
        for parameter, each in whole.items():
            assert (cut[parameter] - each).norm() <= 3e-6 * each.norm() + 1e-8, (name, parameter)
