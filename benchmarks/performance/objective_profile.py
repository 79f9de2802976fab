"""Where the objective's time goes: the phases of the engine, for rows of `objective.json` that miss their goal.

`python -m benchmarks.performance.objective_profile --rows 1 3` adds to each of these rows, under `phases`, the
milliseconds of the engine's parts in one run of a side: the product that makes the logits, the passes over a chunk of
logits, the product that makes both gradients, and the rest, which is the small loss of what was summed. Medians of
`--repetitions` runs. Rows have the numbers of `objective.py`.
"""

import json
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import tyro

from benchmarks.harness import RESULTS, write
from benchmarks.performance import objective
from benchmarks.performance import objective_sides as sides
from kdtrain.objective import engine, matmul


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Phases of the engine."""

    rows: tuple[int, ...]
    """Numbers of rows, from 0."""
    side: str = "kdtrain-sparse-12"
    """Which side."""
    repetitions: int = 7
    """Runs after the first."""
    threads: int = 2
    """Threads of torch."""
    out: Path = RESULTS / "objective.json"
    """The record, which has these rows."""


def main(settings: Settings) -> None:
    """Measure, print, and write into the record."""
    torch.set_num_threads(settings.threads)
    record = json.loads(settings.out.read_text())
    pairs = [(shape, dtype) for shape in (*objective.SHAPES, objective.ALONE) for dtype in objective.DTYPES]
    for number in settings.rows:
        shape, dtype = pairs[number]
        row = objective.row_of(record, shape, dtype)
        row.setdefault("phases", {})[settings.side] = found = phases(shape, dtype, settings)
        print(shape, dtype, json.dumps(found, indent=1))
        write(settings.out, record)


def phases(shape: tuple[int, int, int], dtype: str, settings: Settings) -> dict[str, float]:
    """Milliseconds of each phase, and of the whole."""
    student = sides.make_student(*shape, getattr(torch, dtype))
    run = sides.side(settings.side, student)
    found: dict[str, list[float]] = defaultdict(list)
    for repetition in range(settings.repetitions + 1):
        student.clear()
        with _watched() as spent:
            started = time.perf_counter()
            run()
            whole = time.perf_counter() - started
        if repetition:
            for name, seconds in (spent | {"rest": whole - sum(spent.values()), "whole": whole}).items():
                found[name].append(1e3 * seconds)
    return {name: round(statistics.median(each), 1) for name, each in found.items()}


@contextmanager
def _watched() -> Iterator[dict[str, float]]:
    """Seconds by phase, of what runs inside."""
    spent: dict[str, float] = {}

    def timed(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def watch(*args: Any, **kwargs: Any) -> Any:
            started = time.perf_counter()
            try:
                return function(*args, **kwargs)
            finally:
                spent[name] = spent.get(name, 0.0) + time.perf_counter() - started

        return watch

    compiled = engine.maybe_compiled
    with (
        patch.object(engine, "maybe_compiled", lambda function, on: timed(function.__name__, compiled(function, on))),
        patch.object(matmul.Products, "logits", timed("product: logits", matmul.Products.logits)),
        patch.object(matmul.Products, "gradients", timed("products: gradients", matmul.Products.gradients)),
    ):
        yield spent


if __name__ == "__main__":
    main(tyro.cli(Settings, description=__doc__))
