from dataclasses import replace

import pytest
import torch
from objective_cases import RULES, run, tail_of, targets_for
from objective_reference import problem

from kdtrain.config.choices import DIVERGENCES
from kdtrain.objective.engine import fused as engine
from kdtrain.objective.loss import DistillationLoss


@pytest.mark.parametrize("rule", ["ghost", "dense"])
@pytest.mark.parametrize("divergence", ["forward-kl", "jsd"])
def test_leaving_out_a_number_changes_no_other(divergence, rule):
    """Neither the divergence at T = 1, nor the gradient in a temperature that is not learned."""
    found = []
    for learned in (True, False):
        for at_one in (True, False):
            p = problem(bias=True).cast(torch.float64)
            t = torch.tensor(2.0, dtype=torch.float64, requires_grad=learned)
            out = run(p, targets_for(p, rule), t, rule, divergence=divergence, at_one=at_one)
            assert (out.kd_at_one > 0) == at_one
            found.append([out.loss, out.kd, *torch.autograd.grad(out.loss, p.leaves())])
    for other in found[1:]:
        for got, want in zip(other, found[0], strict=True):
            torch.testing.assert_close(got, want, rtol=1e-13, atol=1e-15)


@pytest.mark.parametrize("rule", [rule for rule in RULES if rule != "dense"])
def test_at_a_fixed_temperature_of_1_a_chunk_has_one_divergence_where_the_host_may_read_no_number_too(
    monkeypatch, rule
):
    calls, entry = [], DIVERGENCES.get("forward-kl")

    def counted(events, number):
        calls.append(len(events.student))
        return entry.of(events, number)

    monkeypatch.setitem(DIVERGENCES.entries, "forward-kl", replace(entry, of=counted))
    monkeypatch.setattr(engine, "chunk_rows", lambda *_: 8)
    loss, found = DistillationLoss(alpha=0.9, tail=tail_of(rule)), []
    for read in (True, False):
        monkeypatch.setattr(engine, "readable", lambda tensor, read=read: read)
        p = problem().cast(torch.float32)
        calls.clear()
        targets = targets_for(p, rule, torch.float32)
        out = loss(p.hidden, p.head, p.labels, p.mask, targets, vocab_size=p.vocab_size, normalizer=11.0)
        assert calls.count(8) == len(p.labels) / 8
        found.append([*out, *torch.autograd.grad(out.loss, p.leaves())])
    assert all(torch.equal(one, other) for one, other in zip(*found, strict=True))
