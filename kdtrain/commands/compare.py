"""`kdtrain compare`: runs side by side, marking differences beyond the spread over seeds."""

import csv
import sys
from collections.abc import Collection, Iterator
from typing import Any

from kdtrain.config import CompareConfig
from kdtrain.monitor.runs import (
    MEASURES,
    Group,
    best_of,
    caution,
    cell,
    difference,
    differing,
    full_table,
    grouped,
    notes,
    outcome,
    read_runs,
)
from kdtrain.tables import Table, latex, markdown, show


def main(config: CompareConfig) -> int:
    """Print the table.

    Raises:
        UsageError: a folder is not a run.
    """
    compare(grouped(read_runs(config.runs)), config.json, config.format)
    return 0


def compare(groups: list[Group], as_json: bool, format: str = "text", names: Collection[str] = tuple(MEASURES)) -> None:
    """Print the comparison as text, of the numbers `names`, or as a table for a paper: markdown, latex or csv."""
    if as_json or format == "text":
        show([full_table(groups, names), "", *outcome(groups), *notes(groups)], as_record(groups), as_json)
    elif format == "csv":
        csv.writer(sys.stdout).writerows(csv_rows(groups))  # RFC 4180
    else:
        table, lead = paper_table(groups), "% " if format == "latex" else ""
        seeds, others = sorted({len(group.runs) for group in groups}), len(groups) - 1
        found = [] if seeds == [1] else [f"mean ± standard deviation over {' to '.join(map(str, seeds))} seeds"]
        corrected = f", corrected for {others} comparisons (Bonferroni)" if others > 1 else ""
        means = f"bold: better than each other row by more than the 95 % interval of runs with the same seed{corrected}"
        found += [*([means] if table.bold else []), *caution(groups)]
        parts = [*(latex if lead else markdown)(table), *([] if lead else [""])]
        print("\n".join([*parts, *(f"{lead}{each}" for each in found)]))


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
        about = {"name": group.name, "runs": runs, "cache": first.cache, "kl_estimator": first.estimator}
        rows.append(about | {"options": options, "numbers": numbers})
    return {"groups": rows, "differs": differing(groups), "notes": caution(groups)}


def csv_rows(groups: list[Group]) -> Iterator[list[Any]]:
    """A row a group: the options in which they differ, and of each number its mean, deviation and difference.

    Empty for what is none, numbers with all their digits.
    """
    options, shown = differing(groups), [name for name in MEASURES if any(group.values(name) for group in groups)]
    parts = {name: [*(_numbers_of(groups[0], groups, name))] if MEASURES[name].tested else ["mean"] for name in shown}
    yield ["name", *options, "kl_estimator", *(f"{name}_{part}" for name, each in parts.items() for part in each)]
    for group in groups:
        numbers = {name: _numbers_of(group, groups, name) for name in shown}
        first = [*(group.runs[0].shown(option) for option in options), group.runs[0].estimator]
        yield [group.name, *first, *(numbers[name][part] for name, each in parts.items() for part in each)]


def paper_table(groups: list[Group]) -> Table:
    """A row a group, a column a number by which students are judged; the best is bold where seeds do not explain it."""
    shown = [name for name, each in MEASURES.items() if each.best and any(group.values(name) for group in groups)]
    if any(name.startswith("test_") for name in shown):
        shown = [name for name in shown if name.startswith("test_")]
    seeds = len({len(group.runs) for group in groups}) > 1
    counts = [[str(len(group.runs))] * seeds for group in groups]
    cells = [[cell(groups, group, name)[0] for name in shown] for group in groups]
    rows = [[group.name, *count, *row] for group, count, row in zip(groups, counts, cells, strict=True)]
    best = {(groups.index(found), at) for at, name in enumerate(shown, 1 + seeds) if (found := best_of(groups, name))}
    header = ("", *["seeds"] * seeds, *(MEASURES[name].label for name in shown))
    return Table(header, rows, left=("",), bold=best)
