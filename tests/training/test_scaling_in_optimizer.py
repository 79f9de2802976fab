"""On a GPU fused AdamW divides by tokens and clips while it reads the gradients: the same step, in fewer passes."""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from kdtrain.training import step
from kdtrain.training.signals import StopRequest

LEARNED = {"temperature_mode": "likelihood", "temperature": 2.0}


@pytest.fixture
def on_gpu(monkeypatch):
    def pretend(wanted):
        monkeypatch.setattr(step, "_scales_in_optimizer", lambda *_: wanted)

    return pretend


class Passes(TorchDispatchMode):
    """A counter of bytes that operators on lists of tensors read and write, by operator."""

    def __init__(self):
        super().__init__()
        self.seen = {}

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        name = function.overloadpacket.__name__
        if name.startswith(("_foreach", "_fused")):
            lists = [arg for arg in args if isinstance(arg, list | tuple) and arg]
            touched = sum(each.nbytes for arg in lists for each in arg if isinstance(each, torch.Tensor))
            written = {"_foreach_norm": 0, "_foreach_mul_": 1, "_fused_adamw_": 3 / 4}.get(name, 0) * touched
            if name == "_fused_adamw_" and (kwargs or {}).get("grad_scale") is not None:
                written = touched
            self.seen[name] = self.seen.get(name, 0) + touched + written
        return function(*args, **(kwargs or {}))


def steps_of(workshop, name, **options):
    """Take three steps; return the numbers of each, and the weights."""
    with workshop.run(name, steps=3, clip=0.05, **options) as run:
        batches = run.stepper.feed()
        numbers = []
        for _ in range(3):
            numbers.append(run.stepper.take(next(batches), StopRequest()).metrics)
        weights = {key: each.detach().clone() for key, each in run.student.named_parameters()}
    return numbers, weights


@pytest.mark.parametrize("options", [{}, LEARNED, {"precision": "fp16"}], ids=["plain", "learned T", "fp16"])
def test_the_optimizer_scales_and_clips_as_the_passes_before_it_do(workshop, on_gpu, options):
    on_gpu(False)
    expected, weights = steps_of(workshop, "passes", **options)
    assert all(each["grad_norm"] > 0.05 for each in expected)
    on_gpu(True)
    found, own = steps_of(workshop, "folded", **options)
    for name in ("loss", "grad_norm", *(["dL/dlogT", "T"] if options is LEARNED else [])):
        assert [each[name] for each in found] == pytest.approx([each[name] for each in expected], rel=1e-5)
    for name, each in weights.items():
        torch.testing.assert_close(own[name], each, rtol=1e-4, atol=1e-5)


def test_norm_clip_and_update_move_thirty_six_bytes_a_parameter_and_not_forty_eight(workshop, on_gpu):
    moved = {}
    for wanted in (False, True):
        on_gpu(wanted)
        with workshop.run(str(wanted)) as run:
            batches = run.stepper.feed()
            run.stepper.take(next(batches), StopRequest())
            with Passes() as passes:
                run.stepper.take(next(batches), StopRequest())
            size = sum(each.numel() for each in run.student.parameters())
        moved[wanted] = round(sum(passes.seen.values()) / size)
    assert moved == {False: 48, True: 36}


def test_histograms_show_clipped_gradients_and_change_no_bit(workshop, on_gpu, monkeypatch):
    shown = {}
    for name, wanted, freq in (("passes", False, 2), ("folded", True, 2), ("unseen", True, 4)):
        on_gpu(wanted)
        with workshop.run(name, steps=3, clip=0.05, eval_freq=freq) as run:
            shown[name] = []
            monkeypatch.setattr(
                run.writers,
                "histograms",
                lambda number, tensors, into=shown[name]: into.append(
                    {key: each.detach().clone() for key, each in tensors.items()}
                ),
            )
            run.fit()
            shown[f"{name} weights"] = [each.detach().clone() for each in run.student.parameters()]
    assert len(shown["passes"]) == len(shown["folded"]) == 1 and not shown["unseen"]
    for key, each in shown["passes"][0].items():
        torch.testing.assert_close(shown["folded"][0][key], each, rtol=1e-4, atol=1e-5)
    assert all(map(torch.equal, shown["folded weights"], shown["unseen weights"]))


def test_a_step_that_is_skipped_changes_nothing_when_the_optimizer_scales(workshop, on_gpu):
    on_gpu(True)
    source = workshop.source(10, broken=tuple(range(10)))
    with workshop.run(train=source, **LEARNED) as run:
        before = [each.detach().clone() for each in run.student.parameters()]
        assert run.stepper.take(next(run.stepper.feed()), StopRequest()).status is step.Status.SKIPPED
        assert all(map(torch.equal, before, run.student.parameters()))
        assert all(float(state["step"]) == 0 for state in run.state.optimizer.state.values())
