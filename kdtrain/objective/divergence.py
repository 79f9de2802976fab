"""How far a student's distribution q is from its teacher's p: divergences over common events.

    forward-kl       sum p log(p/q)                       Hinton et al. 2015, arXiv 1503.02531
    reverse-kl       sum q log(q/p)                       MiniLLM, arXiv 2306.08543, eq. 1
    jsd              b KL(p || m) + (1 - b) KL(q || m),   generalised Jensen-Shannon: GKD, arXiv 2306.13649, eq. 1,
                     m = b p + (1 - b) q                  with b of jsd:b, 0.5 unless given
    skew-kl          KL(p || a p + (1 - a) q)             DistiLLM, arXiv 2402.03898, eq. 4, a of skew-kl:a, 0.1
    skew-reverse-kl  KL(q || (1 - a) p + a q)             the same, eq. 5
    tvd              1/2 sum |p - q|                      f-DISTILL, arXiv 2307.15190, section 3.2
    logit-mse        mean over V of squared differences   Ba & Caruana 2014, arXiv 1312.6184; arXiv 2105.08919
                     of beta times the centred logits

All are in nats (tvd is in 0 to 1, logit-mse in squared nats), 0 where p = q, and taken at the temperature of both
sides. All but tvd shrink as 1/T^2 when T grows, which the factor T^2 of the loss compensates; T^2 tvd grows with
T. T^2 logit-mse does not depend on T. tvd has a kink at p = q: its gradient there is of the size of q, and its
sign is rounding.

`tails` defines the events; `refuse` raises on divergences, tail rules and targets that do not fit together. No value is
clamped. `register_divergence` adds a divergence.

Shape suffixes: R rows, E events, V vocabulary.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import Tensor

from kdtrain.config.choices import DIVERGENCES, GROWS_WITH_T, IGNORES_T, TAILS, resolve_tail
from kdtrain.errors import UsageError
from kdtrain.objective.statistics import Events, Statistics
from kdtrain.objective.tails import TailRule
from kdtrain.objective.targets import Supervision

_IMPOSSIBLE = -1e3
"""A token with a log-probability below it counts as excluded (-inf padding), and is left out of logit-mse."""


Measure = Callable[[Events, float], Tensor]
"""Events [R,E] and the divergence's number (0 where it takes none) -> [R], differentiable in the events."""
Derivatives = Callable[[Tensor, Tensor, float], tuple[Tensor, Tensor, Tensor]]
"""log p, log q [R,E] and the number -> the divergence [R], its gradient in log q and in log p, [R,E]."""
OfLabel = Callable[[Statistics, Supervision], Tensor]
"""The student's statistics at T = 1, and the rows -> [R], differentiable in the statistics."""
F = TypeVar("F", bound=Measure)


@dataclass(frozen=True)
class Divergence:
    """A divergence, and the kinds of targets it can be computed from: sparse, dense, sampled."""

    of: Measure
    accepts: frozenset[str]
    parameter: float | None = None
    """The default of its number, in (0, 1); None if it takes none."""
    derivatives: Derivatives | None = None
    """Its value and gradients by hand; None: by autograd."""
    of_label: OfLabel | None = None
    """The term of each row by the label that the student drew, in place of `of`; None: it compares events."""

    def number(self, text: str) -> float:
        """Return the number in `text`, which is NAME or NAME:NUMBER; without one the default, or 0 if there is none.

        Raises:
            UsageError: the number is not between 0 and 1, or the divergence takes none.
        """
        name, colon, given = text.partition(":")
        if not colon:
            return self.parameter or 0.0
        if self.parameter is None:
            raise UsageError(f"--divergence {name} takes no number; leave out ':{given}'")
        try:
            number = float(given)
        except ValueError:
            number = float("nan")
        if not 0 < number < 1:
            raise UsageError(f"--divergence {text}: '{given}' is not a number between 0 and 1, both excluded")
        return number


def register_divergence(
    name: str,
    *,
    accepts: Iterable[str] = ("sparse", "dense"),
    parameter: float | None = None,
    depends_on_temperature: bool = True,
    grows_with_temperature: bool = False,
    derivatives: Derivatives | None = None,
    help: str = "",
) -> Callable[[F], F]:
    """Return a decorator that makes a function the divergence that `--divergence NAME` takes.

    The function takes the `Events` of R rows and the number, and returns a value a row, [R]: the loss sums and divides.

    Args:
        name: as users write it; with a `parameter` also as NAME:NUMBER.
        accepts: kinds of targets it can be computed from: sparse, dense, sampled; with drawn it also needs the draws of
            the student.
        parameter: the default of its number, between 0 and 1; None for a divergence that takes none.
        depends_on_temperature: whether T^2 times it depends on T; if not, no T can be learned with it.
        grows_with_temperature: whether T^2 times it grows with T without limit over whole distributions; if so, no T
            is sought there that makes the loss large.
        derivatives: value and gradients over whole distributions by hand, where autograd is slower.
        help: its line in `--help`; by default the first of the docstring.
    """
    traits = [] if depends_on_temperature else [IGNORES_T]
    if grows_with_temperature:
        traits.append(GROWS_WITH_T)
    kinds = frozenset(accepts)
    return DIVERGENCES.registers(name, help, lambda of: Divergence(of, kinds, parameter, derivatives), traits)


def parse(text: str) -> tuple[str, float]:
    """Parse the divergence that `--divergence` means: its name and its number, 0 where it takes none."""
    name = text.partition(":")[0] if isinstance(text, str) else text
    return name, DIVERGENCES.get(name).number(text)


@register_divergence("forward-kl", accepts=("sparse", "dense", "sampled"))
def forward_kl(events: Events, parameter: float = 0.0) -> Tensor:
    """Return KL(p || q) = sum_e p_e (log p_e - log q_e), [R] in nats.

    Events of weight 0 add nothing, whatever their finite log-probabilities.
    """
    weight_RE = events.teacher.exp() if events.weight is None else events.weight
    over_events_R = (weight_RE * (events.teacher - events.student)).sum(-1)
    return over_events_R if events.missed is None else over_events_R + events.missed


@register_divergence("reverse-kl")
def reverse_kl(events: Events, parameter: float = 0.0) -> Tensor:
    """Return KL(q || p) = sum_e q_e (log q_e - log p_e), [R] in nats."""
    return _kl(events.student, events.teacher)


def _jsd_derivatives(log_p_RV: Tensor, log_q_RV: Tensor, share: float) -> tuple[Tensor, Tensor, Tensor]:
    """Compute a divergence with its derivatives in half of autograd's time, which computes terms that cancel.

    The terms are from the logarithm of the mixture m. g = (1 - b) q log(q/m) in log q and h = b p log(p/m) in
    log p add up to the divergence.
    """
    p_RV, q_RV = log_p_RV.exp(), log_q_RV.exp()
    mixed_RV = (share * p_RV + (1 - share) * q_RV).clamp_min(torch.finfo(p_RV.dtype).tiny).log()
    g_RV, h_RV = (1 - share) * q_RV * (log_q_RV - mixed_RV), share * p_RV * (log_p_RV - mixed_RV)
    return (g_RV + h_RV).sum(1), g_RV, h_RV


@register_divergence("jsd", parameter=0.5, derivatives=_jsd_derivatives)
def jsd(events: Events, parameter: float) -> Tensor:
    """Return b KL(p || m) + (1 - b) KL(q || m) with m = b p + (1 - b) q and b = `parameter`, [R] in nats.

    As b goes to 0 (1) it falls to 0, and divided by b (1 - b) it goes to forward (reverse) KL.
    """
    mixed_RE = _mixture(events.teacher, events.student, parameter)
    return parameter * _kl(events.teacher, mixed_RE) + (1 - parameter) * _kl(events.student, mixed_RE)


@register_divergence("skew-kl", parameter=0.1)
def skew_kl(events: Events, parameter: float) -> Tensor:
    """Return KL(p || a p + (1 - a) q) with a = `parameter`, [R] in nats; at most -log a, wherever q is 0."""
    return _kl(events.teacher, _mixture(events.teacher, events.student, parameter))


@register_divergence("skew-reverse-kl", parameter=0.1)
def skew_reverse_kl(events: Events, parameter: float) -> Tensor:
    """Return KL(q || (1 - a) p + a q) with a = `parameter`, [R] in nats; at most -log a, wherever p is 0."""
    return _kl(events.student, _mixture(events.student, events.teacher, parameter))


@register_divergence("tvd")
def tvd(events: Events, parameter: float = 0.0) -> Tensor:
    """Return the total variation distance 1/2 sum_e |p_e - q_e|, [R] in 0 to 1."""
    return 0.5 * (events.teacher.exp() - events.student.exp()).abs().sum(-1)


@register_divergence("logit-mse", accepts=("dense",))
def logit_mse(events: Events, parameter: float = 0.0) -> Tensor:
    """Return the mean over tokens of (x_e - mean x)^2 with x = log q - log p, [R] in squared nats.

    A log-probability is a scaled logit up to a constant of its row, which no distribution shows and centring removes.
    A token below -1,000 nats on either side counts as excluded: it is in no mean and has no gradient.
    """
    counts_RE = (events.teacher > _IMPOSSIBLE) & (events.student > _IMPOSSIBLE)
    number_R1 = counts_RE.sum(-1, keepdim=True).clamp(min=1)
    gap_RE = (events.student - events.teacher).masked_fill(~counts_RE, 0.0)
    centred_RE = (gap_RE - gap_RE.sum(-1, keepdim=True) / number_R1).masked_fill(~counts_RE, 0.0)
    return (centred_RE**2 / number_R1).sum(-1)


def refuse(divergence: str, tail: str, *, top_k: int = 0, num_samples: int = 0, dense: bool = False) -> None:
    """Raise a UsageError if `divergence` with `tail` does not fit targets of this kind, or returns no value a row."""
    name, number = parse(divergence)
    returned = None if torch.compiler.is_compiling() else _wrong_shape(DIVERGENCES.get(name).of, number)
    if returned is not None:
        raise UsageError(
            f"--divergence {divergence} returns {returned} for 3 rows of events; it must return [3], a value per row, "
            "because the loss leaves out masked rows, sums and divides by the tokens of the whole step itself"
        )
    rule: TailRule = TAILS.get(resolve_tail(tail, num_samples))
    kind = "sampled" if num_samples else "sparse"
    if dense:
        kind = "dense"
    if kind not in DIVERGENCES.get(name).accepts:
        fitting = (each for each, entry in DIVERGENCES.entries.items() if {kind, "drawn"} & entry.accepts == {kind})
        able = ", ".join(fitting)  # but one of drawn tokens, which this text may lack
        sources = {
            "sparse": "a cache built with --top-k and without --num-samples",
            "dense": "a dense cache (cache-teacher --dense) or an online --teacher",
        }
        others = " or ".join(text for each, text in sources.items() if each in DIVERGENCES.get(name).accepts)
        raise UsageError(f"--divergence {name} cannot be computed from {kind} targets; use {able}, or {others}")
    if dense:
        if tail != "ghost":
            raise UsageError(f"--tail {tail} means nothing for dense targets, which have no tail; leave --tail out")
        return
    if num_samples and not rule.needs_samples:
        raise UsageError(
            f"--tail {tail} would throw away the {num_samples} samples per token of these targets; leave --tail out, "
            "or use a cache built with --top-k and without --num-samples"
        )
    if not num_samples and rule.needs_samples:
        raise UsageError(
            f"--tail {tail} needs a cache with samples; use --tail ghost, or build one with --top-k and --num-samples"
        )
    if top_k < rule.least_top_k:
        raise UsageError(
            f"--tail {tail} needs targets with a top-k of at least {rule.least_top_k}, these have {top_k}; leave "
            f"--tail out, or use a cache built with --top-k{' and --num-samples' if rule.needs_samples else ''}"
        )


@functools.lru_cache
def adds_up(divergence: str) -> bool:
    """Return whether `divergence` over all tokens is the sum of it over some and over the others."""
    name, number = parse(divergence)
    chance = torch.Generator().manual_seed(0)
    log_p_RE, log_q_RE = torch.randn(2, 3, 64, dtype=torch.float64, generator=chance).log_softmax(-1)
    whole_R, one_R, other_R = (
        DIVERGENCES.get(name).of(Events(log_p_RE[:, part], log_q_RE[:, part]), number)
        for part in (slice(None), slice(20), slice(20, None))
    )
    return torch.allclose(whole_R, one_R + other_R)


@functools.lru_cache
def _wrong_shape(of: Measure, number: float) -> str | None:
    """Return the shape that a divergence returns for three rows; None if it is a value a row, or an error is raised."""
    log_p_RE = torch.full((3, 64), -math.log(64))
    try:
        with torch.no_grad():
            found: object = of(Events(log_p_RE, log_p_RE, log_p_RE.exp(), log_p_RE.new_zeros(3)), number)
    except Exception:
        return None
    shape = list(found.shape) if isinstance(found, Tensor) else f"a {type(found).__name__}"
    return None if shape == [3] else str(shape)


def _kl(from_RE: Tensor, to_RE: Tensor) -> Tensor:
    return (from_RE.exp() * (from_RE - to_RE)).sum(-1)


def _mixture(first_RE: Tensor, second_RE: Tensor, share: float) -> Tensor:
    """Return log(share * exp(first) + (1 - share) * exp(second)), bounded below where both are almost 0.

    A log-add-exp would need two more exponentials.
    """
    mixed_RE = share * first_RE.exp() + (1 - share) * second_RE.exp()
    return mixed_RE.clamp_min(torch.finfo(mixed_RE.dtype).tiny).log()
