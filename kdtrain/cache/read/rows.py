"""The text of a split as packed rows, for what builds another cache of it."""

from collections.abc import Iterator, Sequence

import numpy as np

from kdtrain.cache.read.reader import CacheReader
from kdtrain.data.packed import PackedRow

_ROWS_AT_ONCE = 64


def stored_rows(split: CacheReader, numbers: Sequence[int] | np.ndarray | None = None) -> Iterator[PackedRow]:
    """The sequences `numbers`, in this order; None: all. RunError, IndexError: as `CacheReader.text`."""
    numbers = range(len(split)) if numbers is None else numbers
    for start in range(0, len(numbers), _ROWS_AT_ONCE):
        found = split.text(numbers[start : start + _ROWS_AT_ONCE])
        yield from (PackedRow(*row) for row in zip(*found.values(), strict=True))
