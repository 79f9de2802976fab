"""Every divergence with every kind of targets, and the loss of a problem by the engine and by the reference."""

import torch
from objective_reference import dense, reference_loss, sparse

from kdtrain.config.choices import DIVERGENCES
from kdtrain.objective.loss import distillation_loss

SAMPLED = ["sampled", "sampled-headless", "control-variate"]
RULES = ["dense", "ghost", "drop", "renormalize", *SAMPLED]
OTHERS = [
    (name, rule)
    for name, entry in DIVERGENCES.entries.items()
    for rule in ("dense", "ghost", "drop", "renormalize")
    if name != "forward-kl"
    and "drawn" not in entry.accepts
    and ("dense" if rule == "dense" else "sparse") in entry.accepts
]
EVERY = [*(("forward-kl", rule) for rule in RULES), *OTHERS]
"""Divergence and kind of targets, all that go together."""


def targets_for(p, rule, dtype=torch.float64):
    if rule == "dense":
        return dense(p.energies, p.labels, dtype)
    if rule in SAMPLED:
        return sparse(p.energies, p.labels, top_k=0 if "headless" in rule else 3, num_samples=20, dtype=dtype)
    return sparse(p.energies, p.labels, top_k=5, dtype=dtype)


def tail_of(rule):
    rule = rule.removesuffix("-headless")
    return rule if rule in ("drop", "renormalize", "control-variate") else "ghost"


def run(p, targets, temperature, rule, alpha=0.7, normalizer=11.0, **more):
    return distillation_loss(
        p.hidden,
        p.head,
        p.labels,
        p.mask,
        targets,
        temperature=temperature,
        alpha=alpha,
        tail=tail_of(rule),
        vocab_size=p.vocab_size,
        normalizer=normalizer,
        **more,
    )


def with_number(divergence, number):
    """Append the number to a divergence that takes one."""
    return divergence if DIVERGENCES.get(divergence).parameter is None else f"{divergence}:{number}"


def gradients(loss, p, temperature):
    return torch.autograd.grad(loss, [*p.leaves(), temperature])


def assert_agrees(p64, rule, dtype, T, rtol, alpha=0.7, divergence="forward-kl", **more):
    """Assert that value, sums and all gradients of the engine in `dtype` agree with the fp64 reference."""
    reference, ours = p64.cast(torch.float64), p64.cast(dtype)
    t_reference = torch.tensor(T, dtype=torch.float64, requires_grad=True)
    t = torch.tensor(T, dtype=dtype, requires_grad=True)
    rule_name, parameter = rule.removesuffix("-headless"), 0.3
    expected, ce, kd = reference_loss(
        reference, t_reference, alpha, rule_name, targets_for(p64, rule), 11.0, divergence, parameter
    )
    more |= {"divergence": with_number(divergence, parameter)}
    out = run(ours, targets_for(p64, rule, dtype), t, rule, alpha, **more)
    for got, want in ((out.loss, expected), (out.ce, ce), (out.kd, kd)):
        assert abs(got.item() - want.item()) <= rtol * max(1.0, abs(want.item()))
    assert out.tokens.item() == p64.mask.sum().item()
    *got, got_t = gradients(out.loss, ours, t)
    *want, want_t = gradients(expected, reference, t_reference)
    for g, w in zip(got, want, strict=True):
        assert g.dtype == dtype
        assert (g.double() - w).norm() <= rtol * w.norm()
    # In log T, where it is a difference of terms as large as the loss.
    assert T * abs(got_t.item() - want_t.item()) <= rtol * max(abs(expected.item()), T * abs(want_t.item()))
