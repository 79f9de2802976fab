"""The table that all results are shown in, its renderers, and numbers as people write them.

A `Table` is text in rows. `show_page` draws it on a terminal, `markdown` writes it into a card, and a plugin makes
LaTeX or HTML of the rows. Facts are tables of two columns, label and value (`facts_table`). Cells may
come from strangers: each renderer escapes them.
"""

import json
import math
import re
import statistics
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.cells import cell_len
from rich.console import Console
from rich.table import Table as RichTable
from rich.text import Text

from kdtrain.errors import printable
from kdtrain.process import is_main

_FOLDED = 20
"""Columns of a terminal that a column of text has at least; with less a table is shown in parts."""


@dataclass(frozen=True)
class Table:
    """Rows of text below a header."""

    header: Sequence[str]
    """Empty names: a table of facts."""
    rows: Sequence[Sequence[str]]
    left: Collection[str] = ()
    """The columns of text; those of numbers are aligned at their right."""
    bold: Collection[tuple[int, int]] = ()
    """Rows and columns of cells that stand out."""
    kept: int = 1
    """Columns that are repeated where the table is too wide for a terminal, and is shown in parts."""

    @classmethod
    def of(cls, header: Sequence[str], rows: Iterable[Sequence[Any]], left: Collection[str] = ()) -> "Table":
        """Return a table of anything; numbers as people write them."""
        cells = [[each if isinstance(each, str) else _text(each, True) for each in row] for row in rows]
        return cls(header, cells, left)

    def transposed(self) -> "Table":
        """Return the table with its rows as columns."""
        header, *rows = zip(self.header, *self.rows, strict=True)
        return Table(header, rows, header[:1], {(at - 1, row + 1) for row, at in self.bold})

    def drawn(self, width: int) -> Iterator[RichTable]:
        """Yield the table for a terminal; as several with the same first columns where it is wider than `width`.

        A last column of text may be broken, and each where all are; a number is never cut.
        """
        texts = [name in self.left for name in self.header]
        folds = [all(texts) or (text and place == len(texts) - 1) for place, text in enumerate(texts)]
        cells = [(name, *column) for name, *column in zip(self.header, *self.rows, strict=True)]
        longest = (max(cell_len(line) for each in column for line in each.split("\n")) for column in cells)
        least = [min(size, _FOLDED) if fold else size for size, fold in zip(longest, folds, strict=True)]
        parts = [[*range(self.kept)]]
        for place in range(self.kept, len(texts)):
            if len(parts[-1]) > self.kept and sum(least[each] + 2 for each in [*parts[-1], place]) > width + 2:
                parts.append([*range(self.kept)])
            parts[-1].append(place)
        for part in parts:
            drawn = RichTable(box=None, pad_edge=False, padding=(0, 2, 0, 0), show_header=any(self.header))
            for each in part:
                look: Any = {
                    "justify": "left" if texts[each] else "right",
                    "no_wrap": not folds[each],
                    "overflow": "fold",
                }
                drawn.add_column(literal(self.header[each]), header_style="bold", min_width=least[each], **look)
            for row, line in enumerate(self.rows):
                drawn.add_row(*(literal(line[each], "bold" if (row, each) in self.bold else "") for each in part))
            yield drawn

    def markdown(self) -> Iterator[str]:
        """Yield the lines of the table in Markdown."""
        yield "|" + "|".join(f" {markdown_text(name)} " if name else " " for name in self.header) + "|"
        yield "|---" * len(self.header) + "|"
        for place, row in enumerate(self.rows):
            cells = enumerate(markdown_text(each) for each in row)
            yield f"| {' | '.join(f'**{each}**' if (place, at) in self.bold else each for at, each in cells)} |"


Part = str | Table
"""A line of a page, or a table."""


def facts_table(facts: Mapping[str, str]) -> Table:
    """Return a table of facts, a row each."""
    return Table(("", ""), list(facts.items()), ("",))


def show(page: str | Iterable[Part], record: Mapping[str, Any], as_json: bool, wrapped: bool = False) -> None:
    """Print a result on stdout, on rank 0: one JSON object, or a page; a title alone precedes the record as facts."""
    if as_json and is_main():
        print(json.dumps(finite(dict(record))))
    elif not as_json:
        facts = facts_table({str(name): _text(value) for name, value in record.items()})
        show_page([page, "", facts] if isinstance(page, str) else page, wrapped)


def show_page(parts: Iterable[Part], wrapped: bool = False) -> None:
    """Print lines and tables one below the other on stdout, on rank 0; nothing if a part cannot be made.

    wrapped: break long lines between words where stdout is a terminal; commands to copy must not be broken.
    """
    if is_main():
        console = Console(soft_wrap=True)
        for part in [*parts]:
            if isinstance(part, str):
                console.print(literal(part), soft_wrap=not (wrapped and console.is_terminal))
            else:
                for place, table in enumerate(part.drawn(console.width)):
                    shown = ("", table) if place else (table,)
                    console.print(*shown, sep="\n", soft_wrap=True)


def markdown_text(value: Any) -> str:
    """Return a stranger's text for Markdown: one line, the signs of Markdown and HTML escaped."""
    text = "" if value is None else printable(str(value))[:500]
    return re.sub(r"([\\|<>`\[\]])", r"\\\1", text)


MAD_FACTOR = 6 * 1.4826
"""Factor on the MAD: six standard deviations of normal noise."""


def median_and_mad(values: Sequence[float]) -> tuple[float, float]:
    """Return the median of `values`, and the median distance from it (MAD)."""
    median = statistics.median(values)
    return median, statistics.median(abs(each - median) for each in values)


def number(value: Any) -> str:
    """Return a number with the digits that count, four at most: 16,384, 5.924, 0.0291, 3e-05; `-` for anything else."""
    if not isinstance(value, int | float) or isinstance(value, bool):
        return "-"
    if isinstance(value, int) or (value.is_integer() and abs(value) < 1e12):
        return f"{value:,.0f}" if abs(value) < 1e12 else f"{float(max(min(value, 10**300), -(10**300))):.4g}"
    if 1e3 <= abs(value) < 1e12:
        return f"{value:,.0f}"
    return f"{value:.2g}" if abs(value) < 1e-3 else f"{value:.4g}"


LONG = 1e5
"""The least loss that is written as a number, without digits after the point."""


def loss_text(loss: Any, digits: int = 3) -> str:
    """Return a loss with `digits` digits, aligned with others; a large one as a number."""
    return f"{loss:.{digits}f}" if isinstance(loss, int | float) and abs(loss) < LONG else number(loss)


def counted(count: int, thing: str) -> str:
    """Return a count of things: 1 token, 1,024 tokens."""
    return f"{count:,} {thing}{'' if count == 1 else 's'}"


def percent(share: Any) -> str:
    """Return a share as people write it: 74.86 %."""
    return f"{100 * share:.4g} %" if isinstance(share, int | float) else "-"


def short(value: float) -> str:
    """Return a count with its prefix: 12.2k, 1.05 M."""
    prefix = ""
    for prefix in ("", "k", " M", " G"):
        if abs(value) < 999.5 or prefix == " G":
            break
        value /= 1000
    digits = {"": 0, "k": 1}.get(prefix, 2) if abs(value) < 100 else 0
    return f"{value:.{digits}f}{prefix}"


def size(mib: Any) -> str:
    """Return MiB as people write them: 0.2 MiB, 12 MiB, 3.4 GiB."""
    if not isinstance(mib, int | float):
        return "-"
    if 0 < mib < 0.1:
        value = mib * 1024
        unit = "KiB"
    else:
        value, unit = (mib, "MiB") if mib < 1000 else (mib / 1024, "GiB")
    return f"{value:.{0 if value >= 10 or value == int(value) else 1}f} {unit}"


def duration(seconds: Any) -> str:
    """Return seconds as people write them: 0:09, 12:31, 2 h 05, 3 d 04 h; `-` for anything else."""
    if not isinstance(seconds, int | float) or not 0 <= seconds < 1e10:
        return "-"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes}:{rest:02d}"
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes:02d}" if hours < 48 else f"{hours // 24} d {hours % 24:02d} h"


def literal(text: str, style: str = "") -> Text:
    """Return `text` for a table without control characters and without markup, which rich would interpret."""
    return Text("\n".join(map(printable, text.split("\n"))), style)


def _text(value: Any, inner: bool = False) -> str:
    """Return `value` as a cell: one line for each entry at the outer level, a single line inside."""
    if isinstance(value, Mapping):
        entries = [f"{name}{' ' if inner else ': '}{_text(each, True)}" for name, each in value.items()]
        return f"({', '.join(entries)})" if inner else "\n".join(entries)
    if isinstance(value, list | tuple):
        return (", " if inner else "\n").join(_text(each, True) for each in value) or "none"
    if value is None or isinstance(value, bool):
        return {None: "-", True: "yes", False: "no"}[value]
    return number(value) if isinstance(value, int | float) else str(value)


def finite(value: Any) -> Any:
    """Return `value` with null for each non-finite number, which JSON does not have."""
    if isinstance(value, dict):
        return {name: finite(inner) for name, inner in value.items()}
    if isinstance(value, list | tuple):
        return [finite(inner) for inner in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return str(value) if isinstance(value, Path) else value
