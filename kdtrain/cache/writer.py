"""Building a cache: packed rows through the teacher into shards, each complete or absent.

The order on disk: settings.json; per shard the HDF5 file, then its sidecar; at the end index.h5 and the manifest. Each
is written under a hidden name, flushed and renamed. A killed build loses the shard in work: a resume keeps each shard
whose sidecar, size and digest are right and whose tokens are those of today's rows. A file in the place of a shard that
no sidecar vouches for is moved aside. A thread encodes and writes one batch while the teacher works on the next.

The dictionary of a sparse shard (`compression`) is fitted to its first sequences, so the writer holds these in memory
until there are enough of them, or the shard ends. Which ones they are does not depend on the batches, so a shard is the
same for every batch size. A sequence with a non-finite logit is kept with its loss masked out, and counted; more than
one in a thousand of them stop the build.

Shard s is built by rank s % world, and its content does not depend on the number of ranks. The ranks go through the
data `world` shards at a time and meet before each forward of the teacher: each reports whether it has more to do, how
many sequences are done, and how many are broken. So they stop at the same batch, show one progress, and notice within a
batch that a rank is gone. A teacher that is sharded over the ranks needs all of them for each forward: a rank that has
nothing left runs an empty one.

What it gives up: the ranks wait for the slowest of them at each batch; the rows of a shard, and what is kept of its
first sequences, are held in memory; the logits of two batches live at once; every rank reads all of the data.
"""

import contextlib
import hashlib
import importlib.metadata
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import closing
from dataclasses import dataclass
from functools import cached_property
from itertools import chain, count, islice
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import torch
from torch import Tensor

from kdtrain import __version__, faults
from kdtrain.cache import codec, fidelity
from kdtrain.cache import format as cache_format
from kdtrain.cache.checks import check_structure
from kdtrain.cache.codec import CodecSpec, encode_sequences
from kdtrain.cache.compression import Arrays, Coding, fit_sequences
from kdtrain.cache.folder import file_digests, open_folder
from kdtrain.cache.manifest import (
    CacheSettings,
    Manifest,
    Sidecar,
    SplitRecord,
    read_manifest,
    read_sidecar,
    shard_problem,
)
from kdtrain.cache.reader import Shard, batch_of, shard_errors
from kdtrain.data.packing import PackedRow
from kdtrain.errors import RunError, UsageError, writing
from kdtrain.files import PUBLISH_POINTS, file_digest, json_digest, publish_json, published, read_sealed, set_aside
from kdtrain.ranks import all_gather_object, rank, world_size


@dataclass(frozen=True)
class ShardRows:
    """The rows of one shard: n sequences of `split`, from number `first` on."""

    name: str
    split: str
    first: int
    tokens: np.ndarray
    loss_mask: np.ndarray
    segments: np.ndarray
    kept: dict[str, np.ndarray]
    """What is kept of the teacher's distributions, [n, T, ...], where the rows bring it; else empty."""

    def __len__(self) -> int:
        return len(self.tokens)

    @cached_property
    def digest(self) -> str:
        """SHA-256 over tokens, loss_mask and segments: it tells a shard of other rows."""
        sha = hashlib.sha256()
        for part, dtype in ((self.tokens, "<u4"), (self.loss_mask, "u1"), (self.segments, "<u4")):
            sha.update(np.ascontiguousarray(part, dtype=dtype).tobytes())
        return sha.hexdigest()


def shards_of(split: str, rows: Iterator[PackedRow], number: int) -> Iterator[ShardRows]:
    """The rows of one shard after another, `number` of them each but the last."""
    for shard in count():
        part = list(islice(rows, number))
        if not part:
            return
        yield ShardRows(
            name=cache_format.shard_name(split, shard),
            split=split,
            first=shard * number,
            tokens=np.stack([row.tokens for row in part]),
            loss_mask=np.stack([row.loss_mask for row in part]),
            segments=np.stack([row.segments for row in part]),
            kept={name: np.stack([row.kept[name] for row in part]) for name in part[0].kept},
        )


class SideStream:
    """One stream on which another thread encodes tensors that the current stream is still computing.

    On the main stream each copy to the host would wait for the teacher's next forward, which is queued there already,
    and that forward would wait for the encoding. It serves one device; on a CPU it does nothing.
    """

    def __init__(self) -> None:
        self._stream: torch.cuda.Stream | None = None

    def ready(self, tensor: Tensor | None) -> torch.cuda.Event | None:
        """Mark where the current stream has computed a tensor; None if it is not on a GPU."""
        if tensor is None or not tensor.is_cuda:
            return None
        with torch.cuda.device(tensor.device):
            self._stream = self._stream or torch.cuda.Stream(tensor.device)
            event = torch.cuda.Event()
            event.record(torch.cuda.current_stream(tensor.device))
        return event

    @contextlib.contextmanager
    def after(self, ready: torch.cuda.Event | None) -> Iterator[None]:
        """Run the block on the stream once the tensor is there, and wait at the end until the stream is done.

        So the tensor may be freed after the block, although its memory belongs to another stream.
        """
        if ready is None or self._stream is None:
            yield
            return
        with torch.cuda.stream(self._stream):
            self._stream.wait_event(ready)
            try:
                yield
            finally:
                self._stream.synchronize()


_AT_ONCE = 16  # sequences packed at once: bounds the memory
_ROWS = ("tokens", "loss_mask", "segments")
_LIBRARIES = ("torch", "transformers", "numpy", "h5py", "hdf5plugin")


class ShardWriter:
    """Writes the sequences of one shard into `file`, which `format.create_shard` has laid out.

    check: raises the error of a failed write, see `format.creating`.
    """

    def __init__(self, file: h5py.File, check: Callable[[], None], spec: CodecSpec, part: ShardRows) -> None:
        self._file, self._check, self._spec, self._part = file, check, spec, part
        self._wanted = fit_sequences(spec, part.segments.shape[1]) if spec.kind == "sparse" else 0
        self._held: list[Arrays] = []
        self._coding: Coding | None = None
        self._taken = self._written = 0
        self.broken: list[str] = []
        """Sequences with a non-finite logit, as SPLIT and number."""

    def add(self, batch: slice, kept: Arrays) -> None:
        """Take the sequences `batch` of the shard, the next ones, and what is kept of them."""
        arrays = {name: getattr(self._part, name)[batch] for name in _ROWS}
        broken = kept.get("broken", np.zeros(len(arrays["tokens"]), bool))
        self.broken += [f"{self._part.split} {self._part.first + self._taken + b}" for b in np.flatnonzero(broken)]
        arrays["loss_mask"] = np.where(broken[:, None], cache_format.BROKEN, arrays["loss_mask"]).astype(np.uint8)
        self._held.append(arrays | {name: values for name, values in kept.items() if name != "broken"})
        self._taken += len(broken)
        if self._taken >= self._wanted:
            self._write_held()
        faults.point("cache.shard.after-batch")

    def finish(self) -> dict[str, int]:
        """Write what is held back; compressed bytes by data set, all of the dictionary as one."""
        if self._held:
            self._write_held()
        self._file.flush()
        found = {
            name: each.id.get_storage_size() for name, each in self._file.items() if isinstance(each, h5py.Dataset)
        }
        if self._coding is not None:
            lists = self._file[cache_format.DICTIONARY].values()
            found[cache_format.DICTIONARY] = sum(each.id.get_storage_size() for each in lists)
        return found

    def _write_held(self) -> None:
        arrays = {name: np.concatenate([each[name] for each in self._held]) for name in self._held[0]}
        self._held = []
        if self._spec.kind == "sparse" and self._coding is None:
            first = {name: values[: self._wanted] for name, values in arrays.items()}
            self._coding = Coding.fit(first["tokens"], first, self._spec)
            cache_format.write_dictionary(self._file, self._coding.to_arrays())
        for start in range(0, len(arrays["tokens"]), _AT_ONCE):
            part = {name: values[start : start + _AT_ONCE] for name, values in arrays.items()}
            if self._coding is not None:
                part = {name: part[name] for name in _ROWS} | self._coding.pack(part["tokens"], part)
            number = len(part["tokens"])
            for name, values in part.items():
                self._file[name][self._written : self._written + number] = values
            self._written += number
            self._check()


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


class CacheWriter:
    """Builds or resumes the cache in `folder`; `write_cache` drives it.

    Args:
        settings: what to build. A folder that holds a cache of others, or in which another command builds, is refused
            (UsageError).
        teacher: called under no_grad with at most `batch_size` sequences; None for the codec `tokens`, and where rows
            bring what is kept of them (`PackedRow.kept`).
        sharded: True when a forward of the teacher needs all ranks.
        tokenizer: a folder, or anything with `save_pretrained(folder)`; its files are copied into the cache.
        all_ranks: True when all ranks build, calling the same methods in the same order; False for this process alone.
    """

    def __init__(
        self,
        folder: Path | str,
        settings: CacheSettings,
        *,
        teacher: Teacher | None,
        sharded: bool = False,
        tokenizer: Any = None,
        batch_size: int = 16,
        progress: Progress | None = None,
        all_ranks: bool = False,
    ) -> None:
        assert teacher is None or settings.codec.kind != "tokens", "the codec 'tokens' has no teacher"
        self.folder, self.settings, self.teacher = Path(folder), settings, teacher
        self.batch_size, self.progress = batch_size, progress
        self.rank, self.world = (rank(), world_size()) if all_ranks else (0, 1)
        self.sharded = sharded and teacher is not None
        self._splits: dict[str, list[tuple[str, int, str]]] = {}  # name, sequences, digest of the rows
        self._tokens: dict[str, Any] = {}
        self._broken: list[str] = []
        self._done = self._found_broken = 0
        """Sequences of this rank, as reported to the others."""
        self._side = SideStream()
        self._compiled: set[int] = set()
        """Sizes of the batches that teacher and encoder have seen."""
        self.manifest, self._lock = open_folder(self.folder, settings, tokenizer, all_ranks)
        """The manifest if the cache is finished already: there is nothing to build."""

    def close(self) -> None:
        """Release the lock on the folder; nothing can be built after it."""
        if self._lock:
            self._lock.release()

    def build(self, split: str, rows: Iterable[PackedRow]) -> None:
        """Build what is missing of a split. RunError: full disk, broken teacher."""
        limited = islice(rows, self.settings.sequences.get(split))
        self._splits[split], self._tokens[split] = [], hashlib.sha256()
        shards = shards_of(split, iter(limited), self.settings.sequences_per_shard)
        while row := [self._counted(part) for part in islice(shards, self.world)]:
            self._agree(split, row)
            own = row[self.rank :][:1]
            del row
            for part in own:
                record = self._finished_record(part)
                if record is None:
                    self._build_shard(part)
                    continue
                self._broken += record["broken"]
                self._done += len(part)
                self._found_broken = len(self._broken)
            self._finish_rounds()
        self._agree(split, [])

    def _counted(self, part: ShardRows) -> ShardRows:
        """Check and count the rows of a shard, on every rank."""
        length = self.settings.seq_len
        assert part.tokens.shape[1] == length + 1 and part.segments.max() < max(length, 1), "rows do not fit"
        if part.tokens.min() < 0 or part.tokens.max() >= self.settings.vocab_size:
            raise UsageError(
                f"the tokenizer gives token {part.tokens.max()}, the teacher's vocabulary has only "
                f"{self.settings.vocab_size}: use the teacher's own tokenizer"
            )
        self._splits[part.split].append((part.name, len(part), part.digest))
        self._tokens[part.split].update(np.ascontiguousarray(part.tokens, dtype="<u4").tobytes())
        return part

    def _agree(self, split: str, row: list[ShardRows]) -> None:
        """UsageError: the data are not the same on all ranks."""
        found = self._gathered(json_digest([part.digest for part in row]))
        others = [rank for rank, each in enumerate(found) if each != found[0]]
        if others:
            first = row[0].first if row else sum(sequences for _, sequences, _ in self._splits[split])
            raise UsageError(
                f"the {split} data differ between the ranks from sequence {first} on: rank {others[0]} has others than "
                "rank 0; give all ranks the same --data"
            )

    def _finished_record(self, part: ShardRows) -> Sidecar | None:
        """The record of a shard that need not be built. RunError: the file in its place cannot be read."""
        record = self._intact_record(part.name)
        if record is None or not self._is_of(record, part.digest):
            return None
        path, settings = cache_format.shard_path(self.folder, part.name), self.settings
        try:
            check_structure(path, settings.codec, settings.seq_len, part.split, part.first, len(part))
        except ValueError:
            return None
        return record

    def _intact_record(self, name: str) -> Sidecar | None:
        """The record of a shard that is as it was written; None if there is none, or it is damaged."""
        try:
            record = read_sidecar(self.folder, name)
        except (FileNotFoundError, ValueError):
            return None
        except OSError as error:
            path = cache_format.sidecar_path(self.folder, name)
            raise RunError(f"{path} cannot be read: {error.strerror}; make it readable") from error
        problem = shard_problem(self.folder, record)
        if problem is not None and problem.aside is None:
            raise RunError(problem.text)
        return record if problem is None else None

    def _is_of(self, record: Sidecar, digest: str) -> bool:
        """True for a shard of today's rows and settings."""
        return record["rows_sha256"] == digest and record["settings_sha256"] == self.settings.digest()

    def _build_shard(self, part: ShardRows) -> None:
        spec, length, path = self.settings.codec, self.settings.seq_len, cache_format.shard_path(self.folder, part.name)
        with published(path, "cache.shard") as temporary:
            with cache_format.creating(temporary) as (file, check):
                cache_format.create_shard(file, spec, length, part.split, part.first, len(part))
                shard = ShardWriter(file, check, spec, part)
                self._fill(shard, part)
                stored = shard.finish()
                faults.point("cache.shard.before-close")
            sha256, size = file_digest(temporary), temporary.stat().st_size
            self._make_way(part.name, sha256)
        record = {
            **{"sha256": sha256, "bytes": size, "name": part.name, "split": part.split, "first_sequence": part.first},
            **{"sequences": len(part), "stored": stored, "broken": shard.broken},
            **{"rows_sha256": part.digest, "settings_sha256": self.settings.digest()},
        }
        publish_json(cache_format.sidecar_path(self.folder, part.name), record, "cache.sidecar")

    def _make_way(self, name: str, digest: str) -> None:
        """Move aside a file in the place of a shard, unless it is equal or kdtrain's own."""
        if self._intact_record(name) is None:
            path, sidecar = cache_format.shard_path(self.folder, name), cache_format.sidecar_path(self.folder, name)
            if os.path.lexists(path) and (path.is_symlink() or not path.is_file() or file_digest(path) != digest):
                set_aside(self.folder, f"{cache_format.SHARDS}/{path.name}", "damaged")
            if os.path.lexists(sidecar):
                try:
                    read_sealed(sidecar)
                except ValueError:
                    set_aside(self.folder, f"{cache_format.SHARDS}/{sidecar.name}", "damaged")

    def _fill(self, shard: ShardWriter, part: ShardRows) -> None:
        waiting: tuple[int, Future[None]] | None = None
        with ThreadPoolExecutor(1, thread_name_prefix="cache-writer") as thread:
            for start in range(0, len(part), self.batch_size):
                batch = slice(start, min(start + self.batch_size, len(part)))
                number = batch.stop - batch.start
                self._meet(more=True)
                # torch.compile is not thread-safe: what a new size compiles, here or in the thread, compiles alone.
                alone = number not in self._compiled
                if waiting and alone:
                    self._end(shard, *waiting)
                    waiting = None
                logits_BTV = self._ask(part, batch)
                if waiting:
                    self._end(shard, *waiting)
                job = thread.submit(self._encode, shard, part, batch, logits_BTV, self._side.ready(logits_BTV))
                waiting = (number, job)
                del logits_BTV
                if alone:
                    wait([job])
                    self._compiled.add(number)
                del job
            assert waiting
            self._end(shard, *waiting)
        self._broken += shard.broken

    def _end(self, shard: ShardWriter, sequences: int, job: "Future[None]") -> None:
        """Wait for the batch in work, and count its sequences."""
        job.result()
        self._done += sequences
        self._found_broken = len(self._broken) + len(shard.broken)

    def _ask(self, part: ShardRows, batch: slice) -> Tensor | None:
        if self.teacher is None:
            return None
        tokens_BT = torch.from_numpy(part.tokens[batch, :-1].astype(np.int64))
        segments_BT = torch.from_numpy(part.segments[batch].astype(np.int64)) if self.settings.document_mask else None
        with torch.no_grad():
            logits_BTV = self.teacher(tokens_BT, segments_BT)
        assert logits_BTV.shape[-1] == self.settings.vocab_size, "the teacher's vocabulary is not that of the settings"
        return logits_BTV

    def _encode(
        self,
        shard: ShardWriter,
        part: ShardRows,
        batch: slice,
        logits_BTV: Tensor | None,
        ready: torch.cuda.Event | None,
    ) -> None:
        kept = {name: values[batch] for name, values in part.kept.items()}
        assert kept or logits_BTV is not None or self.settings.codec.kind == "tokens", "no teacher and no targets"
        if logits_BTV is not None:
            labels_BT = torch.from_numpy(part.tokens[batch, 1:].astype(np.int64))
            spec, seed, first = self.settings.codec, self.settings.seed, part.first + batch.start
            with self._side.after(ready):
                kept = encode_sequences(logits_BTV, labels_BT, spec, seed=seed, split=part.split, first=first)
        shard.add(batch, kept)

    def _gathered(self, own: Any) -> list[Any]:
        """The value that each rank passes, by rank."""
        return all_gather_object(own) if self.world > 1 else [own]

    def _meet(self, more: bool) -> bool:
        """Meet the other ranks, show what all have done, and stop if too much is broken; True if any has more to do."""
        found = self._gathered((more, self._done, self._found_broken))
        done, broken = (sum(numbers) for numbers in list(zip(*found, strict=True))[1:])
        limits = list(self.settings.sequences.values())
        known = limits and len(limits) >= len(self._splits) and None not in limits
        total = sum(n or 0 for n in limits) if known else None
        self._stop_if_broken(broken, done, max(done, 10_000 if total is None else total))
        if self.progress:
            self.progress(done, total)
        return any(more for more, *_ in found)

    def _finish_rounds(self) -> None:
        """Meet the other ranks, with nothing left to do here, until all are done."""
        empty_BT = torch.zeros(1, self.settings.seq_len, dtype=torch.int64)
        while self._meet(more=False):
            if self.sharded and self.teacher is not None:
                with torch.no_grad():
                    self.teacher(empty_BT, empty_BT if self.settings.document_mask else None)

    def _stop_if_broken(self, broken: int, done: int, total: int) -> None:
        """RunError: more than one in a thousand sequences of `total` are broken."""
        if broken * 1000 > total:
            raise RunError(
                f"the teacher gave non-finite logits for {broken} of {done} sequences"
                f"{f' (the first is {self._broken[0]})' if self._broken else ''}, more than one in a thousand: "
                "load it in another dtype (bfloat16 or float32)"
            )

    def finish(self) -> Manifest | None:
        """Measure the fidelity, and write index and manifest, on rank 0. The others help a sharded teacher; None.

        RunError: a shard of another rank is missing.
        """
        assert self._splits
        if self.rank:
            self.close()
            if self.sharded:
                self._finish_rounds()
            return None
        with writing(self.folder):
            faults.point("cache.before-finish")
        sidecars = {
            split: [self._sidecar(name, digest) for name, _, digest in shards] for split, shards in self._splits.items()
        }
        records = [record for each in sidecars.values() for record in each]
        self._broken = [name for record in records for name in record["broken"]]
        total = sum(record["sequences"] for record in records)
        self._stop_if_broken(len(self._broken), total, total)
        names = {record["name"] for record in records}
        with writing(self.folder / cache_format.SHARDS):
            for path in sorted((self.folder / cache_format.SHARDS).iterdir()):
                if path.stem not in names and cache_format.is_shard_file(path.name):  # left by longer data
                    set_aside(self.folder, f"{cache_format.SHARDS}/{path.name}", "left")
        measured, span = self._measure()
        index, spec, length = self.folder / cache_format.INDEX, self.settings.codec, self.settings.seq_len
        with published(index, "cache.index") as temporary:
            parts = {split: [(r["name"], r["sequences"]) for r in each] for split, each in sidecars.items()}
            cache_format.write_index(temporary, spec, length, parts)
        libraries = {name: importlib.metadata.version(name) for name in _LIBRARIES}
        self.manifest = Manifest(
            settings=self.settings,
            splits={split: self._summary(split, each) for split, each in sidecars.items()},
            fidelity=measured,
            temperature_range=span,  # type: ignore[arg-type]
            bytes_per_token=_bytes_per_token(records, length),
            index_sha256=file_digest(index),
            tokenizer_files=file_digests(self.folder / cache_format.TOKENIZER),
            versions={"kdtrain": __version__, **libraries, "hdf5": h5py.version.hdf5_version},
        )
        publish_json(self.folder / cache_format.MANIFEST, self.manifest.to_json(), "cache.manifest")
        self.manifest = read_manifest(self.folder)
        self.close()
        return self.manifest

    def _sidecar(self, name: str, digest: str) -> Sidecar:
        try:
            record = read_sidecar(self.folder, name)
        except (OSError, ValueError) as error:
            path = cache_format.sidecar_path(self.folder, name)
            raise RunError(f"{path} is missing or damaged ({error}); run the same command again") from error
        if not self._is_of(record, digest):
            raise RunError(f"the shard {name} of {self.folder} is of other data; run the same command again")
        return record

    def _summary(self, split: str, records: list[Sidecar]) -> SplitRecord:
        return {
            "sequences": sum(record["sequences"] for record in records),
            "broken": sum(len(record["broken"]) for record in records),
            "tokens_sha256": self._tokens[split].hexdigest(),
            "shards": [
                {key: record[key] for key in ("name", "sequences", "sha256", "bytes")}  # type: ignore[literal-required, misc]
                for record in records
            ],
        }

    def _measure(self) -> tuple[dict[str, Any] | None, dict[str, Any] | None]:
        if self.teacher is None:
            return None, None if self.settings.codec.kind == "tokens" else codec.RANGE
        split = "validation" if "validation" in self._splits else next(iter(self._splits))
        name, sequences, _ = self._splits[split][0]
        spec, length = self.settings.codec, self.settings.seq_len
        number, positions = fidelity.sample_size(sequences, length, spec.vocab_size)
        path = cache_format.shard_path(self.folder, name)
        with shard_errors(path), closing(Shard(path, spec)) as shard:
            batch = batch_of([shard.read(np.arange(number), checked=False)], spec)

        def asked(tokens_BT: Tensor, segments_BT: Tensor | None) -> Tensor:
            if self.sharded:
                self._meet(more=True)
            return self.teacher(tokens_BT, segments_BT)  # type: ignore[misc]

        found, span = fidelity.measure(batch, asked, document_mask=self.settings.document_mask, positions=positions)
        if self.sharded:
            self._finish_rounds()
        return {"split": split, **found}, span


def write_cache(
    folder: Path | str, settings: CacheSettings, splits: Mapping[str, Iterable[PackedRow]], **options: Any
) -> Manifest | None:
    """Build all `splits` and finish; a finished cache of these settings stays untouched. None on all ranks but 0.

    A rank that has built its share returns while rank 0 finishes.
    """
    writer = CacheWriter(folder, settings, **options)
    try:
        if writer.manifest is not None:
            return writer.manifest if writer.rank == 0 else None
        # All first rows before any forward: else the teacher may work for hours before a later split turns out empty.
        for split, rows in {split: _not_empty(split, rows, settings) for split, rows in splits.items()}.items():
            writer.build(split, rows)
        return writer.finish()
    finally:
        writer.close()


def _not_empty(split: str, rows: Iterable[PackedRow], settings: CacheSettings) -> Iterable[PackedRow]:
    """The rows of a split. UsageError: there are none."""
    remaining = iter(rows)
    for first in remaining:
        return chain([first], remaining)
    source = settings.data.get("source") or settings.data.get("logprobs")
    raise UsageError(
        f"{source}: the {split} data give no whole sequence of {settings.seq_len} tokens; use more data or a smaller "
        "--seq-len"
    )


def _bytes_per_token(records: list[Sidecar], seq_len: int) -> dict[str, float]:
    tokens = sum(record["sequences"] for record in records) * seq_len
    names = list(records[0]["stored"])
    by_name = {name: sum(record["stored"][name] for record in records) / tokens for name in names}
    total = sum(record["bytes"] for record in records) / tokens
    return {**by_name, "overhead": total - sum(by_name.values()), "total": total}
