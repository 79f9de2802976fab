"""Where two tokenizers cut the same bytes at the same place.

Two streams of tokens spell the same bytes. A common boundary is an offset where a token of either begins; between two
of them lies a chunk, a few tokens on each side. One pass over arrays finds them, at a few nanoseconds a byte. An event,
such as the end of a document, counts as one byte that both streams have; a token that the other stream lacks has none,
and no chunk holds it.

Shape suffixes: N tokens of one stream (the teacher's), M of the other (the student's).
"""

from dataclasses import dataclass
from typing import Any

import numpy as np

_Array = np.ndarray[Any, np.dtype[Any]]

MOST = 32
"""Tokens of a chunk, on either side; a longer one is left out."""


@dataclass(frozen=True)
class Common:
    """What the tokens of the second stream share with the first."""

    source: _Array
    """int64 [M] the token of the first stream that holds its first byte; -1 of a token without bytes."""
    offset: _Array
    """int64 [M] that token's bytes before it; 0 where both begin at the same offset."""
    length: _Array
    """uint8 [M] tokens of the second stream in the chunk that ends with this one; 0 where none ends."""
    others: _Array
    """uint8 [M] tokens of the first stream in that chunk, which begins at `source` of its first token."""
    counts: _Array
    """bool [M] whether all bytes of the token belong to tokens of the first stream that count."""


def common_boundaries(sizes_N: _Array, sizes_M: _Array, counts_N: _Array) -> Common:
    """Find them in two streams of the same bytes.

    sizes_N, sizes_M: bytes of each token; 1 for an event of both, 0 for a token that the other lacks. counts_N: bool,
    which tokens of the first stream are labels that count; a chunk with another one is left out.

    ValueError: the streams have different numbers of bytes.
    """
    ends_N, ends_M = np.cumsum(sizes_N, dtype=np.int64), np.cumsum(sizes_M, dtype=np.int64)
    total = int(ends_M[-1]) if len(ends_M) else 0
    if total != (int(ends_N[-1]) if len(ends_N) else 0):
        raise ValueError(f"one stream has {ends_N[-1:]} bytes, the other {total}")
    starts_N, starts_M = ends_N - sizes_N, ends_M - sizes_M
    real_N, real_M = sizes_N > 0, sizes_M > 0
    holder = np.append(np.repeat(np.arange(len(sizes_N)), sizes_N), -1)
    source_M = np.where(real_M, holder[starts_M], -1)
    offset_M = np.where(real_M, starts_M - np.append(starts_N, 0)[source_M], 0)
    missed = np.concatenate([[0], np.cumsum(np.repeat(~counts_N, sizes_N), dtype=np.int64)])
    counts_M = real_M & (missed[ends_M] == missed[starts_M])

    first = np.flatnonzero((source_M >= 0) & (offset_M == 0))
    length, others = np.zeros(len(sizes_M), np.uint8), np.zeros(len(sizes_M), np.uint8)
    if len(first):
        # a chunk ends with the last token that has bytes before the next boundary
        after_M = _last_real(real_M)[np.append(first[1:], len(sizes_M)) - 1] + 1
        after_N = _last_real(real_N)[np.append(source_M[first[1:]], len(sizes_N)) - 1] + 1
        wide_M, wide_N = after_M - first, after_N - source_M[first]
        unusable_N, unusable_M = ~(real_N & counts_N), ~(real_M & counts_M)
        bad_N, bad_M = (np.concatenate([[0], np.cumsum(each)]) for each in (unusable_N, unusable_M))
        kept = (wide_M <= MOST) & (wide_N <= MOST)
        kept &= (bad_N[after_N] == bad_N[source_M[first]]) & (bad_M[after_M] == bad_M[first])
        length[after_M[kept] - 1], others[after_M[kept] - 1] = wide_M[kept], wide_N[kept]
    return Common(source_M, offset_M, length, others, counts_M)


def _last_real(real_N: _Array) -> _Array:
    return np.maximum.accumulate(np.where(real_N, np.arange(len(real_N)), -1))  # type: ignore[no-any-return]
