"""Chat templates, rendered where they can do no harm.

A chat template is a program that came with a model. jinja2's sandbox keeps it from files and from Python's insides,
and lets it loop for ever, compute 9 ** 9 ** 9, or ask for all memory. So conversations are rendered in a
child process of limited time, memory and output: what goes over a limit ends the child and not the command, whatever it
was busy with. It is a fork, which costs milliseconds once and a tenth of one for each conversation, and gets and
gives JSON alone. Time is the processor's, not the clock's: a machine that is busy, or was asleep, makes nobody's
template slow. What it gives up: outside of Linux the memory is not limited.
"""

import json
import multiprocessing
import resource
import signal
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path

from kdtrain.errors import UsageError

SECONDS = 5.0
"""Of the processor for one conversation; most take a few milliseconds."""
SECONDS_A_TURN = 0.05
"""Beyond that, for each message: a conversation is rendered up to each of its turns."""
MEMORY = 1 << 30
"""Bytes a template may take beyond what the process has at its start."""
LENGTH, LENGTH_A_BYTE = 1 << 20, 4
"""Characters that may come of a conversation, and as many more for each byte of it: tokens take 200 bytes each."""
SPANS_A_TURN = 64
"""What the assistant says may be marked in so many pieces for each message."""

Spans = list[tuple[int, int]]
Messages = list[dict[str, str]]
Render = Callable[[str, Messages], tuple[str, Spans]]


class Renderer:
    """Calls `render(key, messages)` in a child process; not thread-safe."""

    def __init__(self, render: Render) -> None:
        self._render = render
        self._child: tuple[multiprocessing.process.BaseProcess, Connection] | None = None

    def __call__(self, key: str, messages: Messages) -> tuple[str, Spans]:
        """The conversation as text, and the [start, stop) characters of it that the assistant says.

        Raises:
            UsageError: of `render`, or it went over a limit.
        """
        if self._child is None:
            self._child = _start(self._render)
        connection = self._child[1]
        try:
            connection.send_bytes(json.dumps([key, messages]).encode())
            answer = json.loads(connection.recv_bytes())
        except (EOFError, ConnectionError):
            self.close()
            raise UsageError(
                f"{key}: the chat template takes more than {_seconds(messages):g} s or {MEMORY >> 30} GiB for this "
                "conversation; use a tokenizer with another template"
            ) from None
        if "error" in answer:
            raise UsageError(answer["error"])
        return answer["text"], [(start, stop) for start, stop in answer["spans"]]

    def close(self) -> None:
        """End the child process, if there is one."""
        if self._child is not None:
            process, connection = self._child
            self._child = None
            connection.close()
            process.join(1.0)
            process.kill()
            process.join()


def _seconds(messages: Messages) -> float:
    return SECONDS + SECONDS_A_TURN * len(messages)


def _start(render: Render) -> tuple[multiprocessing.process.BaseProcess, Connection]:
    context = multiprocessing.get_context("fork")
    ours, theirs = context.Pipe()
    process = context.Process(target=_serve, args=(render, theirs, ours), name="chat-templates", daemon=True)
    process.start()
    theirs.close()
    return process, ours


def _serve(render: Render, connection: Connection, parents: Connection) -> None:
    """Answer until the parent is gone. The limits are the kernel's, which needs no turn of Python to keep them."""
    parents.close()  # or the end of the parent would never be seen
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent says when it is over
    for each in (signal.SIGTERM, signal.SIGPROF):
        signal.signal(each, signal.SIG_DFL)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    if (statm := Path("/proc/self/statm")).exists():
        taken = int(statm.read_text().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (taken + MEMORY, taken + MEMORY))
    while True:
        try:
            request = connection.recv_bytes()
            key, messages = json.loads(request)
        except EOFError:
            return
        signal.setitimer(signal.ITIMER_PROF, _seconds(messages))
        try:
            text, spans = render(key, messages)
            if len(text) > LENGTH + LENGTH_A_BYTE * len(request) or len(spans) > SPANS_A_TURN * len(messages):
                raise UsageError(
                    f"{key}: the chat template makes {len(text):,} characters in {len(spans):,} marked pieces of this "
                    f"conversation of {len(messages)} messages; use a tokenizer with another template"
                )
            answer = json.dumps({"text": text, "spans": spans})
        except UsageError as error:
            answer = json.dumps({"error": str(error)})
        except MemoryError:
            return
        signal.setitimer(signal.ITIMER_PROF, 0)
        connection.send_bytes(answer.encode())
