"""A look at a cache without its teacher: do its targets speak about its own tokens, and agree with themselves?

It reads a few rows, for a few seconds at most, so that an import or a download can end with it. What it finds wrong:

shift        the entries are about another position than the next one (`detect`)
other rows   the targets of a row fit the tokens of another row much better (`other_row`)
mass         labels lie outside of a top-k far more often than its mass predicts (`Outside`)
samples      the label was drawn more or less often than its log p predicts: a z statistic, exact for systematic samples

The teacher's loss, its entropy and the label's probability, next to what it would be if the labels came from the
teacher, are figures for people: text that the teacher does not know looks like a fault of the capture.

Shift. At shift s the entries of position t are compared with tokens[t + 1 + s]; a cache is aligned if s = 0 explains
the text best. The comparison is paired: each label tokens[u] is scored under the entries of the positions u - 2, u - 1
and u, which are about it at the shifts 1, 0 and -1. Its score is log(p + 0.001), with p the probability that the cache
keeps for it. The logarithm is a proper score: in the mean over the text no prediction from less of it beats the right
one. (The mean of p is not proper; it is a figure for people, with the rank.) A position that has read the label already
can beat the right one only where the text repeats itself: in a run "a a a b b" the entries after an "a" are mostly
about "a". So no token is judged that often follows itself in these rows, nor labels that equal a neighbour, those
outside of the loss, and those near the start of a document.

Rows are the unit: of two shifts one explains a row better or the other does, and if both were equally good each would
do so in half of the rows. The sign test gives the chance of as many rows as were found, exact at any number of rows,
and no single strange row decides. A shift is the verdict if it beats both others at `LEVEL`; one other than 0 must also
be better by a margin that no aligned cache has, so that an untrained teacher, which says nothing or repeats its input,
accuses nobody. With fewer than ten rows, or less than a tenth of the labels, left to judge there is no verdict.

Mass. With the mass m inside of the entries a label lies outside with probability 1 - m, if it is what the teacher
expects. A top-k that was scaled to sum to 1 promises that no label ever does. A teacher is surer of text that it does
not know than it should be, so that only a factor of `MOST` between what is found and what is promised is a fault; a
top-k that was scaled and then cut may stay below it.

What it gives up: numbers that are wrong and fit each other. Only the teacher knows: `kdtrain audit`.

Shapes: B sequences, T positions, N = B*T tokens or those that count, K entries, H top-k entries, R rows, S = 3 shifts.
"""

import math
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from einops import rearrange
from torch import Tensor

from kdtrain.cache.format.spec import FINENESS
from kdtrain.cache.read.reader import LocalCache
from kdtrain.objective.batch import Batch
from kdtrain.objective.targets import SparseTargets, Targets

SHIFTS = (-1, 0, 1)
LEVEL = 0.001
"""The largest p-value at which one shift beats another."""
MARGIN, LEAST_MASS = 1.5, 0.05
"""A shift other than 0 gives the labels at least this probability, and so many times that of shift 0."""
_BASE = 1e-3
_REPEATS = 0.05  # the share of its places at which a token that is judged may equal a neighbour
_JUDGED = 0.1  # the share of the labels that must be left
_CELLS = 2**22  # entries that are compared at once


@dataclass(frozen=True, kw_only=True)
class DetectedShift:
    """The shift that the rows of a cache show; lists are by `SHIFTS`."""

    shift: int | None
    """The shift that explains the text best; None if the rows cannot tell."""
    rows: int
    """Rows with a label that can be judged."""
    labels: int
    """Labels that were judged."""
    label_mass: tuple[float, ...]
    """Mean probability that the cache keeps for the label; NaN without labels."""
    label_rank: tuple[float, ...]
    """Median rank of the label, from 1; a label that is not kept comes after all that are."""
    p_values: tuple[float, ...]
    """The chance to win as many rows from another shift that explains the text as well: the larger of the two."""

    def to_json(self) -> dict[str, Any]:
        """Return a plain record."""
        lists = {"label_mass": self.label_mass, "label_rank": self.label_rank, "p_value": self.p_values}
        named: dict[str, dict[str, float | None]] = {name: {} for name in lists}
        for name, values in lists.items():
            for shift, each in zip(SHIFTS, values, strict=True):
                named[name][f"{shift:+d}" if shift else "0"] = float(f"{each:.4g}") if math.isfinite(each) else None
        return {"shift": self.shift, "rows": self.rows, "labels": self.labels, **named}

    def __str__(self) -> str:
        if not self.labels:
            return "no label can be judged"
        shifts = zip(SHIFTS, self.label_mass, strict=True)
        figures = [f"{mass:.3f} at {shift:+d}" if shift else f"{mass:.3f} at 0" for shift, mass in shifts]
        ranks = "/".join(f"{rank:g}" for rank in self.label_rank)
        return (
            f"the label has the probability {', '.join(figures)}, and the median rank {ranks}, "
            f"in {self.labels:,} labels of {self.rows} rows"
        )


def detect(batches: Iterable[Batch]) -> DetectedShift:
    """Compare the shifts over the rows of all batches, whatever their codec; rows without targets are skipped."""
    found = [_read(batch) for batch in batches if batch.targets is not None and batch.tokens.shape[1] >= 4]
    none = torch.zeros(0, dtype=torch.int64)
    parts = zip(*found, strict=True) if found else [[none]] * 3 + [[torch.zeros(0, len(SHIFTS))]] * 2
    label_L, repeated_L, size_R, mass_LS, rank_LS = (torch.cat(list(each)) for each in parts)
    row_L = torch.repeat_interleave(torch.arange(len(size_R)), size_R)
    label_L = label_L.unique(return_inverse=True)[1]
    share_V = torch.bincount(label_L, repeated_L.double()) / torch.bincount(label_L).clamp(min=1)
    judged_L = (repeated_L == 0) & (share_V[label_L] < _REPEATS)
    row_L, mass_LS, rank_LS = row_L[judged_L], mass_LS[judged_L], rank_LS[judged_L]
    score_RS = torch.zeros(len(size_R), len(SHIFTS), dtype=torch.float64)
    score_RS.index_add_(0, row_L, (mass_LS + _BASE).double().log())
    wins = (score_RS[:, :, None] > score_RS[:, None, :]).sum(0)
    p_values = tuple(
        max(_sign_test(int(wins[s, other]), int(wins[other, s])) for other in range(len(SHIFTS)) if other != s)
        for s in range(len(SHIFTS))
    )
    mass = tuple(mass_LS.double().mean(0).tolist())
    best = [shift for shift, p_value in zip(SHIFTS, p_values, strict=True) if p_value <= LEVEL]
    shift = best[0] if best else None
    if not judged_L.double().mean() >= _JUDGED:
        shift = None
    if shift and not mass[SHIFTS.index(shift)] >= max(LEAST_MASS, MARGIN * mass[SHIFTS.index(0)]):
        shift = None
    return DetectedShift(
        shift=shift,
        rows=len(row_L.unique()),
        labels=len(row_L),
        label_mass=mass,
        label_rank=tuple(rank_LS.median(0).values.tolist()) if len(rank_LS) else (math.nan,) * len(SHIFTS),
        p_values=p_values,
    )


def _read(batch: Batch) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Return the L labels tokens[u], u = 2 .. T-1, that may be judged; which of them equal a neighbour; how many each
    row has; their masses and ranks [L, S]."""
    assert batch.targets is not None
    tokens_BT = batch.tokens[:, :-1]
    mask_BT = batch.loss_mask
    segments_BT = batch.segments
    counted_BU = mask_BT[:, :-2] & mask_BT[:, 1:-1] & mask_BT[:, 2:]
    counted_BU &= (segments_BT[:, :-2] == segments_BT[:, 2:]) & (segments_BT[:, 1:-1] == segments_BT[:, 2:])
    label_BU = tokens_BT[:, 2:]
    repeated_BU = (label_BU == tokens_BT[:, 1:-1]) | (label_BU == batch.tokens[:, 3:])
    size, length = mask_BT.shape
    # Column s is the token that position t is about at shift s; the last position has none at shift 1.
    beyond_BT = torch.nn.functional.pad(batch.tokens, (0, 1), value=-1)
    wanted_BTS = torch.stack([beyond_BT[:, 1 + shift : 1 + shift + length] for shift in SHIFTS], -1)
    mass_NS, rank_NS = _looked_up(batch.targets.resolved(), rearrange(wanted_BTS, "b t s -> (b t) s"))
    of_position = [rearrange(each, "(b t) s -> b t s", b=size) for each in (mass_NS, rank_NS)]
    mass_BUS, rank_BUS = (
        torch.stack([each[:, 1 - shift : length - 1 - shift, s] for s, shift in enumerate(SHIFTS)], -1)
        for each in of_position
    )
    at = counted_BU
    return label_BU[at], repeated_BU[at].long(), counted_BU.sum(1), mass_BUS[at], rank_BUS[at]


def _looked_up(targets: Targets, wanted_NS: Tensor) -> tuple[Tensor, Tensor]:
    """Return the mass [N, S] that each row gives the wanted ids, and their rank."""
    parts = []
    width = targets[:1].listed()[0].shape[1]
    rows = max(1, _CELLS // width)
    for start in range(0, len(targets), rows):
        part = slice(start, start + rows)
        ids_RK, mass_RK = targets[part].listed()
        mass_RK = mass_RK.nan_to_num(0.0)
        found = [(mass_RK * (ids_RK == wanted_R[:, None])).sum(1) for wanted_R in wanted_NS[part].unbind(1)]
        before = [1 + (mass_RK > own_R[:, None]).sum(1) for own_R in found]
        parts.append((torch.stack(found, 1), torch.stack(before, 1)))
    mass_NS, rank_NS = (torch.cat(each) for each in zip(*parts, strict=True))
    return mass_NS, rank_NS


def _sign_test(won: int, lost: int) -> float:
    """Return the chance of at least `won` heads among `won + lost` throws of a coin."""
    number = won + lost
    return sum(math.comb(number, heads) for heads in range(won, number + 1)) / 2**number


MOST = 10.0
"""Times as many labels outside as the mass promises, from which on it is not the teacher's."""
_LEAST = 0.005
_ERRORS = 5.0
_ROWS = 5


@dataclass(frozen=True)
class Outside:
    """Two shares of the labels, 0 to 1: outside of the top-k, and as many as the kept mass leaves for it."""

    found: float
    """That lies outside of the top-k."""
    promised: float
    """That the mass leaves for it: the mean of 1 - m."""
    significant: bool
    """Whether more were found than promised, by 5 standard errors over rows."""

    @classmethod
    def of(cls, batches: Sequence[Batch]) -> "Outside | None":
        """Compare the share of labels outside of the top-k with the kept mass; None without a top-k."""
        found, promised = list[torch.Tensor](), list[torch.Tensor]()
        for batch in batches:
            targets, mask_BT = batch.targets, batch.loss_mask
            if not isinstance(targets, SparseTargets) or not targets.top_k:
                continue
            ids_NK, mass_NK = targets.listed()
            ids_NH, mass_NH = ids_NK[:, : targets.top_k], mass_NK[:, : targets.top_k]
            out_N = ~(ids_NH == batch.tokens[:, 1:].reshape(-1, 1)).any(-1)
            rest_N = (1 - mass_NH.double().sum(-1)).clamp(min=0)
            for each, sums in ((out_N, found), (rest_N, promised)):
                sums.append(each.view_as(mask_BT).double().where(mask_BT, 0).sum(-1))
        positions = sum(int(batch.loss_mask.sum()) for batch in batches)
        if not found or not positions:
            return None
        found_R, promised_R = torch.cat(found), torch.cat(promised)
        more_R = found_R - promised_R
        rows = len(more_R)
        least = _ERRORS * math.sqrt(rows) * float(more_R.std()) if rows >= _ROWS else math.inf
        return cls(float(found_R.sum()) / positions, float(promised_R.sum()) / positions, float(more_R.sum()) > least)

    @property
    def wrong(self) -> bool:
        """Whether more labels lie outside than a teacher's own mass leaves room for."""
        return self.significant and self.found >= _LEAST and self.found > MOST * self.promised

    def __str__(self) -> str:
        return (
            f"the entries sum to {1 - self.promised:.4f}, and yet {self.found:.1%} of the labels lie outside of them: "
            "they were renormalised, or are not about this text"
        )


_LOOKED_AT, _SECONDS = 64, 20.0  # rows of a cache, and the longest that they are read
_SAMPLES_LEVEL = 1e-5
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

    @classmethod
    def at(cls, cache: LocalCache) -> "Look | None":
        """Read the first rows of a split, and as many from a drawn place; None if no row has targets.

        RunError: a shard cannot be read.
        """
        settings = cache.manifest.settings
        deadline = time.monotonic() + _SECONDS
        if not settings.codec.taught:
            return None
        split = "train" if "train" in cache else next(iter(cache))
        codec = settings.codec
        total = len(cache[split])
        entries = settings.seq_len * (codec.columns or codec.vocab_size)
        each, size = max(1, min(_LOOKED_AT, _ENTRIES // entries) // 2), max(1, min(8, _ENTRIES // 4 // entries))
        start = int(np.random.RandomState(0).randint(max(total - each, 0) + 1))
        indices = list(dict.fromkeys([*range(min(each, total)), *range(start, min(start + each, total))]))
        batches: list[Batch] = []
        for first in range(0, len(indices), size):
            if batches and time.monotonic() > deadline:
                break
            batches.append(cache[split].read(indices[first : first + size]))
        systematic = settings.sampling == "systematic" or settings.grid_offset is not None
        origin = cache.manifest.origin
        shift = origin.get("shift") if origin else None
        generated = settings.data.get("generated")
        drawn = generated.get("temperature") if isinstance(generated, dict) else None
        return cls.of(
            batches,
            systematic=systematic,
            samples=origin is None and (systematic or settings.sampling is None),
            vocab_size=settings.vocab_size,
            imported=shift if isinstance(shift, int) else None,
            drawn_at=float(drawn) if isinstance(drawn, int | float) else 1.0,
        )

    @classmethod
    def of(
        cls,
        batches: Sequence[Batch],
        *,
        systematic: bool,
        samples: bool,
        vocab_size: int,
        imported: int | None = None,
        drawn_at: float = 1.0,
    ) -> "Look | None":
        """Examine decoded rows as `at` does; None if none has targets.

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
        if drawn_at <= 1 and (labels := Outside.of(known)) is not None and labels.wrong:
            findings.append(f"mass: {labels}; build it again from the teacher's own log-probabilities")
        if z is not None and math.erfc(abs(z) / math.sqrt(2)) < _SAMPLES_LEVEL:
            often = "more" if z > 0 else "less"
            findings.append(f"samples: the labels were drawn {often} often than their log p predicts (z {z:.1f})")
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
        return cls(
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

    def to_json(self) -> dict[str, Any]:
        """Return a plain record."""
        return {**vars(self), "alignment": self.alignment.to_json()}


def _figures(batch: Batch, systematic: bool) -> tuple[float, ...]:
    """Return sums over the positions that count: loss, entropy, label's mass, its expectation, samples' deviation."""
    assert batch.targets is not None
    mask_N = batch.loss_mask.flatten()
    labels_N = batch.tokens[:, 1:].flatten()[batch.loss_mask.flatten()]
    targets = batch.targets.map(lambda _, each: each[mask_N])
    ids_NK, mass_NK = targets.listed()
    label_NK = ids_NK == labels_N[:, None]
    logprob_N = targets.label_logprob.double()
    mass_N, expected_N = (mass_NK * label_NK).sum(-1), mass_NK.square().sum(-1)
    entropy_N = torch.full_like(logprob_N, math.nan)
    away = 0.0
    variance = 0.0
    if isinstance(targets, SparseTargets):
        one = targets.knots.index(1.0)
        knots = len(targets.knots)
        tail_N = targets.tail[:, one].exp()
        slope_N = targets.tail[:, knots + one]
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
    number = targets.num_samples
    some_N = targets.counts.sum(-1) > 0
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
    found = []
    row = 0
    for batch in batches:
        targets = batch.targets
        length = batch.loss_mask.shape[1]
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
    ids_NK = ids_NK.gather(1, kept.indices)
    mass_NK = kept.values
    labels_RN = labels_RT[:, counted_T]
    fits_R = torch.zeros(len(labels_RT))
    for ids_N, mass_N in zip(ids_NK.T, mass_NK.T, strict=True):
        fits_R += ((labels_RN == ids_N) * mass_N).sum(-1) / max(_FEW, len(ids_NK))
    best = int(fits_R.argmax())
    return best if best != own and fits_R[best] > fits_R[own] + _MATCHED else None
