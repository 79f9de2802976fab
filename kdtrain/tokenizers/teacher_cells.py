"""Targets over cells of a student's vocabulary, from a teacher's numbers over the tokens of its own, at T = 1.

A token of the student's that begins with one of the teacher's gets the teacher's masses by cell. One that begins within
a token of the teacher's gets the masses of what that token may be: the entries that are spelled with the tokens already
read, by the cell of the next one, scaled to 1 (`data.spelling`). A top-k tells that of its own entries alone: there
such a token gets nothing. Nor does it tell which cells its rest lies in: the targets hold what each has at least, and
the loss compares with the nearest distribution that has as much (`tails`). Of samples few may be left;
where one is, the text's own token is one more, as it is drawn nearly under the same condition (0.2 to 0.3 % of the mass
differ) where the text is the teacher's.

Shapes: N rows of the teacher's, M of the student's, K entries, V vocabulary of the teacher, L tokens that it is spelled
with, C cells.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, fields, replace

import numpy as np
import torch
from torch import Tensor

from kdtrain.data.spelling import Spelling
from kdtrain.objective.targets import FLOOR, DenseTargets, SparseTargets
from kdtrain.tokenizers.cells import Cells

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
    prefix: Tensor
    """[L] as `Spelling`."""
    depth: Tensor
    """[L+1] as `Spelling`."""
    of_spelled: Tensor
    """[L] of each token of a spelling; -1: none."""
    of_place: Tensor
    """[L] the token of the teacher that it is a spelling of."""
    by_prefix: Tensor
    """[L] 0 .. L-1 in the order of `prefix`."""
    first: Tensor
    """[L+2] where each number begins in `by_prefix`."""

    @classmethod
    def of(cls, cells: Cells, spelling: Spelling) -> TeacherCells:
        """Make the cells from arrays, on the CPU."""
        spelled = cells.of_student[spelling.tokens]
        spelled = np.where(spelled < cells.count, spelled, -1)
        of_place = np.repeat(np.arange(len(cells.of_teacher)), np.diff(spelling.starts))
        by_prefix = np.argsort(spelling.prefix, kind="stable")
        first = np.searchsorted(spelling.prefix[by_prefix], np.arange(len(by_prefix) + 2))
        own = cells.of_teacher, spelling.starts, spelling.prefix, spelling.depth, spelled, of_place, by_prefix, first
        of_token, *arrays = (torch.from_numpy(np.array(each, np.int64)) for each in own)
        return cls(of_token, cells.count, *arrays)

    @functools.cached_property
    def size(self) -> Tensor:
        """The number of the teacher's tokens in each cell, and in none, [C+1]."""
        return torch.bincount(self.of_token.where(self.of_token >= 0, self.count), minlength=self.count + 1)

    def to(self, device: torch.device) -> TeacherCells:
        """Return the same cells on a device."""
        if self.of_token.device == device:
            return self
        tensors = {each.name: getattr(self, each.name) for each in fields(self) if each.name != "count"}
        return replace(self, **{name: each.to(device) for name, each in tensors.items()})

    def at(self, ids_MK: Tensor, prefix_M: Tensor) -> Tensor:
        """Return the cell of the student's next token in each of the teacher's, [M,K]; -1: none, or spelled otherwise.

        ids_MK: below V. prefix_M: the number of the tokens already read (`Spelling.prefix`); 0: cells of whole tokens.
        """
        place_MK = self.starts[ids_MK] + self.depth[prefix_M][:, None]
        fits_MK = place_MK < self.starts[ids_MK + 1]
        place_MK = place_MK.where(fits_MK, 0)
        fits_MK &= self.prefix[place_MK] == prefix_M[:, None]
        rest_MK = self.of_spelled[place_MK].where(fits_MK, -1)
        return torch.where(prefix_M[:, None] > 0, rest_MK, self.of_token[ids_MK])

    def going_on(self, mass_MV: Tensor, prefix_M: Tensor) -> Tensor:
        """Return the masses of the cells of the student's next token, [M,C], from whole distributions.

        Tokens of the teacher that are spelled otherwise than with those already read are left out. prefix_M: above 0.
        """
        size_M = self.first[prefix_M + 1] - self.first[prefix_M]
        row = torch.repeat_interleave(torch.arange(len(prefix_M), device=prefix_M.device), size_M)
        rank = torch.arange(len(row), device=row.device) - (size_M.cumsum(0) - size_M)[row]
        place = self.by_prefix[self.first[prefix_M][row] + rank]
        token, cell = self.of_place[place], self.of_spelled[place]
        there = (token < mass_MV.shape[1]) & (cell >= 0)
        mass = mass_MV[row, token.where(there, 0)].where(there, 0.0)
        found = mass_MV.new_zeros(len(prefix_M) * self.count)
        return found.index_add_(0, row * self.count + cell.where(there, 0), mass).view(len(prefix_M), self.count)


def at_rows(targets: SparseTargets, source_M: Tensor) -> SparseTargets:
    """Return the rows `source_M` of targets over tokens of both; below 0: a row of finite numbers, to be left out."""

    def chosen(name: str, each: Tensor) -> Tensor:
        found = each[source_M.clamp(min=0)]
        known_M = source_M >= 0
        if name == "ids":  # valid ones: the student's sums are over them
            return found
        blank = FLOOR if name == "logprobs" else 0.0
        return found.where(known_M if found.ndim == 1 else known_M[:, None], blank)

    return targets.map(chosen)


def condensed(targets: DenseTargets, cells: TeacherCells, source_M: Tensor, prefix_M: Tensor) -> SparseTargets:
    """Return the `MOST_CELLS` likeliest cells, and the rest, for the rows `source_M` of whole token distributions.

    source_M: int64. prefix_M: see `TeacherCells.at`. Both may be on another device than cells and targets.

    Mass without a cell is left out, and the rest scaled to 1; where no mass has a cell, none is above `FLOOR`.
    """
    device = targets.logprobs.device
    # before it is on a device, where its size would be waited for
    some = (prefix_M > 0).nonzero().squeeze(1).to(device)
    source_M, prefix_M = source_M.to(device), prefix_M.to(device)
    logprobs_MV = targets.logprobs[source_M, : len(cells.of_token)]
    mass_MV = logprobs_MV.to(torch.promote_types(logprobs_MV.dtype, torch.float32)).exp()
    size = mass_MV.shape[1]
    count = cells.count
    cell_V = torch.where(cells.of_token[:size] < 0, count, cells.of_token[:size])
    by_cell_MC = mass_MV.new_zeros(len(mass_MV), count + 1).index_add_(1, cell_V, mass_MV)[:, :count]
    if len(some):
        by_cell_MC[some] = cells.going_on(mass_MV[some], prefix_M[some])
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
    targets: SparseTargets, cells: TeacherCells, source_M: Tensor, prefix_M: Tensor, own_M: Tensor | None = None
) -> SparseTargets:
    """Return targets over cells for the rows `source_M` of targets over tokens of the teacher.

    source_M: int64; below 0: a row that nothing is known about, to be left out by `AlignedTargets.compared`. prefix_M:
    see `TeacherCells.at`. own_M: int64, the cells of the labels, C for none; in rows with prefix_M above 0 the label is
    one more sample, if there is no top-k. None: prefix_M is 0 in all rows.

    Mass without a cell is left out (and of a top-k the rest scaled to 1). Samples give samples, a top-k gives a top-k
    of the same width, in which a cell with a token that is not kept is `partial`; both together give weights, as of
    samples. What a cache of samples knows of the entropy of tokens does not say that of cells, so theirs is that of the
    samples.
    """
    rows = targets[:0] if not len(targets) else targets.map(lambda _, each: each[source_M.clamp(min=0)])
    size = len(cells.of_token)
    present = (rows.ids < size) & (source_M >= 0)[:, None]
    cell_MK = torch.where(present, cells.at(rows.ids.clamp(max=size - 1), prefix_M), -1)
    one = torch.ones((), dtype=torch.float64)
    if not rows.num_samples or rows.only_at_one:
        mass_MK = rows.listed()[1]
    else:
        drawn_MD = rows.drawn_weights(one).float()
        mass_MK = torch.cat([rows.top_logprobs(one).exp().float(), drawn_MD], 1)
    present &= (cell_MK >= 0) & (mass_MK > 0)
    mass_MK = mass_MK.where(present, 0.0)
    if own_M is not None:
        within_M1 = ((prefix_M > 0) & present.any(1))[:, None]
        if not rows.top_k:
            own_M1 = within_M1 & (own_M < cells.count)[:, None]
            present, cell_MK = torch.cat([present, own_M1], 1), torch.cat([cell_MK, own_M[:, None]], 1)
            mass_MK = torch.cat([mass_MK, own_M1 / rows.num_samples], 1)
        mass_MK = torch.where(within_M1, mass_MK / mass_MK.sum(1, keepdim=True), mass_MK)
    cell_MK = torch.where(present, cell_MK, _ABSENT)
    cell_MK, order_MK = cell_MK.sort(dim=1, stable=True)
    mass_MK = mass_MK.gather(1, order_MK)
    begins_MK = torch.ones_like(cell_MK, dtype=torch.bool)
    begins_MK[:, 1:] = cell_MK[:, 1:] != cell_MK[:, :-1]
    group_MK = begins_MK.cumsum(1) - 1
    kept_MK = torch.zeros_like(mass_MK).scatter_add_(1, group_MK, (cell_MK != _ABSENT).to(mass_MK.dtype))
    mass_MK = torch.zeros_like(mass_MK).scatter_add_(1, group_MK, mass_MK)
    cell_MK = torch.full_like(cell_MK, _ABSENT).scatter_(1, group_MK, cell_MK)
    mass_MK, order_MK = mass_MK.masked_fill(cell_MK == _ABSENT, 0.0).sort(dim=1, descending=True, stable=True)
    cell_MK = cell_MK.gather(1, order_MK)
    logprobs_MK = mass_MK.log().masked_fill(cell_MK == _ABSENT, FLOOR)
    none_M = rows.label_logprob.new_zeros(len(rows))
    tail_M2 = none_M[:, None].expand(-1, 2)
    partial_MK = None
    top_k = 0 if rows.num_samples else rows.top_k
    if top_k:
        there_MK = cell_MK != _ABSENT
        more_MK = cells.size[cell_MK.where(there_MK, 0)] > kept_MK.gather(1, order_MK)
        partial_MK = (more_MK & there_MK).to(mass_MK.dtype)
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
        partial=partial_MK,
    )
