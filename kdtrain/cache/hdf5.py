"""The structure of an HDF5 file, read from its bytes without HDF5.

HDF5 follows links to other files, allocates what a file declares, and crashes on some whose structure is wrong: 12 of
4,000 shards with a few bytes changed. A shard that a stranger made is therefore walked here before HDF5 sees it. This
reads what HDF5 writes for its earliest version, as far as shards use it: superblock, object headers, symbol tables,
attributes and the B-trees of chunked data sets. It has no code for anything else, which is refused: soft and external
links, external storage, virtual data sets, shared messages.

What it gives up: a file in a newer layout of HDF5 is refused, whatever it holds.

Structures are named as in the HDF5 File Format Specification, version 3.0: II.A superblock, III.A.1 B-trees, III.B and
III.C symbol tables, III.D local heaps, III.E global heaps, IV.A object headers and their messages.
"""

import os
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, BinaryIO

import numpy as np

SPACE, TYPE, OLD_FILL, FILL, LAYOUT, FILTERS, ATTRIBUTE = 1, 3, 4, 5, 8, 11, 12
"""Kinds of messages of an object header."""
_NIL, _CONTINUATION, _SYMBOL_TABLE = 0, 16, 17
_FOREIGN = {2: "a soft or external link", 6: "a soft or external link", 7: "external storage"}
_SUPERBLOCK = b"\x89HDF\r\n\x1a\n" + struct.pack("<8BHHI", 0, 0, 0, 0, 0, 8, 8, 0, 4, 16, 0)
_NOWHERE = 2**64 - 1
_MAX_BYTES = 2**16  # of an object header, and of a heap
_MAX_LEVEL = 8  # of a B-tree


@dataclass(frozen=True)
class Link:
    """A name in a group."""

    header: int
    """Address of the object header."""
    table: bytes
    """Addresses of B-tree and heap, where it is a group."""


@dataclass(frozen=True)
class Group:
    """A group's links by name, and its attributes: numbers, texts, or tuples of numbers."""

    links: dict[str, Link]
    attributes: dict[str, Any]


class Hdf5File:
    """A file open for reading, as its structures. ValueError, struct.error, IndexError: it has others."""

    def __init__(self, file: BinaryIO) -> None:
        self._handle = file.fileno()
        self.size = os.fstat(self._handle).st_size

    def read(self, address: int, size: int) -> bytes:
        """The `size` bytes from `address` on."""
        found = os.pread(self._handle, size, address) if address <= self.size - size else b""
        if len(found) != size:
            raise ValueError("a part of it lies outside of the file")
        return found

    def fields(self, address: int, spelling: str) -> tuple[Any, ...]:
        """What stands at `address`, as `struct` spells it: little-endian, without gaps."""
        return struct.unpack(f"<{spelling}", self.read(address, struct.calcsize(f"<{spelling}")))

    def root(self) -> Group:
        """The root group."""
        known, base, free, end, driver, _, header, kind, _, table = self.fields(0, "24s4QQQII16s")
        if known != _SUPERBLOCK or (base, free, driver, kind) != (0, _NOWHERE, _NOWHERE, 1):
            raise ValueError("it does not begin as an HDF5 file of the earliest layout")
        if end != self.size:
            raise ValueError(f"it has {self.size} bytes instead of {end}")
        return self.group(Link(header, table))

    def messages(self, header: int) -> list[tuple[int, bytes]]:
        """Kind and content of each message in an object header."""
        version, count, size = self.fields(header, "BxHxxxxI")
        blocks, found, left = [(header + 16, size)], [], _MAX_BYTES
        for start, size in blocks:
            left -= size
            if version != 1 or left < 0:
                raise ValueError("an object header of it has another layout")
            block, at = self.read(start, size), 0
            while at < size:
                kind, length, flags = struct.unpack_from("<HHB", block, at)
                content, at = block[at + 8 : at + 8 + length], at + 8 + length
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

    def group(self, link: Link) -> Group:
        """The group at a link: one with at most 8 names, so that they stand in one node."""
        messages = self.messages(link.header)
        rest = [content for kind, content in messages if kind != ATTRIBUTE]
        tree, heap = struct.unpack("<QQ", link.table)
        node = self.fields(tree, "4sBBHQQQQQ496x")  # HDF5 reads all of a node
        mark, version, size, names = self.fields(heap, "4sB3xQ8xQ")
        leaf = self.fields(node[7], "4sBxH320x")
        sound = node[:6] == (b"TREE", 0, 0, 1, _NOWHERE, _NOWHERE) and (mark, version) == (b"HEAP", 0)
        if rest != [link.table] or not sound or size > _MAX_BYTES or leaf[:2] != (b"SNOD", 1) or leaf[2] > 8:
            raise ValueError("a group of it has another layout")
        heap_bytes, links = self.read(names, size), {}
        for number in range(leaf[2]):
            start, header, kind, _, table = self.fields(node[7] + 8 + 40 * number, "QQII16s")
            name = heap_bytes[start:].partition(b"\0")[0].decode()
            if kind > 1:
                raise ValueError(f"it has a soft link, '{name[:80]}'")
            links[name] = Link(header, table)
        attributes = [content for kind, content in messages if kind == ATTRIBUTE]
        return Group(links, dict(self._attribute(each) for each in attributes))

    def _attribute(self, content: bytes) -> tuple[str, Any]:
        parts, at = [], 8
        for size in struct.unpack_from("<2x3H", content):
            parts.append(content[at : at + size])
            at += -(-size // 8) * 8
        name, kind, space = parts[0].rstrip(b"\0").decode(), parts[1], parts[2]
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
        content, at = self.read(heap, min(total, _MAX_BYTES)), 16
        while (mark, version) == (b"GCOL", 1) and at + 16 <= len(content):
            number, length = struct.unpack_from("<H6xQ", content, at)
            if number == wanted:
                return content[at + 16 : at + 16 + min(size, length)].decode()
            at += 16 + -(-length // 8) * 8
        raise ValueError("an attribute of it has no text")

    def chunks(self, tree: int, rank: int) -> Iterator[np.ndarray]:
        """The chunks below a node of a B-tree, in parts: `size`, `skipped` (filters), `at` (rank + 1), `address`."""
        entry = np.dtype([("size", "<u4"), ("skipped", "<u4"), ("at", "<u8", rank + 1), ("address", "<u8")])
        yield from self._chunks(tree, entry, _MAX_LEVEL)

    def _chunks(self, tree: int, entry: np.dtype, below: int) -> Iterator[np.ndarray]:
        mark, kind, level, used = self.fields(tree, "4sBBH")
        # HDF5 reads all of a node: 64 entries, and one key more.
        content = self.read(tree, 24 + 64 * entry.itemsize + entry.itemsize - 8)
        if (mark, kind) != (b"TREE", 1) or not level < below or not 1 <= used <= 64:
            raise ValueError("a B-tree of it has another layout")
        entries = np.frombuffer(content, entry, used, 24)
        if level == 0:
            yield entries
            return
        for each in entries:
            for number, part in enumerate(self._chunks(int(each["address"]), entry, level)):
                if number == 0 and (part["at"][0] != each["at"]).any():
                    raise ValueError("a B-tree of it has another order")
                yield part
