"""An optimizer of somebody's package, Muon for hidden matrices: resumed, in two ranks, and guarded."""

import importlib.util
from pathlib import Path

import pytest
import torch

from kdtrain.config.sections import OptimizerConfig
from kdtrain.objective.loss import DistillationLoss
from kdtrain.testing import tiny_model
from kdtrain.training.optimizers import make_optimizer
from kdtrain.training.student import Student

MUON = Path(__file__).parent / "packages" / "muon.py"


@pytest.fixture(scope="module")
def muon(forks):
    """Run `distill --optimizer muon` with the package, and return the tensors of the run."""
    path = forks.install(MUON, "optimizers")

    def train(out, *argv, world=1, fault=None):
        ended = forks.launch(
            *(world, "distill", "--cache", "cache", "--student", "student.toml", "--out", out),
            *(*forks.eager, *forks.fast, "--steps", 6, "--checkpoint-freq", 3, "--eval-freq", 6),
            *("--optimizer", "muon", *argv),
            fault=fault,
            PYTHONPATH=path,
        )
        assert all(each.code == (0 if fault is None else each.code) for each in ended), ended[0].stderr
        return forks.tensors(out)

    return train


@pytest.fixture(scope="module")
def whole(muon):
    return muon("whole")


def test_a_resumed_run_of_a_packages_optimizer_ends_in_the_same_bits(muon, whole):
    momenta = [name for name in whole if name.endswith(".momentum")]
    assert momenta and not any(name.replace(".momentum", ".exp_avg") in whole for name in momenta)
    assert any(name.endswith(".exp_avg_sq") for name in whole)
    muon("parts", fault="train.after-micro-batch:kill:4")
    resumed = muon("parts")
    assert resumed.keys() == whole.keys()
    assert all(torch.equal(each, whole[name]) for name, each in resumed.items())


def test_two_ranks_with_a_packages_optimizer_train_as_one(muon, whole):
    ranks = muon("ranks", world=2)
    assert ranks.keys() == whole.keys()
    for name, each in ranks.items():
        torch.testing.assert_close(each, whole[name], rtol=2e-3, atol=2e-4)


def test_a_skipped_step_of_a_packages_optimizer_changes_nothing():
    spec = importlib.util.spec_from_file_location("muon", MUON)
    spec.loader.exec_module(importlib.util.module_from_spec(spec))
    student = Student(tiny_model("llama", 300), DistillationLoss(alpha=0.0))
    optimizer = make_optimizer(student, OptimizerConfig(optimizer="muon", lr=1e-2), temperature_lr=0.01)
    trained = [each for group in optimizer.param_groups for each in group["params"]]

    def step(found_inf):
        """Take a step, and return a copy of weights and state."""
        torch.manual_seed(0)
        for each in trained:
            each.grad = torch.full_like(each, torch.nan) if found_inf else torch.randn_like(each)
        optimizer.guarded_step(torch.tensor(found_inf))
        return [each.clone() for p in trained for each in (p.detach(), *optimizer.state[p].values())]

    before, after = step(0.0), step(1.0)
    assert all(torch.equal(*pair) for pair in zip(before, after, strict=True))
    assert not any(torch.equal(*pair) for pair in zip(step(0.0)[:2], after[:2], strict=True))
