"""Parity with libraries others wrote, where they compute the same thing; left out where they are not installed."""

import pytest
import torch

from kdtrain.models.output_head import HeadPart
from kdtrain.objective.loss import distillation_loss
from kdtrain.objective.targets import DenseTargets

N, D, V = 40, 12, 97


@pytest.fixture
def student():
    g = torch.Generator().manual_seed(0)
    hidden, weight = (torch.randn(rows, D, generator=g).requires_grad_() for rows in (N, V))
    teacher = tuple(torch.randn(rows, D, generator=g) for rows in (N, V))
    labels = torch.randint(V, (N,), generator=g)
    mask = torch.rand(N, generator=g) > 0.3
    return hidden, weight, teacher, labels, mask


def ours(student, temperature, alpha=1.0, **more):
    hidden, weight, teacher, labels, mask = student
    return distillation_loss(
        hidden,
        HeadPart(weight),
        labels,
        mask,
        DenseTargets.from_logits(teacher[0] @ teacher[1].T, labels),
        temperature=temperature,
        alpha=alpha,
        vocab_size=V,
        normalizer=mask.sum(),
        **more,
    ).loss


def gradients(loss, student):
    return torch.autograd.grad(loss, student[:2])


def assert_same(loss, other, student, factor=1.0):
    """Assert the same value and gradients, ours being `factor` times the other's."""
    torch.testing.assert_close(loss, factor * other, rtol=1e-5, atol=1e-7)
    for mine, its in zip(gradients(loss, student), gradients(other, student), strict=True):
        torch.testing.assert_close(mine, factor * its, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("T", [1.0, 2.5])
@pytest.mark.parametrize(
    "beta,divergence", [(0.5, "jsd"), (0.2, "jsd"), (0.0, "forward-kl"), (1.0, "reverse-kl")], ids=str
)
def test_jsd_and_its_ends_are_those_of_trl(student, beta, divergence, T):
    """TRL does not multiply by T^2."""
    gkd = pytest.importorskip("trl.experimental.gkd", reason="TRL is not installed")
    hidden, weight, teacher, labels, mask = student
    other = gkd.GKDTrainer.generalized_jsd_loss(
        (hidden @ weight.T)[None],
        (teacher[0] @ teacher[1].T)[None],
        labels.masked_fill(~mask, -100)[None],
        beta=beta,
        temperature=T,
        num_items_in_batch=mask.sum(),
    )
    loss = ours(student, T, divergence=f"jsd:{beta}" if divergence == "jsd" else divergence)
    assert_same(loss, other, student, T**2)


@pytest.mark.parametrize("alpha", [1.0, 0.6])
@pytest.mark.parametrize("beta", [0.5, 0.2])
def test_jsd_is_that_of_liger(student, beta, alpha):
    """At T = 1: Liger does not multiply by T^2."""
    liger = pytest.importorskip("liger_kernel.chunked_loss", reason="Liger-Kernel is not installed")
    hidden, weight, teacher, labels, mask = student
    loss = liger.LigerFusedLinearJSDLoss(weight_hard_loss=1 - alpha, weight_soft_loss=alpha, beta=beta, compiled=False)
    other = loss(hidden, weight, *teacher, labels.masked_fill(~mask, -100))
    assert_same(ours(student, 1.0, alpha, divergence=f"jsd:{beta}"), other, student)
