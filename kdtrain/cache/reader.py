"""Reading a cache: sequences in any order, as tokens, masks and targets.

Shards are opened when first needed, in the process that needs them (an HDF5 handle survives neither a fork
nor a pickle), and at most `MAX_OPEN` stay open. The sizes of all are compared with the manifest's at once, a
shard's SHA-256 before it is opened for the first time, and again when the file has changed since. A read goes
through the sequences in the order of the file, each once. Only shards are read, never `index.h5`: a virtual
data set whose shard is gone reads as fill values. A shard that is not the one of the manifest, a chunk whose
checksum fails and a missing target are errors that name the shard.

What it gives up: the first read from a shard reads all of it, once a reader; in a split of more than
`MAX_OPEN` shards a random read has to open one, which takes as long as twenty sequences (larger shards help).
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

from kdtrain import faults
from kdtrain.cache import layout
from kdtrain.cache.codec import CodecSpec, decode
from kdtrain.cache.coding import Coding, unpack
from kdtrain.cache.provenance import Manifest, check_sizes, read_manifest
from kdtrain.errors import RunError, UsageError
from kdtrain.files import file_digest
from kdtrain.objective.targets import Targets

MAX_OPEN = 16
"""Shards kept open at once. Each holds 0.6 MiB of HDF5's own, which no setting lowers, and its lists: 0.25 MiB at
V = 2,048, 2 MiB at V = 151,936."""


@dataclass(frozen=True)
class CachedBatch:
    """B sequences of a cache, on the CPU."""

    tokens: Tensor
    """[B, T+1] int64; tokens[:, t+1] is the label of position t."""
    loss_mask: Tensor
    """[B, T] bool."""
    segments: Tensor
    """[B, T] int64, document number within the sequence."""
    targets: Targets | None
    """N = B*T rows, sequence by sequence; None for the codec `tokens`."""


@dataclass(frozen=True)
class Stored:
    """Sequences of one shard as they are stored, and what decodes them (None for `dense` and `tokens`)."""

    arrays: dict[str, np.ndarray]
    coding: Coding | None

    def __len__(self) -> int:
        return len(self.arrays["tokens"])

    def sequence(self, row: int) -> tuple[Coding, np.ndarray, dict[str, np.ndarray]]:
        """One sequence as `coding.unpack` takes it."""
        assert self.coding is not None
        return self.coding, self.arrays["tokens"][row], {name: self.arrays[name][row] for name in ("ids", "numbers")}


class CacheReader:
    """One split of a finished cache. UsageError: no finished cache there, no such split, or a shard of any split that
    is missing or of another size than it was written with."""

    def __init__(self, folder: Path | str, split: str) -> None:
        self.folder = Path(folder)
        self.manifest: Manifest = read_manifest(folder)
        check_sizes(folder, self.manifest)
        if split not in self.manifest.splits:
            there = ", ".join(self.manifest.splits)
            raise UsageError(f"the cache {folder} has no split '{split}'; it has {there}")
        self.split = split
        self._shards = self.manifest.splits[split]["shards"]
        self._paths = [layout.shard_path(self.folder, shard["name"]) for shard in self._shards]
        self._open: OrderedDict[int, Shard] = OrderedDict()
        self._sound: dict[int, tuple[int, int, int]] = {}
        self._process = os.getpid()

    def __len__(self) -> int:
        """Number of sequences."""
        return self.manifest.splits[self.split]["sequences"]

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
        parts = [
            self._read_shard(shard, wanted[start:stop] - shard * per_shard)
            for shard, start, stop in zip(shards.tolist(), bounds, bounds[1:], strict=False)
        ]
        return batch_of(parts, self.manifest.codec, place)

    def _read_shard(self, number: int, rows: np.ndarray) -> "Stored":
        path = self._paths[number]
        try:
            faults.point("cache.read")
            return self._shard(number, path).read(rows)
        except (OSError, KeyError, ValueError, IndexError) as error:
            if not self.folder.is_dir():
                raise RunError(
                    f"the cache {self.folder} is gone, from which shard {path.name} was to be read; "
                    "put it back, and run the same command again"
                ) from error
            reason = "it is missing" if isinstance(error, FileNotFoundError) else str(error).splitlines()[0]
            raise RunError(
                f"shard {path} cannot be read ({reason}): run kdtrain verify {self.folder} --repair, "
                "then the same cache-teacher command again"
            ) from error

    def _shard(self, number: int, path: Path) -> "Shard":
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
        """OSError: the file is not the one of the manifest."""
        found = path.stat()
        seen = (found.st_size, found.st_mtime_ns, found.st_ino)
        if self._sound.get(number) == seen:
            return
        if found.st_size != self._shards[number]["bytes"]:
            raise OSError("its size differs from the manifest's")
        if file_digest(path) != self._shards[number]["sha256"]:
            raise OSError("its content changed: its SHA-256 differs from the manifest's")
        self._sound[number] = seen

    def close(self) -> None:
        """Close every open shard; a later read opens them again."""
        while self._open:
            self._open.popitem()[1].close()


class Shard:
    """An open shard. KeyError or OSError: it is not one."""

    def __init__(self, path: Path, spec: CodecSpec) -> None:
        # No chunk cache: a chunk is a sequence, read once an epoch; HDF5 would keep 8 MiB a data set of each shard.
        self._file = h5py.File(path, "r", rdcc_nbytes=0)
        self._coding = Coding.from_arrays(layout.read_dictionary(self._file), spec) if spec.kind == "sparse" else None
        sets = {name: each for name, each in self._file.items() if isinstance(each, h5py.Dataset)}
        self._length = len(sets["tokens"])
        # Masks are few runs in few chunks: read once, kept as runs.
        self._flags = {name: Runs(sets.pop(name)[()]) for name in ("loss_mask", "segments")}
        self._sets = {name: _Set(each) for name, each in sets.items()}

    def read(self, rows: np.ndarray) -> Stored:
        """The given sequences, every array [len(rows), ...]; `rows` ascending.

        ValueError: a target that was never written. OSError: a checksum fails. IndexError: too few sequences.
        """
        if rows[-1] >= self._length:
            raise IndexError(f"it has no sequence {rows[-1]}")
        arrays = {name: each.read(rows) for name, each in self._sets.items()}
        arrays |= {name: runs.read(rows) for name, runs in self._flags.items()}
        if _unwritten(arrays):
            raise ValueError("it lacks targets")
        return Stored(arrays, self._coding)

    def close(self) -> None:
        """Close the file."""
        self._file.close()


class _Set:
    """One data set, read with as few calls as h5py needs: its plain way costs four times as much a read."""

    def __init__(self, dataset: h5py.Dataset) -> None:
        self._handle, self._dtype = dataset.id, dataset.dtype
        self._type, self._space = h5py.h5t.py_create(dataset.dtype), dataset.id.get_space()
        self._shape, self._rest = dataset.shape[1:], (0,) * len(dataset.shape[1:])
        self._one = h5py.h5s.create_simple((1, *self._shape))

    def read(self, rows: np.ndarray) -> np.ndarray:
        """The rows, ascending, one call for each run of neighbours."""
        values = np.empty((len(rows), *self._shape), self._dtype)
        breaks = [start for start in range(1, len(rows)) if rows[start] != rows[start - 1] + 1]
        for start, stop in zip([0, *breaks], [*breaks, len(rows)], strict=True):
            part = values[start:stop]
            self._space.select_hyperslab((int(rows[start]), *self._rest), part.shape)
            memory = self._one if len(part) == 1 else h5py.h5s.create_simple(part.shape)
            self._handle.read(memory, self._space, part, self._type)
        return values


class Runs:
    """An array [n, T] whose rows hold few runs of equal values, kept as these runs."""

    def __init__(self, values_nT: np.ndarray) -> None:
        starts_nT = np.ones(values_nT.shape, bool)
        np.not_equal(values_nT[:, 1:], values_nT[:, :-1], out=starts_nT[:, 1:])
        places = np.flatnonzero(starts_nT)
        self._lengths = np.diff(places, append=values_nT.size).astype(np.uint32)
        self._values = values_nT.ravel()[places]
        self._first = np.concatenate([[0], np.cumsum(starts_nT.sum(1))])
        self._length = values_nT.shape[1]

    def read(self, rows: np.ndarray) -> np.ndarray:
        """The rows [len(rows), T]."""
        found = np.empty((len(rows), self._length), self._values.dtype)
        for row, out in zip(rows, found, strict=True):
            runs = slice(self._first[row], self._first[row + 1])
            out[:] = np.repeat(self._values[runs], self._lengths[runs])
        return found


def _unwritten(arrays: dict[str, np.ndarray]) -> bool:
    if "numbers" in arrays:
        return bool((arrays["numbers"][:, -1] == np.iinfo(np.uint16).max).any())
    return "label_logprob" in arrays and bool(np.isnan(arrays["label_logprob"]).any())


def batch_of(parts: Sequence[Stored], spec: CodecSpec, places: np.ndarray | None = None) -> CachedBatch:
    """One batch of the sequences of all `parts`: those at `places`, or all of them, in order."""
    sequences = [(part, row) for part in parts for row in range(len(part))]
    if places is not None:
        sequences = [sequences[place] for place in places]
    coded = ("ids", "numbers") if spec.kind == "sparse" else ()
    plain = [name for name in parts[0].arrays if name not in coded]
    arrays = {name: np.stack([part.arrays[name][row] for part, row in sequences]) for name in plain}
    if spec.kind == "sparse":
        arrays |= unpack([part.sequence(row) for part, row in sequences])
    return CachedBatch(
        tokens=torch.from_numpy(arrays["tokens"].astype(np.int64)),
        loss_mask=torch.from_numpy(arrays["loss_mask"] == 1),
        segments=torch.from_numpy(arrays["segments"].astype(np.int64)),
        targets=decode(arrays, spec),
    )
