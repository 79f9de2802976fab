"""Steps of 1 B and 3 B students in fp8 against bf16, by every back end that is installed.

One student for all kinds: its linear layers switch, bf16 is the switch's high position, and a kind is the product that
the layers get. So all kinds take turns on the same weights, optimizer and tokens, without a second copy of either. The
loss is that of as many real steps for each kind, from the same weights on the same text. fp8 is in the three products
of every linear layer of the backbone; activations are kept, and all else is computed, in bf16, and the output head is
the chunked one of the product in every kind.

A kind that the device or the machine cannot make says why. On a CPU fp8 is emulated, to see that the section works.
"""

import functools
import statistics
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, cast

import torch

from benchmarks.harness import models
from benchmarks.harness.bench import Bench, Tokens
from benchmarks.harness.profiling import profiled
from benchmarks.harness.record import Goal, Options, Record, attempt
from benchmarks.harness.sections import script
from benchmarks.harness.timing import in_turn, medians, over, peak_of, without_graphs
from kdtrain.precision.backends import Choice, choose, make_recipe
from kdtrain.precision.linear import Backend, Switch, SwitchableLinear, convert


@dataclass(frozen=True)
class Sizes:
    """What is measured."""

    students: tuple[str, ...] = ("1b", "3b")
    length: int = 8192
    batch: int = 2
    rounds: int = 5
    steps_a_turn: int = 3
    loss_steps: int = 300
    """Of the first student."""


TINY = Sizes(("tiny",), 32, 2, 2, 1, 4)
KINDS = {
    "torchao-tensorwise": ("torchao", "tensorwise"),
    "torchao-rowwise": ("torchao", "rowwise"),
    "te-current": ("transformer-engine", "current"),
    "te-blockwise": ("transformer-engine", "blockwise"),
}
EMULATED = {"emulated-tensorwise": ("emulated", "tensorwise")}
GOALS = tuple(
    goal
    for student in ("1b", "3b")
    for goal in (
        Goal(f"step time over bf16's, best kind, {student}", f"{student}.best.time", most=0.75),
        Goal(f"peak memory over bf16's, same kind, {student}", f"{student}.best.memory", most=0.86),
        Goal(f"tokens a second over bf16's, same kind, {student}", f"{student}.best.rate", least=1.30),
    )
)


def run(options: Options) -> int:
    """Measure, and write fp8.json."""
    sizes = TINY if options.tiny else Sizes()
    record = Record("fp8", options, vars(sizes) | {"kinds": KINDS, "compile": options.compile}, GOALS)
    for student in sizes.students:
        with without_graphs():
            _measure(record, options, sizes, student)
    return record.finish()


def _measure(record: Record, options: Options, sizes: Sizes, student: str) -> None:
    """All figures of one student, which is made once, if any is missing."""
    made = functools.cache(lambda: _Kinds(options, sizes, student))
    record.measure(student, lambda: made().measured(functools.partial(record.so_far, student)))
    for kind in ("bf16", *_kinds(options.device)) if student == sizes.students[0] else ():
        record.measure(f"loss-{kind}", lambda kind=kind: made().losses(kind))
    if options.profile:
        record.measure(f"{student}-profile", lambda: made().profiles())


def _kinds(device: torch.device) -> dict[str, tuple[str, str]]:
    return KINDS if device.type == "cuda" else EMULATED


class _Kinds:
    """A student whose layers take the products of one kind after another."""

    def __init__(self, options: Options, sizes: Sizes, name: str) -> None:
        self.options, self.sizes, self.name, self.device = options, sizes, name, options.device
        self.switch = Switch()
        student = models.make_student(name, self.device)
        self.model = student.model
        # on the host: a copy on the device would stand in every figure of memory
        self.initial = {each: weight.detach().to("cpu", copy=True) for each, weight in student.named_parameters()}
        self.rows = models.text(sizes.batch * min(sizes.loss_steps, 320), sizes.length)
        self.backends: dict[str, Backend] = {}
        self.without: dict[str, str] = {}
        for kind, (backend, scaling) in _kinds(self.device).items():
            found = choose("fp8", backend, make_recipe("fp8", scaling, None, "max", False), scaling, self.device)
            if isinstance(found, Choice):
                self.backends[kind] = found.backend
            else:
                self.without[kind] = found
        self.layers = ""
        if self.backends:
            first = next(iter(self.backends.values()))
            self.layers = str(convert(self.model, self.switch, first, head=self.model.get_output_embeddings()))
        self.products = {kind: self._products(backend) for kind, backend in self.backends.items()}
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

    def _products(self, backend: Backend) -> list[Any]:
        return [backend.product(each, each.in_features, each.out_features) for each in self._switchable()]

    def _switchable(self) -> list[SwitchableLinear]:
        return [cast(SwitchableLinear, each) for each in self.model.modules() if type(each) is SwitchableLinear]

    def take(self, kind: str) -> None:
        """Give the layers the products of a kind; bf16 is the high position."""
        self.switch.position = "high" if kind == "bf16" else "quantized"
        for layer, product in zip(self._switchable(), self.products.get(kind, ()), strict=False):
            layer.product = product

    def measured(self, keep: Callable[[Any], None]) -> dict[str, Any]:
        """Memory and time of every kind, and what they are of bf16's; `keep` gets what there is."""
        turns = {kind: self._turn(kind) for kind in ("bf16", *self.products)}
        failed: dict[str, Any] = {}
        memory = {}
        for kind, turn in turns.items():
            try:
                turn()
                memory[kind] = peak_of(turn, self.device)
                keep(memory)
            except torch.OutOfMemoryError:
                raise
            except Exception as error:  # one back end that does not run must not cost the others
                if kind == "bf16":
                    raise
                failed[kind] = f"{type(error).__name__}: {error}"[:300]
        sides = {kind: turns[kind] for kind in memory}
        times = in_turn(sides, self.sizes.rounds, self.device, keep=lambda times: keep([memory, times]))
        tokens = self.bench.tokens * self.sizes.steps_a_turn
        flops = models.step_flops(self.name, self.sizes.length) * tokens
        seconds = medians(times)
        found = {
            "tokens_a_step": self.bench.tokens,
            "layers": self.layers,
            "without": self.without | failed,
            "memory": memory,
            "seconds_a_turn": times,
            "tokens_a_second": {kind: tokens / each for kind, each in seconds.items()},
            "tflops": {kind: flops / each / 1e12 for kind, each in seconds.items()},
            "of_bf16": {kind: self._of_bf16(kind, times, memory) for kind in memory if kind != "bf16"},
        }
        return found | {"best": best(found["of_bf16"])}

    def _of_bf16(self, kind: str, times: dict[str, list[float]], memory: dict[str, Any]) -> dict[str, float | None]:
        time = over(times, kind, "bf16")
        own, high = memory[kind]["peak_gib"], memory["bf16"]["peak_gib"]
        return {"time": time, "rate": 1 / time, "memory": own / high if own is not None else None}

    def losses(self, kind: str) -> Any:
        """The loss of each of the first steps of a kind, and the mean of the last tenth."""
        if kind in self.without:
            return {"missing": self.without[kind]}
        self.take(kind)
        self.bench.restart(self.initial)
        step = self.bench.steps(self.source)
        found = [step()["loss"] for _ in range(self.sizes.loss_steps)]
        return {"last": statistics.mean(found[-max(len(found) // 10, 1) :]), "losses": found}

    def profiles(self) -> dict[str, Any]:
        """Kernels, gaps and copies of bf16 and of each kind."""
        found = {}
        for kind in ("bf16", *self.products):
            found[kind] = attempt(lambda kind=kind: self._profile(kind))
        return found

    def _profile(self, kind: str) -> dict[str, Any]:
        self.take(kind)
        self.step()
        return profiled(self.step, 1 if self.options.tiny else 3, self.device)

    def _turn(self, kind: str) -> Callable[[], None]:
        def turn() -> None:
            self.take(kind)
            for _ in range(self.sizes.steps_a_turn):
                self.step()

        return turn


def best(of_bf16: dict[str, dict[str, float | None]]) -> dict[str, Any]:
    """All three figures of the kind that takes the least time: goals are met by one kind, not by three."""
    if not of_bf16:
        return {}
    kind = min(of_bf16, key=lambda name: of_bf16[name]["time"] or float("inf"))
    return {"kind": kind, **of_bf16[kind]}


if __name__ == "__main__":
    sys.exit(script("fp8"))
