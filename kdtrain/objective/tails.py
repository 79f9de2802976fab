"""The events over which teacher and student are compared, and the rules for the tail.

A divergence gets log-probabilities of the same events under both sides, at the same inverse temperature
beta = 1/T. For dense targets the events are the V tokens. For sparse ones a tail rule defines them; with
p_k, q_k the true probabilities at beta (the teacher's from the cached log-partition):

ghost        the top-k's entries and one bucket for all the rest: p_tail = exp(L(beta)) / Z(beta) against the
             student's own mass outside the top-k (the ghost token of Sparse Logit Sampling, ACL 2025, arXiv
             2503.16870, with the mass right at every T). Every divergence is 0 with zero gradient for student =
             teacher; merging events can only lose some of an f-divergence, which is then a lower bound.
drop         the top-k's entries only, with true masses. student = teacher is no minimum: with P the top-k's mass, the
             gradient there is beta q_j P in the tail, which starves, and beta q_j (P - 1) in the top-k.
renormalize  both sides divided by their mass in the top-k: blind to what the student puts elsewhere (some
             implementations divide the teacher's alone). 0 with zero gradient for student = teacher.
sampled      top-k entries with weight p_k, drawn entries with weight
                 w_k = p_tail(1) (c_k / n) p_k(1)^(beta - 1) / Z(beta),
             the importance weight of c_k of n samples from the tail at T = 1 (at top-k 0, p_tail(1) = 1 and the
             tail is everything: random-sampling KD, arXiv 2503.16870). sum w (log p - log q) estimates the full
             forward KL without bias at every T, value and gradient. Any other divergence needs q at all tokens with a
             weight of its own, which samples from p do not give.
control-variate  the ghost bucket, corrected inside by the samples, as below. Forward KL only, like
             `sampled`; its noise falls with the student's distance from the teacher.

Targets with samples need one of the last two: the default `ghost` means `sampled` for them.

The correction of `control-variate`. Inside the tail the ghost bucket assumes the teacher to be p^_j = r q_j with
r = p_tail / q_tail, and misses a divergence there,
    KL(p || q) = KL over top-k and bucket + sum_{j in tail} p_j (-log x_j),   x_j = r q_j / p_j,
estimated from the samples, each of chance pi_k. As sum_{j in tail} p_j (x_j - 1) = 0, any share s of that sum
may be added, a control variate, if s does not depend on the samples:
    sum_k (c_k / n) (p_k / pi_k) (s (x_k - 1) - log x_k).
In z_j of the tail the gradient is that of the bucket plus (c_j / n) (s r q_j - p_j) / pi_j, and something shaped like
the student's tail that makes the sum of these 0; the top-k's has no noise. At s = 1 the noise goes to 0 with the
student's error; s = 0 is plain sampling inside the bucket.

Far from the teacher r q_k / pi_k has no bound, and neither has p_k / pi_k above T = 1, as samples are drawn at T = 1:
    s = exp(-4 d), where d is KL over top-k and bucket at T = 1;
    x counts as at most 4, along the tangent in log x: a draw's weight is then at most 3 times that of plain sampling;
    (p_k / p_tail) / pi_k, which is 1 at T = 1, counts as at most sqrt(n) (truncated importance sampling, Ionides 2008,
    J. Comput. Graph. Stat. 17(2)), so that the bias vanishes as samples are added.
It is unbiased, in value, gradient and slope in T, if r q_j <= 4 p_j and p_j <= sqrt(n) p_tail pi_j for every j of the
tail (the second always holds at T = 1), whatever s is. With a top-k the bias of the first falls with s away from the
teacher; at the teacher there is none. No gradient goes through s, so that the gradient is not that of the value.
Without a top-k no bucket measures the distance, and the rule is refused; see benchmarks/science/fidelity.md.

Shape suffixes: R rows, E events, K kept entries, H top-k entries, D drawn entries, V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from kdtrain.config.choices import TAILS
from kdtrain.objective.statistics import Events, Statistics
from kdtrain.objective.targets import SparseTargets

_CLIP, _SHARPNESS = 4.0, 4.0
"""Of `control-variate`: the bound of r q / p, and how fast the share falls, in 1/nats."""


def clipped_excess(log_ratio: Tensor) -> Tensor:
    """Return x - 1 as a function of log x; above `_CLIP` its tangent in log x."""
    inside = log_ratio.clamp(max=math.log(_CLIP))
    return torch.expm1(inside) + _CLIP * (log_ratio - inside)


TailEvents = Callable[[SparseTargets, Statistics, Tensor], Events]
"""Targets of R rows, the student's row sums and logits for them, and beta (scalar) -> events [R,E]."""


@dataclass(frozen=True)
class TailRule:
    """The events of sparse targets, and which targets they can be computed from."""

    events: TailEvents
    least_top_k: int
    needs_samples: bool


def register_tail(
    name: str, *, least_top_k: int = 1, needs_samples: bool = False, help: str = ""
) -> Callable[[TailEvents], TailEvents]:
    """Return a decorator that makes a function the rule that `--tail NAME` takes.

    Args:
        name: as users write it.
        least_top_k: the least top-k of the targets.
        needs_samples: True for a rule of targets with samples, False for one of targets without.
        help: its line in `--help`; by default the first of the docstring.
    """
    return TAILS.registers(name, help, lambda events: TailRule(events, least_top_k, needs_samples))


@register_tail("drop")
def _drop_events(targets: SparseTargets, statistics: Statistics, beta: Tensor) -> Events:
    student_RH = beta * statistics.kept[:, : targets.top_k] - statistics.lse_beta(beta)[:, None]
    return Events(targets.top_logprobs(beta), student_RH)


@register_tail("ghost")
def _ghost_events(targets: SparseTargets, statistics: Statistics, beta: Tensor) -> Events:
    top = _drop_events(targets, statistics, beta)
    teacher_R = targets.log_tail(beta) - targets.log_partition(beta)
    student_R = statistics.tail_beta - statistics.lse_beta(beta)
    teacher_RE = torch.cat([top.teacher, teacher_R[:, None]], dim=-1)
    student_RE = torch.cat([top.student, student_R[:, None]], dim=-1)
    if targets.partial is not None:
        teacher_RE = _nearest(teacher_RE, student_RE.detach(), targets.partial > 0)
    return Events(teacher_RE, student_RE)


def _nearest(teacher_RE: Tensor, student_RE: Tensor, partial_RK: Tensor) -> Tensor:
    """Return the log-probabilities of the teacher nearest to the student in KL.

    Of all teachers it is one that has at least the stated probabilities where `partial_RK`, exactly these in other
    entries, and the rest in the last event, the tail.

    That is max(p, r q) and r q of the tail. Filling up from the tail, r is the least of (sum of p) / (sum of q) over it
    and the entries of the least p / q.
    """
    ratio_RK = (teacher_RE - student_RE)[:, :-1].masked_fill(~partial_RK, torch.inf)
    ratio_RK, order_RK = ratio_RK.sort(dim=1)

    def summed(each_RE: Tensor) -> Tensor:
        return torch.cat([each_RE[:, -1:], each_RE[:, :-1].gather(1, order_RK)], 1).logcumsumexp(1)

    level_RE = summed(teacher_RE) - summed(student_RE)
    level_RE[:, 1:] = level_RE[:, 1:].masked_fill(ratio_RK.isinf(), torch.inf)
    least_R1 = level_RE.amin(1, keepdim=True)
    named_RK = torch.maximum(teacher_RE, student_RE + least_R1)[:, :-1]
    tail_R1 = teacher_RE[:, -1:] + (least_R1 - level_RE[:, :1])  # in this order: a student may have nothing there
    return torch.cat([torch.where(partial_RK, named_RK, teacher_RE[:, :-1]), tail_R1], 1)


@register_tail("renormalize", least_top_k=2)
def _renormalized_events(targets: SparseTargets, statistics: Statistics, beta: Tensor) -> Events:
    teacher_RH = torch.log_softmax(beta * targets.logprobs[:, : targets.top_k], dim=-1)
    return Events(teacher_RH, torch.log_softmax(beta * statistics.kept[:, : targets.top_k], dim=-1))


@register_tail("sampled", least_top_k=0, needs_samples=True)
def _sampled_events(targets: SparseTargets, statistics: Statistics, beta: Tensor) -> Events:
    log_partition_R1 = targets.log_partition(beta)[:, None]
    teacher_RK = beta * targets.logprobs - log_partition_R1
    student_RK = beta * statistics.kept - statistics.lse_beta(beta)[:, None]
    weights_RK = torch.cat([teacher_RK[:, : targets.top_k].exp(), targets.drawn_weights(beta)], dim=-1)
    return Events(teacher_RK, student_RK, weights_RK)


@register_tail("control-variate", needs_samples=True)
def _control_variate_events(targets: SparseTargets, statistics: Statistics, beta: Tensor) -> Events:
    with torch.no_grad():
        events = _ghost_events(targets.at_one(), statistics.at_one(), torch.ones_like(beta))
        distance_R = (events.teacher.exp() * (events.teacher - events.student)).sum(-1)
    drawn_RD = targets.counts[:, targets.top_k :] > 0
    # log x = log r q - log p, in which both partition sums cancel.
    ratio_RD = targets.log_tail(beta)[:, None] - statistics.tail_beta[:, None]
    ratio_RD = ratio_RD + beta * (statistics.kept - targets.logprobs)[:, targets.top_k :]
    ratio_RD = ratio_RD.masked_fill(~drawn_RD, 0.0)
    share_R1 = (-_SHARPNESS * distance_R).exp().clamp(max=1.0)[:, None]
    missed_R = (targets.bounded_weights(beta) * (share_R1 * clipped_excess(ratio_RD) - ratio_RD)).sum(-1)
    return replace(_ghost_events(targets, statistics, beta), missed=missed_R)
