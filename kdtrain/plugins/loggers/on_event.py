"""`--on-event`: a command of the user that is run for each event that someone may want to know of, such as a rollback.

It gets the event as one JSON object on its stdin, and nothing of the event on its command line; no shell is involved.
One thread runs the commands, one at a time and in order, each in a session of its own and for at most `SECONDS`; at
most `WAITING` events wait, and later ones are dropped. The training only adds to a queue. What fails is logged once,
from the training thread. At the end of a run the last events get up to `LAST_SECONDS`.

What it gives up: what the command prints is not kept; it can write a log of its own.
"""

import contextlib
import json
import os
import queue
import shlex
import shutil
import signal
import subprocess
import threading
from collections.abc import Callable, Mapping
from typing import Any

from kdtrain.training.observers import Observer

EVENTS = frozenset({"switch", "rollback", "recovery", "skip", "divergence", "stop", "disk-full"})
"""The kinds for which the command runs, besides every event of level error."""
WAITING = 64
SECONDS = 60.0
"""How long one command may take."""
LAST_SECONDS = 10.0
"""How long the end of a run waits for commands."""


class EventCommand(Observer):
    """A command line that runs for events, in the background.

    Args:
        command: words as a shell would split them; the first is a program.
        run: the run's folder, which each event names.
    """

    def __init__(self, command: str, run: str) -> None:
        self.words = shlex.split(command)
        self.run = run
        self._waiting: queue.Queue[bytes | None] = queue.Queue(WAITING)
        self._failures = [] if shutil.which(self.words[0]) else ["there is no such program"]
        self._reported = self._closed = False
        self._process: subprocess.Popen[bytes] | None = None
        self._thread: threading.Thread | None = None

    def event(self, record: Mapping[str, Any]) -> None:
        """Queue an event, if the command is to run for its kind."""
        if record["event"] not in EVENTS and record["level"] != "error":
            return
        if self._thread is None:
            self._thread = threading.Thread(target=self._work, name="on-event", daemon=True)
            self._thread.start()
        try:
            self._waiting.put_nowait(json.dumps({"run": self.run, **record}).encode() + b"\n")
        except queue.Full:
            self._failures.append(f"{WAITING} events wait for it already; later ones are dropped")

    def failure(self) -> str | None:
        """Return the first failure, once; afterwards, and without a failure, None.

        It does not name the command, which may hold a secret and is never written into a run.
        """
        if not self._failures or self._reported:
            return None
        self._reported = True
        return f"--on-event: the command failed: {self._failures[0]}; the run is not affected, and this is logged once"

    def warn(self, warning: Callable[[str, str], None]) -> None:
        """Log the first failure."""
        if (text := self.failure()) is not None:
            warning("on-event", text)

    def close(self) -> None:
        """Run the waiting commands for up to `LAST_SECONDS`, and end the one that runs then."""
        thread = self._thread
        self._thread = None
        if thread is None:
            return
        with contextlib.suppress(queue.Full):
            self._waiting.put_nowait(None)  # if it is full, the time ends the thread
        thread.join(LAST_SECONDS)
        if thread.is_alive():
            self._failures.append("it took too long at the end of the run, and was ended")
            self._closed = True
            self._kill()
            thread.join(1)

    def _work(self) -> None:
        quiet = subprocess.DEVNULL
        look: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": quiet, "stderr": quiet, "start_new_session": True}
        while (event := self._waiting.get()) is not None and not self._closed:
            try:
                self._process = process = subprocess.Popen(self.words, **look)
                process.communicate(event, SECONDS)
            except subprocess.TimeoutExpired:
                self._failures.append(f"it took over {SECONDS:g} seconds, and was ended")
                self._kill()
            except (OSError, ValueError) as error:
                self._failures.append(f"it cannot be run: {getattr(error, 'strerror', None) or error}")
                continue
            if code := process.wait():
                self._failures.append(f"it ended with exit code {code}")

    def _kill(self) -> None:
        """End the command that runs, with what it started."""
        if self._process is not None and self._process.poll() is None:
            with contextlib.suppress(OSError):
                os.killpg(self._process.pid, signal.SIGKILL)
