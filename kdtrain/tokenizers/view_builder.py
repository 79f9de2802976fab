"""A cache in the rows of a student with another tokenizer: a view beside the run; the cache stays as it is.

    FOLDER/settings.json     what the view is made from: the cache's digest, the tokenizer, events, length of a row
    FOLDER/cells.npy         int32, `Cells` and `Spelling` (`data`) of both vocabularies, an array behind the other
    FOLDER/train-00000.npy   rows, structured (`row_type`); .json beside it: its SHA-256, where the next one begins
    FOLDER/tokenizer/        the student's
    FOLDER/view.json         at the end, sealed: the digests, and what was measured

A row has the student's tokens, and for each label where in the cache the teacher predicts the same bytes; its
numbers stay in the cache, and `ViewReader` joins both when it reads. Shards are published one by one, and a killed
build resumes behind the last: the shards are the same, as the rows are a pure function of the cache and the settings.

Cells that conflict are merged from the first two million tokens of the training text; what that costs is measured on
the teacher's numbers of a few rows, and what still disagrees on the whole text. Above 5 % the view is refused.

Given up: one process builds it. A row of the student needs the teacher's numbers of two or three rows of the cache.

Shapes: n rows, T positions, V entries of the teacher's tokenizer, S of the student's, C cells, K entries.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch

from kdtrain import faults
from kdtrain.cache.build.folder import copy_tokenizer, holds_nothing
from kdtrain.cache.format import names as cache_format
from kdtrain.cache.format.manifest import CacheSettings
from kdtrain.cache.read.reader import Cache, CacheReader
from kdtrain.data.packing import rows_of
from kdtrain.errors import UsageError, making
from kdtrain.files import (
    Lock,
    file_digest,
    json_digest,
    publish_json,
    published,
    read_sealed,
    refuse_links,
    sweep,
    typed,
)
from kdtrain.models.tokenizer import load_tokenizer, tokenizer_digest
from kdtrain.tokenizers.alignment import Alignment
from kdtrain.tokenizers.cells import Cells
from kdtrain.tokenizers.transcode import documents_of, is_joined, teacher_stream
from kdtrain.tokenizers.view import (
    CELLS,
    SETTINGS,
    VERSION,
    VIEW,
    LabelCounts,
    View,
    ViewRecord,
    ViewSettings,
    ViewShard,
    ViewSidecar,
    array_digest,
    row_type,
    sealed_record,
    viewed_cache,
)

_ROWS = 1024
_MERGED_FROM = 2_000_000
_MEASURED_ROWS = 64
_MEASURED = 1 << 22
"""Entries that are measured."""
_AT_ONCE = 256
_ENOUGH = 1000
"""Documents after which a share of them that is left out means something."""
_LOCK = ".building-0"
"""As that of a cache (`cache.folder`): a folder that holds nothing else belongs to no run."""

_CALLED = {
    "version": "version of kdtrain",
    "events": "table of special tokens",
    "seq_len": "length of rows",
    "rows": "size of shards",
}
"""Keys of the settings in messages."""


_NOTHING = LabelCounts(labels=0, boundaries=0, disagree=0, inside=0, documents=0, left_out=0)


class OtherViewError(UsageError):
    """The folder holds a view of something else."""


class _Maker:
    """Everything that the builds of splits share."""

    def __init__(self, cache: Cache, tokenizer: Any, given: Mapping[str, str] | None, seq_len: int | None) -> None:
        if cache.remote is not None:
            cache.remote.bring_tokenizer()
        self.cache = cache
        teacher = load_tokenizer(cache.folder / cache_format.TOKENIZER)
        ends, pad = cache.manifest.end_tokens, teacher.pad_token_id
        # what fills the rows behind the answers of a teacher that wrote the text (`models.tokenizer`) is left out
        fills = ends and pad is not None and pad not in {*ends, teacher.eos_token_id, teacher.bos_token_id}
        filler = {teacher.pad_token: ""} if fills else {}
        self.alignment = Alignment(teacher, tokenizer, {**filler, **(given or {})})
        stated = cache.manifest.settings
        self.document_mask, self.seq_len = stated.document_mask, seq_len or stated.seq_len
        self.settings: ViewSettings = {
            "version": VERSION,
            "cache": cache.manifest.digest,
            "tokenizer": tokenizer_digest(tokenizer),
            "events": [[int(one), int(other)] for one, other in self.alignment.table.table.items()],
            "seq_len": self.seq_len,
            "rows": _ROWS,
        }

    def stream(self, reader: CacheReader, joined: bool, token: int = 0) -> Iterator[tuple[int, np.ndarray]]:
        """Documents of a split from the one on that begins at `token` of the teacher's stream."""
        length = reader.manifest.settings.seq_len + (not joined)
        # in joined rows, a row's first token is the last of the row before
        first = max(0, token - joined) // length
        parts = teacher_stream(_texts(reader, first), joined, self.alignment.tokenizers[0], first)
        for at, documents in documents_of(parts, first * length):
            skipped = max(0, token - at)
            if skipped < len(documents):
                yield at + skipped, documents[skipped:]

    def cells(self, reader: CacheReader) -> Cells:
        """The cells, merged from the beginning of the text: the same whether or not the split is wanted whole."""
        worker, pairs, read = self.alignment.transcoder(), [], 0
        joined = _joined(reader, -(-_MERGED_FROM // reader.manifest.settings.seq_len))
        for first, documents in self.stream(reader, joined):
            out = worker(first, documents)
            out = out[(out["source"] >= 0) & (out["prefix"] == 0)]
            pairs.append(np.stack([out["taught"], out["token"]]))
            read += len(documents)
            if read >= _MERGED_FROM:
                break
        worker.refuse_loss(worker.documents, worker.left_out)
        return self.alignment.merged(*np.concatenate(pairs, 1)) if pairs else self.alignment.cells


def _texts(reader: CacheReader, first: int = 0, stop: int | None = None) -> Iterator[dict[str, np.ndarray]]:
    stop = len(reader) if stop is None else min(stop, len(reader))
    for start in range(first, stop, _AT_ONCE):
        yield reader.text(range(start, min(start + _AT_ONCE, stop)))


def _joined(reader: CacheReader, stop: int | None = None) -> bool:
    return is_joined(each["tokens"] for each in _texts(reader, stop=stop))


def build_view(
    folder: Path,
    cache: Cache,
    tokenizer: Any,
    *,
    events: Mapping[str, str] | None = None,
    seq_len: int | None = None,
    splits: Sequence[str] | None = None,
    progress: Callable[[int], None] | None = None,
) -> "View":
    """The view in `folder` for the student's `tokenizer`, made or completed where it is not there.

    events: see `SpecialTokens.match`. seq_len: T of a row; by default the cache's. splits: by default all of the cache.
    progress: gets the rows done.

    A finished view is opened without a lock; a process that makes the same one is waited for.

    UsageError: `Alignment`, `Transcoder`, or the folder is a link, holds other files, or another view.
    RunError: a shard is damaged, the disk is full.
    """
    _refuse_foreign(folder)
    maker = _Maker(cache, tokenizer, events, seq_len)
    with making(folder):
        folder.mkdir(parents=True, exist_ok=True)
    if (view := _opened(folder, cache, maker.settings)) is not None:
        return view
    message = f"another process is making another view in {folder} now; wait for it, or name another folder"
    lock = Lock(folder / _LOCK, message, json_digest(maker.settings), math.inf)
    try:
        sweep(folder)
        if (view := _opened(folder, cache, maker.settings)) is not None:
            return view
        if (folder / SETTINGS).exists():
            stored = sealed_record(folder / SETTINGS)
            _refuse_other(folder, {key: each for key, each in stored.items() if key != "digest"}, maker.settings)
        else:
            publish_json(folder / SETTINGS, {**maker.settings}, "view.settings")
        copy_tokenizer(tokenizer, folder / cache_format.TOKENIZER)
        cells, spelling = maker.cells(cache["train"]), maker.alignment.spelling
        parts = [cells.of_teacher, cells.of_student, spelling.starts, spelling.tokens]
        with published(folder / CELLS, "view.cells") as path, open(path, "wb") as file:
            np.save(file, np.concatenate(parts).astype(np.int32), allow_pickle=False)
        shards, tallies = {}, {}
        for split in cache if splits is None else splits:
            shards[split], tallies[split] = _build_split(folder, maker, cache[split], cells, progress)
        record = ViewRecord(
            settings=maker.settings,
            shards=shards,
            cells={
                "sha256": file_digest(folder / CELLS),
                "teacher": len(cells.of_teacher),
                "student": len(cells.of_student),
                "count": cells.count,
                "spelled": len(spelling.tokens),
            },
            tallies=tallies,
            events=maker.alignment.events,
            entropy_kept=_entropy_kept(cache["train"], cells),
        )
        publish_json(folder / VIEW, asdict(record), "view.record")
        return View(folder, cache)
    finally:
        lock.release()


def _refuse_foreign(folder: Path) -> None:
    """UsageError: the folder is a link, or holds links or files that no builder of a view made."""
    if folder.is_symlink():
        raise UsageError(f"{folder} is a link, and nothing is written through links; name the folder itself")
    refuse_links(folder)
    if not folder.is_dir() or viewed_cache(folder) is not None or holds_nothing(folder):
        return
    try:
        packed = not CacheSettings.from_json(read_sealed(folder / SETTINGS)).codec.taught
    except (OSError, ValueError):
        packed = False
    if packed:
        raise OtherViewError(f"{folder} holds packed text, and not a view; name another folder, or remove it")
    raise UsageError(f"{folder} holds files that are not a view; name another folder")


def _opened(folder: Path, cache: Cache, settings: ViewSettings) -> View | None:
    """The view that is there and finished."""
    if not (folder / VIEW).exists():
        return None
    stated = sealed_record(folder / VIEW).get("settings")
    if isinstance(stated, dict):  # before the rest, which another version writes otherwise
        known = {"version": VERSION} if stated.get("version") == 2 else {}  # its rows hold more
        _refuse_other(folder, stated | known, settings)
    return View(folder, cache)


def _refuse_other(folder: Path, there: Mapping[str, Any], wanted: Mapping[str, Any]) -> None:
    if changed := [_CALLED.get(key, key) for key in wanted if there.get(key) != wanted[key]]:
        raise OtherViewError(
            f"{folder} holds the view of another {' and another '.join(changed)}; name another folder, or remove it"
        )


def _build_split(
    folder: Path,
    maker: _Maker,
    reader: CacheReader,
    cells: Cells,
    progress: Callable[[int], None] | None,
) -> tuple[list[ViewShard], LabelCounts]:
    """Publish the shards of a split that are missing; what view.json states of all."""
    found: list[ViewShard] = []
    total, next_token, skipped, after = _NOTHING, 0, 0, -1
    digest = json_digest(maker.settings)
    while (record := _finished(folder, reader.split, len(found), maker.seq_len, digest)) is not None:
        found.append({"sequences": record["sequences"], "sha256": record["sha256"]})
        total += record["tally"]
        next_token, skipped = record["next"]
        after = next_token
        if record["last"]:
            return found, total
    joined, worker = _joined(reader), maker.alignment.transcoder()

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
        stored = np.zeros(len(taken), row_type(maker.seq_len, VERSION))
        for each, row in zip(stored, taken, strict=True):
            each["tokens"], each["loss_mask"], each["segments"] = row.tokens, row.loss_mask, row.segments
            each["source"] = np.where(row.loss_mask, row.kept["source"], -1)
            each["prefix"] = np.where(each["source"] >= 0, row.kept["prefix"], 0)
        path = folder / f"{reader.split}-{len(found):05d}.npy"
        with published(path, "view.shard") as temporary, open(temporary, "wb") as file:
            np.save(file, stored, allow_pickle=False)
        at = stored["source"] >= 0
        taught = np.stack([row.kept["taught"] for row in taken])[at] if taken else np.empty(0, np.int64)
        begins = stored["prefix"][at] == 0
        one, other = cells.of_teacher[taught], cells.of_student[stored["tokens"][:, 1:][at]]
        documents, left_out = worker.count(after, math.inf if last else next_token)
        tally = LabelCounts(
            labels=int(stored["loss_mask"].sum()),
            boundaries=int(begins.sum()),
            disagree=int((begins & (one != other) & (one >= 0)).sum()),
            inside=int((~begins).sum()),
            documents=documents,
            left_out=left_out,
        )
        after, total = next_token, total + tally
        # by shards, and not as soon as a worker sees them: where a build is refused, one that was killed is, too
        if last or total.documents >= _ENOUGH:
            worker.refuse_loss(total.documents, total.left_out)
        record = {
            "settings": digest,
            "sequences": len(taken),
            "sha256": file_digest(path),
            "last": last,
            "tally": tally,
            "next": (next_token, place),
        }
        publish_json(path.with_suffix(".json"), {**record, "tally": vars(tally)}, "view.sidecar")
        found.append({"sequences": len(taken), "sha256": record["sha256"]})
        faults.point("view.after-shard")
        if progress:
            progress(sum(each["sequences"] for each in found))
    return found, total


def _finished(folder: Path, split: str, number: int, seq_len: int, digest: str) -> ViewSidecar | None:
    """The sidecar of a shard that is there and whole."""
    path = folder / f"{split}-{number:05d}.npy"
    try:
        record = typed(read_sealed(path.with_suffix(".json")), ViewSidecar)
        form = row_type(seq_len, VERSION), (record["sequences"],)
        if record["settings"] == digest and array_digest(path, *form) == record["sha256"]:
            return record
    except (OSError, ValueError):
        pass
    return None


def _entropy_kept(reader: CacheReader, cells: Cells) -> float | None:
    """Entropy of the kept entries by cell, as a share of that by token, over some rows; None without targets."""
    stated = reader.manifest.settings
    most = min(len(reader), -(-_MERGED_FROM // stated.seq_len))  # of a cache elsewhere no other shards are needed
    count = min(_MEASURED_ROWS if stated.codec.coded else 1, most)
    batch = reader.read(np.linspace(0, most - 1, count).astype(int).tolist())
    if batch.targets is None:
        return None
    at = batch.loss_mask.flatten().nonzero().squeeze(1)
    ids, _ = batch.targets[:1].resolved().listed()
    at = at[:: max(1, len(at) * ids.shape[1] // _MEASURED)]
    ids, mass = batch.targets.map(lambda _, each: each[at]).resolved().listed()
    mass = mass.double()
    place = torch.from_numpy(cells.of_teacher)[ids.clamp(max=len(cells.of_teacher) - 1)]
    mass = mass.where((ids < len(cells.of_teacher)) & (place >= 0), 0.0)
    row = torch.arange(len(ids))[:, None] * (cells.count + 1)
    _, group = (row + place.clamp(min=0)).unique(return_inverse=True)  # an array of rows and cells may take all memory
    by_cell = torch.bincount(group.flatten(), mass.flatten())
    whole, kept = (-(each * each.clamp(min=1e-30).log()).sum().item() for each in (mass, by_cell))
    return kept / whole if whole else 1.0
