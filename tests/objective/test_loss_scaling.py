"""The gradients of a scaled loss, and the digits of the gradient in T."""

import pytest
import torch
from objective_cases import run, targets_for, with_number
from objective_reference import problem, reference_loss

from kdtrain.config.choices import DIVERGENCES


@pytest.mark.parametrize("rule", ["ghost", "dense"])
@pytest.mark.parametrize("kind", [torch.float32, torch.bfloat16, torch.float16])
def test_a_loss_scale_multiplies_every_gradient_including_that_of_log_t(kind, rule):
    found = []
    for scale in (1.0, 4096.0):
        p, log_t = problem(bias=True).cast(kind), torch.tensor(0.7, requires_grad=True)
        (scale * run(p, targets_for(p, rule, torch.float32), log_t.exp(), rule).loss).backward()
        # A power of two: taking the scale off again, as a GradScaler does, is exact but for what fp16 cannot hold.
        found.append([x.grad.double() / scale for x in (*p.leaves(), log_t)])
    for plain, scaled in zip(*found, strict=True):
        assert plain.abs().max() > 0
        bound = 1e-3 if kind == torch.float16 else 0.0
        assert (plain - scaled).norm() <= bound * plain.norm()


@pytest.mark.parametrize("T", [1.0, 2.0, 4.0])
@pytest.mark.parametrize("divergence", list(DIVERGENCES.builtin))
def test_the_gradient_in_t_from_dense_targets_keeps_its_digits_in_fp32(divergence, T):
    """It is 2 T KD minus dKD/dbeta, which agree in two digits and more at T = 4."""
    p64 = problem(n=100, d=32, vocab=2000, seed=1)
    t = torch.tensor(T, dtype=torch.float64, requires_grad=True)
    exact = p64.cast(torch.float64)
    expected, _, _ = reference_loss(exact, t, 0.7, "dense", targets_for(p64, "dense", torch.float64), 11.0, divergence)
    (want,) = torch.autograd.grad(expected, t)
    log_t = torch.tensor(T).log().requires_grad_()
    targets = targets_for(p64, "dense", torch.float32)
    loss = run(p64.cast(torch.float32), targets, log_t.exp(), "dense", divergence=with_number(divergence, 0.3)).loss
    (got,) = torch.autograd.grad(loss, log_t)
    assert abs(got.item() - T * want.item()) <= 2e-6 * max(abs(T * want.item()), abs(expected.item()))
