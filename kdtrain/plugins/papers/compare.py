"""`kdtrain compare`: runs side by side, marking differences beyond the spread over seeds."""

import csv
import itertools
import re
import sys
import textwrap
from collections.abc import Collection, Iterable, Iterator
from typing import Any

from kdtrain.config.values import Printed
from kdtrain.errors import UsageError, printable
from kdtrain.plugins.papers import CompareConfig
from kdtrain.plugins.papers.groups import (
    Group,
    best_of,
    caution,
    cell,
    difference,
    differing,
    full_table,
    notes,
    outcome,
    read_groups,
    shown,
)
from kdtrain.plugins.papers.runs import MEASURES
from kdtrain.tables import Table


def main(config: CompareConfig) -> int:
    """Print the table.

    Raises:
        UsageError: a folder is not a run, or a column has no such name.
    """
    for name in config.columns:
        if name not in MEASURES:
            raise UsageError(f"--columns {name} is none of {', '.join(MEASURES)}")
    groups = read_groups(config.runs)
    if config.json or config.format == "text":
        compare(groups, config, config.columns or tuple(MEASURES), config.digits, config.transpose)
    elif config.format == "csv":
        csv.writer(sys.stdout).writerows(csv_rows(groups, config.columns))  # RFC 4180
    else:
        table = paper_table(groups, config.columns, config.digits)
        below = paper_notes(groups, bool(table.bold))
        table = table if config.transpose else table.transposed()
        tex = config.format == "latex"
        print("\n".join(latex(table, below, config.caption, config.label) if tex else [*table.markdown(), "", *below]))
    return 0


def compare(
    groups: list[Group],
    config: Printed,
    names: Collection[str] = tuple(MEASURES),
    digits: int = 4,
    transpose: bool = False,
) -> None:
    """Print the comparison of the numbers `names`. config: of the command that prints it."""
    table = full_table(groups, names, digits)
    table = table.transposed() if transpose else table
    config.show([table, "", *outcome(groups), *notes(groups)], as_record(groups, names))


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
    """Return the comparison as one record; losses in nats per token, times in seconds."""
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
    """Yield a header and one row a group: the differing options, and mean, deviation and difference of each number.

    Cells without a value are empty, and numbers have all their digits. A text that a spreadsheet would run gets an
    apostrophe before it.
    """
    options = differing(groups)
    every = names or [name for name in MEASURES if any(group.values(name) for group in groups)]
    parts = {name: [*(_numbers_of(groups[0], groups, name))] if MEASURES[name].best else ["mean"] for name in every}
    yield ["name", *options, "kl_estimator", *(f"{name}_{part}" for name, each in parts.items() for part in each)]
    for group in groups:
        numbers = {name: _numbers_of(group, groups, name) for name in every}
        run = group.runs[0]
        values = {name: run.options[name] for name in options}
        first = [shown(run, name) if isinstance(value, str | list) else value for name, value in values.items()]
        found = (numbers[name][part] for name, each in parts.items() for part in each)
        row = [group.name, *first, run.estimator, *found]
        yield [f"'{each}" if isinstance(each, str) and each.startswith(("=", "+", "-", "@")) else each for each in row]


def paper_table(groups: list[Group], names: Collection[str], digits: int) -> Table:
    """Build the table of a paper: a row a number, a column a group and one of the teacher; the best is bold.

    It is bold only where seeds do not explain the difference. The teacher has a number where it is the same beside each
    run. Without `names` the numbers are those by which students are judged, of the test alone if there are any of it.
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
    """Yield the lines below a paper's table: seeds, marks, and what to be careful about."""
    seeds = dict.fromkeys(printable(str(run.seed)) for each in groups for run in each.runs)
    yield ("mean ± standard deviation over seeds " if len(seeds) > 1 else "seed ") + ", ".join(seeds)
    if bold:
        others = len(groups) - 1
        corrected = f", corrected for {others} comparisons (Bonferroni)" if others > 1 else ""
        yield f"bold: better than each other by more than the 95 % interval of runs with the same seed{corrected}"
    yield from caution(groups)


def latex(table: Table, notes: Iterable[str], caption: str | None, label: str | None) -> Iterator[str]:
    """Yield the lines of a table in LaTeX, with the rules of its package booktabs, and of the notes below it.

    With a caption, which is LaTeX, it floats.
    """
    if caption:
        yield rf"\begin{{table}}\centering\caption{{{caption}}}" + (rf"\label{{{label}}}" if label else "")
    kinds = ("l" if name in table.left or not place else "r" for place, name in enumerate(table.header))
    yield rf"{{\footnotesize\noindent\begin{{tabular}}{{@{{}}{''.join(kinds)}@{{}}}}"
    yield r"\toprule"
    folded = (textwrap.wrap(each, 16) for each in table.header)  # a mean with its deviation is as wide
    heads = [*itertools.zip_longest(*folded, fillvalue="")]
    for place, row in enumerate([*heads, *table.rows], start=-len(heads)):
        if place == 0:
            yield r"\midrule"
        cells = (latex_text(each) for each in row)
        bold = (rf"\textbf{{{each}}}" if (place, at) in table.bold else each for at, each in enumerate(cells))
        yield " & ".join(bold) + r" \\"
    yield r"\bottomrule"
    yield r"\end{tabular}\par\raggedright\smallskip"
    yield from (rf"{latex_text(each)}\par" for each in notes)
    yield "}"
    if caption:
        yield r"\end{table}"


_LATEX = {each: rf"\{each}" for each in "&%$#_{}"} | {
    "\\": r"\textbackslash{}",
    "~": r"\textasciitilde{}",
    "^": r"\textasciicircum{}",
    "<": r"\textless{}",
    ">": r"\textgreater{}",
    "|": r"\textbar{}",
    '"': r"\textquotedbl{}",
    "±": r"$\pm$",
    "↓": r"$\downarrow$",
    "↑": r"$\uparrow$",
    "[": "{[}",  # an argument of the \\ before
    "*": "{*}",
    "/": r"/\allowbreak{}",
    "α": r"$\alpha$",
    "β": r"$\beta$",
}


def latex_text(value: Any) -> str:
    """Escape a text by a stranger for LaTeX: one line, without special signs; what pdflatex does not know becomes ?."""
    text = "" if value is None else printable(str(value))[:500]
    known = (_LATEX.get(each) or (each if " " <= each <= "~" or "À" <= each <= "ÿ" else "?") for each in text)
    return "".join(known)
