"""Only unmasked tokens count, and a step does not depend on its division into micro-batches."""

import math

import pytest
import torch
from objective_cases import EVERY, RULES, gradients, run, tail_of, targets_for
from objective_reference import problem

from kdtrain.objective.loss import distillation_loss


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("junk", [math.nan, math.inf, -math.inf])
def test_masked_rows_do_not_poison_the_rest(rule, junk):
    p = problem().cast(torch.float64)
    clean = targets_for(p, rule)
    out = run(p, clean, t := torch.tensor(2.0, requires_grad=True), rule)
    expected = [out.loss, *gradients(out.loss, p, t)]

    def spoil(name, x):
        return torch.where(p.mask if x.ndim == 1 else p.mask[:, None], x, 10**9 if name == "ids" else junk)

    p.labels = p.labels.masked_fill(~p.mask, -100)
    out = run(p, clean.map(spoil), t, rule)
    for got, want in zip([out.loss, *gradients(out.loss, p, t)], expected, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize("divergence,rule", EVERY)
def test_a_fully_masked_micro_batch_keeps_the_graph_connected_with_zero_gradients(divergence, rule):
    p = problem(bias=True).cast(torch.float32)
    p.mask = torch.zeros_like(p.mask)
    t = torch.tensor(2.0, requires_grad=True)
    for normalizer in (40.0, 0.0):
        out = run(p, targets_for(p, rule, torch.float32), t, rule, normalizer=normalizer, divergence=divergence)
        assert out.loss.item() == 0 and out.tokens.item() == 0
        assert all((g == 0).all() for g in gradients(out.loss, p, t))


@pytest.mark.parametrize("rule", RULES)
def test_micro_batches_with_uneven_masks_add_up_to_the_whole(rule):
    p = problem(n=24).cast(torch.float64)
    targets, t = targets_for(p, rule), torch.tensor(2.0, dtype=torch.float64, requires_grad=True)
    count = p.mask.sum()
    out = run(p, targets, t, rule, normalizer=count)
    expected = gradients(out.loss, p, t)
    total, summed = 0.0, [torch.zeros_like(g) for g in expected]
    for part in (slice(0, 3), slice(3, 4), slice(4, 24)):
        piece = distillation_loss(
            p.hidden[part], p.head, p.labels[part], p.mask[part], targets[part], temperature=t, alpha=0.7,
            tail=tail_of(rule), vocab_size=p.vocab_size, normalizer=count.float(),
        )  # fmt: skip
        total += piece.loss.item()
        for s, g in zip(summed, gradients(piece.loss, p, t), strict=True):
            s += g
    assert total == pytest.approx(out.loss.item(), rel=1e-12)
    for s, g in zip(summed, expected, strict=True):
        torch.testing.assert_close(s, g, rtol=1e-11, atol=1e-13)
