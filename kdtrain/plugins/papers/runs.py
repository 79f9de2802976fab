"""Several runs side by side: a flat record of each, and groups that differ in the seed alone.

What each number of a run is called, in which unit, how it is written, and which way is better. All of it may be of
anyone's runs. `runs` is `kd.runs`.
"""

import glob
import json
import math
import os
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from kdtrain.config.commands import DistillConfig
from kdtrain.config.values import options_of
from kdtrain.errors import UsageError, printable
from kdtrain.files import read_sealed
from kdtrain.monitor.facts import EVALUATED, Measure
from kdtrain.monitor.record import SWEEP, RunRecord, as_finite
from kdtrain.tables import duration, short, size


def _of(split: str, name: str) -> Measure:
    """Return the measure for a number of `EVALUATED` of a validation or test."""
    return replace(EVALUATED[name], label=f"{split}: {EVALUATED[name].label}")


LAST = {"last_validation_loss": "loss", "teacher_validation_loss": "teacher_loss"} | {
    name: name for name in ("teacher_bits_per_byte", "kl", "compared", "accuracy", "ece")
}
MEASURES = {
    "best_validation_loss": _of("best validation", "loss"),
    "bits_per_byte": _of("best validation", "bits_per_byte"),
    **{key: _of("last validation", name) for key, name in LAST.items()},
    "entropy_kept": EVALUATED["entropy_kept"],
    **{f"test_{name}": _of("test", name) for name in EVALUATED},
    "test_gap_closed": Measure("test: gap to the teacher closed, %", best=max),
    "last_training_loss": Measure("training loss (average), last, nats", by_token=True),
    "temperature": Measure("temperature T, last"),
    "alpha_mean": Measure("alpha, mean"),
    "alpha_last": Measure("alpha, last"),
    "parameters": Measure("parameters", short),
    "tokens": Measure("tokens", short),
    "seconds": Measure("time of its steps", duration),
    "tokens_per_second": Measure("tokens/s (median)", short),
    "peak_memory_mb": Measure("peak memory", size),
    "quantized_share": Measure("steps quantised, %"),
    **{
        name: Measure(name.replace("_", " "), short)
        for name in ("rollbacks", "skipped_steps", "switches", "resumes", "warnings")
    },
}
"""The numbers of a run, in the order of a table."""


_NOT_COMPARED = {"out", "seed", "json", "yes", "resume", "overwrite", "config", "dry_run", "write_config", "sanity"}
"""Options in which runs of a group may differ: where a run lies, and how it was started."""


@dataclass(frozen=True)
class LoggedRun:
    """A run with a name of its own among the runs shown with it."""

    name: str
    folder: Path
    record: RunRecord
    options: dict[str, Any]
    """Every option, by name; the default where config.toml has none."""
    numbers: dict[str, float | None]
    """By the names of `MEASURES`."""

    @property
    def seed(self) -> Any:
        """The seed of weights, order and dropout."""
        return self.options["seed"]

    @property
    def status(self) -> str:
        """How the run ended."""
        result = self.record.result
        last = max((int(line["step"]) for line in self.record.metrics), default=0)
        if result is None:
            return f"no result at step {last}: training, or killed"
        total = as_finite(result.get("steps"))
        return f"{printable(str(result.get('stop_reason')))[:40]} {last:,}" + (f"/{total:,.0f}" if total else "")

    @property
    def student(self) -> str:
        """The name and the size of the student."""
        parameters = self.numbers["parameters"]
        name = printable(str(self.record.stated("student", "name") or self.options.get("student")))[:80]
        return f"{name} ({short(parameters)})" if parameters else name

    @property
    def cache(self) -> str | None:
        """The digest of the cache that the run learned from; across tokenizers not the view's."""
        found = (
            self.record.stated("alignment", "cache")
            or self.record.environment.get("cache")
            or (self.record.result or {}).get("cache")
        )
        return found if isinstance(found, str) else None

    @property
    def tokenizer(self) -> str | None:
        """The digest of the tokenizer of the training tokens, where the run states it."""
        found = self.record.environment.get("tokenizer")
        return found if isinstance(found, str) else None

    @property
    def estimator(self) -> Any:
        """The source of the validations' KL, as text; None where the run does not state it."""
        found = self.record.environment.get("kl_estimator")
        return found and printable(str(found))[:80]

    @property
    def compared(self) -> list[str]:
        """The options in which the runs of one group agree."""
        return [name for name in self.options if name not in _NOT_COMPARED]

    def identity(self, option: str) -> str:
        """Return the value of an option, comparable over machines: a cache's digest, a student's description."""
        value = self.options.get(option)
        if option == "cache" and self.cache is not None:
            value = self.cache
        elif option == "student" and (built := self.record.environment.get("student")):
            value = [os.path.basename(str(value)), built]
        return json.dumps(value, sort_keys=True, default=str)


def runs(pattern: str | os.PathLike[str] | Iterable[str | os.PathLike[str]]) -> list[dict[str, Any]]:
    """Return flat records of every run of a pattern such as `runs/*`, or of a list of folders, for `pandas.DataFrame`.

    A record has `run`, `arm` (that of a sweep, else the name that `compare` gives its group), `seed`, `status`,
    `student`, `cache`, `kl_estimator` (what the KL of a validation is measured from: two of them do not compare), the
    numbers by name (losses in nats per token; None where there is none), and each option as `options/NAME`. The curves
    are `kd.RunRecord.read(record["run"]).metrics`.

    Raises:
        UsageError: a folder of the list is not a run, or the pattern finds no run.
    """
    if isinstance(pattern, str | os.PathLike):
        records: dict[Path, RunRecord] = {}
        places = sorted(glob.glob(os.path.expanduser(os.fspath(pattern))))
        for path in (run for place in places for run in _runs_in(Path(place))):
            with suppress(UsageError):  # a pattern may match anything
                records[path] = _read(path)
        if not records:
            raise UsageError(f"no folder of {printable(str(pattern))[:200]} holds a run")
        found = _named(list(records), list(records.values()))
    else:
        found = read_runs([Path(each) for each in pattern])
    arms = {run.folder: name for name, group in grouped(found) for run in group}
    return [
        {"run": str(run.folder), "arm": arms[run.folder], "seed": run.seed, "status": run.status}
        | {"student": run.student, "cache": run.cache}
        | {"kl_estimator": run.estimator, **run.numbers}
        | {f"options/{name}": value for name, value in run.options.items()}
        for run in found
    ]


def read_runs(folders: Sequence[Path], most: int | None = None) -> list[LoggedRun]:
    """Read the runs in `folders`, which are named by the ends of their paths that tell them apart.

    A folder of a sweep stands for its runs, in the order of its file.

    Raises:
        UsageError: a folder holds no run or one that cannot be read, one is named twice, or they are too many.
    """
    folders = [run for folder in folders for run in _runs_in(folder)]
    if most is not None and len(folders) > most:
        raise UsageError(f"{len(folders)} runs are more than can be shown side by side; name at most {most}")
    records = [_read(folder) for folder in folders]
    real = [os.path.realpath(folder) for folder in folders]
    twice = [folder for place, folder in enumerate(folders) if real[place] in real[:place]]
    if twice:
        raise UsageError(f"{twice[0]} is named twice; name each run once")
    return _named(folders, records)


def _runs_in(folder: Path) -> list[Path]:
    """Return the runs that have begun of the sweep in `folder`; the folder itself where there is none."""
    names: Iterable[str] = ()
    with suppress(OSError, ValueError):
        names = read_sealed(folder / SWEEP)
    return [folder / name for name in names if (folder / name / "environment.json").is_file()] or [folder]


def _named(folders: Sequence[Path], records: list[RunRecord]) -> list[LoggedRun]:
    return [
        LoggedRun(name, folder, record, _options(record), _measured(record))
        for name, folder, record in zip(_names(folders), folders, records, strict=True)
    ]


def _names(folders: Sequence[Path]) -> list[str]:
    """Return the shortest ends of the paths that are all different."""
    parts = [folder.absolute().parts for folder in folders]
    names = [each[-1] for each in parts]
    for length in range(1, max(map(len, parts), default=1) + 1):
        names = ["/".join(each[-length:]) for each in parts]
        if len(set(names)) == len(names):
            break
    return [printable(name)[-60:] for name in names]


def _read(folder: Path) -> RunRecord:
    if not folder.is_dir():
        raise UsageError(f"{folder} {'is a file' if folder.exists() else 'does not exist'}; name the folder of a run")
    try:
        record = RunRecord.read(folder)
    except ValueError as error:
        raise UsageError(f"the run {folder} cannot be read: {printable(str(error))[:300]}") from None
    except OSError as error:
        raise UsageError(f"the run {folder} cannot be read: {error.strerror}: {error.filename}") from None
    if record.stated("libraries", "kdtrain") is None and not (record.metrics and "student" in record.given):
        raise UsageError(f"{folder} is not a run (no environment.json of kdtrain); name a folder that distill wrote")
    return record


def _options(record: RunRecord) -> dict[str, Any]:
    usual = {name: each.written for name, each in options_of(DistillConfig).items()}
    return {**usual, **{name: record.given[name] for name in usual.keys() & record.given.keys()}}


def _measured(record: RunRecord) -> dict[str, float | None]:
    result = record.result or {}
    last = (record.validations or [{}])[-1]
    losses = [value for _, value in record.curve("validation/loss") if as_finite(value) is not None]
    kinds = [each.event for each in record.events]
    steps = record.steps
    quantized = [value for _, value in record.curve("quantized")]
    times = record.places("minutes")
    weights = record.alphas or (result.get("alpha_mean"), result.get("alpha_last"))

    def latest(name: str) -> float | None:
        found = record.curve(name)
        return as_finite(found[-1][1]) if found else None

    best = as_finite(result.get("best_validation_loss"))
    bits = [value for _, value in record.curve("validation/bits_per_byte") if as_finite(value) is not None]
    found: dict[str, float | None] = {
        **{f"test_{name}": as_finite(record.test.get(name)) for name in EVALUATED},
        **{key: as_finite(last.get(f"validation/{name}")) for key, name in LAST.items()},
        "best_validation_loss": min(losses, default=None) if best is None else best,
        "last_validation_loss": losses[-1] if losses else as_finite(result.get("last_validation_loss")),
        "bits_per_byte": min(bits, default=as_finite(result.get("best_bits_per_byte"))),
        "entropy_kept": as_finite(record.stated("alignment", "entropy_kept")),
        "parameters": as_finite(record.stated("student", "parameters")),
        "last_training_loss": latest("loss_avg"),
        "temperature": latest("T"),
        "alpha_mean": as_finite(weights[0]),
        "alpha_last": as_finite(weights[1]),
        "tokens": as_finite(max(record.places("tokens").values()) if steps else result.get("tokens")),
        "seconds": as_finite(60 * max(times.values())) if len(times) > 1 else as_finite(result.get("seconds")),
        "tokens_per_second": record.median_rate(),
        "peak_memory_mb": as_finite(result.get("peak_memory_mb")),
        "quantized_share": sum(quantized) / len(steps) if quantized else None,
        "rollbacks": float(kinds.count("rollback") + kinds.count("recovery")),
        "skipped_steps": float(kinds.count("skip")),
        "switches": float(kinds.count("switch")),
        "resumes": float(kinds.count("resume")),
        "warnings": float(sum(each.level == "warning" for each in record.events)),
    }
    return {name: found.get(name) for name in MEASURES}  # the gap that is closed is known among groups


def grouped(found: Sequence[LoggedRun]) -> list[tuple[str, list[LoggedRun]]]:
    """Gather runs that differ in the seed alone, in the order of their first runs, each group with its name.

    It is that of the folder that its runs share, in a sweep its arm; or else the name of its first run.

    Each run is given the share that it closes of the gap in test loss from the first group's run of its seed to the
    teacher; none where texts or tokenizers differ, or there is no gap.
    """
    groups: dict[str, list[LoggedRun]] = {}
    for run in found:
        key = json.dumps([run.identity(name) for name in sorted(run.compared)])
        groups.setdefault(key, []).append(run)
    names = [_shared(each) for each in groups.values()]
    shared = [
        name if name and names.count(name) == 1 else each[0].name
        for name, each in zip(names, groups.values(), strict=True)
    ]
    first, *_ = [*groups.values(), []]
    begin = {str(run.seed): loss for run in reversed(first) if (loss := run.numbers["test_loss"]) is not None}
    for run in (run for each in groups.values() if not apart([*first, *each], "test_loss") for run in each):
        own, teacher = run.numbers["test_loss"], run.numbers["test_teacher_loss"]
        loss = begin.get(str(run.seed), -math.inf)
        if own is not None and teacher is not None and teacher < loss:
            run.numbers["test_gap_closed"] = (loss - own) / (loss - teacher)
    return [*zip(shared, groups.values(), strict=True)]


def _shared(runs: Sequence[LoggedRun]) -> str:
    """Return the arm of the sweep that all runs belong to, or else the folder they share; empty for a single run."""
    [arm, *others] = {run.record.arm_of(run.folder) for run in runs}
    if arm and not others:
        return arm[-1]
    return os.path.commonpath([run.name for run in runs]) if len(runs) > 1 else ""


def apart(runs: Sequence[LoggedRun], name: str) -> bool:
    """Return True if a number of the runs does not compare, because it measures different things."""
    if name == "kl" and len({run.cache for run in runs}) > 1 and len({run.estimator or run.cache for run in runs}) > 1:
        return True
    if name.startswith("test_") and len({run.record.tested_on for run in runs} - {None}) > 1:
        return True
    return MEASURES[name].by_token and len({run.tokenizer for run in runs} - {None}) > 1
