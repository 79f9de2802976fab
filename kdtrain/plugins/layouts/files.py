"""Reading the files of a source: parquet or jsonl, one record after the other, in a memory that does not grow.

A parquet file is read a few rows at a time, whatever the size of its row groups, and only the columns that are needed.
Types are checked before anything is read, sizes before a row is taken apart: the files may be anyone's.
"""

import hashlib
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from functools import cached_property
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np

from kdtrain.data.rows import parse_line, read_lines, readable, refuse_unpacked
from kdtrain.errors import UsageError
from kdtrain.files import open_regular
from kdtrain.imports import optional
from kdtrain.plugins.layouts.layout import Columns, Lists, Record

_ROWS = 8
"""Most rows that are read at once."""
_AT_ONCE = 2**24
"""Numbers that are read at once, unless a single row has more; pyarrow takes some 20 bytes for each."""
_TOKENS = 2**22
"""Most tokens of one record."""
_NUMBERS = 2**28
"""Most numbers in one column of a record: 2,000 a token in a row of 131,072."""
_SUFFIXES = (".parquet", ".jsonl")


class SourceFile:
    """A jsonl file, and the columns of it that are read. UsageError: it cannot be read, or lacks one."""

    def __init__(self, path: Path, columns: Columns) -> None:
        self.path, self.columns, self.name = path, columns, path.name
        """`name`: relative to the source."""

    @cached_property
    def rows(self) -> int:
        """Number of records."""
        with readable(str(self.path)):
            return sum(1 for _ in read_lines(self.path))

    def __len__(self) -> int:
        return self.rows

    def near(self, number: int) -> int:
        """A record at or before `number` from which reading costs nothing for those before it."""
        return number

    def records(self, names: Sequence[str] | None = None, first: int = 0) -> Iterator[tuple[str, Record]]:
        """The records from number `first` on, each with where it is, for messages; `names`: only these columns."""
        for number, where, found in self._read(names, first):
            if number < first:
                continue
            tokens = found[self.columns.tokens]
            if len(tokens) > _TOKENS:
                raise UsageError(f"{where}: has {len(tokens):,} tokens; at most {_TOKENS:,} are read")
            for name, values in found.items():
                if not isinstance(values, Lists) and len(values) != len(tokens):
                    # The last token of a row may have no entries, and its document then no number.
                    raise UsageError(f"{where}: has {len(tokens)} tokens and {len(values)} numbers in {name}")
            yield where, found

    def _read(self, names: Sequence[str] | None, first: int) -> Iterator[tuple[int, str, Record]]:
        depths = {name: each for name, each in self.columns.depths().items() if names is None or name in names}
        with readable(str(self.path)):
            for count, (number, line) in enumerate(read_lines(self.path)):
                where = f"{self.path}, line {number}"
                if count >= first:
                    record, found = parse_line(line, where), dict[str, Any]()
                    for name, depth in depths.items():
                        values = record.get(name) if isinstance(record, dict) else None
                        if values is None and name in self.columns.optional:
                            continue
                        found[name] = _from_json(values, depth, where, name)
                    yield count, where, found


class ParquetFile(SourceFile):
    """A parquet file."""

    def __init__(self, path: Path, columns: Columns) -> None:
        super().__init__(path, columns)
        self._arrow: Any = optional("pyarrow", "data", str(path))
        self._parquet: Any = optional("pyarrow.parquet", "data", str(path))
        with readable(str(path)), self._open() as file:
            about, schema = file.metadata, file.schema_arrow
            sizes = [about.row_group(number).num_rows for number in range(about.num_row_groups)]
            self.rows, self._starts = about.num_rows, [0, *accumulate(sizes)]
            # The metadata has how many numbers a column of a row group has, not of a row.
            mean = refuse_unpacked(path, file, [*columns.depths()])
            if mean > _NUMBERS:
                raise UsageError(f"{path}: its rows have {mean:,} numbers in the mean; at most {_NUMBERS:,} are read")
            self._at_once = max(1, min(_ROWS, _AT_ONCE // mean))
        self.depths: dict[str, int] = {}
        for name, depth in columns.depths().items():
            if name in schema.names:
                self._check(name, schema.field(name).type, depth)
                self.depths[name] = depth
            elif name not in columns.optional:
                raise UsageError(f"{path}: has no column '{name}'; it has {', '.join(schema.names[:20])}")

    def near(self, number: int) -> int:
        """As `SourceFile.near`: the begin of a row group."""
        return self._starts[bisect_right(self._starts, number) - 1]

    def _open(self) -> Any:
        # A file is read through a small buffer, not a column of a row group at once.
        return self._parquet.ParquetFile(self.path, buffer_size=2**20, pre_buffer=False)

    def _check(self, name: str, kind: Any, depth: int) -> None:
        types = self._arrow.types
        for _ in range(depth):
            listed = types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind)
            kind = kind.value_type if listed else self._arrow.null()
        if not (types.is_integer(kind) or types.is_floating(kind) or types.is_boolean(kind)):
            wanted = "a list of numbers a token" if depth == 2 else "a number a token"
            raise UsageError(f"{self.path}: column '{name}' does not hold {wanted}; name another column")

    def _read(self, names: Sequence[str] | None, first: int) -> Iterator[tuple[int, str, Record]]:
        wanted = [name for name in self.depths if names is None or name in names]
        group = max(0, bisect_right(self._starts[:-1], first) - 1)
        with readable(str(self.path)), self._open() as file:
            groups, number = [*range(group, file.metadata.num_row_groups)], self._starts[group]
            for batch in file.iter_batches(self._at_once, row_groups=groups, columns=wanted) if groups else ():
                for row in range(batch.num_rows):
                    where = f"{self.path}, row {number + 1}"
                    if number >= first:
                        yield number, where, {name: self._row(batch.column(name)[row], where, name) for name in wanted}
                    number += 1

    def _row(self, scalar: Any, where: str, name: str) -> np.ndarray | Lists:
        inner = scalar.values
        if inner is None:
            raise UsageError(f"{where}: {name} is null")
        if self.depths[name] == 1:
            return self._numbers(inner, where, name)
        compute = self._arrow.compute
        lengths = compute.fill_null(compute.list_value_length(inner), 0).to_numpy(zero_copy_only=False)
        return _lists(lengths, lambda: self._numbers(inner.flatten(), where, name), where, name)

    def _numbers(self, array: Any, where: str, name: str) -> np.ndarray:
        if array.null_count:
            raise UsageError(f"{where}: {name} has a null among its numbers")
        return _signed(array.to_numpy(zero_copy_only=False), where, name)


def _lists(lengths: Any, values: Callable[[], np.ndarray], where: str, name: str) -> Lists:
    starts = np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)]).astype(np.int64)
    if starts[-1] > _NUMBERS:
        raise UsageError(f"{where}: {name} has {starts[-1]:,} numbers; at most {_NUMBERS:,} are read")
    return Lists(values(), starts)


def _from_json(values: Any, depth: int, where: str, name: str) -> np.ndarray | Lists:
    if not isinstance(values, list):
        raise UsageError(f"{where}: needs a list in '{name}'")
    if depth == 1:
        return _plain(values, where, name)
    inner = [[] if each is None else each for each in values]
    if not all(isinstance(each, list) for each in inner):
        raise UsageError(f"{where}: {name} has a position that is not a list")
    flat = [each for part in inner for each in part]
    return _lists([len(each) for each in inner], lambda: _plain(flat, where, name), where, name)


def _plain(values: list[Any], where: str, name: str) -> np.ndarray:
    if not all(type(each) in (int, float, bool) for each in values):
        raise UsageError(f"{where}: {name} holds something that is not a number")
    return _signed(np.asarray(values), where, name) if values else np.zeros(0)


def _signed(values: np.ndarray, where: str, name: str) -> np.ndarray:
    """As int64 or float64. UsageError: a number beyond int64, unless it is a packed word."""
    if values.dtype.kind == "f":
        return values.astype(np.float64, copy=False)
    if values.dtype.kind == "u" and values.dtype.itemsize == 8:
        return values.view(np.int64)  # a packed word keeps its bits; an id this large is below 0 and refused
    if values.dtype.kind not in "biu":
        raise UsageError(f"{where}: {name} holds a number of more than 64 bits")
    return values.astype(np.int64, copy=False)


def open_source(source: str, columns: Columns) -> list[SourceFile]:
    """The files of a source, sorted by name: itself, or the parquet or jsonl files below a folder.

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
    files = [(ParquetFile if path.suffix == ".parquet" else SourceFile)(path, columns) for path in paths]
    for file in files if root.is_dir() else ():
        file.name = file.path.relative_to(root).as_posix()
    return files


def digests(files: Sequence[SourceFile], progress: Callable[[int], None]) -> list[dict[str, Any]]:
    """The name, bytes and SHA-256 of each file. `progress`: bytes read so far, of all files. UsageError: unreadable."""
    found, done = list[dict[str, Any]](), 0
    for each in files:
        sha, size = hashlib.sha256(), 0
        with readable(str(each.path)), open_regular(each.path) as file:
            while block := file.read(2**24):
                sha.update(block)
                size += len(block)
                progress(done + size)
        done += size
        found.append({"name": each.name, "bytes": size, "sha256": sha.hexdigest()})
    return found
