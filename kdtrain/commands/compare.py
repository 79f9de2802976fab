"""`kdtrain compare`: runs side by side, marking differences beyond the spread over seeds."""

import csv
import re
import sys
from collections.abc import Collection, Iterator
from typing import Any

from kdtrain.config.commands import CompareConfig
from kdtrain.errors import UsageError, printable
from kdtrain.monitor.measures import MEASURES
from kdtrain.monitor.runs import (
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
        UsageError: a folder is not a run, or a column has no such name.
    """
    for name in config.columns:
        if name not in MEASURES:
            raise UsageError(f"--columns {name} is none of {', '.join(MEASURES)}")
    groups = grouped(read_runs(config.runs))
    if config.json or config.format == "text":
        compare(groups, config.json, config.columns or tuple(MEASURES), config.digits, config.transpose)
    elif config.format == "csv":
        csv.writer(sys.stdout).writerows(csv_rows(groups, config.columns))  # RFC 4180
    else:
        table = paper_table(groups, config.columns, config.digits)
        below = paper_notes(groups, bool(table.bold))
        table = table if config.transpose else table.transposed()
        tex = config.format == "latex"
        print("\n".join(latex(table, below, config.caption, config.label) if tex else [*markdown(table), "", *below]))
    return 0


def compare(
    groups: list[Group],
    as_json: bool,
    names: Collection[str] = tuple(MEASURES),
    digits: int = 4,
    transpose: bool = False,
) -> None:
    """Print the comparison of the numbers `names`."""
    table = full_table(groups, names, digits)
    table = table.transposed() if transpose else table
    show([table, "", *outcome(groups), *notes(groups)], as_record(groups, names), as_json)


def _numbers_of(group: Group, groups: list[Group], name: str) -> dict[str, Any]:
    off = difference(groups, group, name)
    low, high = (None, None) if off is None or off.half is None else (off.mean - off.half, off.mean + off.half)
    return {
        "mean": group.mean(name),
        "deviation": group.deviation(name) if MEASURES[name].best else None,
        "seeds": len(group.values(name)),
        "difference": off and off.mean,
        "low": low,
        "high": high,
        "beyond_seeds": off and off.beyond,
    }


def as_record(groups: list[Group], names: Collection[str]) -> dict[str, Any]:
    """The comparison as one record; losses in nats a token, times in seconds."""
    rows = []
    for group in groups:
        numbers = {name: _numbers_of(group, groups, name) for name in names}
        first = group.runs[0]
        options = {name: first.options[name] for name in differing(groups)}
        runs = [{"run": str(run.folder), "seed": run.seed, "status": run.status} for run in group.runs]
        about = {"name": group.name, "runs": runs, "cache": first.cache, "kl_estimator": first.estimator}
        rows.append(about | {"options": options, "numbers": numbers})
    return {"groups": rows, "differs": differing(groups), "notes": caution(groups)}


def csv_rows(groups: list[Group], names: Collection[str] = ()) -> Iterator[list[Any]]:
    """A row a group: the options in which they differ, and of each number its mean, deviation and difference.

    Empty for what is none, numbers with all their digits. Before a text that a spreadsheet would run is an apostrophe.
    """
    options = differing(groups)
    shown = names or [name for name in MEASURES if any(group.values(name) for group in groups)]
    parts = {name: [*(_numbers_of(groups[0], groups, name))] if MEASURES[name].best else ["mean"] for name in shown}
    yield ["name", *options, "kl_estimator", *(f"{name}_{part}" for name, each in parts.items() for part in each)]
    for group in groups:
        numbers = {name: _numbers_of(group, groups, name) for name in shown}
        run = group.runs[0]
        values = {name: run.options[name] for name in options}
        first = [run.shown(name) if isinstance(value, str | list) else value for name, value in values.items()]
        found = (numbers[name][part] for name, each in parts.items() for part in each)
        row = [group.name, *first, run.estimator, *found]
        yield [f"'{each}" if isinstance(each, str) and each.startswith(("=", "+", "-", "@")) else each for each in row]


def paper_table(groups: list[Group], names: Collection[str], digits: int) -> Table:
    """A row a number, a column a group and one of the teacher; the best is bold where seeds do not explain it.

    The teacher has a number where it is the same beside each run. Without `names` the numbers are those by which
    students are judged, of the test alone if there are any of it.
    """
    judged = [name for name, each in MEASURES.items() if each.best and not each.label.startswith("last ")]
    known = [name for name in judged if any(group.values(name) for group in groups)]
    names = names or [name for name in known if name.startswith("test_")] or known
    lines = [["", *(group.name for group in groups), "teacher"]]
    for name in names:
        cells = (cell(groups, group, name, digits)[0].partition("\n")[0] for group in groups)
        own = re.sub("(test_)?(best_)?", r"\1teacher_", name, count=1)
        teachers = (run.numbers.get(own) for each in groups for run in each.runs)
        texts = {MEASURES[name].shown(value, digits) for value in teachers if value is not None}
        lines.append([MEASURES[name].head, *cells, texts.pop() if len(texts) == 1 else ""])
    best = {(row, groups.index(each) + 1) for row, name in enumerate(names) if (each := best_of(groups, name))}
    header, *rows = lines if any(line[-1] for line in lines[1:]) else [line[:-1] for line in lines]
    return Table(header, rows, left=("",), bold=best)


def paper_notes(groups: list[Group], bold: bool) -> Iterator[str]:
    """The lines below a paper's table: seeds, marks, and what to be careful about."""
    seeds = dict.fromkeys(printable(str(run.seed)) for each in groups for run in each.runs)
    yield ("mean ± standard deviation over seeds " if len(seeds) > 1 else "seed ") + ", ".join(seeds)
    if bold:
        others = len(groups) - 1
        corrected = f", corrected for {others} comparisons (Bonferroni)" if others > 1 else ""
        yield f"bold: better than each other by more than the 95 % interval of runs with the same seed{corrected}"
    yield from caution(groups)
