"""The result of a run: `result.json`, which `distill --json` also prints."""

import contextlib
import json
from collections import Counter
from pathlib import Path
from typing import Any, TypedDict

from kdtrain.commands.common import finite
from kdtrain.errors import RunError
from kdtrain.files import publish_text, read_json
from kdtrain.monitor.record import events
from kdtrain.ranks import is_main, peak_memory_mb
from kdtrain.training.trainer import Trainer

RESULT = "result.json"


class Result(TypedDict):
    """The entries of result.json that other commands read."""

    stop_reason: str
    error: str | None
    step: int
    steps: int


class _OtherResult(TypedDict):
    """The entries that a run compares with its own."""

    objective: str
    cache: str
    student_name: str
    tokens: int
    best_validation_loss: float


def run_result(trainer: Trainer, reason: str, error: str | None = None) -> dict[str, Any]:
    """Return the contents of `result.json`: losses in nats a token, None where there is no value."""
    progress, config = trainer.state.progress, trainer.config
    distils = trainer.stepper.has_teacher and config.objective.distils
    best, plain = progress.best_loss, _plain_cross_entropy(trainer)
    result: dict[str, Any] = {
        "run": str(config.out),
        "stop_reason": reason,
        "error": error,
        "stopped_by": trainer.stopped_by,
        "step": progress.step,
        "steps": trainer.total,
        "decay_from": progress.decay_from,
        "tokens": progress.tokens,
        "seconds": round(trainer.seconds, 1),
        "tokens_per_second": round(trainer.stepper.tokens / trainer.seconds, 1) if trainer.seconds else None,
        "temperature": float(trainer.student.temperature.value().detach()) if distils else None,
        "objective": "distillation" if distils else "cross-entropy",
        "first_validation_loss": progress.first_loss,
        "best_validation_loss": best,
        "best_step": progress.best_step,
        "last_validation_loss": progress.last_loss,
        "teacher_validation_loss": progress.teacher_loss,
        "cross_entropy_validation_loss": None if plain is None else plain[1],
        "cross_entropy_run": None if plain is None else plain[0],
        "better_than_start": _below(best, progress.first_loss),
        "better_than_teacher": _below(best, progress.teacher_loss),
        "better_than_cross_entropy": _below(best, None if plain is None else plain[1]),
        "rollbacks": progress.rollbacks,
        "skipped_steps": progress.skips,
        "warnings": _count_warnings(config.out),
        "cache": trainer.checkpoints.identity["cache"],
        "student_name": _student_name(trainer),
        "student": None,
        "micro_batch_size": trainer.stepper.micro,
        "peak_memory_mb": round(peak_memory_mb(trainer.student.device), 1),
    }
    if trainer.state.adaptive is not None:
        controller = trainer.state.adaptive.controller
        result |= {"steps_quantized": controller.steps_quantized, "switches": controller.switches}
    return result


def write_result(trainer: Trainer, result: dict[str, Any]) -> None:
    """Publish result.json in the run's folder, on rank 0. Starting a finished run again keeps its seconds and tokens.

    Raises:
        RunError: the folder cannot be written.
    """
    if not is_main():
        return
    out, before = trainer.config.out, read_result(trainer.config.out)
    end = result["stop_reason"], result["step"]
    if trainer.stepper.tokens or before is None or (before["stop_reason"], before["step"]) != end:
        publish_text(out / RESULT, json.dumps(finite(result), indent=1) + "\n", "trainer.result")


def read_result(out: Path) -> Result | None:
    """Return the result of the run in a folder; None without a valid result.json."""
    try:
        return read_json(out / RESULT, Result)
    except (OSError, ValueError):
        return None


def refuse_no_progress(trainer: Trainer) -> None:
    """Raise a `RunError` if no validation was better than the first one: the best student is the initial one."""
    progress = trainer.state.progress
    first, best, step = progress.first_loss, progress.best_loss, progress.best_step
    if first is None or best is None or step is None or best < first or step == progress.step:
        return
    last = "" if progress.last_loss is None else f", {progress.last_loss:.4f} at step {progress.validated_step}"
    raise RunError(
        f"the student never got better: validation loss {first:.4f} before its first step{last}; nothing is exported; "
        "give another --lr or more --steps, and another --out, or export the last student: kdtrain export "
        f"{trainer.config.out} --checkpoint latest",
        reason="no-progress",
    )


def log_outcome(trainer: Trainer) -> None:
    """Warn when the student ended worse than it began, or is no better than a student of plain cross-entropy."""
    progress = trainer.state.progress
    first, last, best, number = progress.first_loss, progress.last_loss, progress.best_loss, progress.best_step
    if first is None or last is None or best is None:
        return
    if last > first:
        losses = f"validation loss {first:.4f}, at the end {last:.4f}; the export is of step {number}, {best:.4f}"
        trainer.writers.warning("no-gain", progress.step, f"the student ended worse than it began: {losses}")
    if (plain := _plain_cross_entropy(trainer)) is not None and best >= plain[1]:
        other = f"{plain[1]:.4f}, that of plain cross-entropy on this cache in {plain[0]}"
        trainer.writers.warning(
            "no-gain", progress.step, f"the student's validation loss {best:.4f} is not below {other}"
        )


def _below(loss: float | None, other: float | None) -> bool | None:
    return None if loss is None or other is None else loss < other


def _student_name(trainer: Trainer) -> str:
    student: Any = trainer.checkpoints.identity["student"]
    return str(student["name"])


def _plain_cross_entropy(trainer: Trainer) -> tuple[str, float] | None:
    """Folder and loss of the best sibling run of the same student by cross-entropy, on as many tokens of this cache.

    None without such a run, and for a run by cross-entropy.
    """
    if not (trainer.stepper.has_teacher and trainer.config.objective.distils):
        return None
    runs: list[tuple[float, str]] = []
    for path in sorted(trainer.config.out.parent.glob(f"*/{RESULT}")):
        with contextlib.suppress(OSError, ValueError):
            other = read_json(path, _OtherResult)
            job = other["cache"], other["student_name"], other["tokens"]
            same = job == (trainer.checkpoints.identity["cache"], _student_name(trainer), trainer.state.progress.tokens)
            if same and other["objective"] == "cross-entropy":
                runs.append((other["best_validation_loss"], str(path.parent)))
    return min(runs)[::-1] if runs else None


def _count_warnings(out: Path) -> dict[str, int]:
    """The number of warnings of each kind, over all starts of the run."""
    with contextlib.suppress(OSError, ValueError):
        return dict(sorted(Counter(each.event for each in events(out) if each.level == "warning").items()))
    return {}
