"""Learning curves by matplotlib, for `kdtrain plot`, `kdtrain report` and the pictures of the benchmarks.

Everything is made without pyplot, by matplotlib's own renderers, which need no screen. Colours are from the palette of
Okabe and Ito, which people with any colour vision distinguish; markers and lines differ too, for print without
colour. Names of runs may be anyone's: none is read as a formula.
"""

import itertools
import math
import statistics
import warnings
from collections.abc import Mapping, Sequence
from typing import Any

from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import EngFormatter, MaxNLocator

from kdtrain.plugins.papers.groups import MARKS, Group, interventions
from kdtrain.plugins.papers.runs import LoggedRun

BLUE, ORANGE, GREEN, AMBER, YELLOW, SKY, GREY = (
    *("#0072B2", "#D55E00", "#009E73", "#E69F00", "#F0E442", "#56B4E9", "#999999"),
)
LOOKS = [(BLUE, "o", "-"), (ORANGE, "s", "--"), (GREEN, "^", "-."), ("#000000", "D", ":"), (SKY, "v", (0, (5, 1)))]
"""Colour, marker and line of the students of a picture, which differ without colour too."""
MORE = [("#CC79A7", "P", (0, (3, 1, 1, 1))), (AMBER, "X", (0, (1, 1))), (GREY, "*", (0, (8, 2, 2, 2)))]
"""The looks of further runs."""
STYLE: dict[str, Any] = {"linewidth": 1.8}
COLUMN = 3.5
"""Inches: the width of a column of text."""
MOST_POINTS = 400
"""Most points of a drawn curve; a longer one is drawn by the means of as many stretches."""

AXES = {"steps": "step", "tokens": "tokens", "minutes": "minutes of optimizer steps"}
NAMES = {"temperature": "T", "precision": "quantized"}
"""Other names of numbers of metrics.jsonl."""
TITLES = {
    "validation/loss": ("Validation loss", "nats per token"),
    "validation/kl": ("KL to the teacher, validation", "nats per token"),
    "validation/ece": ("Calibration error (ECE), validation", "share"),
    "validation/accuracy": ("Accuracy, validation", "share"),
    "validation/perplexity": ("Perplexity, validation", ""),
    "validation/bits_per_byte": ("Validation, bits per byte", "bits per byte"),
    "validation/teacher_loss": ("The teacher's validation loss", "nats per token"),
    "loss": ("Training loss", "nats per token"),
    "loss_avg": ("Training loss, average", "nats per token"),
    "ce": ("Cross-entropy, training", "nats per token"),
    "kd": ("Divergence, training", "nats per token"),
    "kd_T1": ("Divergence at T = 1, training", "nats per token"),
    "T": ("Temperature", "T"),
    "lr": ("Learning rate", ""),
    "grad_norm": ("Gradient norm before clipping", ""),
    "quantized": ("Precision", "1 is quantised"),
    "tok/s": ("Speed, average", "tokens/s"),
    "tok/s_last": ("Speed of a step", "tokens/s"),
    "data_wait_s": ("Waiting for data", "seconds per step"),
    "memory_resident_mb": ("Memory", "MiB"),
    "memory_allocated_mb": ("Memory of the GPU", "MiB"),
}
"""Title and unit of a panel."""


def figure(width: float, height: float, rows: int, columns: int, **shared: Any) -> tuple[Figure, Any]:
    """Make a figure of `width` x `height` inches, and return it with its axes as an array [rows, columns]."""
    made = Figure(figsize=(width, height), layout="constrained")
    return made, made.subplots(rows, columns, squeeze=False, **shared)


def save(made: Figure, path: Any, dpi: int = 130, kind: str = "png", salt: str = "", **more: Any) -> None:
    """Write a figure to a path or a binary file; the same figure gives the same bytes, in SVG and PDF too.

    salt: the names inside an SVG are made of it; different for figures of one page.
    """
    metadata: dict[str, Any] | None = {"svg": {"Date": None}, "pdf": {"CreationDate": None}}.get(kind)
    look: Any = {"svg.hashsalt": salt, **({"svg.fonttype": "none"} if more.pop("text", False) else {})}
    with rc_context(look), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Glyph")  # a name in a script that no font here has is drawn as boxes
        made.savefig(path, dpi=dpi, format=kind, metadata=metadata, **more)


def curve(axes: Axes, seeds: Sequence[Sequence[tuple[float, float]]], color: str, label: str, **look: Any) -> None:
    """Draw the curves of one setup: a faint line a seed, and a strong one for their mean where all have a value."""
    for points in seeds if len(seeds) > 1 else []:
        axes.plot(*zip(*points, strict=True), color=color, linewidth=0.8, alpha=0.45)
    at = [dict(points) for points in seeds]
    means = {n: statistics.mean(each[n] for each in at) for n in sorted(set.intersection(*map(set, at)))}
    strong = [list(means.items())] if means else seeds  # minutes of different seeds have no place in common
    look = {"marker": "o" if len(means) < 3 else None, **STYLE, **look}
    for number, points in enumerate(strong):
        axes.plot(*zip(*points, strict=True), color=color, label=None if number else label, **look)


def finish(axes: Axes, title: str, x: str, y: str) -> None:
    """Set the title, labels, grid and legend of a panel."""
    axes.set_title(title, fontsize=11)
    axes.set_xlabel(x)
    axes.set_ylabel(y)
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
    if axes.get_legend_handles_labels()[0]:
        axes.legend(frameon=False, fontsize=9)


def pooled(diagrams: Sequence[Sequence[Mapping[str, float]]]) -> list[dict[str, float]]:
    """Pool several calibration diagrams in one: add up tokens, and weight confidence and accuracy by them."""
    result: list[dict[str, float]] = []
    for bins in zip(*diagrams, strict=True):
        tokens = sum(each["tokens"] for each in bins)
        means = {
            name: sum(each["tokens"] * each[name] for each in bins) / max(tokens, 1)
            for name in ("confidence", "accuracy")
        }
        result.append({"tokens": tokens, **means})
    return result


# Runs ---------------------------------------------------------------------------------------------------------------


def looks(groups: Sequence[Group]) -> list[tuple[str, str, Any]]:
    """Return the colour, marker and line of each group."""
    return list(itertools.islice(itertools.cycle([*LOOKS, *MORE]), len(groups)))


def draw(groups: Sequence[Group], x: str, names: Sequence[str]) -> Figure:
    """Draw a panel for each number over tokens, steps or minutes, a column wide, with one legend below."""
    handles = legend_of(groups)
    columns = 2 if all(len(str(each.get_label())) <= 22 for each in handles) else 1
    height = 2.1 * len(names) + 0.35 + 0.16 * math.ceil(len(handles) / columns)
    made, panels = figure(COLUMN, height, len(names), 1, sharex=True)
    for axes, name in zip(panels[:, 0], names, strict=True):
        panel(axes, groups, x, name)
        if axes is not panels[-1, 0]:
            axes.set_xlabel("")
    look: dict[str, Any] = {"frameon": False, "fontsize": 8, "borderaxespad": 0, "handlelength": 3}
    made.legend(handles=handles, loc="outside lower left", ncols=columns, **look)
    return made


def rounds(runs: Sequence[LoggedRun]) -> Figure | None:
    """Draw how runs in rounds divided their time, up to the last round; return None if there is no such run."""
    parts = {"writing": BLUE, "scoring": ORANGE, "learning": GREEN}
    found = [[sum(each for _, each in run.record.curve(f"rollouts/{part}_s")) / 60 for part in parts] for run in runs]
    rows = [(literal(run.name, 20), minutes) for run, minutes in zip(runs, found, strict=True) if sum(minutes)]
    if not rows:
        return None
    made, [[axes]] = figure(COLUMN, 1.2 + 0.25 * len(rows), 1, 1)
    for number, (part, color) in enumerate(parts.items()):
        before, own = [sum(minutes[:number]) for _, minutes in rows], [minutes[number] for _, minutes in rows]
        axes.barh(range(len(rows)), own, left=before, color=color, label=part)
    axes.set_yticks(range(len(rows)), [name for name, _ in rows])
    finish(axes, "Time of the rounds", "minutes, up to the last round", "")
    small(axes)
    return made


def small(axes: Axes) -> None:
    """Shrink the fonts of a panel that is a column wide."""
    axes.title.set_fontsize(9)
    axes.tick_params(labelsize=8)
    for label in (axes.xaxis.label, axes.yaxis.label):
        label.set_fontsize(8)


def panel(axes: Axes, groups: Sequence[Group], x: str, name: str) -> None:
    """Draw one number of the runs over an axis, with interventions at the top and quantised stretches at the foot."""
    name = NAMES.get(name, name)
    rows, marked = 0, 0
    for group, (color, marker, line) in zip(groups, looks(groups), strict=True):
        places = [run.record.places(x) for run in group.runs]
        curves = [(run.record.curve(name), place) for run, place in zip(group.runs, places, strict=True)]
        seeds = [[(at[step], y) for step, y in curve if step in at and abs(y) < 1e30] for curve, at in curves]
        seeds = [thinned(points) for points in seeds if points]
        if seeds:
            look = {"marker": marker, "markersize": 4, "linestyle": line, "linewidth": 1.4}
            curve(axes, seeds, color, "", markevery=max(len(seeds[0]) // 8, 1), **look)
        for run, place in zip(group.runs, places, strict=True):
            marked += _interventions(axes, run, place, color, 1 - 0.07 * (marked % 5))
            rows += _quantized(axes, run, place, color, 0.015 + 0.03 * rows)
    if TITLES.get(name, ("", ""))[1] == "nats per token":
        _zoom(axes)
    if name == "validation/loss":
        _teacher(axes, [each.mean("teacher_validation_loss") for each in groups])
    title, unit = TITLES.get(name, (literal(name), ""))
    finish(axes, title, AXES[x], unit)
    small(axes)
    axes.xaxis.set_major_locator(MaxNLocator(5, integer=x != "minutes"))
    if x != "minutes":
        axes.xaxis.set_major_formatter(EngFormatter(sep=" "))


def _zoom(axes: Axes) -> None:
    """Zoom to the curves after their first tenth, which would flatten the rest."""
    drawn: list[Any] = axes.get_lines()  # matplotlib types their data as anything that may become an array
    curves = [list(zip(line.get_xdata(), line.get_ydata(), strict=True)) for line in drawn]
    curves = [points for points in curves if len(points) > 4]
    far = max((points[-1][0] for points in curves), default=0.0)
    shown = [y for points in curves for x, y in points if x >= far / 10]
    if shown and max(shown) > min(shown):
        room = 0.12 * (max(shown) - min(shown))
        axes.set_ylim(min(shown) - room, max(shown) + room)


def _teacher(axes: Axes, losses: Sequence[float | None]) -> None:
    """Draw the teacher's loss as a line, or write it where it lies outside of the panel."""
    low, high = axes.get_ylim()
    for loss in sorted({round(each, 4) for each in losses if each is not None}):
        if low <= loss <= high:
            axes.axhline(loss, color="#000000", linestyle=":", linewidth=1)
            axes.text(
                0.99, loss, "teacher", transform=axes.get_yaxis_transform(), ha="right", va="bottom", fontsize=7.5
            )
        else:
            axes.annotate(
                f"teacher {loss:.3f} {'↓' if loss < low else '↑'}",
                (0.02, 0.08 if loss < low else 0.9),
                xycoords="axes fraction",
                fontsize=7.5,
            )


def legend_of(groups: Sequence[Group]) -> list[Line2D]:
    """Make the handles of a legend: a line a group, a marker a kind of intervention, a bar for quantised stretches."""
    handles = []
    for group, (color, marker, line) in zip(groups, looks(groups), strict=True):
        name = literal(group.name) + (f" ({len(group.runs)} seeds)" if len(group.runs) > 1 else "")
        look: dict[str, Any] = {"color": color, "marker": marker, "linestyle": line, "markersize": 4, "linewidth": 1.4}
        handles.append(Line2D([], [], label=name, **look))
    seen = {each.event for group in groups for run in group.runs for each in interventions(run)}
    for kind in [each for each in MARKS if each in seen]:
        handles.append(Line2D([], [], color="#000000", marker=MARKS[kind], linestyle="none", markersize=5, label=kind))
    if any(run.numbers["quantized_share"] for group in groups for run in group.runs):
        handles.append(Line2D([], [], color="#000000", linewidth=3, alpha=0.5, label="quantised (foot)"))
    return handles


def literal(name: str, most: int = 48) -> str:
    """Escape a name for matplotlib: no formula, not longer than `most`, and shown in a legend."""
    name = name if len(name) <= most else f"{name[: most - 1]}…"
    return (" " if name.startswith("_") else "") + name.replace("$", r"\$")


def thinned(points: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """Return `points`, or the means of `MOST_POINTS` stretches of them."""
    size = math.ceil(len(points) / MOST_POINTS)
    parts = [points[start : start + size] for start in range(0, len(points), size)] if size > 1 else []
    return [(part[-1][0], statistics.fmean(value for _, value in part)) for part in parts] or list(points)


def _interventions(axes: Axes, run: LoggedRun, places: dict[int, float], color: str, height: float) -> bool:
    """Mark a run's interventions near the top, another run's lower; return True if there are any."""
    shown = [each for each in interventions(run) if each.event in MARKS and each.step in places][:MOST_POINTS]
    look: dict[str, Any] = {"transform": axes.get_xaxis_transform(), "clip_on": False, "markersize": 5, "zorder": 5}
    for each in shown:
        axes.plot([places[each.step]], [height], MARKS[each.event], color=color, **look)
        axes.axvline(places[each.step], color=color, linewidth=0.7, linestyle=":", alpha=0.7)
    return bool(shown)


def _quantized(axes: Axes, run: LoggedRun, places: dict[int, float], color: str, height: float) -> bool:
    """Draw a bar at the foot where a run was quantised; whether it ever was."""
    steps = [(step, value) for step, value in run.record.curve("quantized") if step in places]
    parts = [[step for step, _ in part] for kept, part in itertools.groupby(steps, lambda each: each[1] > 0) if kept]
    for part in parts[:MOST_POINTS]:
        ends = [places.get(part[0] - 1, places[part[0]]), places[part[-1]]]
        look: dict[str, Any] = {"linewidth": 3, "alpha": 0.5, "transform": axes.get_xaxis_transform()}
        axes.plot(ends, [height] * 2, color=color, **look)
    return bool(parts)
