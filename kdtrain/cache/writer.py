"""Building a cache: rows through the teacher into shards, each complete or absent.

A cache is built in this order: settings.json; per shard the HDF5 file, then its sidecar; at the end
index.h5 and the manifest. Each is written as .tmp, flushed, renamed. A killed build loses the shard in
work: started again, it passes over each shard whose sidecar, size and digest are right and whose tokens are
those of today's rows. Encoding runs between two forwards of the teacher; a thread writes one batch while
the teacher works on the next.

What it gives up: the rows of a shard (tokens, not targets) are held in memory, and shards that other ranks
build are read from the data by every rank.
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
from kdtrain.cache import fidelity, layout
from kdtrain.cache.claim import begin, claim, make_folder
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
from kdtrain.cache.reader import batch_of, read_arrays
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

    def digest(self) -> str:
        """SHA-256 over all three, so that a shard of other rows is noticed."""
        sha = hashlib.sha256()
        for part, dtype in ((self.tokens, "<u4"), (self.loss_mask, "u1"), (self.segments, "<u4")):
            sha.update(np.ascontiguousarray(part, dtype=dtype).tobytes())
        return sha.hexdigest()


def _shards_of(rows: Iterator[Row], number: int) -> Iterator[_Rows]:
    while part := list(islice(rows, number)):
        names = ("tokens", "loss_mask", "segments")
        yield _Rows(*(np.stack([getattr(row, name) for row in part]) for name in names))


class CacheWriter:
    """Builds or goes on with the cache in `folder`; `write_cache` drives it for one process.

    settings: what to build; a folder that was begun or finished with others is refused (UsageError that
    names them). teacher: None exactly for the codec `tokens`; called under no_grad with at most
    `batch_size` sequences. tokenizer: a folder, or anything with `save_pretrained(folder)`; its files are
    copied into the cache. rank, world: this process builds the shards s with s % world == rank; rank 0
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
        assert (teacher is None) == (settings.codec.kind == "tokens"), "only the codec 'tokens' has no teacher"
        self.folder, self.settings, self.teacher = Path(folder), settings, teacher
        self.batch_size, self.progress, self.rank, self.world = batch_size, progress, rank, world
        self._splits: dict[str, list[tuple[str, int, str]]] = {}  # name, sequences, digest of the rows
        self._tokens: dict[str, Any] = {}
        self._done = 0
        self.manifest = claim(self.folder, settings)
        """The manifest if the cache is finished already: there is nothing to do."""
        if self.manifest is None and rank == 0:
            begin(self.folder, settings, tokenizer)
        elif self.manifest is None:
            make_folder(self.folder)

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
            if number % self.world == self.rank and not self._is_built(name, digest):
                self._build_shard(split, number * size, name, part, digest)
            else:
                self._advance(len(part.tokens))
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

    def _is_built(self, name: str, digest: str) -> bool:
        try:
            record = read_sidecar(self.folder, name)
        except (OSError, ValueError):
            return False
        same = record["rows_sha256"] == digest and record["settings_sha256"] == self.settings.digest()
        return same and shard_problem(self.folder, record) is None

    def _build_shard(self, split: str, first: int, name: str, part: _Rows, digest: str) -> None:
        number, spec = len(part.tokens), self.settings.codec
        with published(layout.shard_path(self.folder, name), "cache.shard") as temporary:
            with layout.creating(temporary) as (file, check):
                layout.create_shard(file, spec, self.settings.seq_len, split, first, number)
                self._fill(file, check, split, first, part)
                file.flush()
                stored = {key: dataset.id.get_storage_size() for key, dataset in file.items()}
                faults.point("cache.shard.before-close")
            record = {"sha256": file_digest(temporary), "bytes": temporary.stat().st_size}
        record |= {
            "name": name,
            "split": split,
            "first_sequence": first,
            "sequences": number,
            "stored": stored,
        }
        record |= {"rows_sha256": digest, "settings_sha256": self.settings.digest()}
        publish_json(layout.sidecar_path(self.folder, name), record, "cache.sidecar")

    def _fill(self, file: h5py.File, check: Callable[[], None], split: str, first: int, part: _Rows) -> None:
        pending: Future[None] | None = None
        with ThreadPoolExecutor(1, thread_name_prefix="cache-writer") as thread:
            for start in range(0, len(part.tokens), self.batch_size):
                batch = slice(start, min(start + self.batch_size, len(part.tokens)))
                arrays = self._encode(split, first + start, part, batch)
                if pending:
                    pending.result()
                    check()
                pending = thread.submit(_write, file, batch, arrays)
                self._advance(batch.stop - batch.start)
            assert pending
            pending.result()

    def _encode(self, split: str, first: int, part: _Rows, batch: slice) -> dict[str, np.ndarray]:
        tokens, segments = part.tokens[batch], part.segments[batch]
        arrays = {"tokens": tokens, "loss_mask": part.loss_mask[batch], "segments": segments}
        if self.teacher is None:
            return arrays
        tokens_BT1 = torch.from_numpy(tokens.astype(np.int64))
        segments_BT = torch.from_numpy(segments.astype(np.int64)) if self.settings.document_mask else None
        spec, seed = self.settings.codec, self.settings.seed
        with torch.no_grad():
            logits_BTV = self.teacher(tokens_BT1[:, :-1], segments_BT)
        assert logits_BTV.shape[-1] == spec.vocab_size, "the teacher's vocabulary is not the one of the settings"
        targets = encode_sequences(logits_BTV, tokens_BT1[:, 1:], spec, seed=seed, split=split, first=first)
        return {**arrays, **targets}

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
                if path.suffix == ".tmp" or (path.suffix in (".h5", ".json") and path.stem not in names):
                    path.unlink()

    def _summary(self, split: str, records: list[dict[str, Any]]) -> dict[str, Any]:
        keys = ("name", "sequences", "sha256", "bytes")
        return {
            "sequences": sum(record["sequences"] for record in records),
            "tokens_sha256": self._tokens[split].hexdigest(),
            "shards": [{key: record[key] for key in keys} for record in records],
        }

    def _measure(self) -> tuple[dict[str, Any] | None, dict[str, Any] | None]:
        if self.teacher is None:
            return None, None
        split = "validation" if "validation" in self._splits else next(iter(self._splits))
        name, sequences, _ = self._splits[split][0]
        spec, length = self.settings.codec, self.settings.seq_len
        number, positions = fidelity.sample_size(sequences, length, spec.vocab_size)
        with h5py.File(layout.shard_path(self.folder, name), "r") as file:
            batch = batch_of(read_arrays(file, np.arange(number)), spec)
        masked = self.settings.document_mask
        found, span = fidelity.measure(batch, self.teacher, document_mask=masked, positions=positions)
        return {"split": split, **found}, span


def write_cache(
    folder: Path | str, settings: CacheSettings, splits: Mapping[str, Iterable[Row]], **options: Any
) -> Manifest:
    """Build all `splits` and finish, in one process; a finished cache of these settings stays untouched."""
    writer = CacheWriter(folder, settings, **options)
    if writer.manifest is None:
        for split, rows in splits.items():
            writer.build(split, rows)
        writer.finish()
    assert writer.manifest
    return writer.manifest


def _write(file: h5py.File, batch: slice, arrays: dict[str, np.ndarray]) -> None:
    for name, values in arrays.items():
        file[name][batch] = values
    faults.point("cache.shard.after-batch")


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
