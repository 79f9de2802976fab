"""Whole training steps: cross-entropy, cached distillation, and an online teacher.

On a GPU a student of 1 B parameters, and online a teacher of 8 B. One student and one optimizer; each side is a source
of batches for the same step, whose layers are compiled one by one, and a figure of its own, for which it alternates
every few steps with cross-entropy (online: with the first cached side). The cached sides read real caches, as a run
does, one batch ahead in a thread. A whole cached distribution would be 256 KB a token: its side holds one batch on the
device, and its figure includes the cost of copying it from pinned memory. The online teacher runs as the product runs
it, its layers compiled, in bf16, its output head a chunk of rows at a time. Samples are the default codec's, at T = 1;
all other sides have T = 2.

Tokens a second are of the whole step: reading, forward, loss, backward, clipping, optimizer, and the step's numbers on
the host. TFLOP/s count matrix products and half of the attention's square, three forwards a step and, online, one of
the teacher. Peak memory is that of the student's step with its own batch; the teacher's weights count online only.

On a CPU the students are one of the demo's shape, beside a teacher of the shipped one's, and one of 48 million
parameters at a vocabulary of 32,000, beside a teacher of 109 million, all with random weights. Each is one figure, with
all sides in turn: cross-entropy, `cached` (forward KL at T = 2 and alpha 0.9 over the cache's head and the tail
bucket), `cached-likelihood` (the same with a learned temperature) and `online` (over the whole vocabulary).
"""

import functools
import os
from dataclasses import dataclass, replace
from typing import Any

import torch

from benchmarks.harness import models
from benchmarks.harness.bench import Bench, Held, Tokens, cached, codec_of, held_batch, make_cache, online
from benchmarks.harness.profiling import profiled
from benchmarks.harness.record import Goal, Options, Record
from benchmarks.harness.timing import CALLS, in_turn, medians, over, peak_of, without_graphs
from kdtrain.objective.batch import Batch
from kdtrain.objective.targets import DenseTargets


@dataclass(frozen=True)
class Sizes:
    """Sizes of the measurement."""

    student: str = "1b"
    teacher: str = "8b"
    shapes: tuple[tuple[int, int], ...] = ((2048, 16), (8192, 4))
    """Tokens in a sequence, sequences in a step."""
    codecs: tuple[str, ...] = ("sparse-12", "sparse-50", "samples-50")
    rounds: int = 11
    batches: int = 3
    """Different batches in a cache."""

    @property
    def sides(self) -> tuple[str, ...]:
        """All sides, the one that the others are compared with first."""
        return ("cross-entropy", *self.codecs, "dense", "online")


TINY = Sizes("tiny", "tiny-teacher", ((32, 4),), ("sparse-4", "sparse-12", "samples-50"), 2, 2)
ON_CPU = {
    "demo": Sizes("demo", "demo-teacher", ((256, 16),), ("sparse-16",), rounds=15, batches=32),
    "50m": Sizes("50m", "50m-teacher", ((256, 4),), ("sparse-16",), rounds=15, batches=16),
}
GOALS = tuple(
    goal
    for length in (2048, 8192)
    for goal in (
        *(
            Goal(f"cached, {side}: of cross-entropy's rate, T = {length:,}", f"{length} {side}.rate", least=0.97)
            for side in ("sparse-12", "sparse-50", "samples-50", "dense")
        ),
        Goal(f"TFLOP/s of the 1 B shape, sparse-12, T = {length:,}", f"{length} sparse-12.tflops", least=400),
        Goal(
            f"speed-up of sparse-12 over online, of what the FLOP count allows, T = {length:,}",
            f"{length} online.of_flops",
            least=0.95,
        ),
    )
)


def run(options: Options) -> int:
    """Measure, and write step.json."""
    if options.on_cpu:
        record = Record("step", options, {name: vars(sizes) for name, sizes in ON_CPU.items()})
        for name, sizes in ON_CPU.items():
            with without_graphs():
                record.measure(name, lambda sizes=sizes: _Shape(options, sizes, *sizes.shapes[0]).compared())
        return record.finish()
    sizes = TINY if options.tiny else Sizes()
    settings = vars(sizes) | {"calls": CALLS, "compile": options.compile}
    record = Record("step", options, settings, GOALS)
    for length, batch in sizes.shapes:
        # made once a length, if any of its figures is missing
        made = functools.cache(functools.partial(_Shape, options, sizes, length, batch))
        with without_graphs():
            for side in sizes.sides:
                record.measure(f"{length} {side}", lambda made=made, side=side: made().measured(side))
            for side in sizes.sides[:2] if options.profile else ():
                record.measure(f"{length} {side} profile", lambda made=made, side=side: made().profile(side))
    return record.finish()


class _Shape:
    """A student, its sides, and the caches they read, for one length of sequence."""

    def __init__(self, options: Options, sizes: Sizes, length: int, batch: int) -> None:
        self.options, self.sizes, self.length = options, sizes, length
        self.device, self.vocab = options.device, models.vocabulary(sizes.student)
        self.rows = models.text(batch * sizes.batches, length)
        student = models.make_student(sizes.student, self.device)
        self.shape = {"vocab_size": self.vocab, "seq_len": length, "batch": batch}
        self.bench = Bench(student, options, **self.shape)
        self.tokens = Tokens(models.token_tensor(self.rows), self.device, self.vocab)

    def measured(self, side: str) -> dict[str, Any]:
        """Measure memory of a side, then its time in turn with the side it is compared with."""
        other = self.sizes.sides[side == "online"]
        source = self._source(side)
        step = self.bench.steps(source)
        step()
        memory = peak_of(step, self.device)
        sides = {other: self.bench.steps(self._source(other)), side: step}
        times = in_turn(sides, self.sizes.rounds, self.device, calls=CALLS)
        own, taught = (self._flops(name) for name in (other, side))
        rate = self.bench.tokens / medians(times)[side]
        found = {"tokens_a_second": rate, "tflops": rate * taught / 1e12, **memory, "seconds": times}
        if side == "online":
            speed_up = over(times, side, other)
            return found | {"speed_up": speed_up, "of_flops": speed_up / (taught / own)}
        if side == "dense":
            found["copy_seconds_at_least"] = self._copy(source.batch.targets)
        return found | {"rate": over(times, other, side)}

    def compared(self) -> dict[str, Any]:
        """Time every side of a CPU in turn, in seconds a step, and return the ratios."""
        student, (side,) = models.make_student(self.sizes.student, self.device), self.sizes.sides[1:2]
        learned = Bench(student, self.options, **self.shape, temperature_mode="likelihood")
        targets = self._source(side)
        sides = {
            "cross-entropy": self.bench.steps(self.tokens),
            "cached": self.bench.steps(targets),
            "cached-likelihood": learned.steps(targets),
            "online": self.bench.steps(self._source("online")),
        }
        seconds = in_turn(sides, self.sizes.rounds, self.device, warm=2)
        middle = medians(seconds)
        return {
            "parameters": sum(each.numel() for each in student.parameters()),
            "vocabulary": self.vocab,
            "tokens_a_step": self.bench.tokens,
            "precision": self.bench.trainer.student.mode,
            "tokens_a_second": {name: self.bench.tokens / each for name, each in middle.items()},
            "cached_over_cross_entropy": middle["cross-entropy"] / middle["cached"],
            "likelihood_over_cross_entropy": middle["cross-entropy"] / middle["cached-likelihood"],
            "speed_up_over_online": middle["online"] / middle["cached"],
            "speed_up_of_the_flops": self._flops("online") / self._flops(side),
            "load_average": os.getloadavg(),
            "sides": seconds,
        }

    def profile(self, side: str) -> dict[str, Any]:
        """Profile kernels, gaps and copies of a side."""
        step = self.bench.steps(self._source(side))
        step()
        return profiled(step, 1 if self.options.tiny else 3, self.device)

    def _flops(self, side: str) -> float:
        """Count the FLOPs of one token in a step."""
        own = models.step_flops(self.sizes.student, self.length)
        return own + models.forward_flops(self.sizes.teacher, self.length) * (side == "online")

    def _source(self, side: str) -> Any:
        if side == "cross-entropy":
            return self.tokens
        if side == "dense":
            return Held(self._dense(), replace(self.tokens.facts, targets="dense"))
        if side == "online":
            teacher = models.make_teacher(self.sizes.teacher, self.device)
            return online(self.tokens, teacher, self.bench.trainer.student.mode, self.options.compile)
        folder = self.options.scratch / "caches" / f"{self.sizes.student}-{self.length}-{side}"
        spec, teacher = codec_of(side, self.vocab), models.CheapTeacher(self.vocab, self.device)
        make_cache(folder, self.rows, teacher, spec, self.length, 2)
        return cached(folder, self.device)

    def _dense(self) -> Batch:
        tokens_BT1 = self.tokens.tokens[: self.bench.batch]
        teacher = models.CheapTeacher(self.vocab, self.device)
        parts = [teacher(row[None, :-1], None)[0].log_softmax(-1).half() for row in tokens_BT1]
        logprobs_NV = torch.cat(parts)
        labels_N1 = tokens_BT1[:, 1:].flatten()[:, None]
        targets = DenseTargets(logprobs_NV, logprobs_NV.gather(1, labels_N1)[:, 0].float())
        return held_batch(tokens_BT1, targets)

    def _copy(self, targets: DenseTargets) -> float | None:
        """Time the copy of a batch's whole distributions from pinned memory, in seconds, by a sixteenth of them."""
        if self.device.type != "cuda":
            return None
        part = targets.logprobs[: max(1, len(targets) // 16)]
        pinned = torch.empty(part.shape, dtype=part.dtype, pin_memory=True)
        copy = {"copy": lambda: part.copy_(pinned, non_blocking=True)}
        return medians(in_turn(copy, 5, self.device))["copy"] * len(targets) / len(part)
