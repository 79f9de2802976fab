"""Makes a view: a cache in the rows of a student with another tokenizer, beside the run (`view_format`).

A row has the student's tokens, and for each label where in the cache the teacher predicts the same bytes; its
numbers stay in the cache, and `ViewReader` joins both when it reads. A build that was killed begins anew, and ends in
the same files, as the rows are a pure function of the cache and the settings.

Cells that conflict are merged from the first two million tokens of the training text; what that costs is measured on
the teacher's numbers of a few rows, and what still disagrees on the whole text. Above 5 % the view is refused.

Given up: one process builds it, from the beginning to the end. A row of the student needs the teacher's numbers of two
or three rows of the cache.

Shapes: n rows, T positions, V entries of the teacher's tokenizer, S of the student's, C cells, K entries.
"""

import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch

from kdtrain import faults
from kdtrain.cache.format.names import CELLS, LOCK, SETTINGS, TOKENIZER, VIEW
from kdtrain.cache.read.reader import CacheReader, LocalCache
from kdtrain.cache.write.folder import copy_tokenizer
from kdtrain.data.packed import rows_of
from kdtrain.errors import UsageError, making
from kdtrain.files import Lock, file_digest, json_digest, publish_json, published, refuse_links, sweep
from kdtrain.models.tokenizer import load_tokenizer, tokenizer_digest
from kdtrain.tokenizers.alignment import Alignment
from kdtrain.tokenizers.cells import Cells
from kdtrain.tokenizers.transcode import Transcoder, documents_of, is_joined, teacher_stream
from kdtrain.tokenizers.view import View
from kdtrain.tokenizers.view_format import (
    CELL,
    VERSION,
    LabelCounts,
    ViewRecord,
    ViewSettings,
    ViewShard,
    own_data,
    row_type,
    shard_path,
    viewed_settings,
)

_ROWS = 1024
_MERGED_FROM = 2_000_000
_MEASURED_ROWS = 64
_MEASURED = 1 << 22
"""Entries that are measured."""
_AT_ONCE = 256
_ENOUGH = 1000
"""Documents after which a share of them that is left out means something."""
_CALLED = {
    "version": "version of kdtrain",
    "events": "table of special tokens",
    "seq_len": "length of rows",
    "rows": "size of shards",
}
"""Keys of the settings in messages."""


class OtherViewError(UsageError):
    """An error: the folder holds a view of another cache, tokenizer or setting."""


def build_view(
    folder: Path,
    cache: LocalCache,
    tokenizer: Any,
    *,
    events: Mapping[str, str] | None = None,
    seq_len: int | None = None,
    splits: Sequence[str] | None = None,
    progress: Callable[[int], None] = lambda rows: None,
) -> View:
    """Return the view in `folder` for the student's `tokenizer`; make it where it is not there.

    events: see `SpecialTokens.match`. seq_len: T of a row; by default the cache's. splits: by default all of the cache.
    progress: gets the rows done.

    A finished view is opened without a lock; a process that makes the same one is waited for.

    UsageError: `Alignment`, `Transcoder`, or the folder is a link, holds other files, or another view.
    RunError: a shard is damaged, the disk is full.
    """
    _refuse_foreign(folder)
    alignment = _alignment(cache, tokenizer, events)
    length = seq_len or cache.manifest.settings.seq_len
    settings: ViewSettings = {
        "version": VERSION,
        "cache": cache.manifest.digest,
        "tokenizer": tokenizer_digest(tokenizer),
        "events": [[int(one), int(other)] for one, other in alignment.table.table.items()],
        "seq_len": length,
        "rows": _ROWS,
    }
    with making(folder):
        folder.mkdir(parents=True, exist_ok=True)
    if (folder / VIEW).exists():
        _refuse_other(folder, settings, True)
        return View(folder, cache)
    message = f"another process is making another view in {folder} now; wait for it, or name another folder"
    lock = Lock(folder / f"{LOCK}0", message, json_digest(settings), math.inf)
    try:
        sweep(folder)
        done = (folder / VIEW).exists()
        _refuse_other(folder, settings, done)
        if done:
            return View(folder, cache)
        publish_json(folder / SETTINGS, {**settings}, "view.settings")
        copy_tokenizer(tokenizer, folder / TOKENIZER)
        cells = _merged_cells(alignment, cache["train"])
        spelling = alignment.spelling
        parts = [cells.of_teacher, cells.of_student, spelling.starts, spelling.tokens]
        with published(folder / CELLS, "view.cells") as path, open(path, "wb") as file:
            np.save(file, np.concatenate(parts).astype(CELL), allow_pickle=False)
        built = {
            split: _build_split(folder, alignment, cache[split], length, cells, progress)
            for split in (cache if splits is None else splits)
        }
        record = ViewRecord(
            settings=settings,
            shards={split: shards for split, (shards, _) in built.items()},
            cells={
                "sha256": file_digest(folder / CELLS),
                "teacher": len(cells.of_teacher),
                "student": len(cells.of_student),
                "count": cells.count,
                "spelled": len(spelling.tokens),
            },
            tallies={split: tally for split, (_, tally) in built.items()},
            events=alignment.events,
            entropy_kept=_entropy_kept(cache["train"], cells),
        )
        publish_json(folder / VIEW, asdict(record), "view.record")
        return View(folder, cache)
    finally:
        lock.release()


def _refuse_foreign(folder: Path) -> None:
    """Raise a UsageError if the folder is a link, or holds links or files that no builder of a view made."""
    if folder.is_symlink():
        raise UsageError(f"{folder} is a link, and nothing is written through links; name the folder itself")
    refuse_links(folder)
    found = own_data(folder)
    if not folder.is_dir() or found in ("view", "nothing"):
        return
    if found == "tokens":
        raise OtherViewError(f"{folder} holds packed text, and not a view; name another folder, or remove it")
    raise UsageError(f"{folder} holds files that are not a view; name another folder")


def _refuse_other(folder: Path, settings: ViewSettings, finished: bool) -> None:
    """Raise an OtherViewError if the folder holds a view of other settings than `settings`."""
    there = viewed_settings(folder) or settings
    if finished and there["version"] == 2:  # its rows hold more
        there = {**there, "version": VERSION}
    if changed := [_CALLED.get(key, key) for key, each in settings.items() if there.get(key) != each]:
        raise OtherViewError(
            f"{folder} holds the view of another {' and another '.join(changed)}; name another folder, or remove it"
        )


def _alignment(cache: LocalCache, tokenizer: Any, given: Mapping[str, str] | None) -> Alignment:
    """Align the cache's tokenizer and a student's."""
    if cache.remote is not None:
        cache.remote.bring_tokenizer()
    teacher = load_tokenizer(cache.tokenizer)
    ends = cache.manifest.end_tokens
    pad = teacher.pad_token_id
    # what fills the rows behind the answers of a teacher that wrote the text (`models.tokenizer`) is left out
    fills = ends and pad is not None and pad not in {*ends, teacher.eos_token_id, teacher.bos_token_id}
    return Alignment(teacher, tokenizer, {**({teacher.pad_token: ""} if fills else {}), **(given or {})})


def _texts(reader: CacheReader, stop: int) -> Iterator[dict[str, np.ndarray]]:
    for start in range(0, stop, _AT_ONCE):
        yield reader.text(range(start, min(start + _AT_ONCE, stop)))


def _documents(worker: Transcoder, reader: CacheReader, looked_at: int) -> Iterator[np.ndarray]:
    """Yield the documents of a split in the teacher's tokens. looked_at: rows that tell if they are one stream."""
    joined = is_joined(each["tokens"] for each in _texts(reader, min(looked_at, len(reader))))
    return documents_of(teacher_stream(_texts(reader, len(reader)), joined, worker.teacher))


def _merged_cells(alignment: Alignment, reader: CacheReader) -> Cells:
    """Return the cells, merged from the beginning of the text: the same whether or not the split is wanted whole."""
    worker = alignment.transcoder()
    pairs = []
    read = 0
    for documents in _documents(worker, reader, -(-_MERGED_FROM // reader.manifest.settings.seq_len)):
        out = worker(documents)
        out = out[(out["source"] >= 0) & (out["prefix"] == 0)]
        pairs.append(np.stack([out["taught"], out["token"]]))
        read += len(documents)
        if read >= _MERGED_FROM:
            break
    worker.refuse_loss()
    return alignment.merged(*np.concatenate(pairs, 1)) if pairs else alignment.cells


def _build_split(
    folder: Path,
    alignment: Alignment,
    reader: CacheReader,
    seq_len: int,
    cells: Cells,
    progress: Callable[[int], None],
) -> tuple[list[ViewShard], LabelCounts]:
    """Publish the shards of a split; return them, and the counts of labels that view.json states."""
    worker = alignment.transcoder()
    shards = list[ViewShard]()
    counts = Counter[str]()
    last = False
    stream = map(worker, _documents(worker, reader, len(reader)))
    rows = rows_of(stream, seq_len, reader.manifest.settings.document_mask)
    while not last:
        taken = list(islice(rows, _ROWS))
        last = len(taken) < _ROWS
        stored = np.zeros(len(taken), row_type(seq_len))
        for each, row in zip(stored, taken, strict=True):
            each["tokens"], each["loss_mask"], each["segments"] = row.tokens, row.loss_mask, row.segments
            each["source"] = np.where(row.loss_mask, row.kept["source"], -1)
            each["prefix"] = np.where(each["source"] >= 0, row.kept["prefix"], 0)
        path = shard_path(folder, reader.split, len(shards))
        with published(path, "view.shard") as temporary, open(temporary, "wb") as file:
            np.save(file, stored, allow_pickle=False)
        at = stored["source"] >= 0
        taught = np.stack([row.kept["taught"] for row in taken])[at] if taken else np.empty(0, np.int64)
        begins = stored["prefix"][at] == 0
        one = cells.of_teacher[taught]
        other = cells.of_student[stored["tokens"][:, 1:][at]]
        counts["labels"] += int(stored["loss_mask"].sum())
        counts["boundaries"] += int(begins.sum())
        counts["disagree"] += int((begins & (one != other) & (one >= 0)).sum())
        counts["inside"] += int((~begins).sum())
        if last or worker.documents >= _ENOUGH:
            worker.refuse_loss()
        shards.append({"sequences": len(taken), "sha256": file_digest(path)})
        faults.point("view.after-shard")
        progress(sum(each["sequences"] for each in shards))
    return shards, LabelCounts(**counts, documents=worker.documents, left_out=worker.left_out)


def _entropy_kept(reader: CacheReader, cells: Cells) -> float | None:
    """Return the kept entries' entropy by cell, as a share of that by token, over some rows; None without targets."""
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
