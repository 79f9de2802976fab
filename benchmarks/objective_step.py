"""What distillation costs in a whole training step: cached and online teachers against plain cross-entropy.

`python benchmarks/objective_step.py` writes `benchmarks/results/objective-step.json`. Two students: that of the demo on
a cache of the shipped teacher, and one of 50 million random parameters at a vocabulary of 32,000, whose teacher is
random too. A step is what `kdtrain distill` does between two lines of its log: reading the micro-batch ahead in a
thread, compiled student and objective, backward, clipping, the optimizer, and the numbers of the step read from the
device. All sides of a student run in turn in one process; the median counts. `batch` sequences are one micro-batch.

cross-entropy      tokens alone, no teacher
cached             forward KL at T = 2 and alpha 0.9 over the cache's head and the tail bucket
cached-likelihood  the same with a learned temperature
online             the same over the whole vocabulary, the teacher at hand

The FLOP count is that of the matrix products and the attention of one forward, as PyTorch counts them; a training step
is three forwards of the student, and an online teacher adds one of its own.

What it gives up: times hold for this machine and this number of threads.
"""

import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import tyro
from torch.utils.flop_counter import FlopCounterMode

from kdtrain.cache.reader import CacheReader
from kdtrain.commands.common import ask_layers, open_teacher, wide_head
from kdtrain.config import ObjectiveConfig, OptimizerConfig, PrecisionConfig
from kdtrain.models.head import SplitModel, split
from kdtrain.models.loading import load_student
from kdtrain.models.spec import ModelSpec, read_spec
from kdtrain.objective.temperature import build_temperature
from kdtrain.testing import tiny_model, tiny_tokenizer, write_model_folder
from kdtrain.training.data import CachedSource, Feed, OnlineSource, Source
from kdtrain.training.state import make_optimizer
from kdtrain.training.student import DistillStep

ROOT = Path(__file__).resolve().parents[1]
CPU = torch.device("cpu")


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Tokens a second of whole training steps."""

    out: Path = ROOT / "benchmarks" / "results" / "objective-step.json"
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
class Bench:
    """A student, its teacher, and the caches of both kinds."""

    student: ModelSpec
    vocab_size: int
    teacher: str
    cached: Path
    tokens: Path
    batch: int


def main(settings: Settings) -> None:
    """Prepare what is missing, measure each student, and write the record after each."""
    os.chdir(ROOT)
    torch.set_num_threads(settings.threads)
    torch._dynamo.config.recompile_limit = 64  # every side has a student of its own
    settings.work.mkdir(parents=True, exist_ok=True)
    made = {"demo": _demo, "50m": _random}
    benches = {name: made[name](settings.work) for name in settings.students}
    if settings.prepare:
        return
    record = json.loads(settings.out.read_text()) if settings.out.exists() else {"students": {}}
    record["machine"] = {"threads": settings.threads, "torch": torch.__version__, "cores": os.cpu_count()}
    for name, bench in benches.items():
        record["students"][name] = found = _measure(bench, settings)
        settings.out.parent.mkdir(parents=True, exist_ok=True)
        settings.out.write_text(json.dumps(record, indent=1) + "\n")
        print(name, json.dumps({key: value for key, value in found.items() if key != "sides"}, indent=1))


def _demo(work: Path) -> Bench:
    """The student of the demo, and the shipped teacher."""
    teacher, tokens = "teachers/stdlib-5m.toml", work / "demo-tokens"
    _cache(work / "demo", teacher, 512)
    _tokens(tokens, "students/stdlib-1m.toml", 512)
    spec = read_spec("students/stdlib-1m.toml")
    return Bench(student=spec, vocab_size=2048, teacher=teacher, cached=work / "demo", tokens=tokens / "data", batch=16)


def _random(work: Path) -> Bench:
    """A student of 50 million parameters beside a teacher of 113 million, V = 32,000, all random."""
    folder = work / "teacher-32k"
    shape = {"max_position_embeddings": 1024, "num_attention_heads": 8, "num_key_value_heads": 8}
    if not (folder / "config.json").exists():
        big = {"hidden_size": 1024, "intermediate_size": 2752, "num_hidden_layers": 6, **shape}
        write_model_folder(folder, tiny_model(vocab_size=32_000, **big), tiny_tokenizer(32_000))
    small = {"hidden_size": 512, "intermediate_size": 1376, "num_hidden_layers": 10, **shape}
    config = {"model_type": "llama", "tie_word_embeddings": True, **small}
    spec = ModelSpec(name="random-50m", config=config, init="scratch", tokenizer=str(folder))
    (work / "random-50m.toml").write_text(_toml(spec))
    _cache(work / "random", str(folder), 64)
    _tokens(work / "random-tokens", str(work / "random-50m.toml"), 64)
    paths = {"cached": work / "random", "tokens": work / "random-tokens" / "data"}
    return Bench(student=spec, vocab_size=32_000, teacher=str(folder), batch=4, **paths)


def _toml(spec: ModelSpec) -> str:
    lines = [f'name = "{spec.name}"', f'init = "{spec.init}"', f'tokenizer = "{spec.tokenizer}"', "", "[config]"]
    return "\n".join([*lines, *(f"{key} = {json.dumps(value)}" for key, value in (spec.config or {}).items())]) + "\n"


def _cache(folder: Path, teacher: str, sequences: int) -> None:
    if not (folder / "manifest.json").exists():
        _run("cache-teacher", "--teacher", teacher, *_data(sequences), "--top-k", "16", "--out", str(folder))


def _tokens(folder: Path, student: str, sequences: int) -> None:
    """The tokens of a run without a teacher: it is started for one step."""
    if not (folder / "data" / "manifest.json").exists():
        _run(
            *("distill", "--student", student, *_data(sequences), "--out", str(folder)),
            *("--steps", "1", "--batch-size", "1", "--no-compile", "--eval-batches", "1"),
        )


def _data(sequences: int) -> list[str]:
    return ["--data", "stdlib", "--seq-len", "256", "--num-sequences", str(sequences), "--validation-sequences", "8"]


def _run(*words: str) -> None:
    if subprocess.run([sys.executable, "-m", "kdtrain", *words]).returncode:
        sys.exit(f"kdtrain {' '.join(words)} failed")


def _measure(bench: Bench, settings: Settings) -> dict[str, Any]:
    """Seconds a step of every side in turn, and what they amount to."""
    teacher = open_teacher(read_spec(bench.teacher), CPU, settings.precision)
    cached = CachedSource(CacheReader(bench.cached, "train"), CPU, bench.vocab_size)
    tokens = CachedSource(CacheReader(bench.tokens, "train"), CPU, bench.vocab_size)
    asked = ask_layers(teacher, CPU, settings.precision, ())
    sides: dict[str, tuple[Source, str]] = {
        "cross-entropy": (tokens, "fixed"),
        "cached": (cached, "fixed"),
        "cached-likelihood": (cached, "likelihood"),
        "online": (OnlineSource(tokens, asked, wide_head(teacher), False), "fixed"),
    }
    steps = {name: _stepper(bench, settings, *each) for name, each in sides.items()}
    seconds: dict[str, list[float]] = {name: [] for name in steps}
    for number in range(settings.steps + 2):
        for name, step in steps.items():
            started = time.perf_counter()
            step()
            if number > 1:
                seconds[name].append(time.perf_counter() - started)
    medians = {name: statistics.median(each) for name, each in seconds.items()}
    student = split(load_student(bench.student, vocab_size=bench.vocab_size, seed=0, device="cpu"))
    forward, teachers = _flops(student, bench), _flops(teacher, bench)
    return {
        "parameters": sum(each.numel() for each in student.parameters()),
        "vocabulary": bench.vocab_size,
        "tokens_a_step": bench.batch * 256,
        "precision": settings.precision,
        "tokens_a_second": {name: bench.batch * 256 / each for name, each in medians.items()},
        "cached_over_cross_entropy": medians["cross-entropy"] / medians["cached"],
        "likelihood_over_cross_entropy": medians["cross-entropy"] / medians["cached-likelihood"],
        "speed_up_over_online": medians["online"] / medians["cached"],
        "speed_up_of_the_flops": (3 * forward + teachers) / (3 * forward),
        "load_average": os.getloadavg(),
        "sides": seconds,
    }


def _stepper(bench: Bench, settings: Settings, source: Source, temperature_mode: str) -> Callable[[], list[float]]:
    """One optimizer step after another of a student of its own; each call takes one."""
    student = split(load_student(bench.student, vocab_size=bench.vocab_size, seed=0, device="cpu"))
    objective, optimizing = ObjectiveConfig(), OptimizerConfig()
    temperature = build_temperature(
        temperature_mode, start=2.0, minimum=1.0, maximum=4.0, end=1.0, schedule="linear", total_steps=1000
    )
    step = DistillStep(
        student,
        temperature,
        objective,
        PrecisionConfig(),
        vocab_size=bench.vocab_size,
        seq_len=256,
        has_teacher=True,
        mode=settings.precision,
        device=CPU,
        document_mask=False,
        compile=True,
    )
    optimizer = make_optimizer(student, temperature, optimizing, objective)
    feed = Feed(
        source, lambda number: np.arange(number * bench.batch, (number + 1) * bench.batch) % len(source), bench.batch
    )
    steps = feed.steps()
    normalizer = float(bench.batch * 256)

    def run() -> list[float]:
        for batch in next(steps):
            loss, output = step(batch, normalizer=normalizer)
            loss.backward()
        gradients = [each.grad for each in step.parameters() if each.grad is not None]
        torch._foreach_mul_(gradients, normalizer / output.tokens.clamp(min=1).float())
        norm = torch.nn.utils.clip_grad_norm_(student.parameters(), optimizing.clip)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return torch.stack([each.double() for each in (*output, norm, temperature.value().detach())]).tolist()

    return run


def _flops(model: SplitModel, bench: Bench) -> int:
    """Of one forward over a step's tokens."""
    tokens_BT = torch.zeros(bench.batch, 256, dtype=torch.int64)
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        model.logits(tokens_BT)
    return counter.get_total_flops()


if __name__ == "__main__":
    main(tyro.cli(Settings, description=__doc__))
