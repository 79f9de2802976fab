"""Reads the HDF5 files of a cache: data sets fast, by h5py's low-level calls, and a file's bytes before HDF5 opens it.

HDF5 follows links to other files, allocates what a file declares, and crashes on some damaged structures: on 12 of
4,000 shards with a few bytes changed. `check_structure` therefore reads the structure from the bytes, before HDF5 opens
the file, and compares it with what `hdf5_writing.create_shard` makes: the names, types, shapes, chunks, fill values and
filters of all data sets, the attributes, the place of each chunk and its unpacked size. Of the data it reads only the
first bytes of each chunk, once a shard.

`Hdf5File` reads what HDF5 writes for its earliest version, as far as shards use it: superblock, object headers, symbol
tables, attributes and the B-trees of chunked data sets. It refuses everything else: soft and external links, external
storage, virtual data sets, shared messages. Structures are named as in the HDF5 File Format Specification, version 3.0:
II.A superblock, III.A.1 B-trees, III.B and III.C symbol tables, III.D local heaps, III.E global heaps, IV.A object
headers and their messages.

What it gives up: a file in a newer layout of HDF5 is refused, whatever it holds.
"""

import math
import os
import struct
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import h5py
import hdf5plugin  # noqa: F401  (it registers the decompressors)
import numpy as np

from kdtrain.cache.format.names import DICTIONARY
from kdtrain.cache.format.spec import CodecSpec, DatasetLayout, attributes, datasets, dictionary_sets
from kdtrain.files import open_regular


def read_dictionary(file: h5py.File) -> dict[str, np.ndarray]:
    """Read the arrays that `hdf5_writing.write_dictionary` wrote. KeyError: there are none."""
    group = file[DICTIONARY]
    # Not over `items`: an error inside such a loop keeps h5py's lock, forever if another thread raises it again.
    return {name: group[name][()] for name in list(group)}


class StoredRows:
    """One data set, read by rows with h5py's low-level calls: a read by `dataset[...]` takes four times as long."""

    def __init__(self, dataset: h5py.Dataset) -> None:
        self._handle, self._dtype = dataset.id, dataset.dtype
        self._type = h5py.h5t.py_create(dataset.dtype)
        self._space = dataset.id.get_space()
        self._shape = dataset.shape[1:]
        self._rest = (0,) * len(dataset.shape[1:])
        self._one = h5py.h5s.create_simple((1, *self._shape))

    def read(self, rows: np.ndarray) -> np.ndarray:
        """Read the rows, ascending, with one call for each run of neighbours."""
        values = np.empty((len(rows), *self._shape), self._dtype)
        breaks = [start for start in range(1, len(rows)) if rows[start] != rows[start - 1] + 1]
        for start, stop in zip([0, *breaks], [*breaks, len(rows)], strict=True):
            part = values[start:stop]
            self._space.select_hyperslab((int(rows[start]), *self._rest), part.shape)
            memory = self._one if len(part) == 1 else h5py.h5s.create_simple(part.shape)
            self._handle.read(memory, self._space, part, self._type)
        return values


# Checking the bytes ---------------------------------------------------------------------------------------------------


SPACE, TYPE, OLD_FILL, FILL, LAYOUT, FILTERS, ATTRIBUTE = 1, 3, 4, 5, 8, 11, 12
"""Kinds of messages of an object header."""
_NIL, _CONTINUATION = 0, 16
_FOREIGN = {2: "a soft or external link", 6: "a soft or external link", 7: "external storage"}
_SUPERBLOCK = b"\x89HDF\r\n\x1a\n" + struct.pack("<8BHHI", 0, 0, 0, 0, 0, 8, 8, 0, 4, 16, 0)
_NOWHERE = 2**64 - 1
_MAX_BYTES = 2**16  # of an object header, and of a heap
_MAX_LEVEL = 8  # of a B-tree


@dataclass(frozen=True)
class Link:
    """A link of a group: where the object with this name lies."""

    header: int
    """Address of the object header."""
    table: bytes
    """Addresses of B-tree and heap, if it is a group."""


class Hdf5File:
    """The structures of an open HDF5 file. ValueError, struct.error, IndexError: they are not the format's."""

    def __init__(self, file: BinaryIO) -> None:
        self._handle = file.fileno()
        self.size = os.fstat(self._handle).st_size

    def read(self, address: int, size: int) -> bytes:
        """Read the `size` bytes from `address` on. ValueError: the file ends before."""
        found = os.pread(self._handle, size, address) if address <= self.size - size else b""
        if len(found) != size:
            raise ValueError("a part of it is outside the file")
        return found

    def fields(self, address: int, spelling: str) -> tuple[Any, ...]:
        """Read the values at `address` by a format of `struct`: little-endian, without gaps."""
        return struct.unpack(f"<{spelling}", self.read(address, struct.calcsize(f"<{spelling}")))

    def root(self) -> tuple[dict[str, Link], dict[str, Any]]:
        """Return the links and the attributes of the root group, as `group` does."""
        known, base, free, end, driver, _, header, kind, _, table = self.fields(0, "24s4QQQII16s")
        if known != _SUPERBLOCK or (base, free, driver, kind) != (0, _NOWHERE, _NOWHERE, 1):
            raise ValueError("it does not begin as an HDF5 file of the earliest layout")
        if end != self.size:
            raise ValueError(f"it has {self.size} bytes instead of {end}")
        return self.group(Link(header, table))

    def messages(self, header: int) -> list[tuple[int, bytes]]:
        """Return the kind and the content of each message in an object header."""
        version, count, size = self.fields(header, "BxHxxxxI")
        blocks = [(header + 16, size)]
        found = []
        left = _MAX_BYTES
        for start, size in blocks:
            left -= size
            if version != 1 or left < 0:
                raise ValueError("an object header of it has another layout")
            block = self.read(start, size)
            at = 0
            while at < size:
                kind, length, flags = struct.unpack_from("<HHB", block, at)
                content = block[at + 8 : at + 8 + length]
                at = at + 8 + length
                if kind in _FOREIGN:
                    raise ValueError(f"it has {_FOREIGN[kind]}")
                if flags not in (0, 1) or at > size:
                    raise ValueError("an object header of it has another layout")
                if kind == _CONTINUATION:
                    blocks.append(struct.unpack("<QQ", content))
                found.append((kind, content))
        if len(found) != count:
            raise ValueError("an object header of it has another layout")
        return [each for each in found if each[0] not in (_NIL, _CONTINUATION)]

    def group(self, link: Link) -> tuple[dict[str, Link], dict[str, Any]]:
        """Return the links (at most 8, all in one node) and the attributes of the group at a link, by name."""
        messages = self.messages(link.header)
        rest = [content for kind, content in messages if kind != ATTRIBUTE]
        tree, heap = struct.unpack("<QQ", link.table)
        node = self.fields(tree, "4sBBHQQQQQ496x")  # HDF5 reads all of a node
        mark, version, size, names = self.fields(heap, "4sB3xQ8xQ")
        leaf = self.fields(node[7], "4sBxH320x")
        sound = node[:6] == (b"TREE", 0, 0, 1, _NOWHERE, _NOWHERE) and (mark, version) == (b"HEAP", 0)
        if rest != [link.table] or not sound or size > _MAX_BYTES or leaf[:2] != (b"SNOD", 1) or leaf[2] > 8:
            raise ValueError("a group of it has another layout")
        heap_bytes = self.read(names, size)
        links = {}
        for number in range(leaf[2]):
            start, header, kind, _, table = self.fields(node[7] + 8 + 40 * number, "QQII16s")
            name = heap_bytes[start:].partition(b"\0")[0].decode()
            if kind > 1:
                raise ValueError(f"it has a soft link, '{name[:80]}'")
            links[name] = Link(header, table)
        attributes = [content for kind, content in messages if kind == ATTRIBUTE]
        return links, dict(self._attribute(each) for each in attributes)

    def _attribute(self, content: bytes) -> tuple[str, Any]:
        parts = []
        at = 8
        for size in struct.unpack_from("<2x3H", content):
            parts.append(content[at : at + size])
            at += -(-size // 8) * 8
        name = parts[0].rstrip(b"\0").decode()
        kind = parts[1]
        space = parts[2]
        spelling = {(0, 8): "q", (1, 8): "d", (9, 16): "IQI"}.get((kind[0] & 15, *struct.unpack_from("<4xI", kind)))
        if spelling is None:
            raise ValueError(f"its attribute '{name[:80]}' has another type")
        if spelling == "IQI":
            return name, self._text(*struct.unpack_from("<IQI", content, at))
        number = struct.unpack_from("<8xQ", space)[0] if space[1] else 1
        values = struct.unpack_from(f"<{number}{spelling}", content, at)
        return name, values if space[1] else values[0]

    def _text(self, size: int, heap: int, wanted: int) -> str:
        mark, version, total = self.fields(heap, "4sB3xQ")
        content = self.read(heap, min(total, _MAX_BYTES))
        at = 16
        while (mark, version) == (b"GCOL", 1) and at + 16 <= len(content):
            number, length = struct.unpack_from("<H6xQ", content, at)
            if number == wanted:
                return content[at + 16 : at + 16 + min(size, length)].decode()
            at += 16 + -(-length // 8) * 8
        raise ValueError("an attribute of it has no text")

    def chunks(self, tree: int, rank: int, number: int) -> np.ndarray:
        """Return the chunks below a node of a B-tree, in order, and of more than `number` not all behind these.

        Fields: `size`, `skipped` (filters), `at` (rank + 1), `address`.
        """
        entry = np.dtype([("size", "<u4"), ("skipped", "<u4"), ("at", "<u8", rank + 1), ("address", "<u8")])
        nodes: list[tuple[int, int, Any]] = [(tree, _MAX_LEVEL, None)]
        parts = []
        while nodes and number > 0:
            address, below, first = nodes.pop()
            mark, kind, level, used = self.fields(address, "4sBBH")
            # HDF5 reads all of a node: 64 entries, and one key more.
            content = self.read(address, 24 + 64 * entry.itemsize + entry.itemsize - 8)
            if (mark, kind) != (b"TREE", 1) or not level < below or not 1 <= used <= 64:
                raise ValueError("a B-tree of it has another layout")
            entries = np.frombuffer(content, entry, used, 24)
            if first is not None and (entries[0]["at"] != first).any():
                raise ValueError("a B-tree of it has another order")
            if level:
                nodes += [(int(each["address"]), level, each["at"]) for each in entries[::-1]]
            else:
                parts.append(entries)
                number -= used
        return np.concatenate(parts)


LARGEST_RATIO, SLACK = 1000, 2**26
"""A shard may unpack to at most RATIO times the bytes of its file, plus SLACK bytes. Real ones: 2 to 8 times."""
_SHUFFLE, _FLETCHER32, _BITSHUFFLE, _ZSTD = 2, 3, 32008, 32015
_ZSTD_MAGIC = b"\x28\xb5\x2f\xfd"
_CHECKSUM = 4  # bytes that fletcher32 adds to a chunk
_LEAST_CHUNK = 40  # least bytes of a chunk in a B-tree


class _Expected:
    """A data set as the format defines it: `number` sequences of `each`; with None, all of `each`."""

    def __init__(self, name: str, each: DatasetLayout, number: int | None = None) -> None:
        self.name = name
        self.dtype = each.dtype
        self.bits = each.bits
        self.block = each.block
        self.shape = each.shape if number is None else (number, *each.shape)
        self.chunk = each.chunk if number is None else (min(number, each.sequences), *each.chunk)
        self.fill = 0 if number is None else each.fill
        self.chunk_bytes = math.prod(self.chunk) * each.dtype.itemsize
        self.counts = [-(-size // step) for size, step in zip(self.shape, self.chunk, strict=True)]


def check_structure(path: Path, spec: CodecSpec, seq_len: int, split: str, first: int, number: int) -> None:
    """Compare the structure of a shard with what `hdf5_writing.create_shard` makes of the same arguments.

    ValueError: it differs, or declares more than it holds. OSError: it cannot be read.
    """
    with open_regular(path) as raw:
        try:
            file = Hdf5File(raw)
            links, stated = file.root()
            sets = [_Expected(name, each, number) for name, each in datasets(spec, seq_len).items()]
            _compare_names("data set", links, [*(each.name for each in sets), *([DICTIONARY] if spec.coded else [])])
            if spec.coded:
                lists, _ = file.group(links.pop(DICTIONARY))
                _compare_names("list", lists, dictionary_sets(spec, 1, 1))
                sets += _lists(file, lists, spec)
                links |= {f"{DICTIONARY}/{name}": link for name, link in lists.items()}
            wanted = attributes(spec, seq_len, split) | {"first_sequence": first, "sequences": number}
            _compare_names("attribute", stated, wanted)
            for name, value in wanted.items():
                if stated[name] != value:
                    raise ValueError(f"its {name} is {str(stated[name])[:80]} instead of {value}")
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
        raise ValueError(f"it has the {what} '{min(foreign)[:80]}', which the format does not have")


def _lists(file: Hdf5File, links: Mapping[str, Link], spec: CodecSpec) -> list[_Expected]:
    """Return the data sets of a dictionary, with as many candidates and common entries as it declares."""
    declared = {}
    for name, most in (("candidates", spec.vocab_size + 1), ("common", spec.vocab_size)):
        spaces = [content for kind, content in file.messages(links[name].header) if kind == SPACE]
        (declared[name],) = struct.unpack_from("<8xQ", spaces[0])
        if not 1 <= declared[name] <= most:
            raise ValueError(f"'{DICTIONARY}/{name}' has {declared[name]} rows instead of 1 to {most}")
    found = dictionary_sets(spec, declared["candidates"], declared["common"])
    return [_Expected(f"{DICTIONARY}/{name}", each) for name, each in found.items()]


def _compare(file: Hdf5File, link: Link, expected: _Expected) -> int:
    """Compare a data set with the format; return the address of its chunks' B-tree. ValueError: it differs."""
    messages = [each for each in file.messages(link.header) if each[0] != ATTRIBUTE]
    found = dict(messages)
    needed = {SPACE, TYPE, FILL, LAYOUT, FILTERS}
    if len(found) != len(messages) or not needed <= found.keys() <= needed | {OLD_FILL}:
        raise ValueError(f"'{expected.name}' is not stored as the format defines it")
    rank = len(expected.shape)
    width = expected.dtype.itemsize
    (tree,) = struct.unpack_from("<3xQ", found[LAYOUT])
    shape = struct.pack(f"<3B5x{2 * rank}Q", 1, rank, 1, *expected.shape, *expected.shape)
    chunks = struct.pack(f"<3BQ{rank + 1}I", 3, 2, rank + 1, tree, *expected.chunk, width)
    old_fill = found.get(OLD_FILL, found[FILL][4:])
    first = [(_BITSHUFFLE, width, expected.block, 3)] if expected.bits else [(_SHUFFLE, width), (_ZSTD,)]
    same = {
        "type": _same(found[TYPE], h5py.h5t.py_create(expected.dtype).encode()[2:]),
        "shape": _same(found[SPACE], shape),
        "chunks": _same(found[LAYOUT], chunks),
        # OLD_FILL repeats the fill value for HDF5 before 1.6.
        "fill value": _is_fill(found[FILL], expected) and old_fill.rstrip(b"\0") == found[FILL][4:].rstrip(b"\0"),
        "filters": _filters(found[FILTERS]) == [*first, (_FLETCHER32,)],
    }
    if other := [what for what, is_same in same.items() if not is_same]:
        raise ValueError(f"'{expected.name}' differs from the format in its {other[0]}")
    return tree


def _same(found: bytes, expected: bytes) -> bool:
    """Return True if both are equal but for the zeros that pad a message."""
    return found[: len(expected)] == expected and not any(found[len(expected) :])


def _is_fill(content: bytes, expected: _Expected) -> bool:
    (size,) = struct.unpack_from("<4xI", content)
    if content[:4] != bytes([2, 3, 2, 1]) or size not in (0, expected.dtype.itemsize):
        return False
    value = np.frombuffer(content[8 : 8 + size], expected.dtype)[0] if size else 0
    return bool(value == expected.fill or (np.isnan(value) and np.isnan(expected.fill)))


def _filters(content: bytes) -> list[tuple[int, ...]]:
    """Return the number of each filter, and the options that decide what a chunk unpacks to."""
    version, count = struct.unpack_from("<BB", content)
    found = []
    at = 8
    for _ in range(count if version == 1 else 0):
        number, name, _, options = struct.unpack_from("<4H", content, at)
        values = struct.unpack_from(f"<{options}I", content, at + 8 + name)
        # Bitshuffle's options begin with its version, and both end with the level.
        found.append((number, *{_BITSHUFFLE: values[2:5], _ZSTD: ()}.get(number, values)))
        at += 8 + name + 4 * (options + options % 2)
    return found


def _check_chunks(file: Hdf5File, tree: int, expected: _Expected) -> None:
    """Raise ValueError if a chunk is missing, is stored twice, skips a filter, or unpacks to another size."""
    number = math.prod(expected.counts)
    if number > file.size // _LEAST_CHUNK:
        raise ValueError(f"'{expected.name}' lacks chunks")
    chunks = file.chunks(tree, len(expected.shape), number)
    at = np.indices(expected.counts).reshape(len(expected.counts), -1).T * expected.chunk
    if len(chunks) != number or (chunks["at"] != np.pad(at, ((0, 0), (0, 1)))).any():
        raise ValueError(f"'{expected.name}' lacks chunks")
    unpacks = _unpacks_by_bits if expected.bits else _unpacks_by_bytes
    for size, skipped, _, address in chunks.tolist():
        inside = _CHECKSUM < size <= file.size - address
        if skipped or not inside or not unpacks(file, address, size - _CHECKSUM, expected):
            raise ValueError(f"'{expected.name}' has a chunk that does not unpack to {expected.chunk_bytes} bytes")


def _unpacks_by_bytes(file: Hdf5File, address: int, size: int, expected: _Expected) -> bool:
    """Return True if a chunk is a frame of zstd (RFC 8878, 3.1.1) that declares the size of the chunk."""
    head = file.read(address, min(size, 14)).ljust(14, b"\0")
    alone = head[4] >> 5 & 1  # 1: no window field precedes the size
    width = (alone, 2, 4, 8)[head[4] >> 6]
    declared = int.from_bytes(head[6 - alone : 6 - alone + width], "little") + (256 if width == 2 else 0)
    return head[:4] == _ZSTD_MAGIC and not head[4] & 3 and width > 0 and declared == expected.chunk_bytes


def _unpacks_by_bits(file: Hdf5File, address: int, size: int, expected: _Expected) -> bool:
    """Return True if a chunk of bitshuffle declares the size of the chunk, and its blocks end where it ends."""
    width = expected.dtype.itemsize
    numbers = math.prod(expected.chunk)
    total, block, length = struct.unpack(">QII", file.read(address, 16))
    if (total, block) != (expected.chunk_bytes, expected.block * width):
        return False
    whole, rest = divmod(numbers, expected.block)
    blocks = whole + (rest >= 8)
    at = 12
    for number in range(blocks):
        if number:
            length = int.from_bytes(file.read(address + at, 4), "big")
        at += 4 + length
    return at + numbers % 8 * width == size
