"""Training on any device: batches arrive whole, the result is the CPU's, and a resumed run is the same run."""

import numpy as np
import pytest
import torch

from kdtrain.checkpoint.store import load
from kdtrain.models.head import split
from kdtrain.objective.batch import Batch
from kdtrain.objective.targets import SparseTargets
from kdtrain.testing import tiny_model
from kdtrain.training.sources.build import StudentSource

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


@pytest.fixture
def repeatable(monkeypatch):
    """Use operations that give the same bits again, where a device has them."""
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(False)


def sparse_targets() -> SparseTargets:
    g = torch.Generator().manual_seed(0)
    values = {name: torch.randn(6, generator=g) for name in ("label_logprob", "logit_mean", "logit_std")}
    return SparseTargets(
        ids=torch.randint(0, 300, (6, 4), generator=g),
        logprobs=torch.randn(4, 6, generator=g).T,
        counts=torch.zeros(()).expand(6, 4),
        tail=torch.randn(6, 10, generator=g)[:, :8],
        top_k=4,
        num_samples=0,
        knots=(1.0, 0.7, 0.45, 0.25),
        **values,
    )


@pytest.mark.parametrize("device", DEVICES)
def test_a_copied_tensor_is_complete_for_any_memory_layout(workshop, device):
    targets = sparse_targets()
    tokens, mask = torch.zeros(2, 4, dtype=torch.int64), torch.ones(2, 3, dtype=torch.bool)

    class One:
        facts, overlaps, repeatable = workshop.source.facts, True, True

        def __len__(self):
            return 2

        def read(self, indices):
            return Batch(tokens, mask, tokens[:, 1:], targets, (torch.randn(3, 6).T,))

    source = StudentSource(One(), torch.device(device), 300)
    for _ in range(3):
        batch = source.read(np.arange(2))
        moved = batch.targets
        assert {each.device.type for each in (batch.tokens, batch.loss_mask, *batch.states)} == {device}
        assert isinstance(moved, SparseTargets) and moved.knots == targets.knots
        for name, tensor in vars(targets).items():
            if torch.is_tensor(tensor):
                found = getattr(moved, name)
                assert found.device.type == device and found.dtype == tensor.dtype
                assert torch.equal(found.cpu(), tensor), name


def on(run, device):
    """Move a run to a device: its student, temperature and sources."""
    run.student.to(device)
    run.stepper.source, run.validation_source = (
        StudentSource(each, torch.device(device), 300) for each in (run.stepper.source, run.validation_source)
    )
    return run


def trained(workshop, name, device, steps, **options):
    """Train a run of 6 steps until `steps` of them, resumed from the run's folder; return its state."""
    with workshop.run(name, steps=6, checkpoint_freq=3, lr_schedule="constant", **options) as run:
        on(run, device)
        newest, _ = run.store.newest_valid()
        if newest is not None:
            found = load(run.store.path(newest))
            run.state.load(found.tensors, found.state)
        run.stepper.planned = steps
        run.fit()
        run.saver.close()
        return {key: each.detach().cpu().clone() for key, each in run.state.tensors().items()}


@pytest.mark.gpu
def test_a_run_on_a_device_is_the_run_on_a_cpu(workshop):
    expected = trained(workshop, "cpu", "cpu", 6)
    found = trained(workshop, "device", "cuda", 6)
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        if name.startswith("student."):
            assert (found[name] - tensor).norm() <= 1e-2 * tensor.norm().clamp(min=1e-3), name


@pytest.mark.gpu
@pytest.mark.usefixtures("repeatable")
def test_a_run_with_dropout_that_is_resumed_on_a_device_is_the_run_that_was_not_stopped(workshop, monkeypatch):
    dropout = {"resid_pdrop": 0.2, "embd_pdrop": 0.2, "attn_pdrop": 0.2}
    monkeypatch.setattr(workshop, "student", lambda: split(tiny_model("gpt2", 300, seed=3, **dropout)))
    whole = trained(workshop, "whole", "cuda", 6)
    trained(workshop, "broken", "cuda", 3)
    resumed = trained(workshop, "broken", "cuda", 6)
    different = [name for name in whole if not torch.equal(resumed[name], whole[name])]
    assert different == []
    other = trained(workshop, "other", "cuda", 6, seed=1)
    assert any(not torch.equal(other[name], whole[name]) for name in whole)


def test_the_copy_of_a_state_is_waited_for_before_the_state_changes(workshop, monkeypatch):
    order = []

    def logged(owner, name):
        method = getattr(owner, name)
        monkeypatch.setattr(owner, name, lambda *given, **options: order.append(name) or method(*given, **options))

    with workshop.run(steps=2, checkpoint_freq=1) as run:
        for owner, names in ((run.checkpoints.copies, ("copy", "before_change", "wait")), (run.state, ("load",))):
            for name in names:
                logged(owner, name)
        logged(run.state.optimizer, "step")
        run.fit()
        assert order == [*("copy", "before_change", "step") * 2, "copy"]
        order.clear()
        run.recovery.restore(load(run.store.path("step-00000001")), "rollback")
        assert order == ["wait", "load", "copy"]
        run.saver.close()
