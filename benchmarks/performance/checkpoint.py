"""How long training pauses for a checkpoint, in the background and in place.

`stall` is the time for which `Saver.save` holds its caller, `total` until the checkpoint is published and proven;
medians of all saves but the first, whose stall holds the making of the buffers and is given by itself. `taken` is what
a save costs in all, the stall included: work that lasts a little longer than the save, with and without one in flight,
so that what the background takes from the processor, the memory and the interpreter counts as well.

On a GPU the state is that of a 1 B student after real steps, and the work is such steps; the share is of 250 of them,
the default interval. On a CPU, saves of the demo student's state and of 1 GiB of tensors, with matrix products on all
threads as the work; and `training`, the real command at the demo's settings with a checkpoint every 250 steps, whose
share is the time that its events say training paused, over the time of all steps.
"""

import functools
import math
import statistics
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from benchmarks.harness import STUDENT, TEACHER, models
from benchmarks.harness.bench import Bench, Tokens
from benchmarks.harness.command import kdtrain
from benchmarks.harness.record import Goal, Options, Record
from benchmarks.harness.timing import synchronize, timed, without_graphs
from kdtrain.checkpoint.saver import Saver
from kdtrain.checkpoint.store import Store
from kdtrain.checkpoint.tiers import Keep
from kdtrain.monitor.record import RunRecord

KINDS = {"background": True, "in_place": False}


@dataclass(frozen=True)
class Sizes:
    """Sizes of the measurement on a GPU."""

    student: str = "1b"
    length: int = 2048
    batch: int = 8
    saves: int = 4
    """Of each kind, with the first."""
    every: int = 250
    """Steps between checkpoints."""


TINY = Sizes("tiny", 32, 2, 3)
GOALS = (Goal("per cent of the training time that background saves hold up", "background.share_percent", most=0.5),)
SAVES, STEPS = 6, 500
"""On a CPU: saves of each kind, steps of each training."""


def run(options: Options) -> int:
    """Measure, and write checkpoint.json."""
    if options.on_cpu:
        return _on_cpu(options)
    sizes = TINY if options.tiny else Sizes()
    record = Record("checkpoint", options, vars(sizes) | {"compile": options.compile}, GOALS)
    made = functools.cache(lambda: _training(options, sizes))
    with without_graphs():
        for kind in KINDS:
            record.measure(kind, lambda kind=kind: _in_steps(options, sizes, *made(), kind))
    return record.finish()


def _training(options: Options, sizes: Sizes) -> tuple[Bench, Callable[[], Any], float]:
    """Prepare a bench and its step, and measure the seconds of one step."""
    device, vocab = options.device, models.vocabulary(sizes.student)
    student = models.make_student(sizes.student, device)
    bench = Bench(student, options, vocab_size=vocab, seq_len=sizes.length, batch=sizes.batch)
    step = bench.steps(Tokens(models.token_tensor(models.text(4 * sizes.batch, sizes.length)), device))
    for _ in range(3):
        step()
    return bench, step, statistics.median(timed(step, device) for _ in range(5))


def _in_steps(
    options: Options, sizes: Sizes, bench: Bench, step: Callable[[], Any], seconds: float, kind: str
) -> dict[str, Any]:
    """Measure saves of one kind between and during steps of training."""
    tensors, tries = bench.trainer.state.tensors(), int(KINDS[kind])
    with tempfile.TemporaryDirectory(dir=options.scratch) as folder:
        store = Store(Path(folder) / "checkpoints", Keep(rolling=1))
        saver = Saver(store, KINDS[kind], copies=bench.trainer.checkpoints.copies)
        found = saves(saver, tensors, bench.trainer.state.numbers(), step, sizes.saves, tries, options.device)
    size = sum(tensor.nbytes for tensor in tensors.values()) / 2**30
    share = 100 * found["stall"] / (sizes.every * seconds)
    return {"gib": size, "tensors": len(tensors), "step_seconds": seconds, **found, "share_percent": share}


def saves(
    saver: Saver,
    tensors: Mapping[str, torch.Tensor],
    numbers: dict[str, Any],
    work: Callable[[], Any],
    count: int,
    tries: int,
    device: torch.device,
) -> dict[str, Any]:
    """Time `count` saves, and `tries` more while `work` runs again and again, in seconds; close the saver."""
    stalls, totals = [], []

    def save(number: int) -> float:
        synchronize(device)
        return saver.save([f"step-{number:08d}"], number, tensors, numbers)

    for number in range(count):
        started = time.perf_counter()
        stalls.append(save(number))
        saver.wait()
        totals.append(time.perf_counter() - started)
    total = statistics.median(totals[1:])
    found = {"first_stall": stalls[0], "stall": statistics.median(stalls[1:]), "stalls": stalls, "total": total}
    if tries:
        pieces = max(math.ceil(1.3 * total / timed(work, device)), 2)
        taken = [_taken(lambda number=number: save(number), saver, work, pieces, device)
                 for number in range(count, count + tries)]  # fmt: skip
        found |= {"pieces_meanwhile": pieces, "taken": statistics.median(taken)}
    saver.close()
    return found


def _taken(save: Callable[[], Any], saver: Saver, work: Callable[[], Any], pieces: int, device: torch.device) -> float:
    """Return the seconds that work takes longer while a save is in flight, its stall included."""

    def all_work() -> None:
        for _ in range(pieces):
            work()

    def both() -> None:
        save()
        all_work()

    before, during = timed(all_work, device), timed(both, device)
    saver.wait()
    return during - (before + timed(all_work, device)) / 2


def _on_cpu(options: Options) -> int:
    goals = [Goal(goal.what, f"training.{goal.figure}", most=goal.most) for goal in GOALS]
    record = Record("checkpoint", options, {"saves": SAVES, "steps": STEPS}, tuple(goals))
    with tempfile.TemporaryDirectory() as scratch:
        record.measure("training", lambda: training(Path(scratch)))
        record.measure("saves of demo", lambda: _beside_products(Path(scratch), demo_state()))
        large = {f"t{number:03d}": torch.randn(1024, 1024) for number in range(256)}
        record.measure("saves of 1 GiB", lambda: _beside_products(Path(scratch), large))
    return record.finish()


def demo_state() -> dict[str, torch.Tensor]:
    """Return the tensors of the demo's student as a checkpoint has them: weights, two moments and a counter each."""
    tensors = {}
    for name, weight in models.make_student("demo", torch.device("cpu")).named_parameters():
        tensors |= {name: weight.detach(), f"{name}.exp_avg": torch.randn_like(weight)}
        tensors |= {f"{name}.exp_avg_sq": torch.rand_like(weight), f"{name}.step": torch.tensor(1.0)}
    return tensors


def _beside_products(scratch: Path, tensors: dict[str, torch.Tensor]) -> dict[str, Any]:
    """Measure saves of both kinds, and the time that they take from matrix products."""
    size = sum(tensor.nbytes for tensor in tensors.values())
    left, right = torch.ones(512, 512), torch.ones(512, 512)

    def products() -> None:
        for _ in range(20):
            torch.mm(left, right)

    found: dict[str, Any] = {"MiB": round(size / 2**20, 1), "tensors": len(tensors), "saves": SAVES}
    for kind, asynchronous in KINDS.items():
        saver = Saver(Store(scratch / f"saves-{size}-{kind}", Keep(rolling=2)), asynchronous)
        found[kind] = saves(saver, tensors, {"step": 0}, products, SAVES, SAVES, torch.device("cpu"))
    return found


def training(scratch: Path) -> dict[str, Any]:
    """Measure the share of the training time for which a run pauses, by the real command."""
    data = ("--data", "stdlib", "--seq-len", "256", "--num-sequences", "512", "--top-k", "16")
    kdtrain("cache-teacher", "--teacher", TEACHER, *data, "--out", f"{scratch}/cache")
    words = ("--cache", f"{scratch}/cache", "--student", STUDENT, "--lr", "3e-3", "--batch-size", "16")
    words += ("--steps", f"{STEPS}", "--eval-freq", f"{STEPS}")
    result: dict[str, Any] = {"steps": STEPS}
    for kind, flag in (("background", "--async-save"), ("in_place", "--no-async-save")):
        done = kdtrain("distill", *words, flag, "--out", f"{scratch / kind}")
        events = RunRecord.read(scratch / kind).events
        stalls = [event.details["stood_still"] for event in events if event.event == "checkpoint"]
        share = 100 * sum(stalls) / done["seconds"]
        result[kind] = {"seconds": done["seconds"], "stalls": stalls, "share_percent": share}
    return result
