"""Targets of a teacher with another tokenizer, at the positions of the student's own tokens.

Two terms, right at T = 1, each least where the student says what the teacher says, and there 0 but for samples:

cells   where the teacher says what follows (`teacher_cells`): KL between the masses that both give to groups of tokens
        (`tokenizers.cells`). From samples it is the KL from their shares: at common boundaries an unbiased gradient,
        and a value that is too large by how much less entropy they have than the teacher, in the mean, whatever the
        student. From a top-k it is the KL from the nearest distribution that the top-k allows: a lower bound.
chunks  between common boundaries: teacher's and student's log p of the same bytes. With the sums a, b of log p of the
        chunk's tokens under both, and P = exp(a / tau), Q = exp(b / tau), it is tau KL(P || Q) of two outcomes, the
        binarised KL of ALM (Minixhofer et al. 2025, arXiv 2503.20083, section 3) times tau = 100. The gradient in b
        is about a / b - 1. It stands at the chunk's last token.

What neither says anything of has the label's cross-entropy in its place, so that it weighs as without a teacher: alpha
divides between teacher and text only where there are both. That is a token at which no term speaks, and, of cells
without chunks, -log q(label | its cell), which the teacher's share of the cell does not tell.

A chunk may cross the border between two of the engine's chunks. So the engine computes the label's log q of a few rows
around each of its chunks, without gradient (`window`).

Shape suffixes: N tokens, R rows of a chunk, K entries, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Self

import torch
from torch import Tensor

from kdtrain.objective.cells import CellIndex
from kdtrain.objective.statistics import Entries, Events, Statistics
from kdtrain.objective.targets import FLOOR, Comparison, SparseTargets, Targets

TAU = 100.0
"""Of the chunks' term: large enough that its gradient is that of the limit, a / b - 1."""
REACH = 32
"""Most tokens of the student in a chunk."""
_LEAST = -1e-6


@dataclass(frozen=True)
class Window:
    """The label's log q around R rows, without gradient, and the chunks that end behind them."""

    before: Tensor
    """[b] of the rows before."""
    after: Tensor
    """[a] of the rows behind."""
    length: Tensor
    """[a] as `AlignedTargets.length`, of the rows behind."""
    label_logprob: Tensor
    """[a] likewise."""


@dataclass(frozen=True)
class AlignedTargets(Targets):
    """What a teacher with another tokenizer said about the text of N tokens of the student."""

    length: Tensor
    """[N] int64. Tokens of the chunk that ends with the label, up to `REACH`; 0 where none ends, or without chunks."""
    label_logprob: Tensor
    """[N] fp32, nats. The teacher's log p of that chunk; 0 where none ends."""
    compared: Tensor
    """[N] bool. Where the teacher says what the label's first byte may be; elsewhere `near` does not count."""
    near: SparseTargets | None
    """Over cells; None without that term."""
    cells: CellIndex | None
    """The student's; None where cells are tokens."""
    chunks: bool = True
    """Whether chunks count in the loss; without it their numbers are there to be reported."""
    beyond: Window | None = None

    width = None
    has_tail = True
    only_at_one = True
    forward_only = True
    has_top = False

    @property
    def top_k(self) -> int:  # type: ignore[override]
        """Of the cells."""
        return 0 if self.near is None else self.near.top_k

    @property
    def num_samples(self) -> int:  # type: ignore[override]
        """Of the cells; 1 for chunks alone, whose text is a sample of one."""
        return 1 if self.near is None else self.near.num_samples

    @property
    def known_at_one(self) -> bool:  # type: ignore[override]
        """As the cells."""
        return self.near is None or self.near.known_at_one

    @property
    def reach(self) -> int:  # type: ignore[override]
        """Rows that a chunk of rows needs to see around it."""
        return REACH if self.chunks else 0

    @property
    def has_divergence(self) -> bool:  # type: ignore[override]
        """Of the cells."""
        return self.near is not None

    def __len__(self) -> int:
        return self.length.shape[0]

    def map(self, change: Callable[[str, Tensor], Tensor]) -> Self:
        near = None if self.near is None else self.near.map(change)
        own: dict[str, Any] = {name: change(name, each) for name, each in self._tensors().items()}
        return replace(self, near=near, **own)

    def fields(self, shape: tuple[int, int]) -> dict[str, Tensor]:
        """Those of the targets over cells, with partial [B,T,K] from a top-k, and chunk_length, chunk_logprob, compared
        [B,T]; of each sequence alignment [2]: the key of its cells (0: they are tokens), and whether chunks count."""
        near = {} if self.near is None else self.near.fields(shape)
        own = {"chunk_length": self.length, "chunk_logprob": self.label_logprob, "compared": self.compared}
        stated = [0 if self.cells is None else self.cells.key, int(self.chunks)]
        alignment = torch.tensor(stated, dtype=torch.float64).expand(shape[0], -1)
        return near | {name: each.unflatten(0, shape) for name, each in own.items()} | {"alignment": alignment}

    def _near(self, change: Callable[[SparseTargets], SparseTargets]) -> AlignedTargets:
        return self if self.near is None else replace(self, near=change(self.near))

    def where(self, keep_N: Tensor) -> AlignedTargets:
        length_N = self.length.masked_fill(~keep_N, 0)
        label_N = self.label_logprob.masked_fill(~keep_N, 0.0)
        kept = replace(self, length=length_N, label_logprob=label_N, compared=self.compared & keep_N)
        return kept._near(lambda near: near.where(keep_N))

    def without_absent(self, vocab_size: int) -> AlignedTargets:
        return self._near(lambda near: near.without_absent(vocab_size if self.cells is None else self.cells.count))

    def double(self) -> AlignedTargets:
        return replace(self, label_logprob=self.label_logprob.double())._near(lambda near: near.double())

    def at(self, beta: Tensor) -> AlignedTargets:
        return self._near(lambda near: near.at(beta))

    def at_one(self) -> AlignedTargets:
        return self._near(lambda near: near.at_one())

    def log_partition(self, beta: Tensor | float, keep_N: Tensor | None = None) -> Tensor:
        return torch.zeros_like(self.label_logprob)

    def entries(self, labels_N: Tensor, vocab_size: int) -> Entries:
        return self._entries(labels_N, vocab_size, None if self.chunks else self.compared)

    def _entries(self, labels_N: Tensor, vocab_size: int, within_N: Tensor | None) -> Entries:
        if self.near is None:
            return Entries.of_labels(labels_N)
        if self.cells is None:
            return self.near.entries(labels_N, vocab_size)
        cells = self.cells.to(labels_N.device)
        return cells.entries(self.near.entries(labels_N, cells.count), labels_N, within_N)

    def events(self, tail: str, statistics: Statistics, beta: Tensor) -> Events:
        assert self.near is not None
        named = replace(statistics, kept=statistics.kept[:, : self.near.ids.shape[1]])
        events = self.near.events(tail, named, beta)
        weight_RE = events.teacher.exp() if events.weight is None else events.weight
        return replace(events, weight=weight_RE.masked_fill(~self.compared[:, None], 0.0))

    def measured(self, measure: Callable[[Events], Tensor], tail: str, statistics: Statistics, beta: Tensor) -> Tensor:
        """Both terms of each row, [R] in nats; the label's cross-entropy of what neither says anything of."""
        label_R = statistics.label - statistics.lse
        found_R = torch.zeros_like(statistics.lse)
        if self.near is not None:
            found_R = measure(self.events(tail, statistics, beta)) + _within_groups(statistics)
        if self.chunks:
            found_R = found_R + self.chunk_divergence(label_R)
        return torch.where(self._spoken_of(), found_R, -label_R)

    def _spoken_of(self) -> Tensor:
        """[R] bool, whether a term of the loss says something of the token."""
        spoken_R = torch.zeros_like(self.compared)
        if self.near is not None:
            spoken_R = self.common()
        if not self.chunks:
            return spoken_R
        length = self.length if self.beyond is None else torch.cat([self.length, self.beyond.length])
        end, ends = torch.arange(1, len(length) + 1, device=length.device), (length > 0).long()
        edges = (
            length.new_zeros(len(length) + 1).index_add_(0, (end - length).clamp(min=0), ends).index_add_(0, end, -ends)
        )
        return spoken_R | (edges.cumsum(0)[: len(spoken_R)] > 0)

    def common(self) -> Tensor:
        # all that the teacher expects may be in no cell
        return self.compared if self.near is None else self.compared & (self.near.logprobs > FLOOR).any(1)

    def spans(self, values_N: Tensor) -> Tensor:
        sums = torch.cat([values_N.new_zeros(1), values_N.cumsum(0)])
        end = torch.arange(1, len(values_N) + 1, device=values_N.device)
        return sums[end] - sums[(end - self.length).clamp(min=0)]

    def window(self, rows: slice, before: Tensor, after: Tensor) -> AlignedTargets:
        """The rows `rows`, with the label's log q of the neighbours before and behind them."""
        behind = slice(rows.stop, rows.stop + len(after))
        beyond = Window(before, after, self.length[behind], self.label_logprob[behind])
        return replace(self[rows], beyond=beyond)

    def chunk_divergence(self, label_R: Tensor) -> Tensor:
        """tau times the binarised KL of each chunk, at its last row, [R]; `label_R` is the label's log q.

        A chunk that ends behind these rows gives its gradient here and its value there.
        """
        length, teacher, before = self.length, self.label_logprob, 0
        every = label_R
        if self.beyond is not None:
            every = torch.cat([self.beyond.before.to(label_R.dtype), label_R, self.beyond.after.to(label_R.dtype)])
            length = torch.cat([length, self.beyond.length])
            teacher = torch.cat([teacher, self.beyond.label_logprob.to(teacher.dtype)])
            before = len(self.beyond.before)
        end = torch.arange(before + 1, before + 1 + len(length), device=length.device)
        whole = (length > 0) & (end >= length)
        # windows, not a cumulative sum, which a GPU adds up in any order
        back = torch.arange(REACH - 1, -1, -1, device=length.device)
        last = torch.nn.functional.pad(every, (REACH - 1, 0)).unfold(0, REACH, 1)[before:]
        student = (last * (back < length[:, None])).sum(1)
        student = torch.where(whole, student, -1.0)
        found = binarised_kl(teacher.to(student.dtype).where(whole, -1.0), student).where(whole, 0.0)
        own_R, behind = found[: len(label_R)], found[len(label_R) :]
        if not len(behind):
            return own_R
        return torch.cat([own_R[:-1], own_R[-1:] + (behind - behind.detach()).sum()])

    def compare(self, z_RV: Tensor, labels_R: Tensor) -> Comparison:
        if self.near is None:
            nothing = Events(z_RV.new_zeros(len(z_RV), 1), z_RV.new_zeros(len(z_RV), 1))
            return Comparison(nothing, nothing, None)
        entries = self._entries(labels_R, z_RV.shape[1], None)
        cells = None if self.cells is None else self.cells.to(z_RV.device)
        if cells is None or not cells.folds:
            entries = entries.take(z_RV)
        else:
            entries = cells.fold(z_RV, entries, labels_R).entries
        kept_RK, label_R = entries.logits(z_RV.dtype)
        tail_R = torch.logsumexp(z_RV, 1)
        statistics = Statistics(tail_R, tail_R, kept_RK, label_R, self.near.top_k)
        rule = "sampled" if self.near.num_samples else "ghost"
        events = self.events(rule, statistics, torch.ones((), dtype=z_RV.dtype, device=z_RV.device))
        return Comparison(events, events, None)


def _within_groups(statistics: Statistics) -> Tensor | float:
    """-log q of the label given the group of tokens that it lies within, [R] in nats; 0 where that is not asked for."""
    group_R = statistics.group
    if group_R is None:
        return 0.0
    logit_R = statistics.kept.gather(1, group_R.clamp(min=0)[:, None]).squeeze(1)
    return (logit_R - statistics.label).where(group_R >= 0, 0.0)


def binarised_kl(teacher: Tensor, student: Tensor) -> Tensor:
    """tau KL between (P, 1 - P) and (Q, 1 - Q), with log P = teacher / tau and log Q = student / tau, both below 0."""
    p, q = teacher.clamp(max=_LEAST) / TAU, student.clamp(max=_LEAST) / TAU
    missed_p = -torch.expm1(p)
    return TAU * (p.exp() * (p - q) + missed_p * (missed_p.log() - (-torch.expm1(q)).log()))
