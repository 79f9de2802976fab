"""What every section of `benchmarks.performance` shares: its options, its record and its goals.

A record holds figures by name and is written after each. An interrupted call resumes, also on a machine that is lent
for minutes and starts bare each time:

- After the budget of a call no measurement begins. What was not measured is listed in `left`; the call exits as usual.
- A call reuses the figures of the record in `--out`, or of those in `--from DIR`, where device, torch and settings are
  the same, and measures the rest. The commit may differ, and is noted for each figure. Figures that failed, that
  lacked a library, or that turned out to be wrong, are measured again; `--again` measures all of them.

Beside a figure of a GPU stand the card's clocks, power and temperature meanwhile (lowest, median, highest), and in the
record which kernels its process chose by a clock.

A failure is recorded with its reason, and the section continues. Whether a goal is met follows from the figures alone
(`Goal.verdict`); tiny shapes do not count.

What this gives up: one device and one process; the exchange between several cards is not measured.
"""

import json
import time
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from time import monotonic
from typing import Any

import torch

from benchmarks.harness import ATTENTION, ROOT, write
from benchmarks.harness.machine import chosen_kernels, commit, machine, watched
from benchmarks.harness.timing import free

BUDGET = 420.0
"""Seconds of a call after which no further measurement begins: a machine may be lent for ten minutes at a time."""


@dataclass(frozen=True)
class Options:
    """Options of a section."""

    device: torch.device
    out: Path
    tiny: bool = False
    compile: bool = True
    by_layer: bool = False
    """Compile a student's layers one by one, as a sharded run does: seconds, where its whole backbone takes minutes."""
    profile: bool = False
    uncompiled: str | None = None
    """Why nothing is compiled although it was to be."""
    budget: float = BUDGET
    """Seconds from `started` after which no further measurement begins."""
    started: float = field(default_factory=lambda: monotonic())
    earlier: Path | None = None
    """A folder of records whose figures are not measured again."""
    commit: str | None = None
    """Of the code, where the machine has no clone to ask."""
    only: tuple[str, ...] = ()
    """Measure only the figures whose names begin with one of these; all when empty."""

    @property
    def on_cpu(self) -> bool:
        """True where the claims about a CPU are measured."""
        return self.device.type == "cpu" and not self.tiny

    @property
    def scratch(self) -> Path:
        """The folder in which caches and checkpoints are made: beside tiny records, else in `runs`."""
        folder = ROOT / "runs" / ("cpu" if self.on_cpu else "gpu")
        if self.tiny:
            folder = self.out
        folder.mkdir(parents=True, exist_ok=True)
        return folder


@dataclass(frozen=True)
class Goal:
    """A bound for a figure."""

    what: str
    figure: str
    """Its place among the figures, levels joined by dots."""
    least: float | None = None
    most: float | None = None

    def verdict(self, value: float | None, doubt: float = 0.0) -> str:
        """Judge a value: met, missed, too close to tell (the bound is within `doubt` of the value), or not measured."""
        if value is None:
            return "not measured"
        if any(bound is not None and abs(value - bound) < doubt for bound in (self.least, self.most)):
            return "too close to tell"
        met = (self.least is None or value >= self.least) and (self.most is None or value <= self.most)
        return "met" if met else "missed"


class Record:
    """The JSON of one section."""

    def __init__(self, name: str, options: Options, settings: Mapping[str, Any], goals: tuple[Goal, ...] = ()) -> None:
        self.path, self.goals, self.options = options.out / f"{name}.json", goals, options
        self.figures: dict[str, dict[str, Any]] = {}
        self.data: dict[str, Any] = {
            "command": f"python -m benchmarks.performance {name}",
            "section": name,
            "tiny": options.tiny,
            "date": time.strftime("%Y-%m-%d"),
            "machine": machine(options.device),
            "settings": json.loads(json.dumps(settings)),
            "uncompiled": options.uncompiled,
            "attention": ATTENTION,
            "finished": False,
            "left": [],
            "commits": {},
            "card": {},
            "kernels": {},
            "figures": self.figures,
        }
        self.commit = options.commit or commit()
        self._take_over()
        write(self.path, self.data)

    def _take_over(self) -> None:
        """Reuse the figures of an earlier record of the same device, torch and settings."""
        path = None if self.options.earlier is None else self.options.earlier / self.path.name
        if path is None or not path.exists():
            return
        earlier = json.loads(path.read_text())
        if _key(earlier) != _key(self.data):
            self._print(f"{path} is of another device, torch or settings: its figures are not used")
            return
        for name, figure in earlier["figures"].items():
            if not figure.keys() & {"failed", "missing", "wrong"}:
                self.figures[name], self.data["commits"][name] = figure, earlier["commits"][name]
        self.data["card"] = {name: each for name, each in earlier.get("card", {}).items() if name in self.figures}
        self.data["kernels"] = earlier.get("kernels", {})
        # a library of an earlier call may not be here now, and its figures are
        own = self.data["machine"]["libraries"]
        own |= {name: known for name, known in earlier["machine"]["libraries"].items() if own.get(name) is None}

    def measure(self, name: str, run: Callable[[], dict[str, Any]], needs: float = 0.0) -> None:
        """Record a figure: reuse an earlier one, measure it, or note why it is missing.

        Skip it when the budget is used up or `only` does not name it. needs: seconds of the budget that must be left.
        """
        if name in self.figures:
            return
        only = self.options.only
        if (only and not name.startswith(only)) or monotonic() - self.options.started + needs >= self.options.budget:
            self.data["left"].append(name)
            return
        with watched(self.options.device) as card:
            found = attempt(run)
        free()
        if card:
            self.data["card"][name] = card
        self.data["kernels"] |= chosen_kernels()
        self.put(name, found)

    def put(self, name: str, value: dict[str, Any]) -> None:
        """Keep a figure and write the record."""
        self.figures[name], self.data["commits"][name] = value, self.commit
        write(self.path, self.data)
        self._print(f"{name}: {json.dumps(value)[:600]}")

    def finish(self) -> int:
        """Write the record, and print goals and what is left; return 1 where something failed, else 0."""
        self.data["finished"] = not self.data["left"]
        write(self.path, self.data)
        for goal in () if self.options.tiny else self.goals:
            value = find(self.figures, goal.figure)
            self._print(f"{goal.what}: {value} ({goal.verdict(value)})")
        if self.data["left"]:
            self._print(f"left, for the next call: {', '.join(self.data['left'])}")
        return int(any("failed" in figure for figure in self.figures.values()))

    def _print(self, text: str) -> None:
        print(f"{self.data['section']}: {text}", flush=True)


def _key(record: Mapping[str, Any]) -> tuple[Any, ...]:
    """Return the part of a record that must be equal for figures of two records to be mixed."""
    of = record["machine"]
    return record["section"], record["tiny"], record["settings"], of["device"], of["libraries"]["torch"]


def counts(record: Mapping[str, Any]) -> bool:
    """Return True if a record is a result of a GPU; tiny shapes and CPUs only show that the section works."""
    return not record["tiny"] and "cuda" in record["machine"]


def find(figures: Mapping[str, Any], place: str) -> float | None:
    """Look up the number at a dotted place among the figures; return None without one."""
    value: Any = figures
    for name in place.split("."):
        value = value.get(name) if isinstance(value, Mapping) else None
    return value if isinstance(value, int | float) and not isinstance(value, bool) else None


def attempt(run: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """Return the result of `run`, or why there is none: out of memory, a missing library, or a failure."""
    try:
        return run()
    except torch.OutOfMemoryError as error:
        return {"does_not_fit": one_line(error)}
    except ImportError as error:
        return {"missing": one_line(error)}
    except Exception as error:
        traceback.print_exc()
        return {"failed": one_line(error)}


def one_line(error: BaseException) -> str:
    """Format an exception in at most 300 characters."""
    return " ".join(f"{type(error).__name__}: {error}".split())[:300]
