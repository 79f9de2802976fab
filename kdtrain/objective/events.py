"""The events over which teacher and student are compared, and what becomes of the tail.

A divergence sees log-probabilities of the same events under both sides, at the same inverse temperature
beta = 1/T. For dense targets the events are the V tokens. For sparse ones a tail rule says what they are; with
p_k, q_k the true probabilities at beta (the teacher's from the cached log-partition):

ghost        the head's entries and one bucket for all the rest: p_tail = exp(L(beta)) / Z(beta) against the
             student's own mass outside the head (the ghost token of Sparse Logit Sampling, ACL 2025, arXiv
             2503.16870, with the mass right at every T). Both sides are distributions, so that every
             divergence is 0 with zero gradient for student = teacher; merging events can only lose some of
             an f-divergence, which is then a lower bound of the one over all V tokens.
drop         the head's entries only, with true masses: the head's terms of the sum. Forward KL is 0 for
             student = teacher, but that is no minimum: with P the head's mass, the gradient there is
             beta q_j P in the tail and beta q_j (P - 1) in the head. The tail starves, and the value falls
             to P log P < 0.
renormalize  both sides divided by their mass in the head: blind to what the student puts elsewhere (some
             implementations divide the teacher's alone). 0 with zero gradient for student = teacher.
sampled      head entries with weight p_k, drawn entries with weight
                 w_k = p_tail(1) (c_k / n) p_k(1)^(beta - 1) / Z(beta),
             the importance weight of c_k of n draws from the tail at T = 1 (at head 0, p_tail(1) = 1 and the
             tail is everything: random-sampling KD, arXiv 2503.16870). sum w (log p - log q) estimates the
             full forward KL without bias at every T, value and gradient, up to the interpolation of Z(beta);
             0 for student = teacher, because each term is. Any other divergence needs q at all tokens with a
             weight of its own, which draws from p do not give.
control-variate  the ghost bucket, corrected inside by the draws: see `control_variate`. Forward KL only, like
             `sampled`; its noise falls with the student's distance from the teacher.

Targets with draws are read by one of the last two: the default `ghost` stands for `sampled` there.

Shape suffixes: R rows, E events, K kept entries, H head entries, D drawn entries, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from kdtrain.objective.control_variate import tail_correction
from kdtrain.objective.statistics import Statistics
from kdtrain.objective.targets import SparseTargets


@dataclass(frozen=True)
class Events:
    """Log-probabilities of the same events, in nats, under teacher and student, each [R,E]."""

    teacher: Tensor
    student: Tensor
    weight: Tensor | None = None
    """[R,E] What stands for the teacher's probabilities in an estimate; None for exp(teacher)."""
    missed: Tensor | None = None
    """[R] What forward KL over the events misses of the whole, estimated, in nats."""


@dataclass(frozen=True)
class TailRule:
    """What becomes of the tail of sparse targets, and which targets have what that takes."""

    events: Callable[[SparseTargets, Statistics, Tensor], Events]
    least_head: int
    needs_draws: bool = False


def dense_events(logits_RV: Tensor, energies_RV: Tensor, beta: Tensor | float) -> Events:
    """All V tokens as events, teacher and student at inverse temperature `beta`."""
    teacher_RV = torch.log_softmax(beta * energies_RV, dim=-1)
    return Events(teacher_RV, torch.log_softmax(beta * logits_RV, dim=-1))


def sparse_events(tail: str, targets: SparseTargets, statistics: Statistics, beta: Tensor) -> Events:
    """The events that the resolved tail rule makes of targets, absent entries weighing nothing, at `beta`."""
    return TAIL_RULES[tail].events(targets, statistics, beta)


def resolve_tail(tail: str, draws: int) -> str:
    """The tail rule that is meant: with draws, the default `ghost` stands for `sampled`."""
    return "sampled" if draws and tail == "ghost" else tail


def _head_events(targets: SparseTargets, statistics: Statistics, beta: Tensor) -> Events:
    student_RH = beta * statistics.kept[:, : targets.head] - statistics.lse_beta(beta)[:, None]
    return Events(targets.head_logprobs(beta), student_RH)


def _ghost_events(targets: SparseTargets, statistics: Statistics, beta: Tensor) -> Events:
    head = _head_events(targets, statistics, beta)
    teacher_R = targets.log_tail(beta) - targets.log_partition(beta)
    student_R = statistics.tail_beta - statistics.lse_beta(beta)
    return Events(
        torch.cat([head.teacher, teacher_R[:, None]], dim=-1),
        torch.cat([head.student, student_R[:, None]], dim=-1),
    )


def _renormalized_events(targets: SparseTargets, statistics: Statistics, beta: Tensor) -> Events:
    teacher_RH = torch.log_softmax(beta * targets.logprobs[:, : targets.head], dim=-1)
    return Events(teacher_RH, torch.log_softmax(beta * statistics.kept[:, : targets.head], dim=-1))


def _sampled_events(targets: SparseTargets, statistics: Statistics, beta: Tensor) -> Events:
    log_partition_R1 = targets.log_partition(beta)[:, None]
    teacher_RK = beta * targets.logprobs - log_partition_R1
    student_RK = beta * statistics.kept - statistics.lse_beta(beta)[:, None]
    weights_RK = torch.cat([teacher_RK[:, : targets.head].exp(), targets.drawn_weights(beta)], dim=-1)
    return Events(teacher_RK, student_RK, weights_RK)


def _control_variate_events(targets: SparseTargets, statistics: Statistics, beta: Tensor) -> Events:
    missed_R = tail_correction(targets, statistics, beta, _distance(targets, statistics, beta))
    return replace(_ghost_events(targets, statistics, beta), missed=missed_R)


@torch.no_grad()
def _distance(targets: SparseTargets, statistics: Statistics, beta: Tensor) -> Tensor:
    """[R] how far the student is from the teacher at T = 1, from nothing that was drawn (`control_variate`)."""
    if targets.head == 0:
        gap_R = statistics.label - statistics.lse - targets.label_logprob
        return gap_R.abs() * (2 * beta - 1).clamp(0, 1)
    events = _ghost_events(targets, statistics.at_one(), torch.ones_like(beta))
    return (events.teacher.exp() * (events.teacher - events.student)).sum(-1)


TAIL_RULES = {
    "ghost": TailRule(_ghost_events, least_head=1),
    "drop": TailRule(_head_events, least_head=1),
    "renormalize": TailRule(_renormalized_events, least_head=2),
    "sampled": TailRule(_sampled_events, least_head=0, needs_draws=True),
    "control-variate": TailRule(_control_variate_events, least_head=0, needs_draws=True),
}
"""By the name that `--tail` takes."""
