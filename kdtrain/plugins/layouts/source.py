"""The rows of a source as arrays: parquet or jsonl files, one row after the other, in a memory that does not grow.

`kdtrain.data.rows` reads them, and bounds what it reads: the files may be anyone's. The arrays of parquet are those of
arrow, since lists of Python are slow.
"""

from collections.abc import Iterator, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from kdtrain.data.rows import RowFile, readable
from kdtrain.errors import UsageError
from kdtrain.imports import optional
from kdtrain.plugins.layouts.layout import Layout, Lists, Record

_TOKENS = 2**22
"""Most tokens of one record."""
_NUMBERS = 2**28
"""Most numbers in one column of a record: 2,000 a token in a row of 131,072."""
_SUFFIXES = (".parquet", ".jsonl")


class SourceFile:
    """A file, and its columns that a layout reads. UsageError: it cannot be read, or lacks a column."""

    def __init__(self, path: Path, layout: Layout) -> None:
        self.path = path
        self.layout = layout
        self.columns = layout.columns
        self.file = RowFile(path)
        if self.file.is_parquet:
            lacking = layout.optional - {*self.file.names()}
            self.columns = {name: depth for name, depth in self.columns.items() if name not in lacking}
            next(self.file.batches([*self.columns]), None)

    @cached_property
    def _rows(self) -> int:
        return len(self.file)

    def __len__(self) -> int:
        return self._rows

    def records(self, names: Sequence[str] | None = None, begin: float = 0.0) -> Iterator[tuple[str, Record]]:
        """Yield the records, each with its place in the source, for messages.

        names: only these columns. begin: the share of the file to skip; of parquet in whole row groups.
        """
        wanted = {name: depth for name, depth in self.columns.items() if names is None or name in names}
        for where, cells in self._cells([*wanted], begin):
            found = dict[str, Any]()
            for name, depth in wanted.items():
                if (cell := cells.get(name)) is not None or name not in self.layout.optional:
                    found[name] = _array(cell, depth, where, name)
            tokens = found[self.layout.tokens]
            if len(tokens) > _TOKENS:
                raise UsageError(f"{where}: has {len(tokens):,} tokens; at most {_TOKENS:,} are read")
            for name, values in found.items():
                if not isinstance(values, Lists) and len(values) != len(tokens):
                    # The last token of a row may have no entries, and its document then no number.
                    raise UsageError(f"{where}: has {len(tokens)} tokens and {len(values)} numbers in {name}")
            yield where, found

    def _cells(self, names: Sequence[str], begin: float) -> Iterator[tuple[str, dict[str, Any]]]:
        """Yield the place of each row, and its cells: lists of JSON, or arrays of arrow."""
        if self.file.is_parquet:
            for first, batch in self.file.batches(names, begin):
                for row in range(batch.num_rows):
                    cells = {name: getattr(batch.column(name)[row], "values", None) for name in names}
                    yield f"{self.path}, row {first + row}", cells
            return
        for where, row in self.file.values(int(begin * len(self)) if begin else 0):
            yield where, row if isinstance(row, dict) else {}


def _array(cell: Any, depth: int, where: str, name: str) -> np.ndarray | Lists:
    """Convert a list of JSON, or an array of arrow, to its numbers, int64 or float64.

    With depth 2 these are `Lists`. UsageError: it is not such a list, or is too long.
    """
    lengths: Any = ()
    if isinstance(cell, list):
        if depth == 2:
            parts = [[] if each is None else each for each in cell]
            if not all(isinstance(each, list) for each in parts):
                raise UsageError(f"{where}: {name} has a position that is not a list")
            lengths, cell = [len(each) for each in parts], [each for part in parts for each in part]
        plain = all(type(each) in (int, float, bool) for each in cell)
        values = np.asarray(cell) if plain else np.asarray(None)
    elif cell is None or not hasattr(cell, "null_count"):
        raise UsageError(f"{where}: needs a list in '{name}'")
    else:
        if depth == 2:
            compute: Any = optional("pyarrow.compute", "data", where)
            with readable(f"{where}: {name}"):
                lengths = compute.fill_null(compute.list_value_length(cell), 0).to_numpy(zero_copy_only=False)
            cell = cell.flatten()
        if cell.null_count or len(cell) > _NUMBERS:
            wrong = "a null among its numbers" if cell.null_count else f"{len(cell):,} numbers, more than {_NUMBERS:,}"
            raise UsageError(f"{where}: {name} has {wrong}")
        values = cell.to_numpy(zero_copy_only=False)
    if values.dtype.kind not in "biuf":
        raise UsageError(f"{where}: {name} holds something that is not a number of at most 64 bits")
    if values.dtype == np.uint64:
        values = values.view(np.int64)  # a packed word keeps its bits; an id this large is below 0 and refused
    values = values.astype(np.float64 if values.dtype.kind == "f" else np.int64, copy=False)
    return Lists(values, np.asarray(lengths, np.int64)) if depth == 2 else values


def open_source(source: str, layout: Layout) -> list[SourceFile]:
    """List the files of a source, sorted by name: itself, or the parquet or jsonl files below a folder.

    UsageError: there are none, of both kinds, or a link among them; one lacks a column.
    """
    root = Path(source)
    if not root.is_file() and not root.is_dir():
        raise UsageError(f"{source}: there is no such file or folder; give parquet or jsonl")
    paths = [root]
    if root.is_dir():
        paths = sorted(path for path in root.rglob("*") if path.suffix in _SUFFIXES and not path.name.startswith("."))
    paths = [path for path in paths if path.is_file()]
    kinds = {path.suffix for path in paths}
    if not paths or not kinds <= set(_SUFFIXES):
        raise UsageError(f"{source}: give a .parquet or .jsonl file, or a folder of them")
    if len(kinds) > 1:
        raise UsageError(f"{source}: holds parquet and jsonl; name one of the files, or give a folder for each")
    return [SourceFile(path, layout) for path in paths]
