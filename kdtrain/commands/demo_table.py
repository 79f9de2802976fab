"""The table of a demo: both students beside the teacher, as a function of the record that `run` of `demo` returns.

A cell is the value of one seed, or mean ± standard deviation over several.
"""

import math
import statistics
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, TypedDict

from rich.console import Console
from rich.table import Table

from kdtrain.errors import printable
from kdtrain.files import typed
from kdtrain.tables import literal

KINDS = ("cross-entropy", "distilled")
Run = dict[str, Any]
Value = Callable[[Run], float | None]


class _Curves(TypedDict):
    step: list[int]
    loss: list[float | None]
    kl: list[float | None]
    teacher_loss: list[float | None]


class _Test(TypedDict):
    loss: float
    perplexity: float | None
    kl: float | None
    agreement: float | None
    ece: float
    acceptance: float | None
    teacher_loss: float


class _Bin(TypedDict):
    tokens: float
    confidence: float
    accuracy: float


class _Run(TypedDict):
    """What table and pictures read of a run."""

    student: str
    seed: int
    tokens: int
    tokens_per_second: float | None
    validation: _Curves
    test: _Test
    calibration: list[_Bin]


def check(run: Run, kind: str, seed: int) -> None:
    """ValueError: the table or the pictures of this run cannot be made, or it is another one."""
    typed(run, _Run)
    if (run["student"], run["seed"]) != (kind, seed):
        raise ValueError(f"it is of {printable(run['student'])[:80]}, seed {run['seed']}")
    curves = run["validation"]
    if len({len(curves[name]) for name in _Curves.__annotations__}) > 1 or not any(curves["loss"]):
        raise ValueError("its validations are incomplete")
    if None in (*best(run), curves["teacher_loss"][-1]):
        raise ValueError("its validations are incomplete")


def show(result: dict[str, Any]) -> None:
    """Print the table and the verdict on stdout."""
    table = Table(title=literal(title(result), "table.title"), title_justify="left")
    for number, name in enumerate(["", *KINDS, "teacher"]):
        table.add_column(name, justify="right" if number else "left")
    for cells in rows(result):
        table.add_row(*cells)
    console = Console(soft_wrap=True)
    console.print(table)
    console.print(verdict(result), highlight=False)


def title(result: dict[str, Any]) -> str:
    """Student, tokens and seeds."""
    settings, seeds = result["settings"], len(of_kind(result, KINDS[0]))
    tokens = result["runs"][0]["tokens"]
    return (
        f"{Path(settings['student']).stem} after {settings['steps']:,} steps ({tokens:,} tokens of stdlib), "
        f"{seeds} {'seed' if seeds == 1 else 'seeds, mean ± standard deviation'}"
    )


def rows(result: dict[str, Any]) -> list[list[str]]:
    """The cells of the table, a row each: name, cross-entropy, distilled, teacher."""
    bytes_per_token = result["cache"]["bytes_per_token"]
    plan: list[tuple[str, Value, str]] = [
        ("validation loss (nats a token)", lambda run: best(run)[0], ".4f"),
        ("validation KL to the teacher (estimated from samples)", lambda run: best(run)[1], ".4f"),
        ("test loss", lambda run: run["test"]["loss"], ".4f"),
        ("test perplexity", lambda run: run["test"]["perplexity"], ".2f"),
        ("test KL to the teacher (whole vocabulary: exact)", lambda run: run["test"]["kl"], ".4f"),
        ("top-1 agreement with the teacher", lambda run: run["test"]["agreement"], ".1%"),
        ("ECE", lambda run: run["test"]["ece"], ".2%"),
        ("acceptance, Σ min(p, q)", lambda run: run["test"]["acceptance"], ".1%"),
        ("training tokens/s", lambda run: run["tokens_per_second"], ",.0f"),
        ("bytes a token of the cache", lambda run: bytes_per_token if run["student"] == "distilled" else None, ".1f"),
    ]
    of_teacher = teacher(result)
    return [
        [name, *(cell([value(run) for run in of_kind(result, kind)], form) for kind in KINDS), of_teacher.get(name, "")]
        for name, value, form in plan
    ]


def teacher(result: dict[str, Any]) -> dict[str, str]:
    """The teacher's own cells, by row; it is the same for every student."""
    run = result["runs"][0]
    return {
        "validation loss (nats a token)": cell([best(run)[2]], ".4f"),
        "test loss": cell([run["test"]["teacher_loss"]], ".4f"),
        "test perplexity": cell([math.exp(run["test"]["teacher_loss"])], ".2f"),
    }


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
