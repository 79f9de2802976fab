"""Which process of a run this is, as its launcher states in the environment, and what its signals do.

`ranks` has what the processes exchange. Commands that only read files use these alone, and import no torch.
"""

import os
import re
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any, TypeVar

from kdtrain.errors import CALLBACKS, UsageError

E = TypeVar("E", bound=Exception)


_AGAIN = 0.05
"""Seconds until a signal that cannot be taken is sent again."""


def interrupt(number: int, frame: FrameType | None) -> None:
    """Raise KeyboardInterrupt with the signal's name; during one of `CALLBACKS`, send the signal again later."""
    inner = frame
    while inner is not None:
        if inner.f_code in CALLBACKS:
            threading.Timer(_AGAIN, os.kill, (os.getpid(), number)).start()
            return
        inner = inner.f_back
    raise KeyboardInterrupt(signal.Signals(number).name)


@contextmanager
def handling(handler: Callable[..., None]) -> Iterator[None]:
    """Call `handler` at SIGINT and SIGTERM during the block."""
    before = {number: signal.signal(number, handler) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, earlier in before.items():
            signal.signal(number, earlier)


def send_again(ignored: Any) -> None:
    """Send SIGTERM after a callback into which a signal fell: the hook for exceptions that nobody can take."""
    if isinstance(ignored.exc_value, KeyboardInterrupt):
        threading.Timer(_AGAIN, os.kill, (os.getpid(), signal.SIGTERM)).start()
    else:
        sys.__unraisablehook__(ignored)


def rank() -> int:
    """Return the number of this process, from 0."""
    return int(os.environ.get("RANK") or 0)


def world_size() -> int:
    """Return how many processes the run has."""
    return int(os.environ.get("WORLD_SIZE") or 1)


def local_rank() -> int:
    """Return the number of this process on its node, from 0."""
    return int(os.environ.get("LOCAL_RANK") or 0)


def is_main() -> bool:
    """Return True if this is rank 0, the only one that prints and writes what all ranks share."""
    return rank() == 0


def reported(error: E) -> E:
    """Mark `error`, which every rank raises, as reported by rank 0, so that only rank 0 prints it."""
    error.reported = not is_main()  # type: ignore[attr-defined]
    return error


def refuse_impossible_launch() -> None:
    """Refuse an environment whose ranks no launcher such as torchrun sets."""
    found = {}
    for name, least in (("WORLD_SIZE", 1), ("LOCAL_WORLD_SIZE", 1), ("RANK", 0), ("LOCAL_RANK", 0)):
        text = os.environ.get(name) or str(least)
        if not re.fullmatch(r"\d{1,6}", text) or int(text) < least:
            raise UsageError(
                f"{name}={text[:20]} in the environment is not a number from {least}; unset it, or use torchrun"
            )
        found[name] = int(text)
    if found["RANK"] >= found["WORLD_SIZE"]:
        raise UsageError(
            f"RANK={found['RANK']} in the environment, with WORLD_SIZE={found['WORLD_SIZE']}; use torchrun"
        )


def refuse_many_processes() -> None:
    """Refuse to be one of several processes, in a command for a single one.

    Raises:
        UsageError: torchrun or another launcher has started more.
    """
    if world_size() > 1:
        raise reported(UsageError("several processes were started, and only one is supported; leave torchrun out"))
