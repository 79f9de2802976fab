"""Logits of any size, excluded tokens, vocabularies of 2 to 200,000: nothing becomes NaN, and small ones stay right."""

import math

import pytest
import torch
from objective_cases import EVERY, gradients, run, targets_for
from objective_reference import PlainHead, problem


@pytest.mark.parametrize("size", [1e4, 1e2])
@pytest.mark.parametrize("divergence,rule", EVERY)
def test_extreme_logits_give_finite_gradients(divergence, rule, size):
    p = problem(d=23)
    p.hidden, p.head = size * torch.sign(p.hidden), PlainHead(None)
    p.energies = torch.log_softmax(size * torch.sign(p.energies - p.energies.median()), -1)
    ours = p.cast(torch.float32)
    t = torch.tensor(2.0, requires_grad=True)
    out = run(ours, targets_for(p, rule, torch.float32), t, rule, divergence=divergence)
    assert math.isfinite(out.loss.item())
    assert all(torch.isfinite(g).all() for g in gradients(out.loss, ours, t))


@pytest.mark.parametrize("divergence,rule", EVERY)
def test_minus_infinity_where_neither_puts_mass_is_no_nan(divergence, rule):
    p = problem(d=23)
    p.head = PlainHead(None)
    p.hidden[:, 20:], p.energies[:, 20:] = -math.inf, -math.inf
    p.labels = p.labels.clamp(max=19)
    targets = targets_for(p, "dense", torch.float32)
    if rule != "dense":
        targets = targets_for(problem_with(p, p.energies.clamp(min=-1e4)), rule, torch.float32)
    ours = p.cast(torch.float32)
    t = torch.tensor(2.0, requires_grad=True)
    out = run(ours, targets, t, rule, divergence=divergence)
    assert math.isfinite(out.loss.item())
    assert all(torch.isfinite(g).all() for g in gradients(out.loss, ours, t))


def problem_with(p, energies):
    changed = p.cast(torch.float64)
    changed.energies = energies
    return changed
