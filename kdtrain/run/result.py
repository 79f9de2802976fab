"""The result of a run: `result.json`, which `distill --json` also prints."""

import contextlib
from collections import Counter
from pathlib import Path
from typing import NotRequired, TypedDict

from kdtrain.files import read_json
from kdtrain.monitor.record import events

RESULT = "result.json"


class Result(TypedDict):
    """The entries of result.json that other commands read."""

    stop_reason: str
    error: str | None
    step: int
    steps: int
    best_step: NotRequired[int | None]
    merged_validation_loss: NotRequired[float | None]


class _OtherResult(TypedDict):
    """The entries that a run compares with its own."""

    objective: str
    cache: str
    student_name: str
    tokens: int
    best_validation_loss: float


def read_result(out: Path) -> Result | None:
    """Return the result of the run in a folder; None without a valid result.json."""
    try:
        return read_json(out / RESULT, Result)
    except (OSError, ValueError):
        return None


def below(loss: float | None, other: float | None) -> bool | None:
    """Whether `loss` is below `other`; None where one of them is missing."""
    return None if loss is None or other is None else loss < other


def best_plain_run(out: Path, job: tuple[str, str, int]) -> tuple[str, float] | None:
    """Folder and loss of the best run by cross-entropy beside the run `out`; None without one.

    job: the cache, the student's name and the tokens that it must share.
    """
    runs: list[tuple[float, str]] = []
    for path in sorted(out.parent.glob(f"*/{RESULT}")):
        with contextlib.suppress(OSError, ValueError):
            other = read_json(path, _OtherResult)
            same = (other["cache"], other["student_name"], other["tokens"]) == job
            if same and other["objective"] == "cross-entropy":
                runs.append((other["best_validation_loss"], str(path.parent)))
    return min(runs)[::-1] if runs else None


def count_warnings(out: Path) -> dict[str, int]:
    """The number of warnings of each kind, over all starts of the run."""
    with contextlib.suppress(OSError, ValueError):
        return dict(sorted(Counter(each.event for each in events(out) if each.level == "warning").items()))
    return {}
