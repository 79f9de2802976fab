"""How long training stands still for a checkpoint of the 1 B student's state, in the background and in place.

The state is that of a run: weights, moments and counters, on the device after real steps. `stall` is the time for which
`Saver.save` holds its caller, `total` until the checkpoint is published and proven; medians of all saves but the first,
whose stall holds the making of the buffers and is given by itself. `taken` is what a save in the background costs in
all: the steps that are taken while it runs, against as many without. The share is of 250 steps, the default interval.
"""

import math
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from checkpoint import GOAL

from gpu_sections import models
from gpu_sections.common import Goal, Options, Record
from gpu_sections.measuring import synchronize, timed, without_graphs
from gpu_sections.runs import Bench, Tokens
from kdtrain.checkpoint.saver import Saver
from kdtrain.checkpoint.store import Store


@dataclass(frozen=True)
class Sizes:
    """What is measured."""

    student: str = "1b"
    length: int = 2048
    batch: int = 8
    saves: int = 4
    """Of each kind, with the first."""
    every: int = 250
    """Steps between checkpoints."""


TINY = Sizes("tiny", 32, 2, 3)
GOALS = (Goal("per cent of the training time that background saves hold up", "background.share_percent", most=GOAL),)


def run(options: Options) -> int:
    """Measure, and write checkpoint.json."""
    sizes = TINY if options.tiny else Sizes()
    record = Record("checkpoint", options, vars(sizes) | {"compile": options.compile}, GOALS)
    with without_graphs():
        if not {"background", "in_place"} <= record.figures.keys():
            step, bench = _training(options, sizes)
            seconds = statistics.median(timed(step, options.device) for _ in range(5))
            record.put("seconds_a_step", seconds)
            for kind, asynchronous in (("background", True), ("in_place", False)):
                record.measure(kind, lambda a=asynchronous: _saves(options, sizes, bench, step, seconds, a))
    return record.finish()


def _training(options: Options, sizes: Sizes) -> tuple[Callable[[], Any], Bench]:
    device, vocab = options.device, models.vocabulary(sizes.student)
    student = models.make_student(sizes.student, device)
    bench = Bench(student, options, vocab_size=vocab, seq_len=sizes.length, batch=sizes.batch)
    step = bench.steps(Tokens(models.token_tensor(models.text(4 * sizes.batch, sizes.length)), device))
    for _ in range(3):
        step()
    return step, bench


def _saves(
    options: Options, sizes: Sizes, bench: Bench, step: Callable[[], Any], seconds: float, asynchronous: bool
) -> dict[str, Any]:
    folder = tempfile.TemporaryDirectory(dir=options.scratch)
    saver = Saver(Store(Path(folder.name) / "checkpoints", keep_rolling=1), asynchronous)
    tensors = bench.run.state.tensors()
    stalls, totals = [], []

    def save(number: int) -> float:
        synchronize(options.device)
        return saver.save([f"step-{number:08d}"], number, tensors, bench.run.state.numbers())

    for number in range(sizes.saves):
        started = time.perf_counter()
        stalls.append(save(number))
        saver.wait()
        totals.append(time.perf_counter() - started)
    total = statistics.median(totals[1:])
    found = {
        "gib": sum(tensor.nbytes for tensor in tensors.values()) / 2**30,
        "tensors": len(tensors),
        "first_stall": stalls[0],
        "stall": statistics.median(stalls[1:]),
        "stalls": stalls,
        "total": total,
        "share_percent": 100 * statistics.median(stalls[1:]) / (sizes.every * seconds),
    }
    if asynchronous:
        count = min(max(math.ceil(1.2 * total / seconds), 2), 200)
        found |= _taken(lambda: save(sizes.saves), saver.wait, step, count, options)
    saver.close()
    folder.cleanup()
    return found


def _taken(
    save: Callable[[], Any], wait: Callable[[], None], step: Callable[[], Any], count: int, options: Options
) -> dict[str, Any]:
    """Seconds that steps take longer while a save is in flight, its stall included."""

    def steps() -> None:
        for _ in range(count):
            step()

    def both() -> None:
        save()
        steps()

    before = timed(steps, options.device)
    during = timed(both, options.device)
    wait()
    after = timed(steps, options.device)
    return {"steps_meanwhile": count, "taken": during - (before + after) / 2}
