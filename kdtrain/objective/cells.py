"""Cells of a student's vocabulary: logits of groups of tokens, for targets over groups.

A teacher with another tokenizer says what the text goes on with, not which token (`data.cells`). Its events are cells,
disjoint groups of the student's tokens, and a cell's logit is the log of its tokens' sum of exp(z): the softmax over
cells is then that of the tokens, summed. So the engine reduces a chunk of logits to one column a cell, walks these as
it walks a vocabulary (`sparse`, `kernels`), and spreads the gradient back over the tokens, dz_v = dy_c exp(z_v - y_c).
A cell of one token is that token's logit, to the bit. The label stays a token: where its cell has others, it takes an
entry of its own beside the cells.

Given up: a cell of several tokens, all of them 1e37 times less likely than the likeliest token in such a cell, counts
as being that likely, without gradient.

Shape suffixes: R rows of a chunk, V vocabulary of the student, C cells, W = C + 2 columns, M tokens that share a cell.
"""

from __future__ import annotations

import functools
import hashlib
from dataclasses import dataclass, fields, replace

import torch
from torch import Tensor

from kdtrain.errors import UsageError
from kdtrain.objective.logits import NEVER
from kdtrain.objective.statistics import Entries

_KNOWN: dict[int, CellIndex] = {}


@dataclass(frozen=True, eq=False)
class CellIndex:
    """Which cell each token of the student is in; build it with `of`. All indices are int64."""

    count: int
    """C. Column C holds the tokens of no cell, column C + 1 the label where it has an entry of its own."""
    column: Tensor
    """[V] the column of each token, 0 .. C."""
    single: Tensor
    """[V] bool, whether its column has no other token."""
    first: Tensor
    """[C+1] a token of each column; 0 where there is none."""
    member: Tensor
    """[M] the tokens in columns of several, column by column."""
    place: Tensor
    """[M] the number of their column in `wide`."""
    wide: Tensor
    """The columns of several tokens, ascending."""
    holds_rest: bool
    """Whether some token is in no cell."""

    @functools.cached_property
    def key(self) -> int:
        """A digest of 48 bits, which a float of 64 holds: batches name their cells by it."""
        content = self.column.cpu().numpy().tobytes() + self.count.to_bytes(8, "little")
        return 1 + int.from_bytes(hashlib.sha256(content).digest()[:6], "little") % (2**48 - 1)

    def known(self) -> CellIndex:
        """Itself, and from now on found by its key in this process."""
        _KNOWN[self.key] = self
        return self

    @staticmethod
    def by_key(key: int) -> CellIndex:
        """The cells of a key. UsageError: this process has not opened their data set."""
        if key not in _KNOWN:
            raise UsageError("the batch is of an aligned data set that this process has not opened; open it here too")
        return _KNOWN[key]

    @classmethod
    def of(cls, cells_V: Tensor, count: int) -> CellIndex:
        """From the cell of each token, 0 .. count - 1, or count for none. ValueError: a cell has no token."""
        size_C1 = torch.bincount(cells_V, minlength=count + 1)
        if len(size_C1) != count + 1 or (size_C1[:count] == 0).any():
            raise ValueError("each cell needs a token of the student, and each token one of the cells or none")
        order = cells_V.argsort(stable=True)
        first = torch.cat([size_C1.new_zeros(1), size_C1.cumsum(0)[:-1]]).clamp(max=len(cells_V) - 1)
        several_V = size_C1[cells_V] > 1
        member = order[several_V[order]]
        wide, place = cells_V[member].unique_consecutive(return_inverse=True)
        return cls(count, cells_V, ~several_V, order[first], member, place, wide, bool(size_C1[count]))

    def to(self, device: torch.device) -> CellIndex:
        """The same on a device."""
        if self.column.device == device:
            return self
        own = {each.name: getattr(self, each.name) for each in fields(self)}
        return replace(self, **{k: v.to(device) for k, v in own.items() if isinstance(v, Tensor)})  # type: ignore[arg-type]

    def entries(self, cells: Entries, labels_N: Tensor) -> Entries:
        """The entries of cells, with the column of each label last: its cell's, or C + 1."""
        apart_N = ~self.single[labels_N]
        label_N = self.column[labels_N].masked_fill(apart_N, self.count + 1)
        return Entries(torch.cat([cells.ids[:, :-1], label_N[:, None]], 1), cells.absent, cells.top_k, apart=apart_N)

    def reduce(self, z_RV: Tensor) -> Grouped:
        """The logits of the columns."""
        y_RW = z_RV.new_full((len(z_RV), self.count + 2), NEVER)
        columns = self.count + self.holds_rest
        y_RW[:, :columns] = _columns(z_RV, self.first[:columns])
        if not len(self.member):
            return Grouped(self, y_RW, None, None)
        share_RM = _columns(z_RV, self.member)
        top_R1 = share_RM.amax(1, keepdim=True)
        share_RM.sub_(top_R1).exp_()
        mass_R = share_RM.new_zeros(len(z_RV), len(self.wide))
        mass_R.scatter_add_(1, self.place.expand(len(z_RV), -1), share_RM)
        mass_R.clamp_(min=torch.finfo(mass_R.dtype).tiny)
        y_RW.scatter_(1, self.wide.expand(len(z_RV), -1), top_R1 + mass_R.log())
        return Grouped(self, y_RW, share_RM, mass_R)


@dataclass(frozen=True, eq=False)
class Grouped:
    """A chunk of logits by columns."""

    index: CellIndex
    y: Tensor
    """[R,W]; columns that hold nothing are `NEVER`."""
    share: Tensor | None
    """[R,M] exp(z) of tokens in columns of several, up to a factor a row."""
    mass: Tensor | None
    """Their sums by column."""

    def spread(self, dy_RW: Tensor, labels_R: Tensor, slope: Tensor | float, into_RV: Tensor) -> None:
        """Write the gradient in u, given that in `y` and the slope of z in u, to `into_RV`."""
        index, labels_R1 = self.index, labels_R[:, None]
        dz_RV = _columns(dy_RW, index.column)
        if self.share is not None and self.mass is not None:
            scaled = _columns(dy_RW, index.wide).div_(self.mass)
            shared_RM = _columns(scaled, index.place).mul_(self.share)
            dz_RV.scatter_(1, index.member.expand(len(dz_RV), -1), shared_RM)
        dz_RV.scatter_(1, labels_R1, dz_RV.gather(1, labels_R1) + dy_RW[:, -1:])
        into_RV.copy_(dz_RV if isinstance(slope, float) and slope == 1.0 else dz_RV * slope)


def _columns(x_RV: Tensor, columns_C: Tensor) -> Tensor:
    return x_RV.gather(1, columns_C.expand(len(x_RV), -1))
