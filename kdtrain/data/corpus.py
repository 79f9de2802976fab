"""Sources of text: `documents` yields the documents of a source, one at a time, for one split.

A source is a file or folder of text (prose and source code, by the suffixes in `_TEXT`) or of rows (jsonl, json,
parquet, arrow, csv or tsv, one kind; `kdtrain.data.formats` defines a row), `stdlib` (code and documentation of
the running interpreter's standard library), `hf:NAME[:SUBSET]`, or a source that `register_text` adds. Train,
validation and test are the source's own splits where it has them: on the hub by name, in a folder if every file names
its split (`train-00000.parquet`, `valid/a.txt`).

A missing split is withheld from train, 5 % each. A document's rank is a number in [0, 1) from a SHA-256, of the path
of a file or of the content of a row, so that equal rows share a split. Validation takes the ranks from 0.90 to 0.95,
test those from 0.95; if the source has a split itself, those ranks stay in train. A rank depends on the document alone,
so a growing source never moves one to another split. The price is that few documents may all fall into train: then
`assign` takes exact shares of the hash order, and fewer than `FEW` texts, one of which is more than a split's share,
are cut at line ends (`cut`).

What it gives up: a text file is one document and read whole; the suffix decides what is text, not the content; files of
other kinds are left out, with a warning; and with `streaming` the documents are not counted, so that a small source may
have an empty split, which is an error.
"""

import hashlib
import json
import logging
import os
import re
import sysconfig
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import chain, islice
from pathlib import Path, PurePosixPath
from types import MappingProxyType
from typing import Any

from kdtrain.config.choices import TEXTS
from kdtrain.config.sections import DataConfig
from kdtrain.data.formats import Columns, Document, LeftOut, RowFormat, Tally, log_once, row_format, text_document
from kdtrain.data.rows import Rows, readable
from kdtrain.errors import UsageError, printable
from kdtrain.files import file_digest, json_digest
from kdtrain.imports import optional

SPLITS = ("train", "validation", "test")
SMALL = 2000
"""With more documents than this, the chance that a hash leaves a split empty is below 1e-44."""
LISTED = 100
"""Most files that a manifest lists."""
FEW = 20
"""With fewer documents than this, one document is more than the share of a split."""

_WITHHELD_FROM = {"validation": 0.90, "test": 0.95}
_SHARE = 0.05
_ALIASES = {
    **dict.fromkeys(("train", "training"), "train"),
    **dict.fromkeys(("validation", "valid", "val", "dev"), "validation"),
    **dict.fromkeys(("test", "testing", "eval"), "test"),
}

_ROWS = (".jsonl", ".parquet", ".arrow")
_TEXT = {
    *(".txt", ".text", ".md", ".markdown", ".rst", ".adoc", ".org", ".tex", ".html"),
    *(".py", ".pyi", ".pyw", ".c", ".h", ".cc", ".cpp", ".hpp", ".cu", ".cs", ".go", ".hs", ".java", ".jl", ".js"),
    *(".jsx", ".kt", ".lua", ".ml", ".php", ".pl", ".r", ".rb", ".rs", ".scala", ".sh", ".sql", ".ts", ".tsx"),
}
_LONE_ROWS = (".json", ".csv", ".tsv")
"""Rows too, but in a folder that has rows or text of the kinds above they are left out: they are often about those."""
_READ = f"text (.txt, .md, .rst, .py and other source code) or rows ({', '.join(_ROWS + _LONE_ROWS)})"
_DEFAULT = (Columns(), Columns(prompts=True))
_KNOWN = {"text", "messages", "conversations", "conversation", "prompt", "instruction"}
"""Columns of a row, which make an object with a list in it one."""
_ABOUT = {"readme", "license", "licence", "notice", "changelog", "citation", "contributing"}
"""Stems of text files that come along with rows, and are not data beside them."""
_SPLIT_IN_STEM = re.compile(r"(?:^|[-_. ])([a-z]+)(?:[-_.]?\d.*)?$")
_STDLIB_SUFFIXES = (".py", ".pyw", ".txt", ".rst", ".html")
_STDLIB_LEFT_OUT = {"site-packages", "dist-packages", "__pycache__", "lib-dynload", "test", "tests", "idle_test"}


def rank(text: str) -> float:
    """Return a number in [0, 1), uniform over texts, that depends on `text` alone."""
    return int.from_bytes(hashlib.sha256(text.encode("utf-8", "surrogatepass")).digest()[:6], "big") / 2**48


def by_hash(document_rank: float, withheld: Sequence[str]) -> str:
    """Return the split of a document of this rank; `withheld` are the splits taken from train."""
    for split in withheld:
        if _WITHHELD_FROM[split] <= document_rank < _WITHHELD_FROM[split] + _SHARE:
            return split
    return "train"


def assign(ranks: Sequence[float], withheld: Sequence[str]) -> list[str]:
    """Return the split of each document: by its hash, or by its place in hash order if the hash leaves a split empty.

    Equal ranks share a split. With three different ones or more, no split is empty.
    """
    assigned = [by_hash(document_rank, withheld) for document_rank in ranks]
    if set(assigned) >= {"train", *withheld}:
        return assigned
    counts = Counter(ranks)
    order = sorted(counts, key=lambda each: (-counts[each], each))  # what is there most often stays in train
    share = max(1, round(_SHARE * len(order)))
    chosen = dict[float, str]()
    for split in reversed(withheld):
        chosen |= dict.fromkeys([order.pop() for _ in range(min(share, len(order) - 1))], split)
    return [chosen.get(each, "train") for each in ranks]


def cut(lines: Sequence[str], withheld: Sequence[str], split: str) -> range:
    """Return the numbers, from 0, of the lines of a text that belong to `split`: train first, then each withheld split.

    Every split gets at least one line; if there are too few lines, train gets all.
    """
    share = max(1, round(_SHARE * len(lines)))
    train = len(lines) - share * len(withheld)
    if train < 1:
        return range(len(lines) if split == "train" else 0)
    if split == "train":
        return range(train)
    start = train + share * withheld.index(split)
    return range(start, start + share)


@dataclass(frozen=True)
class _Part:
    """The documents of one of the source's own splits; `count` is an upper bound, None when unknown."""

    documents: Callable[[], Iterable[Document]]
    rank: Callable[[Document], float]
    count: int | None
    tallies: list[Tally] = field(default_factory=list)
    """Of each time that its rows were read."""
    form: RowFormat | None = None
    """What its rows are; None: plain text."""
    files: Mapping[str, Path] = field(default_factory=dict)
    """Those that it reads, by their names within the source."""


Reader = Callable[[str], Iterable[str]]


def documents(
    source: str, split: str, columns: Columns | None = None, *, streaming: bool = False
) -> Iterator[Document]:
    """Yield the documents of `source` that belong to `split` (train, validation or test), never a blank one.

    stdlib and text files come in hash order, so that the first ones are a fair sample; rows come in stored order.
    Rows that cannot be learned from are left out, counted and logged (`formats.Tally`). Raises UsageError for a source
    that is missing, empty, unreadable or without text, RunError if the hub cannot be reached; both at the call, except
    for a bad row further on.
    """
    if split not in SPLITS:
        raise UsageError(f"split '{split}' is unknown; use train, validation or test")
    parts = _parts(source, columns or Columns(), streaming)
    found = _select(parts, split)
    first = next(found, None)
    if first is None:
        tally = next((part.tallies[-1] for part in parts.values() if part.tallies), None)
        if tally is not None and tally.reasons and not tally.kept:
            raise UsageError(f"{source}: holds no {tally.form.holds} for the {split} split: {tally.why()}")
        hint = (
            "read it without --streaming" if streaming else "give at least 3 documents that differ, or 3 lines of text"
        )
        raise UsageError(f"{source}: holds no {tally.form.holds if tally else 'text'} for the {split} split; {hint}")
    return chain([first], found)


def documents_of(data: DataConfig, split: str, prompts: bool = False, teacher: bool = False) -> Iterator[Document]:
    """Yield the documents of a split of the text that options name, as `documents`.

    prompts: they need no answer. teacher: they have a `teacher_prompt`.
    """
    source, columns, streaming = _named(data, prompts)
    return documents(source, split, replace(columns, teacher=teacher), streaming=streaming)


def has_prompts(data: DataConfig) -> bool:
    """Return True for conversations, and prompts with completions; False for plain text. UsageError: as `documents`."""
    form = _parts(*_named(data, True))["train"].form
    return form is not None and form.name != "text"


def stated_text(data: DataConfig) -> dict[str, Any] | None:
    """Describe the text of `data` by content, for a manifest: its files with size and SHA-256, one digest of more than
    `LISTED`, or the revision of the hub; None: unknown. UsageError, RunError: as `documents`."""
    source, columns, streaming = _named(data, True)
    with readable(source):
        if source.startswith("hf:"):
            name, _, subset = source.removeprefix("hf:").partition(":")
            return {"revision": str(_datasets(source).load_dataset_builder(name, subset or None).hash)}
        parts = _parts(source, columns, streaming).values()
        files = {name: path for part in parts for name, path in part.files.items()}
        stated = {name: {"bytes": path.stat().st_size, "sha256": file_digest(path)} for name, path in files.items()}
    if len(stated) > LISTED:
        return {"files": len(stated), "sha256": json_digest(stated)}
    return {"files": stated} if stated else None


def _named(data: DataConfig, prompts: bool) -> tuple[str, Columns, bool]:
    columns = Columns(format=data.format, text=data.text_column, messages=data.messages_column, prompts=prompts)
    return str(data.data), columns, data.streaming


def _parts(source: str, columns: Columns, streaming: bool) -> Mapping[str, _Part]:
    name, colon, _ = source.partition(":")
    if source == "stdlib" or (colon and name in TEXTS.help()):
        found: Mapping[str, _Part] = TEXTS.get(name)(source, columns, streaming)
        return found
    return _local(Path(source), columns, streaming)


def register_text(name: str, *, help: str = "") -> Callable[[Reader], Reader]:
    """Return a decorator that makes a function the source that `--data NAME:REST` reads.

    The function gets REST and yields texts, the same ones at every call; blank ones are left out. Splits follow from
    their content.

    Args:
        name: the name that users type before the colon.
        help: its line in `--help`; by default the first line of the docstring.
    """

    def parts(read: Reader, source: str, columns: Columns, streaming: bool) -> dict[str, _Part]:
        _refuse_columns(source, columns, "name other --data")

        def texts() -> Iterator[Document]:
            with readable(source):
                for number, text in enumerate(read(source.partition(":")[2])):
                    with suppress(LeftOut):
                        yield text_document(f"{source} text {number}", text)

        return {"train": _Part(texts, _rank_of_content, sum(1 for _ in islice(texts(), SMALL + 1)))}

    return TEXTS.registers(name, help, lambda read: partial(parts, read))


def _rank_of_content(document: Document) -> float:
    return rank(json.dumps([document.text, document.messages], sort_keys=True))


def _refuse_columns(source: str, columns: Columns, hint: str) -> None:
    """Refuse options about columns for a source of plain text."""
    if columns.messages is not None:
        raise UsageError(f"{source}: text has no columns; leave out --messages-column, or {hint}")
    if columns.format not in ("auto", "text"):
        raise UsageError(f"{source}: text has no columns; leave out --format {columns.format}, or {hint}")


def _select(parts: Mapping[str, _Part], split: str) -> Iterator[Document]:
    if split != "train" and split in parts:
        yield from parts[split].documents()
        return
    train = parts["train"]
    withheld = [s for s in SPLITS[1:] if s not in parts]
    if train.count is None or train.count > SMALL:
        for document in train.documents():
            if by_hash(train.rank(document), withheld) == split:
                yield document
        return
    ranks = [train.rank(document) for document in train.documents()]
    long_enough = (len(_lines(each)) > len(withheld) for each in train.documents())
    if withheld and len(ranks) < FEW and (len(ranks) < 3 or any(long_enough)):
        for document in train.documents():
            yield from _cut(document, withheld, split)
        return
    for document, assigned in zip(train.documents(), assign(ranks, withheld), strict=True):
        if assigned == split:
            yield document


def _cut(document: Document, withheld: Sequence[str], split: str) -> Iterator[Document]:
    lines = _lines(document)
    if not lines:
        if split == "train":
            yield document
        return
    kept = cut(lines, withheld, split)
    text = "".join(lines[kept.start : kept.stop])
    if text.strip():
        yield Document(f"{document.key} lines {kept.start + 1}-{kept.stop}", text=text)


def _lines(document: Document) -> list[str]:
    """Return the lines of a text; none of a conversation or of a prompt with its completion, which are never cut."""
    return [] if document.text is None or document.prompt else document.text.splitlines(keepends=True)


def _text_files(root: Path, names: Iterable[str], errors: str) -> _Part:
    """Read each file of `names` (relative to `root`) as one document, in hash order."""
    ordered = sorted(names, key=rank)

    def read() -> Iterator[Document]:
        for name in ordered:
            try:
                text = (root / name).read_text(encoding="utf-8-sig", errors=errors)
            except UnicodeDecodeError as error:
                raise UsageError(
                    f"{root / name}: byte {error.start} is not UTF-8; convert the file to UTF-8, or move it away"
                ) from error
            if text.strip():
                yield Document(name, text=text)

    files = {name: root / name for name in ordered}
    return _Part(read, lambda document: rank(document.key), len(ordered), files=files)


def _stdlib(source: str, columns: Columns, streaming: bool) -> dict[str, _Part]:
    """Read the standard library, without the files that its build wrote here (`config-*`, `_sysconfigdata*`)."""
    if source != "stdlib":
        raise UsageError(f"{source}: stdlib has no subsets; use --data stdlib")
    _refuse_columns(source, columns, "name other --data")
    root = Path(sysconfig.get_paths()["stdlib"])
    found = []
    for folder, subfolders, names in os.walk(root):
        subfolders[:] = [s for s in subfolders if s not in _STDLIB_LEFT_OUT and not s.startswith("config-")]
        for name in names:
            if name.endswith(_STDLIB_SUFFIXES) and not name.startswith("_sysconfigdata"):
                found.append((Path(folder) / name).relative_to(root).as_posix())
    return {"train": _text_files(root, found, errors="replace")}


def _local(path: Path, columns: Columns, streaming: bool) -> dict[str, _Part]:
    if path.is_file():
        root = path.parent
        names = [path.name]
    elif path.is_dir():
        root = path
        names = _of_one_sort(path, _files_in(path))
    else:
        raise UsageError(f"{path}: there is no such file or folder; --data takes stdlib, a path, or hf:NAME[:SUBSET]")
    suffixes = {_suffix(name) for name in names}
    is_text = bool(suffixes) and suffixes <= _TEXT
    if not is_text and (len(suffixes) != 1 or not suffixes <= {*_ROWS, *_LONE_ROWS}):
        found = f"holds {', '.join(sorted(suffixes))} files" if any(suffixes) else "holds no text"
        raise UsageError(f"{path}: {found}; give {_READ}, which is one kind at a time")
    if not any((root / name).stat().st_size for name in names):
        raise UsageError(f"{path}: is empty; give it some text")
    if is_text:
        _refuse_columns(str(path), columns, "give jsonl")
    groups: dict[str, list[str]] = {}
    own = [_split_in_name(name) for name in names]
    use = None not in own and "train" in own
    for name, split in zip(names, own, strict=True):
        groups.setdefault(split if split and use else "train", []).append(name)
    unused = [name for name, split in zip(names, own, strict=True) if split in SPLITS[1:] and not use]
    if unused and path.is_dir():
        why = f"{names[own.index(None)]} names none" if None in own else "no file names train"
        hint = "name one in each (train/a.jsonl), or move a file away to keep it out"
        log_once(logging.WARNING, f"{path}: {_counted(unused)} read like the others, not as a split: {why}; {hint}")
    if is_text:
        return {split: _text_files(root, group, errors="strict") for split, group in groups.items()}
    places = {split: {name: root / name for name in group} for split, group in groups.items()}
    rows = {split: Rows([*each.values()], SMALL) for split, each in places.items()}
    return {split: _rows(str(path), each, columns, streaming, places[split]) for split, each in rows.items()}


def _files_in(folder: Path) -> list[str]:
    """List the files in `folder` and behind its links by their names in it, in order, except hidden ones.

    A file with several names is listed once, by a name without a link if there is one. A link to a folder around
    `folder` is not followed.

    Raises:
        UsageError: there is none, but links are.
    """
    waiting = [("", os.path.realpath(folder))]
    links = deque[tuple[str, str]]()
    taken = {*map(str, Path(waiting[0][1]).parents)}
    found, left = list[str](), list[str]()
    while waiting or links:
        name, place = (waiting or links).pop()
        if place in taken:
            left.append(f"{name} (read already, or a loop)")
        elif os.path.isfile(place):
            found.append(name)
        elif not os.path.exists(place):
            left.insert(0, f"{name} (leads nowhere)")
        elif os.path.isdir(place):
            with suppress(PermissionError):
                for entry in sorted(os.scandir(place), key=lambda each: each.name):
                    inside = PurePosixPath(name, entry.name).as_posix()
                    if entry.is_symlink() and entry.name[0] != ".":
                        links.appendleft((inside, os.path.realpath(entry.path)))
                    elif entry.name[0] != ".":
                        waiting.append((inside, entry.path))
        taken.add(place)
    if left:
        line = f"{folder}: left out {len(left):,} behind links: {', '.join(left[:5])}"
        if not found:
            raise UsageError(f"{line}; no file is left")
        log_once(logging.WARNING, line)
    return sorted(found)


def _of_one_sort(folder: Path, names: list[str]) -> list[str]:
    """Return the files of `folder` with rows, or else the files with text; a warning names the others.

    Raises:
        UsageError: it holds rows and text, and the text is more than a README or a license.
    """
    rows = [name for name in names if _suffix(name) in _ROWS]
    texts = [name for name in names if _suffix(name) in _TEXT]
    data = [name for name in texts if PurePosixPath(name).stem.lower() not in _ABOUT]
    if rows and data:
        raise UsageError(
            f"{folder}: holds rows ({rows[0]}) and text ({data[0]}); name one of the files, or put one sort into a "
            "folder of its own"
        )
    kept = rows or texts or [name for name in names if _suffix(name) in _LONE_ROWS]
    if kept and (others := [name for name in names if name not in set(kept)]):
        hint = f"a folder is read as {_READ}; rename a file to have it read as text"
        log_once(logging.WARNING, f"{folder}: {_counted(others)} left out; {hint}")
    return kept


def _counted(names: Sequence[str]) -> str:
    return f"{names[0]} is" if len(names) == 1 else f"{names[0]} and {len(names) - 1} more files are"


def _suffix(name: str) -> str:
    return PurePosixPath(name).suffix.lower()


def _datasets(source: str) -> Any:
    """Import the library that reads `source`, without bars and log lines beside our own line about an error."""
    datasets: Any = optional("datasets", "data", source)
    datasets.disable_progress_bars()
    datasets.utils.logging.set_verbosity(logging.CRITICAL)
    return datasets


def _split_in_name(name: str) -> str | None:
    """Return the split in a name: `train` for train.jsonl, train-00000-of-00004.parquet, train/a.txt and so on."""
    *folders, file = Path(name.lower()).with_suffix("").parts
    match = _SPLIT_IN_STEM.search(file)
    words = [*folders, match.group(1) if match else ""]
    return next((_ALIASES[word] for word in words if word in _ALIASES), None)


def _hub(source: str, columns: Columns, streaming: bool) -> dict[str, _Part]:
    datasets = _datasets(source)
    name, _, subset = source.removeprefix("hf:").partition(":")
    if not name:
        raise UsageError(f"{source}: names no data set; write hf:NAME or hf:NAME:SUBSET")
    with readable(source):
        names = datasets.get_dataset_split_names(name, subset or None)
        own = {_ALIASES[split]: split for split in names if split in _ALIASES}
        if len(names) == 1:
            own = {"train": names[0]}
        if "train" not in own:
            raise UsageError(f"{source}: none of its splits is called train; it has: {', '.join(names)}")
        loaded = {
            split: datasets.load_dataset(name, subset or None, split=own_name, streaming=streaming)
            for split, own_name in own.items()
        }
    return {split: _rows(source, rows, columns, streaming) for split, rows in loaded.items()}


def _rows(
    source: str, rows: Any, columns: Columns, streaming: bool, files: Mapping[str, Path] = MappingProxyType({})
) -> _Part:
    """Read `Rows`, or the rows of a `datasets` data set; refuse one without the requested columns."""
    with readable(source):
        names = rows.column_names if rows.column_names is not None else sorted(next(iter(rows), {}))
    if not names:
        raise UsageError(f"{source}: holds no rows")
    if (below := getattr(rows, "below", None)) and columns in _DEFAULT and _KNOWN.isdisjoint(names):
        raise UsageError(f"{source}: its rows are below the key '{printable(below)}'; write that list alone")
    form = row_format(source, columns, names)
    tallies = list[Tally]()
    count = None if streaming else len(rows)
    for column in form.columns if rows.features else ():
        _refuse_decoded(source, column, rows.features.get(column))

    def read() -> Iterator[Document]:
        tally = Tally(source, form)
        tallies.append(tally)
        whole = False
        try:
            with readable(source):
                for number, row in enumerate(rows.select_columns(list(form.columns))):
                    key = f"{source} row {number}"
                    try:
                        document = form.convert(key, row)
                    except LeftOut as why:
                        if not columns.prompts or why.prompt is None:
                            tally.leave_out(key, why)
                            continue
                        document = why.prompt
                    tally.kept += 1
                    yield document
            whole = True
        finally:
            # none kept is an error; and small sources, which are always read whole, are also looked into
            if tally.kept and (whole or count is None or count > SMALL):
                tally.report()

    return _Part(read, _rank_of_content, count, tallies, form, files)


def _refuse_decoded(source: str, column: str, feature: Any) -> None:
    """Refuse a column of `datasets` that holds anything but plain values, at any depth; None: JSON, not yet read.

    To decode an image or a sound, `datasets` opens any path or URL that the file names, even a pipe.
    """
    import datasets

    inside = [feature]
    while inside:
        each = inside.pop()
        if isinstance(each, dict):
            inside += each.values()
        elif isinstance(each, (datasets.List, datasets.LargeList)):
            inside.append(each.feature)
        elif each is not None and not isinstance(each, (datasets.Value, datasets.ClassLabel, datasets.Json)):
            raise UsageError(f"{source}: column '{column}' holds {type(each).__name__}, not text; name another column")


TEXTS.add("stdlib", _stdlib, _stdlib)
TEXTS.add("hf", _hub, _hub)
