"""Building a cache: packed rows through the teacher into shards, each complete or absent.

A cache is built in this order: settings.json; per shard the HDF5 file, then its sidecar; at the end index.h5 and the
manifest. Each is written under a hidden name, flushed, renamed. A killed build loses the shard in work: started again,
it keeps each shard whose sidecar, size and digest are right and whose tokens are those of today's rows. What stands in
the place of a shard and is not vouched for by its sidecar is moved aside. A thread encodes and writes one batch while
the teacher works on the next.

The dictionary of a sparse shard (`compression`) is fitted to its first sequences, so these are held in memory until
there are enough of them, or the shard ends. Which ones they are does not depend on the batches, so a shard is the same
for every batch size. A sequence for which the teacher returns a non-finite logit is kept with its loss masked out, and
counted; more than one in a thousand of them stop the build.

Shard s is built by rank s % world, and the content does not depend on the number of ranks. They go through the data a
row of `world` shards at a time, and meet before each forward of the teacher: each says whether it has more to do, how
many sequences are done, and how many are broken. By that they stop together, show one progress, and notice within a
batch that one of them is gone; and a teacher that is sharded over the ranks, whose forwards need all of them, gets
them: a rank that has nothing left runs an empty one.

What it gives up: the ranks wait for the slowest of them at each batch; the rows of a shard, and what is kept of its
first sequences, are held in memory; the logits of two batches live at once; every rank reads all of the data.
"""

import contextlib
import hashlib
import importlib.metadata
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass
from itertools import chain, islice
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
from kdtrain.cache.folder import open_folder
from kdtrain.cache.manifest import (
    CacheSettings,
    Manifest,
    Sidecar,
    SplitRecord,
    read_manifest,
    read_sidecar,
    shard_problem,
)
from kdtrain.cache.shard_reader import Shard, batch_of, naming
from kdtrain.data.packing import PackedRow
from kdtrain.errors import RunError, UsageError, writing
from kdtrain.files import PUBLISH_POINTS, file_digest, json_digest, publish_json, published, read_sealed, set_aside
from kdtrain.ranks import all_gather_object, rank, world_size


@dataclass(frozen=True)
class ShardRows:
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


def shards_of(rows: Iterator[PackedRow], number: int) -> Iterator[ShardRows]:
    """The rows of one shard after another, `number` of them each but the last."""
    while part := list(islice(rows, number)):
        yield ShardRows(
            tokens=np.stack([row.tokens for row in part]),
            loss_mask=np.stack([row.loss_mask for row in part]),
            segments=np.stack([row.segments for row in part]),
            kept={name: np.stack([row.kept[name] for row in part]) for name in part[0].kept},
        )


class SideStream:
    """A tensor that the current stream has in work, for another thread to encode on a stream of its own.

    On the main stream each copy to the host would wait for the teacher's next forward, which is queued there already,
    and the forward behind it for the encoding. On a CPU none of this does anything.

    Args:
        tensor: on any device, or None.
    """

    def __init__(self, tensor: Tensor | None) -> None:
        self.device = tensor.device if tensor is not None and tensor.is_cuda else None
        self.ready: torch.cuda.Event | None = None
        if self.device is not None:
            with torch.cuda.device(self.device):
                self.ready = torch.cuda.Event()
                self.ready.record(torch.cuda.current_stream(self.device))

    @contextlib.contextmanager
    def stream(self) -> Iterator[None]:
        """The block runs on a stream of its own behind what makes the tensor, and is done when it ends.

        So the tensor may be freed by then, although its memory belongs to another stream.
        """
        if self.device is None or self.ready is None:
            yield
            return
        own = torch.cuda.Stream(self.device)
        with torch.cuda.stream(own):
            own.wait_event(self.ready)
            try:
                yield
            finally:
                own.synchronize()


_AT_ONCE = 16  # sequences coded at once: bounds the memory
_LIBRARIES = ("torch", "transformers", "numpy", "h5py", "hdf5plugin")


class ShardWriter:
    """Writes the sequences of one shard into `file`, which `layout.create_shard` has laid out.

    check: raises what a write to the disk met, see `layout.creating`. first: number of its first sequence in
    `split`.
    """

    def __init__(
        self, file: h5py.File, check: Callable[[], None], spec: CodecSpec, seq_len: int, split: str, first: int
    ) -> None:
        self._file, self._check, self._spec = file, check, spec
        self._split, self._first = split, first
        self._wanted = fit_sequences(spec, seq_len) if spec.kind == "sparse" else 0
        self._held: list[Arrays] = []
        self._coding: Coding | None = None
        self._at = 0
        self.broken: list[str] = []
        """Sequences without numbers, as SPLIT and number."""

    def add(self, rows: Arrays, kept: Arrays) -> None:
        """Take the next sequences: tokens, loss_mask, segments, and what is kept of them."""
        kept = dict(kept)
        broken = kept.pop("broken", np.zeros(len(rows["tokens"]), bool))
        first = self._first + self._at + sum(len(each["tokens"]) for each in self._held)
        self.broken += [f"{self._split} {first + b}" for b in np.flatnonzero(broken)]
        mask = np.where(broken[:, None], cache_format.BROKEN, rows["loss_mask"]).astype(np.uint8)
        self._held.append({**rows, "loss_mask": mask, **kept})
        held = sum(len(each["tokens"]) for each in self._held)
        if self._coding is not None or held >= self._wanted:
            self._write_held()
        faults.point("cache.shard.after-batch")

    def finish(self) -> dict[str, Any]:
        """Write what is held back; bytes stored by data set."""
        if self._held:
            self._write_held()
        self._file.flush()
        return stored_bytes(self._file)

    def _write_held(self) -> None:
        arrays = {name: np.concatenate([each[name] for each in self._held]) for name in self._held[0]}
        self._held = []
        if self._spec.kind == "sparse" and self._coding is None:
            first = {name: values[: self._wanted] for name, values in arrays.items()}
            self._coding = Coding.fit(first["tokens"], first, self._spec)
            cache_format.write_dictionary(self._file, self._coding.to_arrays())
        for start in range(0, len(arrays["tokens"]), _AT_ONCE):
            self._write({name: values[start : start + _AT_ONCE] for name, values in arrays.items()})

    def _write(self, arrays: Arrays) -> None:
        if self._coding is not None:
            packed = self._coding.pack(arrays["tokens"], arrays)
            arrays = {name: arrays[name] for name in ("tokens", "loss_mask", "segments")} | packed
        number = len(arrays["tokens"])
        for name, values in arrays.items():
            self._file[name][self._at : self._at + number] = values
        self._at += number
        self._check()


def stored_bytes(file: h5py.File) -> dict[str, int]:
    """Compressed bytes by data set, all of the dictionary together."""
    found = {name: each.id.get_storage_size() for name, each in file.items() if isinstance(each, h5py.Dataset)}
    if cache_format.DICTIONARY in file:
        found[cache_format.DICTIONARY] = sum(
            each.id.get_storage_size() for each in file[cache_format.DICTIONARY].values()
        )
    return found


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

    settings: what to build; a folder that was begun or finished with others is refused (UsageError that
    names them), and so is one that another command builds in. teacher: called under no_grad with at most
    `batch_size` sequences; None for the codec `tokens`, and where rows bring what is kept of them
    (`PackedRow.kept`). sharded: whether a forward of it needs all ranks. tokenizer: a folder, or
    anything with `save_pretrained(folder)`; its files are copied into the cache. all_ranks: whether all ranks build it,
    calling the same methods in the same order, or this process alone.
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
        """Sequences of this rank, as the others know them."""
        self.manifest, self._lock = open_folder(self.folder, settings, tokenizer, all_ranks)
        """The manifest if the cache is finished already: there is nothing to do."""

    def close(self) -> None:
        """Let other builders in; nothing can be built after it."""
        if self._lock:
            self._lock.release()

    def build(self, split: str, rows: Iterable[PackedRow]) -> None:
        """Build what is missing of a split. RunError: full disk, broken teacher."""
        limited = islice(rows, self.settings.sequences.get(split))
        self._splits[split], self._tokens[split] = [], hashlib.sha256()
        shards = enumerate(shards_of(iter(limited), self.settings.sequences_per_shard))
        while row := [self._listed(split, *each) for each in islice(shards, self.world)]:
            self._agree(split, row)
            own = row[self.rank :][:1]
            del row
            for first, name, part, digest in own:
                record = self._built(split, first, name, part, digest)
                if record is None:
                    self._build_shard(split, first, name, part, digest)
                    continue
                self._broken += record["broken"]
                self._done += len(part.tokens)
                self._found_broken = len(self._broken)
            self._finish_rounds()
        self._agree(split, [])

    def _listed(self, split: str, number: int, part: ShardRows) -> tuple[int, str, ShardRows, str]:
        """Check and count a shard, whoever builds it; what its builder needs."""
        self._check(part)
        name, digest = cache_format.shard_name(split, number), part.digest()
        self._splits[split].append((name, len(part.tokens), digest))
        self._tokens[split].update(np.ascontiguousarray(part.tokens, dtype="<u4").tobytes())
        return number * self.settings.sequences_per_shard, name, part, digest

    def _agree(self, split: str, row: list[tuple[int, str, ShardRows, str]]) -> None:
        """Refuse to build from data that are not the same on all ranks. UsageError."""
        found = self._gathered(json_digest([digest for *_, digest in row]))
        others = [rank for rank, each in enumerate(found) if each != found[0]]
        if others:
            first = row[0][0] if row else sum(sequences for _, sequences, _ in self._splits[split])
            raise UsageError(
                f"the {split} data differ between the ranks from sequence {first} on: rank {others[0]} has others than "
                "rank 0; give all ranks the same --data"
            )

    def _check(self, part: ShardRows) -> None:
        length = self.settings.seq_len
        assert part.tokens.shape[1] == length + 1 and part.segments.max() < max(length, 1), "rows do not fit"
        if part.tokens.min() < 0 or part.tokens.max() >= self.settings.vocab_size:
            raise UsageError(
                f"the tokenizer gives token {part.tokens.max()}, the teacher's vocabulary has only "
                f"{self.settings.vocab_size}: use the teacher's own tokenizer"
            )

    def _built(self, split: str, first: int, name: str, part: ShardRows, digest: str) -> Sidecar | None:
        """The record of a shard that need not be built. RunError: what is there cannot be read."""
        record = self._vouched(name)
        if record is None or not self._is_of(record, digest):
            return None
        path, settings = cache_format.shard_path(self.folder, name), self.settings
        try:
            check_structure(path, settings.codec, settings.seq_len, split, first, len(part.tokens))
        except ValueError:
            return None
        return record

    def _vouched(self, name: str) -> Sidecar | None:
        """The record of a shard that is as it was written; None where there is none, or it is damaged."""
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
        """Whether a shard is of today's rows and settings."""
        return record["rows_sha256"] == digest and record["settings_sha256"] == self.settings.digest()

    def _build_shard(self, split: str, first: int, name: str, part: ShardRows, digest: str) -> None:
        number, spec = len(part.tokens), self.settings.codec
        with published(cache_format.shard_path(self.folder, name), "cache.shard") as temporary:
            with cache_format.creating(temporary) as (file, check):
                cache_format.create_shard(file, spec, self.settings.seq_len, split, first, number)
                shard = ShardWriter(file, check, spec, self.settings.seq_len, split, first)
                self._fill(shard, split, first, part)
                stored = shard.finish()
                faults.point("cache.shard.before-close")
            sha256, size = file_digest(temporary), temporary.stat().st_size
            self._make_way(name, sha256)
        record = {
            **{"sha256": sha256, "bytes": size, "name": name, "split": split, "first_sequence": first},
            **{"sequences": number, "stored": stored, "broken": shard.broken},
            **{"rows_sha256": digest, "settings_sha256": self.settings.digest()},
        }
        publish_json(cache_format.sidecar_path(self.folder, name), record, "cache.sidecar")

    def _make_way(self, name: str, digest: str) -> None:
        """Move aside what stands where a shard is to be published, unless it is the same or kdtrain's own."""
        if self._vouched(name) is None:
            path, sidecar = cache_format.shard_path(self.folder, name), cache_format.sidecar_path(self.folder, name)
            if os.path.lexists(path) and (path.is_symlink() or not path.is_file() or file_digest(path) != digest):
                set_aside(self.folder, f"{cache_format.SHARDS}/{path.name}", "damaged")
            if os.path.lexists(sidecar) and not _is_sealed(sidecar):
                set_aside(self.folder, f"{cache_format.SHARDS}/{sidecar.name}", "damaged")

    def _fill(self, shard: ShardWriter, split: str, first: int, part: ShardRows) -> None:
        waiting: tuple[int, Future[None]] | None = None
        with ThreadPoolExecutor(1, thread_name_prefix="cache-writer") as thread:
            for start in range(0, len(part.tokens), self.batch_size):
                batch = slice(start, min(start + self.batch_size, len(part.tokens)))
                rows = {name: getattr(part, name)[batch] for name in ("tokens", "loss_mask", "segments")}
                self._round(more=True)
                logits_BTV = self._ask(rows)
                if waiting:
                    self._end(shard, *waiting)
                known = {name: values[batch] for name, values in part.kept.items()}
                job = thread.submit(
                    self._take, shard, rows, known, logits_BTV, SideStream(logits_BTV), split, first + start
                )
                waiting = (batch.stop - batch.start, job)
                del logits_BTV, job
            assert waiting
            self._end(shard, *waiting)
        self._broken += shard.broken

    def _end(self, shard: ShardWriter, sequences: int, job: "Future[None]") -> None:
        """Wait for the batch in work, of so many sequences, and count it."""
        job.result()
        self._done += sequences
        self._found_broken = len(self._broken) + len(shard.broken)

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
        beside: SideStream,
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

    def _gathered(self, own: Any) -> list[Any]:
        """What each rank passes, by rank."""
        return all_gather_object(own) if self.world > 1 else [own]

    def _round(self, more: bool) -> bool:
        """Meet the other ranks, show what all have done, stop where too much is broken; whether any has more to do."""
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
        """Meet the other ranks, with nothing to do here, until none has."""
        empty_BT = torch.zeros(1, self.settings.seq_len, dtype=torch.int64)
        while self._round(more=False):
            if self.sharded and self.teacher is not None:
                with torch.no_grad():
                    self.teacher(empty_BT, empty_BT if self.settings.document_mask else None)

    def _stop_if_broken(self, broken: int, done: int, total: int) -> None:
        """RunError: more than one in a thousand sequences of `total` have no numbers."""
        if broken * 1000 > total:
            raise RunError(
                f"the teacher gave logits that are not numbers for {broken} of {done} sequences"
                f"{f' (the first is {self._broken[0]})' if self._broken else ''}, more than one in a thousand: "
                "load it in another dtype (bfloat16 or float32)"
            )

    def finish(self) -> Manifest | None:
        """Measure the fidelity, write index and manifest: rank 0; the others help a sharded teacher, and get None.

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
        broken = [name for records in sidecars.values() for record in records for name in record["broken"]]
        total = sum(record["sequences"] for records in sidecars.values() for record in records)
        self._broken = broken
        self._stop_if_broken(len(broken), total, total)
        names = {record["name"] for records in sidecars.values() for record in records}
        with writing(self.folder / cache_format.SHARDS):
            for path in sorted((self.folder / cache_format.SHARDS).iterdir()):
                if path.stem not in names and cache_format.is_shard_file(path.name):  # of data that was longer once
                    set_aside(self.folder, f"{cache_format.SHARDS}/{path.name}", "left")
        measured, span = self._measure()
        index, spec, length = self.folder / cache_format.INDEX, self.settings.codec, self.settings.seq_len
        with published(index, "cache.index") as temporary:
            parts = {s: [(r["name"], r["sequences"]) for r in records] for s, records in sidecars.items()}
            cache_format.write_index(temporary, spec, length, parts)
        tokenizer = self.folder / cache_format.TOKENIZER
        files = sorted(path for path in tokenizer.rglob("*") if path.is_file())
        libraries = {name: importlib.metadata.version(name) for name in _LIBRARIES}
        self.manifest = Manifest(
            settings=self.settings,
            splits={split: self._summary(split, records) for split, records in sidecars.items()},
            fidelity=measured,
            temperature_range=span,  # type: ignore[arg-type]
            bytes_per_token=_bytes_per_token([r for records in sidecars.values() for r in records], length),
            index_sha256=file_digest(index),
            tokenizer_files={path.relative_to(tokenizer).as_posix(): file_digest(path) for path in files},
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
            raise RunError(f"{path} is not there or damaged ({error}); run the same command again") from error
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
        with naming(path), closing(Shard(path, spec)) as shard:
            batch = batch_of([shard.read(np.arange(number), checked=False)], spec)
        masked = self.settings.document_mask

        def asked(tokens_BT: Tensor, segments_BT: Tensor | None) -> Tensor:
            if self.sharded:
                self._round(more=True)
            return self.teacher(tokens_BT, segments_BT)  # type: ignore[misc]

        found, span = fidelity.measure(batch, asked, document_mask=masked, positions=positions)
        if self.sharded:
            self._finish_rounds()
        return {"split": split, **found}, span


def write_cache(
    folder: Path | str, settings: CacheSettings, splits: Mapping[str, Iterable[PackedRow]], **options: Any
) -> Manifest | None:
    """Build all `splits` and finish; a finished cache of these settings stays untouched. None on ranks but the first.

    A rank that is done with its share leaves while rank 0 finishes.
    """
    writer = CacheWriter(folder, settings, **options)
    try:
        if writer.manifest is not None:
            return writer.manifest if writer.rank == 0 else None
        # the teacher is not asked for hours over one split before another turns out to be too short
        for split, rows in {split: _not_empty(split, rows, settings) for split, rows in splits.items()}.items():
            writer.build(split, rows)
        return writer.finish()
    finally:
        writer.close()


def _not_empty(split: str, rows: Iterable[PackedRow], settings: CacheSettings) -> Iterable[PackedRow]:
    """The rows of a split. UsageError: there is none."""
    remaining = iter(rows)
    for first in remaining:
        return chain([first], remaining)
    source = settings.data.get("source") or settings.data.get("logprobs")
    raise UsageError(
        f"{source}: the {split} data give no whole sequence of {settings.seq_len} tokens; use more data or a smaller "
        "--seq-len"
    )


def _is_sealed(path: Path) -> bool:
    try:
        return bool(read_sealed(path))
    except ValueError:
        return False


def _bytes_per_token(records: list[Sidecar], seq_len: int) -> dict[str, float]:
    tokens = sum(record["sequences"] for record in records) * seq_len
    names = list(records[0]["stored"])
    by_name = {name: sum(record["stored"][name] for record in records) / tokens for name in names}
    total = sum(record["bytes"] for record in records) / tokens
    return {**by_name, "overhead": total - sum(by_name.values()), "total": total}
