"""The real command, run as a user would run it, and a folder in which a script resumes."""

import dataclasses
import json
import os
import platform
import shlex
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, NoReturn

from benchmarks.harness import write
from benchmarks.harness.machine import cpu_model, version
from kdtrain.cli.help import help_of
from kdtrain.cli.parsing import parse
from kdtrain.errors import UsageError, name_flags


def options(kind: type) -> Any:
    """Parse this script's command line into the configuration of class `kind`.

    `--help` and a mistake end the process.
    """
    name_flags()
    script, argv = Path(sys.argv[0]).stem, sys.argv[1:]
    if {"-h", "--help"} & {*argv}:
        print(help_of(script, kind, "all"))
        raise SystemExit(0)
    try:
        return parse(script, kind, argv, dict)
    except UsageError as error:
        stop(2, str(error))


def kdtrain(*argv: str, **environment: str) -> dict[str, Any]:
    """Run `kdtrain` and return the JSON object that it prints; what it logs goes to the terminal.

    environment: is added to what the command inherits. Exits with the command's exit code where that is not 0.
    """
    print(f"$ kdtrain {shlex.join(argv)}", file=sys.stderr, flush=True)
    command = [sys.executable, "-m", "kdtrain", *argv, "--json"]
    pipes: Any = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE}
    done = subprocess.run(command, **pipes, text=True, env=os.environ | environment)
    if (code := done.returncode) != 0:
        stop(code if code > 0 else 128 - code, f"kdtrain {argv[0]} failed, see above")
    return dict(json.loads(done.stdout))


def environment(folder: Path) -> dict[str, Any]:
    """Return date, versions, processor and precision of a run; nothing that names a machine or a person."""
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
    """Exit with one line on stderr."""
    print(f"{Path(sys.argv[0]).stem}: {message}", file=sys.stderr)
    raise SystemExit(code)
