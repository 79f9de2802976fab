"""The demo's pictures: learning curves, and calibration on the test split.

Drawn without pyplot, by matplotlib's Agg renderer, which needs no screen. Colours are from the palette of Okabe and
Ito, which people with any colour vision can tell apart.
"""

import statistics
from pathlib import Path
from typing import Any

from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure

BLUE, ORANGE = "#0072B2", "#D55E00"
Record = dict[str, Any]
KINDS = {"cross-entropy": ORANGE, "distilled": BLUE}
STYLE: dict[str, Any] = {"linewidth": 1.8}


def draw_demo(result: Record, folder: Path) -> list[Path]:
    """Write `demo-learning-curves.png` and `demo-calibration.png`."""
    return save(folder, demo_learning_curves=learning_curves(result), demo_calibration=calibration(result))


def learning_curves(result: Record) -> Figure:
    """Validation loss and KL to the teacher over the steps: a faint line a seed, a strong one for their mean."""
    figure, [[loss, kl]] = new_figure(9.0, 3.6, 1, 2)
    for kind, color in KINDS.items():
        curves = [run["validation"] for run in result["runs"] if run["student"] == kind]
        for axes, name in ((loss, "loss"), (kl, "kl")):
            # the untrained student's point is left out, because it would flatten all others
            points = [zip(each["step"][1:], each[name][1:], strict=True) for each in curves]
            curve(axes, [[point for point in each if point[1] is not None] for each in points], color, kind)
    of_teacher = result["runs"][0]["validation"]["teacher_loss"][-1]
    loss.axhline(of_teacher, color="black", linestyle=":", linewidth=1.2, label="the teacher")
    finish(loss, "Validation loss", "step", "nats a token")
    finish(kl, "KL to the teacher", "step", "nats a token")
    return figure


def calibration(result: Record) -> Figure:
    """Accuracy against confidence in 15 bins, all seeds together, and below it how many tokens lie in each bin."""
    figure, [[diagram, share]] = new_figure(9.0, 3.8, 1, 2)
    diagram.plot([0, 1], [0, 1], color="black", linestyle=":", linewidth=1.2, label="perfect calibration")
    for kind, color in KINDS.items():
        runs = [run for run in result["runs"] if run["student"] == kind]
        bins = pooled([run["calibration"] for run in runs])
        ece = statistics.mean(run["test"]["ece"] for run in runs)
        filled = [each for each in bins if each["tokens"] > 0]
        points = [[each[name] for each in filled] for name in ("confidence", "accuracy")]
        diagram.plot(*points, color=color, marker="o", markersize=4, label=f"{kind}, ECE {ece:.2%}", **STYLE)
        total = sum(each["tokens"] for each in bins)
        centres = [(number + 0.5) / len(bins) for number in range(len(bins))]
        share.plot(centres, [100 * each["tokens"] / total for each in bins], color=color, label=kind, **STYLE)
    finish(diagram, "Calibration on the test split", "the student's confidence", "share that is right")
    finish(share, "How sure it is", "the student's confidence", "% of tokens")
    return figure


def pooled(diagrams: list[list[dict[str, float]]]) -> list[dict[str, float]]:
    """One diagram of several: tokens added up, confidence and accuracy weighted by them."""
    result = []
    for bins in zip(*diagrams, strict=True):
        tokens = sum(each["tokens"] for each in bins)
        means = {
            name: sum(each["tokens"] * each[name] for each in bins) / max(tokens, 1)
            for name in ("confidence", "accuracy")
        }
        result.append({"tokens": tokens, **means})
    return result


def curve(axes: Axes, seeds: list[list[tuple[int, float]]], color: str, label: str) -> None:
    """Draw a faint line for each seed, where there are several, and a strong one for their mean."""
    for points in seeds if len(seeds) > 1 else []:
        axes.plot(*zip(*points, strict=True), color=color, linewidth=0.8, alpha=0.45)
    at = [dict(points) for points in seeds]
    means = {n: statistics.mean(each[n] for each in at) for n in sorted(set.intersection(*map(set, at)))}
    marker = "o" if len(means) < 3 else None
    axes.plot(*zip(*means.items(), strict=True), color=color, label=label, marker=marker, **STYLE)


def finish(axes: Axes, title: str, x: str, y: str) -> None:
    """Set title, labels and grid, and a legend where lines have labels."""
    axes.set_title(title, fontsize=11)
    axes.set_xlabel(x)
    axes.set_ylabel(y)
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
    if axes.get_legend_handles_labels()[0]:
        axes.legend(frameon=False, fontsize=9)


def save(folder: Path, dpi: int = 130, formats: tuple[str, ...] = ("png",), **figures: Figure) -> list[Path]:
    """Write NAME.png for each figure, or its other formats; where they are."""
    folder.mkdir(parents=True, exist_ok=True)
    paths = []
    for name, figure in figures.items():
        for each in formats:
            paths.append(folder / f"{name.replace('_', '-')}.{each}")
            # without a date and with fixed names an SVG is the same at each drawing
            with rc_context({"svg.hashsalt": name}):
                figure.savefig(paths[-1], dpi=dpi, metadata={"Date": None} if each == "svg" else None)
    return paths


def new_figure(width: float, height: float, rows: int, columns: int, **shared: Any) -> tuple[Figure, Any]:
    """A figure of width and height in inches, and its axes [rows][columns]."""
    figure = Figure(figsize=(width, height), layout="constrained")
    return figure, figure.subplots(rows, columns, squeeze=False, **shared)
