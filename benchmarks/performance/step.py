"""Whole training steps: cross-entropy, cached distillation, and an online teacher.

On a GPU (`run`) a student of 1 B parameters, and online a teacher of 8 B. One student and one optimizer; each side is a
source of batches for the same step, whose layers are compiled one by one, and a figure of its own, for which it takes
turns of a few steps with cross-entropy (online: with the first cached side). The cached sides read real caches, as a
run does, one batch ahead in a thread. A whole cached distribution would be 256 KB a token: its side holds one batch on
the device, and what copying it from pinned memory would cost stands beside it. The online teacher runs as the product
runs it, uncompiled, in bf16, its output head a chunk of rows at a time.

Tokens a second are of the whole step: reading, forward, loss, backward, clipping, optimizer, and the step's numbers on
the host. TFLOP/s count matrix products and half of the attention's square, three forwards a step and, online, one of
the teacher. Peak memory is that of the student's step with its own batch; the teacher's weights count online only.

On a CPU, `python -m benchmarks.performance.step [--device cpu]` writes benchmarks/results/objective-step.json. Two
students: that of the demo on a cache of the shipped teacher, and one of 50 million random parameters at a vocabulary of
32,000, whose teacher is random too. Sides are cross-entropy (tokens alone), `cached` (forward KL at T = 2 and alpha 0.9
over the cache's head and the tail bucket), `cached-likelihood` (the same with a learned temperature) and `online` (over
the whole vocabulary, the teacher at hand). FLOPs are those of the products and the attention of one forward, as PyTorch
counts them. Times hold for that machine and its number of threads.
"""

import functools
import json
import os
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import tyro
from torch.utils.flop_counter import FlopCounterMode

from benchmarks.harness import RESULTS, ROOT, STUDENT, TEACHER, models, write, write_spec
from benchmarks.harness.bench import Bench, Held, Tokens, cached, held_batch, make_cache
from benchmarks.harness.command import kdtrain
from benchmarks.harness.profiling import profiled
from benchmarks.harness.record import Goal, Options, Record
from benchmarks.harness.sections import script
from benchmarks.harness.timing import CALLS, in_turn, medians, over, peak_of, without_graphs
from kdtrain.cache.codec import CodecSpec
from kdtrain.models.head import SplitModel, split
from kdtrain.models.loading import load_student
from kdtrain.models.spec import ModelSpec, read_spec
from kdtrain.objective.batch import Batch
from kdtrain.objective.targets import DenseTargets
from kdtrain.teaching.local import LocalTeacher
from kdtrain.testing import tiny_model, tiny_tokenizer, write_model_folder
from kdtrain.training.sources.online import OnlineSource
from kdtrain.training.sources.source import Source

CPU = torch.device("cpu")


@dataclass(frozen=True)
class Sizes:
    """What is measured."""

    student: str = "1b"
    teacher: str = "8b"
    shapes: tuple[tuple[int, int], ...] = ((2048, 16), (8192, 4))
    """Tokens in a sequence, sequences in a step."""
    kept: tuple[int, ...] = (12, 50)
    rounds: int = 5
    batches: int = 3
    """Different batches in a cache."""

    @property
    def sides(self) -> tuple[str, ...]:
        """All sides, the one that the others are compared with first."""
        return ("cross-entropy", *(f"sparse-{kept}" for kept in self.kept), "dense", "online")


TINY = Sizes("tiny", "tiny-teacher", ((32, 4), (64, 2)), (4, 12), 2, 2)
GOALS = tuple(
    goal
    for length in (2048, 8192)
    for goal in (
        *(
            Goal(f"cached, {side}: of cross-entropy's rate, T = {length:,}", f"{length} {side}.rate", least=0.97)
            for side in ("sparse-12", "sparse-50", "dense")
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
    sizes = TINY if options.tiny else Sizes()
    settings = vars(sizes) | {"calls": CALLS, "compile": options.compile}
    record = Record("step", options, settings, GOALS)
    for length, batch in sizes.shapes:
        with without_graphs():
            _measure(record, options, sizes, length, batch)
    return record.finish()


def _measure(record: Record, options: Options, sizes: Sizes, length: int, batch: int) -> None:
    """All figures of one length, whose student is made once, if any is missing."""
    made = functools.cache(lambda: _Shape(options, sizes, length, batch))
    for side in sizes.sides:
        record.measure(f"{length} {side}", lambda side=side: made().measured(side))
    for side in sizes.sides[:2] if options.profile else ():
        record.measure(f"{length} {side} profile", lambda side=side: made().profile(side))


class _Shape:
    """A student, its sides, and the caches they read, for one length of sequence."""

    def __init__(self, options: Options, sizes: Sizes, length: int, batch: int) -> None:
        self.options, self.sizes, self.length = options, sizes, length
        self.device, self.vocab = options.device, models.vocabulary(sizes.student)
        self.rows = models.text(batch * sizes.batches, length)
        student = models.make_student(sizes.student, self.device)
        self.bench = Bench(student, options, vocab_size=self.vocab, seq_len=length, batch=batch)
        self.tokens = Tokens(models.token_tensor(self.rows), self.device, self.vocab)

    def measured(self, side: str) -> dict[str, Any]:
        """Memory of a side, then its time in turn with the side it is compared with."""
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

    def profile(self, side: str) -> dict[str, Any]:
        """Kernels, gaps and copies of a side."""
        step = self.bench.steps(self._source(side))
        step()
        return profiled(step, 1 if self.options.tiny else 3, self.device)

    def _flops(self, side: str) -> float:
        """Of one token in a step."""
        own = models.step_flops(self.sizes.student, self.length)
        return own + models.forward_flops(self.sizes.teacher, self.length) * (side == "online")

    def _source(self, side: str) -> Any:
        if side == "cross-entropy":
            return self.tokens
        if side == "dense":
            return Held(self._dense())
        return self._online() if side == "online" else self._sparse(int(side.removeprefix("sparse-")))

    def _sparse(self, kept: int) -> Source:
        folder = self.options.scratch / "caches" / f"{self.length}-{kept}"
        spec = CodecSpec(kind="sparse", vocab_size=self.vocab, top_k=kept)
        make_cache(folder, self.rows, models.CheapTeacher(self.vocab, self.device), spec, self.length, 2)
        return cached(folder, self.device)

    def _dense(self) -> Batch:
        tokens_BT1 = self.tokens.tokens[: self.bench.batch]
        teacher = models.CheapTeacher(self.vocab, self.device)
        parts = [teacher(row[None, :-1], None)[0].log_softmax(-1).half() for row in tokens_BT1]
        logprobs_NV = torch.cat(parts)
        labels_N1 = tokens_BT1[:, 1:].flatten()[:, None]
        targets = DenseTargets(logprobs_NV, logprobs_NV.gather(1, labels_N1)[:, 0].float())
        return held_batch(tokens_BT1, targets)

    def _online(self) -> Source:
        model = models.make_teacher(self.sizes.teacher, self.device)
        return OnlineSource(self.tokens, LocalTeacher.of(model, self.bench.trainer.student.mode), self.vocab)

    def _copy(self, targets: DenseTargets) -> float | None:
        """Seconds to copy a batch's whole distributions from pinned memory, by a sixteenth of them."""
        if self.device.type != "cuda":
            return None
        part = targets.logprobs[: max(1, len(targets) // 16)]
        pinned = torch.empty(part.shape, dtype=part.dtype, pin_memory=True)
        copy = {"copy": lambda: part.copy_(pinned, non_blocking=True)}
        return medians(in_turn(copy, 5, self.device))["copy"] * len(targets) / len(part)


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Tokens a second of whole training steps on a CPU."""

    out: Path = RESULTS / "objective-step.json"
    """Where the record is written."""
    work: Path = ROOT / "runs" / "objective-step"
    """Where caches and the random teacher are made, once."""
    students: tuple[str, ...] = ("demo", "50m")
    """Which students are measured; the record keeps the others."""
    steps: int = 15
    """Timed steps of each side."""
    threads: int = 2
    """Threads of torch."""
    precision: str = "bf16"
    """Number format of the students."""
    prepare: bool = False
    """Make the caches and stop."""


@dataclass(frozen=True, kw_only=True)
class Student:
    """A student that is measured on a CPU, its teacher, and the caches of both kinds."""

    spec: ModelSpec
    vocab_size: int
    teacher: str
    cached: Path
    tokens: Path
    batch: int


def on_cpu(words: list[str]) -> None:
    """Prepare what is missing, measure each student, and write the record after each."""
    settings = tyro.cli(Settings, args=words)
    torch.set_num_threads(settings.threads)
    settings.work.mkdir(parents=True, exist_ok=True)
    made = {"demo": _demo, "50m": _random}
    students = {name: made[name](settings.work) for name in settings.students}
    if settings.prepare:
        return
    record = json.loads(settings.out.read_text()) if settings.out.exists() else {"students": {}}
    record["machine"] = {"threads": settings.threads, "torch": torch.__version__, "cores": os.cpu_count()}
    for name, student in students.items():
        with without_graphs():
            record["students"][name] = found = _on_cpu(student, settings)
        write(settings.out, record)
        print(name, json.dumps({key: value for key, value in found.items() if key != "sides"}, indent=1))


def _demo(work: Path) -> Student:
    """The student of the demo, and the shipped teacher."""
    teacher, tokens = TEACHER, work / "demo-tokens"
    _cache(work / "demo", teacher, 512)
    _tokens(tokens, STUDENT, 512)
    spec = read_spec(STUDENT)
    return Student(spec=spec, vocab_size=2048, teacher=teacher, cached=work / "demo", tokens=tokens / "data", batch=16)


def _random(work: Path) -> Student:
    """A student of 50 million parameters beside a teacher of 113 million, V = 32,000, all random."""
    folder = work / "teacher-32k"
    shape = {"max_position_embeddings": 1024, "num_attention_heads": 8, "num_key_value_heads": 8}
    if not (folder / "config.json").exists():
        big = {"hidden_size": 1024, "intermediate_size": 2752, "num_hidden_layers": 6, **shape}
        write_model_folder(folder, tiny_model(vocab_size=32_000, **big), tiny_tokenizer(32_000))
    small = {"hidden_size": 512, "intermediate_size": 1376, "num_hidden_layers": 10, **shape}
    config = {"model_type": "llama", "tie_word_embeddings": True, **small}
    toml = work / "random-50m.toml"
    write_spec(toml, folder, config)
    _cache(work / "random", str(folder), 64)
    _tokens(work / "random-tokens", str(toml), 64)
    paths = {"cached": work / "random", "tokens": work / "random-tokens" / "data"}
    return Student(spec=read_spec(str(toml)), vocab_size=32_000, teacher=str(folder), batch=4, **paths)


def _cache(folder: Path, teacher: str, sequences: int) -> None:
    if not (folder / "manifest.json").exists():
        kdtrain("cache-teacher", "--teacher", teacher, *_data(sequences), "--top-k", "16", "--out", str(folder))


def _tokens(folder: Path, student: str, sequences: int) -> None:
    """The tokens of a run without a teacher: it is started for one step."""
    if not (folder / "data" / "manifest.json").exists():
        kdtrain(
            *("distill", "--student", student, *_data(sequences), "--out", str(folder)),
            *("--steps", "1", "--batch-size", "1", "--no-compile", "--eval-batches", "1"),
        )


def _data(sequences: int) -> list[str]:
    return ["--data", "stdlib", "--seq-len", "256", "--num-sequences", str(sequences), "--validation-sequences", "8"]


def _on_cpu(student: Student, settings: Settings) -> dict[str, Any]:
    """Seconds a step of every side in turn, and what they amount to."""
    teacher = LocalTeacher(read_spec(student.teacher), CPU, settings.precision)
    teacher.load()
    targets, tokens = (cached(folder, CPU) for folder in (student.cached, student.tokens))
    fixed, learned = (_bench(student, settings, mode) for mode in ("fixed", "likelihood"))
    sides = {
        "cross-entropy": fixed.steps(tokens),
        "cached": fixed.steps(targets),
        "cached-likelihood": learned.steps(targets),
        "online": fixed.steps(OnlineSource(tokens, teacher, tokens.facts.vocab_size)),
    }
    seconds = in_turn(sides, settings.steps, CPU, warm=2)
    middle = medians(seconds)
    model = fixed.trainer.student.model
    forward, teachers = _flops(model, student), _flops(teacher.model, student)
    return {
        "parameters": sum(each.numel() for each in model.parameters()),
        "vocabulary": student.vocab_size,
        "tokens_a_step": student.batch * 256,
        "precision": settings.precision,
        "tokens_a_second": {name: student.batch * 256 / each for name, each in middle.items()},
        "cached_over_cross_entropy": middle["cross-entropy"] / middle["cached"],
        "likelihood_over_cross_entropy": middle["cross-entropy"] / middle["cached-likelihood"],
        "speed_up_over_online": middle["online"] / middle["cached"],
        "speed_up_of_the_flops": (3 * forward + teachers) / (3 * forward),
        "load_average": os.getloadavg(),
        "sides": seconds,
    }


def _bench(student: Student, settings: Settings, temperature_mode: str) -> Bench:
    """Steps over a student of its own, on fresh weights."""
    model = split(load_student(student.spec, vocab_size=student.vocab_size, seed=0, device="cpu"))
    return Bench(
        model,
        Options(CPU, settings.work),
        vocab_size=student.vocab_size,
        seq_len=256,
        batch=student.batch,
        mode=settings.precision,
        temperature_mode=temperature_mode,
        folder=settings.work / "run",
    )


def _flops(model: SplitModel, student: Student) -> int:
    """Of one forward over a step's tokens."""
    tokens_BT = torch.zeros(student.batch, 256, dtype=torch.int64)
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        model.logits(tokens_BT)
    return counter.get_total_flops()


if __name__ == "__main__":
    sys.exit(script("step", on_cpu))
