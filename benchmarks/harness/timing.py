"""The clock, sides in turn, and peak memory.

Compared sides alternate in one process. The result is the median over rounds of the ratio within a round, because the
clock of a card drifts as it warms up. Timings start and end with an idle device. Memory is the allocator's peak; on a
CPU only the process's high-water mark is given, under that name.
"""

import gc
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

import torch

from kdtrain.ranks import peak_memory_mb

Side = TypeVar("Side")
CALLS = 3
"""Calls in a timing on a GPU: the wait for an idle device at its ends then weighs little."""


def synchronize(device: torch.device) -> None:
    """Wait until the device is idle."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def timed(run: Callable[[], Any], device: torch.device, calls: int = 1) -> float:
    """Return the seconds of a call, from an idle device to an idle device around all of them."""
    synchronize(device)
    started = time.perf_counter()
    for _ in range(calls):
        run()
    synchronize(device)
    return (time.perf_counter() - started) / calls


def turns(sides: Sequence[Side], rounds: int, warm: int = 0) -> Iterator[tuple[int, Side]]:
    """Yield each side once a round, with the round's number, below 0 for `warm` ones.

    Every second round goes backwards.
    """
    for number in range(-warm, rounds):
        for side in sides[:: -1 if number % 2 else 1]:  # what ran before must not favour a side
            yield number, side


def beside(rates: Sequence[float], base: Sequence[float], name: str) -> dict[str, Any]:
    """Return tokens a second by round, and the median, lowest and highest ratio to `base` of the same round.

    name: the key of the median.
    """
    ratios = [rate / other for rate, other in zip(rates, base, strict=True)]
    found: dict[str, Any] = {"tokens_per_second": [round(rate, 1) for rate in rates]}
    return found | {name: statistics.median(ratios), "lowest": min(ratios), "highest": max(ratios)}


def in_turn(
    sides: Mapping[str, Callable[[], Any]], rounds: int, device: torch.device, warm: int = 1, calls: int = 1
) -> dict[str, list[float]]:
    """Return the seconds of a call of each side in each round, by a timing of `calls` of them.

    Every second round runs the sides backwards. The first `warm` rounds are not kept.
    """
    found: dict[str, list[float]] = {name: [] for name in sides}
    for number, name in turns(list(sides), rounds, warm):
        seconds = timed(sides[name], device, calls)
        if number >= 0:
            found[name].append(seconds)
    return found


def over(times: Mapping[str, list[float]], first: str, second: str) -> float:
    """Return the median over rounds of the time of `first` over that of `second`."""
    return statistics.median(a / b for a, b in zip(times[first], times[second], strict=True))


def medians(times: Mapping[str, list[float]]) -> dict[str, float]:
    """Return the median of the seconds by side."""
    return {name: statistics.median(each) for name, each in times.items()}


def peak_of(run: Callable[[], Any], device: torch.device) -> dict[str, float | None]:
    """Return the GiB at the highest point of a run, and before it.

    On a CPU only the process's high-water mark is known.
    """
    free()
    if device.type != "cuda":
        run()
        return {"peak_gib": None, "held_gib": None, "process_high_water_gib": peak_memory_mb(device) / 2**10}
    torch.cuda.synchronize(device)
    torch.cuda.reset_peak_memory_stats(device)
    held = torch.cuda.memory_allocated(device)
    run()
    torch.cuda.synchronize(device)
    return {"peak_gib": torch.cuda.max_memory_allocated(device) / 2**30, "held_gib": held / 2**30}


def free() -> None:
    """Free unused memory of the device."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


@contextmanager
def without_graphs() -> Iterator[None]:
    """Allow many compiled graphs of the same function inside the block, and drop them afterwards."""
    torch._dynamo.config.recompile_limit = 64
    torch.compiler.reset()
    yield
    torch.compiler.reset()
    free()


def why_not_compiled(device: torch.device) -> str | None:
    """Return the error of compiling a small function, or None; a GPU's compiler needs gcc and Python.h too."""
    try:
        torch.compile(lambda x: (2 * x + 1).sum())(torch.ones(8, device=device))
    except Exception as error:
        return " ".join(f"{type(error).__name__}: {error}".split())[:300]
    return None
