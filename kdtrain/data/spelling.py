"""The tokens of one tokenizer, each spelled in tokens of another.

Where a student's token begins within a teacher's token, the teacher predicts more than where it begins itself: of the
tokens that it expects there, those that the student spells with the tokens it has already read continue as the teacher
expects, given that one token holds the place. `Spelling` finds these, and the student's next token of each.
The student's own tokens are compared, and not their bytes alone: a student that reads `re` and `turn` would have read
`result` as `res` and `ult`, so that after `re` it can be ruled out.

Given up: a token is spelled alone, and a neighbour may change how its end is cut. Tokens that are no text on their own
(a part of a character) are not spelled.

Shapes: V tokens of the teacher, L tokens of the student that they are spelled with, M tokens of a text.
"""

import functools
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import numpy as np

from kdtrain.data.bytes import MAX_SPELLED, TokenBytes
from kdtrain.errors import UsageError

_Array = np.ndarray[Any, np.dtype[Any]]

DEEP = 128
"""Tokens of the student in one of the teacher's, behind which the rest is not known."""


@dataclass(frozen=True, eq=False)
class Spelling:
    """A teacher's tokens, each spelled in a student's tokens."""

    starts: _Array
    """int64 [V+1] token t is spelled tokens[starts[t] : starts[t + 1]]; nothing where it is not text."""
    tokens: _Array
    """int64 [L], at most `DEEP` for each."""
    size: int
    """More than the student's ids."""

    @classmethod
    def of(
        cls, teacher: TokenBytes, student: TokenBytes, cut: Callable[[Sequence[str]], list[list[int]]]
    ) -> "Spelling":
        """Spell a teacher's tokens. cut: the student's tokens of each text.

        UsageError: they are spelled with more than `MAX_SPELLED` tokens, or none is text.
        """
        if teacher.equals(student):
            return cls(np.arange(len(teacher) + 1), np.arange(len(teacher)), len(teacher))
        whole = [teacher[token] for token in range(len(teacher))]
        texts = dict[int, str]()
        for place, each in enumerate(whole):
            with suppress(UnicodeDecodeError):  # a part of a character
                texts |= {place: each.decode()} if each else {}
        spelled: list[list[int]] = [[]] * len(whole)
        for place, tokens in zip(texts, cut([*texts.values()]), strict=True):
            rest = whole[place]
            kept = 0
            for token in tokens[:DEEP]:  # a tokenizer may rewrite a text
                own = student[token]
                if not own or not rest.startswith(own):
                    break
                rest = rest[len(own) :]
                kept = kept + 1
            spelled[place] = tokens[:kept]
        lengths = np.array([len(each) for each in spelled], np.int64)
        starts = np.concatenate([[0], np.cumsum(lengths)])
        if not 0 < starts[-1] <= MAX_SPELLED:
            raise UsageError(
                f"all tokens of {teacher.name} are {starts[-1]:,} tokens of {student.name}; 1 to {MAX_SPELLED:,} are "
                "right"
            )
        return cls(starts, np.array([token for each in spelled for token in each], np.int64), len(student))

    @functools.cached_property
    def prefix(self) -> _Array:
        """int64 [L], a number for the token's spelling before this place: 0 for none, else equal for equal tokens."""
        lengths = np.diff(self.starts)
        found = np.zeros(len(self.tokens), np.int64)
        before = np.zeros(len(lengths), np.int64)
        count = 0
        tokens_V = np.arange(len(lengths))
        for depth in range(int(lengths.max(initial=0))):
            tokens_V = tokens_V[lengths[tokens_V] > depth]
            place_V = self.starts[tokens_V] + depth
            found[place_V] = before[tokens_V]
            keys, which = np.unique(before[tokens_V] * self.size + self.tokens[place_V], return_inverse=True)
            before[tokens_V] = count + 1 + which
            count += len(keys)
        return found

    def firsts(self) -> _Array:
        """Return int64 [V], the first token of each spelling; -1 where a token is not spelled."""
        found = np.full(len(self.starts) - 1, -1, np.int64)
        some = np.diff(self.starts) > 0
        found[some] = self.tokens[self.starts[:-1][some]]
        return found

    @functools.cached_property
    def depth(self) -> _Array:
        """int64 [L+1], how many tokens a prefix number stands for; 0 where no token continues them."""
        found = np.zeros(len(self.prefix) + 1, np.int64)
        found[self.prefix] = np.arange(len(self.prefix)) - np.repeat(self.starts[:-1], np.diff(self.starts))
        return found

    @functools.cached_property
    def _steps(self) -> tuple[_Array, _Array]:
        """The prefixes that a token continues: each as the number of all but its last token * `size` + that token,
        ascending, and as its own number."""
        places = np.flatnonzero(self.prefix)  # a token's first place has 0
        keys, first = np.unique(self.prefix[places - 1] * self.size + self.tokens[places - 1], return_index=True)
        return keys, self.prefix[places[first]]

    def next(self, tokens_M: _Array, prefix_M: _Array) -> _Array:
        """Return int64 [M], the student's next token in each of the teacher's, after the tokens that `prefix_M`
        numbers; -1 where the teacher's token ends there, or is spelled otherwise."""
        place = self.starts[tokens_M] + self.depth[prefix_M]
        fits = place < self.starts[tokens_M + 1]
        place = np.where(fits, place, 0)
        return np.where(fits & (self.prefix[place] == prefix_M), self.tokens[place], -1)

    def read(self, tokens_M: _Array, source_M: _Array, offset_M: _Array) -> _Array:
        """Return int64 [M], a number for a text's tokens since the teacher's token began, as `prefix`: 0 where both
        begin; -1 where no token of the teacher continues so.

        source_M, offset_M: see `transcode.holders`.
        """
        keys, numbers = self._steps
        number_M = np.where((source_M >= 0) & (offset_M == 0), 0, -1)
        every = np.arange(len(source_M))
        first_M = np.maximum.accumulate(np.where(np.diff(source_M, prepend=-2) != 0, every, 0))
        depth_M = every - first_M  # tokens since the first that begins in the same one of the teacher's
        inside = np.flatnonzero((depth_M > 0) & (depth_M < DEEP) & (number_M[first_M] == 0) & (source_M >= 0))
        inside = inside[np.argsort(depth_M[inside], kind="stable")]
        for now in np.split(inside, np.flatnonzero(np.diff(depth_M[inside])) + 1):
            before = number_M[now - 1]
            key = np.where(before < 0, -1, before * self.size + tokens_M[now - 1])
            at = np.minimum(np.searchsorted(keys, key), len(keys) - 1)
            number_M[now] = np.where(keys[at] == key, numbers[at], -1) if len(keys) else -1
        return number_M
