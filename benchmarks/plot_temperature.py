"""The picture of the temperature benchmark, drawn from its JSON record alone: T^2 KL against T, and where T goes.

`python benchmarks/plot_temperature.py benchmarks/results/temperature.json benchmarks/figures` draws it again;
`benchmarks/temperature.py` makes the record.
"""

import json
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from plotting import paths

# from the palette of Okabe and Ito, which people with any colour vision can tell apart
COLORS = {"minimize": "#D55E00", "adversarial": "#0072B2", "likelihood": "#009E73"}
SHADES = ("#999999", "#56B4E9", "#000000")


def draw(record: dict[str, Any], folder: Path) -> Path:
    """Write `temperature.png` into `folder`; where it is. Curves, then paths beside a still and a learning student."""
    folder.mkdir(parents=True, exist_ok=True)
    figure = Figure(figsize=(13, 4.8), layout="constrained")
    curves, frozen, training = figure.subplots(1, 3)
    _curves(curves, record)
    for axes, name, title in (
        (frozen, "frozen", "T alone, the student stands still"),
        (training, "training", "T and student, by the command"),
    ):
        _paths(axes, record[name], record["settings"]["bounds"])
        axes.set_title(title, loc="left", fontsize=10)
    figure.savefig(folder / "temperature.png", dpi=110)
    return folder / "temperature.png"


def _curves(axes: Axes, record: dict[str, Any]) -> None:
    shown = [each for each in record["curves"] if each["divergence"] == "forward-kl"]
    steps = sorted({each["step"] for each in shown})
    for each in shown:
        color, style = SHADES[steps.index(each["step"])], "-" if each["targets"] == "cache" else ":"
        label = f"student after {each['step']} steps" if each["targets"] == "cache" else None
        axes.plot(record["settings"]["grid"], each["loss"], color=color, linestyle=style, label=label)
    axes.plot([], [], color="black", linestyle=":", label="whole distribution instead of head + tail")
    axes.axvspan(*record["settings"]["bounds"], color="#F0E442", alpha=0.2, label="bounds of T")
    axes.set(xscale="log", xlabel="temperature T", ylabel="T² KL(teacher, student), nats a token")
    axes.set_xticks([0.25, 0.5, 1, 2, 4, 8, 16], ["¼", "½", "1", "2", "4", "8", "16"], minor=False)
    axes.minorticks_off()
    axes.set_title("the hump that T climbs or flees", loc="left", fontsize=10)
    axes.legend(fontsize=7, ncols=2, loc="upper center", bbox_to_anchor=(0.5, -0.12))


def _paths(axes: Axes, paths: list[dict[str, Any]], bounds: list[float]) -> None:
    for each in paths:
        axes.plot(each["T"], color=COLORS[each["mode"]], linewidth=1.2, alpha=0.9)
    for mode, color in COLORS.items():
        axes.plot([], [], color=color, label=mode)
    for bound in bounds:
        axes.axhline(bound, color="black", linestyle=":", linewidth=1)
    axes.set(yscale="log", xlabel="step", ylabel="T")
    axes.set_yticks([bounds[0], 1, 1.5, 2, 3, 4], ["2/3", "1", "1.5", "2", "3", "4"], minor=False)
    axes.minorticks_off()
    axes.legend(fontsize=7, ncols=3, loc="upper center", bbox_to_anchor=(0.5, -0.12))


if __name__ == "__main__":
    record, folder = paths(__doc__, "temperature.json")
    print(draw(json.loads(record.read_text()), folder))
