"""Is a run well? A small table of rules over what it has logged, each with the knob to turn.

A run asks them while it trains (`training.reporter`; waiting for data it notices by `watchers.DataWait`). `kdtrain
inspect RUN`, with `--watch` again and again, asks them from outside, where a run that no longer says anything is
noticed too. Every rule is a pure function of `Signs`.
"""

import math
import os
import shutil
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from kdtrain.monitor.record import Line, RunRecord
from kdtrain.tables import duration, number, size

WINDOW = 50
"""Steps over which training losses are averaged."""
_PATIENCE = 4
"""Validations without a better one before a run counts as one without progress."""
_STALLED, _SLOWER = 300.0, 20.0
"""A run stalls when a step takes so many seconds, and so many times the median."""
_VALIDATES = 1800.0
"""Seconds that a validation may take while none was timed; later ones may take twice the longest."""
_MOVED = 0.01
"""The share of the way from its first loss to the teacher's that a run goes in `_PATIENCE` validations at least."""
_AT_RISK = 3600.0
"""Seconds of training that a crash may cost before a rule speaks."""
_DATA_WAIT = 0.1
"""The share of a step's time that may go by waiting for its data, as in `watchers.DataWait`."""


@dataclass(frozen=True, kw_only=True)
class Signs:
    """What the rules look at; None and empty where it is not known."""

    step: int
    """The last finished step."""
    idle: float | None = None
    """Seconds since it ended."""
    step_seconds: float | None = None
    """The median of the last steps."""
    validates: bool = False
    """Whether a validation is due after the last step, and not logged yet."""
    validation_seconds: float | None = None
    """The longest of the validations so far, with the step after it."""
    saved_step: int | None = None
    """The step of the newest checkpoint."""
    free_mib: float | None = None
    """Of the disk that holds the run."""
    checkpoint_mib: float | None = None
    """Size of the newest checkpoint."""
    data_wait: float | None = None
    """The share of the last steps' time that went by waiting for data; None with an online teacher."""
    losses: Sequence[float] = ()
    """Cross-entropies of the last steps, nats a token: the objective changes with alpha and T."""
    validations: Sequence[tuple[int, float]] = ()
    """Step and loss, nats a token."""
    teacher_loss: float | None = None
    """The teacher's validation loss, nats a token."""

    @classmethod
    def of(cls, folder: Path, record: RunRecord, now: float) -> "Signs":
        """Those of the run in `folder`; `now` in seconds since 1970."""
        steps, seconds = record.steps[-WINDOW * 4 :], []
        for each in steps[-WINDOW:]:
            if (time := _seconds(each)) is not None:
                seconds.append((time, _number(each, "data_wait_s") or 0.0))
        last = int(record.metrics[-1]["step"]) if record.metrics else 0
        idle = None
        if record.metrics:
            idle = max(now - (folder / "metrics.jsonl").stat().st_mtime, 0.0)
        validated = {int(each["step"]) for each in record.validations}
        paused = [_seconds(each) for each in steps if int(each["step"]) - 1 in validated]
        saved = [each.step for each in record.events if each.event == "checkpoint"]
        teacher = record.options.get("run", {}).get("teacher")
        waited = sum(wait for _, wait in seconds) / total if (total := sum(each for each, _ in seconds)) else None
        return cls(
            step=last,
            idle=idle,
            step_seconds=statistics.median(each for each, _ in seconds) if seconds else None,
            validates=last not in validated and _validation_due(last, record),
            validation_seconds=max((each for each in paused if each is not None), default=None),
            saved_step=saved[-1] if saved else None,
            free_mib=free_mib(folder),
            checkpoint_mib=newest_mib(folder / "checkpoints"),
            data_wait=waited if teacher is None and len(seconds) >= WINDOW // 2 else None,
            losses=[loss for each in steps if (loss := _number(each, "ce" if "ce" in each else "loss")) is not None],
            validations=[
                (int(each["step"]), loss)
                for each in record.validations
                if (loss := _number(each, "validation/loss")) is not None
            ],
            teacher_loss=next(
                (found for each in record.validations[::-1] if (found := _number(each, "validation/teacher_loss"))),
                None,
            ),
        )


def stalled(signs: Signs) -> str | None:
    """No step for much longer than a step, or the validation after it, takes."""
    limit = max(_STALLED, _SLOWER * (signs.step_seconds or 0.0))
    if signs.validates:
        limit = max(limit, _VALIDATES if signs.validation_seconds is None else 2 * signs.validation_seconds)
    if signs.idle is None or signs.idle < limit:
        return None
    usual = "" if signs.step_seconds is None else f" (a step takes {number(round(signs.step_seconds, 2))} s)"
    return f"no step for {duration(signs.idle)}{usual}"


def no_checkpoint(signs: Signs) -> str | None:
    """Training that a crash would lose."""
    if signs.step_seconds is None or signs.saved_step is None:
        return None
    steps = signs.step - signs.saved_step
    lost = steps * signs.step_seconds
    return None if lost < _AT_RISK else f"no checkpoint for {steps:,} steps: a crash now loses {duration(lost)}"


def disk(signs: Signs) -> str | None:
    """No room for two more checkpoints: one is written beside those that exist."""
    if signs.free_mib is None or not signs.checkpoint_mib or signs.free_mib >= 2 * signs.checkpoint_mib:
        return None
    return f"{size(signs.free_mib)} of disk are left, and a checkpoint takes {size(signs.checkpoint_mib)}"


def data_wait(signs: Signs) -> str | None:
    """Steps that wait for their data."""
    if signs.data_wait is None or signs.data_wait <= _DATA_WAIT:
        return None
    return f"training waits for its data in {signs.data_wait:.0%} of the time"


def plateau(signs: Signs) -> str | None:
    """A validation loss that no longer falls while it is above the teacher's."""
    finite = [each for each in signs.validations if math.isfinite(each[1])]
    if len(finite) <= _PATIENCE:
        return None
    step, best = min(finite, key=lambda each: each[1])
    behind = sum(each > step for each, _ in finite)
    if behind < _PATIENCE or (signs.teacher_loss is not None and best <= signs.teacher_loss):
        return None
    teacher = "" if signs.teacher_loss is None else f" (teacher {signs.teacher_loss:.3f})"
    return f"the last {behind} validations are not below {best:.3f} of step {step:,}{teacher}"


def flat(signs: Signs) -> str | None:
    """A validation loss that stays where it began, far above the teacher's."""
    finite = [each for each in signs.validations if math.isfinite(each[1])]
    if len(finite) <= _PATIENCE or signs.teacher_loss is None:
        return None
    first, best, teacher = finite[0][1], min(loss for _, loss in finite), signs.teacher_loss
    if not 0 < first - best < _MOVED * (first - teacher):  # never below the first: a plateau
        return None
    return f"validation began at {first:.3f} and is at {best:.3f} after step {finite[-1][0]:,} (teacher {teacher:.3f})"


def diverging(signs: Signs) -> str | None:
    """A cross-entropy that rises by more than its own noise, half a window after half a window."""
    half = WINDOW // 2
    finite = [each for each in signs.losses if math.isfinite(each)]
    means = [math.fsum(finite[end - half : end]) / half for end in range(len(finite), half - 1, -half)][::-1]
    if len(means) < 4 or not all(before < after for before, after in pairwise(means[-4:])):
        return None
    noise = statistics.stdev(finite[-4 * half :]) / math.sqrt(half)
    if means[-1] - means[-4] <= max(6 * noise, 0.1 * abs(means[-4])):
        return None
    return f"the cross-entropy of training rises: {means[-4]:.3f}, then {means[-1]:.3f}, {3 * half} steps later"


@dataclass(frozen=True)
class Rule:
    """A rule and the knob to turn."""

    check: Callable[[Signs], str | None]
    """Returns what is wrong, or None."""
    knob: str


RULES: Mapping[str, Rule] = {
    "stalled": Rule(
        stalled, "look at the process, the GPU and the disk; Ctrl-C stops it, and the same command resumes"
    ),
    "no-checkpoint": Rule(no_checkpoint, "lower --checkpoint-minutes or --checkpoint-freq"),
    "disk-low": Rule(disk, "make room, or lower --keep-rolling"),
    "data-wait": Rule(
        data_wait, "put the cache on a faster disk, or leave a core for reading; raise --server-concurrency"
    ),
    "plateau": Rule(plateau, "lower --lr, cache more text, or end at a plateau: --early-stopping"),
    "flat": Rule(flat, "raise --lr, or give it fewer --warmup-steps"),
    "diverging": Rule(diverging, "lower --lr, or give it more --warmup-steps"),
}
"""By the kind of the warning."""


def findings(signs: Signs) -> dict[str, str]:
    """What is wrong, by kind, with the knob to turn."""
    found = {kind: rule.check(signs) for kind, rule in RULES.items()}
    return {kind: f"{text}; {RULES[kind].knob}" for kind, text in found.items() if text is not None}


def free_mib(folder: Path) -> float | None:
    """MiB that are free on the disk of a folder; None where it cannot be asked."""
    try:
        return shutil.disk_usage(folder).free / 2**20
    except OSError:
        return None


def newest_mib(checkpoints: Path) -> float | None:
    """MiB of the folder that the link `latest` points to."""
    try:
        with os.scandir(checkpoints / "latest") as files:
            return sum(each.stat().st_size for each in files if each.is_file()) / 2**20
    except OSError:
        return None


def _number(line: Line, name: str) -> float | None:
    """A number of a line that may be anything."""
    value: Any = line.get(name)
    return float(value) if isinstance(value, int | float) and math.isfinite(value) else None


def _seconds(line: Line) -> float | None:
    """How long a step took, with what ran since the one before; None where it is not known."""
    rate, tokens = _number(line, "tok/s_last"), _number(line, "tokens")
    return tokens / rate if rate and tokens else None


def _validation_due(step: int, record: RunRecord) -> bool:
    """Whether a run validates after a step, as `training.schedule.validation_interval` has it."""
    total, every = record.environment.get("steps"), record.options.get("monitor", {}).get("eval_freq")
    if type(total) is not int or type(every) is not int or every < 1:
        return False
    return step == total or step % (every if total >= every else max(total // 4, 1)) == 0
