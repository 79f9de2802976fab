"""Where a run begins: at a checkpoint of its own, at one of another run, or anew."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from kdtrain.checkpoint.store import Checkpoint
from kdtrain.commands.run_folder import changes, is_run, refuse_changes
from kdtrain.config import DistillConfig
from kdtrain.errors import RunError, UsageError
from kdtrain.monitor.progress import log, warn_early
from kdtrain.ranks import on_main, raise_on_all_ranks, reported
from kdtrain.training.state import Progress, load_saved
from kdtrain.training.trainer import Trainer

_KINDS = {"temperature": ("temperature_mode",), "hidden": ("hidden_loss", "hidden_layers")}
"""Parts of the state that other options give other entries."""


def resume_or_start(trainer: Trainer, resumed: bool) -> Path | None:
    """Take over the checkpoint the run begins at, and return its folder; None where it begins anew.

    A run that has a checkpoint of its own goes on from it, whatever `--load` says: that was its beginning.

    Raises:
        UsageError: the checkpoint is of another student, cache or teacher, or of other options.
        RunError: the checkpoint that was asked for is damaged.
    """
    wanted = trainer.config.checkpoint
    if resumed or wanted.resume not in ("auto", "never"):
        path = _resume(trainer)
        if path is not None:
            return path
    return None if wanted.load is None else start_from(trainer, wanted.load)


def _resume(trainer: Trainer) -> Path | None:
    """Take over the checkpoint that `--resume` names; None where `auto` finds none."""
    wanted = trainer.config.checkpoint.resume
    found = on_main(lambda: _find(trainer, wanted))
    if found is None:
        return None
    path = Path(found)
    with raise_on_all_ranks():
        checkpoint = load_saved(path, trainer.state.like)
        refuse_changes(checkpoint.state["options"], trainer.config, path.name)
        _refuse_strange(trainer, checkpoint, path, ("cache", "student", "teacher"))
        _take_over(trainer, checkpoint, path)
    trainer.student.temperature.set_step(max(trainer.state.progress.step - 1, 0))
    progress = trainer.state.progress
    if progress.step > trainer.total:
        raise reported(
            UsageError(f"{path.name} is beyond --steps {trainer.total}; raise --steps or name another --out")
        )
    if progress.stopped is not None and not trainer.config.stopping.early_stopping:
        log.info("the early stop (%s) is put aside by --no-early-stopping", progress.stopped)
        progress.stopped = None
    if progress.decay_from is not None and not trainer.config.stopping.early_stopping:
        log.info("the decay that a plateau began at step %d is put aside: --early-stopping is off", progress.decay_from)
        progress.decay_from = None
        if trainer.adaptive is not None:
            trainer.adaptive.controller.begin_decay(None)
    own = path.parent == trainer.store.folder.resolve()
    at = (progress.step, progress.rollbacks) if own else (-1, 0)
    if wanted != "auto" and (left := on_main(lambda: trainer.store.set_aside_after(*at))):
        log.info("set aside %s, which this run goes back behind", ", ".join(left))
    # with auto, what is later is damaged, and stays to be looked at
    if own:
        trainer.published = (progress.step, progress.validated_step)
        trainer.relink_best()  # a kill may have come between the checkpoint and its link
        return trainer.store.folder / path.name
    progress.best_loss = progress.best_step = progress.first_loss = None  # they are of the other run's checkpoints
    on_main(lambda: trainer.store.remove_link("best"))
    return path


def _take_over(trainer: Trainer, checkpoint: Checkpoint, path: Path, **how: Any) -> None:
    try:
        trainer.state.load(checkpoint.tensors, checkpoint.state, **how)
    except RunError as error:
        raise RunError(f"{path}: {error}") from error


def _find(trainer: Trainer, wanted: str) -> str | None:
    """The checkpoint to go on from; None where `auto` finds none."""
    if wanted != "auto":
        return str(trainer.store.choose(wanted))
    name, damaged = trainer.store.newest_valid()
    for text in damaged:
        warn_early("damaged-checkpoint", text)
    if name is None:
        _set_aside(trainer)
        return None
    return str(trainer.store.path(name).resolve())


def _set_aside(trainer: Trainer) -> None:
    text = f"NO VALID CHECKPOINT in {trainer.store.folder}: STARTING ANEW"
    if damaged := trainer.store.set_aside_damaged():
        text += f"; renamed the damaged ones {', '.join(damaged)}; nothing was deleted"
    warn_early("no-valid-checkpoint", text)


def start_from(trainer: Trainer, path: Path) -> Path:
    """Take over weights, moments, temperature and place in the data of another run's checkpoint.

    With `--override-opt-param-scheduler` the schedule starts at step 0 of its own; without it the other run's goes on.
    """
    wanted = trainer.config.checkpoint
    anew = wanted.override_opt_param_scheduler
    with raise_on_all_ranks():
        if not path.is_dir():
            raise UsageError(
                f"--load {path}: there is no such checkpoint; name a folder like runs/A/checkpoints/step-00002000"
            )
        if is_run(path):
            raise UsageError(f"--load {path} is a run; name one of its checkpoints, such as {path}/checkpoints/best")
        path = trainer.store.choose(str(path.resolve()))
        checkpoint = load_saved(path, trainer.state.like)
        _refuse_strange(trainer, checkpoint, path, ("student",))
        _say_what_differs(trainer, checkpoint)
        saved = checkpoint.state["options"]
        if not anew and (different := changes(saved, trainer.config, only="optimizer")):
            raise UsageError(
                f"{path} was trained with another schedule: {', '.join(different)}; give the same, "
                "or add --override-opt-param-scheduler to start a new one"
            )
        leave = [part for part, names in _KINDS.items() if _differ(saved, trainer.config, names)]
        _take_over(trainer, checkpoint, path, leave=leave, memory=not anew)
    progress, same_data = trainer.state.progress, checkpoint.state["cache"] == trainer.identity["cache"]
    cursor = progress.sequences if same_data and _same_order(checkpoint, trainer.config) else 0
    if anew:
        trainer.state.progress = Progress(sequences=cursor, epoch=cursor // len(trainer.train_source))
    else:
        progress.best_loss = progress.best_step = progress.validated_step = progress.stopped = None
        progress.first_loss = progress.last_loss = None
        progress.sequences, progress.epoch = cursor, cursor // len(trainer.train_source)
        if trainer.adaptive is not None:
            trainer.adaptive.controller.forget_buffer()
            trainer.state.snapshots.clear()
        if progress.step >= trainer.total:
            leaves = f"{path} is at step {progress.step}, and --steps {trainer.total} leaves none; raise --steps"
            raise reported(UsageError(leaves))
    trainer.student.temperature.set_step(max(trainer.state.progress.step - 1, 0))
    log.info("weights and moments are those of %s; the data goes on at sequence %d", path, cursor)
    return path


def _differ(saved: dict[str, Any], config: DistillConfig, names: tuple[str, ...]) -> bool:
    changed = changes(saved, config, only="objective")
    return any(each.startswith(f"--{name.replace('_', '-')} ") for name in names for each in changed)


def _same_order(checkpoint: Checkpoint, config: DistillConfig) -> bool:
    return bool(checkpoint.state["options"].get("run", {}).get("seed") == config.seed)


def _say_what_differs(trainer: Trainer, checkpoint: Checkpoint) -> None:
    saved = checkpoint.state["options"]
    if different := [each for each in changes(saved, trainer.config) if not each.startswith(("--load", "--override"))]:
        log.info("unlike the loaded run: %s", ", ".join(different))
    if checkpoint.state["cache"] != trainer.identity["cache"]:
        warn_early("other-cache", "the loaded run read another cache; this one is read from its beginning")


def _refuse_strange(trainer: Trainer, checkpoint: Checkpoint, path: Path, what: tuple[str, ...]) -> None:
    for each in what:
        with allowing(each, trainer.config):
            if checkpoint.state[each] != trainer.identity[each]:
                raise UsageError(f"{path} was trained with another {each}; give that one, or name another --out")


@contextmanager
def allowing(name: str, config: DistillConfig) -> Iterator[None]:
    """Turn a refusal inside into a warning where `--allow-mismatch NAME` was given, and say so where it was not."""
    try:
        yield
    except UsageError as error:
        if name in config.allow_mismatch:
            warn_early("mismatch", f"--allow-mismatch {name}: {error}")
        elif name in ("tokenizer", "cache"):
            raise UsageError(f"{error}; or add --allow-mismatch {name}") from None
        else:
            raise
