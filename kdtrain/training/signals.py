"""Stopping when asked: SIGINT and SIGTERM end a run at the next micro-batch, a second signal at once.

Ranks stop together or not at all, whichever of them was asked: a request counts once they have agreed on it. A rank
that cannot read its data asks as well, so that all save the last finished step before the run ends by its error.
"""

import contextlib
import os
import signal
from collections.abc import Callable, Iterator
from types import FrameType, TracebackType
from typing import Any, TypeVar

from kdtrain.errors import RunError
from kdtrain.ranks import all_reduce_max, is_main, raise_on_all_ranks, world_size

T = TypeVar("T")

_FAILED = signal.NSIG
"""What a rank asks with that could not read, above every signal: it is what all of them hear."""


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

    True once all ranks know of it (for a process alone that is at once); `name` is then the signal's, or says what
    failed.
    """

    def __init__(self) -> None:
        self.name: str | None = None
        self.asked = 0
        """The number of the signal that this process got, 0 while there was none."""
        self.compiling = False
        """Whether a compiler may be at work, which no request stops before it is done."""
        self.failed = False
        """Whether a rank could not read; `raise_failed` ends the run."""
        self._error: RunError | None = None
        self._before: dict[int, Any] = {}

    def __bool__(self) -> bool:
        return self.name is not None

    def agree(self) -> bool:
        """Ask the other ranks; whether to stop. Every rank must call it, at the same point of its work."""
        self.settle(all_reduce_max(_FAILED if self._error else self.asked))
        return bool(self)

    def settle(self, asked: int) -> None:
        """Take over what the ranks agreed on: the largest of their `asked`."""
        if asked and self.name is None:
            self.failed = asked == _FAILED
            self.name = "a failed read" if self.failed else signal.Signals(asked).name

    def read(self, action: Callable[[], T]) -> T | None:
        """What `action` reads; None where a rank was asked to stop, or could not read. Every rank must call it."""
        found = None
        try:
            found = action()
        except RunError as error:
            self._error = error
        return None if self.agree() else found

    def raise_failed(self) -> None:
        """Raise on all ranks what one of them could not read, if that ended the run. Every rank must call it."""
        if self.failed:
            with raise_on_all_ranks():
                if self._error is not None:
                    raise self._error

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self.asked:
            os._exit(128 + number)
        self.asked = number
        if self.compiling and is_main():
            # not through the logger, which may be writing at this moment
            os.write(2, b"compiling, about a minute; press again to stop now\n")
        if world_size() == 1:
            self.settle(number)

    def __enter__(self) -> "StopRequest":
        for number in (signal.SIGINT, signal.SIGTERM):
            self._before[number] = signal.signal(number, self._handle)
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
