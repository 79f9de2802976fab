"""Runs kdtrain commands one at a time, in forks of a process that has imported everything, under limits.

Importing torch and transformers is most of what a refused command costs. `serve` does it once and then reads
requests from stdin, one JSON object a line; a fork becomes the command, as `python -m kdtrain` would, and ends as an
interpreter ends (threads that are no daemons are waited for). `Runner` is the other side of it.

Limits: RLIMIT_DATA for memory, which counts what a process can write to (RLIMIT_AS would count torch's
reservations as well), and a wall clock. The capabilities with which root reads any file are dropped, so that a file of
mode 000 cannot be read. Processes that outlive the command are found because their orphans become children of the
server (PR_SET_CHILD_SUBREAPER). Linux only.
"""

import ctypes
import json
import os
import resource
import runpy
import select
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
SECONDS = 20.0
MEMORY = 4 * 2**30
_GRACE = 1.0  # seconds that a helper process has for ending after the command
_COLD = 3.0  # importing torch on a busy machine takes this many times longer than commands may
_SUBREAPER = 36
_CAPABILITIES = 0x20080522
_READS_ALL = 0b110  # CAP_DAC_OVERRIDE and CAP_DAC_READ_SEARCH


@dataclass(frozen=True)
class Done:
    """A command that has ended."""

    argv: tuple[str, ...]
    code: int
    stdout: str
    stderr: str
    seconds: float
    memory: int
    """Bytes resident at most."""
    hung: bool
    """It was killed."""
    left: tuple[str, ...]
    """Processes that were there a second after its end."""


class Runner:
    """A runner that starts the server in `folder`, where it keeps what commands print."""

    def __init__(self, folder: Path, seconds: float = SECONDS) -> None:
        self._seconds = seconds
        self._out, self._err, self._yes = (folder / name for name in ("stdout", "stderr", "stdin"))
        self._yes.write_text("y\n" * 1000)  # whoever asks whether to run strange code is told to
        environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
        environment |= {"HF_HOME": str(folder / "hub"), "TOKENIZERS_PARALLELISM": "false"}
        environment["KDTRAIN_HOME"] = str(folder / "kdtrain")
        self._server = subprocess.Popen(
            [sys.executable, "-c", "from tests.hostile.server import serve; serve()"],
            env=environment,
            cwd=folder,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def __call__(
        self, argv: tuple[str, ...], cwd: Path, environment: dict[str, str | None], cold: bool = False, **how: Any
    ) -> Done:
        """Run `kdtrain ARGV`. cold: in an interpreter of its own. how: see `_become`."""
        assert self._server.stdin is not None and self._server.stdout is not None
        for path in (self._out, self._err):
            path.write_text("")  # a command may be told to print elsewhere
        streams = {"stdin": str(self._yes), "stdout": str(self._out), "stderr": str(self._err)} | how
        request = {
            **streams,
            "argv": argv,
            "cwd": str(cwd),
            "environment": environment,
            "cold": cold,
            "seconds": self._seconds * (_COLD if cold else 1),
        }
        self._server.stdin.write(json.dumps(request) + "\n")
        self._server.stdin.flush()
        answer = json.loads(self._server.stdout.readline())
        said = [path.read_text(encoding="utf-8", errors="backslashreplace") for path in (self._out, self._err)]
        return Done(
            argv, answer["code"], *said, answer["seconds"], answer["memory"], answer["hung"], tuple(answer["left"])
        )

    def close(self) -> None:
        """End the server."""
        self._server.communicate()


def serve() -> None:
    """Import what commands import, then run one for each line of stdin."""
    from tests import forks  # here, because the process that starts the server needs no torch

    forks.warm_up()
    ctypes.CDLL(None).prctl(_SUBREAPER, 1, 0, 0, 0)
    # A fork inherits neither the requests nor the way to answer them.
    requests, answers = os.fdopen(os.dup(0)), os.fdopen(os.dup(1), "w")
    while line := requests.readline():
        request = json.loads(line)
        started = time.monotonic()
        if not (child := os.fork()):
            _become(request)
            return
        hung = not _ended(child, request["seconds"])
        if hung:
            os.killpg(child, signal.SIGKILL)
        _, status, used = os.wait4(child, 0)
        seconds = time.monotonic() - started
        answer = {"code": os.waitstatus_to_exitcode(status), "seconds": round(seconds, 3), "hung": hung}
        answer |= {"memory": used.ru_maxrss * 1024, "left": [] if _all_gone() else _end_rest()}
        print(json.dumps(answer), file=answers, flush=True)


def _become(request: dict[str, Any]) -> None:
    """Become the command. A request may leave out nofile, fsize, nproc (limits), umask, closed (streams)."""
    os.setsid()
    os.chdir(request["cwd"])
    modes = (os.O_RDONLY, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    for number, (name, mode) in enumerate(zip(("stdin", "stdout", "stderr"), modes, strict=True)):
        handle = os.open(request[name], mode)
        os.dup2(handle, number)
        os.close(handle)
    for number in request.get("closed", ()):
        os.close(number)
    for name, value in request["environment"].items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value
    os.umask(request.get("umask", 0o022))
    if request.get("gone"):
        os.rmdir(os.getcwd())
    _drop_capabilities()
    tempfile.tempdir = None
    limits = {"RLIMIT_CORE": 0, "RLIMIT_DATA": MEMORY}
    limits |= {f"RLIMIT_{name.upper()}": request[name] for name in ("nofile", "fsize", "nproc") if name in request}
    for name, value in limits.items():
        resource.setrlimit(getattr(resource, name), (value, value))
    if request["cold"]:
        os.environ["PYTHONPATH"] = str(ROOT)
        os.execv(sys.executable, [sys.executable, "-m", "kdtrain", *request["argv"]])
    sys.argv = ["kdtrain", *request["argv"]]
    runpy.run_module("kdtrain", run_name="__main__")


def _drop_capabilities() -> None:
    libc = ctypes.CDLL(None)
    header, sets = (ctypes.c_uint32 * 2)(_CAPABILITIES, 0), (ctypes.c_uint32 * 6)()
    libc.capget(header, sets)
    for position in range(3):  # effective, permitted, inheritable
        sets[position] &= ~_READS_ALL
    libc.capset(header, sets)


def _ended(child: int, seconds: float) -> bool:
    watched = os.pidfd_open(child)
    try:
        return bool(select.select([watched], [], [], seconds)[0])
    finally:
        os.close(watched)


def _all_gone() -> bool:
    until = time.monotonic() + _GRACE
    while True:
        try:
            found, _ = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return True
        if not found:
            if time.monotonic() > until:
                return False
            time.sleep(0.02)


def _end_rest() -> list[str]:
    """Kill the remaining child processes, until there are none; return their commands."""
    found = []
    while children := Path(f"/proc/self/task/{os.getpid()}/children").read_text().split():
        for child in children:
            found.append(Path(f"/proc/{child}/cmdline").read_text().replace("\0", " ")[:200] or child)
            os.kill(int(child), signal.SIGKILL)
            os.waitpid(int(child), 0)
    return found
