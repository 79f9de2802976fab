"""`kdtrain compare`: runs side by side, with what the luck of a seed may explain told from what it does not."""

import json
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from kdtrain.config import CompareConfig
from kdtrain.config.values import flag
from kdtrain.monitor.runs import MEASURES, Group, caution, difference, differing, grouped, read_runs, spread
from kdtrain.tables import finite, literal


def main(config: CompareConfig) -> int:
    """Print the table.

    Raises:
        UsageError: a folder is not a run.
    """
    groups = grouped(read_runs(config.runs))
    if config.json:
        print(json.dumps(finite(as_record(groups))))
        return 0
    console = Console()
    # each table repeats the first run, which the others are compared with; a column has 20 characters at least
    columns = max(1, (console.width - 30) // 20 - 1)
    for start in range(1, max(len(groups), 2), columns):
        console.print(_table(groups, [groups[0], *groups[start : start + columns]]))
    for note in notes(groups):
        console.print(literal(note), soft_wrap=True)
    return 0


def cell(groups: list[Group], group: Group, name: str) -> tuple[str, str, bool]:
    """A number of a group: its mean with the deviation over seeds, how far it is from the first group, and whether
    that is beyond what seeds explain."""
    mean, values, measure = group.mean(name), group.values(name), MEASURES[name]
    if mean is None:
        return "-", "", False
    shown = measure.text(mean)
    if len(values) > 1 and measure.tested and (own := spread([group], name)) is not None:
        shown += f" ± {measure.text(own[0])}"
    off = difference(groups, group, name)
    if off is None or not measure.tested:
        return shown, "", False
    return shown, f"{'+' if off[0] >= 0 else '-'}{measure.text(abs(off[0]))}", bool(off[1])


def notes(groups: list[Group]) -> list[str]:
    """The lines below a table: what a mark means, and what to be careful about."""
    marked = "* beyond what the seeds explain (t test at 95 %, deviation pooled over the runs with several seeds)"
    tested = spread(groups, "last_validation_loss") is not None and len(groups) > 1
    return [*([marked] if tested else []), *caution(groups)]


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
    table = Table(show_header=True, header_style="bold", title_justify="left")
    table.add_column()
    for group in shown:
        table.add_column(literal(f"{group.name}\n{group.seeds}"), overflow="fold")
    options = differing(shown)
    ends = (dict.fromkeys(run.status for run in group.runs) for group in shown)
    table.add_row("how it ended", *(literal("\n".join(each)) for each in ends))
    table.add_row("student", *(literal(group.runs[0].student) for group in shown), end_section=not options)
    for option in options:
        table.add_row(
            flag(option), *(literal(group.runs[0].shown(option)) for group in shown), end_section=option == options[-1]
        )
    for name, measure in MEASURES.items():
        if any(group.mean(name) for group in shown):  # a count that is 0 everywhere tells nothing
            table.add_row(literal(measure.label), *(_cell(groups, group, name) for group in shown))
    return table


def _cell(groups: list[Group], group: Group, name: str) -> Text:
    shown, off, beyond = cell(groups, group, name)
    text = literal(shown)
    if off:
        text.append(f"\n{off}{' *' if beyond else ''}", "bold" if beyond else "dim")
    return text
