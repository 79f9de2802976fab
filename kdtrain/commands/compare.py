"""`kdtrain compare`: runs side by side, marking differences beyond the spread over seeds."""

import json
from typing import Any

from rich.console import Console

from kdtrain.config import CompareConfig
from kdtrain.config.values import flag
from kdtrain.monitor.runs import (
    MEASURES,
    Group,
    caution,
    cell,
    difference,
    differing,
    grouped,
    notes,
    read_runs,
    spread,
)
from kdtrain.tables import Table, finite, show_page


def main(config: CompareConfig) -> int:
    """Print the table.

    Raises:
        UsageError: a folder is not a run.
    """
    groups = grouped(read_runs(config.runs))
    if config.json:
        print(json.dumps(finite(as_record(groups))))
        return 0
    show(groups)
    return 0


def show(groups: list[Group]) -> None:
    """Print the comparison."""
    # each table repeats the first run, which the others are compared with; a column has 20 characters at least
    beside = max(1, (Console().width - 30) // 20 - 1)
    starts = range(1, max(len(groups), 2), beside)
    tables = [_table(groups, [groups[0], *groups[start : start + beside]]) for start in starts]
    show_page([*tables, *notes(groups)])


def as_record(groups: list[Group]) -> dict[str, Any]:
    """The comparison as one record; losses in nats a token, times in seconds."""
    rows = []
    for group in groups:
        numbers = {}
        for name in MEASURES:
            own, off = spread([group], name), difference(groups, group, name)
            numbers[name] = {
                "mean": group.mean(name),
                "deviation": own and own[0],
                "seeds": len(group.values(name)),
                "difference": off and off[0],
                "beyond_seeds": off and off[1],
            }
        first = group.runs[0]
        options = {name: first.options[name] for name in differing(groups)}
        runs = [{"run": str(run.folder), "seed": run.seed, "status": run.status} for run in group.runs]
        rows.append({"name": group.name, "runs": runs, "cache": first.cache, "options": options, "numbers": numbers})
    return {"groups": rows, "differs": differing(groups), "notes": caution(groups)}


def _table(groups: list[Group], shown: list[Group]) -> Table:
    shown = list({id(group): group for group in shown}.values())
    rows = [
        ("how it ended", *("\n".join(dict.fromkeys(run.status for run in group.runs)) for group in shown)),
        ("student", *(group.runs[0].student for group in shown)),
    ]
    rows += [(flag(option), *(group.runs[0].shown(option) for group in shown)) for option in differing(shown)]
    for name, measure in MEASURES.items():
        if any(group.mean(name) for group in shown):  # a count that is 0 everywhere tells nothing
            cells = [cell(groups, group, name) for group in shown]
            rows.append((measure.label, *(f"{own}\n{off}{' *' * far}" if off else own for own, off, far in cells)))
    return Table(("", *(f"{group.name}\n{group.seeds}" for group in shown)), rows, boxed=True)
