"""Rows of local files: jsonl, json, parquet, csv, tsv and arrow, one after the other, in a memory that does not grow.

What is read is the file that is named, as it is now: no pattern is expanded, and no earlier reading is kept. A row is a
dict of plain values. JSON is a row a line, or a list of rows; a cell of csv is the text that it is, `NA` and `1.0` too;
of parquet and arrow nothing is decoded, so that no path or URL in them is opened. Text is UTF-8, with or without a byte
order mark. The files may be anyone's: lines, objects, cells and row groups are bounded, in bytes and in entries,
and each buffer of arrow is checked before it is read.

What it gives up: a file is parsed again for each split, and a single row is in memory whole.
"""

import codecs
import csv
import io
import json
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import islice, repeat
from pathlib import Path, PurePosixPath
from typing import Any

from kdtrain.errors import RunError, UsageError, printable
from kdtrain.files import LARGE, open_regular, parse_json, refuse_depth
from kdtrain.imports import optional

Row = dict[str, Any]

_ENTRIES = 2**24
"""Most entries of one row."""
_PIECE = 2**20
_MOST_OBJECT = 2**26
"""Characters of one object of json: the parser takes some twenty bytes for each of the worst."""
_MOST_CELL = 2**27
"""Characters of a cell of csv; Python's own limit is that of a short essay."""
_AT_ONCE = 8
"""Rows of parquet and arrow that are made at once."""
_MOST_AT_ONCE = 2**24
"""Values of a list column that are read at once, unless a single row has more; pyarrow takes some 20 bytes for each."""
_SMALL, _DENSE = 2**20, 16
"""Values of a list column in a row group that may take any number of bytes, and most of them for each byte beyond: run
lengths of one value repeated without end take nearly none."""
_UNPACKED, _RATIO = 2**28, 256
"""Bytes of a row group's columns that may be packed into any number, and most of them for each packed byte beyond."""
_BETWEEN = re.compile(r"\s*"), re.compile(r"\s*,?\s*")
_NOT_UTF8 = "has a byte that is not UTF-8; convert the file to UTF-8"


class Rows:
    """The rows of `paths`, files of one kind, in that order, by the part of `datasets.Dataset` that reading text needs.

    most: `column_names` are those of as many rows and one more, and its length counts no further.
    """

    features = None

    def __init__(self, paths: Sequence[Path], most: int) -> None:
        self._paths = paths
        self._count = 0
        names = dict[str, None]()
        for row in islice(self.select_columns(None), most + 1):
            self._count += 1
            names |= dict.fromkeys(row)
        self.column_names = list(names)
        values = row.items() if self._count == 1 else ()
        lists = [name for name, each in values if isinstance(each, list) and each and isinstance(each[0], dict)]
        self.below = lists[0] if lists else None
        """The key of a list of objects, where the only row has one."""

    def __len__(self) -> int:
        return self._count

    def select_columns(self, columns: Sequence[str] | None) -> Iterator[Row]:
        """Yield each row with at least these columns; None: at least the names of its columns."""
        for path in self._paths:
            for row in read_rows(path, columns):
                yield dict.fromkeys(columns or ()) | row


def read_rows(path: Path, columns: Sequence[str] | None = None) -> Iterator[Row]:
    """Yield the rows of a file of one of `KINDS`; `columns` as `Rows.select_columns`. UsageError: it cannot be read."""
    with readable(str(path)):
        yield from KINDS[PurePosixPath(path.name).suffix.lower()](path, columns)


@contextmanager
def readable(source: str) -> Iterator[None]:
    """Turn a library's error about data that it cannot read into one line: a UsageError, or a RunError of the hub."""
    try:
        yield
    except (UsageError, RunError):
        raise
    except Exception as error:
        cause = error.__cause__ or error
        reason = " ".join(str(cause).split())[:300] or type(cause).__name__
        if isinstance(error, ConnectionError):
            raise RunError(f"{source}: the hub cannot be reached: {reason}") from error
        raise UsageError(f"{source}: cannot be read: {reason}") from error


class RowFile:
    """A file of jsonl or parquet as values of JSON or batches of arrow; it may be anyone's."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.is_parquet = path.suffix == ".parquet"

    def __len__(self) -> int:
        """Count the rows; of parquet by its metadata. UsageError: it cannot be read."""
        with readable(str(self.path)):
            return sum(1 for _ in (read_rows if self.is_parquet else read_lines)(self.path))

    def names(self) -> list[str]:
        """Return the names of the first row's columns. UsageError: it cannot be read."""
        return [*next(read_rows(self.path), {})]

    def values(self, skipped: int = 0) -> Iterator[tuple[str, Any]]:
        """Yield the value of each line that is not blank, with its place in words. UsageError: one is not JSON."""
        with readable(str(self.path)):
            for number, line in islice(read_lines(self.path), skipped, None):
                where = f"{self.path}, line {number}"
                yield where, parse_line(line, where)

    def batches(self, columns: Sequence[str], begin: float = 0.0) -> Iterator[tuple[int, Any]]:
        """Yield the record batches of a parquet file: as `parquet_batches`."""
        return parquet_batches(self.path, columns, begin)


def read_lines(path: Path) -> Iterator[tuple[int, bytes]]:
    """Yield the lines of a file that are not blank, by their numbers from 1. UsageError: one is too long."""
    with open_regular(path) as file:
        for number, line in enumerate(iter(lambda: file.readline(LARGE + 1), b""), 1):
            if len(line) > LARGE:
                raise UsageError(f"{path}, line {number}: has more than {LARGE:,} bytes; write one row a line")
            if line.strip():
                yield number, line


def parse_line(line: bytes, where: str) -> Any:
    """Parse the JSON of a line. UsageError: it is not JSON."""
    try:
        return parse_json(line.decode("utf-8-sig"), _ENTRIES)
    except UnicodeDecodeError:
        raise UsageError(f"{where}: {_NOT_UTF8}") from None
    except ValueError as error:
        raise UsageError(f"{where}: not JSON: {error}") from None


def _jsonl(path: Path, columns: Sequence[str] | None) -> Iterator[Row]:
    for number, line in read_lines(path):
        where = f"{path}, line {number}"
        yield _object(parse_line(line, where), where, b"\\u" in line)


def _object(row: Any, where: str, escaped: bool) -> Row:
    if not isinstance(row, dict):
        raise UsageError(f"{where}: is {type(row).__name__}, not an object with a key for each column")
    if escaped:
        try:
            json.dumps(row, ensure_ascii=False).encode()
        except UnicodeEncodeError:
            raise UsageError(f"{where}: has half of a surrogate pair (\\ud800 to \\udfff), which is not text") from None
    return row


def _json(path: Path, columns: Sequence[str] | None) -> Iterator[Row]:
    """Yield JSON objects that stand one after the other, or in a list, on any lines."""
    decoder = codecs.getincrementaldecoder("utf-8-sig")("surrogateescape")
    scan = json.JSONDecoder().raw_decode
    text = ""
    number = 0
    listed = False
    piece = b" "
    with open_regular(path) as file:
        while piece and len(text) < 2 * _MOST_OBJECT:
            piece = file.read(max(_PIECE, len(text)))
            text += decoder.decode(piece, final=not piece)
            if not number and not listed and text.lstrip()[:1] == "[":
                listed = True
                text = text.lstrip()[1:]
            place = 0
            while text[(start := _gap(text, place, number)) : start + 1] not in ("", "]"):
                where = f"{path}, row {number}"
                try:
                    row, stop = scan(text, start)
                    text[start:stop].encode()
                    refuse_depth(row)
                except UnicodeEncodeError:
                    raise UsageError(f"{where}: {_NOT_UTF8}") from None
                except (ValueError, RecursionError) as error:
                    if piece and len(text) - start < _MOST_OBJECT and isinstance(error, json.JSONDecodeError):
                        break  # the next piece has the rest of it
                    raise UsageError(f"{where}: not JSON of at most {_MOST_OBJECT:,} characters: {error}") from None
                if (entries := sum(text.count(each, start, stop) for each in "[{,")) > _ENTRIES:
                    raise UsageError(f"{where}: has {entries:,} entries; at most {_ENTRIES:,} are read")
                yield _object(row, where, "\\u" in text[start:stop])
                number = number + 1
                place = stop
            text = text[place:].lstrip()
    if piece or text.strip().removeprefix(",").lstrip() != ("]" if listed else ""):
        raise UsageError(f"{path}: after row {number - 1} its list does not end as JSON does")


def _gap(text: str, place: int, row: int) -> int:
    """Return where object `row` begins: one separator at most stands before it, and none before the first."""
    return _BETWEEN[row > 0].match(text, place).end()  # type: ignore[union-attr]


def _csv(path: Path, columns: Sequence[str] | None) -> Iterator[Row]:
    sep = "\t" if path.suffix.lower() == ".tsv" else ","
    names = None
    with open_regular(path) as file, io.TextIOWrapper(file, "utf-8-sig", "surrogateescape", newline="") as text:
        reader = csv.reader(_short_lines(text, path), delimiter=sep, strict=True)
        for cells in filter(None, _of_any_size(reader)):
            where = f"{path}: line {reader.line_num}"
            try:
                "".join(cells).encode()
            except UnicodeEncodeError:
                raise UsageError(f"{where} {_NOT_UTF8}") from None
            if names is None:
                if len(set(cells)) != len(cells) or not all(cells):
                    raise UsageError(f"{path}: its first line does not name columns, each once; add a line with them")
                _refuse_lacking(path, names := cells, columns)
            elif len(cells) != len(names):
                raise UsageError(
                    f'{where} has {len(cells)} cells and the first line names {len(names)} columns; put "..." around a '
                    "cell with a separator"
                )
            else:
                yield dict(zip(names, cells, strict=True))


def _short_lines(text: io.TextIOWrapper, path: Path) -> Iterator[str]:
    for number, line in enumerate(iter(lambda: text.readline(LARGE + 1), ""), 1):
        if len(line) > LARGE:
            raise UsageError(f"{path}: line {number} has more than {LARGE:,} characters; write one row a line")
        yield line


def _of_any_size(rows: Iterator[list[str]]) -> Iterator[list[str]]:
    """Yield the rows of `csv` with cells up to `_MOST_CELL`; outside, the limit of the process is as it was."""
    while True:
        before = csv.field_size_limit()
        csv.field_size_limit(max(before, _MOST_CELL))
        try:
            row = next(rows, None)
        finally:
            csv.field_size_limit(before)
        if row is None:
            return
        yield row


def _refuse_lacking(path: Path, names: Sequence[str], columns: Sequence[str] | None) -> None:
    if lacking := [each for each in columns or () if each not in names]:
        there = ", ".join(map(printable, names[:20]))
        raise UsageError(f"{path}: has no column '{lacking[0]}'; it has {there}; give files of equal columns")


def _parquet(path: Path, columns: Sequence[str] | None) -> Iterator[Row]:
    if columns is None:
        with _opened(path) as file:
            yield from repeat(dict.fromkeys(file.schema_arrow.names), file.metadata.num_rows)
        return
    for _, batch in parquet_batches(path, columns):
        yield from batch.to_pylist()


@contextmanager
def _opened(path: Path) -> Iterator[Any]:
    arrow, parquet = (optional(name, "data", str(path)) for name in ("pyarrow", "pyarrow.parquet"))
    with arrow.OSFile(str(path)) as source, parquet.ParquetFile(source, buffer_size=_PIECE, pre_buffer=False) as file:
        yield file


def parquet_batches(path: Path, columns: Sequence[str], begin: float = 0.0) -> Iterator[tuple[int, Any]]:
    """Yield the record batches of a parquet file, of a few rows each, with the number of their first row, from 1.

    begin: the share of the row groups to skip. UsageError: it cannot be read, or lacks a column.
    """
    with readable(str(path)), _opened(path) as file:
        _refuse_lacking(path, file.schema_arrow.names, columns)
        rows = max(1, min(_AT_ONCE, _MOST_AT_ONCE // _refuse_unpacked(path, file, columns)))
        sizes = [file.metadata.row_group(each).num_rows for each in range(file.metadata.num_row_groups)]
        first = int(begin * len(sizes))
        groups = [*range(first, len(sizes))]
        number = 1 + sum(sizes[:first])
        for batch in file.iter_batches(rows, row_groups=groups, columns=list(columns), use_threads=False):
            yield number, batch
            number += batch.num_rows


def _refuse_unpacked(path: Path, file: Any, columns: Sequence[str]) -> int:
    """Return the most values, in the mean over the rows of a row group, of a column of a parquet file.

    UsageError: a row group has more values, or more bytes, than its packed bytes can stand for.
    """
    leaves = [file.schema.column(number) for number in range(len(file.schema))]
    most = 1
    read = [number for number, leaf in enumerate(leaves) if leaf.path.split(".")[0] in columns]
    for which in range(file.metadata.num_row_groups):
        group = file.metadata.row_group(which)
        chunks = {number: group.column(number) for number in read}
        taken = sum(chunk.total_compressed_size for chunk in chunks.values())
        unpacked = sum(chunk.total_uncompressed_size for chunk in chunks.values())
        values = max((chunks[each].num_values for each in read if leaves[each].max_repetition_level), default=0)
        if values > max(_SMALL, _DENSE * taken):
            raise UsageError(f"{path}: {values:,} values in a row group of {taken:,} bytes are not read")
        if unpacked > max(_UNPACKED, _RATIO * taken):
            raise UsageError(f"{path}: a row group of {taken:,} bytes unpacks to {unpacked:,}, which are not read")
        most = max(most, values // max(1, group.num_rows))
    return most


def _arrow(path: Path, columns: Sequence[str] | None) -> Iterator[Row]:
    arrow, ipc = (optional(name, "data", str(path)) for name in ("pyarrow", "pyarrow.ipc"))
    with arrow.OSFile(str(path)) as source:
        random = source.read(6) == b"ARROW1"  # else it is a stream, as save_to_disk writes it
        source.seek(0)
        reader = ipc.open_file(source) if random else ipc.open_stream(source)
        _refuse_lacking(path, reader.schema.names, columns)
        for batch in map(reader.get_batch, range(reader.num_record_batches)) if random else reader:
            batch.validate(full=True)
            if columns is None:
                yield from repeat(dict.fromkeys(batch.schema.names), batch.num_rows)
                continue
            for start in range(0, batch.num_rows, _AT_ONCE):
                yield from batch.select(list(columns)).slice(start, _AT_ONCE).to_pylist()


KINDS = {".jsonl": _jsonl, ".parquet": _parquet, ".arrow": _arrow, ".json": _json, ".csv": _csv, ".tsv": _csv}
"""What reads the files with each suffix."""
