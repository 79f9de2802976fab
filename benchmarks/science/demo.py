"""The demonstration: the shipped teacher into a student of a fifth of its size, with and without distillation.

It runs the real command, as a user would: `kdtrain cache-teacher` once; then, for each seed, `kdtrain distill` twice on
the same cache, tokens, steps and learning rate, by cross-entropy (`--alpha 0`) and by distillation with the command's
defaults; and `kdtrain evaluate` for both students, on the test split, against the teacher itself. If interrupted, the
same command resumes.

Three seeds of the default settings are the published result: `benchmarks/results`, `benchmarks/figures` and the table
in docs/measured.md, which `python -m benchmarks.tables demo` writes as well. A plain `make demo` draws into
`benchmarks/figures/local`, any other demo into its own folder.
"""

import dataclasses
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tyro

from benchmarks import figures, tables
from benchmarks.harness import FIGURES, RESULTS, STUDENT, TEACHER, write
from benchmarks.harness.command import Kdtrain, claim, environment, stop
from benchmarks.harness.study import Study
from kdtrain.monitor.record import RunRecord

RESULT = RESULTS / "demo.json"
PUBLISHED_SEEDS = 3


@dataclass(frozen=True, kw_only=True)
class Settings:
    """What decides the result of a demo. The defaults are made for four minutes on two cores."""

    teacher: str = TEACHER
    """Spec of the teacher."""
    student: str = STUDENT
    """Spec of the student."""
    seq_len: int = 256
    """Tokens in a sequence."""
    sequences: int = 3000
    """Sequences of the train split that the teacher is cached over."""
    validation_sequences: int = 128
    """Sequences of the validation split beside them."""
    test_sequences: int = 400
    """Sequences of the test split that both students are measured on."""
    steps: int = 300
    """Optimizer steps of each student."""
    batch_size: int = 16
    """Sequences in an optimizer step."""
    lr: float = 3e-3
    """Peak learning rate of both students."""
    eval_freq: int = 50
    """Steps between validations."""
    compile: bool = True
    """Compile the students."""


@dataclass(frozen=True, kw_only=True)
class Demo:
    """Distil the shipped teacher into a small student, and show what it gained over cross-entropy."""

    seeds: int = 1
    """Pairs of students, one of each kind, that differ in their seed."""
    out: Path = Path("runs/demo")
    """The folder of the demo: cache, runs, and what is not published."""
    settings: tyro.conf.OmitArgPrefixes[Settings] = dataclasses.field(default_factory=Settings)


def main(demo: Demo) -> None:
    """Run the demo, or what is left of it, and show the table and where the pictures are."""
    if demo.seeds < 1:
        stop(2, f"--seeds {demo.seeds} makes no student; give at least 1")
    started = time.monotonic()
    claim(demo.out, demo.settings)
    with Kdtrain() as kdtrain:
        result = run(demo, kdtrain)
    file, folder = places(demo)
    write(file, result)
    pictures = figures.draw_demo(result, folder)
    if file == RESULT:
        tables.fill_page("demo")
    tables.show_demo(result)
    print(f"result: {file}\npictures: {', '.join(map(str, pictures))}")
    print(f"took {(time.monotonic() - started) / 60:.1f} minutes", file=sys.stderr)


def run(demo: Demo, kdtrain: Kdtrain) -> dict[str, Any]:
    """The record of the whole demo."""
    settings = demo.settings
    study = Study(demo.out, kdtrain, {"cache": cache_words(settings)}, distill_words(settings))
    cache = study.build()
    grid = {f"{kind}-{seed}": (kind, seed) for seed in range(demo.seeds) for kind in tables.KINDS}

    def student(name: str, entry: tuple[str, int]) -> dict[str, Any]:
        trained, own = study.train(name, *OBJECTIVES[entry[0]], "--seed", f"{entry[1]}")
        measured = kdtrain("evaluate", "--student", f"{demo.out / name}", *evaluate_words(settings))
        return {"student": entry[0], "seed": entry[1], **record(trained, own, measured)}

    return {
        "settings": dataclasses.asdict(settings),
        "cache": {name: cache[name] for name in ("sequences", "tokens", "bytes_per_token")},
        "runs": study.records(grid, student),
        "environment": environment(demo.out / next(reversed(grid))),
    }


OBJECTIVES = {"cross-entropy": ("--alpha", "0"), "distilled": ()}
"""Options of both students; the distilled one has the command's defaults."""


def cache_words(settings: Settings) -> list[str]:
    """Options of the cache."""
    return [
        *("--teacher", settings.teacher, "--data", "stdlib", "--seq-len", f"{settings.seq_len}"),
        *("--num-sequences", f"{settings.sequences}", "--validation-sequences", f"{settings.validation_sequences}"),
    ]


def distill_words(settings: Settings) -> list[str]:
    """Options of every student."""
    return [
        *("--student", settings.student, "--steps", f"{settings.steps}", "--batch-size", f"{settings.batch_size}"),
        *("--lr", f"{settings.lr}", "--eval-freq", f"{settings.eval_freq}"),
        *([] if settings.compile else ["--no-compile"]),
    ]


def evaluate_words(settings: Settings) -> list[str]:
    """Options that measure a student against the teacher itself, on text that neither has learned from."""
    return [
        *("--teacher", settings.teacher, "--data", "stdlib", "--split", "test", "--seq-len", f"{settings.seq_len}"),
        *("--num-sequences", f"{settings.test_sequences}"),
    ]


def record(trained: dict[str, Any], run: RunRecord, measured: dict[str, Any]) -> dict[str, Any]:
    """One student: how it was trained, its learning curves, and what the test split says."""
    own, measures = ("student", "sequences", "calibration"), ("loss", "kl", "teacher_loss")
    return {
        **{name: trained[name] for name in ("step", "tokens", "seconds")},
        "tokens_per_second": run.median_rate("tok/s"),
        "validation": {
            "step": [line["step"] for line in run.validations],
            **{name: [line[f"validation/{name}"] for line in run.validations] for name in measures},
        },
        "test": {name: value for name, value in measured.items() if name not in own},
        "calibration": measured["calibration"],
    }


def places(demo: Demo) -> tuple[Path, Path]:
    """The file of the result and the folder of the pictures: the published ones, or those of this demo alone."""
    published = demo.settings == Settings() and demo.seeds >= PUBLISHED_SEEDS
    if published:
        return RESULT, FIGURES
    return demo.out / "demo.json", FIGURES / "local" if demo.out == Demo().out else demo.out


if __name__ == "__main__":
    main(tyro.cli(Demo))
