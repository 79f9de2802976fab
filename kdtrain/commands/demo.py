"""`kdtrain demo`: the shipped teacher into a student of a fifth of its size, with and without distillation.

One cache of the teacher over the standard library of this Python; then, for each seed, two students on the same tokens,
steps and learning rate, by cross-entropy (`--alpha 0`) and by distillation with the defaults; and both measured on the
test split against the teacher itself. The parts are those of the library, `kd.cache_teacher` and `kd.distill`.
If interrupted, the same command resumes.
"""

import dataclasses
import importlib.util
import json
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kdtrain import config as options
from kdtrain.cache.format.manifest import read_manifest
from kdtrain.commands.cache_teacher import capture_cache
from kdtrain.commands.demo_table import Run, show
from kdtrain.commands.distill import distill
from kdtrain.commands.evaluate import evaluate
from kdtrain.errors import UsageError, refuse_no_path, writing
from kdtrain.files import publish_text, read_json, read_sealed, sealed, temporary_of
from kdtrain.monitor.progress import log, setup_logging
from kdtrain.monitor.record import RunRecord
from kdtrain.ranks import refuse_many_processes
from kdtrain.tables import finite
from kdtrain.training.signals import interruptible

OBJECTIVES = {"cross-entropy": options.ObjectiveConfig(alpha=0.0), "distilled": options.ObjectiveConfig()}
"""Both students; the distilled one has the command's defaults."""
_CURVES = ("loss", "kl", "teacher_loss")


@dataclass(frozen=True, kw_only=True)
class Settings:
    """What decides the result of a demo. The defaults are made for four minutes on two cores."""

    teacher: str = "stdlib-5m"
    """Spec of the teacher."""
    student: str = "stdlib-1m"
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


QUICK = Settings(
    seq_len=128, sequences=800, validation_sequences=64, test_sequences=48, steps=80, eval_freq=20, compile=False
)
"""Under two minutes on two cores; so few steps do not repay a compilation."""


def main(config: options.DemoConfig) -> int:
    """Run the demo, or what is left of it, and show the table and where everything is.

    UsageError: the folder holds something else. RunError: a part of it failed.
    """
    started = time.monotonic()
    refuse_many_processes()
    setup_logging()
    with interruptible():
        result = run(config.out, QUICK if config.quick else Settings(), config.seeds)
    publish(config.out / "demo.json", result)
    pictures = draw(result, config.out)
    if config.json:
        print(json.dumps(finite(result)))
    else:
        show(result)
        print(f"files: {config.out}" + (f"; pictures: {', '.join(map(str, pictures))}" if pictures else ""))
    log.info("took %.1f minutes", (time.monotonic() - started) / 60)
    return 0


def run(out: Path, settings: Settings, seeds: int = 1) -> dict[str, Any]:
    """The record of the whole demo in `out`: settings, cache and a run for each student.

    Raises:
        UsageError: `out` holds something else, or a demo of other settings.
        RunError: a part of it failed.
        KeyboardInterrupt: a student was stopped by a signal, after it was saved.
    """
    claim(out, settings)
    capture = cache_config(out, settings)
    capture_cache(capture)
    manifest, runs = read_manifest(capture.out), []
    for seed in range(seeds):
        for kind in OBJECTIVES:
            file = out / "records" / f"{kind}-{seed}.json"
            if not file.exists():
                publish(file, sealed(finite(student(out / f"{kind}-{seed}", kind, seed, settings))))
            runs.append(recorded(file, kind, seed))
    counts = {name: split["sequences"] for name, split in manifest.splits.items()}
    return {
        "settings": dataclasses.asdict(settings),
        "cache": {
            "sequences": counts,
            "tokens": {name: count * settings.seq_len for name, count in counts.items()},
            "bytes_per_token": manifest.bytes_per_token["total"],
        },
        "runs": runs,
    }


def student(folder: Path, kind: str, seed: int, settings: Settings) -> Run:
    """Train one student, or finish it, and measure it: training, learning curves, and the test split."""
    trained = distill(distill_config(folder, kind, seed, settings))
    if trained["stopped_by"]:
        raise KeyboardInterrupt(trained["stopped_by"])
    log.info("measuring the student of %s on the test split", kind)
    measured = evaluate(evaluate_config(folder, settings))
    record, own = RunRecord.read(folder), ("student", "sequences", "calibration")
    curves = {name: [line[f"validation/{name}"] for line in record.validations] for name in _CURVES}
    return {
        "student": kind,
        "seed": seed,
        **{name: trained[name] for name in ("step", "tokens", "seconds")},
        "tokens_per_second": record.median_rate("tok/s"),
        "validation": {"step": [line["step"] for line in record.validations], **curves},
        "test": {name: value for name, value in measured.items() if name not in own},
        "calibration": measured["calibration"],
    }


def recorded(file: Path, kind: str, seed: int) -> Run:
    """The record of a student, without its seal. UsageError: it is damaged, or of another student."""
    try:
        record = read_sealed(file)
        if (record.get("student"), record.get("seed")) != (kind, seed):
            raise ValueError(f"it is of {record.get('student')}, seed {record.get('seed')}")
    except (OSError, ValueError) as error:
        raise UsageError(f"{file}: {error}; remove it, and the same command measures that student again") from None
    return {name: value for name, value in record.items() if name != "digest"}


def cache_config(out: Path, settings: Settings) -> options.CacheTeacherConfig:
    """The cache that all students share, of the command's default kind."""
    train, validation = settings.sequences, settings.validation_sequences
    text = options.DataConfig(
        data="stdlib", seq_len=settings.seq_len, num_sequences=train, validation_sequences=validation
    )
    return options.CacheTeacherConfig(teacher=settings.teacher, out=out / "cache", data=text)


def distill_config(folder: Path, kind: str, seed: int, settings: Settings) -> options.DistillConfig:
    """One student; the two of a seed differ in the objective alone."""
    return options.DistillConfig(
        cache=(str(folder.parent / "cache"),),
        student=settings.student,
        out=folder,
        steps=settings.steps,
        batch_size=settings.batch_size,
        seed=seed,
        objective=OBJECTIVES[kind],
        optimizer=options.OptimizerConfig(lr=settings.lr),
        precision=options.PrecisionConfig(compile=settings.compile),
        monitor=options.MonitorConfig(eval_freq=settings.eval_freq, log_to="none"),
    )


def evaluate_config(folder: Path, settings: Settings) -> options.EvaluateConfig:
    """A student against the teacher itself, on text that neither has learned from."""
    rows, seq_len = settings.test_sequences, settings.seq_len
    text = options.DataConfig(data="stdlib", split="test", seq_len=seq_len, num_sequences=rows)
    return options.EvaluateConfig(student=str(folder), teacher=settings.teacher, data=text)


def claim(out: Path, settings: Settings) -> None:
    """Start or resume in `out`. UsageError: it holds a demo of other settings, or other files."""
    refuse_no_path(str(out), "--out")
    file, now = out / "settings.json", dataclasses.asdict(settings)
    if file.exists():
        try:
            before = read_json(file, dict[str, Any])
        except (OSError, ValueError) as error:
            raise UsageError(f"{file}: {error}; name another --out") from None
        if changed := [f"{name} was {before.get(name)}" for name in now if before.get(name) != now[name]]:
            raise UsageError(f"--out {out} holds a demo of other settings ({', '.join(changed)}); name another --out")
        return
    # A command that was killed in here left at most the temporary of settings.json.
    if out.exists() and (not out.is_dir() or any(temporary_of(path.name) != file.name for path in out.iterdir())):
        raise UsageError(f"--out {out} holds something else; name another --out")
    publish(file, now)


def publish(path: Path, record: dict[str, Any]) -> None:
    """Write a record; its folder is made. RunError: it cannot be written."""
    with writing(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        publish_text(path, json.dumps(finite(record), indent=1) + "\n", "demo.record")


def draw(result: dict[str, Any], folder: Path) -> list[Path]:
    """Draw the pictures where matplotlib is installed, else say how to get it. Returns their files."""
    if importlib.util.find_spec("matplotlib") is None:
        log.info("no pictures without matplotlib: pip install 'kdtrain[plot]', and the same command draws them")
        return []
    from kdtrain.commands.demo_pictures import draw_demo

    return draw_demo(result, folder)
