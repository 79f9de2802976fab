"""Building a cache: packed rows through the teacher into shards, each complete or absent.

The order on disk: settings.json; per shard the HDF5 file, then its sidecar (`shard_writer`); at the end index.h5 and
the manifest (`finish`). Each is written under a hidden name, flushed and renamed. A killed build loses the shard in
work: a resume keeps each shard whose sidecar, size and digest are right and whose tokens are those of today's rows. A
file in the place of a shard that no sidecar vouches for is moved aside. A thread encodes and writes one batch while the
teacher works on the next.

Shard s is built by rank s % world, and its content does not depend on the number of ranks. The ranks go through the
data `world` shards at a time and meet before each forward of the teacher (`rounds`).

What it gives up: the rows of a shard, and what is kept of its first sequences, are held in memory; the logits of two
batches live at once; every rank reads all of the data.
"""

import hashlib
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import AbstractContextManager, closing, nullcontext
from fractions import Fraction
from itertools import chain, islice
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from kdtrain import faults
from kdtrain.cache.build import fidelity
from kdtrain.cache.build.folder import open_folder
from kdtrain.cache.build.generated_text import read_written
from kdtrain.cache.build.publish import publish_manifest, read_sidecars, set_aside_others
from kdtrain.cache.build.rank_rounds import Progress, Rounds
from kdtrain.cache.build.shard_writer import (
    ShardPlace,
    ShardRows,
    ShardWriter,
    SideStream,
    finished_record,
    publish_shard,
    shards_of,
)
from kdtrain.cache.format import codec
from kdtrain.cache.format import names as cache_format
from kdtrain.cache.format.codec import encode_sequences
from kdtrain.cache.format.compression import Arrays
from kdtrain.cache.format.manifest import CacheSettings, Manifest
from kdtrain.cache.read.shard import Shard, batch_of, shard_errors
from kdtrain.data.packing import PackedRow
from kdtrain.errors import UsageError, writing
from kdtrain.files import PUBLISH_POINTS, json_digest
from kdtrain.objective.batch import Batch

_PUBLISHED = ("cache.settings", "cache.shard", "cache.sidecar", "cache.index", "cache.card", "cache.manifest")
FAULT_POINTS = (
    "cache.shard.after-batch",
    "cache.shard.before-close",
    "cache.tokenizer.before-rename",
    "cache.before-finish",
    *(f"{name}.{point}" for name in _PUBLISHED for point in PUBLISH_POINTS),
)
"""Every labelled place of a build, for `KDTRAIN_FAULT`."""


class CacheBuilder:
    """Builds or resumes the cache in `folder`; `write_cache` drives it.

    Args:
        settings: what to build. A folder that holds a cache of others, or in which another command builds, is refused
            (UsageError).
        teacher: gives the logits of at most `batch_size` sequences, under no_grad; None for the codec `tokens`, and
            where no more than a top-k is known.
        kept: gives instead what is kept of as many rows; by default what they bring (`PackedRow.kept`).
        capturing: entered around `kept` of all rows of a shard, which an error of it keeps from being published.
        written: gives instead the rows with the text that the teacher wrote behind their prompts, and its logits or
            what is kept of them; `teacher` then measures the fidelity alone.
        examine: makes the manifest's `capture` of the held sample.
        sharded: True when a forward of the teacher needs all ranks.
        tokenizer: a folder, or anything with `save_pretrained(folder)`; its files are copied into the cache.
        all_ranks: True when all ranks build, calling the same methods in the same order; False for this process alone.
    """

    def __init__(
        self,
        folder: Path | str,
        settings: CacheSettings,
        *,
        teacher: fidelity.Teacher | None,
        kept: Callable[[ShardRows], Arrays] | None = None,
        capturing: Callable[[ShardRows], AbstractContextManager[None]] | None = None,
        written: Callable[[ShardRows], tuple[ShardRows, Tensor | Arrays]] | None = None,
        examine: Callable[[Batch], dict[str, Any]] | None = None,
        sharded: bool = False,
        tokenizer: Any = None,
        batch_size: int = 16,
        progress: Progress | None = None,
        all_ranks: bool = False,
    ) -> None:
        assert teacher is None or settings.codec.kind != "tokens", "the codec 'tokens' has no teacher"
        self.folder, self.settings, self.teacher = Path(folder), settings, teacher
        self.kept, self.capturing = kept or (lambda rows: rows.kept), capturing or (lambda _: nullcontext())
        self.written, self.examine = written, examine
        self.batch_size, self.sharded = batch_size, sharded and teacher is not None
        self.rounds = Rounds(all_ranks, progress, (settings.teacher or {}).get("dtype"))
        self._splits: dict[str, list[ShardPlace]] = {}
        self._tokens: dict[str, Any] = {}
        self._side = SideStream()
        self.sample: tuple[int, int] | None = None
        """Sequences and positions of the held sample, where the teacher answers for no others."""
        span = codec.SAMPLED_RANGE if settings.codec.num_samples else codec.RANGE
        self.measured: tuple[Any, Any] = (None, None if settings.codec.kind == "tokens" else span)
        """Fidelity and range of T, where there is no teacher to measure them with."""
        self.stated: dict[str, Any] = {}
        """More keys of the manifest: `parents`, `origin`, `weights_cost`, `capture`, `generated`."""
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
        self.open_split(split)
        self.rounds.total = self._total()
        shards = shards_of(split, iter(limited), self.settings.sequences_per_shard)
        while row := [self.counted(part) for part in islice(shards, self.rounds.world)]:
            self._agree(split, row)
            own = row[self.rounds.rank :][:1]
            del row
            for part in own:
                self.publish(part)
            self._finish_rounds()
        self._agree(split, [])

    def open_split(self, split: str) -> None:
        """Begin a split."""
        self._splits[split], self._tokens[split] = [], hashlib.sha256()

    def publish(self, part: ShardRows) -> None:
        """Build a shard that is missing."""
        record = finished_record(self.folder, self.settings, part)
        if record is None:
            publish_shard(self.folder, self.settings, part, self._capture)
            return
        self.rounds.broken += record["broken"]
        self.rounds.done += len(part)

    def _total(self) -> int | None:
        """Sequences of all splits; None if unknown."""
        limits = self.settings.sequences.values()
        known = [each for each in limits if each is not None]
        return sum(known) if limits and len(limits) >= len(self._splits) and len(known) == len(limits) else None

    def counted(self, part: ShardRows) -> ShardRows:
        """Check and count the rows of a shard, on every rank."""
        length = self.settings.seq_len
        assert part.tokens.shape[1] == length + 1 and part.segments.max() < max(length, 1), "rows do not fit"
        if part.tokens.min() < 0 or part.tokens.max() >= self.settings.vocab_size:
            raise UsageError(
                f"the tokenizer gives token {part.tokens.max()}, the teacher's vocabulary has only "
                f"{self.settings.vocab_size}: use the teacher's own tokenizer"
            )
        self._splits[part.split].append(ShardPlace(part.name, len(part), part.digest))
        self._tokens[part.split].update(np.ascontiguousarray(part.tokens, dtype="<u4").tobytes())
        return part

    def _agree(self, split: str, row: list[ShardRows]) -> None:
        """UsageError: the data are not the same on all ranks."""
        found = self.rounds.gather(json_digest([part.digest for part in row]))
        others = [rank for rank, each in enumerate(found) if each != found[0]]
        if others:
            first = row[0].first if row else sum(each.sequences for each in self._splits[split])
            raise UsageError(
                f"the {split} data differ between the ranks from sequence {first} on: rank {others[0]} has others than "
                "rank 0; give all ranks the same --data"
            )

    def _capture(self, shard: ShardWriter, part: ShardRows) -> None:
        with self.capturing(part):
            self._fill(shard, part)

    def _fill(self, shard: ShardWriter, part: ShardRows) -> None:
        """Have all sequences of a shard encoded and written, one batch in the thread while the teacher has the next."""
        waiting: tuple[int, Future[None]] | None = None
        broken_before = self.rounds.broken

        def end(sequences: int, job: "Future[None]") -> None:
            job.result()
            self.rounds.done += sequences
            self.rounds.broken = broken_before + shard.broken

        with ThreadPoolExecutor(1, thread_name_prefix="cache-writer") as thread:
            for start in range(0, len(part), self.batch_size):
                rows = part[start : start + self.batch_size]
                number = len(rows)
                self.rounds.meet(more=True)
                # torch.compile is not thread-safe: what a new size compiles, here or in the thread, compiles alone.
                alone = number not in self._compiled
                if waiting and alone:
                    end(*waiting)
                    waiting = None
                rows, answer = (rows, self._ask(rows)) if self.written is None else self.written(rows)
                if waiting:
                    end(*waiting)
                ready = self._side.ready(answer) if isinstance(answer, Tensor) else None
                job = thread.submit(self._encode, shard, rows, answer, ready)
                waiting = (number, job)
                del answer
                if alone:
                    wait([job])
                    self._compiled.add(number)
                del job
            assert waiting
            end(*waiting)

    def _ask(self, rows: ShardRows) -> Tensor | Arrays:
        """The logits [B,T,V] of some rows, or what is kept of them."""
        if self.teacher is None:
            return self.kept(rows)
        tokens_BT = torch.from_numpy(rows.tokens[:, :-1].astype(np.int64))
        segments_BT = torch.from_numpy(rows.segments.astype(np.int64)) if self.settings.document_mask else None
        with torch.no_grad():
            logits_BTV = self.teacher(tokens_BT, segments_BT)
        assert logits_BTV.shape[-1] == self.settings.vocab_size, "the teacher's vocabulary is not that of the settings"
        return logits_BTV

    def _encode(
        self, shard: ShardWriter, rows: ShardRows, answer: Tensor | Arrays, ready: torch.cuda.Event | None
    ) -> None:
        if isinstance(answer, Tensor):
            labels_BT = torch.from_numpy(rows.tokens[:, 1:].astype(np.int64))
            spec, seed = self.settings.codec, self.settings.seed
            with self._side.after(ready):
                offset = codec.grid_offset(self.settings.sampling) or Fraction(0)
                answer = encode_sequences(
                    answer, labels_BT, spec, seed=seed, split=rows.split, first=rows.first, offset=offset
                )
        assert answer or self.settings.codec.kind == "tokens", "no teacher and no targets"
        shard.add(rows, answer)

    def _finish_rounds(self) -> None:
        """Meet the other ranks, with nothing left to do here, until all are done."""
        self.rounds.finish(self._run_empty if self.sharded else None)

    def _run_empty(self) -> None:
        empty_BT = torch.zeros(1, self.settings.seq_len, dtype=torch.int64)
        assert self.teacher is not None
        with torch.no_grad():
            self.teacher(empty_BT, empty_BT if self.settings.document_mask else None)

    def finish(self) -> Manifest | None:
        """Measure the fidelity, and write index and manifest, on rank 0. The others help a sharded teacher; None.

        RunError: a shard of another rank is missing.
        """
        assert self._splits
        if self.rounds.rank:
            self.close()
            if self.sharded:
                self._finish_rounds()
            return None
        with writing(self.folder):
            faults.point("cache.before-finish")
        sidecars = read_sidecars(self.folder, self.settings, self._splits)
        records = [record for each in sidecars.values() for record in each]
        self.rounds.broken = [name for record in records for name in record["broken"]]
        total = sum(record["sequences"] for record in records)
        self.rounds.stop_if_broken(len(self.rounds.broken), total, total)
        set_aside_others(self.folder, {record["name"] for record in records})
        tokens = {split: sha.hexdigest() for split, sha in self._tokens.items()}
        if "generated" in self.settings.data:  # what was counted may be the prompts
            tokens, self.stated["generated"] = read_written(self.folder, self.settings, sidecars)
        found = self._measure()
        self.manifest = publish_manifest(self.folder, self.settings, sidecars, tokens, *found, self.stated)
        self.close()
        return self.manifest

    def _measure(self) -> tuple[dict[str, Any] | None, dict[str, Any] | None]:
        """The fidelity of the cache, and the range of T over which it is right."""
        if self.teacher is None and self.examine is None:
            return self.measured
        split = "validation" if "validation" in self._splits else next(iter(self._splits))
        place = self._splits[split][0]
        spec, length = self.settings.codec, self.settings.seq_len
        number, positions = self.sample or fidelity.sample_size(place.sequences, length, spec.vocab_size)
        path = cache_format.shard_path(self.folder, place.name)
        with shard_errors(path), closing(Shard(path, spec)) as shard:
            batch = batch_of([shard.read(np.arange(number), checked=False)], spec)
        if self.examine is not None:
            self.stated["capture"] = {"split": split, **self.examine(batch)}
        if self.teacher is None:
            return self.measured

        def asked(tokens_BT: Tensor, segments_BT: Tensor | None) -> Tensor:
            if self.sharded:
                self.rounds.meet(more=True)
            return self.teacher(tokens_BT, segments_BT)  # type: ignore[misc]

        how = {"document_mask": self.settings.document_mask, "counted": self.written is not None}
        found, span = fidelity.measure(batch, asked, positions=positions, **how)
        if self.sharded:
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
    """Build all `splits` and finish; a finished cache of these settings stays untouched. None on all ranks but 0.

    A rank that has built its share returns while rank 0 finishes. stated: more keys of the manifest.
    """
    writer = CacheBuilder(folder, settings, **options)
    try:
        if writer.manifest is not None:
            return writer.manifest if writer.rounds.rank == 0 else None
        # All first rows before any forward: else the teacher may work for hours before a later split turns out empty.
        for split, rows in {split: not_empty(split, rows, settings) for split, rows in splits.items()}.items():
            writer.build(split, rows)
        writer.stated |= {name: each for name, each in (stated or {}).items() if each}  # some are counted meanwhile
        return writer.finish()
    finally:
        writer.close()


def not_empty(split: str, rows: Iterable[PackedRow], settings: CacheSettings) -> Iterable[PackedRow]:
    """The rows of a split. UsageError: there are none, or no token of them counts."""
    remaining, seen = iter(rows), list[PackedRow]()
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
