"""Reads views: a cache in the rows of a student with another tokenizer, as `view_builder` makes them.

Shapes: n rows, T positions, V entries of the teacher's tokenizer, S of the student's, C cells, K entries.
"""

import copy
import math
import operator
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, Protocol, TypedDict

import numpy as np
import torch
from msgspec import Meta
from torch import Tensor
from torch.utils.data import Dataset

from kdtrain.cache.format import names as cache_format
from kdtrain.cache.format.manifest import Count, Digest, Manifest
from kdtrain.data.bytes import MAX_IDS
from kdtrain.data.spelling import DEEP, Spelling
from kdtrain.data.spelling import MOST as MOST_SPELLED
from kdtrain.errors import RunError, UsageError, printable
from kdtrain.files import MEDIUM, file_digest, json_digest, read_sealed, typed
from kdtrain.objective.aligned import AlignedTargets
from kdtrain.objective.batch import Batch
from kdtrain.objective.cells import CellIndex
from kdtrain.objective.targets import DenseTargets, SparseTargets, Targets
from kdtrain.tokenizers.boundaries import MOST
from kdtrain.tokenizers.cells import Cells
from kdtrain.tokenizers.teacher_cells import TeacherCells, at_rows, coarsened, condensed

SETTINGS, VIEW, CELLS = cache_format.SETTINGS, "view.json", cache_format.CELLS
MOST_DISAGREEMENT = 0.05
"""Share of the common boundaries at which teacher's and student's own tokens may lie in different cells."""


class SplitReader(Protocol):
    """A split of a cache, as `reader.CacheReader`."""

    manifest: Manifest
    split: str

    def __len__(self) -> int: ...

    def read(self, indices: Sequence[int]) -> Batch:
        """Rows with the teacher's numbers."""
        ...

    def text(self, indices: Sequence[int] | np.ndarray) -> dict[str, np.ndarray]:
        """tokens, loss_mask and segments of rows."""
        ...


class Splits(Protocol):
    """A cache, as `reader.Cache`."""

    folder: Path
    name: str
    manifest: Manifest
    remote: Any

    def __getitem__(self, split: str) -> SplitReader: ...

    def __iter__(self) -> Iterator[str]: ...


Ask = Callable[[Batch], Targets]
"""A teacher: its distributions at the positions of some of its own rows, on any device, of all entries."""
_ASKED = 4
"""The teacher's rows in one of its forwards."""
_AT_ONCE = {"cpu": 128, "cuda": 2048}
"""Positions whose whole distributions are held at once, in fp32, on their way to cells, by the kind of device."""
_CELL = np.dtype("<i4")
_HEADER = 2**16
"""Bytes that numpy may write before an array, at most."""


def row_type(seq_len: int) -> np.dtype[Any]:
    """A row: what `PackedRow` has, and source, said, length and others of `transcode` for each label."""
    shape = (seq_len,)
    return np.dtype(
        [
            ("tokens", "<i4", (seq_len + 1,)),
            ("loss_mask", "?", shape),
            ("segments", "<i4", shape),
            ("source", "<i8", shape),
            ("said", "<i4", shape),
            ("length", "u1", shape),
            ("others", "u1", shape),
        ]
    )


_Entries = Annotated[int, Meta(ge=1, le=MAX_IDS)]


class ViewSettings(TypedDict):
    """What settings.json states: what decides the content of a view."""

    version: Literal[1, 2]
    """1: nothing was known within tokens."""
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


Counted = Literal["labels", "boundaries", "disagree", "inside", "in_chunks", "documents", "left_out"]
Tally = Annotated[dict[Counted, Count], Meta(min_length=7)]
"""Of a shard or a split: labels of the student that count; boundaries, those that begin with a label of the teacher
that counts; disagree, those of them whose two own tokens are in different cells; inside, those that begin within one
that is spelled so; in_chunks, those in chunks; documents, and left_out of these."""


class ViewSidecar(ViewShard):
    """The sealed record beside a shard."""

    settings: Digest
    last: bool
    tally: Tally
    next: tuple[Count, Count]
    """Where the next shard begins: the document, by its first token in the teacher's stream, and the place in it."""


class _StatedCells(TypedDict):
    sha256: Digest
    teacher: _Entries
    student: _Entries
    count: _Entries
    """C."""
    spelled: Annotated[int, Meta(ge=1, le=MOST_SPELLED)]
    """L, tokens of the student that all of the teacher's are spelled with."""


@dataclass(frozen=True, kw_only=True)
class ViewRecord:
    """What view.json states."""

    settings: ViewSettings
    shards: Annotated[dict[str, list[ViewShard]], Meta(min_length=1)]
    """By split."""
    cells: _StatedCells
    """The digest of cells.npy, entries of both tokenizers, and cells."""
    tallies: dict[str, Tally]
    """By split, the same as those of shards."""
    events: list[str]
    """The table of special tokens, for people."""
    entropy_kept: float | None
    """Share of the entropy of the teacher's numbers that the cells keep; None of a teacher that is to be asked."""

    @property
    def sizes(self) -> tuple[int, int]:
        """Entries of both tokenizers."""
        return self.cells["teacher"], self.cells["student"]

    @property
    def parts(self) -> tuple[int, ...]:
        """Lengths of the arrays of `Cells` and `Spelling` that cells.npy holds one after the other."""
        teacher, student, length = *self.sizes, self.cells["spelled"]
        return teacher, student, teacher + 1, length


def sealed_record(path: Path) -> dict[str, Any]:
    """A sealed record of a view. UsageError: it is damaged."""
    try:
        return read_sealed(path, MEDIUM)
    except (OSError, ValueError) as error:
        raise UsageError(f"{path} cannot be read ({error}); remove the folder, and the view is made anew") from error


class View:
    """A finished view, and the cache that it is of. UsageError: it is damaged, or of another cache."""

    def __init__(self, folder: Path, cache: Splits) -> None:
        self.folder, self.cache = folder, cache
        self.record = _record(folder)
        if self.record.settings["cache"] != cache.manifest.digest:
            raise UsageError(
                f"{folder} is the view of another cache than {cache.name}; remove it, or name another --out"
            )
        self.seq_len, count = self.record.settings["seq_len"], self.record.cells["count"]
        length, parts = self.record.cells["spelled"], self.record.parts
        stored = _array(folder / CELLS, self.record.cells["sha256"], _CELL, (sum(parts),)).astype(np.int64)
        theirs, own, starts, spelled = np.split(stored, np.cumsum(parts)[:-1])
        fits = theirs.min() >= -1 and theirs.max() < count and own.min() >= 0 and own.max() <= count
        lengths = np.diff(starts)
        fits &= starts[0] == 0 and starts[-1] == length and lengths.min() >= 0 and lengths.max() <= DEEP
        fits &= spelled.min() >= 0 and spelled.max() < len(own)
        if not fits or not np.bincount(own, minlength=count)[:count].all():
            raise UsageError(f"{folder / CELLS} holds impossible cells; remove the folder")
        self.cells, self.spelling = Cells(theirs, own, count), Spelling(starts, spelled, len(own))

    def lines(self) -> list[str]:
        """What it costs to read the cache with another tokenizer, for people."""
        facts = self.facts()
        kept = "" if facts["entropy_kept"] is None else f"; the cells keep {facts['entropy_kept']:.1%} of the entropy"
        left_out = f"; {facts['left_out']:,} of {facts['documents']:,} documents are left out: their bytes change"
        return [
            f"tokenizers of {facts['teacher']:,} (teacher) and {facts['student']:,} entries: {facts['cells']:,} cells",
            f"{facts['boundaries']:.1%} of the student's labels of '{facts['split']}' begin where one of the teacher's "
            f"does, {facts['inside']:.1%} within one (compared by samples); {facts['in_chunks']:.1%} lie in chunks"
            f"{left_out * bool(facts['left_out'])}",
            f"at {facts['disagreement']:.2%} of the common places both tokens lie in different cells (at most "
            f"{MOST_DISAGREEMENT:.0%}){kept}",
            f"events: {'; '.join(facts['events'])}",
        ]

    def facts(self) -> dict[str, Any]:
        """What is known of the alignment: the cache's digest, entries of both tokenizers, cells; of the first split
        the shares of labels at common boundaries, within tokens of the teacher and in chunks, and of boundaries that
        disagree; documents."""
        record, (teacher, student) = self.record, self.record.sizes
        split, tally = next(iter(record.tallies.items()))
        labels = max(1, tally["labels"])
        return {
            "cache": record.settings["cache"],
            **{"teacher": teacher, "student": student, "cells": self.cells.count, "split": split},
            **{name: tally[name] / labels for name in ("boundaries", "inside", "in_chunks")},
            "disagreement": tally["disagree"] / max(1, tally["boundaries"]),
            "entropy_kept": record.entropy_kept,
            **{name: tally[name] for name in ("documents", "left_out")},
            "events": [printable(each) for each in record.events],
        }

    def __getitem__(self, split: str) -> "ViewReader":
        return ViewReader(self, split)


def _record(folder: Path) -> ViewRecord:
    """What view.json states. UsageError: it is not the record of a view."""
    stated = sealed_record(folder / VIEW)
    try:
        record = typed(stated, ViewRecord)
        if record.shards.keys() != record.tallies.keys():
            raise ValueError("shards and tallies are of different splits")
    except ValueError as error:
        problem = printable(str(error))
        raise UsageError(f"{folder / VIEW} is not the record of a view ({problem}); remove the folder") from error
    return record


def array_digest(path: Path, kind: np.dtype[Any], shape: tuple[int, ...]) -> str:
    """SHA-256 of a stored array. OSError, ValueError: it is no regular file, or larger than the array."""
    most = math.prod(shape) * kind.itemsize + _HEADER
    if path.is_file() and path.stat().st_size > most:  # a stranger's sparse file takes no disk, and hours to read
        raise ValueError(f"it has {path.stat().st_size} bytes, and at most {most} are right")
    return file_digest(path)


def _array(path: Path, digest: str, kind: np.dtype[Any], shape: tuple[int, ...]) -> np.ndarray:
    """A stored array, mapped. RunError: it is not the one that was published."""
    try:
        if array_digest(path, kind, shape) != digest:
            raise ValueError("its SHA-256 differs")
        found = np.lib.format.open_memmap(path, mode="r")
        if found.dtype != kind or found.shape != shape:
            raise ValueError("it has another shape")
    except Exception as error:  # the header is a stranger's, and numpy's parser raises what it likes
        why = printable(str(error)) or type(error).__name__
        raise RunError(f"{path} cannot be read ({why}): remove its folder, and the view is made anew") from error
    return found


class ViewReader(Dataset[dict[str, Tensor]]):
    """One split of a view, a map-style data set: the student's rows with the teacher's numbers.

    An item has the tensors of `Batch.fields`, `vocabulary`, the student's entries twice, and `temperature_range`, 1 and
    1, as those of a cache.

    cells, chunks: which terms the targets have.

    UsageError: the view has not this split, or no row of it; cells disagree with the text too often.
    """

    def __init__(self, view: View, split: str, *, cells: bool = True, chunks: bool = False) -> None:
        self.view, self.split, self.chunks = view, split, chunks
        self.reader = view.cache[split]
        stated = view.record.shards.get(split)
        if stated is None:
            raise UsageError(f"{view.folder} has no split '{split}'; remove the folder, and the view is made anew")
        self._firsts = np.cumsum([0, *(each["sequences"] for each in stated)])
        self._parts = [
            _array(
                view.folder / f"{split}-{number:05d}.npy", each["sha256"], row_type(view.seq_len), (each["sequences"],)
            )
            for number, each in enumerate(stated)
        ]
        if not len(self):
            raise UsageError(
                f"the text of '{split}' in {view.cache.name} is less than one row of {view.seq_len} tokens of the "
                "student's tokenizer; use a larger cache"
            )
        if cells and (apart := view.facts()["disagreement"]) > MOST_DISAGREEMENT:
            raise UsageError(
                f"teacher's and student's own tokens lie in different cells at {apart:.1%} of the common boundaries, "
                f"and at most {MOST_DISAGREEMENT:.0%} are right; use --cross-tokenizer chunks"
            )
        self._cells = TeacherCells.of(view.cells, view.spelling) if cells else None
        self._index = CellIndex.of(torch.from_numpy(view.cells.of_student.copy()), view.cells.count).known()
        self._identity = view.cells.identity
        self._ask: Ask | None = None

    @property
    def _goes_inside(self) -> bool:
        """Whether cells say something of labels within a token of the teacher's (`teacher_cells`)."""
        codec = self.reader.manifest.settings.codec
        said_whole = self._ask is not None or codec.kind == "dense" or codec.num_samples > 0
        return said_whole and self._cells is not None and not self._identity

    def asking(self, ask: Ask) -> "ViewReader":
        """The same with a teacher's answers on its own rows, a few at a time, instead of a cache's numbers."""
        found = copy.copy(self)
        found._ask = ask
        return found

    def __len__(self) -> int:
        """Number of rows."""
        return int(self._firsts[-1])

    def __repr__(self) -> str:
        return f"ViewReader of {self.view.cache.name}, '{self.split}': {len(self)} rows of {self.view.seq_len} tokens"

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        """One row as named tensors; -1 is the last."""
        index = operator.index(index)
        return self.__getitems__([index + len(self) if index < 0 else index])[0]

    def __getitems__(self, indices: Sequence[int]) -> list[dict[str, Tensor]]:
        """Several rows in one read; PyTorch's loaders call this."""
        fields, size = self.read(indices).fields(), len(indices)
        fields["vocabulary"] = torch.tensor([self.view.record.sizes[1]] * 2).expand(size, -1)
        fields["temperature_range"] = torch.ones(size, 2, dtype=torch.float64)
        return [{name: tensor[row] for name, tensor in fields.items()} for row in range(size)]

    def rows(self, indices: Iterable[int]) -> np.ndarray:
        """The rows as they are stored. IndexError: outside of the split. RunError: they hold impossible numbers."""
        wanted = np.asarray(list(indices), np.int64)
        if not len(wanted) or wanted.min() < 0 or wanted.max() >= len(self):
            raise IndexError(f"sequences {wanted.tolist()} are not among the {len(self)} of {self.split}")
        holders = np.searchsorted(self._firsts, wanted, side="right") - 1
        parts = zip(holders, wanted, strict=True)
        found = np.stack([self._parts[part][row - self._firsts[part]] for part, row in parts])
        tokens, segments, length = (found[name] for name in ("tokens", "segments", "length"))
        fits = tokens.min() >= 0 and tokens.max() < self.view.record.sizes[1]
        fits &= segments.min() >= 0 and segments.max() < self.view.seq_len
        fits &= found["said"].min() >= 0 and found["said"].max() <= self.view.record.cells["spelled"]
        fits &= max(length.max(), found["others"].max()) <= MOST and found["loss_mask"].view(np.uint8).max() <= 1
        if not fits or (length > np.arange(1, self.view.seq_len + 1)).any():
            raise RunError(f"{self.view.folder} holds impossible rows of '{self.split}'; remove it, to make it anew")
        return found

    def read(self, indices: Iterable[int]) -> Batch:
        """The rows `indices`, in that order. RunError: a shard of the cache is damaged."""
        rows = self.rows(indices)
        length = self.reader.manifest.settings.seq_len
        names = ("source", "said", "length", "others")
        source, said, chunk, others = (rows[name].astype(np.int64).ravel() for name in names)
        if not self._goes_inside:
            source = np.where(said > 0, -1, source)
        ends = np.flatnonzero(chunk)
        begins = source[ends - chunk[ends] + 1]
        # of a chunk every row, also where rows are shorter than chunks
        within = [begins + np.minimum(step, others[ends] - 1) for step in (*range(0, MOST, length), MOST)]
        needed = np.concatenate([source[source >= 0], *within])
        if len(needed) and (needed.min() < 0 or needed.max() >= len(self.reader) * length):
            raise RunError(f"{self.view.folder} speaks of rows that the cache does not have; remove it")
        numbers = np.unique(needed // length) if len(needed) else np.zeros(1, np.int64)

        def place(positions: np.ndarray) -> np.ndarray:
            return np.searchsorted(numbers, positions // length) * length + positions % length

        at = torch.from_numpy(np.where(source >= 0, place(np.maximum(source, 0)), -1))
        own = torch.from_numpy(self.view.cells.of_student[rows["tokens"][:, 1:]].ravel())
        near, label_N = self._answers(numbers, at, torch.from_numpy(np.where(source >= 0, said, 0)), own)
        label = label_N.double().numpy()
        sums = np.concatenate([[0.0], np.cumsum(np.nan_to_num(label))])
        unknown = np.concatenate([[0], np.cumsum(np.isnan(label))])
        first = place(begins)
        last = first + others[ends]
        known = unknown[last] == unknown[first]
        lengths, label_logprob = np.zeros(len(source), np.int64), np.zeros(len(source), np.float32)
        lengths[ends[known]] = chunk[ends[known]]
        label_logprob[ends[known]] = (sums[last] - sums[first])[known]
        targets = AlignedTargets(
            length=torch.from_numpy(lengths),
            label_logprob=torch.from_numpy(label_logprob),
            compared=at >= 0,
            near=near,
            cells=None if self._identity or near is None else self._index,
            chunks=self.chunks,
        )
        return Batch(
            tokens=torch.from_numpy(rows["tokens"].astype(np.int64)),
            loss_mask=torch.from_numpy(rows["loss_mask"].copy()),
            segments=torch.from_numpy(rows["segments"].astype(np.int64)),
            targets=targets,
        )

    def _answers(
        self, numbers: np.ndarray, at: Tensor, said: Tensor, own: Tensor
    ) -> tuple[SparseTargets | None, Tensor]:
        """Of the teacher's rows `numbers`: targets over cells at the positions `at` of them (below 0: none), behind the
        tokens `said`, where the text has the cells `own`, if cells count; and its log p of all labels."""
        cells, ask = self._cells, self._ask
        whole: Iterator[Targets]
        if ask is not None:
            groups = (numbers[start : start + _ASKED].tolist() for start in range(0, len(numbers), _ASKED))
            whole = map(ask, map(self.reader.read, groups))
        else:
            targets = self.reader.read(numbers.tolist()).targets
            if targets is None:
                raise UsageError(f"{self.view.cache.name} holds no teacher's numbers")
            if isinstance(targets, SparseTargets):
                if cells is None:
                    return None, targets.label_logprob
                text = own if self._goes_inside else None
                found = at_rows(targets, at) if self._identity else coarsened(targets, cells, at, said, text)
                return found, targets.label_logprob
            whole = iter((targets,))
        near, labels, order = list[SparseTargets](), list[Tensor](), at.argsort(stable=True)
        wanted, first = at[order], 0
        sized = ((_AT_ONCE.get(each.label_logprob.device.type, 128), each) for each in whole)
        for size, part in ((most, each[i : i + most]) for most, each in sized for i in range(0, len(each), most)):
            dense = part.resolved()
            assert isinstance(dense, DenseTargets)
            labels.append(dense.label_logprob)
            if cells is not None:
                cells = self._cells = cells.to(dense.logprobs.device)
                begin, end = torch.searchsorted(wanted, torch.tensor([first, first + len(part)])).tolist()
                # one at least, so that there is something to leave out
                for rows in (order[begin:end] if end > begin or near else order[:1]).split(size):
                    place = (at[rows] - first).clamp(0, len(part) - 1)
                    near.append(condensed(dense, cells, place, said[rows]))
            first += len(part)
        label_N = torch.cat(labels).cpu()
        if cells is None:
            return None, label_N
        joined = near[0].map(lambda name, _: torch.cat([getattr(each, name) for each in near]).cpu())
        row = torch.empty_like(at)
        row[order] = torch.arange(len(at)) - (len(at) - len(joined))
        return at_rows(joined, row.masked_fill(at < 0, -1)), label_N


def viewed_cache(folder: Path) -> str | None:
    """The digest of the cache that a view in `folder`, finished or not, is of; None: it is no view."""
    try:
        return typed(read_sealed(folder / SETTINGS), ViewSettings)["cache"]
    except (OSError, ValueError):
        return None


def verify_view(folder: Path) -> list[str]:
    """Compare every digest of a finished view; a line for each problem."""
    problems = []
    try:
        record = _record(folder)
    except UsageError as error:
        return [str(error)]
    stated: dict[str, tuple[str, np.dtype[Any], tuple[int, ...]]] = {
        CELLS: (record.cells["sha256"], _CELL, (sum(record.parts),))
    }
    for split, shards in record.shards.items():
        for number, each in enumerate(shards):
            kind = row_type(record.settings["seq_len"])
            stated[f"{split}-{number:05d}.npy"] = each["sha256"], kind, (each["sequences"],)
    for name, (digest, kind, shape) in stated.items():
        try:
            if array_digest(folder / name, kind, shape) != digest:
                problems.append(f"{folder / name}: its SHA-256 differs from view.json's")
        except (OSError, ValueError) as error:  # ValueError: a folder or a pipe
            problems.append(f"{folder / name}: {getattr(error, 'strerror', None) or error}")
    return problems


def identity_of(view: View) -> str:
    """A digest of a view and its cache: not of what was measured, whose last bits depend on the machine."""
    record = view.record
    return json_digest({"settings": record.settings, "shards": record.shards, "cells": record.cells["sha256"]})
