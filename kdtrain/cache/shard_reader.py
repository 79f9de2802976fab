"""One shard, opened: sequences as they are stored, and as tokens, masks and targets.

A shard is read with as few calls of HDF5 as there are runs of neighbours, and its masks once. Its dictionary and its
masks are checked when it is opened, its sequences when they are first read (`checks`).
"""

import errno
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import h5py
import hdf5plugin  # noqa: F401  (registers the decompressor)
import numpy as np
import torch
from torch import Tensor

from kdtrain.cache import format as cache_format
from kdtrain.cache.checks import check_flags, check_lists, check_stored, check_structure, check_values
from kdtrain.cache.codec import CodecSpec, decode
from kdtrain.cache.compression import Coding, unpack
from kdtrain.errors import RunError, system_error
from kdtrain.objective.targets import DenseTargets, SparseTargets, Targets

_OF_TARGETS = ("ids", "logprobs", "counts", "tail", "label_logprob", "logit_mean", "logit_std")
_AT_ONCE = 2**20  # entries that `check_content` looks at at once


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
        """The batch as named tensors whose first dimension is B, which any trainer can move, cut and put together.

        tokens, loss_mask, segments as above; labels [B, T+1], the tokens with -100 where the loss does not count, for
        trainers that count what it counts. Of sparse targets: ids, logprobs [B, T, K], counts [B, T, D] of the last D
        columns, which were sampled, tail [B, T, 2G], label_logprob, logit_mean, logit_std [B, T], knots [B, G] and
        num_samples [B]; of dense ones: logprobs [B, T, V], label_logprob [B, T].
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
        """The batch of what `fields` returned. knots, num_samples: those of sparse targets, as numbers of the host."""
        tokens, loss_mask = fields["tokens"], fields["loss_mask"]
        segments = fields.get("segments")
        batch = cls(tokens, loss_mask, torch.zeros_like(tokens[:, :-1]) if segments is None else segments, None)
        flat = {name: value.flatten(0, 1) for name, value in fields.items() if name in _OF_TARGETS}
        if "ids" in flat:
            absent = flat["ids"].shape[1] - flat["counts"].shape[1]
            flat["counts"] = torch.nn.functional.pad(flat["counts"], (absent, 0))
            sparse = SparseTargets(**flat, top_k=absent, num_samples=num_samples, knots=knots)
            return replace(batch, targets=sparse)
        return replace(batch, targets=DenseTargets(**flat)) if "logprobs" in flat else batch


@dataclass(frozen=True)
class Stored:
    """Sequences of one shard as they are stored, and what decodes them (None for `dense` and `tokens`)."""

    arrays: dict[str, np.ndarray]
    coding: Coding | None
    checked: bool
    """Whether their numbers were looked at before."""

    def __len__(self) -> int:
        return len(self.arrays["tokens"])

    def sequence(self, row: int) -> tuple[Coding, np.ndarray, dict[str, np.ndarray]]:
        """One sequence as `coding.unpack` takes it."""
        assert self.coding is not None
        return self.coding, self.arrays["tokens"][row], {name: self.arrays[name][row] for name in ("ids", "numbers")}


class Shard:
    """An open shard that has passed `check_structure`. ValueError or OSError: its numbers cannot be."""

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

        checked: whether their numbers were looked at before.

        ValueError: numbers that cannot be, or were never written. OSError: a checksum fails.
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


def batch_of(parts: Sequence[Stored], spec: CodecSpec, places: np.ndarray | None = None) -> CachedBatch:
    """One batch of the sequences of all `parts`: those at `places`, or all of them, in order.

    ValueError: what they unpack to cannot be. IndexError: a code that a dictionary does not have.
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


def check_content(path: Path, spec: CodecSpec, seq_len: int, split: str, first: int, number: int) -> None:
    """Read all of a shard, and compare it with what `layout.create_shard` makes of the same arguments.

    ValueError: it differs, or its numbers cannot be. OSError: the system does not let it be read.
    """
    entries = seq_len * max(1, spec.vocab_size if spec.kind == "dense" else spec.columns)
    step = max(1, _AT_ONCE // entries)
    check_structure(path, spec, seq_len, split, first, number)
    try:
        with closing(Shard(path, spec)) as shard:
            for start in range(0, number, step):
                batch_of([shard.read(np.arange(start, min(start + step, number)), checked=False)], spec)
    except MemoryError:
        raise
    except Exception as error:
        system = system_error(error)
        raise system if system and system.errno else ValueError(_reason(error)) from error


@contextmanager
def naming(path: Path) -> Iterator[None]:
    """Whatever a shard makes fail inside is a RunError that names it, and its cache."""
    try:
        yield
    except MemoryError:
        raise
    except Exception as error:
        cache, system = path.parents[1], system_error(error)
        if not cache.is_dir():
            raise RunError(
                f"the cache {cache} is gone, from which shard {path.name} was to be read; "
                "put it back, and run the same command again"
            ) from error
        if system is not None and system.errno not in (None, errno.ENOENT):
            # Not damage: a repair would move a sound shard aside.
            raise RunError(
                f"shard {path} cannot be read now ({system.strerror}): make it readable, and run the same command again"
            ) from error
        reason = "it is missing" if isinstance(error, FileNotFoundError) else _reason(error)
        raise RunError(
            f"shard {path} cannot be read ({reason}): run kdtrain verify {cache} --repair, "
            "then the same cache-teacher command again"
        ) from error


def _reason(error: Exception) -> str:
    """One line of any error: h5py has a dozen kinds of them for a file that is not what it seems."""
    return next(iter(str(error).splitlines()), type(error).__name__)
