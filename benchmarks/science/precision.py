"""The study behind adaptive precision: what each number format costs a student, and what switching recovers.

On one cache of the shipped teacher one student is trained in bf16 at a constant rate, and from its weights and moments
each of the others trains on for equal steps: in bf16, in fp8, mxfp8 and mxfp4 throughout, in mxfp4 and fp8 under each
rule of adaptive quantisation, and in mxfp4 under its default; a seed is an order of the data. Formats cost little while
a loss falls steeply, and most at the end of a training, which is the part that is measured. The final validation loss
(in bf16 for all), the share of steps that were quantised, the switches and the gap to bf16 go into
`results/precision.json`, and a picture shows the losses with the modes as bands. Formats are emulated on a machine
without fp8: losses are right, and times say nothing about hardware (`benchmarks.performance.precision_speed` measures
what switching costs).

If interrupted, the same command resumes. `--seeds 1` is the pilot; it writes into the folder of the runs only.
"""

import dataclasses
import statistics
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks import figures
from benchmarks.harness import FIGURES, RESULTS, STUDENT, TEACHER, write
from benchmarks.harness.command import Kdtrain, claim, environment, options
from benchmarks.harness.study import Study
from kdtrain.monitor.record import RunRecord

RESULT = RESULTS / "precision.json"
FIXED = ("bf16", "fp8", "mxfp8", "mxfp4")
_RULES = ("gap", "loss", "spike", "schedule")
ADAPTIVE = (*(f"mxfp4 {rule}" for rule in (*_RULES, "default")), *(f"fp8 {rule}" for rule in _RULES))


@dataclass(frozen=True, kw_only=True)
class Settings:
    """What decides the result of the study. The defaults are made for an hour on two cores at three seeds."""

    teacher: str = TEACHER
    """Spec of the teacher."""
    student: str = STUDENT
    """Spec of the student."""
    seq_len: int = 256
    """Tokens in a sequence."""
    sequences: int = 4000
    """Sequences of the train split that the teacher is cached over."""
    base_steps: int = 1000
    """Optimizer steps of the student that all others start from, at the peak rate."""
    steps: int = 120
    """Optimizer steps of each student."""
    batch_size: int = 8
    """Sequences in an optimizer step."""
    lr: float = 3e-3
    """Peak learning rate; the last fifth of the steps decays."""
    window: int = 10
    """Steps in a window."""
    probe_every: int = 10
    """Steps between measurements of the gap."""
    seeds: int = 3
    """Students of each kind."""


@dataclass(frozen=True, kw_only=True)
class Precision:
    """Train one student of each kind and seed, and compare them."""

    out: Path = Path("runs/precision")
    """The folder of the study: cache and runs."""
    settings: Settings = dataclasses.field(default_factory=Settings)


def main(asked: Precision) -> None:
    """Run the study, or what is left of it."""
    claim(asked.out, asked.settings)
    with Kdtrain() as kdtrain:
        result = run(asked, kdtrain)
    published = asked.settings == Settings()
    file = RESULT if published else asked.out / "precision.json"
    write(file, result)
    print(file, *figures.draw_precision(result, FIGURES if published else asked.out), sep="\n")
    for kind, row in result["table"].items():
        print(f"{kind:<15} " + "  ".join(f"{name} {value:.4g}" for name, value in row.items()))


def run(asked: Precision, kdtrain: Kdtrain) -> dict[str, Any]:
    """The record of the whole study."""
    settings, out = asked.settings, asked.out
    study = Study(out, kdtrain, {"cache": cache_words(settings)}, distill_words(settings))
    study.train("base", *base_words(settings))
    base = out / "base" / "checkpoints" / f"step-{settings.base_steps:08d}"
    kinds = [(kind, seed) for seed in range(settings.seeds) for kind in (*FIXED, *ADAPTIVE)]
    grid = {f"{kind.replace(' ', '-')}-{seed}": (kind, seed) for kind, seed in kinds}

    def student(name: str, entry: tuple[str, int]) -> dict[str, Any]:
        kind, seed = entry
        return record(kind, seed, *study.train(name, *words(settings, kind, seed), "--load", f"{base}"))

    runs = study.records(grid, student)
    shared = {"settings": dataclasses.asdict(settings), "environment": environment(out / next(reversed(grid)))}
    return {**shared, "table": table(runs), "runs": runs}


def cache_words(settings: Settings) -> list[str]:
    """Options of the cache."""
    return [
        *("--teacher", settings.teacher, "--data", "stdlib", "--seq-len", f"{settings.seq_len}"),
        *("--num-sequences", f"{settings.sequences}", "--validation-sequences", "128", "--top-k", "16"),
    ]


def distill_words(settings: Settings) -> list[str]:
    """Options of every student."""
    return [
        *("--student", settings.student, "--batch-size", f"{settings.batch_size}", "--lr", f"{settings.lr}"),
        *("--temperature", "1", "--log-to", "none", "--sample-freq", "0"),
    ]


def base_words(settings: Settings) -> list[str]:
    """Options of the student that all others start from."""
    steps = ("--steps", f"{settings.base_steps}")
    return [*steps, "--lr-schedule", "constant", "--precision", "bf16", "--seed", "0"]


def words(settings: Settings, kind: str, seed: int) -> list[str]:
    """Options of one student; the kinds differ in their numbers and in nothing else."""
    mode, _, rule = kind.partition(" ")
    adaptive = [
        *("--time-resume", "--quant-window-size", f"{settings.window}"),
        *("--quant-probe-every", f"{settings.probe_every}"),
        *(() if rule == "default" else ("--quant-rule", rule)),
    ]
    return [
        *("--override-opt-param-scheduler", "--steps", f"{settings.steps}", "--warmup-steps", "0"),
        *("--lr-schedule", "wsd", "--eval-freq", f"{settings.steps}", "--seed", f"{seed}"),
        *("--precision", mode, *(adaptive if rule else ())),
    ]


def record(kind: str, seed: int, trained: dict[str, Any], run: RunRecord) -> dict[str, Any]:
    """One student: its losses, the mode of each step, and its final validation loss."""
    steps = run.steps
    quantized = [line.get("quantized", 0.0) for line in steps]
    return {
        "kind": kind,
        "seed": seed,
        "validation_loss": run.validations[-1]["validation/loss"],
        "quantized_share": sum(quantized) / len(quantized),
        "switches": trained.get("switches", 0),
        "gaps": [[line["step"], line["gap"]] for line in steps if "gap" in line],
        "loss": [round(line["loss"], 5) for line in steps],
        "quantized": [int(each) for each in quantized],
    }


def table(runs: list[dict[str, Any]]) -> dict[str, dict[str, float]]:
    """By kind, means over seeds: final validation loss, what it is above bf16 at the same seed, quantised share."""
    rows = {}
    for kind in (*FIXED, *ADAPTIVE):
        own = {run["seed"]: run for run in runs if run["kind"] == kind}
        high = {run["seed"]: run for run in runs if run["kind"] == "bf16"}
        gaps = [own[seed]["validation_loss"] - high[seed]["validation_loss"] for seed in own]
        rows[kind] = {
            "seeds": len(own),
            "validation_loss": statistics.mean(run["validation_loss"] for run in own.values()),
            "above_bf16": statistics.mean(gaps),
            "above_bf16_sd": statistics.stdev(gaps) if len(gaps) > 1 else 0.0,
            "quantized_share": statistics.mean(run["quantized_share"] for run in own.values()),
            "switches": statistics.mean(run["switches"] for run in own.values()),
        }
    return rows


if __name__ == "__main__":
    main(options(Precision))
