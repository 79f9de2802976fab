"""Decides where a run starts: at its own checkpoint, at one of another run, or from the beginning."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, NotRequired, TypedDict

from kdtrain.checkpoint.store import Checkpoint
from kdtrain.commands.export import checkpoint_of
from kdtrain.commands.run_folder import changes, is_run, refuse_changes
from kdtrain.config import DistillConfig
from kdtrain.errors import RunError, UsageError
from kdtrain.files import read_toml, typed
from kdtrain.monitor.progress import log, warn_early
from kdtrain.ranks import on_main, raise_on_all_ranks, reported
from kdtrain.training.schedule import learning_rate, total_steps, warmup_steps
from kdtrain.training.state import Progress, load_saved
from kdtrain.training.trainer import Trainer

_KINDS = {"temperature": ("temperature_mode",), "hidden": ("hidden_loss", "hidden_layers")}
"""Parts of the state whose entries depend on these options."""


def resume_or_start(trainer: Trainer, resumed: bool) -> Path | None:
    """Load the checkpoint at which the run starts, and return its folder; None for a run from the beginning.

    A run with a checkpoint of its own resumes from it and ignores `--load`, which was its start.

    Raises:
        UsageError: the checkpoint belongs to another student, cache, teacher or other options.
        RunError: the named checkpoint is damaged.
    """
    options = trainer.config.checkpoint
    if resumed or options.resume not in ("auto", "never"):
        path = _resume(trainer)
        if path is not None:
            return path
    return None if options.load is None else start_from(trainer, options.load)


def _resume(trainer: Trainer) -> Path | None:
    """Load the checkpoint that `--resume` names; None where `auto` finds none."""
    name = trainer.config.checkpoint.resume
    found = on_main(lambda: _find(trainer, name))
    if found is None:
        return None
    path = Path(found)
    with raise_on_all_ranks():
        checkpoint = load_saved(path, trainer.state.like)
        refuse_changes(checkpoint.state["options"], trainer.config, path.name)
        _refuse_other(trainer, checkpoint, path, ("cache", "student", "teacher"))
        _load(trainer, checkpoint, path)
    trainer.student.temperature.set_step(max(trainer.state.progress.step - 1, 0))
    progress = trainer.state.progress
    if progress.step > trainer.total:
        raise reported(
            UsageError(f"{path.name} is beyond --steps {trainer.total}; raise --steps or name another --out")
        )
    if progress.stopped is not None and not trainer.config.stopping.early_stopping:
        log.info("--no-early-stopping cancels the early stop (%s)", progress.stopped)
        progress.stopped = None
    if progress.decay_from is not None and not trainer.config.stopping.early_stopping:
        log.info("--no-early-stopping cancels the decay that a plateau began at step %d", progress.decay_from)
        progress.decay_from = None
        if trainer.state.adaptive is not None:
            trainer.state.adaptive.controller.begin_decay(None)
    own = path.parent == trainer.store.folder.resolve()
    at = (progress.step, progress.rollbacks) if own else (-1, 0)
    # with auto, later checkpoints are damaged; they stay for inspection
    if name != "auto" and (later := on_main(lambda: trainer.store.set_aside_after(*at))):
        log.info("set aside %s, which are later than the checkpoint of this run", ", ".join(later))
    if own:
        trainer.checkpoints.published = (progress.step, progress.validated_step)
        trainer.checkpoints.relink_best()  # a kill may have come between the checkpoint and its link
        return trainer.store.folder / path.name
    progress.best_loss = progress.best_step = progress.first_loss = None  # those of the other run's checkpoints
    on_main(lambda: trainer.store.remove_link("best"))
    return path


def _load(trainer: Trainer, checkpoint: Checkpoint, path: Path, **options: Any) -> None:
    try:
        trainer.state.load(checkpoint.tensors, checkpoint.state, **options)
    except RunError as error:
        raise RunError(f"{path}: {error}") from error


def _find(trainer: Trainer, wanted: str) -> str | None:
    """The checkpoint to resume from; None where `auto` finds none."""
    if wanted != "auto":
        return str(trainer.store.choose(wanted))
    name, damaged = trainer.store.newest_valid()
    for text in damaged:
        warn_early("damaged-checkpoint", text)
    if name is not None:
        return str(trainer.store.path(name).resolve())
    text = f"NO VALID CHECKPOINT in {trainer.store.folder}: STARTING FROM THE BEGINNING"
    if renamed := trainer.store.set_aside_damaged():
        text += f"; renamed the damaged ones {', '.join(renamed)}; nothing was deleted"
    warn_early("no-valid-checkpoint", text)
    return None


def start_from(trainer: Trainer, path: Path) -> Path:
    """Load weights, moments, temperature and the place in the data from another run, or one of its checkpoints.

    With `--override-opt-param-scheduler` the schedule starts at step 0; otherwise it continues that of the other run.
    """
    restart = trainer.config.checkpoint.override_opt_param_scheduler
    with raise_on_all_ranks():
        if not path.is_dir():
            raise UsageError(
                f"--load {path}: there is no such run or checkpoint; name a folder like runs/A, or "
                "runs/A/checkpoints/step-00002000"
            )
        path = checkpoint_of(path, "best") if is_run(path) else trainer.store.choose(str(path.resolve()))
        checkpoint = load_saved(path, trainer.state.like)
        _refuse_other(trainer, checkpoint, path, ("student",))
        saved = checkpoint.state["options"]
        same_data = checkpoint.state["cache"] == trainer.checkpoints.identity["cache"]
        changed = [each for each in changes(saved, trainer.config) if not each.startswith(("--load", "--override"))]
        if changed:
            log.info("unlike the loaded run: %s", ", ".join(changed))
        if not same_data:
            warn_early("other-cache", "the loaded run read another cache; this one is read from its beginning")
        if not restart and (different := changes(saved, trainer.config, only="optimizer")):
            raise UsageError(
                f"{path} was trained with another schedule: {', '.join(different)}; give the same, "
                "or add --override-opt-param-scheduler to start a new one"
            )
        names = {each.split()[0] for each in changes(saved, trainer.config, only="objective")}
        leave = [part for part, own in _KINDS.items() if names & {f"--{name.replace('_', '-')}" for name in own}]
        _load(trainer, checkpoint, path, leave=leave, memory=not restart)
    progress = trainer.state.progress
    same_order = saved.get("run", {}).get("seed") == trainer.config.seed
    cursor = progress.sequences if same_data and same_order else 0
    if restart:
        trainer.state.progress = Progress(sequences=cursor, epoch=cursor // len(trainer.stepper.source))
    else:
        progress.best_loss = progress.best_step = progress.validated_step = progress.stopped = None
        progress.first_loss = progress.last_loss = None
        progress.sequences, progress.epoch = cursor, cursor // len(trainer.stepper.source)
        if trainer.state.adaptive is not None:
            trainer.state.adaptive.controller.forget_buffer()
            trainer.state.snapshots.clear()
        if progress.step >= trainer.total:
            text = f"{path} is at step {progress.step}, and --steps {trainer.total} leaves none; raise --steps"
            raise reported(UsageError(text))
    trainer.student.temperature.set_step(max(trainer.state.progress.step - 1, 0))
    log.info("weights and moments are those of %s; the data starts at sequence %d", path, cursor)
    return path


class _Length(TypedDict):
    steps: NotRequired[int]
    epochs: NotRequired[float]


class _Config(TypedDict):
    run: _Length


def new_length(trainer: Trainer) -> str | None:
    """Return what changes because the run has another length than at its last start; None where nothing does."""
    step, own = trainer.state.progress.step, trainer.config
    try:
        before = typed(read_toml(own.out / "config.toml"), _Config)["run"]
        earlier = replace(own, steps=before.get("steps"), epochs=before.get("epochs"))
    except (OSError, ValueError):
        return None  # config.toml is lost
    planned, now = total_steps(earlier, len(trainer.stepper.source)), trainer.stepper.planned
    if planned == now or not 0 < step < now:
        return None
    factor, decay_from = trainer.state.progress.lr_factor, trainer.state.progress.decay_from
    rates = (
        factor * learning_rate(step, max(planned, step), own.optimizer, decay_from),
        factor * learning_rate(step + 1, trainer.total, own.optimizer, decay_from),
    )
    return (
        f"the run now has {now} steps, not {planned}, and its schedules follow the new length: the rate goes from "
        f"{rates[0]:.2e} at step {step} to {rates[1]:.2e} at the next, warm-up is {warmup_steps(now, own.optimizer)} "
        f"steps, not {warmup_steps(planned, own.optimizer)}, and the run validates every {trainer.eval_freq} steps"
    )


def _refuse_other(trainer: Trainer, checkpoint: Checkpoint, path: Path, parts: tuple[str, ...]) -> None:
    for part in parts:
        with allowing(part, trainer.config):
            if checkpoint.state[part] != trainer.checkpoints.identity[part]:
                raise UsageError(f"{path} was trained with another {part}; give that one, or name another --out")


@contextmanager
def allowing(name: str, config: DistillConfig) -> Iterator[None]:
    """Turn a refusal inside into a warning with `--allow-mismatch NAME`, and mention that option without it."""
    try:
        yield
    except UsageError as error:
        if name in config.allow_mismatch:
            warn_early("mismatch", f"--allow-mismatch {name}: {error}")
        elif name in ("tokenizer", "cache"):
            raise UsageError(f"{error}; or add --allow-mismatch {name}") from None
        else:
            raise
