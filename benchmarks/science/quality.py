"""Which objective makes the best student, from how many bytes a token: every student of docs/quality.md.

`python -m benchmarks.science.quality [STUDY ...]` runs the real command: `kdtrain cache-teacher` for each cache that is
missing, `kdtrain distill` for each student and `kdtrain evaluate` on the test split, against the teacher itself. A
student is trained once, whichever studies it is part of, and has a record of its own in `runs/quality/records`; stopped
at any point, the same command goes on. All records together are `benchmarks/results/quality.json`, from which
`benchmarks.tables quality` and `benchmarks.figures quality` make the page.

It runs at the lowest priority, `--at-once` students beside each other with a share of the cores each, which changes
their speed and nothing else: the record's tokens/s are of that moment. `speed` measures what is compared: one command
at a time, the sides in turn.

Two budgets: choices (rates, temperatures, weights, divergences) are compared after `SHORT` steps, at which all students
are far from converged, what is recommended after `LONG`.
"""

import dataclasses
import json
import math
import os
import statistics
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import tyro

from benchmarks.harness import RESULTS, ROOT, STUDENT, TEACHER, write
from benchmarks.harness.command import Kdtrain, claim, stop
from benchmarks.harness.machine import commit, cpu_model, version
from benchmarks.science import docstrings, renormalized_teacher
from benchmarks.science.quality_tables import MEASURES, compact
from kdtrain.cache.reader import CacheReader

STUDENTS = {"1m": STUDENT, "3m": "students/stdlib-3m.toml"}
SHORT, LONG = 625, 2500
RATES = (2e-3, 4e-3, 8e-3)
RATE = 4e-3
"""The peak learning rate of all other studies: the best of `RATES` for both cross-entropy and distillation."""
PLAIN = ("--alpha", "0")
CACHES = {
    **{f"k{k}": ("--top-k", f"{k}") for k in (3, 12, 50)},
    **{f"s{n}": ("--top-k", "0", "--num-samples", f"{n}") for n in (12, 40, 112)},
    "k8s24": ("--top-k", "8", "--num-samples", "24"),
    "dense": ("--dense",),
}
"""What each cache keeps: s12, s40 and s112 hold about 5, 12 and 25 different samples a token."""


@dataclass(frozen=True, kw_only=True)
class Settings:
    """What decides the results."""

    teacher: str = TEACHER
    """Spec of the teacher."""
    seq_len: int = 256
    """Tokens in a sequence."""
    sequences: int = 14_089
    """Sequences that a cache holds at most, 3.6 M tokens: all of the standard library's train split."""
    validation_sequences: int = 128
    """Sequences of the validation split beside them."""
    test_sequences: int = 512
    """Sequences of the test split that students are measured on."""
    batch_size: int = 16
    """Sequences in an optimizer step."""
    divisor: int = 1
    """Take only every so many of the steps, to test this script."""
    compile: bool = True
    """Compile the students."""


@dataclass(frozen=True, kw_only=True)
class Run:
    """One student: all that distinguishes it from the others."""

    corpus: str = "stdlib"
    student: str = "1m"
    cache: str = "k12"
    part: float = 1.0
    """The share of the sequences that the cache holds."""
    steps: int = SHORT
    lr: float = RATE
    options: tuple[str, ...] = ()
    """Options of `kdtrain distill` that differ from the defaults."""
    seed: int = 0

    @property
    def source(self) -> str:
        """The name of its cache's folder."""
        return f"{self.corpus}-{self.cache}" + (f"-{self.part:g}" if self.part < 1 else "")

    @property
    def name(self) -> str:
        """The name of its folder and record."""
        options = "".join(f"-{word.lstrip('-').replace(':', '')}" for word in self.options)
        return f"{self.source}-{self.student}-{self.steps}-lr{self.lr:g}{options}-{self.seed}"


@dataclass(frozen=True, kw_only=True)
class Quality:
    """Train, measure and record students; without names of studies those of all."""

    studies: tyro.conf.Positional[tuple[str, ...]] = ()
    """Of the studies that this module lists; `speed` is one more, and runs alone."""
    seeds: int = 1
    """Students of each kind, that differ in their seed."""
    at_once: int = 1
    """Students that are trained beside each other."""
    minutes: float = math.inf
    """After this time no further student is begun."""
    out: Path = Path("runs/quality")
    """The folder of caches, runs and records."""
    settings: Annotated[Settings, tyro.conf.arg(name="")] = dataclasses.field(default_factory=Settings)


def tail(name: str) -> tuple[str, ...]:
    """The option that names a tail rule; none for the default one."""
    return () if name == "ghost" else ("--tail", name)


def rates() -> list[Run]:
    """The learning rate, tried as often for cross-entropy as for distillation."""
    return [Run(lr=lr, options=options) for lr in RATES for options in (PLAIN, ())]


def tails() -> list[Run]:
    """What a cache keeps, and what stands for the rest."""
    rules = ("ghost", "drop", "renormalize", renormalized_teacher.NAME)
    return [
        Run(options=PLAIN),
        Run(cache="dense"),
        *(Run(cache=cache, options=tail(rule)) for cache in ("k12", "k50", "k3") for rule in rules),
        *(Run(cache=cache) for cache in ("s40", "k8s24", "s12", "s112")),
        Run(cache="k8s24", options=tail("control-variate")),
        Run(cache="s40", options=tail("control-variate")),
    ]


def temperatures() -> list[Run]:
    """T fixed and learned, from a cache and from whole distributions."""
    fixed = [("--temperature", T) for T in ("0.7", "1.5", "2", "3")]
    learned = [("--temperature-mode", mode) for mode in ("likelihood", "adversarial", "minimize")]
    return [
        *(Run(options=options) for options in (*fixed, *learned)),
        *(Run(cache="dense", options=options) for options in fixed[1:3]),
    ]


def weights() -> list[Run]:
    """Alpha, fixed and falling, for a rule with a bias, one without, and whole distributions."""
    falling = ("--alpha-schedule", "linear")
    choices = (("--alpha", "0.5"), ("--alpha", "1"), falling)
    return [Run(cache=cache, options=options) for cache in ("k12", "k8s24", "dense") for options in choices]


def divergences() -> list[Run]:
    """Other divergences than forward KL."""
    names = ("reverse-kl", "jsd", "skew-kl", "skew-reverse-kl")
    return [Run(options=("--divergence", name)) for name in names]


def warmups() -> list[Run]:
    """Steps of warm-up, for both kinds of student."""
    return [Run(options=(*kind, "--warmup-steps", steps)) for steps in ("10", "200") for kind in (PLAIN, ())]


STUDIES: dict[str, Callable[[], list[Run]]] = {
    each.__name__: each for each in (rates, tails, temperatures, weights, divergences, warmups)
}


def main(quality: Quality) -> None:
    """Train what is missing, and write the record of everything there is."""
    if unknown := set(quality.studies) - STUDIES.keys():
        stop(2, f"no study {', '.join(sorted(unknown))}; there are {', '.join(STUDIES)}")
    if quality.seeds < 1 or quality.at_once < 1:
        stop(2, "--seeds and --at-once must be at least 1")
    os.nice(19)
    claim(quality.out, quality.settings)
    chosen = [run for name in quality.studies or STUDIES for run in STUDIES[name]()]
    runs = [replace(run, seed=seed) for seed in range(quality.seeds) for run in dict.fromkeys(chosen)]
    with Kdtrain(**surroundings(quality)) as kdtrain:
        train_all(quality, runs, kdtrain)
    publish(quality)


def surroundings(quality: Quality) -> dict[str, str]:
    """What the commands inherit: a share of the cores, and a package that registers the tail rule of others."""
    info = quality.out / "packages" / "kdtrain_quality-1.0.dist-info"
    info.mkdir(parents=True, exist_ok=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: kdtrain-quality\nVersion: 1.0\n")
    rule = renormalized_teacher
    (info / "entry_points.txt").write_text(f"[kdtrain.tails]\n{rule.NAME} = {rule.__name__}\n")
    cores = len(os.sched_getaffinity(0))
    return {
        "OMP_NUM_THREADS": f"{max(cores // quality.at_once, 1)}",
        "PYTHONPATH": os.pathsep.join([f"{info.parent.resolve()}", f"{ROOT}", os.environ.get("PYTHONPATH", "")]),
    }


def train_all(quality: Quality, runs: Iterable[Run], kdtrain: Kdtrain) -> None:
    """Have the records of `runs` and of their caches, as far as the time allows."""
    missing = [run for run in runs if not (quality.out / f"records/{run.name}.json").exists()]
    begun = time.monotonic()

    def on_time(action: Callable[[Quality, Run, Kdtrain], None], run: Run) -> None:
        if time.monotonic() - begun < 60 * quality.minutes:
            action(quality, run, kdtrain)

    with ThreadPoolExecutor(quality.at_once) as pool:
        sources = {run.source: run for run in missing}
        list(pool.map(lambda run: on_time(build, run), sources.values()))
        list(pool.map(lambda run: on_time(train, run), missing))


def build(quality: Quality, run: Run, kdtrain: Kdtrain) -> None:
    """Build the cache of a run, and record what it costs."""
    record, settings = quality.out / f"records/cache-{run.source}.json", quality.settings
    if record.exists():
        return
    folder = quality.out / "caches" / run.source
    made = kdtrain(
        *("cache-teacher", "--teacher", settings.teacher, "--data", corpus(quality, run), "--out", f"{folder}"),
        *("--seq-len", f"{settings.seq_len}", "--num-sequences", f"{round(settings.sequences * run.part)}"),
        *("--validation-sequences", f"{settings.validation_sequences}", *CACHES[run.cache]),
    )
    kept = {name: made[name] for name in ("sequences", "tokens", "bytes_per_token", "temperature_range")}
    write(record, {"cache": run.source, "options": CACHES[run.cache], **kept, "entries": entries(folder)})


def entries(folder: Path) -> float | None:
    """How many different entries a token has in a sparse cache, the mean over 64 sequences; None for a dense one."""
    reader = CacheReader(folder, "validation")
    if reader.manifest.settings.codec.kind != "sparse":
        return None
    counts = reader.read(range(min(len(reader), 64))).targets
    return round(float((counts.ids < reader.manifest.vocab_size).sum(-1).float().mean()), 2)


def corpus(quality: Quality, run: Run) -> str:
    """What `--data` is given for a corpus."""
    if run.corpus == "stdlib":
        return "stdlib"
    return f"{docstrings.write(quality.out / 'docstrings.jsonl')}"


def train(quality: Quality, run: Run, kdtrain: Kdtrain) -> None:
    """Train and measure one student, and record it."""
    folder, settings = quality.out / "runs" / run.name, quality.settings
    steps = max(run.steps // settings.divisor, 1)
    command = (
        *("distill", "--cache", f"{quality.out}/caches/{run.source}", "--student", STUDENTS[run.student]),
        *("--out", f"{folder}", "--steps", f"{steps}", "--batch-size", f"{settings.batch_size}", "--lr", f"{run.lr:g}"),
        *("--eval-freq", f"{max(steps // 10, 1)}", "--checkpoint-freq", f"{steps}", "--keep-rolling", "1"),
        *("--seed", f"{run.seed}", *run.options, "--histogram-freq", "0", "--sample-freq", "0", "--no-tensorboard"),
        *([] if settings.compile else ["--no-compile"]),
    )
    trained = kdtrain(*command)
    measured = kdtrain(
        *("evaluate", "--student", f"{folder}", "--teacher", settings.teacher, "--data", corpus(quality, run)),
        *("--split", "test", "--seq-len", f"{settings.seq_len}", "--num-sequences", f"{settings.test_sequences}"),
    )
    write(quality.out / f"records/{run.name}.json", record(quality, run, folder, trained, measured))


def record(
    quality: Quality, run: Run, folder: Path, trained: dict[str, Any], measured: dict[str, Any]
) -> dict[str, Any]:
    """What is kept of one student."""
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    validations = [line for line in lines if "validation/loss" in line]
    rates = [line["tok/s"] for line in lines if line.get("tok/s")]
    path = [round(line["T"], 4) for line in lines if "T" in line]
    moving = path if len(set(path)) > 1 else path[:1]
    known = json.loads((folder / "environment.json").read_text())
    return {
        **dataclasses.asdict(run),
        "parameters": known["student"]["parameters"],
        "tokens": trained["tokens"],
        "seconds": trained["seconds"],
        "tokens_per_second": statistics.median(rates[len(rates) // 2 :]) if rates else None,
        "made_with": {
            "commit": commit(),
            "date": time.strftime("%Y-%m-%d"),
            "cpu": cpu_model(),
            "threads": known["threads"],
            "at_once": quality.at_once,
            "torch": version("torch"),
            "precision": known["mode"],
        },
        "T": moving[:: max(len(moving) // 100, 1)],
        "validation": {
            "step": [line["step"] for line in validations],
            **{name: [short(line[f"validation/{name}"]) for line in validations] for name in ("loss", "kl")},
        },
        "test": {name: short(measured[name]) for name in MEASURES},
        "calibration": [{name: short(value) for name, value in each.items()} for each in measured["calibration"]],
    }


def short(value: float | None) -> float | None:
    """A number with six digits behind the point, enough for every table."""
    return None if value is None else round(value, 6)


def publish(quality: Quality) -> None:
    """Write all records as one, and the page and the pictures where they are the published ones."""
    parts = [json.loads(path.read_text()) for path in sorted((quality.out / "records").glob("*.json"))]
    runs = [part for part in parts if "seed" in part]
    caches = {part.pop("cache"): part for part in parts if "seed" not in part}
    result = {"settings": dataclasses.asdict(quality.settings), "caches": caches, "runs": runs}
    published = quality.settings == Settings() and quality.out == Quality().out
    file = (RESULTS if published else quality.out) / "quality.json"
    file.write_text(compact(result))
    print(f"{len(runs)} students: {file}")


if __name__ == "__main__":
    main(tyro.cli(Quality))
