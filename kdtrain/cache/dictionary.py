"""Ids of kept entries as small numbers: their places in lists that a shard carries.

Which entries are likely depends most on the token just read. A shard therefore holds, for each token that
is met often, the entries most often kept after it (`candidates`), and one list of all entries by how often
they are kept (`common`). An id is stored as its place in the first list that has it, so that most codes are
small and compress well; the lists are made from the shard itself, so that a shard is read alone.

    code 0                       absent
    code 1 .. C                  candidates[context_row[token just read], code - 1]
    code C+1 .. C+U              common[code - C - 1]
    code above C+U               the id itself, plus C + U + 1

A pair of token and entry is listed when it was met `MIN_COUNT` times: listing it costs about two bytes and
saves about one each time. What it gives up: an id cannot be read without its shard's lists.

Shapes: N tokens, K kept entries, V vocabulary, R rows of candidates, C of them a row, U common entries.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property

import numpy as np

WIDTH = 64
"""C: candidates listed for a token."""
MIN_COUNT = 3
"""How often a pair of token and entry is met before it is worth listing."""


@dataclass(frozen=True)
class Dictionary:
    """The lists of one shard. `absent` stands for an entry that is not there, before and after coding."""

    context_row: np.ndarray
    """[V] unsigned: the row of candidates for a token just read; row 0 is empty."""
    candidates: np.ndarray
    """[R, C] ids, most frequent first; `absent` where a row has fewer."""
    common: np.ndarray
    """[U] ids, most frequent first."""
    absent: int
    _lists: np.ndarray = field(init=False, repr=False)

    def __post_init__(self) -> None:
        # All lists end to end, where `decode` looks ids up; the two become views of it, so that it is held once.
        rows = np.pad(self.candidates, ((0, 0), (1, 0)), constant_values=self.absent)
        lists = np.concatenate([rows.ravel(), self.common])
        object.__setattr__(self, "_lists", lists)
        object.__setattr__(self, "candidates", lists[: rows.size].reshape(rows.shape)[:, 1:])
        object.__setattr__(self, "common", lists[rows.size :])

    @classmethod
    def fit(cls, context_N: np.ndarray, ids_NK: np.ndarray, vocab_size: int, absent: int) -> Dictionary:
        """The lists for these tokens (`context_N`: the token just read, `ids_NK`: entries kept after it)."""
        dtype = np.min_scalar_type(absent)
        here_NK = ids_NK != absent
        ids = ids_NK[here_NK].astype(np.int64)
        counts_V = np.bincount(ids, minlength=vocab_size)
        by_count_V = np.argsort(-counts_V, kind="stable")
        common = by_count_V[: max(1, np.count_nonzero(counts_V))].astype(dtype)
        contexts = np.broadcast_to(context_N[:, None], ids_NK.shape)[here_NK].astype(np.int64)
        pairs, counts = np.unique(contexts * vocab_size + ids, return_counts=True)
        often = counts >= MIN_COUNT
        rows, candidates = _ranked(pairs[often], counts[often], vocab_size, absent)
        context_row = np.zeros(vocab_size, np.min_scalar_type(max(1, len(rows))))
        context_row[rows] = np.arange(1, len(rows) + 1)
        return cls(context_row, candidates.astype(dtype), common, absent)

    @property
    def common_base(self) -> int:
        """The code of the first common entry."""
        return WIDTH + 1

    @property
    def literal_base(self) -> int:
        """The code of the id 0, spelled out."""
        return WIDTH + 1 + len(self.common)

    @cached_property
    def _pairs(self) -> tuple[np.ndarray, np.ndarray]:
        """Listed pairs, row * V + id, ascending, and the code of each."""
        rows, places = np.nonzero(self.candidates != self.absent)
        pairs = rows * len(self.context_row) + self.candidates[rows, places].astype(np.int64)
        order = np.argsort(pairs)
        return pairs[order], places[order] + 1

    @cached_property
    def _plain(self) -> np.ndarray:
        """[V] the code of an id that is no candidate."""
        codes_V = self.literal_base + np.arange(len(self.context_row))
        codes_V[self.common] = self.common_base + np.arange(len(self.common))
        return codes_V

    def encode(self, context_N: np.ndarray, ids_NK: np.ndarray) -> np.ndarray:
        """Codes [N, K] int64 of `ids_NK`."""
        here_NK = ids_NK != self.absent
        ids_NK = np.where(here_NK, ids_NK, 0).astype(np.int64)
        codes_NK = self._plain[ids_NK]
        pairs, places = self._pairs
        if len(pairs):
            wanted_NK = self.context_row[context_N].astype(np.int64)[:, None] * len(self.context_row) + ids_NK
            found_NK = np.searchsorted(pairs, wanted_NK).clip(max=len(pairs) - 1)
            codes_NK = np.where(pairs[found_NK] == wanted_NK, places[found_NK], codes_NK)
        return np.where(here_NK, codes_NK, 0)

    def decode(self, context_T: np.ndarray, codes_KT: np.ndarray) -> np.ndarray:
        """Ids [K, T], of the lists' dtype, of one sequence. IndexError: a code that this dictionary does not have."""
        beyond = np.int32(len(self._lists) - self.literal_base)
        start_T = np.take(self.context_row, context_T).astype(np.int32) * (WIDTH + 1)
        place_KT = np.where(codes_KT <= WIDTH, start_T, beyond)
        place_KT = np.add(place_KT, codes_KT, dtype=np.intp, casting="unsafe")
        literal_KT = codes_KT >= self.literal_base
        if not literal_KT.any():
            return np.take(self._lists, place_KT)
        spelled_KT = codes_KT.astype(np.int64) - self.literal_base
        if spelled_KT.max() >= len(self.context_row):
            raise IndexError(f"the id {spelled_KT.max()} is outside the vocabulary")
        place_KT[literal_KT] = 0
        return np.where(literal_KT, spelled_KT.astype(self._lists.dtype), np.take(self._lists, place_KT))


def _ranked(pairs: np.ndarray, counts: np.ndarray, vocab_size: int, absent: int) -> tuple[np.ndarray, np.ndarray]:
    """Contexts that have candidates, ascending, and their candidates [1 + contexts, C], row 0 empty."""
    contexts, ids = np.divmod(pairs, vocab_size)
    order = np.lexsort((ids, -counts, contexts))
    contexts, ids = contexts[order], ids[order]
    rows, first, number = np.unique(contexts, return_index=True, return_counts=True)
    place = np.arange(len(ids)) - np.repeat(first, number)
    candidates = np.full((1 + len(rows), WIDTH), absent, np.int64)
    kept = place < WIDTH
    candidates[np.repeat(np.arange(1, len(rows) + 1), number)[kept], place[kept]] = ids[kept]
    return rows, candidates
