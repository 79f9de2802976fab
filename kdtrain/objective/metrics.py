"""Metrics of a student: sums that add up over batches and ranks, and figures computed from them.

Everything is at T = 1, under `torch.no_grad()`, in chunks of rows. What is exact depends on the targets:

KL(teacher || student)  exact for dense targets; a lower bound for top-k entries and their tail bucket, which misses the
                        difference inside the tail; an unbiased estimate with samples.
top-1 agreement         needs the teacher's most likely token: dense targets, or a top-k.
acceptance              sum_j min(p_j, q_j), the rate at which speculative decoding accepts the student's
                        tokens (Leviathan et al. 2023, arXiv 2211.17192); needs a top-k; with its tail bucket it is
                        an upper bound.
ECE                     expected calibration error over 15 equal bins of confidence (Guo et al. 2017).
bits per byte           the sum of log-probabilities over the bytes of the same text: it compares tokenizers.

With a teacher of another tokenizer (`tokenizers`) the KL is that of groups of tokens, where they can be compared.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, fields, replace

import torch
from torch import Tensor

from kdtrain.models.output_head import HeadPart
from kdtrain.objective.divergence import forward_kl
from kdtrain.objective.logits import chunk_logits, chunk_rows
from kdtrain.objective.targets import Supervision, Targets

BINS = 15


@dataclass(frozen=True, kw_only=True)
class Metrics:
    """Sums over unmasked tokens, in nats for log-probabilities. None: the targets do not contain it."""

    tokens: float = 0.0
    cross_entropy: float = 0.0
    correct: float = 0.0
    """Tokens whose label is the student's most likely token."""
    kl: float | None = 0.0
    kl_variance: float | None = 0.0
    """Of the estimate from each token's samples alone, as independent ones have it: systematic ones have less."""
    teacher_cross_entropy: float | None = 0.0
    agreement: float | None = 0.0
    """Tokens for which teacher and student have the same most likely token."""
    acceptance: float | None = 0.0
    bytes: float | None = 0.0
    """Of the text that the tokens are; special tokens have none."""
    teacher_bytes: float | None = 0.0
    """Of the text that `teacher_cross_entropy` is over."""
    compared: float | None = 0.0
    """Tokens that a teacher with another tokenizer predicts something of; the KL is over these."""
    bin_count: tuple[float, ...] = (0.0,) * BINS
    """Tokens by the student's confidence, [15]."""
    bin_confidence: tuple[float, ...] = (0.0,) * BINS
    bin_correct: tuple[float, ...] = (0.0,) * BINS

    def __add__(self, other: Metrics) -> Metrics:
        return Metrics.from_vector([a + b for a, b in zip(self.vector(), other.vector(), strict=True)])

    def times(self, factor: float) -> Metrics:
        """Return all sums times `factor`: the same means, with another weight in a sum."""
        return Metrics.from_vector([factor * each for each in self.vector()])

    def vector(self) -> list[float]:
        """Return all sums in one list of fixed length, None as NaN, for a reduction over ranks in fp64."""
        values = [getattr(self, f.name) for f in fields(self)]
        flat = [x for value in values for x in (value if isinstance(value, tuple) else (value,))]
        return [math.nan if x is None else x for x in flat]

    @classmethod
    def from_vector(cls, vector: list[float]) -> Metrics:
        """Return the metrics of a `vector`; NaN becomes None in sums that may be missing."""
        names = [f.name for f in fields(cls)]
        plain, bins = names[:-3], names[-3:]
        sums: dict[str, object] = dict(zip(plain, vector, strict=False))
        for name in (f.name for f in fields(cls) if str(f.type) == "float | None"):
            sums[name] = None if math.isnan(sums[name]) else sums[name]  # type: ignore[arg-type]
        for i, name in enumerate(bins):
            sums[name] = tuple(vector[len(plain) + i * BINS : len(plain) + (i + 1) * BINS])
        return cls(**sums)  # type: ignore[arg-type]

    def mean(self, name: str) -> float | None:
        """Return the sum `name` divided by the number of tokens; None if it is unknown, NaN without tokens."""
        total = getattr(self, name)
        if total is None:
            return None
        return total / self.tokens if self.tokens else math.nan

    def divergence(self) -> float | None:
        """Return the mean KL, nats: over tokens, or across tokenizers over tokens that are compared."""
        if self.kl is None or self.compared is None:
            return self.mean("kl")
        return self.kl / self.compared if self.compared else math.nan

    def divergence_error(self) -> float | None:
        """Return the standard error, at most, of `divergence` as an estimate from samples of the teacher, nats."""
        return None if self.kl_variance is None or not self.tokens else math.sqrt(self.kl_variance) / self.tokens

    def bits_per_byte(self) -> float | None:
        """Return the student's bits per byte; None where the bytes are unknown, or there are none."""
        return self.cross_entropy / self.bytes / math.log(2) if self.bytes else None

    def teacher_bits_per_byte(self) -> float | None:
        """Return the teacher's bits per byte on the same text; None where its loss or bytes are unknown."""
        unknown = self.teacher_cross_entropy is None or not self.teacher_bytes
        return None if unknown else self.teacher_cross_entropy / self.teacher_bytes / math.log(2)  # type: ignore[operator]

    def teacher_loss(self) -> float | None:
        """Return the teacher's cross-entropy, nats for each token; across tokenizers for each token of the student."""
        if self.compared is None:
            return self.mean("teacher_cross_entropy")
        bits = self.teacher_bits_per_byte()
        return None if bits is None or not self.bytes else bits * math.log(2) * self.bytes / self.tokens

    def perplexity(self) -> float:
        """Return exp of the mean cross-entropy; inf where that is 700 nats or more."""
        mean = self.mean("cross_entropy")
        assert mean is not None
        return math.exp(mean) if mean < 700 else math.inf

    def ece(self) -> float:
        """Return the mean over tokens of |accuracy - confidence| of their bin, 0 to 1; NaN without tokens."""
        gaps = (abs(a - b) for a, b in zip(self.bin_correct, self.bin_confidence, strict=True))
        return sum(gaps) / self.tokens if self.tokens else math.nan


@torch.no_grad()
def measure(
    hidden_ND: Tensor,
    head: HeadPart,
    rows: Supervision,
    *,
    vocab_size: int,
    chunk: int | None = None,
    bytes_N: Tensor | None = None,
) -> Metrics:
    """Measure N tokens; the arguments are the same as of `loss.distillation_loss`, and `bytes_N` of each label.

    Sums that the targets do not contain are None. It waits for the device once.
    """
    head = head.gathered(vocab_size)
    targets = rows.targets
    if targets is not None and targets.parts:
        sums = Metrics()
        for part, own in by_kind(rows):
            lengths = None if bytes_N is None else bytes_N[part]
            sums += measure(hidden_ND[part], head, own, vocab_size=vocab_size, chunk=chunk, bytes_N=lengths)
        return sums
    # Of each token: its bytes, those that the teacher's log p is over, and whether it is compared.
    of_teacher = None if bytes_N is None or targets is None else targets.label_bytes(bytes_N)
    compared = None if targets is None else targets.common()
    extra = {"bytes": bytes_N, "teacher_bytes": of_teacher, "compared": compared}
    known = {
        "kl": targets is not None,
        "kl_variance": targets is not None and _sampled(targets),
        "teacher_cross_entropy": targets is not None,
        "agreement": targets is not None and targets.has_top,
        "acceptance": targets is not None and targets.has_top,
        **{name: each is not None for name, each in extra.items()},
    }
    unknown = replace(Metrics(), **{name: None for name, each in known.items() if not each})  # type: ignore[arg-type]
    total = torch.tensor(unknown.vector(), dtype=torch.float64)
    parts = []
    for part, z_RV, own in chunks(hidden_ND, head, rows, vocab_size, chunk):
        more = [None if each is None else each[part] for each in extra.values()]
        parts.append(_chunk_sums(z_RV, own, head, more))
    if parts:
        total += torch.stack(parts).double().cpu().sum(0)
    return Metrics.from_vector(total.tolist())


def by_kind(rows: Supervision) -> Iterator[tuple[slice, Supervision]]:
    """Yield the place and the inputs of consecutive rows whose targets are of one kind (`Targets.parts`)."""
    start = 0
    parts = () if rows.targets is None else rows.targets.parts
    for size, targets in parts or ((len(rows.labels), rows.targets),):
        part = slice(start, start + size)
        yield part, Supervision(rows.labels[part], rows.mask[part], targets)
        start += size


def losses(z_RV: Tensor, rows: Supervision, head: HeadPart) -> Tensor:
    """Return [R, 3] of each row with a teacher: -log q(label), -log p(label) and KL(p || q), nats; q is the student."""
    own_R = head.log_sum_exp(z_RV) - head.take(z_RV, rows.labels[:, None]).squeeze(1)
    kl_R, _, teacher_R, *_ = _teacher_columns(z_RV, None, rows, head)  # last, as it may write to the logits
    return torch.stack([own_R, teacher_R, kl_R], 1).to(z_RV.dtype)


def chunks(
    hidden_ND: Tensor, head: HeadPart, rows: Supervision, vocab_size: int, chunk: int | None = None
) -> Iterator[tuple[slice, Tensor, Supervision]]:
    """Yield of each chunk its place, its logits [R, V] and its harmless rows, without autocast; of a gathered head."""
    chunk = chunk or chunk_rows(vocab_size, hidden_ND.shape[1], hidden_ND.dtype, hidden_ND.device.type)
    if hidden_ND.is_cuda and head.weight is not None:
        # once for all chunks, as in training: operands of two dtypes would be multiplied in fp32, far more slowly
        head = replace(head, weight=head.weight.to(hidden_ND.dtype))
    with torch.autocast(hidden_ND.device.type, enabled=False):
        for start in range(0, len(hidden_ND), chunk):
            part = slice(start, start + chunk)
            yield part, chunk_logits(hidden_ND[part], head, vocab_size), rows[part].harmless(vocab_size)


def _chunk_sums(z_RV: Tensor, rows: Supervision, head: HeadPart, more: list[Tensor | None]) -> Tensor:
    """Return the vector of `Metrics` for a chunk, with 0 for unknown sums."""
    top_logit_R, top_R = head.most_likely(z_RV)
    lse_R = head.log_sum_exp(z_RV)
    confidence_R = (top_logit_R - lse_R).exp()
    correct_R = (top_R == rows.labels).to(z_RV.dtype)
    cross_entropy_R = lse_R - head.take(z_RV, rows.labels[:, None]).squeeze(1)
    ones_R = torch.ones_like(lse_R)
    more_R = [torch.zeros_like(ones_R) if each is None else each.to(ones_R.dtype) for each in more]
    columns = [ones_R, cross_entropy_R, correct_R, *_teacher_columns(z_RV, top_R, rows, head), *more_R]
    sums = torch.stack([x.masked_fill(~rows.mask, 0.0).sum() for x in columns])
    bins_R = (confidence_R * BINS).long().clamp(0, BINS - 1)
    # A product with one-hot bins, because an indexed sum has no fixed order on a GPU.
    in_bin_BR = (bins_R == torch.arange(BINS, device=z_RV.device)[:, None]) & rows.mask
    binned = [(in_bin_BR * x).sum(1) for x in (ones_R, confidence_R, correct_R)]
    return torch.cat([sums, *binned])


def _teacher_columns(z_RV: Tensor, top_R: Tensor | None, rows: Supervision, head: HeadPart) -> list[Tensor]:
    """Return KL, its variance, the teacher's cross-entropy, agreement and acceptance, each [R]; 0 where unknown."""
    zero_R = torch.zeros_like(z_RV[:, 0])
    if rows.targets is None:
        return [zero_R] * 5
    targets = rows.targets.resolved()
    known = targets.compare(z_RV, rows.labels, head)
    sum_over_parts = head.sum if known.in_parts else (lambda each: each)
    variance_R = zero_R
    if _sampled(targets):  # of what a sample adds to the estimate; at T = 1 alone E[log p] is known, and it adds -log q
        events, weight_RE = known.divergence, known.divergence.weight
        assert weight_RE is not None
        each_RE = events.student if targets.only_at_one else events.teacher - events.student
        each_RE = each_RE.masked_fill(weight_RE == 0, 0.0)  # of absent entries a number whose square is infinite
        mean_R1 = (weight_RE * each_RE).sum(-1, keepdim=True)
        variance_R = (weight_RE * (each_RE - mean_R1).square()).sum(-1) / max(targets.num_samples - 1, 1)
    columns = [sum_over_parts(forward_kl(known.divergence)), variance_R, -targets.label_logprob.to(z_RV.dtype)]
    if known.most_likely is None or top_R is None:
        return [*columns, zero_R, zero_R]
    agreement_R = (known.most_likely == top_R).to(z_RV.dtype)
    overlap_R = torch.minimum(known.overlap.teacher, known.overlap.student).exp().sum(-1)
    return [*columns, agreement_R, sum_over_parts(overlap_R)]


def _sampled(targets: Targets) -> bool:
    """Return whether samples alone stand for the teacher, whose own tokens they are."""
    return targets.num_samples > 0 and not targets.has_top and targets.common() is None
