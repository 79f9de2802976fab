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

import errno
import operator
import os
import threading
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import h5py
import hdf5plugin  # noqa: F401  (registers the decompressor)
import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

from kdtrain import faults
from kdtrain.cache import format as cache_format
from kdtrain.cache.checks import check_flags, check_lists, check_stored, check_structure, check_values
from kdtrain.cache.codec import CodecSpec, decode
from kdtrain.cache.compression import Coding, unpack
from kdtrain.cache.manifest import Manifest, check_sizes, read_manifest
from kdtrain.errors import RunError, UsageError, as_path, system_error
from kdtrain.files import file_digest
from kdtrain.objective.targets import DenseTargets, SparseTargets, Targets

MAX_OPEN = 16
"""Shards kept open at once. Each holds 0.6 MiB of HDF5's own, which no setting lowers, and its lists: 0.25 MiB at
V = 2,048, 2 MiB at V = 151,936."""
_TARGETS = ("ids", "logprobs", "counts", "tail", "label_logprob", "logit_mean", "logit_std")


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

    def fields(self) -> dict[str, Tensor]:
        """The batch as named tensors whose first dimension is B, which any trainer can move, split and concatenate.

        tokens, loss_mask, segments as above; labels [B, T+1], the tokens with -100 where the loss mask is off, for
        trainers that count the tokens of the loss themselves. Sparse targets (`SparseTargets`): ids, logprobs
        [B, T, K], counts [B, T, D] of the last D columns, which were sampled, tail [B, T, 2G], label_logprob,
        logit_mean, logit_std [B, T], knots [B, G] and num_samples [B]. Dense targets: logprobs [B, T, V],
        label_logprob [B, T].
        """
        size, length = self.loss_mask.shape
        unseen = torch.cat([self.loss_mask.new_ones(size, 1), ~self.loss_mask], 1)
        found = {"tokens": self.tokens, "loss_mask": self.loss_mask, "segments": self.segments}
        found["labels"] = self.tokens.masked_fill(unseen, -100)
        if self.targets is None:
            return found
        targets = {name: value for name, value in vars(self.targets).items() if isinstance(value, Tensor)}
        found |= {name: value.unflatten(0, (size, length)) for name, value in targets.items()}
        if isinstance(self.targets, SparseTargets):
            found["counts"] = found["counts"][..., self.targets.top_k :]
            found["knots"] = torch.tensor(self.targets.knots, dtype=torch.float64).expand(size, -1)
            found["num_samples"] = torch.tensor(self.targets.num_samples).expand(size)
        return found

    @classmethod
    def of(cls, fields: Mapping[str, Tensor], knots: tuple[float, ...] = (), num_samples: int = 0) -> "CachedBatch":
        """The inverse of `fields`. knots, num_samples: those of sparse targets, as plain Python numbers."""
        tokens, loss_mask = fields["tokens"], fields["loss_mask"]
        segments = fields.get("segments")
        batch = cls(tokens, loss_mask, torch.zeros_like(tokens[:, :-1]) if segments is None else segments, None)
        flat: dict[str, Any] = {name: value.flatten(0, 1) for name, value in fields.items() if name in _TARGETS}
        if "ids" in flat:
            absent = flat["ids"].shape[1] - flat["counts"].shape[1]
            flat["counts"] = torch.nn.functional.pad(flat["counts"], (absent, 0))
            sparse = SparseTargets(**flat, top_k=absent, num_samples=num_samples, knots=knots)
            return replace(batch, targets=sparse)
        return replace(batch, targets=DenseTargets(**flat)) if "logprobs" in flat else batch


@dataclass(frozen=True)
class Stored:
    """Sequences of one shard as they are stored, and the coding that decodes them (None for `dense` and `tokens`)."""

    arrays: dict[str, np.ndarray]
    coding: Coding | None
    checked: bool
    """True when their numbers have been checked before."""

    def __len__(self) -> int:
        return len(self.arrays["tokens"])

    def sequence(self, row: int) -> tuple[Coding, np.ndarray, np.ndarray, np.ndarray]:
        """One sparse sequence, as `unpack` takes it."""
        assert self.coding is not None
        return self.coding, self.arrays["tokens"][row], self.arrays["ids"][row], self.arrays["numbers"][row]


class Shard:
    """An open shard that has passed `check_structure`. ValueError: it has impossible numbers. OSError: a read fails."""

    def __init__(self, path: Path, spec: CodecSpec) -> None:
        # No chunk cache: a chunk is a sequence, read once an epoch; HDF5 would keep 8 MiB a data set of each shard.
        self._file, self._spec = h5py.File(path, "r", rdcc_nbytes=0), spec
        try:
            self._coding: Coding | None = None
            if spec.kind == "sparse":
                self._coding = Coding.from_arrays(cache_format.read_dictionary(self._file), spec)
                check_lists(self._coding)
            sets = {name: self._file[name] for name in list(self._file) if name != cache_format.DICTIONARY}
            # Masks are few runs in few chunks: read once, kept as runs.
            flags = {name: sets.pop(name)[()] for name in ("loss_mask", "segments")}
            check_flags(flags["loss_mask"], flags["segments"])
            self._flags = {name: Runs(values) for name, values in flags.items()}
            self._sets = {name: _Set(each) for name, each in sets.items()}
        except BaseException:
            self._file.close()
            raise

    def read(self, rows: np.ndarray, *, checked: bool) -> Stored:
        """The given sequences, every array [len(rows), ...]; `rows` ascending.

        checked: their numbers have been checked before.

        ValueError: impossible numbers, or numbers that were never written. OSError: a checksum fails.
        """
        arrays = {name: each.read(rows) for name, each in self._sets.items()}
        arrays |= {name: runs.read(rows) for name, runs in self._flags.items()}
        if not checked:
            check_stored(arrays, self._spec)
        return Stored(arrays, self._coding, checked)

    def close(self) -> None:
        """Close the file."""
        self._file.close()


class _Set:
    """One data set, read by h5py's low-level calls: a read by `dataset[...]` takes four times as long."""

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


def batch_of(parts: Sequence[Stored], spec: CodecSpec, places: np.ndarray | None = None) -> CachedBatch:
    """One batch of the sequences of all `parts`: those at `places`, or all of them, in order.

    ValueError: they unpack to impossible numbers. IndexError: a code that a dictionary does not have.
    """
    sequences = [(part, row) for part in parts for row in range(len(part))]
    if places is not None:
        sequences = [sequences[place] for place in places]
    coded = ("ids", "numbers") if spec.kind == "sparse" else ()
    plain = [name for name in parts[0].arrays if name not in coded]
    arrays = {name: np.stack([part.arrays[name][row] for part, row in sequences]) for name in plain}
    if spec.kind == "sparse":
        kept = unpack([part.sequence(row) for part, row in sequences])
        if not all(part.checked for part in parts):
            check_values(kept, spec)
        arrays |= kept
    return CachedBatch(
        tokens=torch.from_numpy(arrays["tokens"].astype(np.int64)),
        loss_mask=torch.from_numpy(arrays["loss_mask"] == 1),
        segments=torch.from_numpy(arrays["segments"].astype(np.int64)),
        targets=decode(arrays, spec),
    )


@contextmanager
def shard_errors(path: Path) -> Iterator[None]:
    """Turn any error of the block into a RunError that names the shard at `path` and its cache."""
    try:
        yield
    except MemoryError:
        raise
    except Exception as error:
        cache, system = path.parents[1], system_error(error)
        if not cache.is_dir():
            raise RunError(
                f"the cache {cache} is gone and shard {path.name} cannot be read; put it back, and run the same "
                "command again"
            ) from error
        if system is not None and system.errno not in (None, errno.ENOENT):
            # The shard is not damaged: a repair would move a sound one aside.
            raise RunError(
                f"shard {path} cannot be read now ({system.strerror}): make it readable, and run the same command again"
            ) from error
        reason = "it is missing" if isinstance(error, FileNotFoundError) else first_line(error)
        raise RunError(
            f"shard {path} cannot be read ({reason}): run kdtrain verify {cache} --repair, "
            "then the same cache-teacher command again"
        ) from error


def first_line(error: Exception) -> str:
    """The first line of an error's message, or its type: h5py raises a dozen kinds for a damaged file."""
    return next(iter(str(error).splitlines()), type(error).__name__)


class CacheReader(Dataset[dict[str, Tensor]]):
    """One split of a finished cache: a map-style data set whose items are the `fields` of one sequence, without B.

    Threads and processes may share it. An item also has what a `Student` checks its first batch against: `vocabulary`
    [2] int64, the rows of the teacher's output head and the entries of its tokenizer, and, where there is a teacher,
    `temperature_range` [2] fp64, the lowest and the highest T at which the cache is right.

    UsageError: the folder holds no finished cache, the cache has no such split, or a shard of any split is missing or
    has another size than the manifest states.
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
        """One sequence as named tensors, see `CachedBatch.fields`; -1 is the last."""
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

    def read(self, indices: Sequence[int]) -> CachedBatch:
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
            self._splits[split] = CacheReader(self.folder, split)
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
        from kdtrain.cache.verify import verify_cache  # which reads shards by this module

        return verify_cache(self.folder)


def collate(items: Sequence[Mapping[str, Tensor]]) -> dict[str, Tensor]:
    """Stack sequences of a cache into one batch: each tensor gets a first dimension B."""
    return {name: torch.stack([item[name] for item in items]) for name in items[0]}
