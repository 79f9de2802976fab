"""Work in a fork of the process of a test."""

import multiprocessing
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from kdtrain import faults
from kdtrain.errors import RunError, UsageError

_OF_A_FILE = ("before-fsync", "before-rename", "before-folder-fsync", "after-publish")
_FILES = ("settings", "shard", "sidecar", "index", "card", "manifest")
FAULT_POINTS = (
    *("cache.shard.after-batch", "cache.shard.before-close", "cache.tokenizer.before-rename", "cache.before-finish"),
    *(f"cache.{name}.{point}" for name in _FILES for point in _OF_A_FILE),
)
"""Every labelled place of a build, for `KDTRAIN_FAULT`."""


def answer_of(work: Callable[[], Any]) -> Any:
    """Run `work` in a fork, and return its result."""
    context = multiprocessing.get_context("fork")
    queue = context.SimpleQueue()
    process = context.Process(target=lambda: queue.put(work()))
    process.start()
    process.join(60)
    assert process.exitcode == 0
    return queue.get()


def exit_of(work: Callable[[], object], fault: str = "", log: Path | None = None, after: float = 0.0) -> int:
    """Run `work` in a fork, with a fault, or killed after some seconds; return the exit code."""
    pid = os.fork()
    if pid == 0:
        status = 70
        try:
            os.environ["KDTRAIN_FAULT"], os.environ["KDTRAIN_FAULT_LOG"] = fault, str(log or os.devnull)
            faults.read()
            work()
            status = 0
        except (RunError, UsageError):
            status = 1
        finally:
            os._exit(status)
    if after:
        time.sleep(after)
        os.kill(pid, signal.SIGKILL)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
