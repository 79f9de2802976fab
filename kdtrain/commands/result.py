"""How a run ended: `result.json`, which is also what `distill --json` prints."""

import contextlib
import json
from collections import Counter
from pathlib import Path
from typing import Any, TypedDict

from kdtrain.commands.common import finite
from kdtrain.files import SMALL, open_regular, parse_json, publish_text, read_json, typed
from kdtrain.ranks import is_main, peak_memory_mb
from kdtrain.training.trainer import Trainer

RESULT = "result.json"


class _Event(TypedDict):
    event: str
    level: str


class Ended(TypedDict):
    """What other commands read of it."""

    stop_reason: str
    error: str | None
    step: int
    steps: int


class _Other(TypedDict):
    """What is read of the result of another run."""

    objective: str
    cache: str
    student_name: str
    tokens: int
    best_validation_loss: float


def how_it_ended(trainer: Trainer, reason: str, error: str | None = None) -> dict[str, Any]:
    """What became of the run, by the names of `result.json`: losses in nats a token, None where nothing is known."""
    progress, config = trainer.state.progress, trainer.config
    distils = trainer.has_teacher and config.objective.distils
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
        "tokens_per_second": round(trainer.tokens / trainer.seconds, 1) if trainer.seconds else None,
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
        "warnings": _warnings(config.out),
        "cache": trainer.identity["cache"],
        "student_name": _student_name(trainer),
        "student": None,
        "micro_batch_size": trainer.micro,
        "peak_memory_mb": round(peak_memory_mb(trainer.student.device), 1),
    }
    if trainer.adaptive is not None:
        controller = trainer.adaptive.controller
        result |= {"steps_quantized": controller.steps_quantized, "switches": controller.switches}
    return result


def write_result(trainer: Trainer, result: dict[str, Any]) -> None:
    """Publish it in the run's folder, on rank 0; what a run that has ended took stays when it is started again.

    RunError: the folder cannot be written.
    """
    if is_main() and not (trainer.tokens == 0 and _told(trainer.config.out, result)):
        publish_text(trainer.config.out / RESULT, json.dumps(finite(result), indent=1) + "\n", "trainer.result")


def ended(out: Path) -> Ended | None:
    """How the run in a folder ended; None where nothing is known."""
    try:
        return read_json(out / RESULT, Ended)
    except (OSError, ValueError):
        return None


def _told(out: Path, result: dict[str, Any]) -> bool:
    before = ended(out)
    return before is not None and (before["stop_reason"], before["step"]) == (result["stop_reason"], result["step"])


def log_outcome(trainer: Trainer) -> None:
    """Warn of a student that is not better than it began, or than plain cross-entropy."""
    progress = trainer.state.progress
    first, last, best, number = progress.first_loss, progress.last_loss, progress.best_loss, progress.best_step
    if first is None or last is None or best is None:
        return
    if last > first or best >= first:
        what = "ended worse than it began" if last > first else "is no better than it began"
        losses = f"validation loss {first:.4f}, at the end {last:.4f}; exported is that of step {number}, {best:.4f}"
        trainer.writers.warning("no-gain", progress.step, f"the student {what}: {losses}")
    if (plain := _plain_cross_entropy(trainer)) is not None and best >= plain[1]:
        there = f"{plain[1]:.4f}, that of plain cross-entropy on this cache in {plain[0]}"
        trainer.writers.warning(
            "no-gain", progress.step, f"the student's validation loss {best:.4f} is not below {there}"
        )


def _below(loss: float | None, other: float | None) -> bool | None:
    return None if loss is None or other is None else loss < other


def _student_name(trainer: Trainer) -> str:
    described: Any = trainer.identity["student"]
    return str(described["name"])


def _plain_cross_entropy(trainer: Trainer) -> tuple[str, float] | None:
    """The best run beside this one that trained the same student by cross-entropy, on as many tokens of the same cache.

    Its loss; None where there is none, and for a run by cross-entropy.
    """
    if not (trainer.has_teacher and trainer.config.objective.distils):
        return None
    found: list[tuple[float, str]] = []
    for path in sorted(trainer.config.out.parent.glob(f"*/{RESULT}")):
        with contextlib.suppress(OSError, ValueError):
            other = read_json(path, _Other)
            theirs = other["cache"], other["student_name"], other["tokens"]
            same = theirs == (trainer.identity["cache"], _student_name(trainer), trainer.state.progress.tokens)
            if same and other["objective"] == "cross-entropy":
                found.append((other["best_validation_loss"], str(path.parent)))
    return min(found)[::-1] if found else None


def _warnings(out: Path) -> dict[str, int]:
    """How many warnings of each kind the run has had, over all its starts."""
    counts: Counter[str] = Counter()
    with contextlib.suppress(OSError, ValueError), open_regular(out / "events.jsonl") as file:
        for line in iter(lambda: file.readline(SMALL), b""):
            with contextlib.suppress(ValueError):
                event = typed(parse_json(line.decode()), _Event)
                counts[event["event"]] += event["level"] == "warning"
    return {kind: count for kind, count in sorted(counts.items()) if count}
