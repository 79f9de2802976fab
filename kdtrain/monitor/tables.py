"""Results on stdout: a table of two columns, or one JSON object."""

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from kdtrain.errors import printable
from kdtrain.ranks import is_main


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
    if isinstance(value, float):
        if abs(value) < 1e-3 or abs(value) >= 1e12:  # a perplexity may have 300 digits
            return f"{value:.4g}"
        return f"{value:,.4f}" if abs(value) < 1e5 else f"{value:,.0f}"
    if value is None or isinstance(value, bool):
        return {None: "-", True: "yes", False: "no"}[value]
    return f"{value:,}" if isinstance(value, int) else str(value)


def finite(value: Any) -> Any:
    """Return `value` with null for each non-finite number, which JSON does not have."""
    if isinstance(value, dict):
        return {name: finite(inner) for name, inner in value.items()}
    if isinstance(value, list | tuple):
        return [finite(inner) for inner in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return str(value) if isinstance(value, Path) else value
