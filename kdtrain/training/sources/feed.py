"""Reads one micro-batch ahead in a thread: HDF5 decompression and the copy to the device overlap with the step."""

import itertools
import math
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor

import numpy as np
from einops import rearrange

from kdtrain.objective.batch import Batch
from kdtrain.training.sources.source import Source


class Feed:
    """An endless stream of the micro-batches of each step, read one ahead.

    Args:
        source: where they are read.
        indices: 0, 1, 2, ... -> the indices of the sequences of that step, in order.
        micro: sequences in a micro-batch.
        expected: steps that will be taken; those after them, in place of skipped ones, are not read ahead.
    """

    def __init__(
        self, source: Source, indices: Callable[[int], np.ndarray], micro: int, expected: float = math.inf
    ) -> None:
        self.source = source
        self.indices = indices
        self.micro = micro
        self.expected = expected

    def steps(self) -> Iterator[Iterator[Batch]]:
        """For each step, yield an iterator over its micro-batches; the caller must exhaust it."""
        batches = self._read_ahead() if self.source.overlaps else map(self.source.read, self._micro_batches())
        for step in itertools.count():
            yield itertools.islice(batches, len(self.indices(step)) // self.micro)

    def _read_ahead(self) -> Iterator[Batch]:
        reader = ThreadPoolExecutor(max_workers=1, thread_name_prefix="feed")
        pending: deque[Future[Batch]] = deque()
        try:
            most = self.expected * (len(self.indices(0)) // self.micro)
            for number, indices in enumerate(self._micro_batches()):
                ahead = int(number < most)
                while len(pending) > ahead:
                    yield pending.popleft().result()
                pending.append(reader.submit(self.source.read, indices))
                while len(pending) > ahead:
                    yield pending.popleft().result()
        finally:
            # no wait: a read from a file system that does not answer would keep a failed command alive
            reader.shutdown(wait=False, cancel_futures=True)

    def _micro_batches(self) -> Iterator[np.ndarray]:
        for step in itertools.count():
            yield from rearrange(self.indices(step), "(a m) -> a m", m=self.micro)
