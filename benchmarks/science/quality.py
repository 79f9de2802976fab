"""Which objective makes the best student, from how many bytes a token: every student of docs/quality.md.

`python -m benchmarks.science.quality [STUDY ...]` runs the real command: `kdtrain cache-teacher` for each cache that is
missing, `kdtrain distill` for each student and `kdtrain evaluate` on the test split, against the teacher's whole
distributions, of which a dense cache is made once (in fp16, which moves no digit that is shown). A student is trained
once, whichever studies it is part of, and has a record of its own in `runs/quality/records`; if interrupted, the same
command resumes. All records together are `benchmarks/results/quality.json`, from which `benchmarks.tables quality`
and `benchmarks.figures quality` make the page.

It runs at the lowest priority, `--at-once` students beside each other with a share of the cores each: the tokens/s of a
student are of that moment. `speed` measures what is compared, one command at a time and the sides in turn.
"""

import dataclasses
import json
import math
import os
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from benchmarks import figures, tables
from benchmarks.harness import FIGURES, RESULTS, ROOT, TEACHER, write
from benchmarks.harness.command import Kdtrain, claim, environment, options, stop
from benchmarks.harness.machine import commit
from benchmarks.harness.study import Study
from benchmarks.science import docstrings
from benchmarks.science import quality_grid as grid
from benchmarks.science.quality_grid import STUDIES, Run
from benchmarks.science.quality_tables import MEASURES, compact
from kdtrain.cache.format.manifest import read_manifest
from kdtrain.cache.read.reader import CacheReader
from kdtrain.config.values import option
from kdtrain.files import publish_text
from kdtrain.monitor.record import RunRecord

QUIET = ("--sample-freq", "0", "--log-to", "none")


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Settings that decide the results."""

    teacher: str = TEACHER
    """Spec of the teacher."""
    seq_len: int = 256
    """Tokens in a sequence."""
    sequences: int | None = None
    """Sequences that a cache holds at most; all of the train split if not given."""
    validation_sequences: int = 128
    """Sequences of the validation split beside them."""
    test_sequences: int = 512
    """Sequences of the test split that students are measured on."""
    batch_size: int = 16
    """Sequences in an optimizer step."""
    divisor: int = 1
    """Divides the number of steps, to test this script."""
    compile: bool = True
    """Compile the students."""


@dataclass(frozen=True, kw_only=True)
class Quality:
    """Train, measure and record students; without names of studies those of all."""

    studies: tuple[str, ...] = option((), positional=True)
    """Of the studies that this module lists; `speed` is one more, and runs alone."""
    seeds: int = 1
    """Students of each kind, that differ in their seed."""
    at_once: int = 1
    """Students that are trained beside each other."""
    minutes: float = math.inf
    """After this time no further student is begun."""
    out: Path = Path("runs/quality")
    """The folder of caches, runs and records."""
    settings: Settings = dataclasses.field(default_factory=Settings)


def main(quality: Quality) -> None:
    """Train what is missing, and write the record of everything there is."""
    if unknown := set(quality.studies) - {*STUDIES, "speed"}:
        stop(2, f"no study {', '.join(sorted(unknown))}; there are {', '.join(STUDIES)}, speed")
    if "speed" in quality.studies and (quality.at_once > 1 or len(quality.studies) > 1):
        stop(2, "speed is measured alone: no other study, and no --at-once")
    if quality.seeds < 1 or quality.at_once < 1:
        stop(2, "--seeds and --at-once must be at least 1")
    os.nice(19)
    claim(quality.out, quality.settings)
    chosen = [run for name in quality.studies or STUDIES if name in STUDIES for run in STUDIES[name]()]
    runs = [replace(run, seed=seed) for seed in range(quality.seeds) for run in dict.fromkeys(chosen)]
    with Kdtrain(**surroundings(quality)) as kdtrain:
        if "speed" in quality.studies:
            measure_speed(quality, kdtrain)
        else:
            train_all(quality, runs, kdtrain)
    publish(quality)


def surroundings(quality: Quality) -> dict[str, str]:
    """What the commands inherit: a share of the cores, and a package that registers the tail rule of others."""
    info = quality.out / "packages" / "kdtrain_quality-1.0.dist-info"
    info.mkdir(parents=True, exist_ok=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: kdtrain-quality\nVersion: 1.0\n")
    module = "benchmarks.science.renormalized_teacher"
    (info / "entry_points.txt").write_text(f"[kdtrain.tails]\n{grid.RENORMALIZED_TEACHER} = {module}\n")
    cores = len(os.sched_getaffinity(0))
    return {
        "OMP_NUM_THREADS": f"{max(cores // quality.at_once, 1)}",
        "PYTHONPATH": os.pathsep.join([f"{info.parent.resolve()}", f"{ROOT}", os.environ.get("PYTHONPATH", "")]),
    }


def study_of(quality: Quality, runs: Iterable[Run], kdtrain: Kdtrain) -> Study:
    """The study of some runs: their caches, and the test splits of their corpora, against which all are measured."""
    settings, caches = quality.settings, {}
    for run in runs:
        text = ("--teacher", settings.teacher, "--data", corpus(quality, run), "--seq-len", f"{settings.seq_len}")
        limits = [limit for limit in (settings.sequences, run.sequences) if limit is not None]
        caches[f"caches/{run.source}"] = [
            *(*text, *(("--num-sequences", f"{min(limits)}") if limits else ())),
            *("--validation-sequences", f"{settings.validation_sequences}", *grid.CACHES[run.cache]),
        ]
        caches[f"caches/{run.corpus}-test"] = [
            *(*text, "--split", "test", "--dense", "--validation-sequences", "1"),
            *("--num-sequences", f"{settings.test_sequences}"),
        ]
    common = ("--batch-size", f"{settings.batch_size}", *QUIET, *([] if settings.compile else ["--no-compile"]))
    return Study(quality.out, kdtrain, caches, common)


def train_all(quality: Quality, runs: Iterable[Run], kdtrain: Kdtrain) -> None:
    """Make the missing records of `runs` and of their caches, as far as the time allows."""
    wanted = {run.name: run for run in runs}
    study = study_of(quality, wanted.values(), kdtrain)
    study.records(wanted, lambda _, run: train(quality, study, run), quality.at_once, quality.minutes)
    built = {f"cache-{run.source}": run for run in wanted.values()}
    there = {name: run for name, run in built.items() if (study.out / "caches" / run.source / "manifest.json").exists()}
    study.records(there, lambda _, run: cost(study, run))


def cost(study: Study, run: Run) -> dict[str, Any]:
    """What the cache of a run costs."""
    folder = study.out / "caches" / run.source
    manifest = read_manifest(folder)
    assert manifest.bytes_per_token is not None
    return {
        "options": grid.CACHES[run.cache],
        "sequences": {name: split["sequences"] for name, split in manifest.splits.items()},
        "bytes_per_token": manifest.bytes_per_token["total"],
        "temperature_range": manifest.temperature_range,
        "entries": entries(folder),
    }


def entries(folder: Path) -> float | None:
    """Distinct entries a token in a sparse cache, the mean over 64 sequences; None for a dense one."""
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


def train(quality: Quality, study: Study, run: Run) -> dict[str, Any]:
    """Train and measure one student; its record."""
    folder = study.out / "caches" / run.source
    if run.cache in grid.FORMER and not (folder / "manifest.json").exists():
        stop(2, f"{folder} is missing, and only kdtrain at commit 05af2d3 builds it: its samples are independent")
    steps = max(run.steps // quality.settings.divisor, 1)
    every = max(steps // 10, min(steps, 250))
    trained, own = study.train(
        f"runs/{run.name}",
        *("--student", f"{student(quality, run)}", "--steps", f"{steps}", "--lr", f"{run.lr:g}"),
        *("--eval-freq", f"{every}", "--checkpoint-freq", f"{steps}", "--keep-rolling", "1"),
        *("--seed", f"{run.seed}", *run.arguments),
        cache=f"caches/{run.source}",
    )
    # the cache of the test split calls it train, as every cache calls the split that was asked for
    test = ("--cache", f"{study.cache(f'caches/{run.corpus}-test')}", "--split", "train")
    measured = study.kdtrain("evaluate", "--student", f"{study.out}/runs/{run.name}", *test)
    return record(quality, run, own, trained, measured)


def student(quality: Quality, run: Run) -> Path:
    """Write the spec of a run's student: the shipped one with the attention of the grid."""
    shipped, spec = ROOT / grid.STUDENTS[run.student], quality.out / f"students/{run.student}.toml"
    text = shipped.read_text().replace('"../teachers/', f'"{ROOT / "teachers"}/')
    spec.parent.mkdir(parents=True, exist_ok=True)
    publish_text(spec, f'attention = "{grid.ATTENTION}"\n{text}', "student")
    return spec


def record(
    quality: Quality, run: Run, kept: RunRecord, trained: dict[str, Any], measured: dict[str, Any]
) -> dict[str, Any]:
    """The record of one student."""
    path = [round(line["T"], 4) for line in kept.steps if "T" in line]
    moving = path if len(set(path)) > 1 else path[:1]
    return {
        **dataclasses.asdict(run),
        "parameters": kept.environment["student"]["parameters"],
        "tokens": trained["tokens"],
        "tokens_per_second": short(kept.median_rate()),
        "made_with": made_with(quality.out / "runs" / run.name, quality),
        "T": moving[:: max(len(moving) // 100, 1)],
        "validation": {
            "step": [line["step"] for line in kept.validations],
            **{name: [short(line[f"validation/{name}"]) for line in kept.validations] for name in ("loss", "kl")},
        },
        "test": {name: short(measured[name]) for name in MEASURES},
        "calibration": [{name: short(value) for name, value in each.items()} for each in measured["calibration"]],
    }


def made_with(folder: Path, quality: Quality) -> dict[str, Any]:
    """Versions, processor and precision of a run; nothing that names a machine or a person."""
    asked = {"commit": commit(), "at_once": quality.at_once, "attention": grid.ATTENTION}
    return environment(folder) | asked


def measure_speed(quality: Quality, kdtrain: Kdtrain) -> None:
    """Tokens a second of each side of `TIMED` and of an online teacher: `ROUNDS` short runs each, in turn."""
    settings, sides = quality.settings, {name: run for run, name in grid.TIMED.items()}
    sides |= {grid.ONLINE: Run(cache="dense", options=grid.ALONE)}
    study = study_of(quality, sides.values(), kdtrain)
    steps = max(grid.TIMED_STEPS // settings.divisor, 1)
    online = ("--teacher", settings.teacher, "--data", "stdlib", "--seq-len", f"{settings.seq_len}")
    found: dict[str, list[float | None]] = {name: [] for name in sides}
    for turn in range(grid.ROUNDS):
        for name, run in sides.items():
            folder = f"speed/{name.replace(' ', '-')}-{turn}"
            _, last = study.train(
                folder,
                *("--student", f"{student(quality, run)}", *run.arguments, *(online if name == grid.ONLINE else ())),
                *("--steps", f"{steps}", "--eval-freq", f"{steps}"),
                cache=None if name == grid.ONLINE else f"caches/{run.source}",
            )
            found[name].append(short(last.median_rate()))
    write(
        quality.out / "records/speed.json",
        {"tokens_per_second": found, "made_with": made_with(quality.out / folder, quality)},
    )


def short(value: float | None) -> float | None:
    """A number with six digits behind the point, enough for every table."""
    return None if value is None else round(value, 6)


def publish(quality: Quality) -> None:
    """Write all records as one, and the page and the pictures where they are the published ones."""
    parts = {path.stem: json.loads(path.read_text()) for path in sorted((quality.out / "records").glob("*.json"))}
    speed = {name: part for name, part in parts.items() if name == "speed"}
    caches = {name.removeprefix("cache-"): part for name, part in parts.items() if name.startswith("cache-")}
    runs = [part for name, part in parts.items() if name not in speed and "seed" in part]
    result = {"settings": dataclasses.asdict(quality.settings), "caches": caches, **speed, "runs": runs}
    published = quality.settings == Settings() and quality.out == Quality().out
    file = (RESULTS if published else quality.out) / "quality.json"
    file.write_text(compact(result))
    pictures = figures.draw_quality(result, FIGURES if published else quality.out)
    print(f"{len(runs)} students: {file}", *pictures, sep="\n")
    if published:
        tables.fill_page("quality")


if __name__ == "__main__":
    main(options(Quality))
