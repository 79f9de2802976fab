"""Building a cache: packed rows through the teacher into shards, each complete or absent.

The order on disk: settings.json; per shard the HDF5 file, then its sidecar (`shard_writer`); at the end index.h5 and
the manifest (`finish`). Each is written under a hidden name, flushed and renamed. A killed build loses the shard in
work: a resume keeps each shard whose sidecar, size and digest are right and whose tokens are those of today's rows. A
file in the place of a shard that no sidecar vouches for is moved aside. A thread encodes and writes one batch while the
teacher works on the next.

Shard s is built by rank s % world, and its content does not depend on the number of ranks. The ranks go through the
data `world` shards at a time and meet before each forward of the teacher.

What it gives up: the rows of a shard, and what is kept of its first sequences, are held in memory; the logits of two
batches live at once; every rank reads all of the data, and waits for the slowest at each batch.
"""

import hashlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import closing
from dataclasses import dataclass, field
from functools import partial
from itertools import chain, islice
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from kdtrain import faults
from kdtrain.cache.format import hdf5_writing
from kdtrain.cache.format import names as cache_format
from kdtrain.cache.format.manifest import CacheSettings, Manifest, Sidecar
from kdtrain.cache.read.shard import Shard, batch_of, shard_errors
from kdtrain.cache.write import fidelity
from kdtrain.cache.write.answers import Encode, LogitAnswers, Logits, ShardAnswers
from kdtrain.cache.write.folder import open_folder
from kdtrain.cache.write.generated_text import read_written
from kdtrain.cache.write.publish import publish_manifest, read_sidecars
from kdtrain.cache.write.shard_writer import (
    ShardRows,
    ShardWriter,
    WriteShard,
    finished_record,
    intact_record,
    is_of,
    publish_shard,
)
from kdtrain.data.packed import PackedRow
from kdtrain.errors import RunError, UsageError, log, writing
from kdtrain.files import json_digest, set_aside
from kdtrain.ranks import all_gather_object, rank, world_size

Progress = Callable[[int, int | None], None]
"""(sequences done so far, how many in all or None)."""


class _Rounds:
    """The rounds in which the ranks that build a cache meet, one before each forward of the teacher.

    Each rank reports if it has more to do, how many sequences are done, and how many are broken. So they stop at the
    same batch, show one progress, and notice within a batch that a rank is gone. A teacher that is sharded over the
    ranks needs all of them for each forward: a rank that has nothing left runs an empty one.

    all_ranks: see `CacheBuilder`. dtype: of the teacher's weights, if it is known.
    """

    def __init__(self, all_ranks: bool, progress: Progress | None, dtype: str | None = None) -> None:
        self.rank, self.world = (rank(), world_size()) if all_ranks else (0, 1)
        self.progress, self.total, self.dtype = progress, None, dtype  # type: Progress | None, int | None, str | None
        """`total`: sequences of all splits; None if unknown."""
        self.done = 0
        """Sequences that this rank has finished."""
        self.broken: list[str] = []
        """Those with a non-finite logit, as SPLIT and number."""

    def gather(self, own: Any) -> list[Any]:
        """Return every rank's value, in rank order."""
        return all_gather_object(own) if self.world > 1 else [own]

    def meet(self, more: bool) -> bool:
        """Meet the other ranks; return True if any has more to do.

        Raises:
            RunError: more than one in a thousand sequences are broken.
        """
        found = self.gather((more, self.done, len(self.broken)))
        done, broken = (sum(numbers) for numbers in list(zip(*found, strict=True))[1:])
        self.stop_if_broken(broken, done, max(done, 10_000 if self.total is None else self.total))
        if self.progress:
            self.progress(done, self.total)
        return any(more for more, *_ in found)

    def stop_if_broken(self, broken: int, done: int, total: int) -> None:
        """Raise RunError if more than one in a thousand sequences of `total` are broken."""
        if broken * 1000 > total:
            raise RunError(
                f"the teacher gave non-finite logits for {broken} of {done} sequences"
                f"{f' (the first is {self.broken[0]})' if self.broken else ''}, more than one in a thousand: "
                f"{'look at its weights' if self.dtype == 'float32' else 'load it in bfloat16 or float32'}"
            )


@dataclass
class _Split:
    """A split that is being built."""

    rows: list[PackedRow] = field(default_factory=list)
    """Of the shard in work."""
    digests: list[str] = field(default_factory=list)
    """Of the rows of each shard before."""
    taken: int = 0
    """Their sequences."""
    tokens: Any = field(default_factory=hashlib.sha256)
    """The digest of all their tokens."""


class CacheBuilder:
    """Builds or resumes the cache in `folder`; `write_cache` drives it, or `add`, one row after the other.

    Args:
        settings: what to build. A folder that holds a cache of others, or in which another command builds, is refused
            (UsageError).
        teacher: fills the shards: `ShardAnswers`, or a function that gives the logits of at most `batch_size`
            sequences; None: the rows bring what is kept of them, if anything is.
        tokenizer: a folder, or anything with `save_pretrained(folder)`; its files are copied into the cache.
        all_ranks: True when all ranks build, calling the same methods in the same order; False for this process alone.
    """

    def __init__(
        self,
        folder: Path | str,
        settings: CacheSettings,
        *,
        teacher: ShardAnswers | Logits | None,
        tokenizer: Any = None,
        batch_size: int = 16,
        progress: Progress | None = None,
        all_ranks: bool = False,
    ) -> None:
        self.answers = ShardAnswers()
        if teacher is not None:
            self.answers = teacher if isinstance(teacher, ShardAnswers) else LogitAnswers(teacher, settings)
        assert self.answers.logits is None or settings.codec.taught, "the codec 'tokens' has no teacher"
        self.folder = Path(folder)
        self.settings = settings
        self.batch_size = batch_size
        self.rounds = _Rounds(all_ranks, progress, (settings.teacher or {}).get("dtype"))
        self.splits: dict[str, _Split] = {}
        self._row: list[tuple[ShardRows, WriteShard | None]] = []
        """The next shards, up to one for each rank."""
        self.sample: tuple[int, int] | None = None
        """Sequences and positions of the held sample, where the teacher answers for no others."""
        self.measured: tuple[Any, Any] = (None, settings.codec.stated_range if settings.codec.taught else None)
        """Fidelity and range of T, where there is no teacher to measure them with."""
        self.stated: dict[str, Any] = {}
        """More keys of the manifest: `parents`, `origin`, `weights_cost`, `capture`, `generated`."""
        self.others = ""
        """What to do about a shard of other rows that is there; empty: it is built again."""
        self._compiled: set[int] = set()
        """Sizes of the batches that teacher and encoder have seen."""
        self.manifest, self._lock = open_folder(self.folder, settings, tokenizer, all_ranks)
        """The manifest if the cache is finished already: there is nothing to build."""

    def close(self) -> None:
        """Release the lock on the folder; nothing can be built after it."""
        if self._lock:
            self._lock.release()

    def build(self, split: str, rows: Iterable[PackedRow]) -> None:
        """Build the missing shards of a split. RunError: full disk, broken teacher."""
        limits = self.settings.sequences
        self.open_split(split)
        total = None if None in limits.values() else sum(filter(None, limits.values()))
        self.rounds.total = total if limits and len(limits) >= len(self.splits) else None
        for row in islice(rows, limits.get(split)):
            self.add(split, row)
        self.end_split(split)
        self._agree(split)

    def open_split(self, split: str) -> _Split:
        """Begin a split."""
        return self.splits.setdefault(split, _Split())

    def add(self, split: str, row: PackedRow) -> None:
        """Take the next row of a split; publish its shard, if it is missing, once that is full."""
        own = self.splits[split]
        own.rows.append(row)
        if len(own.rows) == self.settings.sequences_per_shard:
            self._end_shard(split)

    def end_split(self, split: str) -> None:
        """Publish the remaining rows of a split."""
        if self.splits[split].rows:
            self._end_shard(split)
        if self._row:
            self._publish_row(split)

    def _end_shard(self, split: str) -> None:
        own = self.splits[split]
        rows = own.rows
        own.rows = []
        self.add_shard(ShardRows.of(split, len(own.digests), own.taken, rows))

    def add_shard(self, part: ShardRows, write: WriteShard | None = None) -> None:
        """Take the next shard of a split, checked and counted on every rank, and publish it if it is missing.

        write: makes its file; by default it is filled with answers.
        """
        own = self.splits[part.split]
        length = self.settings.seq_len
        assert part.tokens.shape[1] == length + 1 and part.segments.max() < max(length, 1), "rows do not fit"
        if part.tokens.min() < 0 or part.tokens.max() >= self.settings.vocab_size:
            raise UsageError(
                f"the tokenizer gives token {part.tokens.max()}, the teacher's vocabulary has only "
                f"{self.settings.vocab_size}: use the teacher's own tokenizer"
            )
        own.digests.append(part.digest)
        own.tokens.update(np.ascontiguousarray(part.tokens, dtype="<u4").tobytes())
        own.taken += len(part)
        self._row.append((part, write))
        if len(self._row) == self.rounds.world:
            self._publish_row(part.split)

    def _publish_row(self, split: str) -> None:
        """Build a shard on each rank."""
        self._agree(split)
        own = self._row[self.rounds.rank :][:1]
        self._row = []
        for part, write in own:
            record = finished_record(self.folder, self.settings, part)
            if record is not None:
                if write is None:  # a copy is of a cache that was checked
                    self.rounds.broken += record["broken"]
                self.rounds.done += len(part)
                continue
            if there := intact_record(self.folder, part.name):
                if self.others and there["settings_sha256"] == self.settings.digest():
                    raise UsageError(f"{self.folder} holds the shard {part.name} of other sequences; {self.others}")
                if not is_of(there, part.digest, self.settings):
                    text = "%s: the shard %s is of other text than the data give now, and is made again"
                    log.warning(text, self.folder, part.name)
            publish_shard(self.folder, self.settings, part, write or partial(self._write, part))
            if write is not None:
                self.rounds.done += len(part)
        self._finish_rounds()

    def _agree(self, split: str) -> None:
        """Raise UsageError if the data are not the same on all ranks."""
        found = self.rounds.gather(json_digest([part.digest for part, _ in self._row]))
        others = [rank for rank, each in enumerate(found) if each != found[0]]
        if others:
            first = self._row[0][0].first if self._row else self.splits[split].taken
            raise UsageError(
                f"the {split} data differ between the ranks from sequence {first} on: rank {others[0]} has others than "
                "rank 0; give all ranks the same --data"
            )

    def _write(self, part: ShardRows, path: Path) -> tuple[dict[str, int], list[str]]:
        """Encode and write all sequences of a shard, one batch in the thread while the teacher computes the next."""
        spec, length = self.settings.codec, self.settings.seq_len
        with hdf5_writing.creating(path) as (file, check):
            hdf5_writing.create_shard(file, spec, length, part.split, part.first, len(part))
            shard = ShardWriter(file, check, spec, length)
            waiting: tuple[int, Future[None]] | None = None
            broken_before = self.rounds.broken

            def end(sequences: int, job: "Future[None]") -> None:
                job.result()
                self.rounds.done += sequences
                self.rounds.broken = broken_before + shard.broken

            def write(rows: ShardRows, encode: Encode) -> None:
                kept = encode()
                assert kept or not self.settings.codec.taught, "no teacher and no targets"
                shard.add(rows, kept)

            with self.answers.session(part), ThreadPoolExecutor(1, thread_name_prefix="cache-writer") as thread:
                for start in range(0, len(part), self.batch_size):
                    rows = part[start : start + self.batch_size]
                    number = len(rows)
                    self.rounds.meet(more=True)
                    # torch.compile is not thread-safe: what a new size compiles, here or in the thread, compiles alone.
                    alone = number not in self._compiled
                    if waiting and alone:
                        end(*waiting)
                        waiting = None
                    answer = self.answers.rows(rows)
                    if waiting:
                        end(*waiting)
                    waiting = number, thread.submit(write, *answer)
                    if alone:
                        wait([waiting[1]])
                        self._compiled.add(number)
                    del answer
                assert waiting
                end(*waiting)
            stored = shard.finish()
            faults.point("cache.shard.before-close")
        return stored, shard.broken

    def _finish_rounds(self) -> None:
        """Meet the other ranks, with nothing left to do here, until all are done: a sharded teacher needs all of them
        for each forward."""
        empty_BT = torch.zeros(1, self.settings.seq_len, dtype=torch.int64)
        while self.rounds.meet(more=False):
            if self.answers.sharded:
                assert self.answers.logits is not None
                with torch.no_grad():
                    self.answers.logits(empty_BT, empty_BT if self.settings.document_mask else None)

    def finish(self) -> Manifest | None:
        """Measure the fidelity, and write index and manifest, on rank 0; the others help a sharded teacher.

        RunError: a shard of another rank is missing.
        """
        assert self.splits
        if self.rounds.rank:
            self.close()
            if self.answers.sharded:
                self._finish_rounds()
            return None
        with writing(self.folder):
            faults.point("cache.before-finish")
        sidecars = read_sidecars(self.folder, self.settings, {split: own.digests for split, own in self.splits.items()})
        records = [record for each in sidecars.values() for record in each]
        self.rounds.broken = [name for record in records for name in record["broken"]]
        total = sum(record["sequences"] for record in records)
        if not self.settings.is_in_pieces:
            self.rounds.stop_if_broken(len(self.rounds.broken), total, total)
        names = {record["name"] for record in records}
        with writing(self.folder / cache_format.SHARDS):
            for path in sorted((self.folder / cache_format.SHARDS).iterdir()):
                if path.stem not in names and cache_format.is_shard_file(path.name):  # which longer data left
                    set_aside(self.folder, f"{cache_format.SHARDS}/{path.name}", "left")
        tokens = {split: own.tokens.hexdigest() for split, own in self.splits.items()}
        if "generated" in self.settings.data and "generated" not in self.stated:  # what was counted may be the prompts
            tokens, self.stated["generated"] = read_written(self.folder, self.settings, sidecars)
        found = self._measure(sidecars)
        self.manifest = publish_manifest(self.folder, self.settings, sidecars, tokens, *found, self.stated)
        self.close()
        return self.manifest

    def _measure(
        self, sidecars: Mapping[str, Sequence[Sidecar]]
    ) -> tuple[dict[str, Any] | None, dict[str, Any] | None]:
        """Measure the fidelity of the cache, and the range of T over which it is right."""
        split = "validation" if "validation" in self.splits else next(iter(self.splits))
        shard = sidecars[split][0]
        logits = self.answers.logits
        spec, length = self.settings.codec, self.settings.seq_len
        if logits is None and self.answers.examine is None:
            return self.measured
        number, positions = self.sample or fidelity.sample_size(shard["sequences"], length, spec.vocab_size)
        path = cache_format.shard_path(self.folder, shard["name"])
        with shard_errors(path), closing(Shard(path, spec)) as opened:
            batch = batch_of([opened.read(np.arange(number))], spec)
        if self.answers.examine is not None:
            self.stated["capture"] = {"split": split, **self.answers.examine(batch)}
        if logits is None:
            return self.measured

        def requested(tokens_BT: Tensor, segments_BT: Tensor | None) -> Tensor:
            if self.answers.sharded:
                self.rounds.meet(more=True)
            return logits(tokens_BT, segments_BT)

        counted = self.answers.writes or "packing" in self.settings.data  # not what fills a row
        how = {"document_mask": self.settings.document_mask, "counted": counted}
        found, span = fidelity.measure(batch, requested, positions=positions, **how)
        if self.answers.sharded:
            self._finish_rounds()
        return {"split": split, **found}, span


def write_cache(
    folder: Path | str,
    settings: CacheSettings,
    splits: Mapping[str, Iterable[PackedRow]],
    *,
    stated: Mapping[str, Any] | None = None,
    **options: Any,
) -> Manifest | None:
    """Build all `splits` and finish; a finished cache of these settings stays untouched. Other ranks than 0 get None.

    A rank that has built its share returns while rank 0 finishes. stated: more keys of the manifest.
    """
    builder = CacheBuilder(folder, settings, **options)
    try:
        if builder.manifest is not None:
            return builder.manifest if builder.rounds.rank == 0 else None
        # All first rows before any forward: else the teacher may work for hours before a later split turns out empty.
        for split, rows in {split: not_empty(split, rows, settings) for split, rows in splits.items()}.items():
            builder.build(split, rows)
        builder.stated |= {name: each for name, each in (stated or {}).items() if each}  # some are counted meanwhile
        return builder.finish()
    finally:
        builder.close()


def not_empty(split: str, rows: Iterable[PackedRow], settings: CacheSettings) -> Iterable[PackedRow]:
    """Return the rows of a split. UsageError: there are none, or none of their tokens counts."""
    remaining = iter(rows)
    seen = list[PackedRow]()
    written = "generated" not in settings.data  # else the teacher writes what counts
    for row in islice(remaining, settings.sequences.get(split)):
        seen.append(row)
        if row.loss_mask.any() or not written:
            return chain(seen, remaining)
    source = settings.data.get("source") or settings.data.get("logprobs")
    named = settings.data.get("split") or split if split == "train" else split  # as the data call it
    if not written:
        raise UsageError(
            f"{source}: no prompt of the {named} data leaves room in --seq-len {settings.seq_len}; raise it"
        )
    if seen:
        raise UsageError(f"{source}: no token of the {named} sequences counts; use a larger --seq-len, or other data")
    raise UsageError(
        f"{source}: the {named} data give no whole sequence of {settings.seq_len} tokens; use more data, a smaller "
        "--seq-len, or another --split"
    )
