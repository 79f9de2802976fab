"""A cache in the rows of a student with another tokenizer: a view beside the run; the cache stays as it is.

    FOLDER/settings.json     what the view is made from: the cache's digest, the tokenizer, events, length of a row
    FOLDER/cells.npy         int32, the cell of each token of the teacher, then of the student (`data.cells`)
    FOLDER/train-00000.npy   rows, structured (`row_type`); .json beside it: its SHA-256, where the next one begins
    FOLDER/tokenizer/        the student's
    FOLDER/view.json         at the end, sealed: the digests, and what was measured

A row has the student's tokens, and for each label where in the cache the teacher speaks of the same bytes; its
numbers stay in the cache, and `ViewReader` joins both when it reads. Shards are published one by one, and a killed
build goes on behind the last: the shards are the same, as the rows are a pure function of the cache and the settings.

Cells that conflict are merged from the first two million tokens of the training text; what that costs is measured on
the teacher's numbers of a few rows, and what still disagrees on the whole text. Above 5 % the view is refused.

Given up: one process builds it. A row of the student needs the teacher's numbers of two or three rows of the cache.

Shapes: n rows, T positions, V entries of the teacher's tokenizer, S of the student's, C cells, K entries.
"""

import hashlib
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch

from kdtrain import faults
from kdtrain.cache import format as cache_format
from kdtrain.cache.folder import copy_tokenizer
from kdtrain.cache.reader import Cache, CacheReader
from kdtrain.data.bytes import ByteTokenizer, Events
from kdtrain.data.cells import Cells, merge, prefix_cells
from kdtrain.data.packing import PackedRow, rows_of
from kdtrain.data.transcode import Transcoder, documents_of, is_joined, teacher_stream
from kdtrain.errors import RunError, UsageError, making
from kdtrain.files import Lock, file_digest, json_digest, publish_json, published, read_sealed, sweep, typed
from kdtrain.models.loading import load_tokenizer, tokenizer_digest
from kdtrain.objective.aligned import AlignedTargets, at_rows, coarsened
from kdtrain.objective.batch import Batch
from kdtrain.objective.cells import CellIndex
from kdtrain.objective.targets import SparseTargets

SETTINGS, VIEW, CELLS = "settings.json", "view.json", "cells.npy"
MOST_DISAGREEMENT = 0.05
"""Share of the common boundaries at which teacher's and student's own tokens may lie in different cells."""
_ROWS = 1024
_MERGED_FROM = 2_000_000
_MEASURED_ROWS = 64
_AT_ONCE = 256
_TALLIES = ("labels", "boundaries", "disagree", "in_chunks", "documents", "left_out")


def row_type(seq_len: int) -> np.dtype[Any]:
    """A row: what `PackedRow` has, and source, length and others of `data.transcode` for each label."""
    shape = (seq_len,)
    return np.dtype(
        [
            ("tokens", "<i4", (seq_len + 1,)),
            ("loss_mask", "?", shape),
            ("segments", "<i4", shape),
            ("source", "<i8", shape),
            ("length", "u1", shape),
            ("others", "u1", shape),
        ]
    )


@dataclass(frozen=True, kw_only=True)
class ViewRecord:
    """What view.json states."""

    settings: dict[str, Any]
    shards: dict[str, list[dict[str, Any]]]
    """By split: sequences and sha256 of each."""
    cells: dict[str, Any]
    """sha256 of cells.npy, teacher and student (entries), count (C)."""
    tallies: dict[str, dict[str, int]]
    """By split: labels of the student that count; boundaries, those with a source; disagree, those whose two own tokens
    are in different cells; in_chunks, those in chunks; documents, and left_out of these."""
    events: list[str]
    """The table of special tokens, for people."""
    entropy_kept: float
    """Share of the entropy of the teacher's numbers that the cells keep."""

    @property
    def sizes(self) -> tuple[int, int]:
        """Entries of both tokenizers."""
        return int(self.cells["teacher"]), int(self.cells["student"])


class _Maker:
    """Everything that the builds of splits share."""

    def __init__(self, cache: Cache, tokenizer: Any, given: dict[str, str] | None, seq_len: int | None) -> None:
        if cache.remote is not None:
            cache.remote.bring_tokenizer()
        self.cache = cache
        self.teacher = ByteTokenizer(load_tokenizer(cache.folder / cache_format.TOKENIZER), keeps=False)
        self.student = ByteTokenizer(tokenizer)
        self.events = Events.match(self.teacher, self.student, given)
        stated = cache.manifest.settings
        self.document_mask, self.seq_len = stated.document_mask, seq_len or stated.seq_len
        self.settings = {
            "version": 1,
            "cache": cache.manifest.digest,
            "tokenizer": tokenizer_digest(tokenizer),
            "events": [[int(one), int(other)] for one, other in self.events.table.items()],
            "seq_len": self.seq_len,
            "rows": _ROWS,
        }

    def transcoder(self) -> Transcoder:
        return Transcoder(self.teacher, self.student, self.events)

    def stream(self, reader: CacheReader, joined: bool, token: int = 0) -> Iterator[tuple[int, np.ndarray]]:
        """Documents of a split from the one on that begins at `token` of the teacher's stream."""
        length = reader.manifest.settings.seq_len + (not joined)
        # in joined rows, a row's first token is the last of the row before
        first = max(0, token - joined) // length
        parts = teacher_stream(_rows(reader, first), joined, self.teacher, first)
        for at, documents in documents_of(parts, first * length):
            skipped = max(0, token - at)
            if skipped < len(documents):
                yield at + skipped, documents[skipped:]

    def cells(self, reader: CacheReader, joined: bool) -> Cells:
        """The cells, merged from the beginning of the text."""
        found = prefix_cells(
            self.teacher.bytes,
            self.student.bytes,
            self.student.cut,
            self.events.lookup(len(self.teacher.bytes)),
        )
        worker, pairs, read = self.transcoder(), [], 0
        for first, documents in self.stream(reader, joined):
            out = worker(first, documents)
            out = out[out["source"] >= 0]
            pairs.append(np.stack([out["taught"], out["token"]]))
            read += len(documents)
            if read >= _MERGED_FROM:
                break
        worker.refuse_loss(*worker.count())
        return merge(found, *np.concatenate(pairs, 1)) if pairs else found


def _rows(reader: CacheReader, first: int = 0) -> Iterator[PackedRow]:
    for start in range(first, len(reader), _AT_ONCE):
        text = reader.text(range(start, min(start + _AT_ONCE, len(reader))))
        yield from (PackedRow(*row) for row in zip(*text.values(), strict=True))


def _tokens(reader: CacheReader) -> Iterator[np.ndarray]:
    for start in range(0, len(reader), _AT_ONCE):
        yield reader.text(range(start, min(start + _AT_ONCE, len(reader))))["tokens"]


def build_view(
    folder: Path,
    cache: Cache,
    tokenizer: Any,
    *,
    events: dict[str, str] | None = None,
    seq_len: int | None = None,
    splits: Sequence[str] | None = None,
    progress: Callable[[int], None] | None = None,
) -> "View":
    """The view in `folder` for the student's `tokenizer`, made or completed where it is not there.

    events: see `Events.match`. seq_len: T of a row; by default the cache's. splits: by default all of the cache.
    progress: gets the rows done.

    UsageError: `ByteTokenizer`, `Events`, `Transcoder`, or the folder holds another view.
    RunError: a shard is damaged, the disk is full.
    """
    maker = _Maker(cache, tokenizer, events, seq_len)
    with making(folder):
        folder.mkdir(parents=True, exist_ok=True)
    lock = Lock(folder / ".building", f"another process is making the view {folder} now; wait for it")
    try:
        sweep(folder)
        if (folder / VIEW).exists():
            view = View(folder, cache)
            _refuse_other(folder, view.record.settings, maker.settings)
            return view
        if (folder / SETTINGS).exists():
            stored = _sealed(folder / SETTINGS)
            _refuse_other(folder, {key: each for key, each in stored.items() if key != "digest"}, maker.settings)
        else:
            publish_json(folder / SETTINGS, maker.settings, "view.settings")
        copy_tokenizer(tokenizer, folder / cache_format.TOKENIZER)
        wanted = [split for split in cache if splits is None or split in splits]
        joined = {split: is_joined(_tokens(cache[split])) for split in {"train", *wanted}}
        cells = maker.cells(cache["train"], joined["train"])
        both = np.concatenate([cells.of_teacher, cells.of_student]).astype(np.int32)
        with published(folder / CELLS, "view.cells") as path, open(path, "wb") as file:
            np.save(file, both, allow_pickle=False)
        shards, tallies = {}, {}
        for split in wanted:
            shards[split], tallies[split] = _build_split(folder, maker, cache[split], joined[split], cells, progress)
        record = ViewRecord(
            settings=maker.settings,
            shards=shards,
            cells={
                "sha256": file_digest(folder / CELLS),
                "teacher": len(cells.of_teacher),
                "student": len(cells.of_student),
                "count": cells.count,
            },
            tallies=tallies,
            events=maker.events.lines(),
            entropy_kept=_entropy_kept(cache["train"], cells),
        )
        publish_json(folder / VIEW, asdict(record), "view.record")
        return View(folder, cache)
    finally:
        lock.release()


def _refuse_other(folder: Path, there: dict[str, Any], wanted: dict[str, Any]) -> None:
    if changed := [key for key in wanted if there.get(key) != wanted[key]]:
        raise UsageError(
            f"{folder} holds the view of another run (another {', '.join(changed)}); name another --out, or remove it"
        )


def _build_split(
    folder: Path,
    maker: _Maker,
    reader: CacheReader,
    joined: bool,
    cells: Cells,
    progress: Callable[[int], None] | None,
) -> tuple[list[dict[str, Any]], dict[str, int]]:
    """Publish the shards of a split that are missing; what view.json states of all."""
    found: list[dict[str, Any]] = []
    total, next_token, skipped, after = dict.fromkeys(_TALLIES, 0), 0, 0, -1
    digest = json_digest(maker.settings)
    while (record := _finished(folder, reader.split, len(found), digest)) is not None:
        found.append({"sequences": record["sequences"], "sha256": record["sha256"]})
        total = {name: each + record["tally"][name] for name, each in total.items()}
        next_token, skipped = record["next"]
        after = next_token
        if record["last"]:
            return found, total
    worker = maker.transcoder()

    def student_stream() -> Iterator[np.ndarray]:
        nonlocal skipped
        for first, documents in maker.stream(reader, joined, next_token):
            out, ahead = worker(first, documents), skipped
            skipped = max(0, ahead - len(out))
            yield out[ahead:]

    rows = rows_of(student_stream(), maker.seq_len, maker.document_mask)
    last = False
    while not last:
        taken = list(islice(rows, _ROWS))
        last = len(taken) < _ROWS
        if taken:
            next_token, place = int(taken[-1].kept["document"][-1]), int(taken[-1].kept["place"][-1])
        else:
            place = skipped
        path = folder / f"{reader.split}-{len(found):05d}.npy"
        with published(path, "view.shard") as temporary, open(temporary, "wb") as file:
            np.save(file, stored := _stored(taken, maker.seq_len), allow_pickle=False)
        at = stored["source"] >= 0
        taught = np.stack([row.kept["taught"] for row in taken])[at] if taken else np.empty(0, np.int64)
        one, other = cells.of_teacher[taught], cells.of_student[stored["tokens"][:, 1:][at]]
        tally = {
            "labels": int(stored["loss_mask"].sum()),
            "boundaries": int(at.sum()),
            "disagree": int(((one != other) & (one >= 0)).sum()),
            "in_chunks": int(stored["length"].sum()),
        }
        tally["documents"], tally["left_out"] = worker.count(after, math.inf if last else next_token)
        after = next_token
        record = {"settings": digest, "sequences": len(taken), "sha256": file_digest(path), "last": last}
        record |= {"tally": tally, "next": [next_token, place]}
        publish_json(path.with_suffix(".json"), record, "view.sidecar")
        found.append({"sequences": len(taken), "sha256": record["sha256"]})
        total = {name: each + tally[name] for name, each in total.items()}
        faults.point("view.after-shard")
        if progress:
            progress(sum(each["sequences"] for each in found))
    worker.refuse_loss(total["documents"], total["left_out"])
    return found, total


def _stored(rows: Sequence[PackedRow], seq_len: int) -> np.ndarray:
    out = np.zeros(len(rows), row_type(seq_len))
    place_T = np.arange(1, seq_len + 1)
    for each, row in zip(out, rows, strict=True):
        each["tokens"], each["loss_mask"], each["segments"] = row.tokens, row.loss_mask, row.segments
        # of a chunk that began in the row before, this one has not all tokens
        kept_T = row.loss_mask & (row.kept["length"] <= place_T)
        each["length"], each["others"] = row.kept["length"] * kept_T, row.kept["others"] * kept_T
        each["source"] = np.where(row.loss_mask, row.kept["source"], -1)
        begin_T = np.flatnonzero(each["length"])
        first = begin_T - each["length"][begin_T] + 1
        unusable = begin_T[each["source"][first] < 0]
        each["length"][unusable] = each["others"][unusable] = 0
    return out


def _sealed(path: Path) -> dict[str, Any]:
    try:
        return read_sealed(path)
    except (OSError, ValueError) as error:
        raise UsageError(f"{path} cannot be read ({error}); remove the folder, and the view is made anew") from error


def _finished(folder: Path, split: str, number: int, digest: str) -> dict[str, Any] | None:
    """The sidecar of a shard that is there and whole."""
    path = folder / f"{split}-{number:05d}.npy"
    try:
        record = read_sealed(path.with_suffix(".json"))
        if record["settings"] == digest and file_digest(path) == record["sha256"]:
            return record
    except (OSError, ValueError, KeyError):
        pass
    return None


def _entropy_kept(reader: CacheReader, cells: Cells) -> float:
    """Entropy of the kept entries by cell, as a share of that by token, over some rows; 1 without targets."""
    count = min(_MEASURED_ROWS, len(reader))
    batch = reader.read(np.linspace(0, len(reader) - 1, count).astype(int).tolist())
    if batch.targets is None or batch.targets.width is not None:
        return 1.0
    targets = batch.targets.resolved()[: 1 << 14]
    ids, mass = targets.listed()
    mask = batch.loss_mask.flatten()[: len(ids)]
    ids, mass = ids[mask], mass[mask].double()
    place = torch.from_numpy(cells.of_teacher)[ids.clamp(max=len(cells.of_teacher) - 1)]
    mass = mass.where((ids < len(cells.of_teacher)) & (place >= 0), 0.0)
    row = torch.arange(len(ids))[:, None] * (cells.count + 1)
    _, group = (row + place.clamp(min=0)).unique(return_inverse=True)  # an array of rows and cells may take all memory
    by_cell = torch.bincount(group.flatten(), mass.flatten())
    whole, kept = (-(each * each.clamp(min=1e-30).log()).sum().item() for each in (mass, by_cell))
    return kept / whole if whole else 1.0


class View:
    """A finished view, and the cache that it is of. UsageError: it is damaged, or of another cache."""

    def __init__(self, folder: Path, cache: Cache) -> None:
        self.folder, self.cache = folder, cache
        stated = _sealed(folder / VIEW)
        try:
            self.record = typed(stated, ViewRecord)
            self.seq_len = int(self.record.settings["seq_len"])
            sizes = [int(self.record.cells[name]) for name in ("teacher", "student", "count")]
        except (KeyError, TypeError, ValueError) as error:
            raise UsageError(f"{folder / VIEW} is not the record of a view ({error}); remove the folder") from error
        if self.record.settings.get("cache") != cache.manifest.digest:
            raise UsageError(
                f"{folder} is the view of another cache than {cache.name}; remove it, or name another --out"
            )
        both = _array(folder / CELLS, self.record.cells["sha256"], np.dtype("<i4"), (sizes[0] + sizes[1],))
        wide = both.astype(np.int64)
        if len(wide) and not (wide.min() >= -1 and wide.max() <= sizes[2]):
            raise UsageError(f"{folder / CELLS} holds impossible cells; remove the folder")
        self.cells = Cells(wide[: sizes[0]], wide[sizes[0] :], sizes[2])

    def lines(self) -> list[str]:
        """What it costs to read the cache with another tokenizer, for people."""
        facts = self.facts()
        left_out = f"; {facts['left_out']:,} of {facts['documents']:,} documents are left out: their bytes change"
        return [
            f"tokenizers of {facts['teacher']:,} (teacher) and {facts['student']:,} entries: {facts['cells']:,} cells",
            f"{facts['boundaries']:.1%} of the student's labels begin where one of the teacher's does, and "
            f"{facts['in_chunks']:.1%} lie in chunks{left_out * bool(facts['left_out'])}",
            f"at {facts['disagreement']:.2%} of the common places both tokens lie in different cells (at most "
            f"{MOST_DISAGREEMENT:.0%}); the cells keep {facts['entropy_kept']:.1%} of the entropy",
            f"events: {'; '.join(facts['events'])}",
        ]

    def facts(self) -> dict[str, Any]:
        """What is known of the alignment: the cache's digest, entries of both tokenizers, cells; of the first split
        the shares of labels at common boundaries and in chunks, and of boundaries that disagree; documents."""
        record, (teacher, student) = self.record, self.record.sizes
        tally = next(iter(record.tallies.values()))
        labels = max(1, tally["labels"])
        return {
            "cache": record.settings["cache"],
            **{"teacher": teacher, "student": student, "cells": self.cells.count},
            **{name: tally[name] / labels for name in ("boundaries", "in_chunks")},
            "disagreement": tally["disagree"] / max(1, tally["boundaries"]),
            "entropy_kept": record.entropy_kept,
            **{name: tally[name] for name in ("documents", "left_out")},
            "events": record.events,
        }

    def __getitem__(self, split: str) -> "ViewReader":
        return ViewReader(self, split)


def _array(path: Path, digest: str, kind: np.dtype[Any], shape: tuple[int, ...]) -> np.ndarray:
    """A stored array, mapped. RunError: it is not the one that was published."""
    try:
        if file_digest(path) != digest:
            raise ValueError("its SHA-256 differs")
        found = np.load(path, mmap_mode="r", allow_pickle=False)
        if found.dtype != kind or found.shape != shape:
            raise ValueError("it has another shape")
    except (OSError, ValueError, EOFError) as error:
        raise RunError(f"{path} cannot be read ({error}): remove its folder, and the view is made anew") from error
    return found  # type: ignore[no-any-return]


class ViewReader:
    """One split of a view: batches of the student's rows with the teacher's numbers.

    cells, chunks: which terms the targets have.

    UsageError: the cache has no numbers for cells, or these disagree with the text too often.
    """

    def __init__(self, view: View, split: str, *, cells: bool = True, chunks: bool = True) -> None:
        self.view, self.split, self.chunks = view, split, chunks
        self.reader = view.cache[split]
        stated = view.record.shards[split]
        self._firsts = np.cumsum([0, *(each["sequences"] for each in stated)])
        self._parts = [
            _array(
                view.folder / f"{split}-{number:05d}.npy", each["sha256"], row_type(view.seq_len), (each["sequences"],)
            )
            for number, each in enumerate(stated)
        ]
        codec = self.reader.manifest.codec
        if cells and codec.kind != "sparse":
            raise UsageError(
                f"cells need samples or a top-k, and {view.cache.name} keeps {codec.kind}: use --cross-tokenizer chunks"
            )
        if cells and (apart := view.facts()["disagreement"]) > MOST_DISAGREEMENT:
            raise UsageError(
                f"teacher's and student's own tokens lie in different cells at {apart:.1%} of the common boundaries, "
                f"and at most {MOST_DISAGREEMENT:.0%} are right; use --cross-tokenizer chunks"
            )
        self._of_teacher = torch.from_numpy(view.cells.of_teacher.copy()) if cells else None
        identity = view.cells.identity
        self._index = CellIndex.of(torch.from_numpy(view.cells.of_student.copy()), view.cells.count)
        self._identity = identity

    def __len__(self) -> int:
        """Number of rows."""
        return int(self._firsts[-1])

    def rows(self, indices: Iterable[int]) -> np.ndarray:
        """The rows as they are stored. IndexError: outside of the split."""
        wanted = np.asarray(list(indices), np.int64)
        if not len(wanted) or wanted.min() < 0 or wanted.max() >= len(self):
            raise IndexError(f"sequences {wanted.tolist()} are not among the {len(self)} of {self.split}")
        holders = np.searchsorted(self._firsts, wanted, side="right") - 1
        found = [self._parts[part][row - self._firsts[part]] for part, row in zip(holders, wanted, strict=True)]
        return np.stack(found)

    def read(self, indices: Iterable[int]) -> Batch:
        """The rows `indices`, in that order. RunError: a shard of the cache is damaged."""
        rows = self.rows(indices)
        length = self.reader.manifest.settings.seq_len
        source, chunk, others = (rows[name].astype(np.int64).ravel() for name in ("source", "length", "others"))
        ends = np.flatnonzero(chunk)
        begins = source[ends - chunk[ends] + 1]
        needed = np.concatenate([source[source >= 0], begins, begins + others[ends] - 1])
        if len(needed) and (needed.min() < 0 or needed.max() >= len(self.reader) * length):
            raise RunError(f"{self.view.folder} speaks of rows that the cache does not have; remove it")
        numbers = np.unique(needed // length) if len(needed) else np.zeros(1, np.int64)
        batch = self.reader.read(numbers.tolist())
        assert batch.targets is not None

        def place(positions: np.ndarray) -> np.ndarray:
            return np.searchsorted(numbers, positions // length) * length + positions % length

        label = batch.targets.label_logprob.double().numpy()
        sums = np.concatenate([[0.0], np.cumsum(np.nan_to_num(label))])
        unknown = np.concatenate([[0], np.cumsum(np.isnan(label))])
        first = place(begins)
        last = first + others[ends]
        known = unknown[last] == unknown[first]
        lengths, label_logprob = np.zeros(len(source), np.int64), np.zeros(len(source), np.float32)
        lengths[ends[known]] = chunk[ends[known]]
        label_logprob[ends[known]] = (sums[last] - sums[first])[known]
        at = torch.from_numpy(np.where(source >= 0, place(np.maximum(source, 0)), -1))
        near = None
        if self._of_teacher is not None:
            assert isinstance(batch.targets, SparseTargets)
            near = at_rows(batch.targets, at) if self._identity else coarsened(batch.targets, self._of_teacher, at)
        targets = AlignedTargets(
            length=torch.from_numpy(lengths),
            label_logprob=torch.from_numpy(label_logprob),
            at_boundary=at >= 0,
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


def identity_of(view: View) -> str:
    """A digest of a view and its cache."""
    return hashlib.sha256(json_digest(asdict(view.record)).encode()).hexdigest()
