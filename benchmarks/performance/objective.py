"""Loss and gradients of the output head alone: kdtrain's engine beside cross-entropy and others' work.

On a GPU, at the widths of a 1 B and an 8 B model, the sides are those of `objective_sides.py`, on the device, in bf16:
hidden states and weight that want gradients, the loss, and its backward. Each side is a figure of its own, for which it
alternates with compiled cross-entropy, and Liger-Kernel's also with kdtrain's of the same work; a side that does not
fit, or whose library is not installed, is recorded as such. Memory is the peak less what the inputs take, gradients
included, as all sides leave them.

On a CPU a figure is a shape and dtype with all its sides, measured in processes of their own (`objective_process.py`).
A side that does not fit into 80 % of the free memory is recorded as such, and so is a library that is not installed.
What it gives up: times hold for that machine and that number of threads; the record says which.
"""

import functools
import itertools
import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from benchmarks.harness.record import Goal, Options, Record
from benchmarks.harness.timing import CALLS, in_turn, medians, over, peak_of, without_graphs
from benchmarks.performance import objective_sides as sides
from benchmarks.performance.objective_process import Work, free_memory, in_process
from benchmarks.performance.objective_profile import phases


@dataclass(frozen=True)
class Sizes:
    """Sizes of the measurement."""

    tokens: tuple[int, ...] = (8192, 32_768)
    widths: tuple[int, ...] = (2048, 4096)
    vocabulary: int = 128_256
    rounds: int = 11


TINY = Sizes((64,), (32,), 512, 2)
OURS = {
    "axolotl-top-k-50": "kdtrain-sparse-50",
    **dict.fromkeys(("liger-jsd", *(f"liger-jsd-{how}" for how in ("2048", "4096", "triton"))), "kdtrain-jsd-online"),
    **dict.fromkeys(("liger-cross-entropy", "liger-cross-entropy-8", "cut-cross-entropy"), "kdtrain-cross-entropy"),
}
"""The sides of kdtrain that do the work of others'."""
NAMES = (
    *("cross-entropy", "products", "kdtrain-cross-entropy", "kdtrain-sparse-12", "kdtrain-sparse-50"),
    *("kdtrain-samples-50", "top-k-renormalized-50", "kdtrain-dense", "kdtrain-jsd-online", "trl-jsd", *OURS),
)
"""`top-k-renormalized-50` is plain PyTorch over all logits, materialised."""
GOALS = (
    *(
        Goal(
            f"{side} over compiled cross-entropy, N = {tokens:,}, D = {width:,}",
            f"{tokens} {width} {side}.over_cross_entropy",
            most=1.15,
        )
        for tokens in (8192, 32_768)
        for width in (2048, 4096)
        for side in ("kdtrain-sparse-12", "kdtrain-sparse-50", "kdtrain-samples-50")
    ),
    *(
        Goal(f"{ours} over {name}, N = {tokens:,}, D = {width:,}", f"{tokens} {width} {name}.ours_over_it", most=1.0)
        for tokens in (8192, 32_768)
        for width in (2048, 4096)
        for name, ours in OURS.items()
        if name in ("liger-jsd", "liger-cross-entropy")
    ),
    Goal(
        "GiB of kdtrain-sparse-12, N = 32,768, D = 4,096 (5 GB)",
        "32768 4096 kdtrain-sparse-12.extra_gib",
        most=5e9 / 2**30,
    ),
)


def run(options: Options) -> int:
    """Measure, and write objective.json."""
    if options.on_cpu:
        return _on_cpu(options)
    sizes = TINY if options.tiny else Sizes()
    settings = vars(sizes) | {"calls": CALLS, "compile": options.compile}
    record, device = Record("objective", options, settings, GOALS), options.device
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    for tokens, width in itertools.product(sizes.tokens, sizes.widths):
        shape = tokens, width, sizes.vocabulary
        # made once a shape, if any of its figures is missing
        made = functools.cache(lambda shape=shape: sides.make_student(*shape, dtype, device, options.compile))
        with without_graphs():
            for name in NAMES:
                measure = functools.partial(_measured, name, made, sizes.rounds, device)
                record.measure(f"{tokens} {width} {name}", measure)
    return record.finish()


def _measured(name: str, made: Callable[[], sides.Student], rounds: int, device: torch.device) -> dict[str, Any]:
    """Measure memory of a side, and its time in turn with the sides it is compared with."""
    if (reason := sides.available(name)) is not None:
        raise ImportError(reason)
    student = made()

    def cleanly(work: Callable[[], Any]) -> None:
        student.clear()
        work()

    names = dict.fromkeys(("cross-entropy", *([OURS[name]] if name in OURS else []), name))
    calls = {each: functools.partial(cleanly, sides.side(each, student)) for each in names}
    calls[name]()  # compiles
    student.clear()
    memory = peak_of(calls[name], device)
    times = in_turn(calls, rounds, device, calls=CALLS)
    peak, held = memory["peak_gib"], memory["held_gib"]
    found = {
        "seconds_a_call": medians(times)[name],
        "over_cross_entropy": over(times, name, "cross-entropy"),
        "extra_gib": None if peak is None or held is None else peak - held,
        "seconds": times,
    }
    return found | ({"ours_over_it": over(times, OURS[name], name)} if name in OURS else {})


SHAPES = ((8192, 256, 2048), (4096, 256, 32_000), (2048, 1024, 32_000), (2048, 256, 151_936))
ALONE = (8192, 256, 151_936)
"""Tokens, width, vocabulary on a CPU; at the last one only kdtrain's sparse sides run."""
CACHED = ("kdtrain-sparse-12", "kdtrain-sparse-50")
REPETITIONS = 5


def _on_cpu(options: Options) -> int:
    record = Record("objective", options, {"repetitions": REPETITIONS})
    for shape, dtype in itertools.product((*SHAPES, ALONE), ("float32", "bfloat16")):
        name = " ".join(map(str, (*shape, dtype)))
        record.measure(name, functools.partial(_row, shape, dtype))
        if options.profile:
            record.measure(f"{name} {CACHED[0]} phases", functools.partial(phases, shape, dtype, CACHED[0]))
    return record.finish()


def _row(shape: tuple[int, int, int], dtype: str) -> dict[str, Any]:
    """Measure memory of each side, then their times in turn."""
    names = CACHED if shape == ALONE else sides.cpu_names()
    found: dict[str, dict[str, Any]] = {}
    work = Work(shape, dtype, memory=0.8 * free_memory(), repetitions=REPETITIONS)
    for name in names:
        reason = sides.available(name)
        found[name] = in_process("memory", work, [name]) if reason is None else {"missing": reason}
    load, fitting = os.getloadavg(), [name for name in names if "peak_mib" in found[name]]
    times = in_process("time", work, fitting)
    for name in fitting:
        found[name] |= times.get(name, times)
    tokens, width, vocabulary = shape
    row = {"tokens": tokens, "width": width, "vocabulary": vocabulary, "dtype": dtype}
    return {**row, "sides": found, "load_average": load}
