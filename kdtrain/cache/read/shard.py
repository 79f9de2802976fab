"""One shard, opened and read: its sequences as they are stored, and batches of them as they decode.

`Shard` checks a shard's lists and masks when it opens it, and sequences when they are first read (`checks`); any error
of a damaged shard names it (`shard_errors`).
"""

import errno
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import h5py
import numpy as np
import torch

from kdtrain.cache.format.codec import decode
from kdtrain.cache.format.compression import Coding, unpack
from kdtrain.cache.format.hdf5 import StoredRows, read_dictionary
from kdtrain.cache.format.manifest import read_manifest
from kdtrain.cache.format.names import DICTIONARY
from kdtrain.cache.format.spec import CodecSpec
from kdtrain.cache.read.checks import check_flags, check_lists, check_stored, check_tokens, check_values
from kdtrain.errors import RunError, UsageError, first_sentence, system_error
from kdtrain.objective.batch import Batch


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
        """Return one sparse sequence, as `unpack` takes it."""
        assert self.coding is not None
        return self.coding, self.arrays["tokens"][row], self.arrays["ids"][row], self.arrays["numbers"][row]


class Shard:
    """An open shard that has passed `check_structure`. ValueError: it has impossible numbers. OSError: a read fails."""

    def __init__(self, path: Path, spec: CodecSpec) -> None:
        self._path, self._spec = path, spec
        self._coding: Coding | None = None
        self._flags: dict[str, Runs] = {}
        self.read_at = 0.0
        """When its reader last read it, by `time.monotonic`."""
        self.open()

    def open(self) -> None:
        """Open the file, again after `close`: lists and masks are read once."""
        # No chunk cache: a chunk is a sequence, read once an epoch; HDF5 would keep 8 MiB a data set of each shard.
        self._file = h5py.File(self._path, "r", rdcc_nbytes=0)
        try:
            if not self._flags:
                self.nbytes = 0
                """Bytes of its lists and masks, which stay when it is closed."""
                if self._spec.coded:
                    self._coding = Coding.from_arrays(read_dictionary(self._file), self._spec)
                    check_lists(self._coding)
                    self.nbytes = sum(each.nbytes for each in self._coding.to_arrays().values())
                # Masks are few runs in few chunks: read once, kept as runs.
                flags = {name: self._file[name][()] for name in ("loss_mask", "segments")}
                check_flags(flags["loss_mask"], flags["segments"])
                self._flags = {name: Runs(values) for name, values in flags.items()}
                self.nbytes += sum(each.nbytes for each in self._flags.values())
            names = [name for name in list(self._file) if name not in (DICTIONARY, *self._flags)]
            self._sets = {name: StoredRows(self._file[name]) for name in names}
        except BaseException:
            self._file.close()
            raise

    def read(self, rows: np.ndarray, *, checked: bool = False) -> Stored:
        """Read the given sequences, every array [len(rows), ...]; `rows` ascending.

        checked: their numbers have been checked before.

        ValueError: impossible numbers, or numbers that were never written. OSError: a checksum fails.
        """
        arrays = {name: each.read(rows) for name, each in self._sets.items()}
        arrays |= {name: runs.read(rows) for name, runs in self._flags.items()}
        if not checked:
            check_stored(arrays, self._spec)
        return Stored(arrays, self._coding, checked)

    def text(self, rows: np.ndarray) -> dict[str, np.ndarray]:
        """Read tokens, loss_mask and segments of the given sequences, `rows` ascending. OSError: a checksum fails.

        ValueError: a token is outside of the vocabulary.
        """
        tokens = self._sets["tokens"].read(rows)
        check_tokens(tokens, self._spec)
        return {"tokens": tokens, **{name: runs.read(rows) for name, runs in self._flags.items()}}

    def close(self) -> None:
        """Close the file; lists and masks stay."""
        self._file.close()


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
        self.nbytes = self._lengths.nbytes + self._values.nbytes + self._first.nbytes

    def read(self, rows: np.ndarray) -> np.ndarray:
        """Return the rows as [len(rows), T]."""
        found = np.empty((len(rows), self._length), self._values.dtype)
        for row, out in zip(rows, found, strict=True):
            runs = slice(self._first[row], self._first[row + 1])
            out[:] = np.repeat(self._values[runs], self._lengths[runs])
        return found


def batch_of(parts: Sequence[Stored], spec: CodecSpec, places: np.ndarray | None = None) -> Batch:
    """Return one batch of the sequences of all `parts`: the ones at `places`, or all of them, in order.

    ValueError: they unpack to impossible numbers. IndexError: a code that a dictionary does not have.
    """
    sequences = [(part, row) for part in parts for row in range(len(part))]
    if places is not None:
        sequences = [sequences[place] for place in places]
    coded = ("ids", "numbers") if spec.coded else ()
    plain = [name for name in parts[0].arrays if name not in coded]
    arrays = {name: np.stack([part.arrays[name][row] for part, row in sequences]) for name in plain}
    if spec.coded:
        kept = unpack([part.sequence(row) for part, row in sequences])
        if not all(part.checked for part in parts):
            check_values(kept, spec)
        arrays |= kept
    return Batch(
        tokens=torch.from_numpy(arrays["tokens"].astype(np.int64)),
        loss_mask=torch.from_numpy(arrays["loss_mask"] == 1),
        segments=torch.from_numpy(arrays["segments"].astype(np.int64)),
        targets=decode(arrays, spec),
    )


@contextmanager
def shard_errors(path: Path, source: str | None = None) -> Iterator[None]:
    """Turn any error of the block into a RunError that names the shard at `path` and its cache.

    source: the address that the shard was fetched from.
    """
    try:
        yield
    except (MemoryError, RunError):
        raise
    except Exception as error:
        cache = path.parents[1]
        system = system_error(error)
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
        if source is not None:
            raise RunError(
                f"shard {path.name} of {source} is not what kdtrain writes ({first_sentence(error)}); ask its author"
            ) from error
        reason = "it is missing" if isinstance(error, FileNotFoundError) else first_sentence(error)
        again = "the command that made it"
        with suppress(UsageError):  # there is no manifest before it is finished
            again = read_manifest(cache).maker
        raise RunError(
            f"shard {path} cannot be read ({reason}): run kdtrain verify {cache} --repair, then {again} again"
        ) from error
