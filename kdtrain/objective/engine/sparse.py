"""A chunk of logits with sparse targets, or none: row sums, loss, and gradient in the logits.

`reduce_logits` computes the sums of a chunk, `differentiate` a loss of their logs and its gradients, and
`spread_gradients` carries these back to the logits. They are plain functions that torch.compile fuses, each into a few
kernels. The few numbers a row between the two passes are in fp64: it costs nothing, and the gradient in the temperature
is a small difference of large numbers.

Shape suffixes: R rows of a chunk, V vocabulary, K kept entries, E = K + 1 (`Entries`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from kdtrain.models.output_head import HeadPart
from kdtrain.objective.statistics import Entries, Statistics
from kdtrain.objective.targets import Supervision

SparseLoss = Callable[[Statistics, Tensor, Supervision], tuple[Tensor, Tensor]]
"""(statistics, beta, rows) -> (loss, a differentiable scalar; sums, a vector without gradients)."""


class TailSums(NamedTuple):
    """Sums over the tail of a chunk, shifted by the largest logit."""

    top: Tensor
    """[R] the largest z outside the top-k."""
    mass: Tensor
    """[R] sum exp(z - top)."""
    mass_beta: Tensor
    """[R] sum exp(beta (z - top))."""
    moment: Tensor
    """[R] sum exp(beta (z - top)) (z - top)."""

    def of_all(self, head: HeadPart, beta: Tensor) -> TailSums:
        """Return the sums over all parts of the head, from the sums of each part."""
        if head.group is None:
            return self
        top_R = head.largest(self.top)
        lower_R = self.top - top_R
        cooling_R = (beta * lower_R).exp()
        moment_R = (self.moment + lower_R * self.mass_beta) * cooling_R
        return TailSums(
            top_R, *head.sum(torch.stack([self.mass * lower_R.exp(), self.mass_beta * cooling_R, moment_R]))
        )

    def statistics(self, entries: Entries, beta: Tensor) -> tuple[Statistics, Tensor]:
        """Return a chunk's statistics in beta's dtype, and the slope of `tail_beta` in beta: the tail's mean z, [R]."""
        top_R, mass_R, mass_beta_R, moment_R = (x.to(beta.dtype) for x in self)
        tail_beta_R = beta * top_R + mass_beta_R.log()
        kept_RK, label_R = entries.logits(beta.dtype)
        found = Statistics(top_R + mass_R.log(), tail_beta_R, kept_RK, label_R, entries.top_k, entries.group)
        return found, top_R + moment_R / mass_beta_R


class Shares(NamedTuple):
    """The numbers that the gradient in the logits of the tail needs, each [R]."""

    top: Tensor
    """The largest z outside the top-k."""
    share: Tensor
    """Gradient in the log of the tail's mass, divided by the mass."""
    share_beta: Tensor | None
    """beta times the same of the mass at beta; None without a teacher."""


class Differentiated(NamedTuple):
    """A chunk's loss, and its gradients as `spread_gradients` and a scatter take them."""

    loss: Tensor
    sums: Tensor
    share: Tensor
    share_beta: Tensor
    """As in `Shares`; 0 without a teacher."""
    at_entries: Tensor
    """[R,K+1] the whole gradient in u at `Entries.ids`, equal where ids are, in its dtype."""
    apart: Tensor | None
    """[R] the gradient in the logit of a label that is apart, 0 for others, in that dtype; None where none can be."""
    beta: Tensor
    """Scalar; 0 where it is not wanted."""


def reduce_logits(z_RV: Tensor, beta: Tensor, distils: bool, slopes: bool) -> TailSums:
    """Compute the sums of a chunk in two passes; unwanted sums are copies of the mass.

    distils: True with a teacher. slopes: True if the gradient in beta is wanted.
    """
    top_R = z_RV.amax(dim=1)
    shifted_RV = z_RV - top_R[:, None]
    mass_R = shifted_RV.exp().sum(1)
    if not distils:
        return TailSums(top_R, mass_R, mass_R.clone(), mass_R.clone())
    scaled_RV = (beta * shifted_RV).exp()
    moment_R = (scaled_RV * shifted_RV).sum(1) if slopes else mass_R.clone()
    return TailSums(top_R, mass_R, scaled_RV.sum(1), moment_R)


def differentiate(
    loss: SparseLoss,
    tail: TailSums,
    beta: Tensor,
    rows: Supervision,
    entries: Entries,
    slopes: bool,
    head: HeadPart,
    dtype: torch.dtype,
) -> Differentiated:
    """Compute value and gradients of the loss of a chunk: everything between the two passes over its logits.

    Args:
        beta: scalar, fp64.
        rows: harmless ones (`Supervision.harmless`).
        entries: with their logits from before the top-k was masked.
        slopes: True if the gradient in beta is wanted.
        head: scale and soft cap.
        dtype: of the gradient in u.
    """
    assert entries.z is not None
    rows, z_RE = rows.double(), entries.z.double()
    at_one = rows.targets is not None and rows.targets.known_at_one
    found, mean_R = tail.statistics(entries, beta)

    def value(
        tail_R: Tensor, tail_beta_R: Tensor, kept_RK: Tensor, label_R: Tensor, moving: Tensor
    ) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        moving_R = tail_beta_R + mean_R * (moving - beta) if slopes else tail_beta_R
        total, sums = loss(replace(found, tail=tail_R, tail_beta=moving_R, kept=kept_RK, label=label_R), moving, rows)
        return total, (total, sums)

    inputs = (found.tail, found.tail_beta, found.kept, found.label, beta)
    # Without slopes nothing of the teacher's side is differentiated.
    wanted = (0, 1, 2, 3, 4) if slopes else (0, 1, 2, 3)
    gradients, (total, sums) = torch.func.grad(value, argnums=wanted, has_aux=True)(*inputs)
    g_tail_R, g_tail_beta_R, g_kept_RK, g_label_R = gradients[:4]
    g_beta = gradients[4] if slopes else torch.zeros_like(beta)
    share_R, share_beta_R = g_tail_R / tail.mass, beta * g_tail_beta_R / tail.mass_beta

    # The tail reaches the entries outside the top-k as well; an entry may be both a kept entry's and the label's.
    shifted_RE = z_RE - tail.top[:, None]
    plain_RE = shifted_RE.exp()
    heated_RE = plain_RE if at_one else (beta * shifted_RE).exp()
    spread_RE = share_R[:, None] * plain_RE + share_beta_R[:, None] * heated_RE
    is_label_RK = entries.ids[:, :-1] == entries.ids[:, -1:]
    if entries.apart is not None:
        is_label_RK = is_label_RK & ~entries.apart[:, None]
    in_top_k_K = torch.arange(is_label_RK.shape[1], device=z_RE.device) < entries.top_k
    g_kept_RK = g_kept_RK.masked_fill(entries.absent, 0.0)
    kept_RK = g_kept_RK + is_label_RK * g_label_R[:, None]
    kept_RK = kept_RK + (spread_RE[:, :-1].masked_fill(in_top_k_K, 0.0) if entries.top_k else spread_RE[:, :-1])
    kept_RK = torch.where(entries.absent, kept_RK[:, :1], kept_RK)
    tail_label_R = spread_RE[:, -1]
    if entries.top_k:
        tail_label_R = tail_label_R.masked_fill((is_label_RK & in_top_k_K).any(1), 0.0)
    label_R = g_label_R + (is_label_RK * g_kept_RK).sum(1) + tail_label_R
    apart_R = None
    if entries.apart is not None:
        apart_R = g_label_R.masked_fill(~entries.apart, 0.0).to(dtype)
    at_RE = torch.cat([kept_RK, label_R[:, None]], dim=1)
    if head.scale != 1.0 or head.softcap is not None:
        slope_RE = head.slope(z_RE)
        at_RE = at_RE * (slope_RE if entries.several is None else torch.where(entries.several, 1.0, slope_RE))
    if entries.apart is not None:  # the column is the first entry's
        at_RE = torch.cat(
            [kept_RK := at_RE[:, :-1], torch.where(entries.apart, kept_RK[:, 0], at_RE[:, -1])[:, None]], 1
        )
    share_R, share_beta_R = share_R.to(tail.mass.dtype), share_beta_R.to(tail.mass.dtype)
    return Differentiated(total, sums, share_R, share_beta_R, at_RE.to(dtype), apart_R, g_beta)


def spread_gradients(
    z_RV: Tensor, beta: Tensor, shares: Shares, head: HeadPart, into_RV: Tensor | None = None, at_one: bool = False
) -> None:
    """Write the gradient in u of the two sums over the tail to `into_RV`, by default over `z_RV`; 0 at the top-k.

    at_one: True if beta is known to be 1.
    """
    shifted_RV = z_RV - shares.top[:, None]
    plain_RV = shifted_RV.exp()
    dz_RV = shares.share[:, None] * plain_RV
    if shares.share_beta is not None:
        dz_RV = dz_RV + shares.share_beta[:, None] * (plain_RV if at_one else (beta * shifted_RV).exp())
    (z_RV if into_RV is None else into_RV).copy_(dz_RV * head.slope(z_RV))
