"""Results on stdout: a table of two columns, a page, or one JSON object; and numbers as people write them."""

import json
import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from kdtrain.errors import printable
from kdtrain.process import is_main


def show(title: str, table: Mapping[str, Any], as_json: bool) -> None:
    """Print a result on stdout, on rank 0: a table of two columns, or one JSON object."""
    if not is_main():
        return
    if as_json:
        print(json.dumps(finite(dict(table))))
        return
    shown = Table(title=literal(title, "table.title"), show_header=False, title_justify="left")
    shown.add_column()
    shown.add_column(overflow="fold")
    for name, value in table.items():
        shown.add_row(literal(name), literal(_text(value)))
    Console(soft_wrap=True).print(shown)


def show_page(parts: Iterable[str | Table], wrapped: bool = False) -> None:
    """Print lines and tables one below the other on stdout, on rank 0.

    wrapped: break long lines between words where stdout is a terminal; commands to copy must not be broken.
    """
    if is_main():
        console = Console(soft_wrap=True)
        for part in parts:
            whole = not (wrapped and isinstance(part, str) and console.is_terminal)
            console.print(literal(part) if isinstance(part, str) else part, soft_wrap=whole)


def columns(header: Sequence[str], rows: Iterable[Sequence[Any]], left: Collection[str] = ()) -> Table:
    """A table without lines; numbers as people write them.

    left: the columns of text; the others are aligned at their right.
    """
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
    for name in header:
        text = name in left
        folds = text and name == header[-1]
        table.add_column(literal(name), justify="left" if text else "right", no_wrap=not folds, overflow="fold")
    for row in rows:
        table.add_row(*(literal(each if isinstance(each, str) else _text(each, True)) for each in row))
    return table


def number(value: Any) -> str:
    """A number with the digits that count, four at most: 16,384, 5.924, 0.0291, 3e-05; `-` for what is none."""
    if not isinstance(value, int | float) or isinstance(value, bool):
        return "-"
    if isinstance(value, int) or (value.is_integer() and abs(value) < 1e12):
        return f"{value:,.0f}" if abs(value) < 1e12 else f"{float(max(min(value, 10**300), -(10**300))):.4g}"
    return f"{value:,.0f}" if 1e3 <= abs(value) < 1e12 else f"{value:.2g}" if abs(value) < 1e-3 else f"{value:.4g}"


def percent(share: Any) -> str:
    """A share as people write it: 74.86 %."""
    return f"{100 * share:.4g} %" if isinstance(share, int | float) else "-"


def short(value: float) -> str:
    """A count with its prefix: 12.2k, 1.05 M."""
    prefix = ""
    for prefix in ("", "k", " M", " G"):
        if abs(value) < 999.5 or prefix == " G":
            break
        value /= 1000
    digits = {"": 0, "k": 1}.get(prefix, 2) if abs(value) < 100 else 0
    return f"{value:.{digits}f}{prefix}"


def size(mib: Any) -> str:
    """MiB as people write them: 0.2 MiB, 12 MiB, 3.4 GiB."""
    if not isinstance(mib, int | float):
        return "-"
    value, unit = (mib * 1024, "KiB") if 0 < mib < 0.1 else (mib, "MiB") if mib < 1000 else (mib / 1024, "GiB")
    return f"{value:.{0 if value >= 10 or value == int(value) else 1}f} {unit}"


def duration(seconds: Any) -> str:
    """Seconds as people write them: 0:09, 12:31, 2 h 05, 3 d 04 h; `-` for what is none."""
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
    """`value` as a cell: one line for each entry at the outer level, a single line inside."""
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
