"""A chunk of logits with dense targets: row sums, divergence, and gradient in the logits.

A divergence D(log p, log q) of p = softmax(beta e) and q = softmax(beta z) has, with g = dD/dlog q and h = dD/dlog p
as if these were free, the gradients
    dD/dz    = beta (g - q sum g),
    dD/dbeta = sum g (z - E_q z) + sum h (e - E_p e).
Three functions walk the chunk: the sums of exponentials, the divergence and its sums of g and h, and the gradient;
`weigh` computes the loss between the last two. Each computes g again from the logits instead of keeping it.
Near the teacher dD/dbeta is a small difference of large sums: where it is wanted, the second function runs in fp64.
torch.compile fuses each into one or two passes, and autograd of the divergence alone gives g and h, so that a new
divergence is still a few lines.

All sums are shifted by the largest entry of their row; the error that rounding log-sums to fp32 makes in the divergence
is corrected in fp64.

Of a head in parts each rank has its columns of both sides, and the sums go over the parts: a divergence that is a sum
over tokens is then that of whole rows (`divergence.adds_up`).

Shape suffixes: R rows, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from kdtrain.config.choices import DIVERGENCES
from kdtrain.models.output_head import HeadPart
from kdtrain.objective.statistics import Events
from kdtrain.objective.targets import FLOOR, Supervision


@dataclass(frozen=True)
class DenseStatistics:
    """The statistics of a chunk that a loss over dense targets gets; each [R], in fp64 and differentiable."""

    lse: Tensor
    """log sum exp(z)."""
    label: Tensor
    """z at the label."""
    divergence: Tensor
    """At beta, nats; differentiable in beta too."""
    divergence_at_one: Tensor
    """At beta = 1, nats; not differentiable."""
    teacher_label: Tensor
    """The teacher's log p of the label at T = 1; not differentiable, and right with the divergence at T = 1 only."""


_WIDE = 512
"""Rows whose tensors in fp64 exist at once where nothing fuses them."""

DenseLoss = Callable[[DenseStatistics, Tensor, Supervision], tuple[Tensor, Tensor]]
"""As `sparse.SparseLoss`."""
Named = tuple[str, float]
"""A divergence by name, and its number."""


class Pair(NamedTuple):
    """A chunk of the student's logits with its teacher, at beta."""

    z: Tensor
    """[R,V]"""
    logprobs: Tensor
    """[R,V] log p at T = 1, up to a constant a row."""
    beta: Tensor
    """Scalar, in the dtype of the logits."""

    def energies(self) -> Tensor:
        """Return log p [R,V] in the dtype of the logits, bounded below: p log p is then 0 and not NaN at p = 0."""
        return self.logprobs.to(self.z.dtype).clamp_min(FLOOR)

    def log_softmax(self, sums: DenseSums) -> tuple[Tensor, Tensor]:
        """Return log q and log p at beta."""
        log_q_RV = _log_softmax(self.z, sums.top_z, sums.beta_z, self.beta)
        return log_q_RV, _log_softmax(self.energies(), sums.top_e, sums.beta_e, self.beta)


class DenseSums(NamedTuple):
    """Sums over a chunk, each [R]: the largest entry, and the sums of exponentials shifted by it, of z and of e.

    `mass_e` is 0 without the divergence at T = 1.
    """

    top_z: Tensor
    top_e: Tensor
    mass_z: Tensor
    mass_e: Tensor
    beta_z: Tensor
    beta_e: Tensor

    def of_all(self, head: HeadPart, beta: Tensor) -> DenseSums:
        """Return the sums over all parts of the head, from the sums of each part."""
        if head.group is None:
            return self
        tops_2R = head.largest(torch.stack(self[:2]))
        lower_2R = torch.stack(self[:2]) - tops_2R
        masses_4R = torch.stack(self[2:]) * torch.cat([lower_2R, beta * lower_2R]).exp()
        return DenseSums(*tops_2R, *head.sum(masses_4R))


class DenseValues(NamedTuple):
    """The divergence of a chunk's rows and sums of its derivatives, each [R]; in fp64 if the slope is wanted."""

    divergence: Tensor
    g: Tensor
    h: Tensor
    slope: Tensor
    """dD/dbeta; 0 unless wanted."""
    at_one: Tensor
    """The divergence at beta = 1; 0 unless wanted."""


def _log_softmax(values_RV: Tensor, top_R: Tensor, mass_R: Tensor, beta: Tensor | float) -> Tensor:
    """Return log softmax(beta * values), from the largest entry and the shifted sum of exponentials.

    In the dtype of the values, the log of the mass too: fp64 would be converted at every element of the row.
    """
    return beta * (values_RV - top_R[:, None]) - mass_R.double().log().to(top_R.dtype)[:, None]


def _rounding(mass_R: Tensor) -> Tensor:
    """Return how much too low `_log_softmax` is because the log of the mass was rounded, [R] fp64."""
    log_R = mass_R.double().log()
    return log_R.to(mass_R.dtype).double() - log_R


def sum_dense(pair: Pair, at_one: bool) -> DenseSums:
    """Sum the exponentials of a chunk; at_one: True if the divergence at T = 1 is wanted."""
    results = []
    for values_RV, wants_mass in ((pair.z, True), (pair.energies(), at_one)):
        top_R = values_RV.amax(1)
        shifted_RV = values_RV - top_R[:, None]
        mass_beta_R = (pair.beta * shifted_RV).exp().sum(1)
        mass_R = shifted_RV.exp().sum(1) if wants_mass else torch.zeros_like(top_R)
        results.append((top_R, mass_R, mass_beta_R))
    return DenseSums(*(each for sides in zip(*results, strict=True) for each in sides))


def measure_dense(
    pair: Pair, sums: DenseSums, divergence: Named, slopes: bool, head: HeadPart = HeadPart()
) -> DenseValues:
    """Compute the divergence at beta, and sums of its derivatives; slopes: True if the gradient in beta is wanted."""
    if slopes:
        if len(pair.z) > _WIDE and not torch.compiler.is_compiling():
            rows = zip(pair.z.split(_WIDE), pair.logprobs.split(_WIDE), strict=True)
            some = [measure_dense(Pair(*each, pair.beta), sums, divergence, True, head) for each in rows]
            return DenseValues(*map(torch.cat, zip(*some, strict=True)))
        pair = Pair(*(each.double() for each in pair))
        sums = sum_dense(pair, False).of_all(head, pair.beta)
    log_q_RV, log_p_RV = pair.log_softmax(sums)
    values_R, g_RV, h_RV = _derivatives(log_p_RV, log_q_RV, divergence)
    slope_R = torch.zeros_like(values_R)
    for log_RV, by_RV, energies_RV in ((log_q_RV, g_RV, pair.z), (log_p_RV, h_RV, pair.energies())) if slopes else ():
        mean_R = head.sum((log_RV.exp() * energies_RV).sum(1))
        slope_R = slope_R + (by_RV * (energies_RV - mean_R[:, None])).sum(1)
    found = DenseValues(values_R, g_RV.sum(1), h_RV.sum(1), slope_R, torch.zeros_like(values_R))
    return found if head.group is None else DenseValues(*head.sum(torch.stack(found)))


def value_dense(pair: Pair, sums: DenseSums, divergence: Named, head: HeadPart = HeadPart()) -> Tensor:
    """Return the divergence [R] at beta = 1."""
    log_p_RV = _log_softmax(pair.energies(), sums.top_e, sums.mass_e, 1.0)
    log_q_RV = _log_softmax(pair.z, sums.top_z, sums.mass_z, 1.0)
    name, number = divergence
    return head.sum(DIVERGENCES.entries[name].of(Events(log_p_RV, log_q_RV), number))


class Weighed(NamedTuple):
    """A chunk's loss, and its gradients as `spread_dense` takes them."""

    loss: Tensor
    sums: Tensor
    weight: Tensor
    """[R] gradient in the divergence."""
    share: Tensor
    """[R] gradient in log sum exp(z), divided by the shifted sum of exp(z)."""
    at_label: Tensor
    """[R] gradient in the label's logit."""
    beta: Tensor
    """Scalar; 0 where it is not wanted."""


def weigh(
    loss: DenseLoss,
    pair: Pair,
    sums: DenseSums,
    values: DenseValues,
    beta: Tensor,
    rows: Supervision,
    slopes: bool,
    differentiates: bool,
    head: HeadPart = HeadPart(),
) -> Weighed:
    """Compute value and gradients of `loss` for a chunk, in fp64.

    Args:
        beta: scalar, fp64.
        slopes: True if the gradient in beta is wanted. differentiates: False if none is; they are 0 then.
    """
    value_R, g_R, h_R, slope_R, at_one_R = (each.double() for each in values)
    label_R, teacher_R = (head.take(each, rows.labels[:, None]).squeeze(1) for each in (pair.z, pair.logprobs))
    teacher_R = teacher_R.double().clamp_min(FLOOR) - sums.top_e - sums.mass_e.double().log()
    if not slopes:
        value_R = value_R + _rounding(sums.beta_z) * g_R + _rounding(sums.beta_e) * h_R

    def value(lse_R: Tensor, label_R: Tensor, value_R: Tensor, moving: Tensor) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        moving_R = value_R + slope_R * (moving - beta) if slopes else value_R
        total, totals = loss(DenseStatistics(lse_R, label_R, moving_R, at_one_R, teacher_R), moving, rows)
        return total, (total, totals)

    inputs = (sums.top_z + sums.mass_z.double().log(), label_R.double(), value_R, beta)
    if differentiates:
        wanted = (0, 1, 2, 3) if slopes else (0, 1, 2)
        gradients, (total, totals) = torch.func.grad(value, argnums=wanted, has_aux=True)(*inputs)
    else:
        total, totals = value(*inputs)[1]
        gradients = tuple(torch.zeros_like(each) for each in inputs)
    g_lse_R, g_label_R, weight_R = gradients[:3]
    g_beta = gradients[3] if differentiates and slopes else torch.zeros_like(beta)
    kind = label_R.dtype
    share_R = (g_lse_R / sums.mass_z).to(kind)
    return Weighed(total, totals, weight_R.to(kind), share_R, g_label_R.to(kind), g_beta)


def spread_dense(
    pair: Pair,
    sums: DenseSums,
    sum_g_R: Tensor,
    weighed: Weighed,
    labels_R: Tensor,
    divergence: Named,
    head: HeadPart,
    into_RV: Tensor | None = None,
) -> None:
    """Write the gradient in u of a loss to `into_RV`, by default over `pair.z`; head: scale and soft cap."""
    z_RV = pair.z
    log_q_RV, log_p_RV = pair.log_softmax(sums)
    _, g_RV, _ = _derivatives(log_p_RV, log_q_RV, divergence)
    dz_RV = (pair.beta * weighed.weight)[:, None] * (g_RV - log_q_RV.exp() * sum_g_R.to(z_RV.dtype)[:, None])
    dz_RV = dz_RV + weighed.share[:, None] * (z_RV - sums.top_z[:, None]).exp()
    is_label_RV = torch.arange(z_RV.shape[1], device=z_RV.device) == labels_R[:, None] - head.first
    dz_RV = dz_RV + torch.where(is_label_RV, weighed.at_label[:, None], 0.0)
    (z_RV if into_RV is None else into_RV).copy_(dz_RV * head.slope(z_RV))


def _derivatives(log_p_RV: Tensor, log_q_RV: Tensor, divergence: Named) -> tuple[Tensor, Tensor, Tensor]:
    """Return the divergence [R], and its derivatives g in log q and h in log p, [R,V]."""
    name, parameter = divergence
    entry = DIVERGENCES.entries[name]
    if entry.derivatives is not None:
        values_R, g_RV, h_RV = entry.derivatives(log_p_RV, log_q_RV, parameter)
        return values_R, g_RV, h_RV

    def total(log_q_RV: Tensor, log_p_RV: Tensor) -> tuple[Tensor, Tensor]:
        values_R = entry.of(Events(log_p_RV, log_q_RV), parameter)
        return values_R.sum(), values_R

    (g_RV, h_RV), values_R = torch.func.grad(total, argnums=(0, 1), has_aux=True)(log_q_RV, log_p_RV)
    return values_R, g_RV, h_RV
