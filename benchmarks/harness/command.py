"""The real command, run as a user would run it, and the folders in which studies resume."""

import dataclasses
import json
import os
import platform
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any, NoReturn

from benchmarks.harness import write
from benchmarks.harness.machine import cpu_model, version
from kdtrain.cli.help import help_of
from kdtrain.cli.parsing import parse
from kdtrain.errors import UsageError, name_flags


def options(kind: type) -> Any:
    """The configuration of class `kind` that this script's command line asks for; `--help` and a mistake end it."""
    name_flags()
    script, argv = Path(sys.argv[0]).stem, sys.argv[1:]
    if {"-h", "--help"} & {*argv}:
        print(help_of(script, kind, "all"))
        raise SystemExit(0)
    try:
        return parse(script, kind, argv, {})
    except UsageError as error:
        stop(2, str(error))


class Kdtrain:
    """Calls the command `kdtrain` and reads the JSON object it prints; what it logs goes to the terminal.

    The command runs in a process group of its own and gets each signal from here, exactly once: a second one would make
    it leave without saving. Several threads may call at once; `environment` is added to what the commands inherit.
    """

    def __init__(self, **environment: str) -> None:
        self.children: set[subprocess.Popen[str]] = set()
        self.stopped = False
        self._environment = os.environ | environment
        self._before: dict[int, Any] = {}

    def __enter__(self) -> "Kdtrain":
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            self._before[number] = signal.signal(number, self._stop)
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _stop(self, number: int, frame: FrameType | None) -> None:
        self.stopped = True
        for child in [*self.children]:
            child.send_signal(signal.SIGINT if number == signal.SIGINT else signal.SIGTERM)

    def __call__(self, *argv: str, may_fail: bool = False) -> dict[str, Any]:
        """Run one command. Exits with its exit code where that is not 0, and with 1 where it was stopped.

        may_fail: exit code 1 is accepted, and the answer is empty.
        """
        print(f"$ kdtrain {shlex.join(argv)}", file=sys.stderr, flush=True)
        answer, code = "", 0
        if not self.stopped:
            command = [sys.executable, "-m", "kdtrain", *argv, "--json"]
            pipes = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE}
            child = subprocess.Popen(command, **pipes, text=True, process_group=0, env=self._environment)
            self.children.add(child)
            if self.stopped:
                child.send_signal(signal.SIGTERM)
            answer, _ = child.communicate()
            self.children.discard(child)
            code = child.returncode
        if self.stopped:
            stop(1, "stopped; run the same command to resume")
        if may_fail and code == 1:
            return {}
        if code:
            stop(code if code > 0 else 128 - code, f"kdtrain {argv[0]} failed, see above")
        return json.loads(answer)


def environment(folder: Path) -> dict[str, Any]:
    """Date, versions, processor and precision of a run; nothing that names a machine or a person."""
    of_run = json.loads((folder / "environment.json").read_text())
    return {
        "date": time.strftime("%Y-%m-%d"),
        "python": platform.python_version(),
        "torch": version("torch"),
        "cpu": cpu_model(),
        "threads": of_run["threads"],
        "device": of_run["device"],
        "precision": of_run["mode"],
    }


def claim(out: Path, settings: Any) -> None:
    """Start or resume in `out`, by a dataclass or a table. Refuse a folder with other settings or other files."""
    file, now = out / "settings.json", settings if isinstance(settings, dict) else dataclasses.asdict(settings)
    if file.exists():
        before = json.loads(file.read_text())
        changed = [
            f"--{name.replace('_', '-')} was {before.get(name)}" for name in now if before.get(name) != now[name]
        ]
        if changed:
            stop(2, f"{out} holds runs of other settings ({', '.join(changed)}); remove it or name another --out")
        return
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        stop(2, f"{out} holds something else; name another --out")
    write(file, now)


def stop(code: int, message: str) -> NoReturn:
    """Leave with one line on stderr."""
    print(f"{Path(sys.argv[0]).stem}: {message}", file=sys.stderr)
    raise SystemExit(code)
