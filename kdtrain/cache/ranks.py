"""Ranks that build one cache together: who builds what, in step, and without a word where there is one.

Shard s is built by rank s % world. Ranks go through the data a row of `world` shards at a time, and before each
forward of the teacher they tell each other three numbers: whether there is more to do, how many sequences are done,
how many are broken. By that they stop together, show one progress, and notice within a batch that one of them is
gone; and a teacher that is sharded over the ranks, whose forwards all of them must run, gets them: a rank that has
nothing to ask asks an empty question. What it gives up: the ranks wait for the slowest of them at each batch.
"""

from collections.abc import Callable, Sequence
from typing import Protocol, TypeVar

import torch
from torch import Tensor

Teacher = Callable[[Tensor, Tensor | None], Tensor]
"""CPU int64 tokens [B,T] and segments [B,T] (None without a document mask) -> logits [B,T,V], any device."""


T = TypeVar("T")


class Ranks(Protocol):
    """The processes that build one cache; all of them call the same methods in the same order."""

    @property
    def rank(self) -> int: ...

    @property
    def world(self) -> int: ...

    def gather(self, *numbers: int) -> list[list[int]]:
        """What each rank gave, by rank."""

    def on_main(self, action: Callable[[], T]) -> T:
        """What `action` gives, or raises, on rank 0, which alone does it."""


class Alone:
    """One process, which builds its share, everything by default, and waits for nobody."""

    def __init__(self, rank: int = 0, world: int = 1) -> None:
        self.rank, self.world = rank, world

    def gather(self, *numbers: int) -> list[list[int]]:
        """Its own."""
        return [list(numbers)]

    def on_main(self, action: Callable[[], T]) -> T:
        """Its own."""
        return action()


class Rounds:
    """The forwards of a build, one a round on every rank that has one to do.

    teacher: None where there is none. sharded: whether its forwards need all ranks. empty: what a rank asks that has
    nothing to ask. told: called with all ranks' (done, broken) at each round.
    """

    def __init__(
        self,
        ranks: Ranks,
        teacher: Teacher | None,
        sharded: bool,
        empty: tuple[Tensor, Tensor | None],
        told: Callable[[int, int], None],
    ) -> None:
        self.ranks, self.teacher, self.empty, self.told = ranks, teacher, empty, told
        self.sharded = sharded and teacher is not None
        self.done = self.broken = 0
        """Of this rank."""

    def take(self) -> None:
        """Take part in a round with something to do; the forward follows."""
        self._round(True)

    def ask(self, tokens_BT: Tensor, segments_BT: Tensor | None) -> Tensor:
        """A forward of the teacher as a round of its own."""
        assert self.teacher is not None
        self.take()
        return self.teacher(tokens_BT, segments_BT)

    def rest(self) -> None:
        """Take part in rounds with nothing to do until no rank has."""
        while self._round(False):
            if self.sharded:
                assert self.teacher is not None
                with torch.no_grad():
                    self.teacher(*self.empty)

    def _round(self, more: bool) -> bool:
        """Whether any rank has more to do."""
        found: Sequence[Sequence[int]] = self.ranks.gather(int(more), self.done, self.broken)
        self.told(sum(done for _, done, _ in found), sum(broken for *_, broken in found))
        return any(more for more, *_ in found)
