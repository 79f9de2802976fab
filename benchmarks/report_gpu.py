"""The records of `gpu.py` as the tables of docs/performance.md: `python benchmarks/report_gpu.py`.

Everything between the page's two markers is a function of the JSON files in `benchmarks/results/gpu`. Whether a goal is
met is taken from its record, where it was computed from the figures; a record of tiny shapes or of a CPU is refused,
because a page that quotes it would claim something about a GPU.
"""

import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from report_demo import fill

ROOT = Path(__file__).resolve().parents[1]
RESULTS, PAGE = ROOT / "benchmarks" / "results" / "gpu", ROOT / "docs" / "performance.md"
MARKERS = "<!-- gpu-table -->", "<!-- /gpu-table -->"
NOTHING = "No section was run on a GPU yet: nothing here is a measurement of one."
SECTIONS = ("ceilings", "step", "objective", "fp8", "adaptive", "cache", "checkpoint", "teacher")
SHOWN = {
    "ceilings": ("bf16_tflops.best", "fp8_tflops.best", "memory_gb_per_second", "host_to_device_gb_per_second.pinned"),
    "step": ("2048.tokens_a_second", "2048.tflops", "8192.tokens_a_second", "8192.tflops"),
    "objective": ("8192.seconds", "32768.seconds", "32768.extra_gib"),
    "fp8": ("1b.tokens_a_second", "1b.tflops", "3b.tokens_a_second", "3b.tflops"),
    "adaptive": ("adaptive.switch_ms", "adaptive.snapshot_ms", "adaptive.step_ms", "above"),
    "cache": (
        *("build-1b.tokens_a_second", "build-8b.tokens_a_second", "encode.tokens_a_second"),
        *("read-12.bytes_a_token.total", "read-12.tokens_a_second", "step.cost"),
    ),
    "checkpoint": ("background.stall", "background.total", "in_place.stall"),
    "teacher": ("trained.steps", "trained.shipped_loss", "trained.made_loss"),
}
"""Figures beside the goals, by their place in the record; one that holds several gets a row for each."""
WORDS = {None: "not judged", True: "met", False: "**missed**"}


def main() -> int:
    """Fill the page."""
    page = PAGE.read_text()
    PAGE.write_text(fill(page, markdown(records(RESULTS)), MARKERS))
    return 0


def records(folder: Path) -> dict[str, dict[str, Any]]:
    """The records there are, by section. ValueError: one that says nothing about a GPU."""
    found = {}
    for name in SECTIONS:
        path = folder / f"{name}.json"
        if path.exists():
            found[name] = json.loads(path.read_text())
            if found[name]["tiny"] or "cuda" not in found[name]["machine"]:
                raise ValueError(f"{path} is of tiny shapes or of a CPU, and no result")
    return found


def markdown(found: Mapping[str, dict[str, Any]]) -> str:
    """All tables: the goals of every section, then its figures and where they come from."""
    if not found:
        return NOTHING
    goals = [(name, goal) for name, record in found.items() for goal in record["goals"]]
    lines = ["| section | what | goal | figure | |", "|---|---|--:|--:|---|"]
    lines += [f"| {name} | {g['what']} | {bound(g)} | {number(g['value'])} | {WORDS[g['met']]} |" for name, g in goals]
    missed = sum(goal["met"] is False for _, goal in goals)
    lines += ["", f"{missed} of {len(goals)} goals missed, {sum(g['met'] is None for _, g in goals)} not judged."]
    if absent := [name for name in SECTIONS if name not in found]:
        lines += [f"Not run on a GPU: {', '.join(absent)}."]
    for name, record in found.items():
        lines += ["", *section(name, record)]
    return "\n".join(lines)


def section(name: str, record: dict[str, Any]) -> list[str]:
    """The figures of one section, and what they were measured on."""
    of = record["machine"]
    rows = [(place, value) for each in SHOWN[name] for place, value in numbers(record["figures"], each)]
    lines = [f"**{name}**" + ("" if record["finished"] else " (unfinished)"), ""]
    lines += ["| | |", "|---|--:|", *(f"| {place} | {number(value)} |" for place, value in rows), ""] if rows else []
    notes = [("nothing was compiled", record["uncompiled"])] if record["uncompiled"] else []
    notes += reasons(record["figures"])
    lines += [*(f"- {place}: {text}" for place, text in notes), *([""] if notes else [])]
    file = f"../benchmarks/results/gpu/{name}.json"
    return [
        *lines,
        f"{of['device']}, driver {of['driver']}, torch {of['libraries']['torch']}, commit {record['commit']}, "
        f"{record['date']}: [{name}.json]({file}).",
    ]


def numbers(figures: Any, place: str) -> list[tuple[str, float]]:
    """The numbers at a place: one, or one for each name below it."""
    value = figures
    for name in place.split("."):
        value = value.get(name) if isinstance(value, Mapping) else None
    if isinstance(value, Mapping):
        return [(f"{place}.{name}", each) for name, each in value.items() if isinstance(each, int | float)]
    return [(place, value)] if isinstance(value, int | float) else []


def reasons(figures: Any, place: str = "") -> list[tuple[str, str]]:
    """What could not be measured, and why."""
    if not isinstance(figures, Mapping):
        return []
    found = [(place, str(figures[key])) for key in ("failed", "missing", "does_not_fit", "left_out") if key in figures]
    return found + [row for name, each in figures.items() for row in reasons(each, f"{place}.{name}".lstrip("."))]


def bound(goal: Mapping[str, Any]) -> str:
    """What a goal asks for."""
    return f"≥ {number(goal['least'])}" if goal["least"] is not None else f"≤ {number(goal['most'])}"


def number(value: float | None) -> str:
    """A figure with four digits, never rounded to a whole one that it is not."""
    if value is None:
        return "-"
    return f"{value:,.0f}" if abs(value) >= 1e4 or float(value).is_integer() else f"{value:.4g}"


if __name__ == "__main__":
    sys.exit(main())
