"""One shard, written: its rows, and the file they go into.

The dictionary of a sparse shard (`compression`) is fitted to its first sequences, so `ShardWriter` holds these in
memory until there are enough of them, or the shard ends. Which ones they are does not depend on the batches, so a shard
is the same for every batch size. A sequence with a non-finite logit is kept with its loss masked out, and counted.
"""

import contextlib
import os
from collections.abc import Callable
from pathlib import Path

import h5py
import numpy as np

from kdtrain import faults
from kdtrain.cache.format import hdf5, hdf5_writing
from kdtrain.cache.format import names as cache_format
from kdtrain.cache.format.compression import FIT_ENTRIES, Arrays, Coding
from kdtrain.cache.format.manifest import CacheSettings, Sidecar, read_sidecar, shard_problem
from kdtrain.cache.format.spec import CodecSpec
from kdtrain.cache.write.answers import ROWS, ShardRows
from kdtrain.errors import RunError
from kdtrain.files import file_digest, publish_json, published, read_sealed, set_aside

_SEQUENCES_AT_ONCE = 16  # sequences packed at once: bounds the memory


class ShardWriter:
    """Writes the sequences of one shard into `file`, which `hdf5_writing.create_shard` has laid out.

    check: raises the error of a failed write, see `hdf5_writing.creating`.
    """

    def __init__(self, file: h5py.File, check: Callable[[], None], spec: CodecSpec, seq_len: int) -> None:
        self._file, self._check, self._spec = file, check, spec
        self._wanted = max(1, FIT_ENTRIES // (spec.columns * seq_len)) if spec.coded else 0
        self._held: list[Arrays] = []
        self._coding: Coding | None = None
        self._taken = self._written = 0
        self.broken: list[str] = []
        """Sequences with a non-finite logit, as SPLIT and number."""

    def add(self, rows: ShardRows, kept: Arrays) -> None:
        """Take the next sequences of the shard, and their encoded arrays."""
        arrays = {name: getattr(rows, name) for name in ROWS}
        broken = kept.get("broken", np.zeros(len(rows), bool)) | rows.broken
        self.broken += [f"{rows.split} {rows.first + b}" for b in np.flatnonzero(broken)]
        arrays["loss_mask"] = np.where(broken[:, None], cache_format.BROKEN, arrays["loss_mask"]).astype(np.uint8)
        self._held.append(arrays | {name: values for name, values in kept.items() if name != "broken"})
        self._taken += len(broken)
        if self._taken >= self._wanted:
            self._write_held()
        faults.point("cache.shard.after-batch")

    def finish(self) -> dict[str, int]:
        """Write the sequences held back; return the compressed bytes by data set, all of the dictionary as one."""
        if self._held:
            self._write_held()
        self._file.flush()
        return hdf5_writing.stored_bytes(self._file)

    def _write_held(self) -> None:
        arrays = {name: np.concatenate([each[name] for each in self._held]) for name in self._held[0]}
        self._held = []
        if self._spec.coded and self._coding is None:
            first = {name: values[: self._wanted] for name, values in arrays.items()}
            self._coding = Coding.fit(first["tokens"], first, self._spec)
            hdf5_writing.write_dictionary(self._file, self._coding.to_arrays())
        for start in range(0, len(arrays["tokens"]), _SEQUENCES_AT_ONCE):
            part = {name: values[start : start + _SEQUENCES_AT_ONCE] for name, values in arrays.items()}
            if self._coding is not None:
                plain = {name: part[name] for name in (*ROWS, CodecSpec.POLICY) if name in part}
                part = plain | self._coding.pack(part["tokens"], part)
            number = len(part["tokens"])
            for name, values in part.items():
                self._file[name][self._written : self._written + number] = values
            self._written += number
            self._check()


def finished_record(folder: Path, settings: CacheSettings, part: ShardRows) -> Sidecar | None:
    """Return the record of a shard that need not be built, or None. RunError: the file in its place cannot be read."""
    record = intact_record(folder, part.name)
    path = cache_format.shard_path(folder, part.name)
    with contextlib.suppress(ValueError):
        if record is not None and is_of(record, part.digest, settings):
            hdf5.check_structure(path, settings.codec, settings.seq_len, part.split, part.first, len(part))
            return record
    return None


def is_of(record: Sidecar, digest: str, settings: CacheSettings) -> bool:
    """Return True for a shard of these rows and settings."""
    return record["rows_sha256"] == digest and record["settings_sha256"] == settings.digest()


WriteShard = Callable[[Path], tuple[dict[str, int], list[str]]]
"""Makes the file of a shard: a path -> compressed bytes by data set, and the sequences with a non-finite logit."""


def publish_shard(folder: Path, settings: CacheSettings, part: ShardRows, write: WriteShard) -> None:
    """Publish the shard that `write` makes, then its sidecar."""
    place = cache_format.shard_path(folder, part.name)
    sidecar = cache_format.sidecar_path(folder, part.name)
    with published(place, "cache.shard") as temporary:
        stored, broken = write(temporary)
        sha256 = file_digest(temporary)
        size = temporary.stat().st_size
        if intact_record(folder, part.name) is None:  # move aside what is neither equal nor kdtrain's own
            if os.path.lexists(place) and (place.is_symlink() or not place.is_file() or file_digest(place) != sha256):
                set_aside(folder, f"{cache_format.SHARDS}/{place.name}", "damaged")
            if os.path.lexists(sidecar):
                try:
                    read_sealed(sidecar)
                except ValueError:
                    set_aside(folder, f"{cache_format.SHARDS}/{sidecar.name}", "damaged")
    record = {
        **{"sha256": sha256, "bytes": size, "name": part.name, "split": part.split, "first_sequence": part.first},
        **{"sequences": len(part), "stored": stored, "broken": broken},
        **{"rows_sha256": part.digest, "settings_sha256": settings.digest()},
    }
    publish_json(sidecar, record, "cache.sidecar")


def intact_record(folder: Path, name: str) -> Sidecar | None:
    """Return the record of a shard that is as it was written; None: missing or damaged. RunError: unreadable."""
    try:
        record = read_sidecar(folder, name)
    except (FileNotFoundError, ValueError):
        return None
    except OSError as error:
        path = cache_format.sidecar_path(folder, name)
        raise RunError(f"{path} cannot be read: {error.strerror}; make it readable") from error
    problem = shard_problem(folder, record)
    if problem is not None and problem.aside is None:
        raise RunError(problem.text)
    return record if problem is None else None
