"""What every section of `benchmarks.performance` shares: its options, its record and its goals.

A record is written after every measurement, so that a time limit loses nothing but the one in work; a section that is
started again with the same settings on the same commit measures what its record lacks. What fails is written down
with its reason, and the section continues.

Whether a goal is met is computed from the figures, here and nowhere else, and on a GPU at full size only: the figures
of a CPU or of tiny shapes say that a section works, and nothing about a goal.

What this gives up: one card and one process; nothing here measures how several cards talk.
"""

import json
import time
import traceback
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from benchmarks.harness import ROOT, write
from benchmarks.harness.machine import commit, machine
from benchmarks.harness.timing import free

BUDGET = 540.0
"""Seconds of a section after which no further measurement begins."""


@dataclass(frozen=True)
class Options:
    """How a section is run."""

    device: torch.device
    out: Path
    tiny: bool = False
    compile: bool = True
    profile: bool = False
    uncompiled: str | None = None
    """Why nothing is compiled although it was to be."""
    budget: float = BUDGET
    commit: str | None = None
    """Of the code, where the machine has no clone to ask."""

    @property
    def scratch(self) -> Path:
        """Where caches and checkpoints are made: beside tiny records, and out of the way of others."""
        folder = self.out if self.tiny else ROOT / "runs" / "gpu"
        folder.mkdir(parents=True, exist_ok=True)
        return folder

    @property
    def counts(self) -> bool:
        """Whether goals are judged."""
        return self.device.type == "cuda" and not self.tiny


@dataclass(frozen=True)
class Goal:
    """What a figure is to be."""

    what: str
    figure: str
    """Its place among the figures, levels joined by dots."""
    least: float | None = None
    most: float | None = None


class Record:
    """The JSON of one section."""

    def __init__(self, name: str, options: Options, settings: Mapping[str, Any], goals: tuple[Goal, ...] = ()) -> None:
        self.path, self.goals, self.options = options.out / f"{name}.json", goals, options
        self.started, self.before = time.monotonic(), 0.0
        self.data: dict[str, Any] = {
            "section": name,
            "tiny": options.tiny,
            "date": time.strftime("%Y-%m-%d"),
            "commit": options.commit or commit(),
            "machine": machine(options.device),
            "settings": json.loads(json.dumps(settings)),
            "uncompiled": options.uncompiled,
            "figures": {},
        }
        self._go_on()
        self.write()

    def _go_on(self) -> None:
        """Take over the figures of a record of the same settings, commit and device."""
        if not self.path.exists():
            return
        earlier = json.loads(self.path.read_text())
        same = ("section", "tiny", "commit", "machine", "settings")
        if all(earlier.get(key) == self.data[key] for key in same) and not earlier["finished"]:
            self.data["figures"], self.before = earlier["figures"], earlier["seconds"]

    @property
    def figures(self) -> dict[str, Any]:
        """What was measured, by name."""
        found: dict[str, Any] = self.data["figures"]
        return found

    def measure(self, name: str, run: Callable[[], Any]) -> Any:
        """The figure `name`: found before, or what `run` gives, or why there is none; written at once."""
        known = self.figures.get(name)
        if known is not None and not (isinstance(known, dict) and known.keys() & {"failed", "left_out"}):
            return known
        if self.late():
            found: Any = {"left_out": f"no time left of {self.options.budget:.0f} s; start the section again"}
        else:
            found = attempt(run)
            free()
        return self.put(name, found)

    def put(self, name: str, value: Any) -> Any:
        """Keep a figure and write the record."""
        self.figures[name] = value
        begun = self.figures.pop("so_far", {})
        begun.pop(name, None)
        if begun:
            self.figures["so_far"] = begun
        self.write()
        print(f"{self.data['section']}: {name}: {json.dumps(value)[:600]}", flush=True)
        return value

    def so_far(self, name: str, value: Any) -> None:
        """Keep what there is of a figure that is not complete; it goes when the figure comes."""
        self.figures.setdefault("so_far", {})[name] = value
        self.write()

    def late(self) -> bool:
        """Whether nothing more is to be begun."""
        return time.monotonic() - self.started > self.options.budget

    def write(self, finished: bool = False) -> None:
        """Write what there is."""
        self.data["goals"] = judged(self.goals, self.figures, self.options.counts)
        self.data["seconds"] = round(self.before + time.monotonic() - self.started, 1)
        self.data["finished"] = finished and not left_out(self.figures)
        write(self.path, self.data)

    def finish(self) -> int:
        """Write the last time; 1 where something failed, else 0."""
        self.write(finished=True)
        for goal in self.data["goals"]:
            print(f"{self.data['section']}: {goal['what']}: {goal['value']} ({verdict(goal['met'])})")
        return int(bool(failures(self.figures)))


def judged(goals: tuple[Goal, ...], figures: Mapping[str, Any], counts: bool) -> list[dict[str, Any]]:
    """Each goal with its figure and whether it is met; None where it cannot be said."""
    rows = []
    for goal in goals:
        value = find(figures, goal.figure)
        met = None
        if counts and value is not None:
            met = (goal.least is None or value >= goal.least) and (goal.most is None or value <= goal.most)
        rows.append({**asdict(goal), "value": value, "met": met})
    return rows


def verdict(met: bool | None) -> str:
    """A goal's state in a word."""
    return "not judged" if met is None else "met" if met else "missed"


def find(figures: Mapping[str, Any], place: str) -> float | None:
    """The number at a place among the figures, None where there is none."""
    value: Any = figures
    for name in place.split("."):
        value = value.get(name) if isinstance(value, Mapping) else None
    return value if isinstance(value, int | float) and not isinstance(value, bool) else None


def failures(figures: Any) -> list[str]:
    """What went wrong anywhere among the figures."""
    return _texts(figures, "failed")


def left_out(figures: Any) -> list[str]:
    """What there was no time for."""
    return _texts(figures, "left_out")


def _texts(figures: Any, key: str) -> list[str]:
    if not isinstance(figures, dict):
        return []
    own = [str(figures[key])] if key in figures else []
    return own + [text for value in figures.values() for text in _texts(value, key)]


def attempt(run: Callable[[], Any]) -> Any:
    """What `run` gives, or why it gives nothing: no memory, no library, or a failure, in words."""
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
    """An exception in at most 300 characters."""
    return " ".join(f"{type(error).__name__}: {error}".split())[:300]
