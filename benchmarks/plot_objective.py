"""The picture of the objective benchmark, drawn from its JSON record alone: time and memory of each side.

`python benchmarks/plot_objective.py benchmarks/results/objective.json benchmarks/figures` draws it again. It is
made without pyplot, by matplotlib's Agg renderer, which needs no screen.
"""

import json
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from plotting import paths

# from the palette of Okabe and Ito, which people with any colour vision can tell apart
OURS, THEIRS, FLOOR = "#0072B2", "#D55E00", "#999999"
REASONS = {"does_not_fit": "does not fit", "missing": "not installed"}


def draw(record: dict[str, Any], folder: Path) -> Path:
    """Write `objective.png` into `folder`; where it is. A row of pictures a shape and dtype: time, then memory."""
    folder.mkdir(parents=True, exist_ok=True)
    rows = record["rows"]
    figure = Figure(figsize=(11, 2.9 * len(rows)), layout="constrained")
    panels = figure.subplots(len(rows), 2, squeeze=False)
    for row, (time, memory) in zip(rows, panels, strict=True):
        title = f"{row['tokens']:,} tokens, width {row['width']:,}, vocabulary {row['vocabulary']:,}, {row['dtype']}"
        _bars(time, row["sides"], "seconds", 1e3, "ms")
        _bars(memory, row["sides"], "peak_mib", 1.0, "MiB")
        time.set_title(title, loc="left", fontsize=9)
    figure.savefig(folder / "objective.png", dpi=110)
    return folder / "objective.png"


def _bars(axes: Axes, sides: dict[str, Any], key: str, factor: float, unit: str) -> None:
    """A bar a side, from the top; a side without a number says why."""
    names = list(sides)
    for place, name in enumerate(names):
        value = sides[name].get(key)
        if value is None:
            why = next((text for key, text in REASONS.items() if key in sides[name]), "not measured")
            axes.text(0, place, f" {why}", va="center", fontsize=7)
            continue
        color = OURS if name.startswith("kdtrain") else FLOOR if name == "products" else THEIRS
        axes.barh(place, factor * value, color=color)
        axes.text(factor * value, place, f" {factor * value:,.0f}", va="center", fontsize=7)
    if base := sides.get("cross-entropy", {}).get(key):
        axes.axvline(factor * base, color="black", linestyle=":", linewidth=1)
    axes.set_yticks(range(len(names)), names, fontsize=7)
    axes.invert_yaxis()
    axes.set_xlabel(unit, fontsize=8)
    axes.margins(x=0.15)
    axes.spines[["top", "right"]].set_visible(False)


if __name__ == "__main__":
    record, folder = paths(__doc__, "objective.json")
    print(draw(json.loads(record.read_text()), folder))
