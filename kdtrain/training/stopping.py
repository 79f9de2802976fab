"""Stopping when asked: SIGINT and SIGTERM end a run at the next micro-batch, a second signal at once.

Ranks stop together or not at all, whichever of them was asked: a request counts once they have agreed on it.
"""

import contextlib
import os
import signal
from collections.abc import Iterator
from types import FrameType, TracebackType
from typing import Any

from kdtrain.parallel.world import most, world_size


@contextlib.contextmanager
def interruptible() -> Iterator[None]:
    """Outside of training there is no step to finish: SIGTERM ends the block at once, as Ctrl-C does.

    Raises:
        KeyboardInterrupt: with "SIGTERM" where it was that.
    """

    def interrupt(number: int, frame: FrameType | None) -> None:
        raise KeyboardInterrupt(signal.Signals(number).name)

    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


class StopRequest:
    """While the block runs, a first signal is remembered and a second ends the process.

    True once all ranks know of it (for a process alone that is at once); `name` is then the signal's.
    """

    def __init__(self) -> None:
        self.name: str | None = None
        self.asked = 0
        """The number of the signal that this process got, 0 while there was none."""
        self._before: dict[int, Any] = {}

    def __bool__(self) -> bool:
        return self.name is not None

    def agree(self) -> bool:
        """Ask the other ranks; whether to stop. Every rank must call it, at the same point of its work."""
        self.settle(most(self.asked))
        return bool(self)

    def settle(self, asked: int) -> None:
        """Take over what the ranks agreed on: the largest of their `asked`."""
        if asked and self.name is None:
            self.name = signal.Signals(asked).name

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self.asked:
            os._exit(128 + number)
        self.asked = number
        if world_size() == 1:
            self.settle(number)

    def __enter__(self) -> "StopRequest":
        for number in (signal.SIGINT, signal.SIGTERM):
            self._before[number] = signal.signal(number, self._handle)
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
