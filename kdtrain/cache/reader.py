"""Reading a cache: sequences in any order, as tokens, masks and targets.

Shards are opened when first needed, in the process that needs them (an HDF5 handle survives neither a fork
nor a pickle), and at most `MAX_OPEN` stay open. A read goes through the sequences in the order of the file,
each once. Only shards are read, never `index.h5`: a virtual data set whose shard is gone reads as fill
values. A shard whose size differs from the manifest's, a chunk whose checksum fails and a missing target
are errors that name the shard.
"""

import os
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import h5py
import hdf5plugin  # noqa: F401  (registers the decompressor)
import numpy as np
import torch
from torch import Tensor

from kdtrain.cache import layout
from kdtrain.cache.codec import CodecSpec, decode
from kdtrain.cache.provenance import Manifest, read_manifest
from kdtrain.errors import RunError, UsageError
from kdtrain.objective.targets import DenseTargets, SparseTargets

MAX_OPEN = 16
"""Shards kept open at once."""


@dataclass(frozen=True)
class CachedBatch:
    """B sequences of a cache, on the CPU."""

    tokens: Tensor
    """[B, T+1] int64; tokens[:, t+1] is the label of position t."""
    loss_mask: Tensor
    """[B, T] bool."""
    segments: Tensor
    """[B, T] int64, document number within the sequence."""
    targets: SparseTargets | DenseTargets | None
    """N = B*T rows, sequence by sequence; None for the codec `tokens`."""


class CacheReader:
    """One split of a finished cache. UsageError: no finished cache there, or no such split."""

    def __init__(self, folder: Path | str, split: str) -> None:
        self.folder = Path(folder)
        self.manifest: Manifest = read_manifest(folder)
        if split not in self.manifest.splits:
            there = ", ".join(self.manifest.splits)
            raise UsageError(f"the cache {folder} has no split '{split}'; it has {there}")
        self.split = split
        self._shards: list[dict[str, Any]] = self.manifest.splits[split]["shards"]
        self._files: OrderedDict[int, h5py.File] = OrderedDict()
        self._process = os.getpid()

    def __len__(self) -> int:
        """Number of sequences."""
        return self.manifest.splits[self.split]["sequences"]

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_files": OrderedDict(), "_process": None}

    def read(self, indices: Sequence[int]) -> CachedBatch:
        """The sequences `indices` (0 .. len - 1, any order, repeats allowed), in that order.

        RunError: a shard that is missing or damaged, named. IndexError: a number outside the split.
        """
        wanted, place = np.unique(np.asarray(indices, dtype=np.int64), return_inverse=True)
        if not len(wanted) or wanted[0] < 0 or wanted[-1] >= len(self):
            raise IndexError(f"sequences {indices} are not among the {len(self)} of {self.split}")
        per_shard = self.manifest.settings.sequences_per_shard
        parts = []
        for shard in np.unique(wanted // per_shard):
            rows = wanted[wanted // per_shard == shard] - shard * per_shard
            parts.append(self._read_shard(int(shard), rows))
        arrays = {name: np.concatenate([part[name] for part in parts])[place] for name in parts[0]}
        return batch_of(arrays, self.manifest.codec)

    def _read_shard(self, number: int, rows: np.ndarray) -> dict[str, np.ndarray]:
        path = layout.shard_path(self.folder, self._shards[number]["name"])
        try:
            return read_arrays(self._open(number, path), rows)
        except (OSError, KeyError, ValueError, IndexError) as error:
            reason = str(error).splitlines()[0]
            raise RunError(
                f"shard {path} cannot be read ({reason}): run kdtrain verify {self.folder} --repair, "
                "then the same cache-teacher command again"
            ) from error

    def _open(self, number: int, path: Path) -> h5py.File:
        if self._process != os.getpid():
            # A parent's handles share its file offsets and locks: read-only ones may be dropped, not used.
            self._files, self._process = OrderedDict(), os.getpid()
        if number not in self._files:
            if path.stat().st_size != self._shards[number]["bytes"]:
                raise OSError("its size differs from the manifest's")
            self._files[number] = h5py.File(path, "r")
            if len(self._files) > MAX_OPEN:
                self._files.popitem(last=False)[1].close()
        self._files.move_to_end(number)
        return self._files[number]

    def close(self) -> None:
        """Close every open shard; a later read opens them again."""
        while self._files:
            self._files.popitem()[1].close()


def read_arrays(file: h5py.File, rows: np.ndarray) -> dict[str, np.ndarray]:
    """The given sequences of an open shard, every data set [len(rows), ...], as stored; `rows` ascending.

    ValueError: a target that was never written.
    """
    adjacent = len(rows) == rows[-1] - rows[0] + 1
    arrays = {}
    for name, dataset in file.items():
        if adjacent:
            arrays[name] = dataset[rows[0] : rows[-1] + 1]
        else:
            arrays[name] = np.stack([dataset[row] for row in rows])
    if np.isnan(arrays.get("label_logprob", 0.0)).any():
        raise ValueError("it lacks targets")
    return arrays


def batch_of(arrays: dict[str, np.ndarray], spec: CodecSpec) -> CachedBatch:
    """A batch of stored arrays."""
    return CachedBatch(
        tokens=torch.from_numpy(arrays["tokens"].astype(np.int64)),
        loss_mask=torch.from_numpy(arrays["loss_mask"] == 1),
        segments=torch.from_numpy(arrays["segments"].astype(np.int64)),
        targets=decode(arrays, spec),
    )
