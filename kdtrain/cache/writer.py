"""Building a cache: rows through the teacher into shards, each complete or absent.

A cache is built in this order: settings.json; per shard the HDF5 file, then its sidecar; at the end
index.h5 and the manifest. Each is written as .tmp, flushed, renamed. A killed build loses the shard in
work: started again, it passes over each shard whose sidecar, size and digest are right and whose tokens are
those of today's rows. A thread encodes and writes one batch while the teacher works on the next.

A sequence for which the teacher gives a logit that is no number is kept with its loss masked out, and
counted; more than one in a thousand of them stop the build.

What it gives up: the rows of a shard, and what is kept of its first sequences, are held in memory; the
logits of two batches live at once; shards that other ranks build are read from the data by every rank.
"""

import hashlib
import importlib.metadata
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, Protocol

import h5py
import numpy as np
import torch
from torch import Tensor

from kdtrain import __version__, faults
from kdtrain.cache import fidelity, layout, topk
from kdtrain.cache.beside import Beside
from kdtrain.cache.claim import Lock, begin, claim, make_folder, remove_stale_lock
from kdtrain.cache.codec import encode_sequences
from kdtrain.cache.files import (
    PUBLISH_POINTS,
    file_digest,
    publish_json,
    published,
    writing,
)
from kdtrain.cache.provenance import (
    CacheSettings,
    Manifest,
    read_manifest,
    read_sidecar,
    shard_problem,
)
from kdtrain.cache.reader import Shard, batch_of
from kdtrain.cache.shard import ShardWriter
from kdtrain.errors import RunError, UsageError

Teacher = Callable[[Tensor, Tensor | None], Tensor]
"""CPU int64 tokens [B,T] and segments [B,T] (None without a document mask) -> logits [B,T,V], any device."""
Progress = Callable[[int, int | None], None]
"""(sequences done so far, how many in all or None)."""

_PUBLISHED = ("cache.settings", "cache.shard", "cache.sidecar", "cache.index", "cache.manifest")
FAULT_POINTS = (
    "cache.shard.after-batch",
    "cache.shard.before-close",
    "cache.tokenizer.before-rename",
    "cache.before-finish",
    *(f"{name}.{point}" for name in _PUBLISHED for point in PUBLISH_POINTS),
)
"""Every labelled place of a build, for `KDTRAIN_FAULT`."""


class Row(Protocol):
    """A packed row, see `data.packing`."""

    @property
    def tokens(self) -> np.ndarray: ...  # [T+1]
    @property
    def loss_mask(self) -> np.ndarray: ...  # [T] bool
    @property
    def segments(self) -> np.ndarray: ...  # [T]


@dataclass(frozen=True)
class _Rows:
    """The rows of one shard: n sequences."""

    tokens: np.ndarray
    loss_mask: np.ndarray
    segments: np.ndarray
    kept: dict[str, np.ndarray]
    """What is kept of them, [n, T, ...], where that is known already; else empty."""

    def digest(self) -> str:
        """SHA-256 over all three, so that a shard of other rows is noticed."""
        sha = hashlib.sha256()
        for part, dtype in ((self.tokens, "<u4"), (self.loss_mask, "u1"), (self.segments, "<u4")):
            sha.update(np.ascontiguousarray(part, dtype=dtype).tobytes())
        return sha.hexdigest()


def _shards_of(rows: Iterator[Row], number: int) -> Iterator[_Rows]:
    while part := list(islice(rows, number)):
        known = [getattr(row, "kept", {}) for row in part]
        yield _Rows(
            tokens=np.stack([row.tokens for row in part]),
            loss_mask=np.stack([row.loss_mask for row in part]),
            segments=np.stack([row.segments for row in part]),
            kept={name: np.stack([each[name] for each in known]) for name in known[0]},
        )


class CacheWriter:
    """Builds or goes on with the cache in `folder`; `write_cache` drives it for one process.

    settings: what to build; a folder that was begun or finished with others is refused (UsageError that
    names them), and so is one that another process builds in. teacher: called under no_grad with at most
    `batch_size` sequences; None for the codec `tokens`, and where rows bring what is kept of them in an
    attribute `kept` (`topk.keep`). tokenizer: a folder, or anything with `save_pretrained(folder)`; its files
    are copied into the cache. rank, world: this process builds the shards s with s % world == rank and then
    calls `close`; rank 0
    alone calls `finish`, after all.
    """

    def __init__(
        self,
        folder: Path | str,
        settings: CacheSettings,
        *,
        teacher: Teacher | None,
        tokenizer: Any = None,
        batch_size: int = 16,
        progress: Progress | None = None,
        rank: int = 0,
        world: int = 1,
    ) -> None:
        assert teacher is None or settings.codec.kind != "tokens", "the codec 'tokens' has no teacher"
        self.folder, self.settings, self.teacher = Path(folder), settings, teacher
        self.batch_size, self.progress, self.rank, self.world = batch_size, progress, rank, world
        self._splits: dict[str, list[tuple[str, int, str]]] = {}  # name, sequences, digest of the rows
        self._tokens: dict[str, Any] = {}
        self._done = 0
        self._broken: list[str] = []
        self.manifest = claim(self.folder, settings)
        """The manifest if the cache is finished already: there is nothing to do."""
        self._lock: Lock | None = None
        if self.manifest is not None:
            remove_stale_lock(self.folder, rank)
        else:
            make_folder(self.folder)
            self._lock = Lock(self.folder, rank)
            self.manifest = claim(self.folder, settings)  # another may have begun or finished it meanwhile
        if self.manifest is None and rank == 0:
            begin(self.folder, settings, tokenizer)

    def close(self) -> None:
        """Let other builders in; nothing can be built after it."""
        if self._lock:
            self._lock.release()

    def build(self, split: str, rows: Iterable[Row]) -> None:
        """Build what is missing of a split. UsageError: no row. RunError: full disk, broken teacher."""
        limited = islice(rows, self.settings.sequences.get(split))
        shards = self._splits[split] = []
        self._tokens[split] = hashlib.sha256()
        size = self.settings.sequences_per_shard
        for number, part in enumerate(_shards_of(iter(limited), size)):
            self._check(part)
            name, digest = layout.shard_name(split, number), part.digest()
            shards.append((name, len(part.tokens), digest))
            self._tokens[split].update(np.ascontiguousarray(part.tokens, dtype="<u4").tobytes())
            if number % self.world != self.rank:
                self._advance(len(part.tokens))
            elif record := self._built(name, digest):
                self._broken += record["broken"]
                self._advance(len(part.tokens))
            else:
                self._build_shard(split, number * size, name, part, digest)
        if not shards:
            raise UsageError(
                f"the {split} data give no whole sequence of {self.settings.seq_len} tokens; "
                "use more data or a smaller --seq-len"
            )

    def _check(self, part: _Rows) -> None:
        length = self.settings.seq_len
        assert part.tokens.shape[1] == length + 1 and part.segments.max() < max(length, 1), "rows do not fit"
        if part.tokens.min() < 0 or part.tokens.max() >= self.settings.vocab_size:
            raise UsageError(
                f"the tokenizer gives token {part.tokens.max()}, the teacher's vocabulary has only "
                f"{self.settings.vocab_size}: use the teacher's own tokenizer"
            )

    def _built(self, name: str, digest: str) -> dict[str, Any] | None:
        try:
            record = read_sidecar(self.folder, name)
        except (OSError, ValueError):
            return None
        same = record["rows_sha256"] == digest and record["settings_sha256"] == self.settings.digest()
        return record if same and shard_problem(self.folder, record) is None else None

    def _build_shard(self, split: str, first: int, name: str, part: _Rows, digest: str) -> None:
        number, spec = len(part.tokens), self.settings.codec
        with published(layout.shard_path(self.folder, name), "cache.shard") as temporary:
            with layout.creating(temporary) as (file, check):
                layout.create_shard(file, spec, self.settings.seq_len, split, first, number)
                shard = ShardWriter(file, check, spec, self.settings.seq_len, split, first)
                self._fill(shard, split, first, part)
                stored = shard.finish()
                faults.point("cache.shard.before-close")
            record = {"sha256": file_digest(temporary), "bytes": temporary.stat().st_size}
        record |= {
            "name": name,
            "split": split,
            "first_sequence": first,
            "sequences": number,
            "stored": stored,
            "broken": shard.broken,
        }
        record |= {"rows_sha256": digest, "settings_sha256": self.settings.digest()}
        publish_json(layout.sidecar_path(self.folder, name), record, "cache.sidecar")

    def _fill(self, shard: ShardWriter, split: str, first: int, part: _Rows) -> None:
        waiting: tuple[int, Future[None]] | None = None
        with ThreadPoolExecutor(1, thread_name_prefix="cache-writer") as thread:
            for start in range(0, len(part.tokens), self.batch_size):
                batch = slice(start, min(start + self.batch_size, len(part.tokens)))
                rows = {name: getattr(part, name)[batch] for name in ("tokens", "loss_mask", "segments")}
                logits_BTV = self._ask(rows)
                if waiting:
                    self._end(shard, *waiting)
                known = {name: values[batch] for name, values in part.kept.items()}
                job = thread.submit(
                    self._take, shard, rows, known, logits_BTV, Beside(logits_BTV), split, first + start
                )
                waiting = (batch.stop - batch.start, job)
                del logits_BTV, job
            assert waiting
            self._end(shard, *waiting)
        self._broken += shard.broken

    def _end(self, shard: ShardWriter, sequences: int, job: "Future[None]") -> None:
        """Wait for the batch in work, of so many sequences, and count it."""
        job.result()
        self._advance(sequences)
        self._stop_if_broken(self._broken + shard.broken)

    def _ask(self, rows: dict[str, np.ndarray]) -> Tensor | None:
        if self.teacher is None:
            return None
        tokens_BT = torch.from_numpy(rows["tokens"][:, :-1].astype(np.int64))
        segments_BT = torch.from_numpy(rows["segments"].astype(np.int64)) if self.settings.document_mask else None
        with torch.no_grad():
            logits_BTV = self.teacher(tokens_BT, segments_BT)
        width = self.settings.vocab_size
        assert logits_BTV.shape[-1] == width, "the teacher's vocabulary is not the one of the settings"
        return logits_BTV

    def _take(
        self,
        shard: ShardWriter,
        rows: dict[str, np.ndarray],
        kept: dict[str, np.ndarray],
        logits_BTV: Tensor | None,
        beside: Beside,
        split: str,
        first: int,
    ) -> None:
        assert kept or logits_BTV is not None or self.settings.codec.kind == "tokens", "no teacher and no targets"
        if logits_BTV is not None:
            labels_BT = torch.from_numpy(rows["tokens"][:, 1:].astype(np.int64))
            spec, seed = self.settings.codec, self.settings.seed
            with beside.stream():
                kept = encode_sequences(logits_BTV, labels_BT, spec, seed=seed, split=split, first=first)
        shard.add(rows, kept)

    def _stop_if_broken(self, broken: list[str], finished: bool = False) -> None:
        """RunError: more than one in a thousand sequences have no numbers; before the end only where the
        rest cannot change that."""
        limits = list(self.settings.sequences.values())
        known = None not in limits and len(limits) >= len(self._splits)
        total = max(self._done, sum(n or 0 for n in limits) if known else 10_000)
        if len(broken) * 1000 > (self._done if finished else total):
            raise RunError(
                f"the teacher gave logits that are not numbers for {len(broken)} of {self._done} sequences (the first "
                f"is {broken[0]}), more than one in a thousand: load it in another dtype (bfloat16 or float32)"
            )

    def _advance(self, sequences: int) -> None:
        self._done += sequences
        if self.progress:
            limits = list(self.settings.sequences.values())
            known = limits and len(limits) >= len(self._splits) and None not in limits
            self.progress(self._done, sum(n or 0 for n in limits) if known else None)

    def finish(self) -> Manifest:
        """Measure the fidelity, write index and manifest. RunError: a shard of another rank is missing."""
        assert self.rank == 0 and self._splits
        with writing(self.folder):
            faults.point("cache.before-finish")
        sidecars = {split: [self._sidecar(*shard) for shard in shards] for split, shards in self._splits.items()}
        broken = [name for records in sidecars.values() for record in records for name in record["broken"]]
        self._stop_if_broken(broken, finished=True)
        self._remove_strays({record["name"] for records in sidecars.values() for record in records})
        measured, span = self._measure()
        index, spec, length = self.folder / layout.INDEX, self.settings.codec, self.settings.seq_len
        with published(index, "cache.index") as temporary:
            parts = {s: [(r["name"], r["sequences"]) for r in records] for s, records in sidecars.items()}
            layout.write_index(temporary, spec, length, parts)
        tokenizer = self.folder / layout.TOKENIZER
        files = sorted(path for path in tokenizer.rglob("*") if path.is_file())
        self.manifest = Manifest(
            settings=self.settings,
            splits={split: self._summary(split, records) for split, records in sidecars.items()},
            fidelity=measured,
            temperature_range=span,
            bytes_per_token=_bytes_per_token([r for records in sidecars.values() for r in records], length),
            index_sha256=file_digest(index),
            tokenizer_files={path.relative_to(tokenizer).as_posix(): file_digest(path) for path in files},
            versions=_versions(),
        )
        publish_json(self.folder / layout.MANIFEST, self.manifest.to_json(), "cache.manifest")
        self.manifest = read_manifest(self.folder)
        self.close()
        return self.manifest

    def _sidecar(self, name: str, sequences: int, digest: str) -> dict[str, Any]:
        try:
            record = read_sidecar(self.folder, name)
        except (OSError, ValueError) as error:
            path = layout.sidecar_path(self.folder, name)
            raise RunError(f"{path} is not there or damaged ({error}); run the same command again") from error
        if record["rows_sha256"] != digest or record["settings_sha256"] != self.settings.digest():
            raise RunError(f"the shard {name} of {self.folder} is of other data; run the same command again")
        return record

    def _remove_strays(self, names: set[str]) -> None:
        """Shards beyond the last, from data that was longer once, and half-written files."""
        with writing(self.folder / layout.SHARDS):
            for path in (self.folder / layout.SHARDS).iterdir():
                left = path.suffix == ".tmp" or path.stem not in names
                if left and layout.is_shard_file(path.name):
                    path.unlink()

    def _summary(self, split: str, records: list[dict[str, Any]]) -> dict[str, Any]:
        keys = ("name", "sequences", "sha256", "bytes")
        return {
            "sequences": sum(record["sequences"] for record in records),
            "broken": sum(len(record["broken"]) for record in records),
            "tokens_sha256": self._tokens[split].hexdigest(),
            "shards": [{key: record[key] for key in keys} for record in records],
        }

    def _measure(self) -> tuple[dict[str, Any] | None, dict[str, Any] | None]:
        if self.teacher is None:
            return None, None if self.settings.codec.kind == "tokens" else topk.RANGE
        split = "validation" if "validation" in self._splits else next(iter(self._splits))
        name, sequences, _ = self._splits[split][0]
        spec, length = self.settings.codec, self.settings.seq_len
        number, positions = fidelity.sample_size(sequences, length, spec.vocab_size)
        shard = Shard(layout.shard_path(self.folder, name), spec)
        batch = batch_of([shard.read(np.arange(number))], spec)
        shard.close()
        masked = self.settings.document_mask
        found, span = fidelity.measure(batch, self.teacher, document_mask=masked, positions=positions)
        return {"split": split, **found}, span


def write_cache(
    folder: Path | str, settings: CacheSettings, splits: Mapping[str, Iterable[Row]], **options: Any
) -> Manifest:
    """Build all `splits` and finish, in one process; a finished cache of these settings stays untouched."""
    writer = CacheWriter(folder, settings, **options)
    try:
        if writer.manifest is None:
            for split, rows in splits.items():
                writer.build(split, rows)
            writer.finish()
    finally:
        writer.close()
    assert writer.manifest
    return writer.manifest


def _bytes_per_token(records: list[dict[str, Any]], seq_len: int) -> dict[str, float]:
    tokens = sum(record["sequences"] for record in records) * seq_len
    names = list(records[0]["stored"])
    by_name = {name: sum(record["stored"][name] for record in records) / tokens for name in names}
    total = sum(record["bytes"] for record in records) / tokens
    return {**by_name, "overhead": total - sum(by_name.values()), "total": total}


def _versions() -> dict[str, str]:
    libraries = ("torch", "transformers", "numpy", "h5py", "hdf5plugin")
    found = {name: importlib.metadata.version(name) for name in libraries}
    return {"kdtrain": __version__, **found, "hdf5": h5py.version.hdf5_version}
