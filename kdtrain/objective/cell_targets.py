"""Targets over cells of a student's vocabulary, from what a teacher said over the tokens of its own, at T = 1.

A token of the student's that begins with one of the teacher's gets the teacher's masses by cell. One that begins within
a token of the teacher's gets the masses of what that token may be: the entries that are spelled with the tokens already
read, by the cell of the next one, scaled to 1 (`data.spelling`). A top-k says that of its own entries alone, and not of
its rest: there such a token gets nothing. Of samples few may be left; the text's own token is one more, as it is drawn
under the same condition where the text is the teacher's.

Shapes: N rows of the teacher's, M of the student's, K entries, V vocabulary of the teacher, L tokens that it is spelled
with, C cells.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from kdtrain.data.cells import Cells
from kdtrain.data.spelling import Spelling
from kdtrain.objective.targets import FLOOR, DenseTargets, SparseTargets

MOST_CELLS = 64
"""Cells of a whole distribution that are kept; the others are one event."""
_ABSENT = 2**31 - 1


@dataclass(frozen=True, eq=False)
class TeacherCells:
    """The cells of a teacher's tokens, and of the student's that they are spelled with; all int64."""

    of_token: Tensor
    """[V] 0 .. C-1; -1: none."""
    count: int
    """C."""
    starts: Tensor
    """[V+1] as `Spelling`."""
    said: Tensor
    """[L] as `Spelling`."""
    depth: Tensor
    """[L+1] as `Spelling`."""
    of_spelled: Tensor
    """[L] of each token of a spelling; -1: none."""

    @classmethod
    def of(cls, cells: Cells, spelling: Spelling) -> TeacherCells:
        """From arrays, on the CPU."""
        spelled = cells.of_student[spelling.tokens]
        spelled = np.where(spelled < cells.count, spelled, -1)
        of_token, *arrays = (
            torch.from_numpy(np.array(each, np.int64))
            for each in (cells.of_teacher, spelling.starts, spelling.said, spelling.depth, spelled)
        )
        return cls(of_token, cells.count, *arrays)

    def to(self, device: torch.device) -> TeacherCells:
        """The same on a device."""
        own = (each.to(device) for each in (self.starts, self.said, self.depth, self.of_spelled))
        return TeacherCells(self.of_token.to(device), self.count, *own)

    def at(self, ids_MK: Tensor, said_M: Tensor) -> Tensor:
        """[M,K] the cells that tokens of the teacher go on with; -1: none, or it is not spelled with what is said.

        ids_MK: below V. said_M: numbers (`Spelling.said`); 0 where nothing is said, which gives the cells of tokens.
        """
        place_MK = self.starts[ids_MK] + self.depth[said_M][:, None]
        fits_MK = place_MK < self.starts[ids_MK + 1]
        place_MK = place_MK.where(fits_MK, 0)
        fits_MK &= self.said[place_MK] == said_M[:, None]
        rest_MK = self.of_spelled[place_MK].where(fits_MK, -1)
        return torch.where(said_M[:, None] > 0, rest_MK, self.of_token[ids_MK])


def at_rows(targets: SparseTargets, source_M: Tensor) -> SparseTargets:
    """The rows `source_M` of targets over tokens of both; below 0: a row of finite numbers, to be left out."""

    def chosen(name: str, each: Tensor) -> Tensor:
        found, known_M = each[source_M.clamp(min=0)], source_M >= 0
        if name == "ids":  # valid ones: the student's sums are over them
            return found
        blank = FLOOR if name == "logprobs" else 0.0
        return found.where(known_M if found.ndim == 1 else known_M[:, None], blank)

    return targets.map(chosen)


def condensed(targets: DenseTargets, cells: TeacherCells, source_M: Tensor, said_M: Tensor) -> SparseTargets:
    """The `MOST_CELLS` likeliest cells, and the rest, for the rows `source_M` of whole distributions over tokens.

    source_M: int64. said_M: see `TeacherCells.at`. Cells and targets may be on different devices.

    Mass without a cell is left out, and the rest scaled to 1; where no mass has a cell, none is above `FLOOR`.
    """
    device = targets.logprobs.device
    cells, source_M, said_M = cells.to(device), source_M.to(device), said_M.to(device)
    logprobs_MV = targets.logprobs[source_M, : len(cells.of_token)]
    mass_MV = logprobs_MV.to(torch.promote_types(logprobs_MV.dtype, torch.float32)).exp()
    size, count = mass_MV.shape[1], cells.count
    place_MV = cells.of_token[:size].expand(len(mass_MV), -1)
    if len(some := (said_M > 0).nonzero().squeeze(1)):
        every = torch.arange(size, device=device).expand(len(some), -1)
        place_MV = place_MV.index_copy(0, some, cells.at(every, said_M[some]))
    place_MV = torch.where(place_MV < 0, count, place_MV)
    by_cell_MC = mass_MV.new_zeros(len(mass_MV), count + 1).scatter_add_(1, place_MV, mass_MV)[:, :count]
    by_cell_MC /= by_cell_MC.sum(1, keepdim=True).clamp(min=torch.finfo(mass_MV.dtype).tiny)
    mass_MK, cell_MK = by_cell_MC.topk(min(MOST_CELLS, count), dim=1)
    rest_M = by_cell_MC.scatter(1, cell_MK, 0.0).sum(1)
    none_M = torch.zeros_like(rest_M)
    return SparseTargets(
        ids=cell_MK,
        logprobs=mass_MK.log().clamp_min(FLOOR),
        counts=torch.zeros_like(mass_MK),
        tail=torch.stack([rest_M.log().clamp_min(FLOOR), none_M], 1),
        label_logprob=none_M,
        logit_mean=none_M,
        logit_std=none_M,
        top_k=mass_MK.shape[1],
        num_samples=0,
        knots=(1.0,),
    )


def coarsened(
    targets: SparseTargets, cells: TeacherCells, source_M: Tensor, said_M: Tensor, own_M: Tensor | None = None
) -> SparseTargets:
    """Targets over cells for the rows `source_M` of targets over tokens of the teacher.

    source_M: int64; below 0: a row that nothing is known about, to be left out by `AlignedTargets.compared`. said_M:
    see `TeacherCells.at`; 0 throughout for a top-k without samples. own_M: int64, the cells of the text's own tokens,
    C for none, which count as one sample behind what is said.

    Mass without a cell is left out (and of a top-k the rest scaled to 1). Samples give samples, a top-k gives a top-k
    of the same width; both together give weights, as of samples. What a cache of samples knows of the entropy of
    tokens does not say that of cells, so theirs is that of the samples.
    """
    rows = targets[:0] if not len(targets) else targets.map(lambda _, each: each[source_M.clamp(min=0)])
    size = len(cells.of_token)
    present = (rows.ids < size) & (source_M >= 0)[:, None]
    cell_MK = torch.where(present, cells.at(rows.ids.clamp(max=size - 1), said_M), -1)
    one = torch.ones((), dtype=torch.float64)
    if not rows.num_samples or rows.only_at_one:
        mass_MK = rows.listed()[1]
    else:
        drawn_MD = rows.drawn_weights(one).float()
        mass_MK = torch.cat([rows.top_logprobs(one).exp().float(), drawn_MD], 1)
    present &= (cell_MK >= 0) & (mass_MK > 0)
    if own_M is not None:
        said_M1 = ((said_M > 0) & (source_M >= 0) & (own_M < cells.count))[:, None]
        present, cell_MK = torch.cat([present, said_M1], 1), torch.cat([cell_MK, own_M[:, None]], 1)
        mass_MK = torch.cat([mass_MK, mass_MK.new_full((len(mass_MK), 1), 1 / rows.num_samples)], 1).where(present, 0.0)
        mass_MK = torch.where(said_M1, mass_MK / mass_MK.sum(1, keepdim=True), mass_MK)
    cell_MK = torch.where(present, cell_MK, _ABSENT)
    cell_MK, order_MK = cell_MK.sort(dim=1, stable=True)
    mass_MK = mass_MK.where(present, 0.0).gather(1, order_MK)
    begins_MK = torch.ones_like(cell_MK, dtype=torch.bool)
    begins_MK[:, 1:] = cell_MK[:, 1:] != cell_MK[:, :-1]
    group_MK = begins_MK.cumsum(1) - 1
    mass_MK = torch.zeros_like(mass_MK).scatter_add_(1, group_MK, mass_MK)
    cell_MK = torch.full_like(cell_MK, _ABSENT).scatter_(1, group_MK, cell_MK)
    mass_MK, order_MK = mass_MK.masked_fill(cell_MK == _ABSENT, 0.0).sort(dim=1, descending=True, stable=True)
    cell_MK = cell_MK.gather(1, order_MK)
    logprobs_MK = mass_MK.log().masked_fill(cell_MK == _ABSENT, FLOOR)
    none_M = rows.label_logprob.new_zeros(len(rows))
    tail_M2 = none_M[:, None].expand(-1, 2)
    top_k = 0 if rows.num_samples else rows.top_k
    if top_k:
        tail_M2 = torch.stack([rows.log_tail(1.0), none_M], 1).masked_fill((source_M < 0)[:, None], 0.0)
        # a row of absent entries has no first one, whose id the others take
        blank_M1 = (source_M < 0)[:, None] | (cell_MK[:, :1] == _ABSENT)
        cell_MK = torch.where(blank_M1, 0, cell_MK)
        cell_MK[:, 1:] = cell_MK[:, 1:].masked_fill(blank_M1, _ABSENT)
    return SparseTargets(
        ids=cell_MK,
        logprobs=logprobs_MK,
        counts=mass_MK * rows.num_samples,
        tail=tail_M2,
        label_logprob=none_M,
        logit_mean=none_M,
        logit_std=none_M,
        top_k=top_k,
        num_samples=rows.num_samples,
        knots=(1.0,),
    )
