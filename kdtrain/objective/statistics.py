"""Per-token statistics of a student's logits, all that a loss over single entries depends on, and the events compared.

They are the log sum exp of z and of beta z over the tail (everything but the top-k ids), and z at the kept
ids and at the label. Sums over the whole vocabulary are log-add-exps of tail and top-k; the tail's mass is a
sum of its own, because 1 - sum q loses all its digits in fp32 once the top-k is likely.

Shape suffixes: R rows of a chunk, V vocabulary, K kept entries, H top-k entries, E events, or K + 1 entries.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from kdtrain.models.output_head import HeadPart

NEVER = -1e30
"""Logit of a masked entry. Finite, so that 0 * NEVER is 0 and no gradient is NaN."""


@dataclass(frozen=True)
class Events:
    """Log-probabilities of the same events, in nats, under teacher and student, each [R,E]."""

    teacher: Tensor
    student: Tensor
    weight: Tensor | None = None
    """[R,E] Weights in place of the teacher's probabilities, in an estimate; None for exp(teacher)."""
    missed: Tensor | None = None
    """[R] An estimate of the part of forward KL that the events miss, in nats."""


@dataclass(frozen=True)
class Statistics:
    """The statistics of a student's logits z that a sparse loss gets, each differentiable.

    All in at least fp32. `kept` is `NEVER` at absent entries; its first `top_k` columns are the top-k.
    """

    tail: Tensor
    """[R] log sum exp(z) outside the top-k."""
    tail_beta: Tensor
    """[R] log sum exp(beta z) outside the top-k, differentiable in beta too."""
    kept: Tensor
    """[R,K] z at the targets' ids."""
    label: Tensor
    """[R] z at the label."""
    top_k: int
    group: Tensor | None = None
    """As `Entries.group`."""

    @property
    def lse(self) -> Tensor:
        """The log sum exp(z) over the vocabulary, [R]."""
        return _with_top_k(self.tail, self.kept[:, : self.top_k])

    def lse_beta(self, beta: Tensor | float) -> Tensor:
        """Return log sum exp(beta z) over the vocabulary, [R], for the beta that `tail_beta` was made for."""
        return _with_top_k(self.tail_beta, beta * self.kept[:, : self.top_k])

    def at_one(self) -> Statistics:
        """Return the same statistics for beta = 1."""
        return replace(self, tail_beta=self.tail)


@dataclass(frozen=True)
class Entries:
    """The single entries of a row of logits that a loss needs: the kept entries, then the label."""

    ids: Tensor
    """[R,K+1] int64, valid for a gather.

    An absent entry takes the id of the first column, so that masking the top-k masks no other entry.
    """
    absent: Tensor
    """[R,K] bool, True for kept entries that are absent."""
    top_k: int
    z: Tensor | None = None
    """[R,K+1] the logits of these entries, made by `take`."""
    apart: Tensor | None = None
    """[R] bool, True where the label lies within a group of tokens (`cells`): its column is that of the first entry."""
    several: Tensor | None = None
    """[R,K+1] bool, True where the entry is a group of several tokens, whose logit is no product with the weight."""
    group: Tensor | None = None
    """[R] int64, the column of the group of tokens that the label lies within, where the loss asks for it; else -1."""

    @classmethod
    def of_labels(cls, labels_R: Tensor) -> Entries:
        """Return the labels alone as entries."""
        return cls(labels_R[:, None], labels_R.new_zeros(len(labels_R), 0, dtype=torch.bool), 0)

    def __getitem__(self, rows: slice) -> Entries:
        apart, group = (None if each is None else each[rows] for each in (self.apart, self.group))
        return Entries(self.ids[rows], self.absent[rows], self.top_k, apart=apart, group=group)

    def take(self, z_RV: Tensor, head: HeadPart = HeadPart(), label_R: Tensor | None = None) -> Entries:
        """Return the same entries with their logits; the top-k logits in `z_RV` become `NEVER`.

        label_R: the logits of labels that are apart.
        """
        z_RE = head.take(z_RV, self.ids)
        if self.apart is not None and label_R is not None:
            z_RE[:, -1] = torch.where(self.apart, label_R, z_RE[:, -1])
        if self.top_k:
            z_RV.scatter_(1, *head.places(z_RV, self.ids[:, : self.top_k], NEVER))
        return replace(self, z=z_RE)

    def logits(self, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Return the taken logits: [R,K] of the kept entries, `NEVER` at absent ones, and [R] of the labels."""
        assert self.z is not None
        z_RE = self.z.to(dtype)
        return z_RE[:, :-1].masked_fill(self.absent, NEVER), z_RE[:, -1]


def _with_top_k(tail_R: Tensor, top_RH: Tensor) -> Tensor:
    """Return log(exp(tail) + sum exp(top)), without the joined tensor that logsumexp would take."""
    if not top_RH.shape[1]:
        return tail_R
    shift_R = torch.maximum(tail_R, top_RH.amax(1)).detach()
    return shift_R + ((tail_R - shift_R).exp() + (top_RH - shift_R[:, None]).exp().sum(1)).log()
