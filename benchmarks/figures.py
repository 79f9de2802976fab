"""The pictures, drawn from the JSON records alone: `python -m benchmarks.figures NAME [RECORD [FOLDER]]`.

Names: audit, find_lr, objective, precision, quality, temperature. Without more, the published
record is drawn into `benchmarks/figures`, by the functions and in the colours of `kdtrain.plugins.papers.figures`.
"""

import json
import math
import statistics
import sys
from argparse import ArgumentParser
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

from benchmarks.harness import FIGURES, RESULTS
from benchmarks.science.quality_grid import CALIBRATED, LONG, ONLINE, PLAIN, STUDIES, TIMED, Run
from benchmarks.science.quality_tables import PUBLISHED_LOSSES, THEIR_CROSS_ENTROPY, THEIR_WHOLE, describe, gap, seeds
from benchmarks.tables import LARGE
from kdtrain.files import published
from kdtrain.plugins.papers.figures import (
    AMBER,
    BLUE,
    GREEN,
    GREY,
    LOOKS,
    MORE,
    ORANGE,
    SKY,
    YELLOW,
    finish,
    pooled,
    save,
)
from kdtrain.plugins.papers.figures import figure as figure_of

Record = dict[str, Any]


def main(argv: list[str] | None = None) -> int:
    """Draw one record and say where the pictures are."""
    parser = ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("name", choices=PICTURES, help="which picture")
    parser.add_argument("record", nargs="?", type=Path, help="the record to draw")
    parser.add_argument("folder", nargs="?", type=Path, default=FIGURES, help="where pictures are written")
    given = parser.parse_args(argv)
    record = given.record or RESULTS / f"{given.name}.json"
    if not record.exists():
        parser.error(f"{record} does not exist; name the record that the benchmark wrote")
    print(*PICTURES[given.name](json.loads(record.read_text()), given.folder), sep="\n")
    return 0


# Objective: time and memory of every side over cross-entropy's.

SIDES = {
    "products": ("the three matrix products alone", GREY),
    "kdtrain-cross-entropy": ("kdtrain, cross-entropy", BLUE),
    "kdtrain-sparse-12": ("kdtrain, from a cache, K = 12", BLUE),
    "kdtrain-sparse-50": ("kdtrain, from a cache, K = 50", BLUE),
    "top-k-renormalized-50": ("plain PyTorch, K = 50", ORANGE),
    "kdtrain-dense": ("kdtrain, whole distribution", BLUE),
    "kdtrain-jsd": ("kdtrain, JSD", BLUE),
    "trl-jsd": ("TRL, JSD", ORANGE),
    "kdtrain-jsd-online": ("kdtrain, JSD, online teacher", BLUE),
    "liger-jsd": ("Liger-Kernel, JSD, online teacher", ORANGE),
}
MARKERS = {"float32": "o", "bfloat16": "s"}


def write_all(folder: Path, dpi: int = 130, formats: tuple[str, ...] = ("png",), **figures: Figure) -> list[Path]:
    """Write NAME.png for each figure, or its other formats; return their paths."""
    folder.mkdir(parents=True, exist_ok=True)
    paths = []
    for name, made in figures.items():
        for each in formats:
            paths.append(folder / f"{name.replace('_', '-')}.{each}")
            with published(paths[-1], "benchmarks.picture") as path:
                save(made, path, dpi, each, salt=name)
    return paths


def draw_objective(record: Record, folder: Path) -> list[Path]:
    """Write `objective.png`."""
    return write_all(folder, objective=objective(record))


def objective(record: Record) -> Figure:
    """Draw time and peak memory of each side over cross-entropy's: a row a side, a point a shape and dtype."""
    rows = [row for row in record["figures"].values() if "cross-entropy" in row.get("sides", {})]
    figure, [[time, memory]] = figure_of(10, 4.4, 1, 2, sharey=True)
    _ratios(time, rows, "seconds", "time over compiled cross-entropy's")
    _ratios(memory, rows, "peak_mib", "peak memory over compiled cross-entropy's")
    time.set_yticks(range(len(SIDES)), [label for label, _ in SIDES.values()])
    for tick, (_, color) in zip(time.get_yticklabels(), SIDES.values(), strict=True):
        tick.set_color("black" if color == GREY else color)
    time.invert_yaxis()
    for dtype, marker in MARKERS.items():
        for filled, text in ((True, "V ≥ 32,000"), (False, "V = 2,048")):
            face = "black" if filled else "none"
            name = {"float32": "fp32", "bfloat16": "bf16"}[dtype]
            memory.scatter([], [], marker=marker, s=26, facecolors=face, edgecolors="black", label=f"{name}, {text}")
    memory.legend(fontsize=8, frameon=False, loc="center left", bbox_to_anchor=(0.0, 0.36))
    large = [
        _ratio(row, side, "seconds")
        for row in rows
        for side in ("kdtrain-sparse-12", "kdtrain-sparse-50")
        if row["vocabulary"] >= LARGE
    ]
    known = [value for value in large if value is not None]
    figure.supxlabel("each point is one shape; the number is their geometric mean", fontsize=8)
    share = f"{min(known):.2f} to {max(known):.2f}"
    figure.suptitle(f"From a cache, at large vocabularies, the loss takes {share} of cross-entropy's time", fontsize=12)
    return figure


def _ratio(row: Record, side: str, key: str) -> float | None:
    """Return the ratio of a side to cross-entropy, or None if it was not measured."""
    own, base = row["sides"].get(side, {}).get(key), row["sides"]["cross-entropy"].get(key)
    return own / base if own is not None and base else None


def _ratios(axes: Axes, rows: list[Record], key: str, label: str) -> None:
    """Draw a faint line over the extent of each side's ratios, and a point for each ratio."""
    for place, (side, (_, color)) in enumerate(SIDES.items()):
        found = [(value, row) for row in rows if (value := _ratio(row, side, key)) is not None]
        if not found:
            continue
        values = [value for value, _ in found]
        axes.plot([min(values), max(values)], [place, place], color=color, linewidth=3, alpha=0.25)
        for value, row in found:
            face = color if row["vocabulary"] >= LARGE else "white"
            axes.scatter(value, place, marker=MARKERS[row["dtype"]], s=26, facecolors=face, edgecolors=color, zorder=3)
        middle = math.exp(statistics.fmean(map(math.log, values)))
        text = axes.text(middle, place - 0.2, f"{middle:.2f}", fontsize=7, ha="center", va="bottom")
        text.set_bbox({"facecolor": "white", "edgecolor": "none", "pad": 0.5})
    axes.axvline(1, color="black", linestyle=":", linewidth=1)
    axes.set(xscale="log", xlabel=label)
    ticks = [each for each in (0.1, 0.2, 0.5, 1, 2, 5, 10, 20) if axes.get_xlim()[0] < each < axes.get_xlim()[1]]
    axes.xaxis.set_major_locator(FixedLocator(ticks))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g} x"))
    axes.grid(axis="x", alpha=0.25)
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.tick_params(axis="y", length=0)


# Precision: losses above bf16, and the modes as bands.

SMOOTHED = 10


def draw_precision(result: Record, folder: Path) -> list[Path]:
    """Write `precision.png`."""
    kinds = [kind for kind in result["table"] if kind != "bf16"]
    rows = (len(kinds) + 2) // 3
    figure, grid = figure_of(11, 2.3 * rows, rows, 3, sharex=True, sharey=True)
    for axes, kind in zip(grid.flat, kinds, strict=False):
        _above(axes, result, kind)
    for axes in list(grid.flat)[len(kinds) :]:
        axes.set_visible(False)
    figure.supxlabel("step")
    figure.supylabel("training loss above bf16, nats")
    return write_all(folder, precision=figure)


def bands(quantized: Sequence[float]) -> list[tuple[float, float]]:
    """Return the begin and end of each stretch of quantised steps; step 1 is from 0.5 to 1.5."""
    found: list[tuple[float, float]] = []
    for step, each in enumerate(quantized, 1):
        if each and found and found[-1][1] == step - 0.5:
            found[-1] = (found[-1][0], step + 0.5)
        elif each:
            found.append((step - 0.5, step + 0.5))
    return found


def _above(axes: Axes, result: Record, kind: str) -> None:
    """Draw one kind: each seed's loss above that of bf16, smoothed, over bands where the first seed was quantised."""
    high = {run["seed"]: run["loss"] for run in result["runs"] if run["kind"] == "bf16"}
    own = [run for run in result["runs"] if run["kind"] == kind]
    for start, end in bands(own[0]["quantized"]):
        axes.axvspan(start, end, color=AMBER, alpha=0.25, linewidth=0)
    for run in own:
        above = [loss - other for loss, other in zip(run["loss"], high[run["seed"]], strict=True)]
        # the mean of each value and those before it
        smoothed = [statistics.mean(above[max(end - SMOOTHED, 0) : end]) for end in range(1, len(above) + 1)]
        axes.plot(range(1, len(above) + 1), smoothed, color=BLUE, linewidth=1.2, alpha=0.8)
    axes.axhline(0, color="black", linewidth=0.6)
    row = result["table"][kind]
    axes.set_title(f"{kind}: {row['above_bf16']:+.4f}, {row['quantized_share']:.0%} quantised", fontsize=9)


# find-lr: whole runs over rates, and what the search and a range test say.


def draw_find_lr(record: Record, folder: Path) -> list[Path]:
    """Write `find_lr.png`: a panel a kind, the loss of whole runs over their rates, and lines at what is suggested."""
    kinds = record["kinds"]
    figure, [panels] = figure_of(4.5 * len(kinds), 4.2, 1, len(kinds))
    for axes, (kind, row) in zip(panels, kinds.items(), strict=True):
        ended = [each for each in row["grid"] if each["loss"] is not None]
        axes.plot(
            [each["lr"] for each in ended], [each["loss"] for each in ended], color=BLUE, marker="o", label="runs"
        )
        tests = [(each["steepest"], each["tenth_of_lowest"]) for each in row["range_test"]]
        lines = [("find-lr", GREEN, "-", row["suggested"])]
        lines += [("range test, steepest", ORANGE, ":", [each for each, _ in tests])]
        lines += [("range test, a tenth of the lowest", ORANGE, "--", [each for _, each in tests])]
        for name, color, style, rates in lines:
            for number, rate in enumerate(rates):
                axes.axvline(rate, color=color, linestyle=style, label=None if number else name)
        axes.set_xscale("log")
        finish(axes, kind, "peak rate", "validation loss, nats")
        axes.legend(fontsize=7, ncols=2, loc="upper center", bbox_to_anchor=(0.5, -0.16))
    return write_all(folder, find_lr=figure)


# Temperature: T^2 KL against T, and where T goes.

MODES = {"minimize": ORANGE, "adversarial": BLUE, "likelihood": GREEN}
SHADES = (GREY, SKY, "#000000")


def draw_temperature(record: Record, folder: Path) -> list[Path]:
    """Write `temperature.png`: curves, then paths beside a still and a learning student."""
    figure, [[curves, frozen, training]] = figure_of(13, 4.8, 1, 3)
    _hump(curves, record)
    for axes, name, title in (
        (frozen, "frozen", "T alone, the student stands still"),
        (training, "training", "T and student, by the command"),
    ):
        _paths(axes, record[name], record["settings"]["bounds"])
        axes.set_title(title, loc="left", fontsize=10)
    return write_all(folder, 110, temperature=figure)


def _hump(axes: Axes, record: Record) -> None:
    shown = [each for each in record["curves"] if each["divergence"] == "forward-kl"]
    steps = sorted({each["step"] for each in shown})
    for each in shown:
        color, style = SHADES[steps.index(each["step"])], "-" if each["targets"] == "cache" else ":"
        label = f"student after {each['step']} steps" if each["targets"] == "cache" else None
        axes.plot(record["settings"]["grid"], each["loss"], color=color, linestyle=style, label=label)
    axes.plot([], [], color="black", linestyle=":", label="whole distribution instead of top-k + tail")
    axes.axvspan(*record["settings"]["bounds"], color=YELLOW, alpha=0.2, label="bounds of T")
    axes.set(xscale="log", xlabel="temperature T", ylabel="T² KL(teacher, student), nats a token")
    axes.set_xticks([0.25, 0.5, 1, 2, 4, 8, 16], ["¼", "½", "1", "2", "4", "8", "16"], minor=False)
    axes.minorticks_off()
    axes.set_title("the hump that T climbs or flees", loc="left", fontsize=10)
    axes.legend(fontsize=7, ncols=2, loc="upper center", bbox_to_anchor=(0.5, -0.12))


def _paths(axes: Axes, paths: list[Record], bounds: list[float]) -> None:
    for each in paths:
        axes.plot(each["T"], color=MODES[each["mode"]], linewidth=1.2, alpha=0.9)
    for mode, color in MODES.items():
        axes.plot([], [], color=color, label=mode)
    for bound in bounds:
        axes.axhline(bound, color="black", linestyle=":", linewidth=1)
    axes.set(yscale="log", xlabel="step", ylabel="T")
    axes.set_yticks([bounds[0], 1, 1.5, 2, 3, 4], ["2/3", "1", "1.5", "2", "3", "4"], minor=False)
    axes.minorticks_off()
    axes.legend(fontsize=7, ncols=3, loc="upper center", bbox_to_anchor=(0.5, -0.12))


# Quality: what of the gap is closed for how many bytes, calibration, T over training, loss against time.


def draw_quality(record: Record, folder: Path) -> list[Path]:
    """Write the pictures of docs/quality.md, each as PNG and SVG; those without a student are left out."""
    drawn = {
        "quality_gap": quality_gap(record),
        "quality_calibration": quality_calibration(record),
        "quality_temperature": quality_temperature(record),
        "quality_time": quality_time(record),
    }
    return write_all(folder, formats=("png", "svg"), **{name: each for name, each in drawn.items() if each is not None})


BELOW = {**{Run(cache=cache): -10 for cache in ("i12", "i40", "k50")}, Run(cache="s50", steps=LONG): -20}
"""Students whose name stands below their point, where another name is above, and by how many points."""


def quality_gap(record: Record) -> Figure | None:
    """Draw the closed share of the gap between cross-entropy and whole distributions against the bytes a token.

    On the left are the students of `final` beside the published ones, on the right the caches of `tails`, at seed 0 and
    earlier in training.
    """
    final, first = ([run for run in STUDIES[name]() if gap(record, run)] for name in ("final", "tails"))
    if not final:
        return None
    figure, [[left, right]] = figure_of(11, 4.4, 1, 2)
    for run in final:
        if run.options != PLAIN:
            _closed(left, record, run, gap(record, run), describe(run))
    for name, (size, loss, _) in PUBLISHED_LOSSES.items():
        if size is None:
            continue
        share = 100 * (THEIR_CROSS_ENTROPY - loss) / (THEIR_CROSS_ENTROPY - THEIR_WHOLE)
        left.plot(size, share, color=GREY, marker="x", linestyle="none")
        left.annotate(name, (size, share), (6, -10), textcoords="offset points", fontsize=8, color="#666666")
    left.plot([], [], color=BLUE, marker="o", linestyle="none", label="kdtrain, 5 M to 1 M parameters")
    left.plot([], [], color=GREY, marker="x", linestyle="none", label="Sparse Logit Sampling, 3 B to 300 M")
    for run in first:
        if not run.options and run.cache != "dense":
            words = describe(run).removesuffix(", ghost bucket").replace("independent samples", "independent")
            _closed(right, record, run, gap(record, run)[:1], words)
    left.axhline(0, color="black", linewidth=0.8)
    for axes, title in ((left, "After 10 M tokens, and published"), (right, "After 2.6 M tokens, alpha 0.9, seed 0")):
        axes.axhline(100, color="black", linestyle=":", linewidth=1)
        axes.set_xscale("log")
        axes.xaxis.set_major_locator(FixedLocator((10, 20, 30, 50, 100, 300, 1000, 3000)))
        axes.xaxis.set_major_formatter(FuncFormatter(lambda size, _: f"{size:,.0f}"))
        axes.xaxis.set_minor_locator(NullLocator())
        finish(axes, title, "bytes a token", "% of the gap closed")
    low, high = right.get_xlim()
    right.set_xlim(low, high * 1.6)  # room for the names
    return figure


def _closed(axes: Axes, record: Record, run: Run, shares: list[float], words: str) -> None:
    """Draw a student of `quality_gap`: mean and standard error over `shares`, in percent, at its bytes a token."""
    size = record["caches"][run.source]["bytes_per_token"]
    mean = 100 * statistics.mean(shares)
    error = 100 * statistics.stdev(shares) / math.sqrt(len(shares)) if len(shares) > 1 else 0
    axes.errorbar(size, mean, error, color=BLUE, marker="o", markersize=5, capsize=3)
    side = {"xytext": (6, BELOW.get(run, 3))}
    if run.cache == "dense":  # at the right edge
        side = {"xytext": (-6, 5), "ha": "right"}
    axes.annotate(words, (size, mean), textcoords="offset points", fontsize=8, **side)


def quality_calibration(record: Record) -> Figure | None:
    """Draw accuracy less confidence in 15 bins of confidence, all seeds together."""
    runs = [run for run in CALIBRATED if seeds(record, run)]
    if not runs:
        return None
    figure, [[axes]] = figure_of(7.5, 4.0, 1, 1)
    axes.axhline(0, color="black", linewidth=0.8)
    for run, (color, marker, line) in zip(runs, LOOKS, strict=False):
        found = seeds(record, run).values()
        bins = [each for each in pooled([each["calibration"] for each in found]) if each["tokens"] > 0]
        ece = statistics.mean(each["test"]["ece"] for each in found)
        off = [100 * (each["accuracy"] - each["confidence"]) for each in bins]
        label = f"{describe(run)}: ECE {ece:.1%}"
        at = [each["confidence"] for each in bins]
        axes.plot(at, off, color=color, marker=marker, markersize=4, linestyle=line, label=label)
    finish(axes, "Calibration on the test split", "the student's confidence", "accuracy less confidence, points")
    low, high = axes.get_ylim()
    axes.set_ylim(low, high + 0.4 * (high - low))  # room for the legend
    axes.legend(frameon=False, fontsize=9, loc="upper right")
    return figure


def quality_temperature(record: Record) -> Figure | None:
    """Draw T over the training of each learned mode."""
    runs = [run for run in STUDIES["temperatures"]() if "--temperature-mode" in run.options and seeds(record, run)]
    if not runs:
        return None
    figure, [[axes]] = figure_of(7.5, 3.6, 1, 1)
    for run, (color, marker, line) in zip(runs, LOOKS, strict=False):
        for number, each in enumerate(seeds(record, run).values()):
            path = each["T"]
            at = [each["validation"]["step"][-1] * place / max(len(path) - 1, 1) for place in range(len(path))]
            label = None if number else describe(run).rpartition(": ")[2]
            every = max(len(path) // 8, 1)
            axes.plot(at, path, color=color, linestyle=line, marker=marker, markevery=every, markersize=4, label=label)
    axes.axhline(1, color="black", linewidth=0.8)
    finish(axes, "The learned temperature", "step", "T")
    return figure


def quality_time(record: Record) -> Figure | None:
    """Draw validation loss against tokens, and against the time that they take on the machine of the record."""
    sides = [(run, name) for run, name in TIMED.items() if seeds(record, run)]
    if not sides or "speed" not in record:
        return None
    sides += [(run, ONLINE) for run, _ in sides if run.cache == "dense"]  # it learns the same from the same logits
    figure, [[by_tokens, by_time]] = figure_of(9.5, 4.0, 1, 2, sharey=True)
    for (run, name), (color, marker, line) in zip(sides, LOOKS, strict=False):
        curves = [each["validation"] for each in seeds(record, run).values()]
        steps = curves[0]["step"][1:]
        loss = [statistics.mean(values) for values in zip(*(each["loss"][1:] for each in curves), strict=True)]
        tokens = [step * record["settings"]["batch_size"] * record["settings"]["seq_len"] for step in steps]
        look = {"color": color, "marker": marker, "markersize": 4, "linestyle": line, "label": name}
        if name != ONLINE:
            by_tokens.plot([each / 1e6 for each in tokens], loss, **look)
        rate = statistics.median(record["speed"]["tokens_per_second"][name])
        by_time.plot([each / rate / 60 for each in tokens], loss, **look)
    finish(by_tokens, "Loss against tokens", "million tokens", "validation loss, nats a token")
    finish(by_time, "Loss against time", "minutes of training", "")
    return figure


# Audit: what a teacher finds in a cache, by rows read.


def draw_audit(record: Record, folder: Path) -> list[Path]:
    """Write `audit.png`: a panel a kind of cache, a line a fault; the share of audits that fail."""
    powers = record["power"]
    made, [axes] = figure_of(3.6 * len(powers), 3.9, 1, len(powers), sharey=True)
    for axis, (name, faults) in zip(axes, powers.items(), strict=True):
        for (fault, shares), (color, marker, line) in zip(faults.items(), [*LOOKS, *MORE], strict=False):
            points = [(int(rows), share) for rows, share in shares.items()]
            axis.plot(*zip(*points, strict=True), color=color, marker=marker, linestyle=line, label=fault, markersize=5)
        axis.set_xscale("log")
        axis.xaxis.set_major_locator(FixedLocator([1, 2, 5, 10, 20, 50, 100, 200]))
        axis.xaxis.set_minor_locator(NullLocator())
        axis.xaxis.set_major_formatter(FuncFormatter(lambda x, _: f"{x:g}"))
        finish(axis, name, f"rows read, of {record['settings']['seq_len']} tokens", "")
        axis.get_legend().remove()
    axes[0].set_ylabel("share of audits that fail")
    made.legend(*axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=4, fontsize=9, frameon=False)
    return write_all(folder, audit=made)


PICTURES: dict[str, Callable[[Any, Path], list[Path]]] = {
    "audit": draw_audit,
    "find_lr": draw_find_lr,
    "objective": draw_objective,
    "precision": draw_precision,
    "quality": draw_quality,
    "temperature": draw_temperature,
}

if __name__ == "__main__":
    sys.exit(main())
