"""Shared by the benchmarks: the machine, records and goals, timing, the command, students and their steps."""

import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "benchmarks" / "results"
FIGURES = ROOT / "benchmarks" / "figures"
TEACHER, STUDENT = "teachers/stdlib-5m.toml", "students/stdlib-1m.toml"
"""The teacher that ships and the student of the demo, relative to the repository."""
ATTENTION = "sdpa"
"""Of all models that a section makes, also where a run of `attention = "auto"` takes `eager`; each record names it."""
SECTIONS = ("ceilings", "step", "objective", "fp8", "adaptive", "cache", "checkpoint", "teacher")
"""The sections of a GPU, in the order in which `all` runs them; each is a module of `benchmarks.performance`."""
CPU_SECTIONS = ("step", "objective", "cache", "checkpoint")
"""Those that measure claims about a CPU, too."""


def write_spec(path: Path, tokenizer: object, config: Mapping[str, Any]) -> None:
    """Write a student's TOML: a tokenizer and the entries of a configuration."""
    entries = "".join(f"{name} = {json.dumps(value)}\n" for name, value in config.items())
    path.write_text(f"tokenizer = '{tokenizer}'\n\n[config]\n{entries}")


def write(path: Path, record: Any) -> None:
    """Write a record as JSON, with the command that makes it; makes the folder if it is missing."""
    script = getattr(sys.modules["__main__"], "__spec__", None)
    if isinstance(record, Mapping) and script is not None:
        record = {"command": f"python -m {script.name.removesuffix('.__main__')}", **record}
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(record, indent=1) + "\n")
