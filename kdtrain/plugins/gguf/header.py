"""The header of a GGUF file of an unknown author: its keys, and the tensors' names, types and shapes, within bounds.

Format: github.com/ggml-org/ggml, docs/gguf.md; versions 2 and 3, little-endian. No count is believed before the bytes
for it are there, and no two tensors may share bytes, so that a small file cannot ask for much memory.
"""

import math
import struct
from collections import Counter
from dataclasses import dataclass
from io import BufferedReader
from pathlib import Path
from typing import Any

import numpy as np

from kdtrain.errors import UsageError
from kdtrain.files import open_regular
from kdtrain.imports import optional

MOST_ENTRIES = 2**21
"""Most entries of an array, and keys and tensors of a file; the largest vocabulary known has 262,144."""
_MOST_BYTES = 2**28
"""Of a header; a vocabulary of 150,000 with its merges has 6e6."""
_NUMBERS = {
    **{0: "<u1", 1: "<i1", 2: "<u2", 3: "<i2", 4: "<u4", 5: "<i4", 6: "<f4", 7: "?", 10: "<u8", 11: "<i8", 12: "<f8"}
}
_TEXT, _ARRAY = 8, 9
NORMAL, CONTROL, USER_DEFINED, UNUSED = 1, 3, 4, 5
"""Types of tokens."""


@dataclass(frozen=True)
class Header:
    """The contents of a file, besides the numbers."""

    values: dict[str, Any]
    """By key: bool, int, float, str, or a list of these."""
    shapes: dict[str, tuple[int, ...]]
    """Of each tensor, rows first."""
    types: Counter[str]
    """How many tensors have each type of ggml."""


def read_header(path: Path) -> Header:
    """Read the header of a file. UsageError: it is not GGUF, is cut short or damaged, or a type is not read."""
    gguf = optional("gguf", "gguf", str(path))
    try:
        with open_regular(path) as file:
            found = _read(file, path.stat().st_size, gguf.GGML_QUANT_SIZES)
        for word in found.types:
            kind = gguf.GGMLQuantizationType[word]
            gguf.dequantize(np.zeros((1, gguf.GGML_QUANT_SIZES[kind][1]), np.uint8), kind)
        return found
    except NotImplementedError:
        raise UsageError(f"{path}: it has tensors of {word}, which the package gguf does not dequantise") from None
    except OSError as error:
        raise UsageError(f"{path}: cannot be read: {error.strerror}") from None
    except UnicodeDecodeError:
        raise UsageError(f"{path}: a text in its header is not UTF-8; download it again") from None
    except ValueError as error:
        raise UsageError(f"{path}: not a GGUF file that can be read: {error}; download it again") from None


class _Reader:
    def __init__(self, file: BufferedReader, size: int) -> None:
        self.file = file
        self.size = size
        self.at = 0

    def take(self, count: int) -> bytes:
        self.at += count
        if self.at > min(self.size, _MOST_BYTES):
            raise ValueError(f"its header needs {self.at:,} bytes or more, and it has {self.size:,}")
        return self.file.read(count)

    def number(self, kind: str) -> Any:
        return np.frombuffer(self.take(np.dtype(kind).itemsize), kind)[0].item()

    def count(self, what: str) -> int:
        (found,) = struct.unpack("<Q", self.take(8))
        if found > MOST_ENTRIES:
            raise ValueError(f"it has {found:,} {what}; at most {MOST_ENTRIES:,} are read")
        return int(found)

    def text(self) -> str:
        (length,) = struct.unpack("<Q", self.take(8))
        return self.take(length).decode()

    def value(self, kind: int) -> Any:
        if kind in _NUMBERS:
            return self.number(_NUMBERS[kind])
        if kind == _TEXT:
            return self.text()
        if kind != _ARRAY:
            raise ValueError(f"a value is of the unknown type {kind}")
        of = self.number("<u4")
        count = self.count("entries in an array")
        if of == _TEXT:
            return [self.text() for _ in range(count)]
        if of not in _NUMBERS:
            raise ValueError(f"an array is of the type {of}")
        return np.frombuffer(self.take(count * np.dtype(_NUMBERS[of]).itemsize), _NUMBERS[of]).tolist()


def _read(file: BufferedReader, size: int, kinds: dict[Any, tuple[int, int]]) -> Header:
    reader = _Reader(file, size)
    if reader.take(4) != b"GGUF":
        raise ValueError("it does not begin with GGUF")
    if (version := reader.number("<u4")) not in (2, 3):
        raise ValueError(f"it is of version {version}, and 2 and 3 are read, little-endian")
    count, keys = reader.count("tensors"), reader.count("keys")
    values = dict[str, Any]()
    shapes = dict[str, tuple[int, ...]]()
    types = Counter[str]()
    total = 0
    end = 0
    for _ in range(keys):
        key = reader.text()
        if key in values:
            raise ValueError(f"it has {key[:80]!r} twice")
        values[key] = reader.value(reader.number("<u4"))
    known = {int(kind): (kind.name, *sizes) for kind, sizes in kinds.items()}
    for _ in range(count):
        name = reader.text()
        dimensions = reader.number("<u4")
        if name in shapes or not 1 <= dimensions <= 4:
            raise ValueError(f"its tensor {name[:80]!r} is there twice, or has {dimensions} dimensions")
        shape = struct.unpack(f"<{dimensions}Q", reader.take(8 * dimensions))
        kind = reader.number("<u4")
        offset = 0
        (offset,) = struct.unpack("<Q", reader.take(8))
        if kind not in known:
            raise ValueError(f"its tensor {name[:80]!r} is of type {kind}, which the package gguf does not know")
        word, block, bytes_ = known[kind]
        if min(shape) < 1 or shape[0] % block:
            raise ValueError(f"its tensor {name[:80]!r} cannot be {word} in the shape {shape[::-1]}")
        length = math.prod(shape) // block * bytes_
        shapes[name], total, end = shape[::-1], total + length, max(end, offset + length)
        types[word] += 1
    step = values.get("general.alignment", 32)
    if type(step) is not int or step < 1 or step & (step - 1):
        raise ValueError(f"general.alignment = {str(step)[:80]} is not a power of 2")
    start = -(-reader.at // step) * step
    if total > size - start or end > size - start:
        raise ValueError(
            f"its tensors need {max(total, end):,} bytes behind the header, and {size - start:,} are there"
        )
    return Header(values, shapes, types)
