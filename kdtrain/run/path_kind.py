"""What a path is: a run and whether it trains, a checkpoint, or a cache; seen from its files, without torch."""

from pathlib import Path
from typing import NotRequired, TypedDict

from kdtrain.cache.format import names as cache_format
from kdtrain.checkpoint.sealed import is_checkpoint, problem
from kdtrain.checkpoint.store import Store
from kdtrain.errors import RunError, UsageError
from kdtrain.files import is_locked, read_json, read_toml, typed
from kdtrain.monitor.progress import warn_early

LOCK = ".training"
"""The lock file: see `run_lock`."""


class _Run(TypedDict):
    student: str
    out: str
    cache: NotRequired[str | list[str] | None]


class _Config(TypedDict):
    run: _Run


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
    """Whether `folder` was written by `kdtrain distill`.

    It then has a config.toml and an environment.json, or a valid checkpoint where these are lost or unreadable. A
    config.toml alone does not make a run: it may be the user's own file for `--config`.
    """
    lost = None
    try:
        typed(read_toml(folder / "config.toml"), _Config)
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
    """Whether `distill` wrote this environment.json."""
    try:
        return bool(read_json(path, _Environment))
    except (OSError, ValueError):
        return False


def is_training(folder: Path) -> bool | None:
    """Whether a process of this machine trains the run in `folder`; None where the system does not say."""
    return is_locked(folder / LOCK)


def damage_of(checkpoint: Path) -> str | None:
    """What is wrong with a checkpoint, or None. RunError: it was removed meanwhile."""
    if (damage := problem(checkpoint)) is not None and not checkpoint.exists():
        raise RunError(f"checkpoint {checkpoint}: {damage}")
    return damage
