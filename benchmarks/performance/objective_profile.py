"""The phases of the objective's engine on a CPU, in one run of a side (`objective --profile`).

They are the product that makes the logits, the passes over a chunk of logits, the product that makes both gradients,
and the rest, which is the small loss of what was summed.
"""

import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch

from benchmarks.performance import objective_sides as sides
from kdtrain.objective.engine import fused as engine
from kdtrain.objective.engine import matmul

REPETITIONS = 7


def phases(shape: tuple[int, int, int], dtype: str, side: str) -> dict[str, float]:
    """Time each phase and the whole, in milliseconds: medians of the runs after the first."""
    student = sides.make_student(*shape, getattr(torch, dtype))
    run = sides.side(side, student)
    found: dict[str, list[float]] = defaultdict(list)
    for repetition in range(REPETITIONS + 1):
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
    """Collect the seconds by phase of the code inside the block."""
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
