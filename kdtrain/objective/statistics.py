"""Per-token statistics of a student's logits: all that a loss over sparse targets depends on.

They are the log sum exp of z and of beta z over the tail (everything but the top-k ids), and z at the kept
ids and at the label. Sums over the whole vocabulary are log-add-exps of tail and top-k; the tail's mass is a
sum of its own, because 1 - sum q loses all its digits in fp32 once the top-k is likely.

Shape suffixes: R rows of a chunk, V vocabulary, K kept entries, H top-k entries.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from kdtrain.objective.logits import NEVER
from kdtrain.objective.targets import SparseTargets, Targets


@dataclass(frozen=True)
class Rows:
    """The inputs of a loss for some rows, besides logits."""

    labels: Tensor
    """[R] int64."""
    mask: Tensor
    """[R] bool, True where the token counts."""
    targets: Targets | None
    """R rows, or none."""

    def __getitem__(self, rows: slice) -> Rows:
        targets = None if self.targets is None else self.targets[rows]
        return Rows(self.labels[rows], self.mask[rows], targets)

    def harmless(self, vocab_size: int) -> Rows:
        """The same with finite numbers and a valid label in masked rows, and weight 0 at absent entries."""
        targets = None if self.targets is None else self.targets.where(self.mask)
        if isinstance(targets, SparseTargets):
            targets = targets.without_absent(vocab_size)
        return Rows(self.labels.masked_fill(~self.mask, 0), self.mask, targets)

    def double(self) -> Rows:
        """The same with sparse targets in fp64."""
        targets = self.targets
        return Rows(self.labels, self.mask, targets.double() if isinstance(targets, SparseTargets) else targets)


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

    @property
    def lse(self) -> Tensor:
        """[R] log sum exp(z) over the vocabulary."""
        return _with_top_k(self.tail, self.kept[:, : self.top_k])

    def lse_beta(self, beta: Tensor | float) -> Tensor:
        """[R] log sum exp(beta z) over the vocabulary, for the beta that `tail_beta` was made for."""
        return _with_top_k(self.tail_beta, beta * self.kept[:, : self.top_k])

    def at_one(self) -> Statistics:
        """The same statistics for beta = 1."""
        return Statistics(self.tail, self.tail, self.kept, self.label, self.top_k)


@dataclass(frozen=True)
class Places:
    """Where in a row of logits the single numbers stand that a loss needs: the kept entries, then the label."""

    ids: Tensor
    """[R,K+1] int64, valid for a gather.

    An absent entry takes the id of the first column, so that masking the top-k masks no other entry.
    """
    absent: Tensor
    """[R,K] bool, True for kept entries that are absent."""
    top_k: int

    @classmethod
    def of(cls, targets: Targets | None, labels_R: Tensor, vocab_size: int) -> Places:
        """The places for valid labels; without sparse targets only these."""
        if not isinstance(targets, SparseTargets):
            return cls(labels_R[:, None], labels_R.new_zeros(len(labels_R), 0, dtype=torch.bool), 0)
        absent_RK = targets.ids >= vocab_size
        first_R1 = targets.ids[:, :1].masked_fill(absent_RK[:, :1], 0)
        ids_RK = torch.where(absent_RK, first_R1, targets.ids)
        return cls(torch.cat([ids_RK, labels_R[:, None]], dim=1), absent_RK, targets.top_k)

    def __getitem__(self, rows: slice) -> Places:
        return Places(self.ids[rows], self.absent[rows], self.top_k)

    def take(self, z_RV: Tensor) -> Tensor:
        """The logits [R,K+1] at these places; the top-k logits in `z_RV` become `NEVER`."""
        z_RE = z_RV.gather(1, self.ids)
        if self.top_k:
            z_RV.scatter_(1, self.ids[:, : self.top_k], NEVER)
        return z_RE

    def kept(self, z_RE: Tensor) -> Tensor:
        """The logits [R,K] of the kept entries, `NEVER` at absent ones."""
        return z_RE[:, :-1].masked_fill(self.absent, NEVER)


SparseLoss = Callable[[Statistics, Tensor, Rows], tuple[Tensor, Tensor]]
"""(statistics, beta, rows) -> (loss, a differentiable scalar; sums, a vector without gradients)."""


def row_statistics(z_RV: Tensor, targets: SparseTargets, labels_R: Tensor) -> Statistics:
    """Statistics of some rows at beta = 1, without gradients; the top-k logits in `z_RV` are overwritten."""
    places = Places.of(targets, labels_R, z_RV.shape[1])
    z_RE = places.take(z_RV)
    tail_R = torch.logsumexp(z_RV, dim=1)
    return Statistics(tail_R, tail_R, places.kept(z_RE), z_RE[:, -1], targets.top_k)


def _with_top_k(tail_R: Tensor, top_RH: Tensor) -> Tensor:
    """log(exp(tail) + sum exp(top)), without the joined tensor that logsumexp would take."""
    if not top_RH.shape[1]:
        return tail_R
    shift_R = torch.maximum(tail_R, top_RH.amax(1)).detach()
    return shift_R + ((tail_R - shift_R).exp() + (top_RH - shift_R[:, None]).exp().sum(1)).log()
