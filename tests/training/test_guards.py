"""The guards of a step: a skipped one leaves no trace, and gradients that stay huge end the run."""

import json
import math

import pytest
import torch

from kdtrain.config.sections import OptimizerConfig, StoppingConfig
from kdtrain.objective.loss import DistillationLoss
from kdtrain.testing import tiny_model
from kdtrain.training.guards import GradientExplosion, non_finite
from kdtrain.training.optimizers import make_optimizer
from kdtrain.training.signals import StopRequest
from kdtrain.training.sources.source import feed
from kdtrain.training.step import Status
from kdtrain.training.student import Student

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


class Trained:
    """A student and a temperature with their optimizer, whose gradients come from a seed."""

    def __init__(self, device):
        self.student = Student(tiny_model("llama", 300, seed=3).to(device), DistillationLoss())
        self.student.loss.temperature = torch.nn.Linear(1, 1, bias=False, dtype=torch.float64, device=device)
        with torch.no_grad():
            self.student.temperature.weight.fill_(0.5)
        self.optimizer = make_optimizer(self.student, OptimizerConfig(lr=3e-4), temperature_lr=0.01)

    def parameters(self):
        return list(self.student.parameters())

    def step(self, seed, bad=None, place=0):
        """Take one guarded step; `bad` replaces one entry of the gradient of parameter `place`."""
        generator = torch.Generator().manual_seed(seed)
        for each in self.parameters():
            each.grad = torch.randn(each.shape, generator=generator).to(each)
        if bad is not None:
            self.parameters()[place].grad.view(-1)[-1] = bad
        found = non_finite(*(each.grad for each in self.parameters()))
        self.optimizer.guarded_step(found)
        return found

    def state(self):
        """Copy everything that a step may change, by name."""
        named = {f"{number}": each.detach().clone() for number, each in enumerate(self.parameters())}
        for number, each in enumerate(self.parameters()):
            named |= {f"{number}.{key}": value.clone() for key, value in self.optimizer.state[each].items()}
        return named


def differing(ours, theirs):
    assert ours.keys() == theirs.keys()
    return [name for name in theirs if not torch.equal(ours[name], theirs[name])]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("place", [0, 5, -1], ids=["embedding", "inside", "temperature"])
def test_a_skipped_step_changes_no_bit_of_weights_moments_and_counters(device, bad, place):
    trained = Trained(device)
    for seed in range(3):
        assert trained.step(seed) == 0
    before = trained.state()
    assert len(before) == 4 * len(trained.parameters())
    assert trained.step(3, bad, place) == 1
    assert differing(trained.state(), before) == []
    assert not hasattr(trained.optimizer, "found_inf")


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("skipped", [0, 2])
def test_steps_around_a_skipped_one_even_the_first_are_those_of_a_run_without_it(device, skipped):
    skipping, whole = Trained(device), Trained(device)
    for seed in (0, 1, 2, 3):
        skipping.step(seed, math.nan if seed == skipped else None)
        if seed != skipped:
            whole.step(seed)
    assert differing(skipping.state(), whole.state()) == []


@pytest.mark.parametrize("device", DEVICES)
def test_a_good_step_is_the_optimizers_own_bit_by_bit(device):
    guarded, plain = Trained(device), Trained(device)
    for seed in range(3):
        guarded.step(seed)
        for ours, theirs in zip(plain.parameters(), guarded.parameters(), strict=True):
            ours.grad = theirs.grad.clone()
        plain.optimizer.step()
    assert differing(guarded.state(), plain.state()) == []


@pytest.mark.gpu
def test_the_host_never_waits_for_the_guard():
    trained = Trained("cuda")
    trained.step(0)
    for each in trained.parameters():
        each.grad = torch.randn_like(each)
    torch.cuda.set_sync_debug_mode("error")
    try:
        trained.optimizer.guarded_step(non_finite(*(each.grad for each in trained.parameters())))
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_non_finite_value_is_found_wherever_it_is(bad):
    fine = torch.tensor([1.0, -3e38])
    assert non_finite(torch.tensor(2.0, dtype=torch.float64), fine) == 0
    assert non_finite(torch.tensor(bad), fine) == 1
    assert non_finite(torch.tensor(2.0, dtype=torch.float64), torch.tensor([0.0, bad])) == 1
    found = non_finite(torch.tensor(bad))
    assert (found.dtype, found.shape) == (torch.float32, ())


def test_a_step_whose_temperature_alone_has_a_bad_gradient_is_skipped_as_well(workshop):
    def take(run):
        cursor = run.state.progress.sequences
        batches = next(feed(run.stepper.source, lambda _: run.stepper.sequences(cursor), run.stepper.micro))
        return run.stepper.take(batches, StopRequest())

    with workshop.run(temperature_mode="likelihood") as run:
        theta = run.student.temperature.theta
        assert take(run).status is Status.TAKEN
        before = {name: tensor.clone() for name, tensor in run.state.tensors().items()}
        theta.register_hook(lambda gradient: gradient * math.nan)
        result = take(run)
        assert result.status is Status.SKIPPED and math.isfinite(result.loss) and math.isfinite(result.grad_norm)
        assert differing(run.state.tensors(), before) == []


def explosion(norms, **options):
    """Return the step at which these gradient norms, of steps 1, 2, ..., end a run; None where they do not."""
    watching = GradientExplosion(StoppingConfig(**options))
    return next((step for step, norm in enumerate(norms, 1) if watching.update(step, norm)), None)


def test_gradients_above_the_threshold_three_times_in_a_row_are_an_explosion():
    assert explosion([1.0] * 100 + [1500.0] * 100) == 103
    assert explosion([1.0] * 100 + [1500.0, 1500.0, 1.0] * 30) is None
    assert explosion([1.0] * 100 + [1500.0] * 100, explosion_threshold=2000.0) is None


def test_no_gradient_counts_in_the_warm_up_and_a_non_finite_one_never():
    assert explosion([1e6] * 52) is None
    assert explosion([1e6] * 60) == 53
    for bad in (math.nan, math.inf):
        assert explosion([1.0] * 100 + [bad] * 100) is None


def test_an_explosion_is_counted_on_through_json():
    first, second = (GradientExplosion(StoppingConfig(stopping_warmup=0)) for _ in range(2))
    assert [first.update(step, 1e6) for step in (1, 2)] == [None, None]
    second.load_state_dict(json.loads(json.dumps(first.state_dict())))
    assert "gradient norm above 1000 (--explosion-threshold) at 3 steps in a row" in second.update(3, 1e6)
