"""Writes the HDF5 files of a cache: shards, and the index over them.

They go through a file whose writes never fail (`creating`): HDF5 2.0 crashes the process that closes a file after a
failed write.
"""

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from io import FileIO
from pathlib import Path
from types import FunctionType
from typing import Any

import h5py
import hdf5plugin
import numpy as np

from kdtrain.cache.format.hdf5 import read_dictionary
from kdtrain.cache.format.names import DICTIONARY, PIECES, SHARDS
from kdtrain.cache.format.spec import CodecSpec, DatasetLayout, attributes, datasets
from kdtrain.errors import CALLBACKS

_LEVEL = 9


class _Sink(FileIO):
    """A file whose writes never fail: HDF5 2.0 crashes the process that closes a file after a failed write.

    It keeps the first error for the caller, and everything that it could not write in memory.
    """

    def __init__(self, path: Path) -> None:
        super().__init__(path, "w+")
        self.error: OSError | None = None
        self.unwritten: list[tuple[int, bytes]] = []

    def write(self, data: Any) -> int:
        view = memoryview(data).cast("B")
        start = self.tell()
        done = 0
        try:
            while self.error is None and done < len(view):
                done += super().write(view[done:])
        except OSError as error:
            self.error = error
        if done < len(view):
            self.unwritten.append((start + done, bytes(view[done:])))
        return len(view)

    def readinto(self, buffer: Any) -> int:
        view = memoryview(buffer).cast("B")
        start = self.tell()
        stored = super().read(len(view))
        view[:] = stored + bytes(len(view) - len(stored))
        for offset, piece in self.unwritten:
            low = max(offset, start)
            high = min(offset + len(piece), start + len(view))
            if low < high:
                view[low - start : high - start] = piece[low - offset : high - offset]
        return len(view)

    def truncate(self, size: int | None = None) -> int:
        try:
            super().truncate(size)
        except OSError as error:
            self.error = self.error or error
        return size or 0

    def check(self) -> None:
        """Raise the first error of a write."""
        if self.error:
            raise self.error


CALLBACKS.update(each.__code__ for each in vars(_Sink).values() if isinstance(each, FunctionType))


@contextmanager
def creating(path: Path) -> Iterator[tuple[h5py.File, Callable[[], None]]]:
    """Yield a new HDF5 file and a function that raises the OSError of a failed write; the block's end raises it too."""
    with _Sink(path) as sink:
        with h5py.File(sink, "w") as file:
            yield file, sink.check
        sink.check()


def _describe(target: h5py.File | h5py.Group, spec: CodecSpec, seq_len: int, split: str, **more: int) -> None:
    found = attributes(spec, seq_len, split) | more
    target.attrs.update({**found, "knots": np.asarray(found["knots"], np.float64)})


def create_shard(file: h5py.File, spec: CodecSpec, seq_len: int, split: str, first: int, number: int) -> None:
    """Lay out an empty shard for sequences first .. first + number - 1 of `split`."""
    _describe(file, spec, seq_len, split, first_sequence=first, sequences=number)
    for name, layout in datasets(spec, seq_len).items():
        dataset = file.create_dataset(
            name,
            (number, *layout.shape),
            layout.dtype,
            chunks=(min(number, layout.sequences), *layout.chunk),
            fillvalue=layout.fill,
            fletcher32=True,
            track_times=False,
            **_compression(layout),
        )
        dataset.attrs["about"] = layout.about


def _compression(layout: DatasetLayout | None = None) -> dict[str, Any]:
    if layout is None or not layout.bits:
        return {"shuffle": True, "compression": hdf5plugin.Zstd(clevel=_LEVEL)}
    return {"compression": hdf5plugin.Bitshuffle(nelems=layout.block, cname="zstd", clevel=_LEVEL)}


def write_dictionary(file: h5py.File, arrays: Mapping[str, np.ndarray]) -> None:
    """Write the arrays of `Coding.to_arrays`, one chunk each."""
    group = file.create_group(DICTIONARY)
    for name, values in arrays.items():
        options = {"chunks": values.shape, "fletcher32": True, "track_times": False, **_compression()}
        group.create_dataset(name, data=values, **options)


def stored_bytes(file: h5py.File) -> dict[str, int]:
    """Return the compressed bytes by data set, all of the dictionary as one."""
    found = {name: each.id.get_storage_size() for name, each in file.items() if isinstance(each, h5py.Dataset)}
    if DICTIONARY in file:
        found[DICTIONARY] = sum(each.id.get_storage_size() for each in file[DICTIONARY].values())
    return found


def copy_rows(
    shard: Path, path: Path, spec: CodecSpec, seq_len: int, split: str, first: int, rows: np.ndarray
) -> dict[str, int]:
    """Write sequences of a shard as another one of `split`, which begins with `first`; return its stored bytes.

    The stored bytes of their chunks are copied, undecoded. Only masks, whose chunks hold many sequences, and the lists
    are compressed again.
    """
    with h5py.File(shard) as source, creating(path) as (target, check):
        create_shard(target, spec, seq_len, split, first, len(rows))
        for name, layout in datasets(spec, seq_len).items():
            if layout.sequences > 1:
                target[name][...] = source[name][()][rows]
                continue
            steps = [range(0, size, step) for size, step in zip(layout.shape, layout.chunk, strict=True)]
            for place, row in enumerate(rows.tolist()):
                for inside in itertools.product(*steps):
                    skipped, content = source[name].id.read_direct_chunk((row, *inside))
                    target[name].id.write_direct_chunk((place, *inside), content, skipped)
        if spec.coded:
            write_dictionary(target, read_dictionary(source))
        target.flush()
        check()
        return stored_bytes(target)


def write_index(
    path: Path,
    spec: CodecSpec,
    seq_len: int,
    shards: Mapping[str, Sequence[tuple[str, int]]],
    *,
    pieces: bool = False,
) -> None:
    """Write virtual data sets over the shards (name, number of sequences) of each split into a group of its name,
    and links to the dictionaries of the shards into SPLIT/dictionary.

    Paths of shards are relative to the index, so that the folder can be moved. pieces: the shards have any sizes, and
    the data set SPLIT/first_rows has the number of the first row of each.
    """
    with creating(path) as (file, _):
        for split, parts in shards.items():
            group = file.create_group(split)
            total = sum(number for _, number in parts)
            if pieces:
                _describe(group, spec, seq_len, split, format_version=PIECES)
                rows = np.cumsum([0, *(number for _, number in parts[:-1])])
                dataset = group.create_dataset("first_rows", data=rows, dtype="<i8", track_times=False)
                dataset.attrs["about"] = "number of the first row of each shard"
            else:
                _describe(group, spec, seq_len, split, sequences_per_shard=parts[0][1])
            if spec.coded:
                links = group.create_group(DICTIONARY)
                for shard, _ in parts:
                    links[shard] = h5py.ExternalLink(f"{SHARDS}/{shard}.h5", f"/{DICTIONARY}")
            for name, layout in datasets(spec, seq_len).items():
                virtual = h5py.VirtualLayout((total, *layout.shape), layout.dtype)
                virtual.dcpl.set_obj_track_times(False)  # equal caches have equal digests, whenever they are built
                start = 0
                for shard, number in parts:
                    shape = (number, *layout.shape)
                    virtual[start : start + number] = h5py.VirtualSource(f"{SHARDS}/{shard}.h5", name, shape)
                    start += number
                dataset = group.create_virtual_dataset(name, virtual, fillvalue=layout.fill)
                dataset.attrs["about"] = layout.about
