"""Reading a cache: sequences in any order, as tokens, masks and targets.

A process opens a shard when it first needs it (an HDF5 handle survives neither a fork nor a pickle) and keeps at most
`MAX_OPEN` open, and the lists of those that it closed up to `MAX_LISTS` bytes. The reader compares the sizes of all
shards with the manifest at once; a shard's SHA-256 and structure before it first opens it, and again when the file has
changed since; a shard's dictionary and masks when it reads them; a sequence's numbers when it first reads them
(`checks`). A read goes through the sequences in the order of the file, each once, with one HDF5 call for each run of
neighbours; threads take turns at the files, and decode side by side. Only shards are read, never `index.h5`: a virtual
data set whose shard is gone reads as fill values. A shard that is damaged, or not the manifest's, raises an error that
names it.

What it gives up: the first read from a shard reads all of it, once a reader; from more than `MAX_OPEN` shards a random
read has to open one again, which takes as long as three sequences of 512 tokens, and ten where `MAX_LISTS` is used up
(larger shards help).
"""

import math
import operator
import os
import resource
import shutil
import threading
import time
import weakref
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import h5py
import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

from kdtrain import faults
from kdtrain.cache.format import names as cache_format
from kdtrain.cache.format.hdf5 import check_structure
from kdtrain.cache.format.manifest import Manifest, ShardRecord, check_sizes, first_rows, read_manifest
from kdtrain.cache.read.shard import Shard, Stored, batch_of, shard_errors
from kdtrain.errors import RunError, UsageError, as_path
from kdtrain.files import file_digest
from kdtrain.objective.batch import Batch, Collator
from kdtrain.objective.targets import ANY_T

if TYPE_CHECKING:
    from kdtrain.data.packed import PackedRow

MAX_OPEN = max(16, min(256, resource.getrlimit(resource.RLIMIT_NOFILE)[0] // 8))
"""Shards that all readers keep open at once, an eighth of the files that a process may open. Each holds 0.6 MiB of
HDF5's own, which no setting lowers, and its lists: 0.25 MiB at V = 2,048, 2 MiB at V = 151,936."""
MAX_LISTS = 2**28
"""Bytes of lists and masks that all readers keep of shards that are closed again."""
_readers: "weakref.WeakValueDictionary[int, CacheReader]" = weakref.WeakValueDictionary()


_ROWS_AT_ONCE = 64
AHEAD = 8
"""Shards after the one that is read that are requested from a `ShardSource` in advance."""


class ShardSource(Protocol):
    """Puts the shards of a cache into its folder while it is read, by fetching or capturing them."""

    address: Any
    """What messages call the cache."""

    def bring_tokenizer(self) -> None:
        """Put the tokenizer's files into the folder. RunError: impossible."""

    def ensure(self, record: ShardRecord, altered: bool = False) -> object:
        """Put a whole shard into the folder, and complete its record. RunError: impossible.

        altered: the file there has another digest than the record.
        """
        ...

    def ahead(self, records: Iterable[ShardRecord]) -> None:
        """Begin to fetch shards that may be read next."""


class AlteredError(OSError):
    """A file differs from the one that the manifest states."""


class Sequences(Dataset[dict[str, Tensor]]):
    """A map-style data set of sequences that are read several at a time."""

    def __len__(self) -> int:
        raise NotImplementedError

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        """Return one sequence as named tensors, see `Batch.fields`; -1 is the last."""
        index = operator.index(index)
        return self.__getitems__([index + len(self) if index < 0 else index])[0]

    def __getitems__(self, indices: Sequence[int]) -> list[dict[str, Tensor]]:
        """Return several sequences from one read; PyTorch's loaders call this."""
        raise NotImplementedError


def items_of(
    batch: Batch, vocabulary: tuple[int, int], temperatures: tuple[float, float] | None
) -> list[dict[str, Tensor]]:
    """Return each sequence of a batch as named tensors, with what a `Student` checks its first batch against."""
    fields = batch.fields()
    size = len(batch.tokens)
    fields["vocabulary"] = torch.tensor(vocabulary).expand(size, -1)
    if temperatures is not None:
        fields["temperature_range"] = torch.tensor(temperatures, dtype=torch.float64).expand(size, -1)
    return [{name: tensor[row] for name, tensor in fields.items()} for row in range(size)]


class CacheReader(Sequences):
    """One split of a finished cache: a map-style data set whose items are the `fields` of one sequence, without B.

    Threads and processes may share it. An item also has what a `Student` checks its first batch against: `vocabulary`
    [2] int64, the rows of the teacher's output head and the entries of its tokenizer, and, where there is a teacher,
    `temperature_range` [2] fp64, the lowest and the highest T at which the cache is right.

    manifest: of this folder, if it is read already. remote: puts the shards and the tokenizer into the folder.

    UsageError: the folder holds no finished cache, the cache has no such split, or a shard of any split is missing or
    has another size than the manifest states.
    """

    def __init__(
        self, folder: Path | str, split: str, manifest: Manifest | None = None, remote: ShardSource | None = None
    ) -> None:
        self.folder = Path(folder)
        self.name = str(folder if remote is None else remote.address)
        """What the cache is called in messages: its folder or its address."""
        self._called = None if remote is None else self.name
        self.manifest = manifest or read_manifest(folder)
        self.remote = remote
        if remote is None:
            check_sizes(folder, self.manifest)
        if split not in self.manifest.splits:
            raise UsageError(f"the cache {self.name} has no split '{split}'; it has {', '.join(self.manifest.splits)}")
        if remote is not None:
            remote.bring_tokenizer()
        self.split = split
        self._shards = self.manifest.splits[split]["shards"]
        self.first_rows = np.array(first_rows(self.manifest.splits[split]))
        """The number of the first sequence of each shard, and in the end that of all."""
        self._paths = [cache_format.shard_path(self.folder, shard["name"]) for shard in self._shards]
        self._open: OrderedDict[int, Shard] = OrderedDict()
        self._closed: OrderedDict[int, Shard] = OrderedDict()
        self._verified: dict[int, tuple[int, int, int]] = {}
        self._checked: dict[int, np.ndarray] = {}
        self._process = os.getpid()
        self._locks: dict[int, threading.RLock] = {}

    def __repr__(self) -> str:
        sizes = f"{len(self)} sequences of {self.manifest.settings.seq_len} tokens"
        return f"CacheReader('{self.name}', '{self.split}'): {sizes}"

    def __len__(self) -> int:
        """Return the number of sequences."""
        return self.manifest.splits[self.split]["sequences"]

    def __getitems__(self, indices: Sequence[int]) -> list[dict[str, Tensor]]:
        settings = self.manifest.settings
        span = self.manifest.temperature_range
        temperatures = None if span is None else (span["min"], span["max"])
        return items_of(self.read(indices), (settings.vocab_size, settings.tokenizer_size), temperatures)

    @property
    def collator(self) -> Collator:
        """The properties that all sequences share, for a `Student` that gets the data set too."""
        codec = self.manifest.codec
        return Collator((codec.knots, codec.num_samples) if codec.coded else None)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_open": OrderedDict(), "_closed": OrderedDict(), "_process": None, "_locks": {}}

    def _lock(self) -> threading.RLock:
        """Return this process's own lock: one that another thread held at a fork is never released in the child."""
        return self._locks.setdefault(os.getpid(), threading.RLock())

    def read(self, indices: Sequence[int]) -> Batch:
        """Read the sequences `indices` (0 .. len - 1, any order, repeats allowed), in that order.

        RunError: a shard is missing or damaged (named). IndexError: a number outside the split.
        """
        rows, place = self._places(indices)
        parts: list[Stored] = []
        with self._lock():
            self._here(rows)
            for shard, part in rows.items():
                with self._reading(shard) as opened:
                    parts.append(opened.read(part, checked=bool(self._checked[shard][part].all())))
        try:
            batch = batch_of(parts, self.manifest.codec, place)
        except (ValueError, IndexError):  # find the shard that raised it
            for shard, stored in zip(rows, parts, strict=True):
                with shard_errors(self._paths[shard], self._called):
                    batch_of([stored], self.manifest.codec)
            raise
        for shard, stored in zip(rows, parts, strict=True):
            if not stored.checked:
                self._checked[shard][rows[shard]] = True
        return batch

    def text(self, indices: Sequence[int] | np.ndarray) -> dict[str, np.ndarray]:
        """Read tokens [n, T + 1], loss_mask and segments [n, T] of sequences, as they are stored, and nothing else.

        RunError, IndexError: as `read`.
        """
        rows, place = self._places(indices)
        parts = []
        with self._lock():
            self._here(rows)
            for shard, part in rows.items():
                with self._reading(shard) as opened:
                    parts.append(opened.text(part))
        return {name: np.concatenate([part[name] for part in parts])[place] for name in parts[0]}

    def rows(self, numbers: Sequence[int] | np.ndarray | None = None) -> "Iterator[PackedRow]":
        """Yield the sequences `numbers` (None: all) in this order, without targets. RunError, IndexError: as `read`."""
        from kdtrain.data.packed import PackedRow  # what builds another cache asks for them, and no run

        numbers = range(len(self)) if numbers is None else numbers
        for start in range(0, len(numbers), _ROWS_AT_ONCE):
            found = self.text(numbers[start : start + _ROWS_AT_ONCE])
            yield from (PackedRow(*row) for row in zip(*found.values(), strict=True))

    def shard_file(self, number: int) -> Path:
        """Return the file of a shard, after comparing it with the manifest and the format. RunError: it is damaged."""
        with self._lock(), self._reading(number):
            return self._paths[number]

    def copy_shard(
        self, number: int, path: Path, rows: np.ndarray | None = None, *, first: int = 0, link: bool = False
    ) -> dict[str, int]:
        """Write a shard to `path`, and return its stored bytes by data set.

        rows: of these alone, within the shard, ascending, as a shard that begins with the number `first`. link: a whole
        one may be the same file. RunError: it is damaged.
        """
        from kdtrain.cache.format.hdf5_writing import copy_rows, stored_bytes  # what makes another cache needs it

        source = self.shard_file(number)
        settings = self.manifest.settings
        if rows is not None:
            return copy_rows(source, path, settings.codec, settings.seq_len, self.split, first, rows)
        if link and not source.is_symlink():
            with suppress(OSError):
                os.link(source, path)
        if not path.exists():
            shutil.copyfile(source, path)
        if file_digest(path) != self._shards[number]["sha256"]:
            raise RunError(f"{source}: its content changed while it was read; run the same command again")
        with h5py.File(path) as file:
            return stored_bytes(file)

    def _places(self, indices: Sequence[int] | np.ndarray) -> tuple[dict[int, np.ndarray], np.ndarray]:
        """Return the wanted rows by shard, ascending, and each index's place among them. IndexError: there is none."""
        wanted, place = np.unique(np.asarray(indices, dtype=np.int64), return_inverse=True)
        if not len(wanted) or wanted[0] < 0 or wanted[-1] >= len(self):
            raise IndexError(f"sequences {indices} are not among the {len(self)} of {self.split}")
        holders = np.searchsorted(self.first_rows, wanted, side="right") - 1
        shards, first = np.unique(holders, return_index=True)
        parts = np.split(wanted - self.first_rows[holders], first[1:])
        return dict(zip(shards.tolist(), parts, strict=True)), place

    @contextmanager
    def _reading(self, number: int) -> Iterator[Shard]:
        """Yield a shard, fetched, compared and open. RunError: it is missing or damaged."""
        if self.remote is not None:
            self.remote.ensure(self._shards[number])
        with shard_errors(self._paths[number], self._called):
            faults.point("cache.read")
            yield self._shard(number)

    def _here(self, shards: Iterable[int]) -> None:
        """Begin to fetch the shards that are missing here, and the next ones."""
        if self.remote is not None:
            wanted = dict.fromkeys([*shards, *(shard + more for shard in shards for more in range(1, AHEAD + 1))])
            shards = [each for each in wanted if each < len(self._paths) and not self._paths[each].exists()]
            self.remote.ahead(self._shards[each] for each in shards)

    def _give_way(self) -> bool:
        """Close the oldest open shard for another reader; return False if none is open or a thread is reading. Two
        readers may wait for each other, so the wait is short."""
        lock = self._lock()
        if self._process != os.getpid() or not lock.acquire(timeout=0.05):
            return False
        try:
            if found := bool(self._open):
                self._close_oldest()
            return found
        finally:
            lock.release()

    def _close_oldest(self) -> None:
        number, shard = self._open.popitem(last=False)
        shard.close()
        self._closed[number] = shard
        kept = [(each._closed, *item) for each in _of_process() for item in list(each._closed.items())]
        over = sum(lists.nbytes for *_, lists in kept) - MAX_LISTS
        for closed, at, lists in sorted(kept, key=lambda each: each[2].read_at):
            if over > 0:
                closed.pop(at, None)
                over -= lists.nbytes

    def _shard(self, number: int) -> Shard:
        if self._process != os.getpid():
            # A parent's handles share its file offsets and locks: a child may drop them, but not read through them.
            self._open = OrderedDict()
            self._process = os.getpid()
        _readers[id(self)] = self
        if number not in self._open:
            try:
                self._verify(number)
            except AlteredError:
                if self.remote is None:
                    raise
                self.remote.ensure(self._shards[number], altered=True)
                self._verify(number)
            shard = self._closed.pop(number, None)
            there = _of_process()
            while sum(len(each._open) for each in there) >= MAX_OPEN:
                times = {each: [shard.read_at for shard in list(each._open.values())] for each in there}
                if not any(
                    each._give_way() for each in sorted(there, key=lambda each: min(times[each], default=math.inf))
                ):
                    break  # the others are being read
            if shard is not None:
                shard.open()
            self._open[number] = shard or Shard(self._paths[number], self.manifest.codec)
        self._open.move_to_end(number)
        self._open[number].read_at = time.monotonic()
        return self._open[number]

    def _verify(self, number: int) -> None:
        """Raise OSError if the file is not the one of the manifest, ValueError if it is not a shard."""
        path = self._paths[number]
        found = path.stat()
        seen = (found.st_size, found.st_mtime_ns, found.st_ino)
        if self._verified.get(number) == seen:
            return
        self._closed.pop(number, None)
        if found.st_size != self._shards[number]["bytes"]:
            raise AlteredError("its size differs from the manifest's")
        if file_digest(path) != self._shards[number]["sha256"]:
            raise AlteredError("its content changed: its SHA-256 differs from the manifest's")
        settings = self.manifest.settings
        sequences = self._shards[number]["sequences"]
        first = self._shards[number].get("first_sequence", int(self.first_rows[number]))
        check_structure(path, settings.codec, settings.seq_len, self.split, first, sequences)
        self._verified[number], self._checked[number] = seen, np.zeros(sequences, bool)

    def close(self) -> None:
        """Close every open shard; a later read opens them again."""
        with self._lock():
            while self._open:
                self._close_oldest()
            self._closed.clear()


def _of_process() -> list[CacheReader]:
    """Return the readers that have read in this process: a reader copied by a fork counts in its parent alone."""
    there = [each() for each in _readers.valuerefs()]
    return [reader for reader in there if reader is not None and reader._process == os.getpid()]


class LocalCache:
    """A finished cache in a folder: its splits as PyTorch data sets by name, and its manifest.

    manifest: of this folder, if it is read already. remote: see `CacheReader`.

    UsageError: there is no finished cache.
    """

    split_type: type[CacheReader] = CacheReader

    def __init__(self, folder: Path | str, manifest: Manifest | None = None, remote: ShardSource | None = None) -> None:
        self.folder = Path(folder)
        self.remote = remote
        self.name = str(folder if remote is None else remote.address)
        self.manifest: Manifest = manifest or read_manifest(folder)
        self._splits: dict[str, CacheReader] = {}

    def __getitem__(self, split: str) -> CacheReader:
        """Return the split `train` or `validation`. UsageError: see `CacheReader`."""
        if split not in self._splits:
            self._splits[split] = self.split_type(self.folder, split, self.manifest, self.remote)
        return self._splits[split]

    def __iter__(self) -> Iterator[str]:
        return iter(self.manifest.splits)

    def __contains__(self, split: object) -> bool:
        return split in self.manifest.splits

    def __len__(self) -> int:
        return len(self.manifest.splits)

    def __repr__(self) -> str:
        sizes = ", ".join(f"{name}: {split['sequences']}" for name, split in self.manifest.splits.items())
        return f"Cache('{self.name}'): {sizes} sequences of {self.manifest.settings.seq_len} tokens"

    @property
    def tokenizer(self) -> Path:
        """The folder of its tokenizer's files."""
        return self.folder / cache_format.TOKENIZER

    @property
    def temperature_range(self) -> tuple[float, float]:
        """The lowest and the highest T at which the cache is right, as measured when it was built."""
        known = self.manifest.temperature_range
        return (known["min"], known["max"]) if known else ANY_T


def collate(items: Sequence[Mapping[str, Tensor]]) -> dict[str, Tensor]:
    """Stack sequences of a cache into one batch: each tensor gets a first dimension B.

    UsageError: the sequences are of caches with different codecs.
    """
    shapes = [{name: tensor.shape for name, tensor in item.items()} for item in items]
    if any(each != shapes[0] for each in shapes):
        raise UsageError(
            "the batch mixes sequences of caches with different codecs or lengths; draw batches of one cache each, as "
            "DataLoader(mixture, batch_sampler=mixture.batches(8), collate_fn=kd.collate) does"
        )
    return {name: torch.stack([item[name] for item in items]) for name in items[0]}


def open_cache(where: Path | str) -> LocalCache:
    """Open the finished cache in a folder, or at an address. UsageError, RunError: as `LocalCache`, `open_remote`."""
    from kdtrain.net.address import parse_address

    folder = as_path(where, "where")
    if (address := parse_address(where)) is None:
        return LocalCache(folder)
    from kdtrain.cache.read.remote import open_remote

    remote = open_remote(address)
    return LocalCache(remote.folder, remote.manifest, remote)
