"""Targets of a teacher with another tokenizer, at the positions of the student's own tokens.

Where the teacher predicts what follows, the term is the KL between the masses that both give to groups of tokens
(`cells`, made by `teacher_cells`), right at T = 1 and least where the student predicts what the teacher predicts. From
samples it is the KL from their shares: at common boundaries an unbiased gradient, and a value that is too large by how
much less entropy they have than the teacher, in the mean, whatever the student. From a top-k it is the KL from the
nearest distribution that the top-k allows: a lower bound.

What the teacher does not predict has the label's cross-entropy in its place, so that it weighs as without a teacher:
alpha divides between teacher and text only where there are both. That is a token at which nothing is compared, and
-log q(label | its cell), which the teacher's share of the cell does not tell.

Shape suffixes: N tokens, R rows of a chunk, K entries, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Self

import torch
from torch import Tensor

from kdtrain.errors import UsageError
from kdtrain.models.output_head import HeadPart
from kdtrain.objective.batch import Codec, Collator
from kdtrain.objective.cells import CellIndex
from kdtrain.objective.statistics import Entries, Events, Statistics
from kdtrain.objective.targets import FLOOR, Comparison, Measure, SparseTargets, Targets


@dataclass(frozen=True)
class AlignedTargets(Targets):
    """A teacher's masses of groups of the student's tokens, for N tokens of the student."""

    near: SparseTargets
    """Over cells. Its `label_logprob` is the teacher's log p of all of its own labels that begin within the token."""
    compared: Tensor
    """[N] bool. Where the teacher predicts the label's first byte; elsewhere `near` is ignored."""
    teacher_bytes: Tensor
    """[N] fp32. Bytes of the teacher's labels that begin within the token."""
    cells: CellIndex | None
    """The student's; None where cells are tokens."""

    width = None
    has_tail = True
    only_at_one = True
    forward_only = True
    has_top = False

    @property
    def label_logprob(self) -> Tensor:  # type: ignore[override]
        """The teacher's log p of labels, as `near` has it."""
        return self.near.label_logprob

    @property
    def top_k(self) -> int:  # type: ignore[override]
        """The top-k of the targets over cells."""
        return self.near.top_k

    @property
    def num_samples(self) -> int:  # type: ignore[override]
        """The number of samples of the targets over cells."""
        return self.near.num_samples

    @property
    def known_at_one(self) -> bool:  # type: ignore[override]
        """Whether every requested beta is 1."""
        return self.near.known_at_one

    def __len__(self) -> int:
        return len(self.compared)

    def map(self, change: Callable[[str, Tensor], Tensor]) -> Self:
        own: dict[str, Any] = {name: change(name, each) for name, each in self._tensors().items()}
        return replace(self, near=self.near.map(change), **own)

    def fields(self, shape: tuple[int, int]) -> dict[str, Tensor]:
        """Return the fields of the cells' targets, with partial [B,T,K] of a top-k, compared, teacher_bytes [B,T]."""
        near = {name: each for name, each in self.near.fields(shape).items() if name not in ("knots", "num_samples")}
        return near | super().fields(shape)

    def where(self, keep_N: Tensor) -> AlignedTargets:
        return replace(self, near=self.near.where(keep_N), compared=self.compared & keep_N)

    def without_absent(self, vocab_size: int) -> AlignedTargets:
        return replace(self, near=self.near.without_absent(vocab_size if self.cells is None else self.cells.count))

    def double(self) -> AlignedTargets:
        return replace(self, near=self.near.double())

    def at(self, beta: Tensor) -> AlignedTargets:
        return replace(self, near=self.near.at(beta))

    def at_one(self) -> AlignedTargets:
        return replace(self, near=self.near.at_one())

    def log_partition(self, beta: Tensor | float, keep_N: Tensor | None = None) -> Tensor:
        return torch.zeros_like(self.label_logprob)

    def entries(self, labels_N: Tensor, vocab_size: int) -> Entries:
        return self._entries(labels_N, vocab_size, self.compared)

    def _entries(self, labels_N: Tensor, vocab_size: int, within_N: Tensor | None) -> Entries:
        if self.cells is None:
            return self.near.entries(labels_N, vocab_size)
        cells = self.cells.to(labels_N.device)
        return cells.entries(self.near.entries(labels_N, cells.count), labels_N, within_N)

    def events(self, tail: str, statistics: Statistics, beta: Tensor) -> Events:
        named = replace(statistics, kept=statistics.kept[:, : self.near.ids.shape[1]])
        events = self.near.events(tail, named, beta)
        weight_RE = events.teacher.exp() if events.weight is None else events.weight
        return replace(events, weight=weight_RE.masked_fill(~self.compared[:, None], 0.0))

    def measured(self, measure: Measure, tail: str, statistics: Statistics, beta: Tensor) -> tuple[Tensor, Tensor]:
        """Return `measure` of the events, and in the term also the cross-entropy of what the teacher does not predict.

        That is the label's cross-entropy within its cell, or all of it where the teacher predicts nothing of the label.
        """
        found_R = alone_R = measure(self.events(tail, statistics, beta))
        if (group_R := statistics.group) is not None:  # the label's cross-entropy within its cell
            logit_R = statistics.kept.gather(1, group_R.clamp(min=0)[:, None]).squeeze(1)
            found_R = found_R + (logit_R - statistics.label).where(group_R >= 0, 0.0)
        common_R = self.common()
        return torch.where(common_R, found_R, statistics.lse - statistics.label), alone_R.where(common_R, 0.0)

    def common(self) -> Tensor:
        # all that the teacher expects may be in no cell
        return self.compared & (self.near.logprobs > FLOOR).any(1)

    def label_bytes(self, own_N: Tensor) -> Tensor:
        return self.teacher_bytes

    def compare(self, z_RV: Tensor, labels_R: Tensor, head: HeadPart) -> Comparison:
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


class AlignedCollator(Collator):
    """A maker of batches from the items of a view, all of which have these cells; None: cells are tokens."""

    def __init__(self, codec: Codec, cells: CellIndex | None) -> None:
        super().__init__(codec)
        self.cells = cells

    def same(self, other: Collator) -> bool:
        one = self.cells
        two = getattr(other, "cells", None)
        return super().same(other) and (one is two or bool(one and two and torch.equal(one.column, two.column)))

    def targets(self, fields: Mapping[str, Tensor]) -> Targets | None:
        """Return the targets of a batch. UsageError: the batch is of another data set."""
        if "replay" in fields:
            return super().targets(fields)
        if missing := [name for name in ("compared", "teacher_bytes") if name not in fields]:
            raise UsageError(f"the batch has no tensor '{missing[0]}'; make batches of the student's data set")
        compared, teacher_bytes = (fields[name].flatten(0, 1) for name in ("compared", "teacher_bytes"))
        return AlignedTargets(self.sparse(fields), compared, teacher_bytes, self.cells)
