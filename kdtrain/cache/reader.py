"""Reading a cache: sequences in any order, as tokens, masks and targets.

Shards are opened when first needed, in the process that needs them (an HDF5 handle survives neither a fork
nor a pickle), and at most `MAX_OPEN` stay open. The sizes of all are compared with the manifest's at once, a
shard's SHA-256 and its structure before it is opened for the first time, and again when the file has changed
since; its numbers when they are first read (`checks`). A read goes through the sequences in the order of the
file, each once. Only shards are read, never `index.h5`: a virtual data set whose shard is gone reads as fill
values. A shard that is not the one of the manifest, or not one at all, is an error that names it.

What it gives up: the first read from a shard reads all of it, once a reader; in a split of more than
`MAX_OPEN` shards a random read has to open one, which takes as long as twenty sequences (larger shards help).
"""

import os
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

from kdtrain import faults
from kdtrain.cache import format as cache_format
from kdtrain.cache.checks import check_structure
from kdtrain.cache.manifest import Manifest, check_sizes, read_manifest, verify_cache
from kdtrain.cache.shard_reader import CachedBatch, Shard, batch_of, naming
from kdtrain.errors import UsageError
from kdtrain.files import file_digest

MAX_OPEN = 16
"""Shards kept open at once. Each holds 0.6 MiB of HDF5's own, which no setting lowers, and its lists: 0.25 MiB at
V = 2,048, 2 MiB at V = 151,936."""


class Cache:
    """A finished cache: its splits as data sets for PyTorch, and what it says of itself. Not thread-safe.

    Raises:
        UsageError: there is no finished cache, or a shard is missing or of another size than it was written with.

    >>> cache = Cache("cache/t")
    >>> len(cache["train"]), cache.temperature_range, cache.verify()
    (5, (0.6666666666666666, 4.0), [])
    >>> from torch.utils.data import DataLoader
    >>> loader = DataLoader(cache["train"], batch_size=2, collate_fn=collate)
    >>> next(iter(loader))["tokens"].shape
    torch.Size([2, 25])
    """

    def __init__(self, folder: Path | str) -> None:
        self.folder = Path(folder)
        self._splits: dict[str, CacheReader] = {}
        self.manifest: Manifest = read_manifest(folder)

    def __getitem__(self, split: str) -> "CacheReader":
        """`train` or `validation`: see `CacheReader`. UsageError: there is no such split."""
        if split not in self._splits:
            self._splits[split] = CacheReader(self.folder, split)
        return self._splits[split]

    @property
    def temperature_range(self) -> tuple[float, float]:
        """The lowest and the highest T that the cache was measured to be right at."""
        known = self.manifest.temperature_range
        return (known["min"], known["max"]) if known else (0.25, 20.0)

    def verify(self) -> list[str]:
        """Read all of it and compare every digest: a line for each thing that is wrong."""
        return [str(each) for each in verify_cache(self.folder)]


def collate(items: Sequence[Mapping[str, Tensor]]) -> dict[str, Tensor]:
    """Sequences of a cache as one batch: each tensor gets a first dimension B."""
    return {name: torch.stack([item[name] for item in items]) for name in items[0]}


class CacheReader(Dataset[dict[str, Tensor]]):
    """One split of a finished cache: a map-style data set, whose items are the `fields` of one sequence, without B.

    UsageError: no finished cache there, no such split, or a shard of any split that is missing or of another size than
    it was written with.
    """

    def __init__(self, folder: Path | str, split: str) -> None:
        self.folder = Path(folder)
        self.manifest: Manifest = read_manifest(folder)
        check_sizes(folder, self.manifest)
        if split not in self.manifest.splits:
            there = ", ".join(self.manifest.splits)
            raise UsageError(f"the cache {folder} has no split '{split}'; it has {there}")
        self.split = split
        self._shards = self.manifest.splits[split]["shards"]
        self._paths = [cache_format.shard_path(self.folder, shard["name"]) for shard in self._shards]
        self._open: OrderedDict[int, Shard] = OrderedDict()
        self._sound: dict[int, tuple[int, int, int]] = {}
        self._checked: dict[int, np.ndarray] = {}
        self._process = os.getpid()

    def __len__(self) -> int:
        """Number of sequences."""
        return self.manifest.splits[self.split]["sequences"]

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        """One sequence as named tensors, see `CachedBatch.fields`."""
        return self.__getitems__([index])[0]

    def __getitems__(self, indices: Sequence[int]) -> list[dict[str, Tensor]]:
        """Several at once, which is how PyTorch's loaders ask."""
        fields = self.read(indices).fields()
        return [{name: tensor[row] for name, tensor in fields.items()} for row in range(len(indices))]

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_open": OrderedDict(), "_process": None}

    def read(self, indices: Sequence[int]) -> CachedBatch:
        """The sequences `indices` (0 .. len - 1, any order, repeats allowed), in that order.

        RunError: a shard that is missing or damaged, named. IndexError: a number outside the split.
        """
        wanted, place = np.unique(np.asarray(indices, dtype=np.int64), return_inverse=True)
        if not len(wanted) or wanted[0] < 0 or wanted[-1] >= len(self):
            raise IndexError(f"sequences {indices} are not among the {len(self)} of {self.split}")
        per_shard = self.manifest.settings.sequences_per_shard
        shards, first = np.unique(wanted // per_shard, return_index=True)
        bounds = [*first.tolist(), len(wanted)]
        rows = {
            shard: wanted[start:stop] - shard * per_shard
            for shard, start, stop in zip(shards.tolist(), bounds, bounds[1:], strict=False)
        }
        parts = []
        for shard, part in rows.items():
            with naming(self._paths[shard]):
                faults.point("cache.read")
                opened = self._shard(shard, self._paths[shard])
                parts.append(opened.read(part, checked=bool(self._checked[shard][part].all())))
        try:
            batch = batch_of(parts, self.manifest.codec, place)
        except (ValueError, IndexError):
            for shard, part in zip(rows, parts, strict=True):
                with naming(self._paths[shard]):
                    batch_of([part], self.manifest.codec)
            raise
        for shard, part in zip(rows, parts, strict=True):
            if not part.checked:
                self._checked[shard][rows[shard]] = True
        return batch

    def _shard(self, number: int, path: Path) -> Shard:
        if self._process != os.getpid():
            # A parent's handles share its file offsets and locks: read-only ones may be dropped, not used.
            self._open, self._process = OrderedDict(), os.getpid()
        if number not in self._open:
            self._prove(number, path)
            self._open[number] = Shard(path, self.manifest.codec)
            if len(self._open) > MAX_OPEN:
                self._open.popitem(last=False)[1].close()
        self._open.move_to_end(number)
        return self._open[number]

    def _prove(self, number: int, path: Path) -> None:
        """OSError: the file is not the one of the manifest. ValueError: it is not a shard."""
        found = path.stat()
        seen = (found.st_size, found.st_mtime_ns, found.st_ino)
        if self._sound.get(number) == seen:
            return
        if found.st_size != self._shards[number]["bytes"]:
            raise OSError("its size differs from the manifest's")
        if file_digest(path) != self._shards[number]["sha256"]:
            raise OSError("its content changed: its SHA-256 differs from the manifest's")
        settings, sequences = self.manifest.settings, self._shards[number]["sequences"]
        first = number * settings.sequences_per_shard
        check_structure(path, settings.codec, settings.seq_len, self.split, first, sequences)
        self._sound[number], self._checked[number] = seen, np.zeros(sequences, bool)

    def close(self) -> None:
        """Close every open shard; a later read opens them again."""
        while self._open:
            self._open.popitem()[1].close()
