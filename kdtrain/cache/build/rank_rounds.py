"""The ranks that build a cache meet before each forward of the teacher.

Each reports whether it has more to do, how many sequences are done, and how many are broken. So they stop at the same
batch, show one progress, and notice within a batch that a rank is gone. A teacher that is sharded over the ranks needs
all of them for each forward: a rank that has nothing left runs an empty one.

What it gives up: the ranks wait for the slowest of them at each batch.
"""

from collections.abc import Callable
from typing import Any

from kdtrain.errors import RunError
from kdtrain.ranks import all_gather_object, rank, world_size

Progress = Callable[[int, int | None], None]
"""(sequences done so far, how many in all or None)."""


class Rounds:
    """The meetings of one build.

    Args:
        all_ranks: True when all ranks build, calling the same methods in the same order; False for this process alone.
        progress: called with the number of sequences done.
        dtype: of the teacher's weights, if it is known.
    """

    def __init__(self, all_ranks: bool, progress: Progress | None, dtype: str | None = None) -> None:
        self.rank, self.world = (rank(), world_size()) if all_ranks else (0, 1)
        self.progress, self.total, self.dtype = progress, None, dtype  # type: Progress | None, int | None, str | None
        """`total`: sequences of all splits; None if unknown."""
        self.done = 0
        """Sequences that this rank has finished."""
        self.broken: list[str] = []
        """Those with a non-finite logit, as SPLIT and number."""

    def gather(self, own: Any) -> list[Any]:
        """Every rank's value, in rank order."""
        return all_gather_object(own) if self.world > 1 else [own]

    def meet(self, more: bool) -> bool:
        """Meet the other ranks; True if any has more to do.

        Raises:
            RunError: more than one in a thousand sequences are broken.
        """
        found = self.gather((more, self.done, len(self.broken)))
        done, broken = (sum(numbers) for numbers in list(zip(*found, strict=True))[1:])
        self.stop_if_broken(broken, done, max(done, 10_000 if self.total is None else self.total))
        if self.progress:
            self.progress(done, self.total)
        return any(more for more, *_ in found)

    def finish(self, run_empty: Callable[[], object] | None) -> None:
        """Meet the other ranks, with nothing left to do here, until all are done.

        run_empty: a forward of a sharded teacher, which needs all ranks.
        """
        while self.meet(more=False):
            if run_empty is not None:
                run_empty()

    def stop_if_broken(self, broken: int, done: int, total: int) -> None:
        """RunError: more than one in a thousand sequences of `total` are broken."""
        if broken * 1000 > total:
            raise RunError(
                f"the teacher gave non-finite logits for {broken} of {done} sequences"
                f"{f' (the first is {self.broken[0]})' if self.broken else ''}, more than one in a thousand: "
                f"{'look at its weights' if self.dtype == 'float32' else 'load it in bfloat16 or float32'}"
            )
