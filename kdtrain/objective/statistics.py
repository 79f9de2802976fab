"""Per-token statistics of a student's logits: all that a loss over sparse targets depends on.

They are the log sum exp of z and of beta z over the tail (everything but the top-k ids), and z at the kept
ids and at the label. Sums over the whole vocabulary are log-add-exps of tail and top-k; the tail's mass is a
sum of its own, because 1 - sum q loses all its digits in fp32 once the top-k is likely.

`reduce_logits` computes the sums of a chunk and `spread_gradients` carries a loss's gradients in them back to the
logits, in place; both are plain elementwise and row-wise functions that torch.compile fuses. The few numbers a row are
in fp64: it costs nothing, and the gradient in the temperature is a small difference of large numbers.

Shape suffixes: R rows of a chunk, V vocabulary, K kept entries, H top-k entries.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from kdtrain.objective.logits import NEVER, cap_slope
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
class TailSums:
    """Sums over the tail of a chunk, shifted by the largest logit."""

    top: Tensor
    """[R] the largest z outside the top-k."""
    mass: Tensor
    """[R] sum exp(z - top)."""
    mass_beta: Tensor
    """[R] sum exp(beta (z - top))."""
    moment: Tensor
    """[R] sum exp(beta (z - top)) (z - top)."""

    def log_sums(self, beta: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """log sum exp(z), log sum exp(beta z) and its slope in beta, the mean of z; each [R] in beta's dtype."""
        top_R, mass_R, mass_beta_R, moment_R = (x.to(beta.dtype) for x in vars(self).values())
        return top_R + mass_R.log(), beta * top_R + mass_beta_R.log(), top_R + moment_R / mass_beta_R


def take_top_k(z_RV: Tensor, ids_RK: Tensor, absent_RK: Tensor, labels_R: Tensor, top_k: int) -> tuple[Tensor, Tensor]:
    """z at the kept ids [R,K] and at the label [R]; the top-k logits in `z_RV` become `NEVER`."""
    kept_RK = z_RV.gather(1, ids_RK).masked_fill(absent_RK, NEVER)
    label_R = z_RV.gather(1, labels_R[:, None]).squeeze(1)
    if top_k:
        z_RV.scatter_(1, ids_RK[:, :top_k], NEVER)
    return kept_RK, label_R


def reduce_logits(z_RV: Tensor, beta: Tensor, distils: bool, slopes: bool) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The fields of `TailSums` in two passes; unwanted ones are copies of the mass.

    distils: True with a teacher. slopes: True if the gradient in beta is wanted.
    """
    top_R = z_RV.amax(dim=1)
    shifted_RV = z_RV - top_R[:, None]
    mass_R = shifted_RV.exp().sum(1)
    if not distils:
        return top_R, mass_R, mass_R.clone(), mass_R.clone()
    heated_RV = (beta * shifted_RV).exp()
    moment_R = (heated_RV * shifted_RV).sum(1) if slopes else mass_R.clone()
    return top_R, mass_R, heated_RV.sum(1), moment_R


def spread_gradients(
    z_RV: Tensor,
    beta: Tensor,
    top_R: Tensor,
    share_R: Tensor | None,
    share_beta_R: Tensor | None,
    scale: float,
    softcap: float | None,
) -> None:
    """Overwrite `z_RV` with the gradient in u of the two sums over the tail; 0 at the top-k, which is masked.

    The shares are gradients in the log of the sums, divided by the sums.
    """
    shifted_RV = z_RV - top_R[:, None]
    dz_RV = torch.zeros_like(z_RV)
    if share_R is not None:
        dz_RV = dz_RV + share_R[:, None] * shifted_RV.exp()
    if share_beta_R is not None:
        dz_RV = dz_RV + share_beta_R[:, None] * (beta * shifted_RV).exp()
    z_RV.copy_(dz_RV * (scale * cap_slope(z_RV, softcap)))


def row_statistics(z_RV: Tensor, targets: SparseTargets, labels_R: Tensor) -> Statistics:
    """Statistics of some rows at beta = 1, without gradients; the top-k logits in `z_RV` are overwritten."""
    ids_RK, absent_RK = safe_ids(targets, z_RV)
    kept_RK, label_R = take_top_k(z_RV, ids_RK, absent_RK, labels_R, targets.top_k)
    tail_R = torch.logsumexp(z_RV, dim=1)
    return Statistics(tail_R, tail_R, kept_RK, label_R, targets.top_k)


def safe_ids(targets: SparseTargets | None, z_RV: Tensor) -> tuple[Tensor, Tensor]:
    """Ids that are valid for a gather, and a mask of the absent ones.

    An absent entry takes the id of the first column, so that masking the top-k masks no other entry.
    """
    if targets is None:
        ids_RK = torch.zeros(z_RV.shape[0], 0, dtype=torch.int64, device=z_RV.device)
        return ids_RK, ids_RK.bool()
    absent_RK = targets.ids >= z_RV.shape[1]
    first_R1 = targets.ids[:, :1].masked_fill(absent_RK[:, :1], 0)
    return torch.where(absent_RK, first_R1, targets.ids), absent_RK


def _with_top_k(tail_R: Tensor, top_RH: Tensor) -> Tensor:
    return torch.logsumexp(torch.cat([tail_R[:, None], top_RH], dim=1), dim=1) if top_RH.shape[1] else tail_R
