"""Decides where a run starts: at its own checkpoint, at one of another run, or from the beginning."""

from pathlib import Path
from typing import Any, NotRequired, TypedDict

from kdtrain.checkpoint.store import Checkpoint
from kdtrain.config import LoraConfig
from kdtrain.errors import RunError, UsageError
from kdtrain.files import read_json, read_toml, same_path, typed
from kdtrain.models.adapters import fill_adapter, is_adapter
from kdtrain.monitor.progress import log, warn_early
from kdtrain.parallel.parallelize import part_of, reshard
from kdtrain.ranks import on_main, raise_on_all_ranks, reported
from kdtrain.run.folder import changes, is_run, refuse_changes
from kdtrain.run.recipe import PARTS
from kdtrain.run.run import Run
from kdtrain.run.saved_student import checkpoint_of
from kdtrain.training.schedule import learning_rate, total_steps, warmup_steps
from kdtrain.training.state import Progress, load_saved

_KINDS = {"temperature": ("temperature_mode",), "hidden": ("hidden_loss", "hidden_layers")}
"""Parts of the state whose entries depend on these options."""
_BOUNDS = {"temperature_min", "temperature_max"}


class _Environment(TypedDict):
    steps: int


class _Length(TypedDict):
    steps: NotRequired[int]
    epochs: NotRequired[float]


class _Config(TypedDict):
    run: _Length


class Start:
    """The start of a run that is built, with fresh weights, and whose logs are not open yet."""

    def __init__(self, run: Run) -> None:
        self.recipe, self.trainer, self.identity = run.recipe, run.trainer, run.identity

    def resume_or_load(self) -> Path | None:
        """Load the checkpoint at which the run starts, and return its folder; None for a run from the beginning.

        A run with a checkpoint of its own resumes from it and ignores `--load`, which was its start.

        UsageError: the checkpoint belongs to another student, cache, teacher or other options. RunError: the named
        checkpoint is damaged.
        """
        options = self.recipe.config.checkpoint
        if self.recipe.resumed or options.resume not in ("auto", "never"):
            path = self._resume(options.resume)
            if path is not None:
                return path
        return None if self.recipe.loads is None else self.load(self.recipe.loads)

    def _resume(self, name: str) -> Path | None:
        """Load the checkpoint that `--resume` names; None where `auto` finds none."""
        trainer, stopping = self.trainer, self.recipe.config.stopping
        found = on_main(lambda: self._find(name))
        if found is None:
            return None
        path = Path(found)
        with raise_on_all_ranks():
            checkpoint = load_saved(path, trainer.state.like)
            self._note_router(checkpoint.state, path)
            self.refuse_changes(checkpoint.state, self.recipe.config.out, path.name)
            self._refuse_other(checkpoint.state, path, PARTS)
            self._load(checkpoint, path)
        progress = trainer.state.progress
        trainer.student.temperature.set_step(max(progress.step - 1, 0))
        if progress.step > trainer.total:
            raise reported(
                UsageError(f"{path.name} is beyond --steps {trainer.total}; raise --steps or name another --out")
            )
        if progress.stopped is not None and not stopping.early_stopping:
            log.info("--no-early-stopping cancels the early stop (%s)", progress.stopped)
            progress.stopped = None
        if progress.decay_from is not None and not stopping.early_stopping:
            log.info("--no-early-stopping cancels the decay that a plateau began at step %d", progress.decay_from)
            progress.decay_from = None
            if trainer.state.adaptive is not None:
                trainer.state.adaptive.controller.begin_decay(None)
        own = same_path(path.parent, trainer.store.folder)
        at = (progress.step, progress.rollbacks) if own else (-1, 0)
        # with auto, later checkpoints are damaged; they stay for inspection
        if name != "auto" and (later := on_main(lambda: trainer.store.set_aside_after(*at, "old"))):
            log.info("set aside %s, which are later than the checkpoint of this run", ", ".join(later))
        if own:
            trainer.checkpoints.published = (progress.step, progress.validated_step)
            trainer.checkpoints.relink_best()  # a kill may have come between the checkpoint and its link
            return trainer.store.folder / path.name
        progress.best_loss = progress.best_step = progress.first_loss = None  # those of the other run's checkpoints
        progress.members = {}
        on_main(lambda: trainer.store.remove_link("best"))
        return path

    def _find(self, wanted: str) -> str | None:
        """The checkpoint to resume from; None where `auto` finds none."""
        store = self.trainer.store
        if wanted != "auto":
            return str(store.choose(wanted))
        name, damaged = store.newest_valid()
        for text in damaged:
            warn_early("damaged-checkpoint", text)
        if name is not None:
            return str(store.path(name).resolve())
        text = f"NO VALID CHECKPOINT in {store.folder}: STARTING FROM THE BEGINNING"
        if renamed := store.set_aside_damaged():
            text += f"; renamed the damaged ones {', '.join(renamed)}; nothing was deleted"
        warn_early("no-valid-checkpoint", text)
        return None

    def load(self, path: Path) -> Path:
        """Load weights, moments, temperature and the place in the data from another run, or one of its checkpoints.

        With `--override-opt-param-scheduler` the schedule starts at step 0; otherwise it continues that of the other
        run. Return the folder of the checkpoint.
        """
        trainer, config = self.trainer, self.recipe.config
        restart = config.checkpoint.override_opt_param_scheduler
        with raise_on_all_ranks():
            if not path.is_dir():
                raise UsageError(
                    f"--load {path}: there is no such run or checkpoint; name a folder like runs/A, or "
                    "runs/A/checkpoints/step-00002000"
                )
            if is_adapter(path):
                return self._load_adapter(path)
            path = checkpoint_of(path, "best") if is_run(path) else trainer.store.choose(str(path.resolve()))
            checkpoint = load_saved(path, trainer.state.like)
            checkpoint.state["student"]["attention"] = self.identity["student"]["attention"]  # the weights serve any
            self._note_router(checkpoint.state, path)
            self._refuse_other(checkpoint.state, path, ("student",))
            saved, same_data = checkpoint.state["options"], checkpoint.state["cache"] == self.identity["cache"]
            different = changes(saved, config, but=self._same(checkpoint.state))
            start = ("--load", "--override-opt-param-scheduler")
            if changed := [each for each in different if not each.startswith(start)]:
                log.info("unlike the loaded run: %s", ", ".join(changed))
            if not same_data:
                warn_early("other-cache", "the loaded run read another cache; this one is read from its beginning")
            if not restart and (different := changes(saved, config, only="optimizer")):
                raise UsageError(
                    f"{path} was trained with another schedule: {', '.join(different)}; give the same, "
                    "or add --override-opt-param-scheduler to start a new one"
                )
            names = {each.split()[0] for each in changes(saved, config, only="objective")}
            leave = [part for part, own in _KINDS.items() if names & {f"--{name.replace('_', '-')}" for name in own}]
            self._load(checkpoint, path, leave=leave, memory=not restart, same_data=same_data)
        same_order = saved.get("run", {}).get("seed") == config.seed
        progress = trainer.state.progress
        cursor = progress.sequences if same_data and same_order else 0
        epoch = cursor // len(trainer.stepper.source)
        if restart:
            trainer.state.progress = Progress(sequences=cursor, epoch=epoch)
        else:
            progress.best_loss = progress.best_step = progress.validated_step = progress.stopped = None
            progress.first_loss = progress.last_loss = None
            progress.members = {}
            progress.sequences, progress.epoch = cursor, epoch
            if trainer.state.adaptive is not None:
                trainer.state.adaptive.controller.forget_buffer()
                trainer.state.snapshots.clear()
            if progress.step >= trainer.total:
                text = f"{path} is at step {progress.step}, and --steps {trainer.total} leaves none; raise --steps"
                raise reported(UsageError(text))
        trainer.student.temperature.set_step(max(trainer.state.progress.step - 1, 0))
        log.info("weights and moments are those of %s; the data starts at sequence %d", path, cursor)
        return path

    def _load_adapter(self, path: Path) -> Path:
        """Begin with the adapters of a `peft` folder."""
        model = self.trainer.student.model
        reshard(model)
        fill_adapter(model.model, path, part_of)
        log.info("the adapters are those of %s", path)
        return path

    def new_length(self) -> str | None:
        """Return what changes because the run has another length than at its last start; None where nothing does."""
        progress, options, now = self.trainer.state.progress, self.recipe.config.optimizer, self.recipe.total
        config = self.recipe.config
        try:
            planned = read_json(config.out / "environment.json", _Environment)["steps"]
        except (OSError, ValueError):  # lost, or of a version that did not write it
            try:
                last = typed(read_toml(config.out / "config.toml"), _Config)["run"]
            except (OSError, ValueError):
                return None
            planned = total_steps(config, len(self.trainer.stepper.source), last)
        step, factor = progress.step, progress.lr_factor
        if planned == now or not 0 < step < now:
            return None
        before = factor * learning_rate(step, max(planned, step), options, progress.decay_from)
        after = factor * learning_rate(step + 1, self.trainer.total, options, progress.decay_from)
        return (
            f"the run now has {now} steps, not {planned}, and its schedules follow the new length: the rate goes from "
            f"{before:.2e} at step {step} to {after:.2e} at the next, warm-up is {warmup_steps(now, options)} steps, "
            f"not {warmup_steps(planned, options)}, and the run validates every {self.trainer.eval_freq} steps"
        )

    def refuse_changes(self, saved: dict[str, Any], out: Path, checkpoint: str) -> None:
        """Refuse to resume the run in `out` from a `checkpoint` whose state `saved` has other deciding options."""
        refuse_changes(saved["options"], self.recipe.config, out, checkpoint, but=self._same(saved))

    def _same(self, saved: dict[str, Any]) -> set[str]:
        """Options that need no comparison: another spelling of the same thing, and bounds that another cache sets."""
        same = {part for part in PARTS if saved[part] == self.identity[part]}
        same |= {"cache_weights"} if "cache" in same else set()
        given = self.recipe.given.objective
        unasked = {name for name in _BOUNDS if getattr(given, name) is None}
        return same | ({"cache"} & {*self.recipe.config.allow_mismatch}) | (set() if "cache" in same else unasked)

    def _note_router(self, saved: dict[str, Any], path: Path) -> None:
        """Warn where a version without the router's auxiliary loss wrote a checkpoint, and take it for one with it."""
        weight = self.identity["student"].get("router_weight")
        if weight is not None and saved["student"].setdefault("router_weight", None) is None:
            saved["student"]["router_weight"] = weight
            text = "was trained without the router's auxiliary loss, which is added from here on, times"
            warn_early("router-loss", f"{path} {text} {weight:g}")

    def _refuse_other(self, saved: dict[str, Any], path: Path, parts: tuple[str, ...]) -> None:
        for part in parts:
            with self.recipe.allowing(part):
                if saved[part] != self.identity[part]:
                    if part == "student":
                        _refuse_other_training(saved[part], self.identity[part], path)
                    raise UsageError(f"{path} was trained with another {part}; give that one, or name another --out")

    def _load(self, checkpoint: Checkpoint, path: Path, **options: Any) -> None:
        try:
            self.trainer.state.load(checkpoint.tensors, checkpoint.state, **options)
        except RunError as error:
            raise RunError(f"{path}: {error}") from error


def _refuse_other_training(saved: dict[str, Any], own: dict[str, Any], path: Path) -> None:
    """Name what differs where a run trains another part of the same student, or beside other weights."""
    if saved.get("lora") != own.get("lora") or saved.get("freeze_head") != own.get("freeze_head"):
        before, now = map(_trained, (saved, own))
        raise UsageError(f"{path} trained {before}, and this run trains {now}; give the same, or name another --out")
    if saved.get("weights") != own.get("weights"):
        before, now = (each.get("weights") or "full" for each in (saved, own))
        raise UsageError(
            f"{path} was trained beside {before} frozen weights, and this run has {now} ones; give the same "
            "--base-weights, or name another --out"
        )
    if saved.get("base") != own.get("base"):
        raise UsageError(
            f"{path} holds only what was trained, beside other weights than those of this student (their digests "
            "differ); give the student that it began with, or name another --out"
        )


def _trained(student: dict[str, Any]) -> str:
    if "lora" not in student:
        return "all but the output head" if student.get("freeze_head") else "all weights"
    try:
        return str(LoraConfig(**student["lora"]))
    except (TypeError, UsageError):  # of a later version
        return "adapters of another kind"
