"""A look at a cache without its teacher: do its targets speak about its own tokens, and agree with themselves?

It reads a few rows, for a few seconds at most, so that an import or a download can end with it. What it finds wrong:

shift        the entries are about another position than the next one (`alignment`)
other rows   the targets of a row fit the tokens of another row much better (`other_row`)
renormalised labels lie outside of a top-k far more often than its mass predicts (`mass`)
samples      the label was drawn more or less often than its log p predicts: a z statistic, exact for systematic samples

The teacher's loss, its entropy and the label's probability, next to what it would be if the labels came from the
teacher, are figures for people: text that the teacher does not know looks like a fault of the capture.

What it gives up: numbers that are wrong and fit each other. Only the teacher knows: `kdtrain audit`.
"""

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from kdtrain.cache.format.codec import grid_offset
from kdtrain.cache.format.compression import FINENESS
from kdtrain.cache.read.reader import LocalCache
from kdtrain.cache.tools.alignment import SHIFTS, DetectedShift, detect
from kdtrain.cache.tools.kept_mass import outside
from kdtrain.objective.batch import Batch
from kdtrain.objective.targets import SparseTargets, Targets

ROWS, SECONDS = 64, 20.0
LEVEL = 1e-5
_ENTRIES = 2**28  # that are held at once
_LEAST_MATCHED = 0.1
_MATCHED = 0.2  # of the labels: how much better another row must fit, and how well
_FEW = 16  # labels that chance may match
OTHER_ROWS = "targets of other rows"


@dataclass(frozen=True, kw_only=True)
class Look:
    """The findings in some rows of a cache, without its teacher."""

    rows: int
    findings: tuple[str, ...]
    """What is wrong, a line each."""
    notes: tuple[str, ...]
    """What is odd and may be right."""
    alignment: DetectedShift
    teacher_loss: float
    """-log p of the label, nats, mean over positions that count."""
    entropy: float | None
    """Of the teacher, nats; None where the cache does not know it."""
    label_mass: float
    expected_mass: float
    """Mean probability that the cache keeps for the label, and what it would be if labels came from the teacher."""
    samples_z: float | None
    """Of how often labels were drawn; None where that cannot be compared."""

    def to_json(self) -> dict[str, Any]:
        """Return a plain record."""
        return {**vars(self), "alignment": self.alignment.to_json()}


def look(cache: LocalCache, *, rows: int = ROWS, seconds: float = SECONDS, seed: int = 0) -> Look | None:
    """Read the first rows of a split, and as many from a place that `seed` draws; None if no row has targets.

    RunError: a shard cannot be read.
    """
    settings, deadline = cache.manifest.settings, time.monotonic() + seconds
    if not settings.codec.taught:
        return None
    split = "train" if "train" in cache else next(iter(cache))
    codec, total = settings.codec, len(cache[split])
    entries = settings.seq_len * (codec.columns or codec.vocab_size)
    each, size = max(1, min(rows, _ENTRIES // entries) // 2), max(1, min(8, _ENTRIES // 4 // entries))
    start = int(np.random.RandomState(seed).randint(max(total - each, 0) + 1))
    indices = list(dict.fromkeys([*range(min(each, total)), *range(start, min(start + each, total))]))
    batches: list[Batch] = []
    for first in range(0, len(indices), size):
        if batches and time.monotonic() > deadline:
            break
        batches.append(cache[split].read(indices[first : first + size]))
    systematic = settings.sampling == "systematic" or grid_offset(settings.sampling) is not None
    origin = cache.manifest.origin
    shift = origin.get("shift") if origin else None
    generated = settings.data.get("generated")
    drawn = generated.get("temperature") if isinstance(generated, dict) else None
    return examine(
        batches,
        systematic=systematic,
        samples=origin is None and (systematic or settings.sampling is None),
        vocab_size=settings.vocab_size,
        imported=shift if isinstance(shift, int) else None,
        drawn_at=float(drawn) if isinstance(drawn, int | float) else 1.0,
    )


def examine(
    batches: Sequence[Batch],
    *,
    systematic: bool,
    samples: bool,
    vocab_size: int,
    imported: int | None = None,
    drawn_at: float = 1.0,
) -> Look | None:
    """Examine decoded rows as `look` does; None if none has targets.

    systematic: how samples were drawn. samples: compare them with the label's log p. imported: by which shift.
    drawn_at: the temperature of a teacher that wrote the labels; above 1 they leave its top-k more often.
    """
    known = [batch for batch in batches if batch.targets is not None and batch.loss_mask.any()]
    if not known:
        return None
    alignment = detect(known)
    figures = [_figures(batch, systematic) for batch in known]
    number = sum(int(batch.loss_mask.sum()) for batch in known)
    loss, entropy, mass, expected, away, variance = (sum(column) for column in zip(*figures, strict=True))
    z = away / math.sqrt(variance) if samples and variance > 0 else None
    matched, rows = _matched(known)
    findings, notes = [], []
    if alignment.shift:
        again = "build the cache again"
        if imported is not None and (there := imported + alignment.shift) in SHIFTS:
            again = f"import its source again with --shift {there}"
        side = "before" if alignment.shift < 0 else "after"
        findings.append(
            f"shifted by {alignment.shift:+d}: the entries are about the token {side} the next one; {again} "
            f"({alignment})"
        )
    if len(matched) > max(1, _LEAST_MATCHED * rows):
        pair = matched[0]
        findings.append(f"{OTHER_ROWS}: {len(matched)} of {rows} rows; those of row {pair[0]} fit row {pair[1]}")
    if drawn_at <= 1 and (labels := outside(known)) is not None and labels.wrong:
        findings.append(f"mass: {labels}; build it again from the teacher's own log-probabilities")
    if z is not None and math.erfc(abs(z) / math.sqrt(2)) < LEVEL:
        findings.append(
            f"samples: the labels were drawn {'more' if z > 0 else 'less'} often than their log p predicts (z {z:.1f})"
        )
    if 10 * number < (total := sum(batch.loss_mask.numel() for batch in batches)):
        notes.append(f"only {number:,} of {total:,} tokens count")
    if mass < expected / 2:
        notes.append(
            f"the label has the probability {mass / number:.3f}; labels that came from the teacher would have "
            f"{expected / number:.3f}: it does not know this text, or answered another"
        )
    if loss / number > math.log(vocab_size):
        notes.append(
            f"the teacher's loss is {loss / number:.3f}, more than that of a guess ({math.log(vocab_size):.3f})"
        )
    return Look(
        rows=rows,
        findings=tuple(findings),
        notes=tuple(notes),
        alignment=alignment,
        teacher_loss=loss / number,
        entropy=entropy / number if math.isfinite(entropy) else None,
        label_mass=mass / number,
        expected_mass=expected / number,
        samples_z=z,
    )


def _figures(batch: Batch, systematic: bool) -> tuple[float, ...]:
    """Return sums over the positions that count: loss, entropy, label's mass, its expectation, samples' deviation."""
    assert batch.targets is not None
    mask_N, labels_N = batch.loss_mask.flatten(), batch.tokens[:, 1:].flatten()[batch.loss_mask.flatten()]
    targets = batch.targets.map(lambda _, each: each[mask_N])
    ids_NK, mass_NK = targets.listed()
    label_NK = ids_NK == labels_N[:, None]
    logprob_N = targets.label_logprob.double()
    mass_N, expected_N = (mass_NK * label_NK).sum(-1), mass_NK.square().sum(-1)
    entropy_N, away, variance = torch.full_like(logprob_N, math.nan), 0.0, 0.0
    if isinstance(targets, SparseTargets):
        one, knots = targets.knots.index(1.0), len(targets.knots)
        tail_N, slope_N = targets.tail[:, one].exp(), targets.tail[:, knots + one]
        top_NH = mass_NK[:, : targets.top_k]
        entropy_N = -torch.special.xlogy(top_NH, top_NH).sum(-1) - tail_N * slope_N
        if targets.num_samples:
            away, variance = _drawn_labels(targets, label_NK, tail_N, logprob_N, systematic)
    else:
        entropy_N = -torch.special.xlogy(mass_NK, mass_NK).sum(-1)
    sums = (-logprob_N, entropy_N, mass_N, expected_N)
    return (*(each.double().sum().item() for each in sums), away, variance)


def _drawn_labels(
    targets: SparseTargets, label_NK: Tensor, tail_N: Tensor, logprob_N: Tensor, systematic: bool
) -> tuple[float, float]:
    """Return how much more often labels were drawn than by their share of the tail: sum of shares, variance."""
    number, some_N = targets.num_samples, targets.counts.sum(-1) > 0
    in_tail_N = some_N & ~label_NK[:, : targets.top_k].any(-1)
    drawn_N = ((targets.counts * label_NK).sum(-1) / number)[in_tail_N].double()
    tail_N = tail_N.double() if targets.top_k else torch.ones_like(logprob_N)
    share_N = (logprob_N.exp() / tail_N)[in_tail_N].clamp(max=1.0)
    part_N = (share_N * number) % 1
    chance_N = part_N * (1 - part_N) / number**2 if systematic else share_N * (1 - share_N) / number
    coded_N = (share_N * (1 - logprob_N[in_tail_N]) / FINENESS).square() / 12
    return (drawn_N - share_N).sum().item(), (chance_N + coded_N).sum().item()


def _matched(batches: Sequence[Batch]) -> tuple[list[tuple[int, int]], int]:
    """Return pairs of rows, in reading order, the first with the targets of the second; and the number of rows."""
    labels_RT = torch.cat([batch.tokens[:, 1:] for batch in batches])
    found, row = [], 0
    for batch in batches:
        targets, length = batch.targets, batch.loss_mask.shape[1]
        assert targets is not None
        for b in range(len(batch.tokens)):
            other = other_row(targets[b * length : (b + 1) * length], row, labels_RT, batch.loss_mask[b])
            found += [] if other is None else [(row, other)]
            row += 1
    return found, row


def other_row(targets: Targets, own: int, labels_RT: Tensor, counted_T: Tensor) -> int | None:
    """Return the row, of R with these labels, that the targets of row `own` fit much better; None if none does.

    counted_T: bool, its labels of the loss. At the others a capture may keep a filler, which fits the filler of others.
    """
    ids_NK, mass_NK = targets.map(lambda _, each: each[counted_T]).listed()
    kept = mass_NK.topk(min(50, mass_NK.shape[1]))
    ids_NK, mass_NK = ids_NK.gather(1, kept.indices), kept.values
    labels_RN, fits_R = labels_RT[:, counted_T], torch.zeros(len(labels_RT))
    for ids_N, mass_N in zip(ids_NK.T, mass_NK.T, strict=True):
        fits_R += ((labels_RN == ids_N) * mass_N).sum(-1) / max(_FEW, len(ids_NK))
    best = int(fits_R.argmax())
    return best if best != own and fits_R[best] > fits_R[own] + _MATCHED else None
