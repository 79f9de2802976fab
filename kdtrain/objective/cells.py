"""Cells of a student's vocabulary: groups of tokens as entries, for targets over groups.

A teacher with another tokenizer predicts how the text continues, not which token (`tokenizers`). Its events are cells,
disjoint groups of the student's tokens, and a cell's logit is the log of its tokens' sum of exp(z): the softmax over
cells is then that of the tokens, summed. Only the cells that a row's targets name need a logit of their own; to the
sums over all others each token is as good as its cell. So the engine folds a chunk of logits (`CellIndex.fold`): the
tokens of a named cell become one, in the column of its first, and the others are masked. It then walks the chunk as any
other (`sparse`, `kernels`), and unfolds the gradient, dz_v = dy_c exp(z_v - y_c). A cell of one token is that token, to
the bit. The label stays a token: in a folded cell it keeps a logit and a gradient of its own.

What is folded depends on the targets, so on a GPU its size is read back, once for all chunks.

Shape suffixes: R rows of a chunk, V vocabulary of the student, C cells, K entries, E = K + 1, P tokens that are folded.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, fields, replace

import torch
from torch import Tensor

from kdtrain.models.output_head import HeadPart
from kdtrain.objective.statistics import NEVER, Entries


@dataclass(frozen=True, eq=False)
class CellIndex:
    """The cell of each token of the student; build it with `of`. All indices are int64."""

    count: int
    """C."""
    column: Tensor
    """[V] the cell of each token, 0 .. C; C: none."""
    size: Tensor
    """[C+1] tokens of each cell."""
    start: Tensor
    """[C+1] where its tokens begin in `member`."""
    member: Tensor
    """[V] the tokens, cell by cell."""
    folds: bool
    """Whether some cell has several tokens."""

    @classmethod
    def of(cls, cells_V: Tensor, count: int) -> CellIndex:
        """Make the index from the cell of each token, 0 .. count - 1, or count for none.

        ValueError: a cell has no token, or a token has a larger number.
        """
        size = torch.bincount(cells_V, minlength=count + 1)
        if len(size) != count + 1 or (size[:count] == 0).any():
            raise ValueError("each cell needs a token of the student, and each token one of the cells or none")
        folds = bool((size[:count] > 1).any())
        return cls(count, cells_V, size, size.cumsum(0) - size, cells_V.argsort(stable=True), folds)

    @functools.lru_cache(maxsize=16)  # noqa: B019 - of few indices, which live as long as the process
    def to(self, device: torch.device) -> CellIndex:
        """Return the same index on a device, copied there once."""
        if self.column.device == device:
            return self
        own = {each.name: getattr(self, each.name) for each in fields(self)}
        return replace(self, **{k: v.to(device) for k, v in own.items() if isinstance(v, Tensor)})  # type: ignore[arg-type]

    def entries(self, cells: Entries, labels_R: Tensor, within_R: Tensor | None = None) -> Entries:
        """Return the entries of cells, by the first token of each cell, and the labels.

        within_R: bool, where the label's own cell is wanted, if it has other tokens; it gets a column behind the cells,
        which is absent where one of these is it.
        """
        cell_RK = cells.ids[:, :-1]
        first_RK = self.member[self.start[cell_RK]]
        if not self.folds:
            return replace(cells, ids=torch.cat([first_RK, labels_R[:, None]], 1))
        # a cell comes once in a row: a masked row has 0 throughout, and none of it is worth a fold but the first
        again_RK = torch.nn.functional.pad(cell_RK[:, 1:] == cell_RK[:, :1], (1, 0))
        absent_RK = cells.absent | again_RK
        own_R = self.column[labels_R]
        named_RK = (cell_RK == own_R[:, None]) & ~absent_RK
        several_R = (own_R < self.count) & (self.size[own_R] > 1)
        folded_R = named_RK.any(1) & several_R
        group_R = None
        if within_R is not None:
            wanted_R = within_R & several_R & ~absent_RK[:, 0]
            added_R = wanted_R & ~folded_R
            column_R = torch.where(added_R, cell_RK.shape[1], named_RK.long().argmax(1))
            group_R = torch.where(wanted_R, column_R, -1)
            folded_R = folded_R | added_R
            added_token_R = torch.where(added_R, self.member[self.start[own_R]], first_RK[:, 0])
            first_RK = torch.cat([first_RK, added_token_R[:, None]], 1)
            absent_RK = torch.cat([absent_RK, ~added_R[:, None]], 1)
        ids_RE = torch.cat([first_RK, torch.where(folded_R, first_RK[:, 0], labels_R)[:, None]], 1)
        return Entries(ids_RE, absent_RK, cells.top_k, apart=folded_R, group=group_R)

    def _sizes(self, entries: Entries) -> Tensor:
        """Return the number of tokens of each entry that is folded, else 0, [R,K]."""
        size_RK = self.size[self.column[entries.ids[:, :-1]]].masked_fill(entries.absent, 0)
        return size_RK.masked_fill(size_RK == 1, 0)

    def totals(self, entries: Entries, chunk: int) -> list[int]:
        """Count the tokens that `fold` folds in each chunk of rows."""
        return torch.stack([each.sum() for each in self._sizes(entries).split(chunk)]).tolist()

    def fold(self, z_RV: Tensor, entries: Entries, labels_R: Tensor, total: int | None = None) -> Folded:
        """Fold the cells of the entries in place, and take the entries' logits. total: see `totals`, if it is known."""
        ids_RK = entries.ids[:, :-1]
        apart_R = entries.apart
        assert apart_R is not None
        rows, kept = ids_RK.shape
        cell_RK = self.column[ids_RK]
        size_RK = self._sizes(entries)
        sizes = size_RK.flatten()
        every = torch.arange(rows * kept, device=z_RV.device)
        group_P = torch.repeat_interleave(every, sizes, output_size=total)
        place_P = torch.arange(len(group_P), device=z_RV.device) - (sizes.cumsum(0) - sizes)[group_P]
        token_P = self.member[self.start[cell_RK.flatten()][group_P] + place_P]
        row_P = group_P // max(1, kept)

        z_P = z_RV[row_P, token_P]
        top = z_RV.new_full((rows * kept,), NEVER).scatter_reduce_(0, group_P, z_P, "amax")
        shifted_P = (z_P - top[group_P]).exp_()
        mass = z_RV.new_zeros(rows * kept).index_add_(0, group_P, shifted_P)
        label_R = z_RV.gather(1, labels_R[:, None]).squeeze(1)
        z_RK = torch.where(size_RK > 0, (top + mass.log()).view(rows, kept), z_RV.gather(1, ids_RK))
        z_RK = torch.where(entries.absent, z_RK[:, :1], z_RK)  # these have its column
        z_RV[row_P, token_P] = z_RV.new_full((), NEVER)
        z_RV.scatter_(1, ids_RK, z_RK)
        several_RK = torch.where(entries.absent, size_RK[:, :1] > 0, size_RK > 0)
        taken = replace(entries.take(z_RV, label_R=label_R), several=torch.nn.functional.pad(several_RK, (0, 1)))
        return Folded(taken, labels_R, row_P, token_P, group_P, z_P, shifted_P.div_(mass[group_P]))


@dataclass(frozen=True, eq=False)
class Folded:
    """A chunk of logits after `CellIndex.fold`: its entries, and the tokens that were folded."""

    entries: Entries
    """With their logits."""
    labels: Tensor
    """[R] the labels as tokens."""
    row: Tensor
    """[P] of each token that was folded."""
    token: Tensor
    """[P] its column."""
    group: Tensor
    """[P] the number of its entry among R times K."""
    z: Tensor
    """[P] its logit."""
    share: Tensor
    """[P] exp(z) of it, as a share of its cell's."""

    def unfold(self, dz_RV: Tensor, at_RE: Tensor, apart_R: Tensor, head: HeadPart) -> None:
        """Carry the gradient of entries, `at_RE`, to the tokens of their cells, and write the labels' gradient there.

        apart_R: the gradient in the logit of a label whose cell is folded.
        """
        dz_P = at_RE[:, :-1].flatten()[self.group] * self.share
        dz_RV[self.row, self.token] = (dz_P * head.slope(self.z)).to(dz_RV.dtype)
        own_R = self.entries.apart
        assert own_R is not None and self.entries.z is not None
        place = torch.arange(len(own_R), device=own_R.device), self.labels
        before_R = dz_RV[place]
        added_R = before_R.to(apart_R.dtype) + apart_R * head.slope(self.entries.z[:, -1])
        dz_RV[place] = torch.where(own_R, added_R.to(dz_RV.dtype), before_R)  # no index of some: it would be read back
