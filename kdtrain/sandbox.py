"""A child process with limits, in which a stranger's files are opened first.

A tokenizer, or a chat template, is a program: loading or calling it may loop for ever, take all memory, or end the
process in C or Rust, where no exception can be caught. So it runs first in a forked child with limits of memory,
processor time (a busy machine makes no file slow) and wall time, which writes no file and prints nothing: what exceeds
a limit ends the child, not the command. Requests and answers are JSON.

What passed once is not tried again: `KDTRAIN_HOME/sound` holds an empty file by the digest of its content. It lies
there and never beside the files, whose author could write it too.

What it gives up: a child is no jail. It may read what its user may read, and outside of Linux its memory is not
limited.
"""

import json
import multiprocessing
import os
import resource
import signal
from collections.abc import Callable
from contextlib import suppress
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from kdtrain.errors import UsageError
from kdtrain.files import make_folder

WALL = 300.0
"""Seconds, and ten times the processor time, until a child is ended that waits for something."""

Answer = Callable[[Any], Any]


class LimitExceeded(Exception):
    """The child has ended: it exceeded a limit, or crashed."""


class Sandbox:
    """Calls `answer(request)` in a child process that may allocate `memory` bytes more; not thread-safe."""

    def __init__(self, answer: Answer, memory: int) -> None:
        self._answer, self._memory = answer, memory
        self._child: tuple[multiprocessing.process.BaseProcess, Connection] | None = None

    def __call__(self, request: Any, seconds: float) -> Any:
        """Return the answer to a request, both JSON. LimitExceeded: it takes more than `seconds` of processor time."""
        if self._child is None:
            context = multiprocessing.get_context("fork")
            ours, theirs = context.Pipe()
            arguments = (self._answer, self._memory, theirs, ours)
            process = context.Process(target=_serve, args=arguments, name="sandbox", daemon=True)
            process.start()
            theirs.close()
            self._child = process, ours
        connection = self._child[1]
        try:
            connection.send_bytes(json.dumps([seconds, request]).encode())
            if connection.poll(WALL + 10 * seconds):
                return json.loads(connection.recv_bytes())
        except (EOFError, ConnectionError):
            pass
        self.close()
        raise LimitExceeded

    def close(self) -> None:
        """End the child process, if there is one."""
        if self._child is not None:
            process, connection = self._child
            self._child = None
            connection.close()
            process.join(1.0)
            process.kill()
            process.join()


def _serve(answer: Answer, memory: int, connection: Connection, parents: Connection) -> None:
    """Answer requests until the parent is gone. The kernel enforces the limits, even while Python code is stuck."""
    parents.close()  # or the child would not notice the end of the parent
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent ends it
    for each in (signal.SIGTERM, signal.SIGPROF):
        signal.signal(each, signal.SIG_DFL)
    nowhere = os.open(os.devnull, os.O_RDWR)
    for stream in range(3):
        os.dup2(nowhere, stream)
    limits = {resource.RLIMIT_CORE: 0, resource.RLIMIT_FSIZE: 0}
    if (statm := Path("/proc/self/statm")).exists():
        limits[resource.RLIMIT_AS] = int(statm.read_text().split()[0]) * resource.getpagesize() + memory
    for limit, most in limits.items():
        hard = resource.getrlimit(limit)[1]
        most = most if hard == resource.RLIM_INFINITY else min(most, hard)
        resource.setrlimit(limit, (most, most))
    with suppress(EOFError, MemoryError):
        while True:
            seconds, request = json.loads(connection.recv_bytes())
            signal.setitimer(signal.ITIMER_PROF, seconds)
            answered = json.dumps(answer(request)).encode()
            signal.setitimer(signal.ITIMER_PROF, 0)
            connection.send_bytes(answered)


def home() -> Path:
    """Return the folder for fetched files and notes, which need not exist. UsageError: this user has none."""
    try:
        return Path(os.environ.get("KDTRAIN_HOME") or Path.home() / ".cache" / "kdtrain")
    except RuntimeError:
        raise UsageError("this user has no home folder; set KDTRAIN_HOME to a folder for fetched caches") from None


def try_once(digest: str, answer: Answer, *, memory: int, seconds: float) -> None:
    """Call `answer(None)` in a child, unless its `digest` passed before. LimitExceeded: it does not pass."""
    note = None
    with suppress(UsageError, OSError):
        note = home() / "sound" / digest
        if note.exists():
            return
    child = Sandbox(answer, memory)
    try:
        child(None, seconds)
    finally:
        child.close()
    if note is not None:  # where no note can be written, it is tried again the next time
        with suppress(Exception):
            make_folder(note.parent)
            note.touch()
