"""How far a student's distribution q is from its teacher's p: divergences over common events.

    forward-kl       sum p log(p/q)                       Hinton et al. 2015, arXiv 1503.02531
    reverse-kl       sum q log(q/p)                       MiniLLM, arXiv 2306.08543, eq. 1
    jsd              b KL(p || m) + (1 - b) KL(q || m),   generalised Jensen-Shannon: GKD, arXiv 2306.13649, eq. 1,
                     m = b p + (1 - b) q                  with b = --jsd-beta
    skew-kl          KL(p || a p + (1 - a) q)             DistiLLM, arXiv 2402.03898, eq. 4, a = --skew-alpha
    skew-reverse-kl  KL(q || (1 - a) p + a q)             the same, eq. 5
    tvd              1/2 sum |p - q|                      f-DISTILL, arXiv 2307.15190, section 3.2
    logit-mse        mean over V of squared differences   Ba & Caruana 2014, arXiv 1312.6184; arXiv 2105.08919
                     of beta times the centred logits

All are in nats (tvd is in 0 to 1, logit-mse in squared nats), 0 where p = q, and taken at the temperature of both
sides. All but tvd shrink as 1/T^2 when T grows, and the factor T^2 of the loss gives that back; T^2 tvd grows with
T. T^2 logit-mse does not depend on T. tvd has a kink at p = q: its gradient there is of the size of q, and its
sign is rounding.

`tails` says what the events are, `refuse` what goes together. No value is clamped.

Shape suffixes: R rows, E events.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from kdtrain.errors import UsageError
from kdtrain.objective.tails import TAIL_RULES, Events, resolve_tail

_IMPOSSIBLE = -1e3
"""Log-probability below which a token counts as excluded (-inf padding); no squared difference is made of it."""


@dataclass(frozen=True)
class Divergence:
    """A divergence, and the kinds of targets it can be computed from: sparse, dense, sampled."""

    of: Callable[[Events, float], Tensor]
    """Events [R,E] and its parameter (ignored where it has none) -> [R]."""
    accepts: frozenset[str]
    parameter: str | None = None
    """The name of its parameter in options and arguments, in (0, 1)."""


def forward_kl(events: Events, parameter: float = 0.0) -> Tensor:
    """KL(p || q) = sum_e p_e (log p_e - log q_e), [R] in nats.

    Events of weight 0 add nothing, whatever their finite log-probabilities.
    """
    weight_RE = events.teacher.exp() if events.weight is None else events.weight
    over_events_R = (weight_RE * (events.teacher - events.student)).sum(-1)
    return over_events_R if events.missed is None else over_events_R + events.missed


def reverse_kl(events: Events, parameter: float = 0.0) -> Tensor:
    """KL(q || p) = sum_e q_e (log q_e - log p_e), [R] in nats."""
    return _kl(events.student, events.teacher)


def jsd(events: Events, parameter: float) -> Tensor:
    """b KL(p || m) + (1 - b) KL(q || m) with m = b p + (1 - b) q and b = `parameter`, [R] in nats.

    As b goes to 0 (1) it falls to 0, and divided by b (1 - b) it goes to forward (reverse) KL.
    """
    mixed_RE = _mixture(events.teacher, events.student, parameter)
    return parameter * _kl(events.teacher, mixed_RE) + (1 - parameter) * _kl(events.student, mixed_RE)


def skew_kl(events: Events, parameter: float) -> Tensor:
    """KL(p || a p + (1 - a) q) with a = `parameter`, [R] in nats; at most -log a, wherever q is 0."""
    return _kl(events.teacher, _mixture(events.teacher, events.student, parameter))


def skew_reverse_kl(events: Events, parameter: float) -> Tensor:
    """KL(q || (1 - a) p + a q) with a = `parameter`, [R] in nats; at most -log a, wherever p is 0."""
    return _kl(events.student, _mixture(events.student, events.teacher, parameter))


def tvd(events: Events, parameter: float = 0.0) -> Tensor:
    """Total variation distance 1/2 sum_e |p_e - q_e|, [R] in 0 to 1."""
    return 0.5 * (events.teacher.exp() - events.student.exp()).abs().sum(-1)


def logit_mse(events: Events, parameter: float = 0.0) -> Tensor:
    """Mean over tokens of (x_e - mean x)^2 with x = log q - log p, [R] in squared nats.

    A log-probability is a scaled logit up to a constant of its row, which no distribution shows and centring removes.
    """
    counts_RE = (events.teacher > _IMPOSSIBLE) & (events.student > _IMPOSSIBLE)
    number_R1 = counts_RE.sum(-1, keepdim=True).clamp(min=1)
    gap_RE = (events.student - events.teacher).masked_fill(~counts_RE, 0.0)
    centred_RE = (gap_RE - gap_RE.sum(-1, keepdim=True) / number_R1).masked_fill(~counts_RE, 0.0)
    return (centred_RE**2 / number_R1).sum(-1)


def refuse(divergence: str, tail: str, *, top_k: int = 0, num_samples: int = 0, dense: bool = False) -> None:
    """Raise a `UsageError` where `divergence` with `tail` cannot be had from targets of this kind."""
    _refuse_unknown("--divergence", divergence, list(DIVERGENCES))
    _refuse_unknown("--tail", tail, list(TAIL_RULES))
    kind = "dense" if dense else "sampled" if num_samples else "sparse"
    if kind not in DIVERGENCES[divergence].accepts:
        raise UsageError(_refusal(divergence, kind))
    if dense:
        if tail != "ghost":
            raise UsageError(f"--tail {tail} means nothing for dense targets, which have no tail; leave --tail out")
        return
    rule = TAIL_RULES[resolve_tail(tail, num_samples)]
    if num_samples and not rule.needs_samples:
        raise UsageError(
            f"--tail {tail} would throw away the {num_samples} samples a token of these targets; leave --tail out, "
            "or use a cache built with --num-samples 0"
        )
    if not num_samples and rule.needs_samples:
        raise UsageError(f"--tail {tail} needs a cache with samples; use --tail ghost, or build one with --num-samples")
    if top_k < rule.least_top_k:
        raise UsageError(
            f"--tail {tail} needs targets with a top-k of at least {rule.least_top_k}, these have {top_k}; use "
            "a cache built with a larger --top-k, or with --num-samples and the default tail"
        )


def parameter_of(divergence: str, **given: float) -> float:
    """The parameter of `divergence` out of all that were given by name; 0 where it has none.

    Raises:
        UsageError: it does not lie between 0 and 1.
    """
    _refuse_unknown("--divergence", divergence, list(DIVERGENCES))
    name = DIVERGENCES[divergence].parameter
    if name is None:
        return 0.0
    if not 0 < given[name] < 1:
        raise UsageError(f"--{name.replace('_', '-')} {given[name]:g} must lie between 0 and 1, both excluded")
    return given[name]


def _refusal(divergence: str, kind: str) -> str:
    able = ", ".join(name for name, entry in DIVERGENCES.items() if kind in entry.accepts)
    sources = {
        "sparse": "a cache built with --num-samples 0",
        "dense": "a dense cache (cache-teacher --dense) or an online --teacher",
    }
    others = " or ".join(text for each, text in sources.items() if each in DIVERGENCES[divergence].accepts)
    return f"--divergence {divergence} cannot be computed from {kind} targets; use {able}, or {others}"


def _refuse_unknown(option: str, name: str, known: list[str]) -> None:
    if name not in known:
        near = difflib.get_close_matches(name, known, 1)
        hint = f"; did you mean {near[0]}?" if near else ""
        raise UsageError(f"{option} {name} is unknown, there are {', '.join(known)}{hint}")


def _kl(from_RE: Tensor, to_RE: Tensor) -> Tensor:
    return (from_RE.exp() * (from_RE - to_RE)).sum(-1)


def _mixture(first_RE: Tensor, second_RE: Tensor, share: float) -> Tensor:
    """log(share * exp(first) + (1 - share) * exp(second)), bounded where both are as good as 0.

    A log-add-exp would need two more exponentials of what is exponentiated anyway.
    """
    mixed_RE = share * first_RE.exp() + (1 - share) * second_RE.exp()
    return mixed_RE.clamp_min(torch.finfo(mixed_RE.dtype).tiny).log()


_PLAIN = frozenset({"sparse", "dense"})

DIVERGENCES = {
    "forward-kl": Divergence(forward_kl, _PLAIN | {"sampled"}),
    "reverse-kl": Divergence(reverse_kl, _PLAIN),
    "jsd": Divergence(jsd, _PLAIN, "jsd_beta"),
    "skew-kl": Divergence(skew_kl, _PLAIN, "skew_alpha"),
    "skew-reverse-kl": Divergence(skew_reverse_kl, _PLAIN, "skew_alpha"),
    "tvd": Divergence(tvd, _PLAIN),
    "logit-mse": Divergence(logit_mse, frozenset({"dense"})),
}
"""By the name that `--divergence` takes."""
