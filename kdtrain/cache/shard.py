"""Filling one shard: sequences come in order, coded bytes go out.

The lists and weights of a sparse shard (`coding`) are made from its first sequences, so these are held back
in memory until there are enough of them, or the shard ends; what comes later is written as it comes. Which
sequences they are does not depend on the batches, so a shard is the same for every batch size.
"""

from collections.abc import Callable
from typing import Any

import h5py
import numpy as np

from kdtrain import faults
from kdtrain.cache import layout
from kdtrain.cache.codec import CodecSpec
from kdtrain.cache.coding import Arrays, Coding, fit_sequences

_AT_ONCE = 16  # sequences coded at once: bounds the memory


class ShardWriter:
    """Writes the sequences of one shard into `file`, which `layout.create_shard` has laid out.

    check: raises what a write to the disk met, see `layout.creating`. first: number of its first sequence in
    `split`.
    """

    def __init__(
        self, file: h5py.File, check: Callable[[], None], spec: CodecSpec, seq_len: int, split: str, first: int
    ) -> None:
        self._file, self._check, self._spec = file, check, spec
        self._split, self._first = split, first
        self._wanted = fit_sequences(spec, seq_len) if spec.kind == "sparse" else 0
        self._held: list[Arrays] = []
        self._coding: Coding | None = None
        self._at = 0
        self.broken: list[str] = []
        """Sequences without numbers, as SPLIT and number."""

    def add(self, rows: Arrays, kept: Arrays) -> None:
        """Take the next sequences: tokens, loss_mask, segments, and what is kept of them."""
        kept = dict(kept)
        broken = kept.pop("broken", np.zeros(len(rows["tokens"]), bool))
        first = self._first + self._at + sum(len(each["tokens"]) for each in self._held)
        self.broken += [f"{self._split} {first + b}" for b in np.flatnonzero(broken)]
        mask = np.where(broken[:, None], layout.BROKEN, rows["loss_mask"]).astype(np.uint8)
        self._held.append({**rows, "loss_mask": mask, **kept})
        held = sum(len(each["tokens"]) for each in self._held)
        if self._coding is not None or held >= self._wanted:
            self._write_held()
        faults.point("cache.shard.after-batch")

    def finish(self) -> dict[str, Any]:
        """Write what is held back; bytes stored by data set."""
        if self._held:
            self._write_held()
        self._file.flush()
        return stored_bytes(self._file)

    def _write_held(self) -> None:
        arrays = {name: np.concatenate([each[name] for each in self._held]) for name in self._held[0]}
        self._held = []
        if self._spec.kind == "sparse" and self._coding is None:
            first = {name: values[: self._wanted] for name, values in arrays.items()}
            self._coding = Coding.fit(first["tokens"], first, self._spec)
            layout.write_dictionary(self._file, self._coding.to_arrays())
        for start in range(0, len(arrays["tokens"]), _AT_ONCE):
            self._write({name: values[start : start + _AT_ONCE] for name, values in arrays.items()})

    def _write(self, arrays: Arrays) -> None:
        if self._coding is not None:
            packed = self._coding.pack(arrays["tokens"], arrays)
            arrays = {name: arrays[name] for name in ("tokens", "loss_mask", "segments")} | packed
        number = len(arrays["tokens"])
        for name, values in arrays.items():
            self._file[name][self._at : self._at + number] = values
        self._at += number
        self._check()


def stored_bytes(file: h5py.File) -> dict[str, int]:
    """Compressed bytes by data set, all of the dictionary together."""
    found = {name: each.id.get_storage_size() for name, each in file.items() if isinstance(each, h5py.Dataset)}
    if layout.DICTIONARY in file:
        found[layout.DICTIONARY] = sum(each.id.get_storage_size() for each in file[layout.DICTIONARY].values())
    return found
