"""`kdtrain compare`: runs side by side, marking differences beyond the spread over seeds."""

import json
import sys
from collections.abc import Collection
from typing import Any

from rich.console import Console

from kdtrain.config import CompareConfig
from kdtrain.config.values import flag
from kdtrain.monitor.runs import (
    MEASURES,
    Group,
    best_of,
    caution,
    cell,
    difference,
    differing,
    grouped,
    notes,
    read_runs,
)
from kdtrain.tables import Table, csv_lines, finite, latex, markdown, show_page


def main(config: CompareConfig) -> int:
    """Print the table.

    Raises:
        UsageError: a folder is not a run.
    """
    groups = grouped(read_runs(config.runs))
    if config.json:
        print(json.dumps(finite(as_record(groups))))
    else:
        show(groups, config.format)
    return 0


def show(groups: list[Group], format: str = "text", names: Collection[str] = tuple(MEASURES)) -> None:
    """Print the comparison as text, of the numbers `names`, or as a table for a paper: markdown, latex or csv."""
    if format == "text":
        # each table repeats the first run, which the others are compared with; a column has 20 characters at least
        beside = max(1, (Console().width - 30) // 20 - 1)
        starts = range(1, max(len(groups), 2), beside)
        tables = [_table(groups, [groups[0], *groups[start : start + beside]], names) for start in starts]
        show_page([*tables, *notes(groups)])
    elif format == "csv":
        sys.stdout.write(as_csv(groups))
    else:
        table, lead = paper_table(groups), "% " if format == "latex" else ""
        parts = [*(latex if lead else markdown)(table), *([] if lead else [""])]
        print("\n".join([*parts, *(f"{lead}{each}" for each in _paper_notes(groups, bool(table.bold)))]))


def _numbers_of(group: Group, groups: list[Group], name: str) -> dict[str, Any]:
    off = difference(groups, group, name)
    low, high = (None, None) if off is None or off.half is None else (off.mean - off.half, off.mean + off.half)
    return {
        "mean": group.mean(name),
        "deviation": group.deviation(name) if MEASURES[name].tested else None,
        "seeds": len(group.values(name)),
        "difference": off and off.mean,
        "low": low,
        "high": high,
        "beyond_seeds": off and off.beyond,
    }


def as_record(groups: list[Group]) -> dict[str, Any]:
    """The comparison as one record; losses in nats a token, times in seconds."""
    rows = []
    for group in groups:
        numbers = {name: _numbers_of(group, groups, name) for name in MEASURES}
        first = group.runs[0]
        options = {name: first.options[name] for name in differing(groups)}
        runs = [{"run": str(run.folder), "seed": run.seed, "status": run.status} for run in group.runs]
        rows.append({"name": group.name, "runs": runs, "cache": first.cache, "options": options, "numbers": numbers})
    return {"groups": rows, "differs": differing(groups), "notes": caution(groups)}


def as_csv(groups: list[Group]) -> str:
    """A row a group: the options in which they differ, and of each number its mean, deviation and difference."""
    options, shown = differing(groups), [name for name in MEASURES if any(group.values(name) for group in groups)]
    parts = {name: [*(_numbers_of(groups[0], groups, name))] if MEASURES[name].tested else ["mean"] for name in shown}
    header = ["name", *options, *(f"{name}_{part}" for name, each in parts.items() for part in each)]
    rows = []
    for group in groups:
        numbers = {name: _numbers_of(group, groups, name) for name in shown}
        first = [group.runs[0].shown(option) for option in options]
        rows.append([group.name, *first, *(numbers[name][part] for name, each in parts.items() for part in each)])
    return csv_lines(header, rows)


def paper_table(groups: list[Group]) -> Table:
    """A row a group, a column a number by which students are judged; the best is bold where seeds do not explain it."""
    shown = [name for name, each in MEASURES.items() if each.best and any(group.values(name) for group in groups)]
    if any(name.startswith("test_") for name in shown):
        shown = [name for name in shown if name.startswith("test_")]
    counts = {len(group.runs) for group in groups}
    rows = [
        [
            group.name,
            *([str(len(group.runs))] if len(counts) > 1 else []),
            *(cell(groups, group, name)[0] for name in shown),
        ]
        for group in groups
    ]
    seeds = ["seeds"] if len(counts) > 1 else []
    best = {
        (groups.index(found), at) for at, name in enumerate(shown, 1 + len(seeds)) if (found := best_of(groups, name))
    }
    return Table(("", *seeds, *(MEASURES[name].label for name in shown)), rows, left=("",), bold=best)


def _paper_notes(groups: list[Group], bold: bool) -> list[str]:
    seeds = sorted({len(group.runs) for group in groups})
    found = [] if seeds == [1] else [f"mean ± standard deviation over {' to '.join(map(str, seeds))} seeds"]
    others = len(groups) - 1
    corrected = f", corrected for {others} comparisons (Bonferroni)" if others > 1 else ""
    means = f"bold: better than each other row by more than the 95 % interval of runs with the same seed{corrected}"
    return [*found, *([means] if bold else []), *caution(groups)]


def _table(groups: list[Group], shown: list[Group], names: Collection[str]) -> Table:
    shown = list({id(group): group for group in shown}.values())
    rows = [
        ("how it ended", *("\n".join(dict.fromkeys(run.status for run in group.runs)) for group in shown)),
        ("student", *(group.runs[0].student for group in shown)),
    ]
    rows += [(flag(option), *(group.runs[0].shown(option) for group in shown)) for option in differing(shown)]
    for name, measure in MEASURES.items():
        if name in names and any(group.mean(name) for group in shown):  # a count that is 0 everywhere tells nothing
            cells = [cell(groups, group, name) for group in shown]
            rows.append((measure.label, *(f"{own}\n{off}{' *' * far}" if off else own for own, off, far in cells)))
    return Table(("", *(f"{group.name}\n{group.seeds}" for group in shown)), rows, boxed=True)
