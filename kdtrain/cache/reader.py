"""Reading a cache: sequences in any order, as tokens, masks and targets.

A process opens a shard when it first needs it (an HDF5 handle survives neither a fork nor a pickle) and keeps at most
`MAX_OPEN` open. The reader compares the sizes of all shards with the manifest at once; a shard's SHA-256 and structure
before it first opens it, and again when the file has changed since; a shard's dictionary and masks when it opens it;
a sequence's numbers when it first reads them (`checks`). A read goes through the sequences in the order of the file,
each once, with one HDF5 call for each run of neighbours; threads take turns at the files, and decode side by side. Only
shards are read, never `index.h5`: a virtual data set whose shard is gone reads as fill values. A shard that is damaged,
or not the manifest's, raises an error that names it.

What it gives up: the first read from a shard reads all of it, once a reader; in a split of more than
`MAX_OPEN` shards a random read has to open one, which takes as long as twenty sequences (larger shards help).
"""

import operator
import os
import threading
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

from kdtrain import faults
from kdtrain.cache import format as cache_format
from kdtrain.cache.hdf5 import check_structure
from kdtrain.cache.manifest import Manifest, check_sizes, read_manifest
from kdtrain.cache.shard import Shard, batch_of, shard_errors
from kdtrain.cache.verify import verify_cache
from kdtrain.errors import UsageError, as_path
from kdtrain.files import file_digest
from kdtrain.objective.batch import Batch

MAX_OPEN = 16
"""Shards kept open at once. Each holds 0.6 MiB of HDF5's own, which no setting lowers, and its lists: 0.25 MiB at
V = 2,048, 2 MiB at V = 151,936."""


class CacheReader(Dataset[dict[str, Tensor]]):
    """One split of a finished cache: a map-style data set whose items are the `fields` of one sequence, without B.

    Threads and processes may share it. An item also has what a `Student` checks its first batch against: `vocabulary`
    [2] int64, the rows of the teacher's output head and the entries of its tokenizer, and, where there is a teacher,
    `temperature_range` [2] fp64, the lowest and the highest T at which the cache is right.

    manifest: of this folder, if it is read already.

    UsageError: the folder holds no finished cache, the cache has no such split, or a shard of any split is missing or
    has another size than the manifest states.
    """

    def __init__(self, folder: Path | str, split: str, manifest: Manifest | None = None) -> None:
        self.folder = Path(folder)
        self.manifest = manifest or read_manifest(folder)
        check_sizes(folder, self.manifest)
        if split not in self.manifest.splits:
            there = ", ".join(self.manifest.splits)
            raise UsageError(f"the cache {folder} has no split '{split}'; it has {there}")
        self.split = split
        self._shards = self.manifest.splits[split]["shards"]
        self._paths = [cache_format.shard_path(self.folder, shard["name"]) for shard in self._shards]
        self._open: OrderedDict[int, Shard] = OrderedDict()
        self._verified: dict[int, tuple[int, int, int]] = {}
        self._checked: dict[int, np.ndarray] = {}
        self._process = os.getpid()
        self._locks: dict[int, threading.Lock] = {}

    def __repr__(self) -> str:
        sizes = f"{len(self)} sequences of {self.manifest.settings.seq_len} tokens"
        return f"CacheReader('{self.folder}', '{self.split}'): {sizes}"

    def __len__(self) -> int:
        """Number of sequences."""
        return self.manifest.splits[self.split]["sequences"]

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        """One sequence as named tensors, see `Batch.fields`; -1 is the last."""
        index = operator.index(index)
        return self.__getitems__([index + len(self) if index < 0 else index])[0]

    def __getitems__(self, indices: Sequence[int]) -> list[dict[str, Tensor]]:
        """Several sequences in one read; PyTorch's loaders call this."""
        fields = self.read(indices).fields()
        settings, size = self.manifest.settings, len(indices)
        fields["vocabulary"] = torch.tensor([settings.vocab_size, settings.tokenizer_size]).expand(size, -1)
        if (valid := self.manifest.temperature_range) is not None:
            span = torch.tensor([valid["min"], valid["max"]], dtype=torch.float64)
            fields["temperature_range"] = span.expand(size, -1)
        return [{name: tensor[row] for name, tensor in fields.items()} for row in range(size)]

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_open": OrderedDict(), "_process": None, "_locks": {}}

    def _lock(self) -> threading.Lock:
        """This process's own: one that another thread held at a fork is never released in the child."""
        return self._locks.setdefault(os.getpid(), threading.Lock())

    def read(self, indices: Sequence[int]) -> Batch:
        """The sequences `indices` (0 .. len - 1, any order, repeats allowed), in that order.

        RunError: a shard is missing or damaged (named). IndexError: a number outside the split.
        """
        wanted, place = np.unique(np.asarray(indices, dtype=np.int64), return_inverse=True)
        if not len(wanted) or wanted[0] < 0 or wanted[-1] >= len(self):
            raise IndexError(f"sequences {indices} are not among the {len(self)} of {self.split}")
        per_shard = self.manifest.settings.sequences_per_shard
        shards, first = np.unique(wanted // per_shard, return_index=True)
        rows = dict(zip(shards.tolist(), np.split(wanted % per_shard, first[1:]), strict=True))
        parts = []
        with self._lock():
            for shard, part in rows.items():
                with shard_errors(self._paths[shard]):
                    faults.point("cache.read")
                    opened = self._shard(shard)
                    parts.append(opened.read(part, checked=bool(self._checked[shard][part].all())))
        try:
            batch = batch_of(parts, self.manifest.codec, place)
        except (ValueError, IndexError):  # find the shard that raised it
            for shard, part in zip(rows, parts, strict=True):
                with shard_errors(self._paths[shard]):
                    batch_of([part], self.manifest.codec)
            raise
        for shard, part in zip(rows, parts, strict=True):
            if not part.checked:
                self._checked[shard][rows[shard]] = True
        return batch

    def _shard(self, number: int) -> Shard:
        if self._process != os.getpid():
            # A parent's handles share its file offsets and locks: a child may drop them, but not read through them.
            self._open, self._process = OrderedDict(), os.getpid()
        if number not in self._open:
            self._verify(number)
            self._open[number] = Shard(self._paths[number], self.manifest.codec)
            if len(self._open) > MAX_OPEN:
                self._open.popitem(last=False)[1].close()
        self._open.move_to_end(number)
        return self._open[number]

    def _verify(self, number: int) -> None:
        """OSError: the file is not the one of the manifest. ValueError: it is not a shard."""
        path = self._paths[number]
        found = path.stat()
        seen = (found.st_size, found.st_mtime_ns, found.st_ino)
        if self._verified.get(number) == seen:
            return
        if found.st_size != self._shards[number]["bytes"]:
            raise OSError("its size differs from the manifest's")
        if file_digest(path) != self._shards[number]["sha256"]:
            raise OSError("its content changed: its SHA-256 differs from the manifest's")
        settings, sequences = self.manifest.settings, self._shards[number]["sequences"]
        first = number * settings.sequences_per_shard
        check_structure(path, settings.codec, settings.seq_len, self.split, first, sequences)
        self._verified[number], self._checked[number] = seen, np.zeros(sequences, bool)

    def close(self) -> None:
        """Close every open shard; a later read opens them again."""
        with self._lock():
            while self._open:
                self._open.popitem()[1].close()


class Cache:
    """A finished cache: its splits as PyTorch data sets by name, and its manifest.

    Raises:
        UsageError: the folder holds no finished cache.

    >>> cache = Cache("cache/t")
    >>> list(cache), len(cache["train"]), cache.temperature_range, cache.verify()
    (['train', 'validation'], 5, (0.6666666666666666, 4.0), [])
    >>> from torch.utils.data import DataLoader
    >>> loader = DataLoader(cache["train"], batch_size=2, collate_fn=collate)
    >>> next(iter(loader))["tokens"].shape
    torch.Size([2, 25])
    """

    def __init__(self, folder: Path | str) -> None:
        self.folder = as_path(folder, "folder")
        self._splits: dict[str, CacheReader] = {}
        self.manifest: Manifest = read_manifest(self.folder)

    def __getitem__(self, split: str) -> "CacheReader":
        """The split `train` or `validation`. UsageError: see `CacheReader`."""
        if split not in self._splits:
            self._splits[split] = CacheReader(self.folder, split, self.manifest)
        return self._splits[split]

    def __iter__(self) -> Iterator[str]:
        return iter(self.manifest.splits)

    def __contains__(self, split: object) -> bool:
        return split in self.manifest.splits

    def __len__(self) -> int:
        return len(self.manifest.splits)

    def __repr__(self) -> str:
        sizes = ", ".join(f"{name}: {split['sequences']}" for name, split in self.manifest.splits.items())
        return f"Cache('{self.folder}'): {sizes} sequences of {self.manifest.settings.seq_len} tokens"

    @property
    def temperature_range(self) -> tuple[float, float]:
        """The lowest and the highest T at which the cache is right, as measured when it was built."""
        known = self.manifest.temperature_range
        return (known["min"], known["max"]) if known else (0.25, 20.0)

    def verify(self) -> list[str]:
        """Read the whole cache and compare every digest; one line for each problem."""
        return verify_cache(self.folder)


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
