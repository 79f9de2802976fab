"""Stopping when asked: SIGINT and SIGTERM end a run at the next micro-batch, a second signal at once."""

import contextlib
import os
import signal
from collections.abc import Iterator
from types import FrameType, TracebackType
from typing import Any


@contextlib.contextmanager
def interruptible() -> Iterator[None]:
    """Outside of training there is no step to finish: SIGTERM ends the block at once, as Ctrl-C does."""

    def interrupt(number: int, frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


class StopRequest:
    """While the block runs, a first signal is remembered in `name` and a second ends the process."""

    def __init__(self) -> None:
        self.name: str | None = None
        self._before: dict[int, Any] = {}

    def __bool__(self) -> bool:
        return self.name is not None

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self.name is not None:
            os._exit(128 + number)
        self.name = signal.Signals(number).name

    def __enter__(self) -> "StopRequest":
        for number in (signal.SIGINT, signal.SIGTERM):
            self._before[number] = signal.signal(number, self._handle)
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
