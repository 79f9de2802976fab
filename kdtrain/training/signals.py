"""Stop requests: SIGINT and SIGTERM end a run after the current micro-batch, a second signal ends it at once.

Ranks stop together: a request takes effect when all ranks know of it, whichever of them received the signal. A rank
that cannot read its data also requests a stop, so that all ranks save the last finished step before its error ends the
run.
"""

import os
import signal
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack
from types import FrameType, TracebackType
from typing import TypeVar

from kdtrain.errors import RunError
from kdtrain.process import handling, interrupt
from kdtrain.ranks import all_reduce_max, is_main, raise_on_all_ranks, stop_when_joined, world_size

T = TypeVar("T")

_asked = threading.Event()


def asked_to_stop() -> bool:
    """Return whether this process has received a signal in a `StopRequest`: what waits for data must end."""
    return _asked.is_set()


_FAILED = signal.NSIG
"""The request of a rank that could not read; larger than every signal, so that it wins the reduction."""


def interruptible() -> AbstractContextManager[None]:
    """Make SIGINT and SIGTERM end the block at once: outside of training there is no step to finish.

    One of several ranks stops as soon as it has met the others, which would wait for it in vain; at a second signal at
    once.

    Raises:
        KeyboardInterrupt: with the name of the signal as its message.
    """

    def handle(number: int, frame: FrameType | None) -> None:
        if not stop_when_joined(number):
            interrupt(number, frame)

    return handling(handle)


class StopRequest:
    """A block in which the first signal is a request to stop, and the second ends the process.

    True once all ranks know of the request (in a single process that is at once); `name` is then that of the signal,
    or "a failed read".
    """

    def __init__(self) -> None:
        self.name: str | None = None
        self.received = 0
        """The signal that this process received; 0 without one."""
        self.compiling = False
        """Whether the compiler may be running, which a request does not interrupt."""
        self.failed = False
        """Whether a rank could not read its data; `raise_failed` ends the run."""
        self._error: RunError | None = None
        self._held = ExitStack()

    def __bool__(self) -> bool:
        return self.name is not None

    def agree(self) -> bool:
        """Exchange requests between the ranks; return whether to stop. Every rank must call it at the same point."""
        self.settle(all_reduce_max(_FAILED if self._error else self.received))
        return bool(self)

    def settle(self, request: int) -> None:
        """Take the result of the exchange: the largest request of all ranks."""
        if request and self.name is None:
            self.failed = request == _FAILED
            self.name = "a failed read" if self.failed else signal.Signals(request).name

    def read(self, action: Callable[[], T]) -> T | None:
        """Return what `action` reads; None where a rank must stop or could not read. Every rank must call it."""
        batch = None
        try:
            batch = action()
        except RunError as error:
            self._error = error
        return None if self.agree() else batch

    def raise_failed(self) -> None:
        """Raise the error of a failed read on all ranks, if one ended the run. Every rank must call it."""
        if self.failed:
            with raise_on_all_ranks():
                if self._error is not None:
                    raise self._error

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self.received:
            os._exit(128 + number)
        self.received = number
        _asked.set()
        if self.compiling and is_main():
            # os.write, because the signal may have interrupted the logger
            os.write(2, b"compiling, about a minute; press again to stop now\n")
        if world_size() == 1:
            self.settle(number)

    def __enter__(self) -> "StopRequest":
        _asked.clear()
        self._held.enter_context(handling(self._handle))
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        _asked.clear()
        self._held.close()
