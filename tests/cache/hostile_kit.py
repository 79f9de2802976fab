"""Shards as a stranger may make them: one change each, with every digest of the cache computed anew.

The changes are for shards of `workshop.build(..., codecs["both"])`: 4 sequences of 16 positions, V = 64, 4 entries of
the top-k and 8 samples, so that `numbers` has 12 + 8 + 12 + 1 rows.
"""

import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import h5py
import hdf5plugin
import numpy as np

Change = Callable[[Path], None]


def edited(change: Callable[[h5py.File], None]) -> Change:
    """Make a change through HDF5."""

    def edit(path: Path) -> None:
        with h5py.File(path, "r+") as file:
            change(file)

    return edit


def number(name: str, place: Any, value: Any) -> Change:
    """Replace numbers of a data set; the structure of the file stays."""

    def change(file: h5py.File) -> None:
        values = file[name][()]
        values[place] = value
        file[name][...] = values

    return edited(change)


def remade(name: str, **properties: Any) -> Change:
    """Make a data set again with other properties, and the same numbers where they fit."""

    def change(file: h5py.File) -> None:
        old, values = file[name], file[name][()]
        made = {"shape": old.shape, "dtype": old.dtype, "chunks": old.chunks, "fillvalue": old.fillvalue}
        made |= {"fletcher32": True, "track_times": False}
        if "32008" in old._filters:
            made |= hdf5plugin.Bitshuffle(nelems=old._filters["32008"][3], cname="zstd", clevel=9)
        else:
            made |= {"shuffle": True, **hdf5plugin.Zstd(clevel=9)}
        made = {key: value for key, value in (made | properties).items() if value is not None}
        if name.startswith("dictionary"):
            made.pop("fillvalue")
        del file[name]
        new = file.create_dataset(name, **made)
        if new.shape == values.shape and new.dtype.kind in "iuf":
            new[...] = values

    return edited(change)


def replaced(name: str, make: Callable[[h5py.File], Any]) -> Change:
    """Replace a name by a link to something else."""

    def change(file: h5py.File) -> None:
        if name in file:
            del file[name]
        if (made := make(file)) is not None:
            file[name] = made

    return edited(change)


def payload(name: str, change_payload: Callable[[bytes], bytes]) -> Change:
    """Replace the first chunk of a data set in the file, with a checksum that fits."""

    def change(path: Path) -> None:
        with h5py.File(path, "r+") as file:
            chunk = file[name].id.get_chunk_info(0)
            _, stored = file[name].id.read_direct_chunk(chunk.chunk_offset)
            made = change_payload(bytes(stored[:-4]))
            file[name].id.write_direct_chunk(chunk.chunk_offset, made + struct.pack("<I", fletcher32(made)))

    return change


def fletcher32(data: bytes) -> int:
    """Compute the checksum of HDF5's filter."""
    words = np.frombuffer(data + b"\0" * (len(data) % 2), ">u2").astype(np.uint64)
    after = np.arange(len(words), 0, -1, dtype=np.uint64)
    one, two = int(words.sum()), int((words * after).sum())
    return (((two - 1) % 65535 + 1 if two else 0) << 16) | ((one - 1) % 65535 + 1 if one else 0)


def zstd_of_zeros(size: int) -> bytes:
    """Make a frame of zstd that unpacks to `size` zeros."""
    with h5py.File("zeros", "w", driver="core", backing_store=False) as file:
        zeros = file.create_dataset("zeros", (size,), np.uint8, chunks=(size,), **hdf5plugin.Zstd())
        zeros[...] = 0
        return bytes(zeros.id.read_direct_chunk((0,))[1])


def virtual(file: h5py.File) -> None:
    """Put a virtual data set over another file in the place of `tokens`."""
    source = h5py.VirtualLayout((4, 17), np.uint16)
    source[:] = h5py.VirtualSource("elsewhere.h5", "tokens", (4, 17))
    file.create_virtual_dataset("tokens", source, fillvalue=65_535)


def bytes_at(place: int, data: bytes) -> Change:
    """Replace bytes of the file; a negative place counts from its end."""

    def change(path: Path) -> None:
        content = bytearray(path.read_bytes())
        content[place : place + len(data) or None] = data
        path.write_bytes(content)

    return change


def newest_layout(path: Path) -> None:
    """Write the same content again, as HDF5 writes it for its newest version."""
    with h5py.File(path) as old, h5py.File(path.with_suffix(".new"), "w", libver="latest") as new:
        for name in list(old):
            old.copy(name, new)
        new.attrs.update(dict(old.attrs))
    path.with_suffix(".new").rename(path)


PLAIN = dict.fromkeys(("chunks", "fletcher32", "compression", "compression_opts", "shuffle"))
"""Properties of a data set without chunks and filters."""
LINKS: dict[str, Change] = {
    "soft link": replaced("tokens", lambda file: h5py.SoftLink("/ids")),
    "soft link in the dictionary": replaced("dictionary/common", lambda file: h5py.SoftLink("/tokens")),
    "external link": replaced("tokens", lambda file: h5py.ExternalLink("elsewhere.h5", "/tokens")),
    "external link in the dictionary": replaced("dictionary/common", lambda file: h5py.ExternalLink("a.h5", "/b")),
    "external storage": remade("tokens", **PLAIN, external=[("/etc/passwd", 0, 4 * 17 * 2)]),
    "virtual data set": replaced("tokens", virtual),
}
"""Links and storage that lead out of a shard."""
TYPES: dict[str, Change] = {
    "missing": replaced("segments", lambda file: None),
    "missing in the dictionary": replaced("dictionary/tail_weights", lambda file: None),
    "no dictionary": replaced("dictionary", lambda file: None),
    "foreign": replaced("more", lambda file: np.zeros(3)),
    "foreign in the dictionary": replaced("dictionary/more", lambda file: np.zeros(3)),
    "group for a data set": replaced("tokens", lambda file: file.create_group("tokens") and None),
    "type for a data set": replaced("dictionary/common", lambda file: np.dtype(np.uint16)),
    "signed": remade("tokens", dtype=np.int16),
    "wider": remade("ids", dtype=np.uint32),
    "big-endian": remade("numbers", dtype=">u2"),
    "float": remade("dictionary/tail_weights", dtype=np.float64),
    "compound": remade("tokens", dtype=[("a", "u1"), ("b", "u1")], fillvalue=None),
    "text": remade("tokens", **PLAIN, dtype=h5py.string_dtype(), fillvalue=None),
    "fill value": remade("tokens", fillvalue=0),
    "no checksum": remade("tokens", fletcher32=None),
    "no compression": remade("tokens", compression=None, compression_opts=None),
    "other compression": remade("tokens", compression="gzip", compression_opts=4),
    "other shuffle": remade("numbers", **hdf5plugin.Bitshuffle(nelems=8, cname="zstd")),
    "lossy": remade("tokens", **PLAIN | {"chunks": (1, 17)}, scaleoffset=4),
    "contiguous": remade("tokens", **PLAIN),
    "newest layout": newest_layout,
    "attribute missing": edited(lambda file: file.attrs.__delitem__("seq_len")),
    "attribute foreign": edited(lambda file: file.attrs.__setitem__("more", 1)),
    "seq_len": edited(lambda file: file.attrs.__setitem__("seq_len", 17)),
    "codec": edited(lambda file: file.attrs.__setitem__("codec", "dense")),
    "split": edited(lambda file: file.attrs.__setitem__("split", "validation")),
    "first sequence": edited(lambda file: file.attrs.__setitem__("first_sequence", 4)),
    "knots": edited(lambda file: file.attrs.__setitem__("knots", [2.0, 1.0])),
}
"""Data stored in another way."""
SHAPES: dict[str, Change] = {
    "fewer sequences": remade("tokens", shape=(3, 17)),
    "longer sequences": remade("tokens", shape=(4, 33), chunks=(1, 33)),
    "another rank": remade("tokens", shape=(4, 17, 1), chunks=(1, 17, 1)),
    "no dimensions": remade("tokens", **PLAIN, shape=()),
    "extensible": remade("tokens", maxshape=(None, 17)),
    "larger chunks": remade("ids", chunks=(4, 12, 16)),
    "more candidates than the vocabulary": remade("dictionary/candidates", shape=(66, 64), chunks=(66, 64)),
    "80 GB of common entries": remade("dictionary/common", shape=(4 * 10**10,), chunks=(2**20,)),
    "80 GB of weights": remade("dictionary/tail_weights", shape=(10**5, 2 * 10**5), chunks=(2**10, 2**10)),
    "80 GB of masks": remade("loss_mask", shape=(5 * 10**9, 16), chunks=(2**15, 16)),
    "80 GB of tokens": remade("tokens", shape=(4, 10**10), chunks=(1, 2**20)),
    "lists without a chunk": remade("dictionary/common", shape=(3,), chunks=(3,)),
}
"""Data of another size."""
BYTES: dict[str, Change] = {
    "empty": lambda path: path.write_bytes(b"") and None,
    "text": lambda path: path.write_text("hello\n" * 1000) and None,
    "zeros": lambda path: path.write_bytes(bytes(20_000)) and None,
    "half": lambda path: path.write_bytes(path.read_bytes()[: path.stat().st_size // 2]) and None,
    "longer": lambda path: path.write_bytes(path.read_bytes() + bytes(8)) and None,
    "version of the superblock": bytes_at(8, b"\x02"),
    "address of the root": bytes_at(64, b"\xf0" * 8),
    "frame of 80 MB": payload("tokens", lambda _: zstd_of_zeros(80_000_000)),
    "frame in the dictionary of 80 MB": payload("dictionary/common", lambda _: zstd_of_zeros(80_000_000)),
    "frame of no declared size": payload("tokens", lambda data: data[:4] + b"\0" + data[5:]),
    "no frame": payload("tokens", lambda data: bytes(len(data))),
    "block of 2^40 bytes": payload("numbers", lambda data: struct.pack(">Q", 2**40) + data[8:]),
    "other blocks": payload("numbers", lambda data: data[:8] + struct.pack(">I", 16) + data[12:]),
    "block beyond its chunk": payload("numbers", lambda data: data[:12] + struct.pack(">I", 2**31) + data[16:]),
    "shorter than its blocks": payload("segments", lambda data: data[:-3]),
}
"""Structures that may crash HDF5 itself."""
VALUES: dict[str, Change] = {
    "token": number("tokens", (1, 3), 64),
    "mask": number("loss_mask", (0, 0), 3),
    "segment": number("segments", (0, 0), 16),
    "id of the top-k absent": number("ids", (0, 0, 0), 0),
    "id beyond the vocabulary": number("ids", (2, 0, 0), 65_000),
    "candidate": number("dictionary/candidates", (0, 0), 64),
    "common entry": number("dictionary/common", 0, 64),
    "row of candidates": number("dictionary/context_row", slice(None), 255),
    "weight that is not a number": number("dictionary/tail_weights", (3, 0), np.nan),
    "infinite weight": number("dictionary/tail_weights", (3, 0), -np.inf),
    "large weights": number("dictionary/tail_weights", (slice(None), 0), 3e38),
    "weight of a number that comes later": number("dictionary/tail_weights", (0, -1), 1.0),
    "log p": number("numbers", (0, 0, 0), 1769),
    "log p all together": number("numbers", (0, slice(0, 12), 0), 400),
    "log p that wraps around": number("numbers", (0, slice(0, 2), 0), 2**15),
    "log p of a label": number("numbers", (0, -1, 0), 2000),
    "nothing written": number("numbers", (0, -1, 0), 65_535),
    "counts": number("numbers", (0, slice(12, 20), 0), 200),
    "count that wraps around": number("numbers", (0, 12, 0), 257),
    "sample without a count": number("numbers", (0, slice(12, 20), 0), 0),
    "all probabilities 1": number("numbers", (0, slice(0, 12), 0), 0),
    "partition": number("numbers", (0, 20, 0), 65_000),
    "slope": number("numbers", (0, 25, 0), 65_000),
    "mean": number("numbers", (0, 30, 0), 65_000),
    "deviation": number("numbers", (0, 31, 0), 64_999),
}
"""Impossible numbers."""


def _equal_counts(file: h5py.File) -> None:
    """Draw twelve entries once each; of their codes, 70 to 202, only the last is beyond lists and vocabulary."""
    file["numbers"][0, :12, 0] = [1, *[0] * 11]
    file["ids"][0, :12, 0] = [70, *[12] * 11]


COUNTS: dict[str, Change] = {
    "id beyond the vocabulary": number("ids", (2, 0, 0), 65_000),
    "codes whose sum is beyond the vocabulary": edited(_equal_counts),
    "more samples than were drawn": number("numbers", (0, 0, 0), 200),
    "fewer samples than were drawn": number("numbers", (0, slice(0, 12), 0), 0),
    "fewer samples than none": number("numbers", (0, 1, 0), 100),
    "counts that wrap around": number("numbers", (0, slice(0, 12), 0), 2**15),
    "count without an entry": number("ids", (0, 0, 0), 0),
    "slope": number("numbers", (0, 13, 0), 65_000),
    "log p of a label": number("numbers", (0, -1, 0), 2000),
    "nothing written": number("numbers", (0, -1, 0), 65_535),
}
"""Impossible numbers of a cache that holds only the counts of samples."""
DENSE: dict[str, Change] = {
    "token": number("tokens", (1, 3), 64),
    "NaN": number("logprobs", (0, 0, 0), np.nan),
    "infinity": number("logprobs", (3, 15, 63), np.inf),
    "negative infinity": number("logprobs", (3, 15, 63), -np.inf),
    "above 0": number("logprobs", (1, 0, 0), 0.01),
    "below the lowest": number("logprobs", (1, 0, 0), -20_000),
    "label": number("label_logprob", (1, 0), 5.0),
    "label not written": number("label_logprob", (1, 0), np.nan),
    "external link": replaced("logprobs", lambda file: h5py.ExternalLink("elsewhere.h5", "/logprobs")),
    "other type": remade("logprobs", dtype=np.float32),
}
"""The same for the codec `dense`."""
FAMILIES = {"links": LINKS, "types": TYPES, "shapes": SHAPES, "bytes": BYTES, "values": VALUES}
