"""Logits of any size, excluded tokens, vocabularies of 2 to 200,000: nothing becomes NaN, and small ones stay right."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from objective_cases import EVERY, assert_agrees, gradients, run, targets_for, with_number
from objective_reference import HeadPart, problem


@pytest.mark.parametrize("size", [1e4, 1e2])
@pytest.mark.parametrize("divergence,rule", EVERY)
def test_extreme_logits_give_finite_gradients(divergence, rule, size):
    p = problem(d=23)
    p.hidden, p.head = size * torch.sign(p.hidden), HeadPart(None)
    p.energies = torch.log_softmax(size * torch.sign(p.energies - p.energies.median()), -1)
    ours = p.cast(torch.float32)
    t = torch.tensor(2.0, requires_grad=True)
    out = run(ours, targets_for(p, rule, torch.float32), t, rule, divergence=divergence)
    assert math.isfinite(out.loss.item())
    assert all(torch.isfinite(g).all() for g in gradients(out.loss, ours, t))


@pytest.mark.parametrize("divergence,rule", EVERY)
def test_minus_infinity_where_neither_has_mass_is_not_nan(divergence, rule):
    p = problem(d=23)
    p.head = HeadPart(None)
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


@st.composite
def cases(draw, sizes, logits, excludes, divergences=EVERY):
    """Draw a problem of any shape with any mask, the largest logits of both sides, and tokens excluded by -inf.

    `targets_for` takes a top-k of 5, and a sparse cache always leaves a tail.
    """
    divergence, rule = draw(st.sampled_from(divergences))
    vocab = draw(sizes if rule == "dense" else sizes.filter(lambda size: size > 6))
    n, d = draw(st.integers(1, 2 if vocab > 60 else 12)), draw(st.integers(1, 3 if vocab > 60 else 8))
    p = problem(n=n, d=d, vocab=vocab, bias=True, seed=draw(st.integers(0, 999)), padding=draw(st.integers(0, 3)))
    size, peak = (draw(st.sampled_from(logits)) for _ in range(2))
    # without the bias: a logit in which the two cancel would make the weight a hundred times too large
    p.head.weight.mul_(size / (p.hidden @ p.head.weight[:vocab].T).abs().max())
    p.energies *= peak / p.energies.abs().max()
    p.mask = torch.tensor(draw(st.lists(st.booleans(), min_size=n, max_size=n)))
    excluded = draw(st.integers(0, max(vocab - 9, 0))) if excludes else 0
    if excluded:
        p.labels = p.labels % (vocab - excluded)
        p.head.bias[vocab - excluded : vocab] = -math.inf
        p.energies[:, vocab - excluded :] = -1e4 - peak
    p.energies = torch.log_softmax(p.energies, -1)
    return p, divergence, rule, draw(st.sampled_from([2 / 3, 1.0, 2.0, 4.0])), excluded


ANY_SIZE = st.one_of(st.integers(2, 60), st.sampled_from([257, 2048, 50_257, 151_936, 200_000]))


@settings(max_examples=120)
@given(cases(ANY_SIZE, [1.0, 30.0, 1e4], excludes=True))
def test_any_shape_mask_and_size_of_logits_is_finite_and_masked_or_excluded_entries_take_no_part(case):
    p, divergence, rule, T, excluded = case
    ours = p.cast(torch.float32)
    t = torch.tensor(T, requires_grad=True)
    out = run(ours, targets_for(p, rule, torch.float32), t, rule, divergence=with_number(divergence, 0.3))
    hidden, weight, bias, slope = gradients(out.loss, ours, t)
    assert all(torch.isfinite(x).all() for x in (*out, hidden, weight, bias, slope))
    assert out.tokens.item() == p.mask.sum().item()
    assert (hidden[~p.mask] == 0).all()
    assert (weight[p.vocab_size - excluded :] == 0).all() and (bias[p.vocab_size - excluded :] == 0).all()


@settings(max_examples=80)
@given(cases(st.integers(2, 300), [1.0, 10.0, 30.0], excludes=False))
def test_any_shape_and_mask_with_logits_up_to_30_agrees_with_the_reference(case):
    p, divergence, rule, T, _ = case
    assert_agrees(p, rule, torch.float64, T, 1e-8, divergence=divergence)
