"""Targets: a teacher's distribution over the next token for each row, sparse, dense or made online.

Everything is kept at temperature 1, as energies e_j = log p_j. At inverse temperature beta = 1/T the teacher
is
    p_beta(j) = exp(beta e_j) / Z(beta),   Z(beta) = sum_j exp(beta e_j),   Z(1) = 1.
Sparse targets keep the top-k entries exactly, samples of the tail with their counts, and for the tail as a whole the
log-partition L(beta) = log sum_{j in tail} exp(beta e_j) with its slope at a few knots of beta. Between the
knots L is a cubic Hermite polynomial in beta, so that Z(beta) and the tail's mass are right at temperatures
other than 1, which neither a bucket of mass 1 - sum p nor renormalising over the top-k is.

Each kind states how the engine walks it, how metrics measure it and what it cannot be used for (`Targets`):
another kind is another subclass, and no code asks for the kind.

Given up: outside the knots L continues along its end slope, which is a lower bound of the true, convex L; the
temperature bounds of a cache keep callers inside. Nothing after this module knows where targets came from.

Shape suffixes: N tokens, R rows of a chunk, K kept entries, H top-k entries, D drawn ones, V vocabulary, G knots.
"""

from __future__ import annotations

import functools
import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, NamedTuple, Self, cast

import torch
from torch import Tensor

from kdtrain.config.choices import TAILS
from kdtrain.models.output_head import HeadPart
from kdtrain.objective.statistics import Entries, Events, Statistics

if TYPE_CHECKING:
    from kdtrain.objective.cells import CellIndex
    from kdtrain.objective.logits import ChunkLogits

Measure = Callable[[Events], Tensor]
FLOOR = -1e4
"""log p of an impossible entry and L of an empty tail, nats: exp(beta * FLOOR) is 0 at every usable beta."""
ANY_T = (0.25, 20.0)
"""The temperatures of targets that are right at any: the bounds that options allow."""
_DENSE_CHUNK = 1 << 22


class Comparison(NamedTuple):
    """Teacher and student at T = 1, as metrics compare them."""

    divergence: Events
    """Those of the KL."""
    overlap: Events
    """Those of sum min(p, q)."""
    most_likely: Tensor | None
    """[R] the teacher's most likely token; None if the targets do not contain it."""
    in_parts: bool = False
    """True if the events are the columns of the head: what is summed over them is a part of the sum."""


class Targets(ABC):
    """A teacher's distributions of N rows. A kind is a frozen dataclass of tensors whose first dimension is N.

    A kind is compared with the student at single entries of a row (`entries`, `events`), or over whole rows of `width`
    columns (`row_logprobs`). The defaults are those of whole rows.
    """

    label_logprob: Tensor
    """[N] fp32, nats. Teacher's log p of the label at T = 1."""
    top_k: int
    num_samples: int
    """Entries of a row that are kept exactly, and samples of the rest."""
    width: int | None
    """V of whole rows; None for single entries."""
    policy: Tensor | None = None
    """[N] fp32, nats. Log p of the label at T = 1 of the student that wrote it; None: no student wrote the text."""
    baseline: Tensor | None = None
    """[N] fp32, nats. What a loss of the label drawn subtracts from its log-ratio; None: nothing."""
    has_tail = False
    """True where a tail rule stands for entries that are not stored; a divergence sees the others as dense."""
    only_at_one = False
    """True for targets that are right at T = 1 only."""
    known_at_one: bool = False
    """True where every requested beta is 1 (`at_one`)."""
    has_top = True
    """True for targets that know the teacher's most likely token."""
    forward_only = False
    """True for targets from which forward KL alone can be computed, whatever else they say."""
    floored: tuple[str, ...] = ()
    """The tensors whose blank rows are `FLOOR`, not 0."""
    cells: CellIndex | None = None
    """Groups of tokens that `entries` are, in place of tokens."""
    parts: tuple[tuple[int, Targets | None], ...] = ()
    """Of several kinds of targets, each by itself (`objective.mixed`): a number of rows and their targets."""
    members: tuple[int, ...] = ()
    """The number of the member of a mixture that each of the parts is of, where that matters."""

    @abstractmethod
    def __len__(self) -> int: ...

    def map(self, change: Callable[[str, Tensor], Tensor]) -> Self:
        """Return the same targets with `change` applied to the name and value of every tensor."""
        return cast(Self, replace(cast(Any, self), **{k: change(k, v) for k, v in self._tensors().items()}))

    def __getitem__(self, rows: slice) -> Self:
        """Return the rows `rows` of every tensor, as views."""
        return self.map(lambda _, tensor: tensor[rows])

    def by_parts(self, of: Callable[[Self], Tensor]) -> Tensor:
        """Apply `of` to a few whole rows at a time, and join its results [...,R]."""
        rows = max(1, _DENSE_CHUNK // (self.width or 1))
        return torch.cat([of(self[i : i + rows]) for i in range(0, max(1, len(self)), rows)], dim=-1)

    def each(self, change: Callable[[Tensor], Tensor]) -> Self:
        """Return the same targets with `change` applied to every tensor."""
        return self.map(lambda _, tensor: change(tensor))

    def to(self, device: torch.device | str, non_blocking: bool = False) -> Self:
        """Return a copy on `device`, which shares the tensors that are there already."""
        return self.each(lambda tensor: tensor.to(device, non_blocking=non_blocking))

    def _tensors(self) -> dict[str, Tensor]:
        return {name: value for name, value in vars(self).items() if isinstance(value, Tensor)}

    def fields(self, shape: tuple[int, int]) -> dict[str, Tensor]:
        """Return the tensors by name, as a data loader has them, of first dimensions `shape`: sequences, positions."""
        return {name: value.unflatten(0, shape) for name, value in self._tensors().items()}

    def shown(self) -> dict[str, Tensor]:
        """Return the tensors by name, finite unless the teacher's numbers are broken."""
        return self._tensors()

    def where(self, keep_N: Tensor) -> Self:
        """Return the same targets with finite numbers in the rows outside `keep_N`, whatever they held (NaN, inf)."""
        return self.map(lambda name, tensor: _keep(tensor, keep_N, FLOOR if name in self.floored else 0))

    def without_absent(self, vocab_size: int) -> Self:
        """Return the same targets with weight 0 at entries that are absent."""
        return self

    def double(self) -> Self:
        """Return the same targets in fp64, where that is a few numbers a row."""
        return self

    def narrow(self, vocab_size: int) -> Self:
        """Return the targets over the first `vocab_size` entries, for a teacher's head padded beyond the student's."""
        return self

    def resolved(self) -> Targets:
        """Return the same targets with nothing left to compute; for a few rows."""
        return self

    def listed(self) -> tuple[Tensor, Tensor]:
        """Return the ids [N,K] of the entries that are kept, and each one's probability at T = 1; 0 where it is absent.

        Only `resolved` targets have it.
        """
        raise NotImplementedError

    def at(self, beta: Tensor) -> Self:
        """Return the same targets after computing once what depends on `beta` (fp64 scalar) alone, for it and for 1."""
        return self

    def at_one(self) -> Self:
        """Return the same targets for beta = 1, where `at` has computed the numbers already."""
        return self

    @abstractmethod
    def log_partition(self, beta: Tensor | float, keep_N: Tensor | None = None) -> Tensor:
        """Return log Z(beta) [N] in nats, once differentiable in `beta`, a positive scalar.

        keep_N: the rows that count; others may hold anything, and give a finite number.
        """

    def entries(self, labels_N: Tensor, vocab_size: int) -> Entries:
        """Return the single entries that are compared, with valid labels."""
        raise NotImplementedError

    def events(self, tail: str, statistics: Statistics, beta: Tensor) -> Events:
        """Return what the tail rule `tail` (`tails.resolve_tail`) compares at `beta`; absent entries have weight 0."""
        raise NotImplementedError

    def measured(self, measure: Measure, tail: str, statistics: Statistics, beta: Tensor) -> tuple[Tensor, Tensor]:
        """Return each row's term, [R] in nats, and its distance from the teacher alone: `measure` of the events."""
        return (measure(self.events(tail, statistics, beta)),) * 2

    def common(self) -> Tensor | None:
        """Return where a teacher with another tokenizer predicts the label's first byte, [N] bool; else None."""
        return None

    def label_bytes(self, own_N: Tensor) -> Tensor:
        """Return the bytes [N] of the labels that `label_logprob` is of: here each row's own, which are given."""
        return own_N

    def reader(self, chunk: int, compile: bool, columns: slice) -> ChunkLogits | None:
        """Return what `row_logprobs` needs to compute these columns of chunks of at most `chunk` rows, if anything."""
        return None

    def row_logprobs(self, reader: ChunkLogits | None, columns: slice) -> Tensor:
        """Return the teacher's log p [R,V] at T = 1, up to a constant a row, in these columns of at most a chunk."""
        raise NotImplementedError

    def compare(self, z_RV: Tensor, labels_R: Tensor, head: HeadPart) -> Comparison:
        """Compare `resolved` targets with the student's logits at the columns of `head`, which may be overwritten."""
        raise NotImplementedError


@dataclass(frozen=True)
class Supervision:
    """The inputs of a loss for some rows, besides logits."""

    labels: Tensor
    """[R] int64."""
    mask: Tensor
    """[R] bool, True where the token counts."""
    targets: Targets | None
    """R rows, or none."""

    def __getitem__(self, rows: slice) -> Supervision:
        return Supervision(self.labels[rows], self.mask[rows], None if self.targets is None else self.targets[rows])

    def harmless(self, vocab_size: int) -> Supervision:
        """Return the inputs with finite numbers and a valid label in masked rows, and weight 0 at absent entries."""
        whole = readable(self.mask) and bool(self.mask.all())
        labels, targets = self.labels, self.targets
        if not whole:
            labels = labels.masked_fill(~self.mask, 0)
            targets = None if targets is None else targets.where(self.mask)
        return Supervision(labels, self.mask, None if targets is None else targets.without_absent(vocab_size))

    def double(self) -> Supervision:
        """Return the same inputs with sparse targets in fp64."""
        return replace(self, targets=None if self.targets is None else self.targets.double())


@dataclass(frozen=True)
class SparseTargets(Targets):
    """A teacher's top-k, its samples of the tail, and the tail's log-partition, for N tokens.

    The first `top_k` columns are the top-k, most likely first; the other K - top_k are distinct entries drawn
    from the tail at T = 1 (counts > 0), then absent padding. The tail is everything outside the top-k columns,
    so that drawn entries are members of it.
    """

    ids: Tensor
    """[N,K] int64. An id at or above the student's vocabulary marks an absent entry."""
    logprobs: Tensor
    """[N,K] fp32, nats. Teacher's log p at T = 1; meaningless but finite at absent entries. With `only_at_one` the log
    of the share of samples, moved by one number a token so that its mean over the samples is E[log p]."""
    counts: Tensor
    """[N,K] fp32. How often an entry was drawn from the tail; 0 for top-k and absent entries."""
    tail: Tensor
    """[N,2G] fp32, nats. First L(beta_g) at the G knots, then dL/dbeta; an empty tail is `FLOOR`, slope 0."""
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
    partial: Tensor | None = None
    """[N,K] 1 where an entry has at least its log p, and some of the tail's mass may be its own (`teacher_cells`)."""
    policy: Tensor | None = None
    baseline: Tensor | None = None

    width = None
    has_tail = True
    floored = ("logprobs",)

    def __len__(self) -> int:
        return self.ids.shape[0]

    @property
    def only_at_one(self) -> bool:  # type: ignore[override]
        """True where `logprobs` stand for counts."""
        return self.top_k == 0 and len(self.knots) == 1

    @property
    def has_top(self) -> bool:  # type: ignore[override]
        """True with a top-k."""
        return self.top_k > 0

    def fields(self, shape: tuple[int, int]) -> dict[str, Tensor]:
        """Return the tensors by name, counts of the drawn columns only, and each sequence's knots and num_samples."""
        counts = self.counts[:, self.top_k :].unflatten(0, shape)
        knots = torch.tensor(self.knots, dtype=torch.float64).expand(shape[0], -1)
        drawn = {"counts": counts, "knots": knots, "num_samples": torch.tensor(self.num_samples).expand(shape[0])}
        return super().fields(shape) | drawn

    def listed(self) -> tuple[Tensor, Tensor]:
        if self.only_at_one:
            return self.ids, self.counts / self.num_samples
        return self.ids, self.logprobs.exp()  # an absent entry has the log p FLOOR

    def at(self, beta: Tensor) -> SparseTargets:
        """Return targets with L and log Z at `beta` and 1; `log_tail` and `log_partition` then take no other tensor."""
        wide = self.double()
        (tail_N, partition_N), (tail_one_N, partition_one_N) = wide._measure(beta), wide._measure(1.0)
        columns = [*tail_N, tail_one_N[0], *partition_N, partition_one_N[0]]
        return replace(self, known=torch.stack(columns, dim=1))

    def at_one(self) -> SparseTargets:
        return self if self.known is None else replace(self, known_at_one=True)

    def log_tail(self, beta: Tensor | float) -> Tensor:
        """Return L(beta) [N] in nats, once differentiable in `beta`, a positive scalar: cubic Hermite between knots."""
        return _moving(*(self._look_up(0, beta) or self._measure(beta)[0]), beta)

    def log_partition(self, beta: Tensor | float, keep_N: Tensor | None = None) -> Tensor:
        """Return log Z(beta) [N] in nats, once differentiable in `beta`; 0 at beta = 1 up to rounding in storage."""
        if keep_N is not None:
            return self.where(keep_N).log_partition(beta)
        return _moving(*(self._look_up(3, beta) or self._measure(beta)[1]), beta)

    def _look_up(self, column: int, beta: Tensor | float) -> tuple[Tensor, Tensor | float] | None:
        """Return value and slope that `at` has computed for `beta`; None for another number than 1."""
        if self.known is None:
            return None
        if isinstance(beta, Tensor) and not self.known_at_one:
            return self.known[:, column], self.known[:, column + 1]
        return (self.known[:, column + 2], 0.0) if self.known_at_one or beta == 1 else None

    def _measure(self, beta: Tensor | float) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
        """Return L(beta) [N] and its slope, and log Z(beta) [N] and its slope, all without gradients."""
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
        left = ascending[ends[:1]]
        width = ascending[ends].diff()
        t = (inside - left) / width
        values_N2 = values_NG[:, ends]
        slopes_N2 = slopes_NG[:, ends] * width
        # Weights [2] of the two end values, and of the two end slopes times the width; then their slopes in t.
        of_values = torch.cat([(1 + 2 * t) * (1 - t) ** 2, t**2 * (3 - 2 * t)])
        of_slopes = torch.cat([t * (1 - t) ** 2, t**2 * (t - 1)])
        rise = 6 * t * (1 - t)
        value_rise, slope_rise = torch.cat([-rise, rise]), torch.cat([(1 - t) * (1 - 3 * t), t * (3 * t - 2)])
        value_N = (values_N2 * of_values + slopes_N2 * of_slopes).sum(-1)
        return value_N + beyond_N, (values_N2 * value_rise + slopes_N2 * slope_rise).sum(-1) / width

    def top_logprobs(self, beta: Tensor | float) -> Tensor:
        """Return log p_beta of the top-k entries [N,H] in nats, differentiable in `beta`."""
        return beta * self.logprobs[:, : self.top_k] - self.log_partition(beta)[:, None]

    def drawn_weights(self, beta: Tensor | float) -> Tensor:
        """Return [N,D] (c_k / n) p_beta(k) / pi_k of the drawn columns, pi_k their chance at a draw; 0 where absent.

        They estimate the teacher's probabilities in the tail without bias at every beta.
        """
        shares_ND = self.counts[:, self.top_k :] / self.num_samples
        if self.known_at_one:  # p(k) / pi_k is the same number for all of a token's entries
            log_mass_N = self.log_tail(beta) if self.top_k else 0.0
            return shares_ND * (log_mass_N - self.log_partition(beta)).exp()[:, None]
        return shares_ND * self._drawn_ratio(beta).exp()

    def bounded_weights(self, beta: Tensor | float) -> Tensor:
        """Return `drawn_weights` with p_beta(k) / pi_k at most sqrt(n) times its mean, the tail's mass at beta."""
        log_mass_N1 = (self.log_tail(beta) - self.log_partition(beta))[:, None]
        excess_ND = (self._drawn_ratio(beta) - log_mass_N1).clamp(max=0.5 * math.log(max(self.num_samples, 1)))
        return self.counts[:, self.top_k :] / self.num_samples * (log_mass_N1 + excess_ND).exp()

    def _drawn_ratio(self, beta: Tensor | float) -> Tensor:
        """Return the log of p_beta(k) / pi_k [N,D]; 0 where absent."""
        # Without a top-k the samples come from the whole distribution, whose mass at T = 1 is exactly 1.
        log_mass_N1 = self.log_tail(1.0)[:, None] if self.top_k else 0.0
        ratio_ND = (beta - 1) * self.logprobs[:, self.top_k :] - self.log_partition(beta)[:, None] + log_mass_N1
        # An absent entry has energy FLOOR, and exp((beta - 1) FLOOR) is infinite above T = 1. Its count of 0 takes it
        # out; exp of a very low number instead would take a CPU six times as long.
        return ratio_ND.masked_fill(self.counts[:, self.top_k :] == 0, 0.0)

    def without_absent(self, vocab_size: int) -> SparseTargets:
        """Return the same targets with energy `FLOOR` and count 0 at absent entries, which gives them weight 0."""
        absent_NK = self.ids >= vocab_size
        logprobs_NK = self.logprobs.masked_fill(absent_NK, FLOOR)
        return replace(self, logprobs=logprobs_NK, counts=self.counts.masked_fill(absent_NK, 0.0))

    def double(self) -> SparseTargets:
        return self.map(lambda name, tensor: tensor if name == "ids" else tensor.double())

    def entries(self, labels_N: Tensor, vocab_size: int) -> Entries:
        absent_NK = self.ids >= vocab_size
        first_N1 = self.ids[:, :1].masked_fill(absent_NK[:, :1], 0)
        ids_NK = torch.where(absent_NK, first_N1, self.ids)
        return Entries(torch.cat([ids_NK, labels_N[:, None]], dim=1), absent_NK, self.top_k)

    def statistics(self, z_RV: Tensor, labels_R: Tensor, head: HeadPart) -> Statistics:
        """Return the student's statistics at beta = 1, without gradients; overwrite the top-k logits in `z_RV`."""
        entries = self.entries(labels_R, head.size or z_RV.shape[1])
        kept_RK, label_R = entries.take(z_RV, head).logits(z_RV.dtype)
        tail_R = head.log_sum_exp(z_RV)
        return Statistics(tail_R, tail_R, kept_RK, label_R, self.top_k)

    def events(self, tail: str, statistics: Statistics, beta: Tensor) -> Events:
        return TAILS.get(tail).events(self, statistics, beta)  # type: ignore[no-any-return]

    def compare(self, z_RV: Tensor, labels_R: Tensor, head: HeadPart) -> Comparison:
        statistics = self.statistics(z_RV, labels_R, head)
        one = torch.ones((), dtype=z_RV.dtype, device=z_RV.device)
        divergence = self.events("sampled" if self.num_samples else "ghost", statistics, one)
        if not self.top_k:
            return Comparison(divergence, divergence, None)
        return Comparison(divergence, self.events("ghost", statistics, one), self.ids[:, 0])


@dataclass(frozen=True)
class DenseTargets(Targets):
    """A teacher's whole distribution for N tokens: the reference, and the targets of an online teacher."""

    logprobs: Tensor
    """[N,V] fp32, fp16 or bf16, nats. Teacher's log p at T = 1; -inf counts as probability 0."""
    label_logprob: Tensor
    """[N] fp32, nats. Teacher's log p of the label at T = 1."""
    policy: Tensor | None = None

    top_k = num_samples = 0

    def __len__(self) -> int:
        return self.logprobs.shape[0]

    @property
    def width(self) -> int:  # type: ignore[override]
        """The size of the vocabulary, V."""
        return self.logprobs.shape[1]

    @classmethod
    def from_logits(cls, logits_NV: Tensor, labels_N: Tensor, vocab_size: int | None = None) -> DenseTargets:
        """Make targets from an online teacher's logits, in fp32, without the columns from `vocab_size` on."""
        logprobs_NV = torch.log_softmax(logits_NV[:, :vocab_size].float(), dim=-1)
        return cls(logprobs_NV, logprobs_NV.gather(-1, labels_N[:, None]).squeeze(-1))

    def energies(self) -> Tensor:
        """Return log p [N,V] in at least fp32, bounded below by `FLOOR`: p log p is then 0 and not NaN at p = 0."""
        dtype = torch.promote_types(self.logprobs.dtype, torch.float32)
        return self.logprobs.to(dtype).clamp_min(FLOOR)

    def log_partition(self, beta: Tensor | float, keep_N: Tensor | None = None) -> Tensor:
        """Return log Z(beta) [N] in nats, without a second [N,V] tensor; rows outside `keep_N` give 0.

        Value and slope (E_p_beta[e]) are computed chunk by chunk and joined as L + L' (beta - stop_gradient(beta)).
        """
        fixed = beta.detach() if isinstance(beta, Tensor) else beta

        def value_and_slope(part: DenseTargets) -> Tensor:
            energies_RV = part.energies()
            scaled_RV = fixed * energies_RV
            value_R = torch.logsumexp(scaled_RV, dim=-1)
            return torch.stack([value_R, ((scaled_RV - value_R[:, None]).exp_() * energies_RV).sum(-1)])

        with torch.no_grad():
            found_2N = self.by_parts(value_and_slope)
        values_N, slopes_N = found_2N if keep_N is None else found_2N.masked_fill(~keep_N, 0.0)
        return values_N + slopes_N * (beta - fixed)

    def narrow(self, vocab_size: int) -> DenseTargets:
        if self.width <= vocab_size:
            return self
        kept_NV = self.logprobs[:, :vocab_size].float()
        mass_N = torch.logsumexp(kept_NV, dim=-1)
        return DenseTargets(kept_NV - mass_N[:, None], self.label_logprob - mass_N, self.policy)

    def shown(self) -> dict[str, Tensor]:
        return {name: each.clamp_min(FLOOR) for name, each in self._tensors().items()}

    def listed(self) -> tuple[Tensor, Tensor]:
        mass_NV = self.logprobs.float().exp()
        return torch.arange(self.width, device=mass_NV.device).expand(mass_NV.shape), mass_NV

    def row_logprobs(self, reader: ChunkLogits | None, columns: slice) -> Tensor:
        return self.logprobs[:, columns]

    def compare(self, z_RV: Tensor, labels_R: Tensor, head: HeadPart) -> Comparison:
        log_p_RV = torch.log_softmax(self.energies(), dim=-1)
        if head.group is None:
            events = Events(log_p_RV, torch.log_softmax(z_RV, dim=-1))
        else:
            own_RV = log_p_RV[:, head.first : head.first + z_RV.shape[1]]
            events = Events(own_RV, z_RV - head.log_sum_exp(z_RV)[:, None])
        return Comparison(events, events, self.logprobs.argmax(-1), in_parts=True)


@dataclass(frozen=True)
class OnlineTargets(Targets):
    """An online teacher's last hidden states for N tokens: its logits are computed a few rows at a time."""

    hidden: Tensor
    """[N,D] of the teacher's width, any float dtype; [N,P] logits where its head has no weight."""
    labels: Tensor
    """[N] int64; any number where masked."""
    head: HeadPart
    """The teacher's, with at least V rows."""
    width: int
    """V."""
    top_k = num_samples = 0

    def __len__(self) -> int:
        return self.hidden.shape[0]

    def resolved(self) -> DenseTargets:
        """Compute all logits at once, [N,V]: for a few rows."""
        return DenseTargets.from_logits(self._logits(), self.labels)

    def _logits(self) -> Tensor:
        from kdtrain.objective.logits import chunk_logits

        return chunk_logits(self.hidden, self.head, self.width)

    @property
    def label_logprob(self) -> Tensor:  # type: ignore[override]
        """The teacher's log p of the labels; it costs a product with the head, as `log_partition` does."""
        return self.by_parts(lambda part: part.resolved().label_logprob)

    def log_partition(self, beta: Tensor | float, keep_N: Tensor | None = None) -> Tensor:
        kept = self if keep_N is None else self.where(keep_N)
        values_N = kept.by_parts(lambda part: part.resolved().log_partition(beta))
        return values_N if keep_N is None else _keep(values_N, keep_N, 0.0)

    def reader(self, chunk: int, compile: bool, columns: slice) -> ChunkLogits | None:
        if self.head.weight is None and columns != slice(None):
            return None
        weight, bias = (None if each is None else each[columns] for each in (self.head.weight, self.head.bias))
        own = replace(self.head, weight=weight, bias=bias, first=columns.start or 0)
        from kdtrain.objective import logits

        return logits.ChunkLogits(self.hidden, own, self.width, chunk, compile)

    def row_logprobs(self, reader: ChunkLogits | None, columns: slice) -> Tensor:
        return self._logits()[:, columns] if reader is None else reader(self.hidden)


def per_token(total: Tensor, normalizer: Tensor | float) -> Tensor:
    """Return `total / normalizer`; `total`, which is then 0, if a step has no unmasked token: never NaN."""
    count = scalar(normalizer, total.device, total.dtype)
    return total / torch.where(count > 0, count, torch.ones_like(count))


def readable(tensor: Tensor) -> bool:
    """Return whether the host may read numbers: from a GPU a read waits for all of its work."""
    return tensor.device.type == "cpu"


def scalar(value: Tensor | float, device: torch.device, dtype: torch.dtype | None = None) -> Tensor:
    """Return a number as a tensor on `device`, filled in there: a copy from the host would wait for all queued work."""
    if isinstance(value, Tensor):
        return value.to(device, dtype or value.dtype)
    return torch.full((), value, dtype=dtype, device=device)


def _moving(value_N: Tensor, slope_N: Tensor | float, beta: Tensor | float) -> Tensor:
    """Return the value, with this slope as its gradient in `beta`."""
    return value_N + slope_N * (beta - beta.detach()) if isinstance(beta, Tensor) else value_N


@functools.lru_cache(maxsize=64)
def _ascending(knots: tuple[float, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return the knots in ascending order, copied to the device once."""
    return torch.tensor(knots[::-1], dtype=dtype, device=device)


def _keep(tensor: Tensor, keep_N: Tensor, blank: float) -> Tensor:
    drop = ~keep_N if tensor.ndim == 1 else ~keep_N[:, None]
    return tensor.masked_fill(drop, blank)
