"""A chunk of logits with dense targets: row sums, divergence, and gradient in the logits.

A divergence D(log p, log q) of p = softmax(beta e) and q = softmax(beta z) has, with g = dD/dlog q and h = dD/dlog p
as if these were free, the gradients
    dD/dz    = beta (g - q sum g),
    dD/dbeta = sum g (z - E_q z) + sum h (e - E_p e).
Three functions walk the chunk: the sums of exponentials, the divergence and its sums of g and h, and the gradient,
written over the logits. Each computes g again from the logits instead of keeping it. torch.compile fuses each into one
or two passes, and autograd of the divergence alone gives g and h, so that a new divergence is still a few lines.

All sums are shifted by the largest entry of their row; the error that rounding log-sums to fp32 makes in the divergence
is corrected in fp64.

Shape suffixes: R rows, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from kdtrain.config.choices import DIVERGENCES
from kdtrain.objective.logits import cap_slope
from kdtrain.objective.tails import Events
from kdtrain.objective.targets import EMPTY


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


@dataclass(frozen=True)
class Shift:
    """One side of a comparison: its largest entry and the log of its shifted sum of exponentials, each [R]."""

    top: Tensor
    log_mass: Tensor
    """In the dtype of the values: fp64 would be converted at every element of the row."""

    @classmethod
    def of(cls, top_R: Tensor, mass_R: Tensor) -> Shift:
        """From the largest entry and the shifted sum of exponentials."""
        return cls(top_R, mass_R.double().log().to(top_R.dtype))

    def log_softmax(self, values_RV: Tensor, beta: Tensor | float) -> Tensor:
        """log softmax(beta * values), in the dtype of the values."""
        return beta * (values_RV - self.top[:, None]) - self.log_mass[:, None]

    def rounding(self, mass_R: Tensor) -> Tensor:
        """[R] fp64: how much too low `log_softmax` is because the log of the mass was rounded."""
        return self.log_mass.double() - mass_R.double().log()


def sum_dense(z_RV: Tensor, logprobs_RV: Tensor, beta: Tensor, slopes: bool, at_one: bool) -> tuple[Tensor, ...]:
    """Largest z and e, sums of exp(z), exp(e), exp(beta z), exp(beta e), and the means of z and e at beta; each [R].

    All but the first two are of values shifted by the largest. The means are 0 unless the gradient in beta is wanted
    (`slopes`), and the sum of exp(e) is 0 unless the divergence is measured at T = 1 (`at_one`).
    """
    energies_RV = _energies(z_RV, logprobs_RV)
    results = []
    for values_RV, wants_mass in ((z_RV, True), (energies_RV, at_one)):
        top_R = values_RV.amax(1)
        shifted_RV = values_RV - top_R[:, None]
        heated_RV = (beta * shifted_RV).exp()
        mass_beta_R = heated_RV.sum(1)
        mean_R = (heated_RV * shifted_RV).sum(1) / mass_beta_R if slopes else torch.zeros_like(top_R)
        mass_R = shifted_RV.exp().sum(1) if wants_mass else torch.zeros_like(top_R)
        results.append((top_R, mass_R, mass_beta_R, mean_R))
    return tuple(each for pair in zip(*results, strict=True) for each in pair)


def measure_dense(
    z_RV: Tensor,
    logprobs_RV: Tensor,
    beta: Tensor,
    student: Shift,
    teacher: Shift,
    divergence: str,
    parameter: float,
    slopes: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """The divergence [R], sum g, sum h, and the sums of g z and h e (shifted), which give its slope in beta.

    The last two are 0 unless the slope is wanted (`slopes`).
    """
    energies_RV = _energies(z_RV, logprobs_RV)
    log_q_RV, log_p_RV = student.log_softmax(z_RV, beta), teacher.log_softmax(energies_RV, beta)

    values_R, g_RV, h_RV = _derivatives(log_p_RV, log_q_RV, divergence, parameter)
    moment_q_R = moment_p_R = torch.zeros_like(values_R)
    if slopes:
        moment_q_R = (g_RV * (z_RV - student.top[:, None])).sum(1)
        moment_p_R = (h_RV * (energies_RV - teacher.top[:, None])).sum(1)
    return values_R, g_RV.sum(1), h_RV.sum(1), moment_q_R, moment_p_R


def value_dense(
    z_RV: Tensor, logprobs_RV: Tensor, student: Shift, teacher: Shift, divergence: str, parameter: float
) -> Tensor:
    """The divergence [R] at beta = 1."""
    log_p_RV = teacher.log_softmax(_energies(z_RV, logprobs_RV), 1.0)
    return DIVERGENCES.entries[divergence].of(Events(log_p_RV, student.log_softmax(z_RV, 1.0)), parameter)


def spread_dense(
    z_RV: Tensor,
    logprobs_RV: Tensor,
    beta: Tensor,
    student: Shift,
    teacher: Shift,
    sum_g_R: Tensor,
    weight_R: Tensor,
    share_R: Tensor,
    divergence: str,
    parameter: float,
    scale: float,
    softcap: float | None,
) -> None:
    """Overwrite `z_RV` with the gradient in u of a loss of the divergence and of log sum exp(z).

    weight_R: the loss's gradient in the divergence. share_R: its gradient in log sum exp(z), divided by the shifted sum
    of exp(z).
    """
    log_q_RV = student.log_softmax(z_RV, beta)
    log_p_RV = teacher.log_softmax(_energies(z_RV, logprobs_RV), beta)
    _, g_RV, _ = _derivatives(log_p_RV, log_q_RV, divergence, parameter)
    dz_RV = (beta * weight_R)[:, None] * (g_RV - log_q_RV.exp() * sum_g_R[:, None])
    dz_RV = dz_RV + share_R[:, None] * (z_RV - student.top[:, None]).exp()
    z_RV.copy_(dz_RV * (scale * cap_slope(z_RV, softcap)))


def _derivatives(
    log_p_RV: Tensor, log_q_RV: Tensor, divergence: str, parameter: float
) -> tuple[Tensor, Tensor, Tensor]:
    """The divergence [R], g and h."""
    if divergence == "jsd":
        return _jsd(log_p_RV, log_q_RV, parameter)

    def total(log_q_RV: Tensor, log_p_RV: Tensor) -> tuple[Tensor, Tensor]:
        values_R = DIVERGENCES.entries[divergence].of(Events(log_p_RV, log_q_RV), parameter)
        return values_R.sum(), values_R

    (g_RV, h_RV), values_R = torch.func.grad(total, argnums=(0, 1), has_aux=True)(log_q_RV, log_p_RV)
    return values_R, g_RV, h_RV


def _jsd(log_p_RV: Tensor, log_q_RV: Tensor, share: float) -> tuple[Tensor, Tensor, Tensor]:
    """The JSD, g and h by hand, in half the time: the terms from the mixture's logarithm cancel, and autograd would
    compute them all the same.

    g = (1 - b) q log(q/m) and h = b p log(p/m), which add up to the divergence.
    """
    p_RV, q_RV = log_p_RV.exp(), log_q_RV.exp()
    mixed_RV = (share * p_RV + (1 - share) * q_RV).clamp_min(torch.finfo(p_RV.dtype).tiny).log()
    g_RV, h_RV = (1 - share) * q_RV * (log_q_RV - mixed_RV), share * p_RV * (log_p_RV - mixed_RV)
    return (g_RV + h_RV).sum(1), g_RV, h_RV


def _energies(z_RV: Tensor, logprobs_RV: Tensor) -> Tensor:
    """log p in the dtype of the logits, bounded below: p log p is then 0 and not NaN at p = 0."""
    return logprobs_RV.to(z_RV.dtype).clamp_min(EMPTY)
