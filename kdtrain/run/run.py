"""A run of the command: a recipe, its trainer, and what surrounds training: logs, metadata, the export, the result."""

import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch

from kdtrain.cache.format.manifest import weights_line
from kdtrain.checkpoint.store import Checkpoint
from kdtrain.errors import RunError, UsageError, advice, log, reason, warn_early, writing
from kdtrain.files import publish_text, same_path, set_aside
from kdtrain.models.export import export_lock, export_model
from kdtrain.models.head import SplitModel
from kdtrain.models.loading import is_adapter
from kdtrain.models.spec import is_export
from kdtrain.models.tokenizer import byte_lengths, load_tokenizer
from kdtrain.monitor.facts import RESULT, alphas, best_run_beside, count_warnings, is_run, read_result
from kdtrain.monitor.progress import end_log, formula, setup_logging
from kdtrain.parallel.parallelize import part_of, reshard
from kdtrain.ranks import is_main, lost_rank, on_main, peak_memory_mb, raise_on_all_ranks, rank, reported, world_size
from kdtrain.run.baselines import baselines, log_outcome, refuse_no_progress
from kdtrain.run.folder import (
    TOKENIZER,
    changes,
    launch,
    planned_before,
    refuse_changes,
    refuse_other_training,
    used,
    write_description,
    write_tokenizer,
)
from kdtrain.run.model_card import card_files
from kdtrain.run.recipe import PARTS, Recipe, allowing
from kdtrain.run.saved_student import checkpoint_of, merged_line, origin_of, start_of, student_at, written_parameters
from kdtrain.tables import finite, show
from kdtrain.training.schedule import learning_rate, warmup_steps
from kdtrain.training.state import Progress, load_saved
from kdtrain.training.step import out_of_memory
from kdtrain.training.student import Student
from kdtrain.training.trainer import Trainer
from kdtrain.training.validate import validate_members

_OTHER_EXPORT = 600.0
"""Seconds that a run waits at its end for a `kdtrain export` to the same folder."""
_KINDS = {
    "temperature": ("temperature_mode",),
    "hidden": ("hidden_loss", "hidden_layers"),
    "alpha": ("alpha", "alpha_schedule"),
}
"""Parts of the state whose entries depend on these options."""


@dataclass(frozen=True)
class Run:
    """A run and its parts.

    Args:
        recipe: what it is.
        trainer: its logs are not open yet.
        identity: what its checkpoints belong to: cache, options, student, teacher.
        quantised: log lines on what is quantised.
        hidden: a log line on which hidden states are compared; empty if none are.
    """

    recipe: Recipe
    trainer: Trainer
    identity: dict[str, Any]
    quantised: tuple[str, ...] = ()
    hidden: str = ""

    @property
    def out(self) -> Path:
        """The folder of the run."""
        return self.recipe.config.out

    @property
    def mode(self) -> str:
        """The number format in which the run trains."""
        return self.trainer.student.quantized or self.trainer.student.mode

    @property
    def parameters(self) -> int:
        """The student's parameters over all ranks, each counted once."""
        model = self.trainer.student.model
        if self.recipe.student.weights is None:
            return sum(each.numel() for each in model.parameters())
        from kdtrain.models.frozen import whole_size

        return whole_size(model)

    @property
    def micro_batches(self) -> str:
        """The micro-batches of a step on a rank, in words."""
        several = "es" if self.trainer.stepper.micros > 1 else ""
        return f"{self.trainer.stepper.micros} micro-batch{several} of {self.trainer.stepper.micro}"

    @property
    def trained(self) -> dict[str, Any]:
        """What is trained and how many parameters that is, where it is a part of the student; else empty."""
        model = self.trainer.student.model
        count = sum(each.numel() for each in model.parameters() if each.requires_grad)
        how = "all but the output head" if model.lora is None else str(model.lora)
        held = {} if self.recipe.student.weights is None else {"base_weights": self.recipe.student.weights}
        return {"trained": how, "trained_parameters": count, **held} if model.frozen else {}

    def resume_or_load(self) -> Path | None:
        """Load the checkpoint at which the run starts, and return its folder; None for a run from the beginning.

        A run with a checkpoint of its own resumes from it and ignores `--load`, which was its start.

        UsageError: the checkpoint belongs to another student, cache, teacher or other options. RunError: the named
        checkpoint is damaged.
        """
        options = self.recipe.config.checkpoint
        if self.recipe.resumed or options.resume not in ("auto", "never", "latest"):
            path = self._resume(options.resume)
            if path is not None:
                return path
        return None if self.recipe.loads is None else self.load(self.recipe.loads)

    def _resume(self, name: str) -> Path | None:
        """Load the checkpoint that `--resume` names; None where there is none, and `auto` or `latest` begins."""
        trainer, stopping = self.trainer, self.recipe.config.stopping
        found = on_main(lambda: self._find(name))
        if found is None:
            return None
        path = Path(found)
        with raise_on_all_ranks():
            checkpoint = load_saved(path, trainer.state.like)
            saved = checkpoint.state
            config = self.recipe.config
            self._note_router(saved, path)
            refuse_changes(saved["options"], config, config.out, path.name, but=self.same(saved))
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
                trainer.state.adaptive.begin_decay(None)
        own = same_path(path.parent, trainer.store.folder)
        at = (progress.step, progress.rollbacks) if own else (-1, 0)
        # with auto, later checkpoints are damaged; they stay for inspection
        if name != "auto" and (later := on_main(lambda: trainer.store.set_aside_after(*at, "old"))):
            log.info("set aside %s, which are later than the checkpoint of this run", ", ".join(later))
        if own:
            trainer.checkpoints.published = (progress.step, progress.validated_step)
            trainer.checkpoints.relink_best()  # a kill may have come between the checkpoint and its link
            return trainer.store.folder / path.name
        progress.forget_best()  # those of the other run's checkpoints
        progress.first_loss = progress.first_score = None
        progress.members = {}
        on_main(lambda: trainer.store.remove_link("best"))
        return path

    def _find(self, wanted: str) -> str | None:
        """Find the checkpoint to resume from; None where `auto` finds none, or `latest` not even a damaged one."""
        store = self.trainer.store
        found = start_of(store, wanted, lambda text: warn_early("damaged-checkpoint", text))
        if found is not None:
            return str(found.resolve())
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
                from kdtrain.models.adapters import fill_adapter

                reshard(trainer.student.model)
                fill_adapter(trainer.student.model.model, path, part_of)
                log.info("the adapters are those of %s", path)
                return path
            path = checkpoint_of(path, "best") if is_run(path) else trainer.store.choose(str(path.resolve()))
            checkpoint = load_saved(path, trainer.state.like)
            checkpoint.state["student"]["attention"] = self.identity["student"]["attention"]  # the weights serve any
            self._note_router(checkpoint.state, path)
            self._refuse_other(checkpoint.state, path, ("student",))
            saved = checkpoint.state["options"]
            same_data = checkpoint.state["cache"] == self.identity["cache"]
            different = changes(saved, config, but=self.same(checkpoint.state))
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
            leave += [] if same_data else ["alpha"]
            self._load(checkpoint, path, leave=leave, memory=not restart, same_data=same_data)
        same_order = saved.get("run", {}).get("seed") == config.seed
        progress = trainer.state.progress
        cursor = progress.sequences if same_data and same_order else 0
        epoch = cursor // len(trainer.stepper.source)
        if restart:
            trainer.state.progress = Progress(sequences=cursor, epoch=epoch)
        else:
            progress.forget_best()
            progress.validated_step = progress.stopped = None
            progress.first_loss = progress.first_score = progress.last_loss = None
            progress.members = {}
            progress.sequences, progress.epoch = cursor, epoch
            if trainer.state.adaptive is not None:
                trainer.state.adaptive.forget_buffer()
                trainer.state.snapshots.clear()
            if progress.step >= trainer.total:
                text = f"{path} is at step {progress.step}, and --steps {trainer.total} leaves none; raise --steps"
                raise reported(UsageError(text))
        trainer.student.temperature.set_step(max(trainer.state.progress.step - 1, 0))
        log.info("weights and moments are those of %s; the data starts at sequence %d", path, cursor)
        return path

    def new_length(self) -> str | None:
        """Describe what changes because the run has another length than at its last start; None where nothing does."""
        progress, options, now = self.trainer.state.progress, self.recipe.config.optimizer, self.recipe.total
        planned = planned_before(self.recipe.config, len(self.trainer.stepper.source))
        step, factor = progress.step, progress.lr_factor
        if planned in (None, now) or not 0 < step < now:
            return None
        before = factor * learning_rate(step, max(planned, step), options, progress.decay_from)
        after = factor * learning_rate(step + 1, self.trainer.total, options, progress.decay_from)
        return (
            f"the run now has {now} steps, not {planned}, and its schedules follow the new length: the rate goes from "
            f"{before:.2e} at step {step} to {after:.2e} at the next, warm-up is {warmup_steps(now, options)} steps, "
            f"and the run validates every {self.trainer.eval_freq} steps"
        )

    def same(self, saved: dict[str, Any]) -> set[str]:
        """Return the options that need no comparison: of the same meaning, and bounds that another cache sets."""
        same = {part for part in PARTS if saved[part] == self.identity[part]}
        same |= {"cache_weights"} if "cache" in same else set()
        given = vars(self.recipe.given.objective)
        bounds = {name for name in ("temperature_min", "temperature_max") if given[name] is None}
        return same | ({"cache"} & {*self.recipe.config.allow_mismatch}) | (set() if "cache" in same else bounds)

    def _note_router(self, saved: dict[str, Any], path: Path) -> None:
        """Warn where a version without the router's auxiliary loss wrote a checkpoint, and take it for one with it."""
        weight = self.identity["student"].get("router_weight")
        if weight is not None and saved["student"].setdefault("router_weight", None) is None:
            saved["student"]["router_weight"] = weight
            text = "was trained without the router's auxiliary loss, which is added from here on, times"
            warn_early("router-loss", f"{path} {text} {weight:g}")

    def _refuse_other(self, saved: dict[str, Any], path: Path, parts: tuple[str, ...]) -> None:
        for part in parts:
            with allowing(self.recipe.config, part):
                if saved[part] != self.identity[part]:
                    if part == "student":
                        refuse_other_training(saved[part], self.identity[part], path)
                    raise UsageError(f"{path} was trained with another {part}; give that one, or name another --out")

    def _load(self, checkpoint: Checkpoint, path: Path, **options: Any) -> None:
        try:
            self.trainer.state.load(checkpoint.tensors, checkpoint.state, **options)
        except RunError as error:
            raise RunError(f"{path}: {error}") from error

    def write_metadata(self) -> None:
        """Write config.toml, environment.json and the tokenizer into the run's folder, and open its log."""
        recipe, config, student = self.recipe, self.recipe.config, self.trainer.student
        vocabulary = student.model.vocab_size
        teacher = None if recipe.teacher is None else recipe.teacher.spec
        metadata = {
            "student": {
                "name": recipe.student.name,
                "parameters": self.parameters,
                "vocab_size": vocabulary,
                **({"router_weight": student.router_weight} if student.router_weight else {}),
                **self.trained,
            },
            "cache": recipe.facts.identity,
            **({"caches": recipe.members} if recipe.members else {}),
            "tokenizer": recipe.facts.tokenizer_digest,
            "kl_estimator": recipe.facts.estimator,
            **({} if recipe.facts.alignment is None else {"alignment": dict(recipe.facts.alignment)}),
            "device": str(student.device),
            "mode": self.mode,
            "tf32": torch.backends.cuda.matmul.fp32_precision == "tf32",
            "compiled": student.compile_objective,
            "ranks": world_size(),
            "student over ranks": recipe.plan.student,
            "steps": recipe.total,
            "lr": {"peak": config.optimizer.lr, "from": recipe.lr_from or "--lr"},
            "launch": launch(),
        }
        on_main(lambda: write_description(config, metadata))
        on_main(lambda: write_tokenizer(self.out, recipe.student, recipe.facts.tokenizer, teacher))
        name = "train.log" if is_main() else f"rank-{rank():05d}.log"
        setup_logging(self.out / name, quiet=not is_main())

    def open(self, init: str | None = None) -> None:
        """Open the trainer's logs; `init` is where the student's weights come from, None: as in its spec."""
        folder = self.recipe.facts.tokenizer
        tokenizer = None if folder is None else load_tokenizer(folder)
        self.trainer.open(tokenizer, init=init or self.recipe.student.init, byte_lengths=byte_lengths(folder))

    def log_start(self, loaded: Path | None, length: str | None) -> None:
        """Log what is trained, from which checkpoint, and what changes because of a new length."""
        recipe, trainer, config = self.recipe, self.trainer, self.recipe.config
        trainer.writers.hyperparameters(used(config))
        kind = f"distillation from {recipe.teacher_name}" if recipe.distils else "cross-entropy"
        lines = [
            f"{self.out}: {kind} of {recipe.student.name} ({self.parameters:,} parameters), {trainer.total} steps of "
            f"{config.batch_size} x {recipe.facts.seq_len} tokens, {self.mode} on {trainer.student.device}"
        ]
        if trained := self.trained:
            share = trained["trained_parameters"] / self.parameters
            held = f", beside {trained['base_weights']} weights" if "base_weights" in trained else ""
            count = f"{trained['trained_parameters']:,} parameters ({share:.2%})"
            lines.append(f"trained: {trained['trained']}, {count}{held}")
        if recipe.teacher is not None and recipe.teacher.cost is not None:
            lines.append(weights_line(recipe.teacher.cost))
        if recipe.members:
            drawn = (f"{each['share']:.4g} of {each['name']} ({each['sequences']:,})" for each in recipe.members)
            lines.append(f"{len(recipe.members)} caches; a step draws {', '.join(drawn)}")
        objective = config.objective
        hidden = objective.hidden_weight if objective.hidden_loss != "none" else None
        alpha = objective.alpha if recipe.distils else 0.0
        replays = recipe.distils and recipe.facts.replays
        term = recipe.facts.term(objective.divergence)
        summed = formula(alpha, term, hidden, replays, trainer.student.router_weight)
        if recipe.distils and objective.alpha_schedule != "constant":
            summed += f", alpha to {objective.alpha_end:g} ({objective.alpha_schedule})"
        if recipe.distils and objective.alpha == "auto":
            summed += ", alpha by withheld text"
        elif recipe.alpha_from is not None and recipe.has_teacher:
            summed += f", {recipe.alpha_from}"
        scale = "" if summed == "ce" else " (compare val with val alone)"
        lines.append(f"loss = {summed}; val = ce of withheld text{scale}")
        if recipe.lr_from is not None:
            lines.append(f"lr {config.optimizer.lr:g} (auto: {recipe.lr_from})")
        if (warmup := warmup_steps(recipe.total, config.optimizer)) < config.optimizer.warmup_steps:
            lines.append(f"warm-up of {warmup} steps, half of the run, not {config.optimizer.warmup_steps}")
        if world_size() > 1:
            lines.append(f"{recipe.layout}, {recipe.plan}: each step {self.micro_batches} sequences on each")
        enabled = "[TimeResume] Adaptive quantization training enabled" if trainer.state.adaptive is not None else ""
        resumed = f"resuming from {loaded}" if loaded is not None else ""
        anew = config.checkpoint.resume == "latest" and not recipe.resumed
        begins = f"{self.out} holds no run yet: a new one begins" if anew else ""
        for line in filter(None, (*lines, *self.quantised, enabled, self.hidden, begins, resumed, length)):
            log.info("%s", line)
        if is_main() and recipe.distils and loaded is None:
            beside = best_run_beside(self.out, recipe.facts.identity)
            known = baselines(recipe.sources["train"], recipe.sources["validation"], beside)
            trainer.on_begin = lambda *of_alpha: known.tell(trainer.writers, *of_alpha)
        members = recipe.facts.members.items()
        shares: dict[str, Any] = {"caches": {name: each.share for name, each in members}} if members else {}
        trainer.writers.event("start" if loaded is None else "resume", trainer.state.progress.step, **shares)

    def fit(self) -> None:
        """Run `Trainer.fit`, and finish the last save, however it ends."""
        trainer = self.trainer
        try:
            trainer.fit()
        except BaseException as failure:
            try:
                trainer.saver.close()
                trainer.checkpoints.log_published()
            except (RunError, OSError) as error:
                log.warning("%s", error)
                with suppress(OSError):  # for example on a full disk: raise the first error
                    trainer.writers.event("save", trainer.state.progress.step, "error", message=str(error))
            if out_of_memory(failure):
                text = "out of memory; lower --micro-batch-size, --batch-size or --seq-len"
                raise RunError(text, reason="oom") from failure
            raise
        trainer.saver.close()

    def export(self) -> dict[str, Any]:
        """Export the best student, or the last one where none is best. Runs on rank 0 only.

        Return what the result has besides: of a student with packed weights the loss of the exported, merged one.
        """
        trainer = self.trainer
        state = self.trainer.state
        out = self.out / "student"
        student = trainer.student.model
        has_best = state.progress.best_step is not None
        saved: Mapping[str, Any] = self.identity
        packed = self.recipe.student.weights
        if self.recipe.cut or packed is not None:
            path = self._best() if has_best else trainer.store.choose("latest")
            commit = getattr(student.model.config, "_commit_hash", None)  # of a model on the hub: what was loaded
            base = self.recipe.student if commit is None else replace(self.recipe.student, revision=commit)
            student = student_at(path, torch.device("cpu"), base)
            saved = load_saved(path).state
        elif has_best:
            checkpoint = load_saved(self._best())
            state.load(checkpoint.tensors, checkpoint.state)
        saved = {"progress": asdict(state.progress), **saved}
        step = saved["progress"]["step"]
        about: dict[str, Any] = {"parameters": written_parameters(student), "weights": "float32"}
        card = card_files(self.out.name, self.out, saved, **about)
        with export_lock(out, wait=_OTHER_EXPORT):
            with writing(out):
                if os.path.lexists(out) and not is_export(out):
                    moved = set_aside(out.parent, out.name, "old")
                    trainer.writers.warning("export", step, f"{out} was not written by kdtrain, and is now {moved}")
            if aside := export_model(
                student, self.out / TOKENIZER, out, origin=origin_of(self.out, saved), beside=card
            ):
                trainer.writers.warning("export", step, f"{out} held more than an export, and is now {aside}")
        if packed is None:
            return {}
        merged = self._merged_loss(student)
        log.info("%s", merged_line(packed, state.progress.best_loss, merged, str(out)))
        return {"merged_validation_loss": merged}

    def _merged_loss(self, student: SplitModel) -> float | None:
        """Measure the validation loss of a student with its whole weights; None if it is not measured here.

        That needs another model on the device, and several ranks would have to share it.
        """
        own, trainer = self.trainer.student, self.trainer
        if world_size() > 1:
            return None
        try:
            size = {"micro": trainer.stepper.micro, "batches": trainer.validation_batches}
            model = student.to(own.device)
            whole = Student(model, own.loss, vocab_size=own.vocab_size, mode=own.mode, document_mask=own.document_mask)
            found = validate_members(whole.eval(), trainer.validation_source, **size)
        except torch.OutOfMemoryError:
            return None
        return None if found is None else found[0].mean("cross_entropy")

    def _best(self) -> Path:
        store = self.trainer.store
        try:
            return store.choose("best")
        except (UsageError, RunError) as error:
            step = self.trainer.state.progress.step
            self.trainer.writers.warning("best", step, f"{error}; taking the newest instead")
            return store.choose("latest")

    def result(self, reason: str, error: str | None = None) -> dict[str, Any]:
        """Return the contents of `result.json`: losses in nats per token, None where there is no value."""
        trainer, recipe, progress = self.trainer, self.recipe, self.trainer.state.progress
        best = progress.best_loss
        plain = self._plain() or (None, None)
        others = {"start": progress.first_loss, "teacher": progress.teacher_loss, "cross_entropy": plain[1]}
        known = {name: None if best is None or other is None else best < other for name, other in others.items()}
        seconds, tokens = trainer.earlier[0] + trainer.seconds, trainer.earlier[1] + trainer.stepper.tokens
        result: dict[str, Any] = {
            "run": str(self.out),
            "stop_reason": reason,
            "error": error,
            "stopped_by": trainer.stopped_by,
            "step": progress.step,
            "steps": trainer.total,
            "decay_from": progress.decay_from,
            "tokens": progress.tokens,
            "seconds": round(seconds, 1),
            "tokens_per_second": round(tokens / seconds, 1) if seconds else None,
            "temperature": float(trainer.student.temperature.value().detach()) if recipe.distils else None,
            "objective": "distillation" if recipe.distils else "cross-entropy",
            **alphas(self.out, trainer.student.loss.alpha.fixed),
            "first_validation_loss": progress.first_loss,
            "best_validation_loss": best,
            "best_step": progress.best_step,
            **({} if progress.best_score is None else {"best_score": progress.best_score}),
            "last_validation_loss": progress.last_loss,
            "teacher_validation_loss": progress.teacher_loss,
            "best_bits_per_byte": progress.bits_per_byte(best),
            "last_bits_per_byte": progress.bits_per_byte(progress.last_loss),
            "teacher_bits_per_byte": progress.bits_per_byte(progress.teacher_loss),
            "cross_entropy_validation_loss": plain[1],
            "cross_entropy_run": plain[0],
            **{f"better_than_{name}": better for name, better in known.items()},
            "rollbacks": progress.rollbacks,
            "skipped_steps": progress.skips,
            "warnings": count_warnings(self.out),
            "cache": self.identity["cache"],
            "student_name": recipe.student.name,
            "student": None,
            "micro_batch_size": trainer.stepper.micro,
            "peak_memory_mb": round(peak_memory_mb(recipe.device), 1),
            **self.trained,
        }
        if recipe.teacher is not None and recipe.teacher.cost is not None:
            result["teacher_weights"] = recipe.teacher.cost
        if recipe.facts.alignment is not None:
            result["alignment"] = dict(recipe.facts.alignment)
        if recipe.members:
            epoch = len(recipe.sources["train"])
            result["caches"] = [
                each
                | {
                    "passes": round(each["sequences_an_epoch"] * progress.sequences / epoch / each["sequences"], 3),
                    "first_validation_loss": progress.members.get(each["name"], {}).get("first_loss"),
                    "last_validation_loss": progress.members.get(each["name"], {}).get("last_loss"),
                    "teacher_validation_loss": progress.members.get(each["name"], {}).get("teacher_loss"),
                }
                for each in recipe.members
            ]
        if (adaptive := trainer.state.adaptive) is not None:
            result |= {"steps_quantized": adaptive.steps_quantized, "switches": adaptive.switches}
        return result

    def _plain(self) -> tuple[str, float] | None:
        if not self.recipe.distils:
            return None
        job = self.recipe.student.name, self.trainer.state.progress.tokens
        return best_run_beside(self.out, self.identity["cache"], job)

    @contextmanager
    def recording_failure(self) -> Iterator[None]:
        """Write an error that ends the run into its logs and result.json, and print that with `--json`.

        Turns an OSError into a RunError.
        """
        try:
            yield
        except UsageError:
            raise
        except Exception as found:
            error = lost_rank(found) or found
            text = str(error) or type(error).__name__
            if isinstance(error, OSError):
                where = error.filename or self.out
                text = f"{where}: {error.strerror or error}; published checkpoints are intact{advice(error)}"
            with suppress(OSError):  # the error may be a full disk
                step = self.trainer.state.progress.step
                why = reason(error)
                self.trainer.writers.event("failure", step, "error", reason=why, message=text)
            with suppress(OSError):
                end_log(text)
            result = self.result(reason(error), text)
            with suppress(RunError):
                self.write_result(result)
            if self.recipe.config.json:
                show("", result, True)
            if isinstance(error, OSError):
                raise RunError(text, reason=reason(error)) from None
            if error is not found:
                raise error from found
            raise

    def write_result(self, result: dict[str, Any]) -> None:
        """Publish result.json, on rank 0. Starting a finished run again keeps its seconds and tokens.

        RunError: the folder cannot be written.
        """
        before = read_result(self.out)
        end = (result["stop_reason"], result["step"])
        again = before is not None and (before["stop_reason"], before["step"]) == end
        if is_main() and (self.trainer.stepper.tokens or not again):
            publish_text(self.out / RESULT, json.dumps(finite(result), indent=1) + "\n", "trainer.result")

    def refuse_no_progress(self) -> None:
        """Raise a `RunError` if no validation was better than the first one: the best student is the initial one."""
        refuse_no_progress(self.trainer.state.progress, self.out)

    def log_outcome(self) -> None:
        """Warn when the student ended worse than it began, or is no better than a student of plain cross-entropy."""
        log_outcome(self.trainer.state.progress, self.trainer.writers, self._plain())
