"""Estimates from samples: unbiased where documented, and of bounded bias elsewhere."""

import math

import pytest
import torch
from objective_reference import HeadPart, Problem, reference_kd, sparse

from kdtrain.objective.loss import distillation_loss
from kdtrain.objective.tails import clipped_excess

SIZE, PARTS, VOCAB, SAMPLES = 40_000, 50, 23, 20
BOUND = 5.8
"""Standard errors: of 25 normal numbers one leaves it less often than once in a million; of two t-distributed ones
with 49 degrees of freedom, once in a million too."""
ESTIMATES = ["sampled", "control-variate"]


def normal(seed, scale):
    return scale * torch.randn(VOCAB, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def copies(energies, logits):
    """Make SIZE tokens, all with one teacher and one student [V], sampled independently."""
    student, teacher = logits.expand(SIZE, VOCAB).clone(), energies.expand(SIZE, VOCAB)
    labels = torch.zeros(SIZE, dtype=torch.int64)
    return Problem(student.requires_grad_(), HeadPart(None), labels, torch.ones(SIZE).bool(), teacher, VOCAB)


def estimated(p, top_k, T, rule):
    """Estimate the gradient in the logits [SIZE,V], and the mean value and slope in T of each part [PARTS]."""
    targets = sparse(
        p.energies, p.labels, top_k=top_k, num_samples=0 if rule == "ghost" else SAMPLES, knots=(1.0, 1 / T, 0.2)
    )
    t = torch.tensor(T, dtype=torch.float64, requires_grad=True)
    gradients, values, slopes = [], [], []
    for start in range(0, SIZE, SIZE // PARTS):
        part = slice(start, start + SIZE // PARTS)
        out = distillation_loss(
            p.hidden[part], p.head, p.labels[part], p.mask[part], targets[part], temperature=t, alpha=1.0,
            tail="ghost" if rule == "sampled" else rule, vocab_size=VOCAB, normalizer=1.0,
        )  # fmt: skip
        gradient, slope = torch.autograd.grad(out.loss, [p.hidden, t])
        gradients.append(gradient[part])
        values.append(out.kd * PARTS / SIZE)
        slopes.append(slope * PARTS / SIZE)
    return torch.cat(gradients), torch.stack(values), torch.stack(slopes)


def full(energies, logits, T):
    """Compute gradient, value and slope in T of the forward KL over all tokens, of one token."""
    z, t = logits.clone().requires_grad_(), torch.tensor(T, dtype=torch.float64, requires_grad=True)
    kl = reference_kd(z[None], energies[None], 1 / t, "dense")[0]
    gradient, slope = torch.autograd.grad(t**2 * kl, [z, t])
    return gradient, kl.item(), slope.item()


def mild():
    """Make a teacher and a student between which no bound is reached at T up to 4."""
    energies = torch.log_softmax(normal(0, 0.7), -1)
    logits = energies + normal(1, 0.15)
    return energies, logits


def assert_unbiased(samples, exact):
    """Assert that the mean of independent estimates lies within BOUND standard errors of the exact value."""
    error = samples.std(0) / len(samples) ** 0.5
    assert ((samples.mean(0) - exact).abs() <= BOUND * error + 1e-12).all()
    return error


@pytest.mark.parametrize("rule, top_k", [("sampled", 0), ("sampled", 3), ("control-variate", 3)])
@pytest.mark.parametrize("T", [1.0, 2.0, 4.0])
def test_estimates_from_samples_are_unbiased_in_gradient_value_and_slope(rule, T, top_k):
    """40,000 independent estimates, 5.8 standard errors: a correct one fails at one seed in half a million."""
    energies, logits = mild()
    if rule == "sampled":
        logits = energies + normal(1, 1.0)  # its noise does not fall with the distance, and would hide a bias
    exact, kl, exact_slope = full(energies, logits, T)
    gradient, values, slopes = estimated(copies(energies, logits), top_k, T, rule)
    error = assert_unbiased(gradient, exact)
    assert error.norm() < 0.04 * exact.norm(), "too much noise to see a bias"
    assert assert_unbiased(values, kl) < 0.02 * kl
    assert_unbiased(slopes, exact_slope)


def test_the_same_test_detects_the_bias_of_the_ghost_bucket():
    energies, logits = mild()
    exact, kl, _ = full(energies, logits, 1.0)
    gradient, values, _ = estimated(copies(energies, logits), 3, 1.0, "ghost")
    assert (gradient.mean(0) - exact).norm() > 0.3 * exact.norm()
    assert values.mean() < 0.8 * kl


@pytest.mark.parametrize("T", [1.0, 2.0])
def test_the_noise_of_the_control_variate_falls_with_the_distance_and_that_of_sampling_stays(T):
    energies, noise = torch.log_softmax(normal(0, 2.0), -1), normal(1, 1.0)
    errors = {rule: [] for rule in ESTIMATES}
    for distance in (0.3, 0.03):
        exact, *_ = full(energies, energies + distance * noise, T)
        for rule, found in errors.items():
            gradient, *_ = estimated(copies(energies, energies + distance * noise), 3, T, rule)
            found.append((gradient - exact).square().sum(-1).mean().item())
    assert errors["control-variate"][1] < 0.02 * errors["control-variate"][0]
    assert errors["sampled"][1] > 0.5 * errors["sampled"][0]
    assert errors["control-variate"][1] < 1e-3 * errors["sampled"][1]


def students(name, energies):
    """Make students far from the teacher; the last one differs in the order of the tail alone."""
    if name == "shuffled tail":
        rest = energies.argsort(descending=True)[3:]
        return energies.scatter(0, rest, energies[rest.roll(7)])
    return torch.zeros_like(energies) if name == "uniform" else -0.5 * energies


@pytest.mark.parametrize("T", [1.0, 4.0])
@pytest.mark.parametrize("student", ["uniform", "opposite", "shuffled tail"])
def test_far_from_the_teacher_the_error_stays_near_or_below_that_of_sampling(student, T):
    energies = torch.log_softmax(normal(0, 3.0), -1)
    logits = students(student, energies)
    exact, *_ = full(energies, logits, T)
    errors = {}
    for rule in ESTIMATES:
        gradient, *_ = estimated(copies(energies, logits), 3, T, rule)
        errors[rule] = (gradient - exact).square().sum(-1).mean().item()
    assert errors["control-variate"] < (2.0 if T == 1 else 0.5) * errors["sampled"]


def test_x_less_1_continues_along_its_tangent_in_log_x_above_the_clip():
    log_x = torch.linspace(-6, 6, 201, dtype=torch.float64, requires_grad=True)
    excess = clipped_excess(log_x)
    (slope,) = torch.autograd.grad(excess.sum(), log_x)
    x, inside = log_x.detach().exp(), log_x.detach() <= math.log(4)
    torch.testing.assert_close(excess.detach()[inside], (x - 1)[inside])
    torch.testing.assert_close(slope, x.clamp(max=4.0))
    near = torch.tensor([1e-6, -1e-6])
    torch.testing.assert_close(clipped_excess(near), near, rtol=1e-5, atol=0)
