"""A chunk of logits with sparse targets, or none: row sums, loss, and gradient in the logits.

`reduce_logits` computes the sums of a chunk, `differentiate` a loss of their logs and its gradients, and
`spread_gradients` carries these back to the logits. They are plain functions that torch.compile fuses, each into a few
kernels. The few numbers a row between the two passes are in fp64: it costs nothing, and the gradient in the temperature
is a small difference of large numbers.

Shape suffixes: R rows of a chunk, V vocabulary, K kept entries, H top-k entries, E = K + 1 places (`Places`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from kdtrain.objective.logits import cap_slope
from kdtrain.objective.statistics import Places, Rows, SparseLoss, Statistics


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

    def statistics(self, z_RE: Tensor, places: Places, beta: Tensor) -> tuple[Statistics, Tensor]:
        """The statistics of a chunk in beta's dtype, and the slope of `tail_beta` in beta: the tail's mean z, [R].

        z_RE: the logits at `places`.
        """
        top_R, mass_R, mass_beta_R, moment_R = (x.to(beta.dtype) for x in vars(self).values())
        tail_beta_R = beta * top_R + mass_beta_R.log()
        z_RE = z_RE.to(beta.dtype)
        found = Statistics(top_R + mass_R.log(), tail_beta_R, places.kept(z_RE), z_RE[:, -1], places.top_k)
        return found, top_R + moment_R / mass_beta_R


class Differentiated(NamedTuple):
    """A chunk's loss, and its gradients as `spread_gradients` and a scatter take them."""

    loss: Tensor
    sums: Tensor
    share: Tensor
    """[R] gradient in the log of the tail's mass, divided by the mass."""
    share_beta: Tensor
    """[R] beta times the same of the heated mass; 0 without a teacher."""
    at_places: Tensor
    """[R,K+1] the whole gradient in u at `Places.ids`, equal where ids are, in its dtype."""
    beta: Tensor
    """Scalar; 0 where it is not wanted."""


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


def differentiate(
    measure: SparseLoss,
    z_RE: Tensor,
    tail: TailSums,
    beta: Tensor,
    rows: Rows,
    places: Places,
    slopes: bool,
    scale: float,
    softcap: float | None,
    kind: torch.dtype,
) -> Differentiated:
    """Value and gradients of the loss `measure` of a chunk: everything between the two passes over its logits.

    Args:
        z_RE: logits at `places`, from before the top-k was masked.
        beta: scalar, fp64.
        rows: harmless ones (`Rows.harmless`).
        slopes: True if the gradient in beta is wanted.
        scale, softcap: those of the head.
        kind: dtype of the gradient in u.
    """
    rows = rows.double()
    found, mean_R = tail.statistics(z_RE, places, beta)

    def value(
        tail_R: Tensor, tail_beta_R: Tensor, kept_RK: Tensor, label_R: Tensor, heat: Tensor
    ) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        moving_R = tail_beta_R + mean_R * (heat - beta) if slopes else tail_beta_R
        loss, sums = measure(Statistics(tail_R, moving_R, kept_RK, label_R, places.top_k), heat, rows)
        return loss, (loss, sums)

    inputs = (found.tail, found.tail_beta, found.kept, found.label, beta)
    # Without slopes nothing of the teacher's side is differentiated.
    asked = (0, 1, 2, 3, 4) if slopes else (0, 1, 2, 3)
    gradients, (loss, sums) = torch.func.grad(value, argnums=asked, has_aux=True)(*inputs)
    g_tail_R, g_beta_R, g_kept_RK, g_label_R = gradients[:4]
    g_heat = gradients[4] if slopes else torch.zeros_like(beta)
    share_R, share_beta_R = g_tail_R / tail.mass, beta * g_beta_R / tail.mass_beta

    # The tail reaches the places outside the top-k as well; a place may be both a kept entry's and the label's.
    shifted_RE = z_RE.double() - tail.top[:, None]
    spread_RE = share_R[:, None] * shifted_RE.exp() + share_beta_R[:, None] * (beta * shifted_RE).exp()
    is_label_RK = places.ids[:, :-1] == places.ids[:, -1:]
    in_top_k_K = torch.arange(is_label_RK.shape[1], device=z_RE.device) < places.top_k
    g_kept_RK = g_kept_RK.masked_fill(places.absent, 0.0)
    kept_RK = g_kept_RK + is_label_RK * g_label_R[:, None]
    kept_RK = kept_RK + spread_RE[:, :-1].masked_fill(in_top_k_K, 0.0)
    kept_RK = torch.where(places.absent, kept_RK[:, :1], kept_RK)
    tail_label_R = spread_RE[:, -1].masked_fill((is_label_RK & in_top_k_K).any(1), 0.0)
    label_R = g_label_R + (is_label_RK * g_kept_RK).sum(1) + tail_label_R
    at_RE = torch.cat([kept_RK, label_R[:, None]], dim=1) * (scale * cap_slope(z_RE.double(), softcap))
    share_R, share_beta_R = share_R.to(z_RE.dtype), share_beta_R.to(z_RE.dtype)
    return Differentiated(loss, sums, share_R, share_beta_R, at_RE.to(kind), g_heat)


def spread_gradients(
    z_RV: Tensor,
    beta: Tensor,
    top_R: Tensor,
    share_R: Tensor,
    share_beta_R: Tensor | None,
    scale: float,
    softcap: float | None,
    into_RV: Tensor | None = None,
) -> None:
    """Write the gradient in u of the two sums over the tail to `into_RV`, by default over `z_RV`; 0 at the top-k.

    share_beta_R: None without a teacher.
    """
    shifted_RV = z_RV - top_R[:, None]
    dz_RV = share_R[:, None] * shifted_RV.exp()
    if share_beta_R is not None:
        dz_RV = dz_RV + share_beta_R[:, None] * (beta * shifted_RV).exp()
    (z_RV if into_RV is None else into_RV).copy_(dz_RV * (scale * cap_slope(z_RV, softcap)))
