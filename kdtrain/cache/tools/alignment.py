"""Which token a cache's rows are about: the next one, as they must be, or a neighbour.

At shift s the entries of position t are compared with tokens[t + 1 + s]; a cache is aligned if s = 0 explains the text
best. The comparison is paired: each label tokens[u] is scored under the entries of the positions u - 2, u - 1 and u,
which are about it at the shifts 1, 0 and -1. Its score is log(p + 0.001), with p the probability that the cache keeps
for it. The logarithm is a proper score: in the mean over the text no prediction from less of it beats the right one.
(The mean of p is not proper; it is a figure for people, with the rank.)

A position that has read the label already can beat the right one only where the text repeats itself: in a run "a a a b
b" the entries after an "a" are mostly about "a". So no token is judged that often follows itself in these rows. Also
left out are labels that equal a neighbour, those outside of the loss, and those near the start of a document.

Rows are the unit: of two shifts one explains a row better or the other does, and if both were equally good each would
do so in half of the rows. The sign test gives the chance of as many rows as were found, exact at any number of rows,
and no single strange row decides. A shift is the verdict if it beats both others at `LEVEL`; one other than 0 must also
be better by a margin that no aligned cache has, so that an untrained teacher, which says nothing or repeats its input,
accuses nobody. With fewer than ten rows, or less than a tenth of the labels, left to judge there is no verdict.

Shapes: B sequences, T positions, N = B*T tokens, K entries, S = 3 shifts.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from einops import rearrange
from torch import Tensor

from kdtrain.objective.batch import Batch
from kdtrain.objective.targets import Targets

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
    tokens_BT, mask_BT, segments_BT = batch.tokens[:, :-1], batch.loss_mask, batch.segments
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
