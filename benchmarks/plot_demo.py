"""The two pictures of the demo, drawn from its JSON record alone: learning curves, and a calibration diagram.

`python benchmarks/plot_demo.py benchmarks/results/demo.json benchmarks/figures` draws them again. They are
made without pyplot, by matplotlib's Agg renderer, which needs no screen.
"""

import json
import statistics
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from plotting import paths

# from the palette of Okabe and Ito, which people with any colour vision can tell apart
COLORS = {"cross-entropy": "#D55E00", "distilled": "#0072B2"}
STYLE: dict[str, Any] = {"linewidth": 1.8}


def draw(result: dict[str, Any], folder: Path) -> list[Path]:
    """Write `demo-learning-curves.png` and `demo-calibration.png` into `folder`; where they are."""
    folder.mkdir(parents=True, exist_ok=True)
    figures = {"demo-learning-curves.png": learning_curves(result), "demo-calibration.png": calibration(result)}
    for name, figure in figures.items():
        figure.savefig(folder / name, dpi=130)
    return [folder / name for name in figures]


def learning_curves(result: dict[str, Any]) -> Figure:
    """Validation loss and KL to the teacher over the steps: a faint line a seed, a strong one for their mean."""
    figure, (loss, kl) = _figure(9.0, 3.6, 2)
    for kind, color in COLORS.items():
        curves = [run["validation"] for run in result["runs"] if run["student"] == kind]
        for axes, name in ((loss, "loss"), (kl, "kl")):
            _curve(axes, [_after_start(each, name) for each in curves], color, kind)
    of_teacher = result["runs"][0]["validation"]["teacher_loss"][-1]
    loss.axhline(of_teacher, color="black", linestyle=":", linewidth=1.2, label="the teacher")
    _finish(loss, "Validation loss", "step", "nats a token")
    _finish(kl, "KL to the teacher", "step", "nats a token")
    return figure


def calibration(result: dict[str, Any]) -> Figure:
    """Accuracy against confidence in 15 bins, all seeds together, and below it how many tokens lie in each bin."""
    figure, (diagram, share) = _figure(9.0, 3.8, 2)
    diagram.plot([0, 1], [0, 1], color="black", linestyle=":", linewidth=1.2, label="perfect calibration")
    for kind, color in COLORS.items():
        runs = [run for run in result["runs"] if run["student"] == kind]
        bins = pooled([run["calibration"] for run in runs])
        ece = statistics.mean(run["test"]["ece"] for run in runs)
        filled = [each for each in bins if each["tokens"] > 0]
        points = [[each[name] for each in filled] for name in ("confidence", "accuracy")]
        diagram.plot(*points, color=color, marker="o", markersize=4, label=f"{kind}, ECE {ece:.2%}", **STYLE)
        total = sum(each["tokens"] for each in bins)
        centres = [(number + 0.5) / len(bins) for number in range(len(bins))]
        share.plot(centres, [100 * each["tokens"] / total for each in bins], color=color, label=kind, **STYLE)
    _finish(diagram, "Calibration on the test split", "the student's confidence", "share that is right")
    _finish(share, "How sure it is", "the student's confidence", "% of tokens")
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


def _after_start(curves: dict[str, list[Any]], name: str) -> list[tuple[int, float]]:
    """The points of one curve; the untrained student's is left out, because it would flatten all others."""
    return [
        (step, value)
        for step, value in zip(curves["step"], curves[name], strict=True)
        if step > 0 and value is not None
    ]


def _curve(axes: Axes, seeds: list[list[tuple[int, float]]], color: str, label: str) -> None:
    for points in seeds if len(seeds) > 1 else []:
        axes.plot(*zip(*points, strict=True), color=color, linewidth=0.8, alpha=0.45)
    at = [dict(points) for points in seeds]
    steps = sorted(set.intersection(*(set(each) for each in at)))
    means = [statistics.mean(each[step] for each in at) for step in steps]
    axes.plot(steps, means, color=color, label=label, marker="o" if len(steps) < 3 else None, **STYLE)


def _figure(width: float, height: float, panels: int) -> tuple[Figure, Any]:
    figure = Figure(figsize=(width, height), layout="constrained")
    return figure, figure.subplots(1, panels)


def _finish(axes: Axes, title: str, x: str, y: str) -> None:
    axes.set_title(title, fontsize=11)
    axes.set_xlabel(x)
    axes.set_ylabel(y)
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, fontsize=9)


if __name__ == "__main__":
    record, folder = paths(__doc__, "demo.json")
    for picture in draw(json.loads(record.read_text()), folder):
        print(picture)
