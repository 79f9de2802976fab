"""The demo's pictures: learning curves, and calibration on the test split."""

import statistics
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from kdtrain.errors import writing
from kdtrain.files import published
from kdtrain.monitor.figures import BLUE, ORANGE, STYLE, curve, figure, finish, pooled, save

Record = dict[str, Any]
KINDS = {"cross-entropy": ORANGE, "distilled": BLUE}


def draw_demo(result: Record, folder: Path) -> list[Path]:
    """Write `demo-learning-curves.png` and `demo-calibration.png`."""
    return write_all(folder, demo_learning_curves=learning_curves(result), demo_calibration=calibration(result))


def learning_curves(result: Record) -> Figure:
    """Validation loss and KL to the teacher over the steps: a faint line a seed, a strong one for their mean."""
    made, [[loss, kl]] = figure(9.0, 3.6, 1, 2)
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
    return made


def calibration(result: Record) -> Figure:
    """Accuracy against confidence in 15 bins, all seeds together, and below it how many tokens lie in each bin."""
    made, [[diagram, share]] = figure(9.0, 3.8, 1, 2)
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
    return made


def write_all(folder: Path, dpi: int = 130, formats: tuple[str, ...] = ("png",), **figures: Figure) -> list[Path]:
    """Write NAME.png for each figure, or its other formats; where they are. RunError: they cannot be written."""
    with writing(folder):
        folder.mkdir(parents=True, exist_ok=True)
    paths = []
    for name, made in figures.items():
        for each in formats:
            paths.append(folder / f"{name.replace('_', '-')}.{each}")
            with published(paths[-1], "demo.picture") as path:
                save(made, path, dpi, each, salt=name)
    return paths
