"""Switching between fp8 and bf16 while training: its cost, recompilations, and the loss.

Three runs of the same student on the same text from the same weights: fp8 throughout, bf16 throughout, and one whose
controller gets a loss that is too high in every second stretch, so that it falls back and returns by its own rule
(`loss`), carried out by kdtrain's own `warm_up` and `decide`. The checkpoint of each switch is not written (section
`checkpoint` measures that); snapshots in memory are, one a window, and timed separately.

The student's layers are compiled one by one. Graphs are counted where they are made, by the compiler's own counters:
after the warm-up none may be added. The cost of a switch is the median time of the first step behind one, less that of
the steps that follow in the same mode.
"""

import functools
import statistics
import time
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, cast

import torch

from benchmarks.harness import models
from benchmarks.harness.bench import Bench, Tokens
from benchmarks.harness.record import Goal, Options, Record
from benchmarks.harness.timing import synchronize, without_graphs
from kdtrain.precision.backends import FormatChoice, choose, make_recipe
from kdtrain.precision.controller import Adaptive, Policy
from kdtrain.precision.linear import convert
from kdtrain.precision.modes import Switch
from kdtrain.training.trainer import Trainer

HIGH, LOW, THRESHOLD = 9.0, 1.0, 5.0
"""Losses that the controller is shown, in nats, and what it holds them against."""


@dataclass(frozen=True)
class Sizes:
    """Sizes of the measurement."""

    student: str = "1b"
    length: int = 2048
    batch: int = 4
    steps: int = 500
    stretch: int = 60
    """Steps of one kind of loss."""
    window: int = 20


TINY = Sizes("tiny", 32, 2, 40, 8, 4)
GOALS = (
    Goal("graphs compiled after the warm-up", "adaptive.compiled_after_warm_up", most=0),
    Goal("switches", "adaptive.switches", least=4),
)


def run(options: Options) -> int:
    """Measure, and write adaptive.json."""
    sizes = TINY if options.tiny else Sizes()
    backend = "auto" if options.device.type == "cuda" else "emulated"
    recipe = make_recipe("fp8", "tensorwise", None, "max", False)
    choice = choose("fp8", backend, recipe, "tensorwise", options.device)
    line = choice.line if isinstance(choice, FormatChoice) else choice
    record = Record("adaptive", options, vars(sizes) | {"fp8": line, "compile": options.compile}, GOALS)
    if not isinstance(choice, FormatChoice):
        record.put("missing", {"missing": choice})
        return record.finish()
    with without_graphs():
        made = functools.cache(lambda: _Training(options, sizes, choice))
        record.measure("adaptive", lambda: made().adaptive())
        for kind in ("bf16", "fp8"):
            record.measure(kind, lambda kind=kind: made().fixed(kind))
    return record.finish()


class _Training:
    """A student whose layers switch, its text, and a run that starts again for each kind."""

    def __init__(self, options: Options, sizes: Sizes, choice: FormatChoice) -> None:
        self.sizes, device = sizes, options.device
        student, switch = models.make_student(sizes.student, device), Switch()
        convert(student.model, switch, choice.backend, head=student.model.get_output_embeddings())
        self.bench = Bench(
            student,
            options,
            vocab_size=models.vocabulary(sizes.student),
            seq_len=sizes.length,
            batch=sizes.batch,
            switch=switch,
            quantized="fp8",
            has_teacher=False,
            total=sizes.steps,
        )
        tokens = models.token_tensor(models.text(sizes.batch * min(sizes.steps, 256), sizes.length))
        run = self.bench.trainer
        nothing = SimpleNamespace(save=lambda *_, **__: 0.0, published=list, warnings=list, wait=lambda: None)
        run.stepper.source, run.checkpoints.saver = Tokens(tokens, device), cast(Any, nothing)
        run.store.folder.mkdir(parents=True, exist_ok=True)
        self.initial = {name: weight.detach().to("cpu", copy=True) for name, weight in student.named_parameters()}

    def fixed(self, kind: str) -> dict[str, Any]:
        """Train in one format throughout, and return the summary."""
        run, self.bench.trainer.state.adaptive = self.bench.trainer, None
        run.student.switch.position = "quantized" if kind == "fp8" else "high"
        self.bench.restart(self.initial)
        step = self.bench.steps(run.stepper.source)
        return _summary([step()["loss"] for _ in range(self.sizes.steps)], self.sizes)

    def adaptive(self) -> dict[str, Any]:
        """Train a run that switches, and return its figures."""
        self.bench.restart(self.initial)
        return _adaptive(self.bench, self.sizes)


def _adaptive(bench: Bench, sizes: Sizes) -> dict[str, Any]:
    run, device = bench.trainer, bench.trainer.student.device
    policy = Policy(
        quantized="fp8",
        rules=("loss",),
        threshold=THRESHOLD,
        window=sizes.window,
        snapshot_every=sizes.window // 2,
        min_dwell=sizes.window // 2,
        keep=1,
    )
    run.state.adaptive = controller = Adaptive(policy, run.student.switch, "high")
    started, made = time.perf_counter(), _graphs()
    run.stepper.warm_up(bench.stop)
    synchronize(device)
    warmed, graphs = time.perf_counter() - started, _graphs()
    step, losses, times, modes = bench.steps(run.stepper.source), [], [], []
    snapshots = []
    for number in range(1, sizes.steps + 1):
        synchronize(device)
        started = time.perf_counter()
        modes.append(controller.mode)
        losses.append(step()["loss"])
        synchronize(device)
        times.append(time.perf_counter() - started)
        # the loss that decides is made up: up and down in turn, so that the rule has something to say
        shown = LOW if (number - 1) // sizes.stretch % 2 == 0 else HIGH
        before, started = _newest(run), time.perf_counter()
        run.recovery.act(number, shown)
        synchronize(device)
        if _newest(run) not in (None, before):
            snapshots.append(time.perf_counter() - started)
    return {
        **_summary(losses, sizes),
        "warm_up_seconds": warmed,
        "warm_up_graphs": graphs - made,
        "compiled_after_warm_up": _graphs() - graphs,
        "switches": controller.switches,
        "steps_quantized": controller.steps_quantized,
        "switch_ms": switch_ms(times, modes),
        "snapshot_ms": 1e3 * statistics.median(snapshots) if snapshots else None,
        "step_ms": {m: 1e3 * statistics.median(t for t, own in zip(times[2:], modes[2:], strict=True) if own == m)
                    for m in sorted(set(modes[2:]))},
        "modes": modes,
    }  # fmt: skip


def _newest(run: Trainer) -> int | None:
    """Return the step of the newest snapshot, None where there is none."""
    return run.state.snapshots[-1].state["progress"]["step"] if run.state.snapshots else None


def _graphs() -> int:
    """Count the graphs that the compiler has made so far."""
    return int(torch._dynamo.utils.counters["stats"]["unique_graphs"])


def switch_ms(times: list[float], modes: list[str]) -> float | None:
    """Return by how much the first step behind a switch is longer than the next ones in its mode, median, ms."""
    extra = []
    for number in range(3, len(modes)):
        if modes[number] != modes[number - 1]:
            rest = [times[n] for n in range(number + 1, min(number + 11, len(modes))) if modes[n] == modes[number]]
            if rest:
                extra.append(times[number] - statistics.median(rest))
    return 1e3 * statistics.median(extra) if extra else None


def _summary(losses: list[float], sizes: Sizes) -> dict[str, Any]:
    return {"last_loss": statistics.mean(losses[-max(sizes.steps // 10, 1) :]), "losses": losses}
