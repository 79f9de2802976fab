"""Draw the records of `gpu.py`, from their JSON alone: `python benchmarks/plot_gpu.py [RESULTS [FIGURES]]`.

One panel a section that has bars to show: tokens a second of training steps, the time of loss and gradients, fp8
against bf16, and the building of caches. Where there is no record nothing is drawn, and one line says so.
"""

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from plotting import paths
from report_gpu import RESULTS, numbers, records

FIGURES = RESULTS.parents[1] / "figures"
PANELS = (
    ("step", "2048.tokens_a_second", "training step, T = 2,048: tokens/s"),
    ("step", "8192.tokens_a_second", "training step, T = 8,192: tokens/s"),
    ("objective", "8192.seconds", "loss and gradients, N = 8,192: s"),
    ("objective", "32768.seconds", "loss and gradients, N = 32,768: s"),
    ("fp8", "1b.tokens_a_second", "1 B student: tokens/s"),
    ("fp8", "3b.tokens_a_second", "3 B student: tokens/s"),
    ("cache", "build-1b.tokens_a_second", "cache of a 1 B teacher: tokens/s"),
    ("cache", "build-8b.tokens_a_second", "cache of an 8 B teacher: tokens/s"),
)
BAR = "#0072B2"  # from the palette of Okabe and Ito


def draw(found: Mapping[str, dict[str, Any]], folder: Path) -> Path | None:
    """Write `gpu.png` into `folder`; where it is, or None where no record has anything to draw."""
    panels = []
    for section, place, title in PANELS:
        bars = numbers(found[section]["figures"], place) if section in found else []
        if bars:
            panels.append((title, {name.removeprefix(f"{place}."): value for name, value in bars}))
    if not panels:
        return None
    rows = (len(panels) + 1) // 2
    figure = Figure(figsize=(11, 2.6 * rows), layout="constrained")
    FigureCanvasAgg(figure)
    grid = figure.subplots(rows, 2, squeeze=False)
    for axes, panel in zip(grid.flat, panels, strict=False):
        _panel(axes, *panel)
    for axes in list(grid.flat)[len(panels) :]:
        axes.set_visible(False)
    figure.suptitle(", ".join(sorted({record["machine"]["device"] for record in found.values()})))
    folder.mkdir(parents=True, exist_ok=True)
    figure.savefig(folder / "gpu.png", dpi=130)
    return folder / "gpu.png"


def _panel(axes: Axes, title: str, bars: dict[str, float]) -> None:
    names = list(bars)[::-1]
    axes.barh(names, [bars[name] for name in names], color=BAR)
    axes.set_title(title, fontsize=9)
    axes.tick_params(labelsize=8)
    for row, name in enumerate(names):
        axes.text(bars[name], row, f" {bars[name]:,.4g}", va="center", fontsize=7)
    axes.margins(x=0.2)


def main(results: Path = RESULTS, figures: Path = FIGURES) -> int:
    """Draw, or say that there is nothing to draw."""
    picture = draw(records(results), figures)
    print(picture or f"{results} holds no record of a GPU: nothing is drawn; run benchmarks/gpu.py on one first")
    return 0


if __name__ == "__main__":
    sys.exit(main(*paths(__doc__, RESULTS.name)))
