"""Is a shard what the format says, and what its manifest says, whoever made it?

`check_structure` compares the file with what `layout.create_shard` would make, before HDF5 opens it: the names, types,
shapes, chunks, fill values and filters of all data sets, the attributes, where each chunk lies and how large it
unpacks. It reads no data but the first bytes of each chunk, once a shard. The others look at numbers, each once: masks
and lists when a shard is opened, sequences when they are first read, as they are stored and as they unpack.

What it gives up: numbers that are possible and wrong. A stranger's cache may still teach anything.
"""

import math
import struct
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import h5py
import numpy as np

from kdtrain.cache import hdf5, layout
from kdtrain.cache.codec import FLOOR, CodecSpec
from kdtrain.cache.coding import LOWEST, Arrays, Coding
from kdtrain.cache.hdf5 import Hdf5File, Link
from kdtrain.cache.layout import DICTIONARY, DatasetLayout
from kdtrain.files import open_regular

LARGEST_RATIO, SLACK = 1000, 2**26
"""A shard may unpack to so many times the bytes of its file, and so many bytes more. Real ones: 2 to 8 times."""
MASS = 1.05
"""The largest sum of probabilities that is 1: codes err by (1 - log p) / 383, and the tail by half a step of 0.008."""
_SHUFFLE, _FLETCHER32, _BITSHUFFLE, _ZSTD = 2, 3, 32008, 32015
_ZSTD_MAGIC = b"\x28\xb5\x2f\xfd"
_LARGEST, _LEAST = 1e30, -2e4  # what a number of the tail may be predicted as, and be
_CHECKSUM = 4  # bytes that fletcher32 adds to a chunk
_LEAST_CHUNK = 40  # bytes that a chunk takes in a B-tree at least


class _Expected:
    """A data set as the format has it: `number` sequences of `each`, or where that is None, `each` as a whole."""

    def __init__(self, name: str, each: DatasetLayout, number: int | None = None) -> None:
        self.name, self.dtype, self.bits, self.block = name, each.dtype, each.bits, each.block
        self.shape = each.shape if number is None else (number, *each.shape)
        self.chunk = each.chunk if number is None else (min(number, each.sequences), *each.chunk)
        self.fill = 0 if number is None else each.fill
        self.chunk_bytes = math.prod(self.chunk) * each.dtype.itemsize
        self.counts = [-(-size // step) for size, step in zip(self.shape, self.chunk, strict=True)]


def check_structure(path: Path, spec: CodecSpec, seq_len: int, split: str, first: int, number: int) -> None:
    """Compare a shard with what `layout.create_shard` makes of the same arguments.

    ValueError: it differs, or declares more than it holds. OSError: it cannot be read.
    """
    with open_regular(path) as raw:
        try:
            file = Hdf5File(raw)
            root = file.root()
            sets = [_Expected(name, each, number) for name, each in layout.datasets(spec, seq_len).items()]
            links, sparse = dict(root.links), spec.kind == "sparse"
            _compare_names("data set", links, [*(each.name for each in sets), *([DICTIONARY] if sparse else [])])
            if sparse:
                lists = file.group(links.pop(DICTIONARY)).links
                _compare_names("list", lists, layout.dictionary_sets(spec, 1, 1))
                sets += _lists(file, lists, spec)
                links |= {f"{DICTIONARY}/{name}": link for name, link in lists.items()}
            wanted = layout.attributes(spec, seq_len, split) | {"first_sequence": first, "sequences": number}
            _compare_attributes(root.attributes, wanted)
            trees = [_compare(file, links[each.name], each) for each in sets]
            total = sum(math.prod(each.shape) * each.dtype.itemsize for each in sets)
            if total > LARGEST_RATIO * file.size + SLACK:
                raise ValueError(f"it declares {total} bytes of data in a file of {file.size}")
            for tree, each in zip(trees, sets, strict=True):
                _check_chunks(file, tree, each)
        except (struct.error, IndexError, UnicodeDecodeError) as error:
            raise ValueError("its structure is not that of a shard") from error


def _compare_names(what: str, found: Collection[str], expected: Collection[str]) -> None:
    if missing := set(expected) - set(found):
        raise ValueError(f"it lacks the {what} '{min(missing)}'")
    if foreign := set(found) - set(expected):
        raise ValueError(f"it has the {what} '{min(foreign)[:80]}', which the format has not")


def _compare_attributes(found: Mapping[str, Any], expected: Mapping[str, Any]) -> None:
    _compare_names("attribute", found, expected)
    for name, value in expected.items():
        if found[name] != value:
            raise ValueError(f"its {name} is {str(found[name])[:80]} instead of {value}")


def _lists(file: Hdf5File, links: Mapping[str, Link], spec: CodecSpec) -> list[_Expected]:
    """The data sets of a dictionary, with as many candidates and common entries as it declares."""
    declared = {}
    for name, most in (("candidates", spec.vocab_size + 1), ("common", spec.vocab_size)):
        spaces = [content for kind, content in file.messages(links[name].header) if kind == hdf5.SPACE]
        (declared[name],) = struct.unpack_from("<8xQ", spaces[0])
        if not 1 <= declared[name] <= most:
            raise ValueError(f"'{DICTIONARY}/{name}' has {declared[name]} rows instead of 1 to {most}")
    found = layout.dictionary_sets(spec, declared["candidates"], declared["common"])
    return [_Expected(f"{DICTIONARY}/{name}", each) for name, each in found.items()]


def _compare(file: Hdf5File, link: Link, expected: _Expected) -> int:
    """The address of the B-tree of a data set's chunks."""
    messages = [each for each in file.messages(link.header) if each[0] != hdf5.ATTRIBUTE]
    found = dict(messages)
    needed = {hdf5.SPACE, hdf5.TYPE, hdf5.FILL, hdf5.LAYOUT, hdf5.FILTERS}
    if len(found) != len(messages) or not needed <= found.keys() <= needed | {hdf5.OLD_FILL}:
        raise ValueError(f"'{expected.name}' is not stored as the format has it")
    rank, width = len(expected.shape), expected.dtype.itemsize
    (tree,) = struct.unpack_from("<3xQ", found[hdf5.LAYOUT])
    shape = struct.pack(f"<3B5x{2 * rank}Q", 1, rank, 1, *expected.shape, *expected.shape)
    chunks = struct.pack(f"<3BQ{rank + 1}I", 3, 2, rank + 1, tree, *expected.chunk, width)
    same = {
        "type": _same(found[hdf5.TYPE], h5py.h5t.py_create(expected.dtype).encode()[2:]),
        "shape": _same(found[hdf5.SPACE], shape),
        "chunks": _same(found[hdf5.LAYOUT], chunks),
        "fill value": _is_fill(found[hdf5.FILL], expected) and _is_old_fill(found),
        "filters": _filters(found[hdf5.FILTERS]) == _wanted_filters(expected),
    }
    if other := [what for what, is_same in same.items() if not is_same]:
        raise ValueError(f"'{expected.name}' differs from the format in its {other[0]}")
    return tree


def _same(found: bytes, expected: bytes) -> bool:
    """Whether both are the same but for the zeros that a message is filled up with."""
    return found[: len(expected)] == expected and not any(found[len(expected) :])


def _is_fill(content: bytes, expected: _Expected) -> bool:
    (size,) = struct.unpack_from("<4xI", content)
    if content[:4] != bytes([2, 3, 2, 1]) or size not in (0, expected.dtype.itemsize):
        return False
    value = np.frombuffer(content[8 : 8 + size], expected.dtype)[0] if size else 0
    return bool(value == expected.fill or (np.isnan(value) and np.isnan(expected.fill)))


def _is_old_fill(found: Mapping[int, bytes]) -> bool:
    """Whether the fill value for HDF5 before 1.6 is the same, where there is one."""
    return hdf5.OLD_FILL not in found or found[hdf5.OLD_FILL].rstrip(b"\0") == found[hdf5.FILL][4:].rstrip(b"\0")


def _filters(content: bytes) -> list[tuple[int, ...]]:
    """Number of each filter, and those of its options that decide what a chunk unpacks to."""
    version, count = struct.unpack_from("<BB", content)
    found, at = [], 8
    for _ in range(count if version == 1 else 0):
        number, name, _, options = struct.unpack_from("<4H", content, at)
        values = struct.unpack_from(f"<{options}I", content, at + 8 + name)
        # The version comes first in those of bitshuffle, the level last in both.
        found.append((number, *{_BITSHUFFLE: values[2:5], _ZSTD: ()}.get(number, values)))
        at += 8 + name + 4 * (options + options % 2)
    return found


def _wanted_filters(expected: _Expected) -> list[tuple[int, ...]]:
    width = expected.dtype.itemsize
    first = [(_BITSHUFFLE, width, expected.block, 3)] if expected.bits else [(_SHUFFLE, width), (_ZSTD,)]
    return [*first, (_FLETCHER32,)]


def _check_chunks(file: Hdf5File, tree: int, expected: _Expected) -> None:
    """Each chunk is there once, passes all filters, and unpacks to its own size."""
    number = math.prod(expected.counts)
    if number > file.size // _LEAST_CHUNK:
        raise ValueError(f"'{expected.name}' lacks chunks")
    parts, left = [], number
    for part in file.chunks(tree, len(expected.shape)):
        parts.append(part)
        left -= len(part)
        if left <= 0:
            break
    at = np.indices(expected.counts).reshape(len(expected.counts), -1).T * expected.chunk
    if left or (np.concatenate([part["at"] for part in parts]) != np.pad(at, ((0, 0), (0, 1)))).any():
        raise ValueError(f"'{expected.name}' lacks chunks")
    unpacks = _unpacks_by_bits if expected.bits else _unpacks_by_bytes
    for size, skipped, _, address in (chunk for part in parts for chunk in part.tolist()):
        inside = _CHECKSUM < size <= file.size - address
        if skipped or not inside or not unpacks(file, address, size - _CHECKSUM, expected):
            raise ValueError(f"'{expected.name}' has a chunk that does not unpack to {expected.chunk_bytes} bytes")


def _unpacks_by_bytes(file: Hdf5File, address: int, size: int, expected: _Expected) -> bool:
    """Whether a chunk is a frame of zstd (RFC 8878, 3.1.1) that declares the size of the chunk."""
    head = file.read(address, min(size, 14)).ljust(14, b"\0")
    alone = head[4] >> 5 & 1  # no field for the window stands before the size
    width = (alone, 2, 4, 8)[head[4] >> 6]
    declared = int.from_bytes(head[6 - alone : 6 - alone + width], "little") + (256 if width == 2 else 0)
    return head[:4] == _ZSTD_MAGIC and not head[4] & 3 and width > 0 and declared == expected.chunk_bytes


def _unpacks_by_bits(file: Hdf5File, address: int, size: int, expected: _Expected) -> bool:
    """Whether a chunk of bitshuffle declares the size of the chunk, and its blocks end where it ends."""
    width, numbers = expected.dtype.itemsize, math.prod(expected.chunk)
    total, block, length = struct.unpack(">QII", file.read(address, 16))
    if (total, block) != (expected.chunk_bytes, expected.block * width):
        return False
    whole, rest = divmod(numbers, expected.block)
    blocks, at = whole + (rest >= 8), 12
    for number in range(blocks):
        if number:
            length = int.from_bytes(file.read(address + at, 4), "big")
        at += 4 + length
    return at + numbers % 8 * width == size


def check_lists(coding: Coding) -> None:
    """ValueError: lists with an id that is not one, or weights that cannot predict."""
    lists, weights, size = coding.dictionary, coding.predictor.weights, coding.spec.vocab_size
    if lists.context_row.max() >= len(lists.candidates) or lists.common.max() >= size:
        raise ValueError("its dictionary has an entry that is out of range")
    if ((lists.candidates >= size) & (lists.candidates != lists.absent)).any():
        raise ValueError("its dictionary has an entry that is out of range")
    if not np.isfinite(weights).all() or np.triu(weights[:, weights.shape[1] - len(weights) :]).any():
        raise ValueError("its dictionary has weights that predict nothing")
    with np.errstate(all="ignore"):
        largest = coding.predictor.largest
    if not largest < _LARGEST:
        raise ValueError("its dictionary has weights that predict nothing finite")


def check_flags(loss_mask_nT: np.ndarray, segments_nT: np.ndarray) -> None:
    """ValueError: values that the format has not."""
    if loss_mask_nT.max() > layout.BROKEN:
        raise ValueError(f"its loss_mask has the value {loss_mask_nT.max()}")
    if segments_nT.max() >= segments_nT.shape[1]:
        raise ValueError(f"its segments have the number {segments_nT.max()} in {segments_nT.shape[1]} positions")


def check_stored(arrays: Arrays, spec: CodecSpec) -> None:
    """ValueError: sequences [n, ...], as they are stored, with numbers that nothing was written as."""
    if (largest := arrays["tokens"].max()) >= spec.vocab_size:
        raise ValueError(f"the token {largest} is outside of the vocabulary of {spec.vocab_size}")
    if spec.kind == "sparse":
        numbers_nRT, entries = arrays["numbers"], spec.columns
        wide = np.uint32 if entries < 2**16 else np.uint64  # sums that do not wrap around
        counts = numbers_nRT[:, entries : entries + spec.draws]
        if numbers_nRT[:, -1].max() == np.iinfo(np.uint16).max:
            raise ValueError("it lacks targets")
        if max(numbers_nRT[:, -1].max(), numbers_nRT[:, :entries].sum(1, wide).max()) > LOWEST:
            raise ValueError("a log-probability is not between -10,000 and 0")
        if counts.size and counts.sum(1, wide).max() > spec.draws:
            raise ValueError(f"more than {spec.draws} samples were drawn for a token")
    if spec.kind == "dense":
        if np.isnan(arrays["label_logprob"]).any():
            raise ValueError("it lacks targets")
        if not (_are_logprobs(arrays["label_logprob"]) and _are_logprobs(arrays["logprobs"])):
            raise ValueError("a log-probability is not between -10,000 and 0")


def _are_logprobs(values: np.ndarray) -> bool:
    """Whether all of some fp16 lie from `FLOOR` to 0, up to rounding: as whole numbers, which are compared fast."""
    # Above 0 fp16 ascends as its bits do, and NaN comes after infinity; below 0 it descends, with the sign bit set.
    most, least = np.array([1e-3, FLOOR], np.float16).view(np.int16), np.float16(FLOOR).view(np.uint16)
    return bool(values.view(np.int16).max() <= most[0] and values.view(np.uint16).max() <= least)


def check_values(kept: Arrays, spec: CodecSpec) -> None:
    """ValueError: what sparse sequences unpack to, arrays [n, T, ...], is not a distribution."""
    ids, head, one = kept["ids"], spec.head, spec.knots.index(1.0)
    if head and ids[..., :head].max() >= spec.vocab_size:
        raise ValueError("an entry of a head is absent")
    with np.errstate(over="ignore"):
        tail_nT = np.exp(kept["tail"][..., one])
    head_nT = _mass(kept["logprobs"][..., :head]) if head else np.zeros_like(tail_nT)
    drawn_nT = np.zeros_like(tail_nT)
    if spec.draws:
        absent = ids[..., head:] == spec.absent
        if (absent != (kept["draws"][..., head:] == 0)).any():
            raise ValueError("a sample has no count, or a count no sample")
        drawn_nT = _mass(np.where(absent, FLOOR, kept["logprobs"][..., head:]))
    if not (head_nT + np.maximum(drawn_nT, tail_nT)).max() <= MASS:
        raise ValueError("the probabilities of a token sum to more than 1")
    number, most = len(spec.knots), math.log(spec.vocab_size) + 0.1
    for name, found, low, high in (
        ("log-partition", kept["tail"][..., :number], _LEAST, most),
        ("slope", kept["tail"][..., number:], _LEAST, 0.1),
        ("mean", kept["logit_mean"], _LEAST, 0.1),
        ("deviation", kept["logit_std"], -0.1, -_LEAST),
    ):
        if not (found.min() >= low and found.max() <= high):
            raise ValueError(f"the {name} of a tail is out of range")


def _mass(logprobs_nTK: np.ndarray) -> np.ndarray:
    """[n, T] the sum of the probabilities of each token."""
    # A column at a time: an array as large as all of them costs more, here and in what is unpacked next.
    mass_nT = np.exp(logprobs_nTK[..., 0])
    for k in range(1, logprobs_nTK.shape[-1]):
        mass_nT += np.exp(logprobs_nTK[..., k])
    return mass_nT
