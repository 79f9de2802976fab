"""Packed rows on their way into a cache, a shard at a time."""

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from typing import Protocol

import numpy as np


class Row(Protocol):
    """A packed row, see `data.packing`."""

    @property
    def tokens(self) -> np.ndarray: ...  # [T+1]
    @property
    def loss_mask(self) -> np.ndarray: ...  # [T] bool
    @property
    def segments(self) -> np.ndarray: ...  # [T]


@dataclass(frozen=True)
class Rows:
    """The rows of one shard: n sequences."""

    tokens: np.ndarray
    loss_mask: np.ndarray
    segments: np.ndarray
    kept: dict[str, np.ndarray]
    """What is kept of them, [n, T, ...], where that is known already; else empty."""

    def digest(self) -> str:
        """SHA-256 over all three, so that a shard of other rows is noticed."""
        sha = hashlib.sha256()
        for part, dtype in ((self.tokens, "<u4"), (self.loss_mask, "u1"), (self.segments, "<u4")):
            sha.update(np.ascontiguousarray(part, dtype=dtype).tobytes())
        return sha.hexdigest()


def shards_of(rows: Iterator[Row], number: int) -> Iterator[Rows]:
    """The rows of one shard after another, `number` of them each but the last."""
    while part := list(islice(rows, number)):
        known = [getattr(row, "kept", {}) for row in part]
        yield Rows(
            tokens=np.stack([row.tokens for row in part]),
            loss_mask=np.stack([row.loss_mask for row in part]),
            segments=np.stack([row.segments for row in part]),
            kept={name: np.stack([each[name] for each in known]) for name in known[0]},
        )
