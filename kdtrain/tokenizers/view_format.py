"""A view on disk: a cache in the rows of a student with another tokenizer, which `view_builder` makes and `view` reads.

FOLDER/settings.json     what the view is made from: the cache's digest, the tokenizer, events, length of a row
FOLDER/cells.npy         int32, `Cells` and `Spelling` (`data`) of both vocabularies, an array behind the other
FOLDER/train-00000.npy   rows, structured (`row_type`); views of before have a record beside it
FOLDER/tokenizer/        the student's
FOLDER/view.json         at the end, sealed: the digests, and what was measured
"""

from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Annotated, Any, Final, Literal, NamedTuple, TypedDict

import numpy as np
from msgspec import Meta

from kdtrain.cache.format.manifest import CacheSettings, Count, Digest
from kdtrain.cache.format.names import CELLS, SETTINGS, VIEW, holds_nothing
from kdtrain.data.bytes import MAX_IDS, MAX_SPELLED
from kdtrain.errors import RunError, UsageError, printable
from kdtrain.files import MEDIUM, file_digest, read_sealed, typed

VERSION: Final = 3
TEXT, VIEWS, PROMPTS = "data", "view", "prompts"
OWN = (TEXT, "served", VIEWS, PROMPTS)
"""The folders in a run of what it made: text or its view, a server's answers, the view of an online teacher's text."""
CELL = np.dtype("<i4")
_HEADER = 2**16
"""Bytes that numpy may write before an array, at most."""


def row_type(seq_len: int, version: int = VERSION) -> np.dtype[Any]:
    """Return the type of a row: what `PackedRow` has, and source and prefix of `transcode` for each label."""
    names = {"loss_mask": "?", "segments": "<i4", "source": "<i8", "said" if version < VERSION else "prefix": "<i4"}
    names |= {"length": "u1", "others": "u1"} if version < VERSION else {}
    return np.dtype([("tokens", "<i4", (seq_len + 1,)), *((name, kind, (seq_len,)) for name, kind in names.items())])


_Entries = Annotated[int, Meta(ge=1, le=MAX_IDS)]


class ViewSettings(TypedDict):
    """The contents of settings.json, which decide the content of a view."""

    version: Literal[1, 2, 3]
    """2: rows had chunks, which are ignored. 1: nothing was known within tokens."""
    cache: Digest
    tokenizer: str
    events: list[Annotated[list[int], Meta(min_length=2, max_length=2)]]
    """The student's token for a token of the teacher; -1: it is left out."""
    seq_len: Annotated[int, Meta(ge=1, le=2**24)]
    rows: Count
    """Of a shard."""


class ViewShard(TypedDict):
    """A shard in view.json."""

    sequences: Annotated[int, Meta(ge=0, lt=2**31)]
    sha256: Digest


@dataclass(frozen=True, kw_only=True)
class LabelCounts:
    """The counts of labels and documents of a split."""

    labels: Count
    """Of the student, that count."""
    boundaries: Count
    """Of these, those that begin with a label of the teacher that counts."""
    disagree: Count
    """Of these, those whose two own tokens are in different cells."""
    inside: Count
    """Labels that begin within one of the teacher's that is spelled so."""
    documents: Count
    left_out: Count
    """Of the documents."""


class _StatedCells(TypedDict):
    sha256: Digest
    teacher: _Entries
    student: _Entries
    count: _Entries
    """C."""
    spelled: Annotated[int, Meta(ge=1, le=MAX_SPELLED)]
    """L, tokens of the student that all of the teacher's are spelled with."""


@dataclass(frozen=True, kw_only=True)
class ViewRecord:
    """The contents of view.json."""

    settings: ViewSettings
    shards: Annotated[dict[str, list[ViewShard]], Meta(min_length=1)]
    """By split."""
    cells: _StatedCells
    """The digest of cells.npy, entries of both tokenizers, and cells."""
    tallies: dict[str, LabelCounts]
    """By split, the same as those of shards."""
    events: list[str]
    """The table of special tokens, for people."""
    entropy_kept: float | None
    """Share of the entropy of the teacher's numbers that the cells keep; None of an online teacher."""

    @classmethod
    def read(cls, folder: Path) -> "ViewRecord":
        """Read the record of a view in a folder. UsageError: it is damaged, or not such a record."""
        path = folder / VIEW
        try:
            stated = read_sealed(path, MEDIUM)
        except (OSError, ValueError) as error:
            raise UsageError(
                f"{path} cannot be read ({error}); remove the folder, and the view is made anew"
            ) from error
        try:
            record = typed(stated, cls)
            if record.shards.keys() != record.tallies.keys():
                raise ValueError("shards and tallies are of different splits")
        except ValueError as error:
            raise UsageError(
                f"{path} is not the record of a view ({printable(str(error))}); remove the folder"
            ) from error
        return record

    @property
    def sizes(self) -> tuple[int, int]:
        """The entries of both tokenizers."""
        return self.cells["teacher"], self.cells["student"]

    @property
    def parts(self) -> tuple[int, ...]:
        """Lengths of the arrays of `Cells` and `Spelling` that cells.npy holds one after the other."""
        teacher, student, length = *self.sizes, self.cells["spelled"]
        return teacher, student, teacher + 1, length

    def cells_file(self, folder: Path) -> "ViewArray":
        """Return the file of the arrays of `Cells` and `Spelling`."""
        return ViewArray(folder / CELLS, self.cells["sha256"], CELL, sum(self.parts))

    def row_files(self, folder: Path, split: str) -> "list[ViewArray]":
        """Return the shards of a split."""
        kind = row_type(self.settings["seq_len"], self.settings["version"])
        stated = enumerate(self.shards[split])
        return [ViewArray(shard_path(folder, split, n), each["sha256"], kind, each["sequences"]) for n, each in stated]


def shard_path(folder: Path, split: str, number: int) -> Path:
    """Return the path of the rows of a shard."""
    return folder / f"{split}-{number:05d}.npy"


class ViewArray(NamedTuple):
    """A stored array, as view.json states it."""

    path: Path
    sha256: str
    kind: np.dtype[Any]
    size: int

    def mapped(self) -> np.ndarray:
        """Map the array from its file. RunError: it is not the one that was published."""
        path = self.path
        most = self.size * self.kind.itemsize + _HEADER
        try:
            if path.is_file() and path.stat().st_size > most:  # a stranger's sparse file takes hours to read
                raise ValueError(f"it has {path.stat().st_size} bytes, and at most {most} are right")
            if file_digest(path) != self.sha256:
                raise ValueError("its SHA-256 differs")
            found = np.lib.format.open_memmap(path, mode="r")
            if found.dtype != self.kind or found.shape != (self.size,):
                raise ValueError("it has another shape")
        except Exception as error:  # the header is a stranger's, and numpy's parser raises what it likes
            why = printable(str(error)) or type(error).__name__
            raise RunError(f"{path} cannot be read ({why}): remove its folder, and the view is made anew") from error
        return found


def viewed_settings(folder: Path) -> ViewSettings | None:
    """Read the settings of a view in `folder`, finished or not; None: it is not a view."""
    try:
        return typed(read_sealed(folder / SETTINGS), ViewSettings)
    except (OSError, ValueError):
        return None


def own_data(folder: Path) -> Literal["view", "tokens", "served", "nothing"] | None:
    """Return what kdtrain made in a folder of a run, finished or not; "nothing" was made yet.

    None: it holds something else, or there is no folder.

    tokens: a cache of these alone. served: one that is captured in the order of a run.
    """
    if viewed_settings(folder) is not None:
        return "view"
    if not folder.is_dir() or holds_nothing(folder):
        return "nothing" if folder.is_dir() else None
    try:
        settings = CacheSettings.from_json(read_sealed(folder / SETTINGS))
    except (OSError, ValueError):
        return None
    if not settings.codec.taught:
        return "tokens"
    return "served" if "order" in settings.data else None


def verify_view(folder: Path) -> list[str]:
    """Compare every digest of a finished view; a line for each problem."""
    problems = []
    try:
        record = ViewRecord.read(folder)
        files = [record.cells_file(folder), *chain(*(record.row_files(folder, split) for split in record.shards))]
    except UsageError as error:
        return [str(error)]
    for each in files:
        try:
            each.mapped()
        except RunError as error:
            problems.append(str(error))
    return problems
