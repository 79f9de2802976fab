"""Targets: a teacher's distribution over the next token for each row, sparse or dense.

Everything is kept at temperature 1, as energies e_j = log p_j. At inverse temperature beta = 1/T the teacher
is
    p_beta(j) = exp(beta e_j) / Z(beta),   Z(beta) = sum_j exp(beta e_j),   Z(1) = 1.
Sparse targets keep the top-k entries exactly, samples of the tail with their counts, and for the tail as a whole the
log-partition L(beta) = log sum_{j in tail} exp(beta e_j) with its slope at a few knots of beta. Between the
knots L is a cubic Hermite polynomial in beta, so that Z(beta) and the tail's mass are right at temperatures
other than 1, which neither a bucket of mass 1 - sum p nor renormalising over the top-k is.

Given up: outside the knots L continues along its end slope, which is a lower bound of the true, convex L; the
temperature bounds of a cache keep callers inside. Nothing after this module knows where targets came from.

Shape suffixes: N tokens, K kept entries, H top-k entries, V vocabulary, G knots.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from typing import Any, Self, cast

import torch
from torch import Tensor

from kdtrain.objective.logits import Head, chunk_logits

EMPTY = -1e4
"""Energy of an impossible entry, in nats: exp(beta * EMPTY) is 0 at every usable beta, and no gradient is NaN."""

CLIP, SHARPNESS = 4.0, 4.0
"""Of the tail rule `control-variate`: the bound of r q / p, and how fast the share falls, in 1/nats."""

_DENSE_CHUNK = 1 << 22


class _Rows:
    """Selecting and moving rows, common to all kinds of targets."""

    def _map(self, change: Callable[[str, Tensor], Tensor]) -> Self:
        values = {f.name: getattr(self, f.name) for f in fields(cast(Any, self))}
        changed = {k: change(k, v) for k, v in values.items() if isinstance(v, Tensor)}
        return cast(Self, replace(cast(Any, self), **changed))

    def __getitem__(self, rows: slice) -> Self:
        """The rows `rows` of every tensor, as views."""
        return self._map(lambda _, tensor: tensor[rows])

    def each(self, change: Callable[[Tensor], Tensor]) -> Self:
        """The same targets with `change` applied to every tensor."""
        return self._map(lambda _, tensor: change(tensor))

    def to(self, device: torch.device | str, non_blocking: bool = False) -> Self:
        """A copy on `device`, which shares the tensors that are there already."""
        return self._map(lambda _, tensor: tensor.to(device, non_blocking=non_blocking))


@dataclass(frozen=True)
class SparseTargets(_Rows):
    """A teacher's top-k, its samples of the tail, and the tail's log-partition, for N tokens.

    The first `top_k` columns are the top-k, most likely first; the other K - top_k are distinct entries drawn
    from the tail at T = 1 (counts > 0), then absent padding. The tail is everything outside the top-k columns,
    so that drawn entries are members of it.
    """

    ids: Tensor
    """[N,K] int64. An id at or above the student's vocabulary marks an absent entry."""
    logprobs: Tensor
    """[N,K] fp32, nats. Teacher's log p at T = 1; meaningless but finite at absent entries. With `counts_only` the log
    of the share of samples, moved by one number a token so that its mean over the samples is E[log p]."""
    counts: Tensor
    """[N,K] fp32. How often an entry was drawn from the tail; 0 for top-k and absent entries."""
    tail: Tensor
    """[N,2G] fp32, nats. First L(beta_g) at the G knots, then dL/dbeta; an empty tail is `EMPTY`, slope 0."""
    label_logprob: Tensor
    """[N] fp32, nats. Teacher's log p of the label at T = 1."""
    logit_mean: Tensor
    """[N] fp32, nats. Mean over the vocabulary of log p: the mean logit, less log Z."""
    logit_std: Tensor
    """[N] fp32, nats. Standard deviation over the vocabulary of log p, and so of the logits."""
    top_k: int
    """Number of top-k columns, 0 for purely sampled targets."""
    num_samples: int
    """Number of samples of the tail a token (the sum of counts), 0 for none."""
    knots: tuple[float, ...]
    """The G values of beta at which the tail is known, descending, 1.0 among them."""
    known: Tensor | None = None
    """[N,6] nats, made by `at`: L at a beta, its slope there, and L at 1; then the same of log Z."""
    known_at_one: bool = False
    """True where every beta that is asked for is 1 (`at_one`)."""

    def __len__(self) -> int:
        return self.ids.shape[0]

    @property
    def counts_only(self) -> bool:
        """True where `logprobs` stand for counts: right at T = 1 only."""
        return self.top_k == 0 and len(self.knots) == 1

    def at(self, beta: Tensor) -> SparseTargets:
        """The same with L and log Z at `beta` (a scalar in fp64) and at 1 computed once, for all that ask later.

        `log_tail` and `log_partition` of the result, and of its rows, take every tensor for this beta.
        """
        wide = self.double()
        (tail_N, partition_N), (tail_one_N, partition_one_N) = wide._measure(beta), wide._measure(1.0)
        columns = [*tail_N, tail_one_N[0], *partition_N, partition_one_N[0]]
        return replace(self, known=torch.stack(columns, dim=1))

    def at_one(self) -> SparseTargets:
        """The same for beta = 1, where `at` has computed it already."""
        return self if self.known is None else replace(self, known_at_one=True)

    def log_tail(self, beta: Tensor | float) -> Tensor:
        """L(beta) [N] in nats, once differentiable in `beta` (a positive scalar): cubic Hermite between knots."""
        return _moving(*(self._look_up(0, beta) or self._measure(beta)[0]), beta)

    def log_partition(self, beta: Tensor | float) -> Tensor:
        """log Z(beta) [N] in nats, once differentiable in `beta`; 0 at beta = 1 up to rounding in storage."""
        return _moving(*(self._look_up(3, beta) or self._measure(beta)[1]), beta)

    def _look_up(self, column: int, beta: Tensor | float) -> tuple[Tensor, Tensor | float] | None:
        """Value and slope that `at` has computed for `beta`; None for another number than 1."""
        if self.known is None:
            return None
        if isinstance(beta, Tensor) and not self.known_at_one:
            return self.known[:, column], self.known[:, column + 1]
        return (self.known[:, column + 2], 0.0) if self.known_at_one or beta == 1 else None

    def _measure(self, beta: Tensor | float) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
        """L(beta) [N] and its slope, and log Z(beta) [N] and its slope, all without gradients."""
        dtype = beta.dtype if isinstance(beta, Tensor) else self.tail.dtype
        beta = scalar(beta, self.tail.device, dtype).detach()
        tail_N, slope_N = self._measure_tail(beta)
        energies_NH = self.logprobs[:, : self.top_k]
        parts_NH1 = torch.cat([beta * energies_NH, tail_N[:, None]], dim=-1)
        partition_N = torch.logsumexp(parts_NH1, dim=-1)
        shares_NH1 = (parts_NH1 - partition_N[:, None]).exp()
        mean_N = (shares_NH1[:, :-1] * energies_NH).sum(-1) + shares_NH1[:, -1] * slope_N
        return (tail_N, slope_N), (partition_N, mean_N)

    def _measure_tail(self, beta: Tensor) -> tuple[Tensor, Tensor]:
        ascending = _ascending(self.knots, beta.dtype, beta.device)
        values_NG, slopes_NG = (part.flip(-1) for part in self.tail.chunk(2, dim=-1))
        inside = beta.clamp(self.knots[-1], self.knots[0])
        end_slope_N = torch.where(beta < inside, slopes_NG[:, 0], slopes_NG[:, -1])
        beyond_N = end_slope_N * (beta - inside)
        if len(self.knots) == 1:
            return values_NG[:, 0] + slopes_NG[:, 0] * (inside - ascending[0]) + beyond_N, end_slope_N
        # An index without dimensions would be read by the host, which then waits for the device.
        right = torch.bucketize(inside[None], ascending).clamp(1, len(self.knots) - 1)
        ends = torch.cat([right - 1, right])
        left, width = ascending[ends[:1]], ascending[ends].diff()
        t = (inside - left) / width
        values_N2, slopes_N2 = values_NG[:, ends], slopes_NG[:, ends] * width
        # Weights [2] of the two end values, and of the two end slopes times the width; then their slopes in t.
        of_values = torch.cat([(1 + 2 * t) * (1 - t) ** 2, t**2 * (3 - 2 * t)])
        of_slopes = torch.cat([t * (1 - t) ** 2, t**2 * (t - 1)])
        rise = 6 * t * (1 - t)
        value_rise, slope_rise = torch.cat([-rise, rise]), torch.cat([(1 - t) * (1 - 3 * t), t * (3 * t - 2)])
        value_N = (values_N2 * of_values + slopes_N2 * of_slopes).sum(-1)
        return value_N + beyond_N, (values_N2 * value_rise + slopes_N2 * slope_rise).sum(-1) / width

    def top_logprobs(self, beta: Tensor | float) -> Tensor:
        """log p_beta of the top-k entries [N,H] in nats, differentiable in `beta`."""
        return beta * self.logprobs[:, : self.top_k] - self.log_partition(beta)[:, None]

    def drawn_weights(self, beta: Tensor | float) -> Tensor:
        """[N,D] (c_k / n) p_beta(k) / pi_k of the drawn columns, with pi_k their chance at a draw; 0 where absent.

        They estimate the teacher's probabilities in the tail without bias at every beta.
        """
        return self.counts[:, self.top_k :] / self.num_samples * self._drawn_ratio(beta).exp()

    def bounded_weights(self, beta: Tensor | float) -> Tensor:
        """[N,D] the same with p_beta(k) / pi_k at most sqrt(n) times the tail's mass at beta, its mean over draws."""
        log_mass_N1 = (self.log_tail(beta) - self.log_partition(beta))[:, None]
        excess_ND = (self._drawn_ratio(beta) - log_mass_N1).clamp(max=0.5 * math.log(max(self.num_samples, 1)))
        return self.counts[:, self.top_k :] / self.num_samples * (log_mass_N1 + excess_ND).exp()

    def _drawn_ratio(self, beta: Tensor | float) -> Tensor:
        """log of p_beta(k) / pi_k [N,D]; `EMPTY` where absent."""
        # Without a top-k the samples come from the whole distribution, whose mass at T = 1 is exactly 1.
        log_mass_N1 = self.log_tail(1.0)[:, None] if self.top_k else 0.0
        ratio_ND = (beta - 1) * self.logprobs[:, self.top_k :] - self.log_partition(beta)[:, None] + log_mass_N1
        # An absent entry has energy EMPTY, and exp((beta - 1) EMPTY) is infinite above T = 1.
        return ratio_ND.masked_fill(self.counts[:, self.top_k :] == 0, EMPTY)

    def without_absent(self, vocab_size: int) -> SparseTargets:
        """The same with energy `EMPTY` and count 0 at absent entries, which gives them weight 0."""
        absent_NK = self.ids >= vocab_size
        logprobs_NK = self.logprobs.masked_fill(absent_NK, EMPTY)
        return replace(self, logprobs=logprobs_NK, counts=self.counts.masked_fill(absent_NK, 0.0))

    def double(self) -> SparseTargets:
        """The same in fp64."""
        return self._map(lambda name, tensor: tensor if name == "ids" else tensor.double())

    def where(self, keep_N: Tensor) -> SparseTargets:
        """The same with rows outside `keep_N` made harmless, whatever they held (NaN, inf)."""
        blank = {"ids": 0, "logprobs": EMPTY, "tail": 0.0}
        return self._map(lambda name, tensor: _keep(tensor, keep_N, blank.get(name, 0.0)))


@dataclass(frozen=True)
class DenseTargets(_Rows):
    """A teacher's whole distribution for N tokens: the reference, and the targets of an online teacher."""

    logprobs: Tensor
    """[N,V] fp32, fp16 or bf16, nats. Teacher's log p at T = 1; -inf counts as probability 0."""
    label_logprob: Tensor
    """[N] fp32, nats. Teacher's log p of the label at T = 1."""

    def __len__(self) -> int:
        return self.logprobs.shape[0]

    @property
    def columns(self) -> int:
        """V."""
        return self.logprobs.shape[1]

    @classmethod
    def from_logits(cls, logits_NV: Tensor, labels_N: Tensor, vocab_size: int | None = None) -> DenseTargets:
        """Targets from an online teacher's logits, in fp32, without the columns from `vocab_size` on."""
        logprobs_NV = torch.log_softmax(logits_NV[:, :vocab_size].float(), dim=-1)
        return cls(logprobs_NV, logprobs_NV.gather(-1, labels_N[:, None]).squeeze(-1))

    def energies(self) -> Tensor:
        """log p [N,V] in at least fp32, bounded below by `EMPTY`: p log p is then 0 and not NaN at p = 0."""
        dtype = torch.promote_types(self.logprobs.dtype, torch.float32)
        return self.logprobs.to(dtype).clamp_min(EMPTY)

    def log_partition(self, beta: Tensor | float, keep_N: Tensor | None = None) -> Tensor:
        """log Z(beta) [N] in nats, once differentiable in `beta`, without a second [N,V] tensor.

        Rows outside `keep_N` give 0, whatever they hold. Value and slope (E_p_beta[e]) are computed chunk by chunk and
        joined as L + L' (beta - stop_gradient(beta)).
        """
        fixed = beta.detach() if isinstance(beta, Tensor) else beta
        rows = max(1, _DENSE_CHUNK // self.logprobs.shape[1])
        values: list[Tensor] = []
        slopes: list[Tensor] = []
        with torch.no_grad():
            for start in range(0, len(self), rows):
                energies_NV = self[start : start + rows].energies()
                scaled_NV = fixed * energies_NV
                values.append(torch.logsumexp(scaled_NV, dim=-1))
                slopes.append(((scaled_NV - values[-1][:, None]).exp_() * energies_NV).sum(-1))
        if not values:
            return self.label_logprob.new_zeros(0)
        values_N, slopes_N = torch.cat(values), torch.cat(slopes)
        if keep_N is not None:
            values_N, slopes_N = _keep(values_N, keep_N, 0.0), _keep(slopes_N, keep_N, 0.0)
        return values_N + slopes_N * (beta - fixed)

    def narrow(self, vocab_size: int) -> DenseTargets:
        """The distribution over the first `vocab_size` entries, for a teacher's head padded beyond the student's."""
        if self.logprobs.shape[1] <= vocab_size:
            return self
        kept_NV = self.logprobs[:, :vocab_size].float()
        mass_N = torch.logsumexp(kept_NV, dim=-1)
        return DenseTargets(kept_NV - mass_N[:, None], self.label_logprob - mass_N)

    def where(self, keep_N: Tensor) -> DenseTargets:
        """The same with rows outside `keep_N` made harmless (log p = 0 everywhere, finite)."""
        return self._map(lambda _, tensor: _keep(tensor, keep_N, 0.0))


@dataclass(frozen=True)
class OnlineTargets(_Rows):
    """An online teacher's last hidden states for N tokens: its logits are computed a few rows at a time."""

    hidden: Tensor
    """[N,D] of the teacher's width, any float dtype; [N,P] logits where its head has no weight."""
    labels: Tensor
    """[N] int64; any number where masked."""
    head: Head
    """The teacher's, with at least V rows."""
    columns: int
    """V."""

    def __len__(self) -> int:
        return self.hidden.shape[0]

    def dense(self) -> DenseTargets:
        """All logits at once, [N,V]: for a few rows."""
        return DenseTargets.from_logits(chunk_logits(self.hidden, self.head, self.columns), self.labels)

    @property
    def label_logprob(self) -> Tensor:
        """[N] fp32, nats. Teacher's log p of the label at T = 1; costs a product with the head."""
        parts = [part.dense().label_logprob for part in self._parts()]
        return torch.cat(parts) if parts else self.hidden.new_zeros(0, dtype=torch.float32)

    def log_partition(self, beta: Tensor | float, keep_N: Tensor | None = None) -> Tensor:
        """As that of `DenseTargets`; costs a product with the head."""
        kept = self if keep_N is None else self.where(keep_N)
        parts = [part.dense().log_partition(beta) for part in kept._parts()]
        values_N = torch.cat(parts) if parts else self.hidden.new_zeros(0, dtype=torch.float32)
        return values_N if keep_N is None else _keep(values_N, keep_N, 0.0)

    def where(self, keep_N: Tensor) -> OnlineTargets:
        """The same with rows outside `keep_N` made harmless (hidden states and label 0)."""
        return self._map(lambda _, tensor: _keep(tensor, keep_N, 0))

    def _parts(self) -> list[OnlineTargets]:
        rows = max(1, _DENSE_CHUNK // self.columns)
        return [self[i : i + rows] for i in range(0, len(self), rows)]


Targets = SparseTargets | DenseTargets | OnlineTargets


def per_token(total: Tensor, normalizer: Tensor | float) -> Tensor:
    """`total / normalizer`; `total`, which is then 0, if a step has no unmasked token, so that nothing is NaN."""
    count = scalar(normalizer, total.device, total.dtype)
    return total / torch.where(count > 0, count, torch.ones_like(count))


def scalar(value: Tensor | float, device: torch.device, dtype: torch.dtype | None = None) -> Tensor:
    """A number as a tensor on `device`, filled in there: a copy from the host would wait for all queued work."""
    if isinstance(value, Tensor):
        return value.to(device, dtype or value.dtype)
    return torch.full((), value, dtype=dtype, device=device)


def _moving(value_N: Tensor, slope_N: Tensor | float, beta: Tensor | float) -> Tensor:
    """The value, with this slope as its gradient in `beta`."""
    return value_N + slope_N * (beta - beta.detach()) if isinstance(beta, Tensor) else value_N


@functools.lru_cache(maxsize=64)
def _ascending(knots: tuple[float, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """The knots in ascending order, copied to the device once."""
    return torch.tensor(knots[::-1], dtype=dtype, device=device)


def _keep(tensor: Tensor, keep_N: Tensor, blank: float) -> Tensor:
    drop = ~keep_N if tensor.ndim == 1 else ~keep_N[:, None]
    return tensor.masked_fill(drop, blank)
