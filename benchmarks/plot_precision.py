"""The picture of the precision study, drawn from its JSON record alone: losses above bf16, and the modes as bands.

`python benchmarks/plot_precision.py benchmarks/results/precision.json benchmarks/figures` draws it again.
"""

import json
import statistics
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from plotting import paths

QUANTIZED, LINE = "#E69F00", "#0072B2"  # from the palette of Okabe and Ito
SMOOTHED = 10


def draw(result: dict[str, Any], folder: Path) -> list[Path]:
    """Write `precision.png` into `folder`; where it is."""
    folder.mkdir(parents=True, exist_ok=True)
    kinds = [kind for kind in result["table"] if kind != "bf16"]
    rows = (len(kinds) + 2) // 3
    figure = Figure(figsize=(11, 2.3 * rows), layout="constrained")
    FigureCanvasAgg(figure)
    grid = figure.subplots(rows, 3, sharex=True, sharey=True, squeeze=False)
    for axes, kind in zip(grid.flat, kinds, strict=False):
        panel(axes, result, kind)
    for axes in list(grid.flat)[len(kinds) :]:
        axes.set_visible(False)
    figure.supxlabel("step")
    figure.supylabel("training loss above bf16, nats")
    figure.savefig(folder / "precision.png", dpi=130)
    return [folder / "precision.png"]


def panel(axes: Axes, result: dict[str, Any], kind: str) -> None:
    """One kind: each seed's loss above that of bf16, smoothed, over bands where the first seed was quantised."""
    high = {run["seed"]: run["loss"] for run in result["runs"] if run["kind"] == "bf16"}
    own = [run for run in result["runs"] if run["kind"] == kind]
    for start, end in bands(own[0]["quantized"]):
        axes.axvspan(start, end, color=QUANTIZED, alpha=0.25, linewidth=0)
    for run in own:
        above = [loss - other for loss, other in zip(run["loss"], high[run["seed"]], strict=True)]
        axes.plot(range(1, len(above) + 1), smoothed(above), color=LINE, linewidth=1.2, alpha=0.8)
    axes.axhline(0, color="black", linewidth=0.6)
    row = result["table"][kind]
    axes.set_title(f"{kind}: {row['above_bf16']:+.4f}, {row['quantized_share']:.0%} quantised", fontsize=9)


def bands(quantized: list[int]) -> list[tuple[float, float]]:
    """Where runs of quantised steps begin and end."""
    found: list[tuple[float, float]] = []
    for step, each in enumerate(quantized, 1):
        if each and found and found[-1][1] == step - 0.5:
            found[-1] = (found[-1][0], step + 0.5)
        elif each:
            found.append((step - 0.5, step + 0.5))
    return found


def smoothed(values: list[float]) -> list[float]:
    """The mean of each value and those before it, as many as `SMOOTHED`."""
    return [statistics.mean(values[max(end - SMOOTHED, 0) : end]) for end in range(1, len(values) + 1)]


if __name__ == "__main__":
    record, folder = paths(__doc__, "precision.json")
    draw(json.loads(record.read_text()), folder)
