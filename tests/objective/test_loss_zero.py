"""Where the loss is zero, where it is negative, and the loss without a teacher."""

import dataclasses

import pytest
import torch
from objective_cases import OTHERS, RULES, gradients, run, targets_for
from objective_reference import HeadPart, problem

from kdtrain.config.choices import DIVERGENCES


@pytest.mark.parametrize("T", [1.0, 2.0, 4.0])
@pytest.mark.parametrize("rule", RULES)
def test_kd_is_zero_when_student_and_teacher_are_equal(rule, T):
    p = problem().cast(torch.float32)
    p.energies = torch.log_softmax(p.logits().detach().double(), -1)
    t = torch.tensor(T, requires_grad=True)
    out = run(p, targets_for(p, rule, torch.float32), t, rule, alpha=1.0, normalizer=1.0)
    # Rounding of an fp32 log-probability, a token; nothing is clamped, so the sum may be a little below 0.
    assert abs(out.kd.item()) < 2e-6 * p.mask.sum().item()
    assert abs(out.kd_at_one.item()) < 2e-6 * p.mask.sum().item()
    hidden = torch.autograd.grad(out.loss, p.hidden)[0].abs().max().item()
    if rule in ("dense", "ghost", "renormalize") or rule.startswith("control-variate"):
        assert hidden < 1e-5
    elif rule == "drop":
        assert hidden > 1e-2, "drop is zero in value at the teacher, and yet no minimum"


@pytest.mark.parametrize("divergence,rule", OTHERS)
def test_every_divergence_is_zero_without_gradient_for_equal_models(divergence, rule):
    p = problem().cast(torch.float64)
    p.energies = torch.log_softmax(p.logits().detach(), -1)
    t = torch.tensor(2.0, dtype=torch.float64, requires_grad=True)
    out = run(p, targets_for(p, rule), t, rule, alpha=1.0, normalizer=1.0, divergence=divergence)
    assert abs(out.kd.item()) < 1e-12 and abs(out.kd_at_one.item()) < 1e-12
    hidden, *_ = gradients(out.loss, p, t)
    if divergence == "tvd":
        assert hidden.abs().max() < 10, "its gradient has a kink there"
    elif rule != "drop" or divergence == "jsd":
        assert hidden.abs().max() < 1e-12


@pytest.mark.parametrize("divergence", [name for name in DIVERGENCES.builtin if name != "logit-mse"])
def test_merging_the_tail_into_one_event_loses_and_never_adds(divergence):
    p = problem(n=200).cast(torch.float64)
    whole, merged = (
        run(p, targets_for(p, rule), 2.0, rule, alpha=1.0, divergence=divergence).kd for rule in ("dense", "ghost")
    )
    assert 0 < merged < whole


def test_drop_falls_below_zero_when_the_students_tail_starves():
    p = problem().cast(torch.float64)
    p.hidden, p.head = p.energies.clone(), HeadPart(None)
    targets = targets_for(p, "drop")
    outside = torch.ones_like(p.energies).scatter(1, targets.ids, 0.0).bool()
    p.hidden[outside] -= 50.0
    mass = targets.logprobs.exp().sum(-1)[p.mask]
    assert run(p, targets, 1.0, "drop", alpha=1.0).kd.item() == pytest.approx((mass * mass.log()).sum().item())


@pytest.mark.parametrize("rule", RULES)
def test_kd_at_one_is_the_divergence_at_temperature_one(rule):
    p = problem().cast(torch.float64)
    warm, one = (run(p, targets_for(p, rule), T, rule) for T in (4.0, 1.0))
    torch.testing.assert_close(warm.kd_at_one, one.kd)
    torch.testing.assert_close(one.kd_at_one, one.kd)


@pytest.mark.parametrize("alpha,with_targets", [(0.0, True), (0.7, False)])
def test_alpha_zero_or_no_targets_is_plain_cross_entropy(alpha, with_targets):
    p = problem(bias=True, softcap=4.0).cast(torch.float64)
    out = run(p, targets_for(p, "ghost") if with_targets else None, 2.0, "ghost", alpha, p.mask.sum())
    expected = torch.nn.functional.cross_entropy(p.logits()[p.mask], p.labels[p.mask])
    torch.testing.assert_close(out.loss, expected)
    for got, want in zip(
        torch.autograd.grad(out.loss, p.leaves()), torch.autograd.grad(expected, p.leaves()), strict=True
    ):
        torch.testing.assert_close(got, want)
    assert out.kd.item() == 0


@pytest.mark.parametrize("rule", ["ghost", "drop", "renormalize"])
def test_absent_entries_in_the_top_k_change_nothing(rule):
    p = problem().cast(torch.float64)
    targets = targets_for(p, rule)
    n, wide = len(targets), {"top_k": targets.top_k + 2}
    for name, filler in (("ids", p.vocab_size + 100), ("logprobs", -0.5), ("counts", 0.0)):
        x = getattr(targets, name)
        wide[name] = torch.cat([x, torch.full((n, 2), filler, dtype=x.dtype)], 1)
    t = torch.tensor(2.0, dtype=torch.float64, requires_grad=True)
    out, same = run(p, targets, t, rule), run(p, dataclasses.replace(targets, **wide), t, rule)
    for got, want in zip(gradients(same.loss, p, t), gradients(out.loss, p, t), strict=True):
        torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-13)
    assert same.kd.item() == pytest.approx(out.kd.item(), rel=1e-12)
