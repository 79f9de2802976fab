"""The table of a demo: both students beside the teacher, as a function of the record that `run` of `demo` returns.

A cell is the value of one seed, or mean ± standard deviation over several.
"""

import math
import statistics
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from kdtrain.tables import Table, show_page

KINDS = ("cross-entropy", "distilled")
Run = dict[str, Any]


def show(result: dict[str, Any]) -> None:
    """Print the table and the verdict on stdout."""
    table = Table(("", *KINDS, "teacher"), rows(result), ("",), boxed=True, title=title(result))
    show_page([table, verdict(result)])


def title(result: dict[str, Any]) -> str:
    """Student, tokens and seeds."""
    settings, seeds = result["settings"], len(of_kind(result, KINDS[0]))
    tokens = result["runs"][0]["tokens"]
    return (
        f"{Path(settings['student']).stem} after {settings['steps']:,} steps ({tokens:,} tokens of stdlib), "
        f"{seeds} {'seed' if seeds == 1 else 'seeds, mean ± standard deviation'}"
    )


def rows(result: dict[str, Any]) -> list[list[str]]:
    """The cells of the table, a row each: name, cross-entropy, distilled, teacher, who is the same for all students."""
    cache = result["cache"]["bytes_per_token"]
    plan: list[tuple[str, str, Callable[[Run], float | None], Callable[[Run], float] | None]] = [
        ("validation loss (nats a token)", ".4f", lambda run: best(run)[0], lambda run: best(run)[2]),
        ("validation KL to the teacher (estimated from samples)", ".4f", lambda run: best(run)[1], None),
        ("test loss", ".4f", lambda run: run["test"]["loss"], lambda run: run["test"]["teacher_loss"]),
        (
            *("test perplexity", ".2f"),
            *(lambda run: run["test"]["perplexity"], lambda run: math.exp(run["test"]["teacher_loss"])),
        ),
        ("test KL to the teacher (whole vocabulary: exact)", ".4f", lambda run: run["test"]["kl"], None),
        ("top-1 agreement with the teacher", ".1%", lambda run: run["test"]["agreement"], None),
        ("ECE", ".2%", lambda run: run["test"]["ece"], None),
        ("acceptance, Σ min(p, q)", ".1%", lambda run: run["test"]["acceptance"], None),
        ("training tokens/s", ",.0f", lambda run: run["tokens_per_second"], None),
        ("bytes a token of the cache", ".1f", lambda run: cache if run["student"] == "distilled" else None, None),
    ]
    first, found = result["runs"][0], []
    for name, form, value, of_teacher in plan:
        cells = [cell([value(run) for run in of_kind(result, kind)], form) for kind in KINDS]
        found.append([name, *cells, "" if of_teacher is None else cell([of_teacher(first)], form)])
    return found


def of_kind(result: dict[str, Any], kind: str) -> list[Run]:
    """The runs of one kind of student, by seed."""
    return sorted((run for run in result["runs"] if run["student"] == kind), key=lambda run: run["seed"])


def best(run: Run) -> tuple[float, float, float]:
    """Loss, KL and the teacher's loss on the validation split, where the loss was lowest: the exported student."""
    curves = run["validation"]
    points = list(zip(curves["loss"], curves["kl"], curves["teacher_loss"], strict=True))
    return min((point for point in points if point[0] is not None), key=lambda point: point[0])


def verdict(result: dict[str, Any]) -> str:
    """At how many seeds the distilled student is better in validation loss and in KL, and by how much."""
    pairs = list(zip(*(of_kind(result, kind) for kind in KINDS), strict=True))
    gains = [[before - after for before, after in zip(best(ce)[:2], best(kd)[:2], strict=True)] for ce, kd in pairs]
    loss, kl = (statistics.mean(column) for column in zip(*gains, strict=True))
    wins = sum(min(gain) > 0 for gain in gains)
    return (
        f"Distilled against cross-entropy, on the same tokens and steps: validation loss {-loss:+.4f}, "
        f"estimate of the KL to the teacher {-kl:+.4f} nats; better in both at {wins} of {len(gains)} "
        f"{'seed' if len(gains) == 1 else 'seeds'}."
    )


def cell(values: Iterable[float | None], form: str) -> str:
    """One value, or mean ± standard deviation of several; a dash where nothing was measured."""
    known = [value for value in values if value is not None]
    if not known:
        return "-"
    mean = format(statistics.mean(known), form)
    return mean if len(known) == 1 else f"{mean} ± {format(statistics.stdev(known), form)}"
