"""Steps of 1 B and 3 B students in fp8 against bf16, by every back end that is installed.

One student for all kinds: its linear layers switch, bf16 is the switch's high position, and a kind is the product that
the layers get. So each kind alternates with bf16 on the same weights, optimizer and tokens, without a second copy of
either, and is a figure of its own. The layers are compiled one by one. The loss is that of as many real steps for each
kind, from the same weights on the same text. fp8 is in the three products of every linear layer of the backbone;
activations are kept, and all else is computed, in bf16, and the output head is the chunked one of the product in every
kind.

A kind that the device or the machine cannot run is recorded with the reason. On a CPU fp8 is emulated, to see that the
section works.
"""

import functools
import statistics
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, cast

from benchmarks.harness import models
from benchmarks.harness.bench import Bench, Tokens
from benchmarks.harness.profiling import profiled
from benchmarks.harness.record import Goal, Options, Record
from benchmarks.harness.timing import CALLS, in_turn, medians, over, peak_of, without_graphs
from kdtrain.precision.backends import FormatChoice, choose, make_recipe
from kdtrain.precision.linear import Backend, SwitchableLinear, convert
from kdtrain.precision.modes import Switch


@dataclass(frozen=True)
class Sizes:
    """Sizes of the measurement."""

    students: tuple[str, ...] = ("1b", "3b")
    length: int = 8192
    batch: int = 2
    rounds: int = 5
    loss_steps: int = 100
    """Of the first student."""


TINY = Sizes(("tiny",), 32, 2, 2, 4)
KINDS = {
    "torchao-tensorwise": ("torchao", "tensorwise"),
    "torchao-rowwise": ("torchao", "rowwise"),
    "te-tensorwise": ("transformer-engine", "tensorwise"),
    "te-blockwise": ("transformer-engine", "blockwise"),
}
EMULATED = {"emulated-tensorwise": ("emulated", "tensorwise")}
GOALS = (Goal("step time over bf16's, best kind, 3 B", "3b best.time", most=0.85),)


def run(options: Options) -> int:
    """Measure, and write fp8.json."""
    sizes = TINY if options.tiny else Sizes()
    settings = vars(sizes) | {"kinds": KINDS, "calls": CALLS, "compile": options.compile}
    record = Record("fp8", options, settings, GOALS)
    for student in sizes.students:
        with without_graphs():
            _measure(record, options, sizes, student)
    return record.finish()


def _measure(record: Record, options: Options, sizes: Sizes, student: str) -> None:
    """Measure all missing figures of one student, which is made once, if any is missing."""
    chosen: dict[str, FormatChoice | str] = {}
    for kind, (backend, scaling) in (KINDS if options.device.type == "cuda" else EMULATED).items():
        recipe = make_recipe("fp8", scaling, None, "max", False)
        chosen[kind] = choose("fp8", backend, recipe, scaling, options.device)
    backends = {kind: each.backend for kind, each in chosen.items() if isinstance(each, FormatChoice)}
    made = functools.cache(lambda: _Kinds(options, sizes, student, backends))

    def students(kind: str) -> _Kinds:
        if isinstance(reason := chosen.get(kind), str):
            raise ImportError(reason)
        return made()

    kinds = ("bf16", *chosen)
    for kind in kinds:
        record.measure(f"{student} {kind}", lambda kind=kind: students(kind).measured(kind))
    found = {kind: record.figures[name] for kind in kinds if (name := f"{student} {kind}") in record.figures}
    if len(found) == len(kinds):
        record.put(f"{student} best", best(found))
    for kind in kinds if student == sizes.students[0] else ():
        record.measure(f"{student} {kind} loss", lambda kind=kind: students(kind).losses(kind))
    for kind in kinds if options.profile else ():
        record.measure(f"{student} {kind} profile", lambda kind=kind: students(kind).profile(kind))


class _Kinds:
    """A student whose layers take the products of one kind after another."""

    def __init__(self, options: Options, sizes: Sizes, name: str, backends: dict[str, Backend]) -> None:
        self.options, self.sizes, self.name, self.device = options, sizes, name, options.device
        self.switch = Switch()
        student = models.make_student(name, self.device)
        self.model = student.model
        # on the host: a copy on the device would count in every figure of memory
        self.initial = {each: weight.detach().to("cpu", copy=True) for each, weight in student.named_parameters()}
        self.rows = models.text(sizes.batch * sizes.loss_steps, sizes.length)
        self.layers = ""
        if backends:
            first = next(iter(backends.values()))
            self.layers = str(convert(self.model, self.switch, first, head=self.model.get_output_embeddings()))
        found = [each for each in self.model.modules() if type(each) is SwitchableLinear]
        self.switchable = cast(list[SwitchableLinear], found)
        self.products = {
            kind: [backend.product(each, each.in_features, each.out_features) for each in self.switchable]
            for kind, backend in backends.items()
        }
        self.bench = Bench(
            student,
            options,
            vocab_size=models.vocabulary(name),
            seq_len=sizes.length,
            batch=sizes.batch,
            switch=self.switch,
            quantized="fp8",
            has_teacher=False,
            total=max(sizes.loss_steps, 20),
        )
        self.source = Tokens(models.token_tensor(self.rows), self.device)
        self.step = self.bench.steps(self.source)

    def take(self, kind: str) -> None:
        """Give the layers the products of a kind; bf16 is the high position."""
        self.switch.position = "high" if kind == "bf16" else "quantized"
        for layer, product in zip(self.switchable, self.products.get(kind, ()), strict=False):
            layer.product = product

    def measured(self, kind: str) -> dict[str, Any]:
        """Measure memory and time of a kind, and their ratio to bf16's."""
        steps = {name: self._steps(name) for name in ("bf16", kind)}
        peaks = {}
        for name, step in steps.items():
            step()
            peaks[name] = peak_of(step, self.device)
        times = in_turn(steps, self.sizes.rounds, self.device, calls=CALLS)
        rate = self.bench.tokens / medians(times)[kind]
        flops = models.step_flops(self.name, self.sizes.length)
        found = {"tokens_a_second": rate, "tflops": rate * flops / 1e12, **peaks[kind], "seconds": times}
        if kind == "bf16":
            return found
        own, high = (peaks[name]["peak_gib"] for name in (kind, "bf16"))
        memory = None if own is None or high is None else own / high
        return found | {"layers": self.layers, "time": over(times, kind, "bf16"), "memory": memory}

    def losses(self, kind: str) -> dict[str, Any]:
        """Train the first steps of a kind, and return the loss of each and the mean of the last tenth."""
        self.bench.restart(self.initial)
        self.take(kind)
        step = self.bench.steps(self.source)
        found = [step()["loss"] for _ in range(self.sizes.loss_steps)]
        return {"last_loss": statistics.mean(found[-max(len(found) // 10, 1) :]), "losses": found}

    def profile(self, kind: str) -> dict[str, Any]:
        """Profile kernels, gaps and copies of a kind."""
        return profiled(self._steps(kind), 1 if self.options.tiny else 3, self.device)

    def _steps(self, kind: str) -> Callable[[], None]:
        """Return a function that takes a step of a kind at each call."""

        def step() -> None:
            self.take(kind)
            self.step()

        return step


def best(found: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """Return time, memory and rate of the kind that takes the least time: they are quoted of one kind, not of three."""
    timed = {kind: figure for kind, figure in found.items() if "time" in figure}
    if not timed:
        return {}
    kind = min(timed, key=lambda name: timed[name]["time"])
    return {"kind": kind, **{name: timed[kind][name] for name in ("time", "memory", "tokens_a_second", "tflops")}}
