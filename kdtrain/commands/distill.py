"""`kdtrain distill`: train a student from a cache, from an online teacher, or by cross-entropy on text."""

import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

import torch

from kdtrain.cache.manifest import Manifest
from kdtrain.commands import dry_run, sanity
from kdtrain.commands.agreement import same_ranks
from kdtrain.commands.build_run import BuiltRun, build_run, micro_batch
from kdtrain.commands.common import show
from kdtrain.commands.export import student_at
from kdtrain.commands.result import how_it_ended, log_outcome, write_result
from kdtrain.commands.resume import resume_or_start
from kdtrain.commands.run_folder import (
    TOKENIZER,
    launch,
    restarted,
    resuming,
    run_lock,
    used,
    write_description,
    write_tokenizer,
)
from kdtrain.config import DistillConfig
from kdtrain.errors import RunError, UsageError, advice, reason, writing
from kdtrain.files import set_aside
from kdtrain.models.loading import export_model, is_export, tokenizer_files
from kdtrain.models.spec import read_spec
from kdtrain.monitor.loggers import require_wandb
from kdtrain.monitor.progress import log, setup_logging
from kdtrain.ranks import is_main, on_main, pick_device, raise_on_all_ranks, rank, world_size
from kdtrain.training.signals import interruptible
from kdtrain.training.state import load_saved
from kdtrain.training.step import out_of_memory
from kdtrain.training.trainer import Trainer


def main(config: DistillConfig) -> int:
    """Train the student of `config` and export it, or try that out; 0 when done or gracefully stopped.

    Raises:
        UsageError: data, cache, student or options do not go together.
        RunError: the training failed.
    """
    tries = sanity.main if config.sanity else dry_run.main if config.dry_run else None
    try:
        with interruptible():
            if tries is not None:
                return tries(config)
            result = distill(config)
    except KeyboardInterrupt as asked:
        tried = "interrupted; nothing was left behind"
        log.info("stopped while not training; the same command resumes" if tries is None else tried)
        result = {"run": str(config.out), "stop_reason": "signal", "stopped_by": str(asked) or "SIGINT"}
    show(f"distill {config.out}", result, config.json)
    return 0


def distill(config: DistillConfig) -> dict[str, Any]:
    """Train the student of `config` and export it: `kdtrain distill` as a function. The same call again resumes.

    Returns:
        What result.json holds: stop_reason, steps, validation losses in nats a token, the exported student's folder.

    Raises:
        UsageError: data, cache, student or options do not go together.
        RunError: the training failed, or diverged.
    """
    setup_logging(quiet=not is_main())
    with ExitStack() as stack:
        stack.enter_context(same_ranks(config, pick_device(config.device)))
        config = resuming(config, on_main(lambda: restarted(config)))
        with raise_on_all_ranks():  # what can be refused at once is, before --overwrite moves an earlier run aside
            read_spec(config.student)
            micro_batch(config)
            require_wandb(config.monitor.wandb_project)
        resumed = stack.enter_context(run_lock(config))
        built = build_run(config, resumed)
        trainer, config = built.trainer, built.trainer.config
        begun_at = resume_or_start(trainer, resumed)  # before anything is written: what is refused stays as it was
        _describe(built)
        stack.enter_context(_failures_written(trainer))
        built.open(init=None if begun_at is None else "loaded")
        trainer.writers.hyperparameters(used(config))
        _announce(built, begun_at)
        _fit(trainer)
        if trainer.stopped_by is None:
            log_outcome(trainer)
        trainer.writers.close()
    return _finish(trainer)


def _describe(built: BuiltRun) -> None:
    """Write into the run's folder what it is, before it begins."""
    config, student, spec = built.trainer.config, built.trainer.student, built.spec
    metadata = {
        "student": {"name": spec.name, "parameters": built.parameters, "vocab_size": student.model.vocab_size},
        "cache": built.manifest.digest,
        "device": str(student.device),
        "mode": student.quantized or student.mode,
        "compiled": student.compile_objective,
        "ranks": world_size(),
        "student over ranks": built.trainer.engine.kind,
        "launch": launch(),
    }
    on_main(lambda: write_description(config, metadata))
    on_main(lambda: write_tokenizer(config.out, spec, built.folder / "tokenizer"))
    setup_logging(_log_of(config), quiet=not is_main())


@contextmanager
def _failures_written(trainer: Trainer) -> Iterator[None]:
    """Write result.json for an error that ends the run, and raise it again, an OSError as a line of its own."""
    try:
        yield
    except UsageError:
        raise
    except OSError as error:
        _fail(trainer, error)
        where, kept = error.filename or trainer.config.out, "published checkpoints are intact"
        raise RunError(f"{where}: {error.strerror or error}; {kept}{advice(error)}", reason=reason(error)) from None
    except Exception as error:
        _fail(trainer, error)
        raise


def _log_of(config: DistillConfig) -> Path | None:
    """The file that this rank's lines go into, if any."""
    if is_main():
        return config.out / "train.log"
    return config.out / f"rank-{rank():05d}.log" if config.parallel.log_all_ranks else None


def _fit(trainer: Trainer) -> None:
    """`Trainer.fit`, and no save left in flight after it, however it ended."""
    try:
        trainer.fit()
    except BaseException as failure:
        try:
            trainer.saver.close()
            trainer.log_published()
        except (RunError, OSError) as error:
            log.warning("%s", error)
            with suppress(OSError):  # the disk is full, say, and the first error is the one to be raised
                trainer.writers.event("save", trainer.state.progress.step, "error", message=str(error))
        if out_of_memory(failure):
            said = "out of memory; lower --micro-batch-size, --batch-size or --seq-len"
            raise RunError(said, reason="oom") from failure
        raise
    trainer.saver.close()


def _announce(built: BuiltRun, begun_at: Path | None) -> None:
    trainer, config, student = built.trainer, built.trainer.config, built.trainer.student
    distils = trainer.has_teacher and config.objective.distils
    kind = f"distillation from {_teacher_name(config, built.manifest)}" if distils else "cross-entropy"
    log.info(
        "%s: %s of %s (%s parameters), %d steps of %d x %d tokens, %s on %s",
        config.out,
        kind,
        built.spec.name,
        f"{built.parameters:,}",
        trainer.total,
        config.batch_size,
        trainer.seq_len,
        student.quantized or student.mode,
        student.device,
    )
    if world_size() > 1:
        log.info(
            "%d ranks, %s: each step %d micro-batches of %d sequences on each",
            *(world_size(), built.plan, trainer.micros, trainer.micro),
        )
    enabled = () if trainer.adaptive is None else ("[TimeResume] Adaptive quantization training enabled",)
    for line in (*built.quantised, *enabled, *built.hidden):
        log.info(line)
    if begun_at is not None:
        log.info("resuming from %s", begun_at)
    trainer.writers.event("start" if begun_at is None else "resume", trainer.state.progress.step)


def _teacher_name(config: DistillConfig, manifest: Manifest) -> str:
    return config.teacher or str((manifest.settings.teacher or {}).get("spec"))


def _finish(trainer: Trainer) -> dict[str, Any]:
    """Export the best student; what became of the run."""
    config = trainer.config
    ended = "signal" if trainer.stopped_by else "early-stop" if trainer.state.progress.stopped else "done"
    result = how_it_ended(trainer, ended)
    if trainer.stopped_by is None:
        on_main(lambda: _export(trainer))
        result["student"] = str(config.out / "student")
    write_result(trainer, result)
    return result


def _fail(trainer: Trainer, error: Exception) -> None:
    """Write and print what became of a run that an error ended; the caller raises it again."""
    result = how_it_ended(trainer, reason(error), str(error))
    with suppress(RunError):  # a full disk may be what the error is about
        write_result(trainer, result)
    if trainer.config.json:
        show("", result, True)


def _export(trainer: Trainer) -> None:
    """Write the best student, or the last one where none is best. No other rank takes part."""
    out, step = trainer.config.out / "student", trainer.state.progress.step
    student: torch.nn.Module = trainer.student.model
    if trainer.engine.kind == "fsdp":  # nobody here has all of it
        path = trainer.store.choose("latest") if trainer.state.progress.best_step is None else _best(trainer)
        checkpoint = load_saved(path)
        student, step = student_at(path, torch.device("cpu")), checkpoint.state["progress"]["step"]
    elif trainer.state.progress.best_step is not None:
        checkpoint = load_saved(_best(trainer))
        trainer.state.load(checkpoint.tensors, checkpoint.state)
        step = trainer.state.progress.step
    with writing(out):
        if os.path.lexists(out) and not is_export(out):
            moved = set_aside(out.parent, out.name, "old")
            trainer.writers.warning("export", step, f"{out} was not written by kdtrain, and is now {moved}")
    origin = {"cache": str(trainer.identity["cache"]), "step": step}
    tokenizer = tokenizer_files(trainer.config.out / TOKENIZER)
    if aside := export_model(student, tokenizer, out, origin=origin):
        trainer.writers.warning("export", step, f"{out} held more than an export, and is now {aside}")


def _best(trainer: Trainer) -> Path:
    try:
        return trainer.store.choose("best")
    except (UsageError, RunError) as error:
        trainer.writers.warning("best", trainer.state.progress.step, f"{error}; taking the newest instead")
        return trainer.store.choose("latest")
