"""What a path is: a run and how it ended, a checkpoint, or a cache; by its files, without torch."""

from collections import Counter
from contextlib import suppress
from pathlib import Path
from typing import NotRequired, TypedDict

from kdtrain.cache.format import names as cache_format
from kdtrain.checkpoint.sealed import is_checkpoint, problem
from kdtrain.checkpoint.store import Store
from kdtrain.errors import RunError, UsageError, warn_early
from kdtrain.files import read_json, read_toml, typed
from kdtrain.monitor.facts import RESULT
from kdtrain.monitor.record import events


class _Run(TypedDict):
    student: str
    out: str
    cache: NotRequired[str | list[str] | None]


class _Libraries(TypedDict):
    kdtrain: str | None


class _Environment(TypedDict):
    """The entries of environment.json by which kdtrain recognizes its own file."""

    python: str
    platform: str
    libraries: _Libraries


_recovered: set[Path] = set()
"""Runs for which this process has logged that config.toml is lost."""


def kind_of(path: Path) -> str:
    """Return `cache`, `run` or `checkpoint`."""
    if not path.exists():
        raise UsageError(f"{path} does not exist")
    if is_run(path):
        return "run"
    if is_checkpoint(path.resolve()):
        return "checkpoint"
    if any((path / name).exists() for name in (cache_format.MANIFEST, cache_format.SETTINGS, cache_format.SHARDS)):
        return "cache"
    raise UsageError(f"{path} is neither a cache nor a run nor a checkpoint")


def is_run(folder: Path) -> bool:
    """Return whether `folder` was written by `kdtrain distill`.

    It then has a config.toml and an environment.json, or a valid checkpoint where these are lost or unreadable. A
    config.toml alone does not make a run: it may be the user's own file for `--config`.
    """
    lost = None
    try:
        typed(read_toml(folder / "config.toml").get("run"), _Run)
    except (OSError, ValueError) as error:
        lost = "is lost" if isinstance(error, FileNotFoundError) else f"cannot be read ({error})"
    if lost is None and is_environment(folder / "environment.json"):
        return True
    name = Store(folder / "checkpoints").newest_valid()[0]
    if name is not None and lost is not None and folder.resolve() not in _recovered:
        _recovered.add(folder.resolve())
        text = f"{folder / 'config.toml'} {lost}; the options of the run are those in its checkpoint {name}"
        warn_early("lost-config", text)
    return name is not None


def is_environment(path: Path) -> bool:
    """Return whether `distill` wrote this environment.json."""
    try:
        return bool(read_json(path, _Environment))
    except (OSError, ValueError):
        return False


def damage_of(checkpoint: Path) -> str | None:
    """Return what is wrong with a checkpoint, or None. RunError: it was removed meanwhile."""
    if (damage := problem(checkpoint)) is not None and not checkpoint.exists():
        raise RunError(f"checkpoint {checkpoint}: {damage}")
    return damage


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


def best_run_beside(out: Path, cache: str, plain: tuple[str, int] | None = None) -> tuple[str, float] | None:
    """Return folder and validation loss of the best run on the same cache beside the run `out`; None without one.

    plain: of runs by cross-entropy alone, and the student's name and the tokens that they must share.
    """
    runs: list[tuple[float, str]] = []
    for path in sorted(out.parent.glob(f"*/{RESULT}")):
        with suppress(OSError, ValueError):
            other = read_json(path, _OtherResult)
            kind = other["objective"] == "cross-entropy" and (other["student_name"], other["tokens"])
            if other["cache"] == cache and plain in (None, kind) and path.parent != out:
                runs.append((other["best_validation_loss"], str(path.parent)))
    return min(runs)[::-1] if runs else None


def count_warnings(out: Path) -> dict[str, int]:
    """Count the warnings of each kind, over all starts of the run."""
    with suppress(OSError, ValueError):
        return dict(sorted(Counter(each.event for each in events(out) if each.level == "warning").items()))
    return {}
