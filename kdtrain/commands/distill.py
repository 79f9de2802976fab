"""`kdtrain distill`: trains a student from a cache, from an online teacher, or by cross-entropy on text."""

import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

import torch

from kdtrain.commands import dry_run, sanity
from kdtrain.commands.agreement import same_ranks
from kdtrain.commands.build_run import BuiltRun, build_run, micro_batch, run_device
from kdtrain.commands.common import show
from kdtrain.commands.export import student_at
from kdtrain.commands.result import log_outcome, refuse_no_progress, run_result, write_result
from kdtrain.commands.resume import new_length, resume_or_start
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
from kdtrain.config.choices import LOGGERS
from kdtrain.errors import RunError, UsageError, advice, reason, writing
from kdtrain.files import set_aside
from kdtrain.models.loading import export_lock, export_model, is_export, tokenizer_files
from kdtrain.models.spec import read_spec
from kdtrain.monitor.progress import end_log, log, setup_logging
from kdtrain.ranks import is_main, lost_rank, on_main, raise_on_all_ranks, rank, reported, world_size
from kdtrain.training.schedule import warmup_steps
from kdtrain.training.signals import interruptible
from kdtrain.training.state import load_saved
from kdtrain.training.step import out_of_memory
from kdtrain.training.trainer import Trainer

_OTHER_EXPORT = 600.0
"""Seconds that a run waits at its end for a `kdtrain export` to the same folder."""


def main(config: DistillConfig) -> int:
    """Train the student of `config` and export it, or try the run out; return 0 when done or gracefully stopped.

    Raises:
        UsageError: data, cache, student or options do not fit together.
        RunError: the training failed.
    """
    trial = sanity.main if config.sanity else dry_run.main if config.dry_run else None
    try:
        with interruptible():
            if trial is not None:
                return trial(config)
            result = distill(config)
    except KeyboardInterrupt as interrupt:
        outside = "stopped while not training; the same command resumes"
        log.info(outside if trial is None else "interrupted; the trial run is removed")
        result = {"run": str(config.out), "stop_reason": "signal", "stopped_by": str(interrupt) or "SIGINT"}
    show(f"distill {config.out}", result, config.json)
    return 0


def distill(config: DistillConfig) -> dict[str, Any]:
    """Train the student of `config` and export it: `kdtrain distill` as a function. The same call again resumes.

    Returns:
        The contents of result.json: stop_reason, steps, validation losses in nats a token, the exported student's
        folder.

    Raises:
        UsageError: data, cache, student or options do not fit together.
        RunError: the training failed, or diverged.
    """
    setup_logging(quiet=not is_main())
    with ExitStack() as stack:
        device = stack.enter_context(run_device(config))
        stack.enter_context(same_ranks(config, device))
        config = resuming(config, on_main(lambda: restarted(config)))
        with raise_on_all_ranks():  # refuse early, before --overwrite moves an earlier run aside
            read_spec(config.student)
            micro_batch(config)
            for name, text in config.monitor.loggers:
                LOGGERS.get(name).ready(text)
        resumed = stack.enter_context(run_lock(config))
        built = build_run(config, resumed)
        trainer, config = built.trainer, built.trainer.config
        loaded = resume_or_start(trainer, resumed)  # writes nothing yet, so that a refusal changes nothing
        length = on_main(lambda: new_length(trainer)) if resumed else None  # before config.toml has the new one
        _write_metadata(built)
        with _result_of_failure(trainer):
            stack.callback(lambda: _end_on_event(trainer))  # after the last event
            built.open(init=None if loaded is None else "loaded")
            trainer.writers.hyperparameters(used(config))
            _log_start(built, loaded, length)
            _fit(trainer)
            if trainer.stopped_by is None:
                with raise_on_all_ranks():
                    refuse_no_progress(trainer)
                log_outcome(trainer)
            trainer.writers.close()
            stopped_early = trainer.state.progress.stopped is not None
            result = run_result(trainer, "signal" if trainer.stopped_by else "early-stop" if stopped_early else "done")
            if trainer.stopped_by is None:  # still as a group of ranks, and under the run's lock
                try:
                    on_main(lambda: _export(trainer))
                except UsageError as error:  # training is over: it failed while running
                    raise reported(RunError(str(error))) from None
                result["student"] = str(config.out / "student")
        write_result(trainer, result)
        return result


def _write_metadata(built: BuiltRun) -> None:
    """Write config.toml, environment.json and the tokenizer into the run's folder, and open its log."""
    config, student, spec = built.trainer.config, built.trainer.student, built.spec
    metadata = {
        "student": {"name": spec.name, "parameters": built.parameters, "vocab_size": student.model.vocab_size},
        "cache": built.manifest.digest,
        "device": str(student.device),
        "mode": student.quantized or student.mode,
        "tf32": torch.backends.cuda.matmul.fp32_precision == "tf32",
        "compiled": student.compile_objective,
        "ranks": world_size(),
        "student over ranks": built.trainer.engine.kind,
        "launch": launch(),
    }
    on_main(lambda: write_description(config, metadata))
    on_main(lambda: write_tokenizer(config.out, spec, built.folder / "tokenizer", config.teacher))
    of_rank = config.out / f"rank-{rank():05d}.log" if config.parallel.log_all_ranks else None
    setup_logging(config.out / "train.log" if is_main() else of_rank, quiet=not is_main())


@contextmanager
def _result_of_failure(trainer: Trainer) -> Iterator[None]:
    """When an error ends the run, write it into its logs and result.json, and print that with `--json`.

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
            where, intact = error.filename or trainer.config.out, "published checkpoints are intact"
            text = f"{where}: {error.strerror or error}; {intact}{advice(error)}"
        step, writers = trainer.state.progress.step, getattr(trainer, "writers", None)  # which may have failed to open
        if writers is not None:
            with suppress(OSError):  # the error may be a full disk
                writers.event("failure", step, "error", reason=reason(error), message=text)
        with suppress(OSError):
            end_log(text)
        result = run_result(trainer, reason(error), text)
        with suppress(RunError):
            write_result(trainer, result)
        if trainer.config.json:
            show("", result, True)
        if isinstance(error, OSError):
            raise RunError(text, reason=reason(error)) from None
        if error is not found:
            raise error from found
        raise


def _end_on_event(trainer: Trainer) -> None:
    """Let the commands for the last events end, if the logs were opened."""
    if hasattr(trainer, "writers"):
        trainer.writers.end_on_event(trainer.state.progress.step)


def _log_start(built: BuiltRun, loaded: Path | None, length: str | None) -> None:
    trainer, config, student = built.trainer, built.trainer.config, built.trainer.student
    kind = "cross-entropy"
    if trainer.has_teacher and config.objective.distils:
        kind = f"distillation from {config.teacher or (built.manifest.settings.teacher or {}).get('spec')}"
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
    if (warmup := warmup_steps(trainer.planned, config.optimizer)) < config.optimizer.warmup_steps:
        log.info("warm-up of %d steps, half of the run, not %d", warmup, config.optimizer.warmup_steps)
    if world_size() > 1:
        log.info(
            "%d ranks, %s: each step %d micro-batches of %d sequences on each",
            *(world_size(), built.plan, trainer.micros, trainer.micro),
        )
    enabled = () if trainer.adaptive is None else ("[TimeResume] Adaptive quantization training enabled",)
    for line in (*built.quantised, *enabled, *built.hidden):
        log.info(line)
    if loaded is not None:
        log.info("resuming from %s", loaded)
    if length is not None:
        log.info(length)
    trainer.writers.event("start" if loaded is None else "resume", trainer.state.progress.step)


def _fit(trainer: Trainer) -> None:
    """Run `Trainer.fit`, and finish the last save, however it ends."""
    try:
        trainer.fit()
    except BaseException as failure:
        try:
            trainer.saver.close()
            trainer.log_published()
        except (RunError, OSError) as error:
            log.warning("%s", error)
            with suppress(OSError):  # for example on a full disk: raise the first error
                trainer.writers.event("save", trainer.state.progress.step, "error", message=str(error))
        if out_of_memory(failure):
            text = "out of memory; lower --micro-batch-size, --batch-size or --seq-len"
            raise RunError(text, reason="oom") from failure
        raise
    trainer.saver.close()


def _export(trainer: Trainer) -> None:
    """Export the best student, or the last one where none is best. Runs on rank 0 only."""
    out, step = trainer.config.out / "student", trainer.state.progress.step
    has_best = trainer.state.progress.best_step is not None
    student: torch.nn.Module = trainer.student.model
    if trainer.engine.kind == "fsdp":  # no rank holds the whole student
        path = _best(trainer) if has_best else trainer.store.choose("latest")
        checkpoint = load_saved(path)
        student, step = student_at(path, torch.device("cpu")), checkpoint.state["progress"]["step"]
    elif has_best:
        checkpoint = load_saved(_best(trainer))
        trainer.state.load(checkpoint.tensors, checkpoint.state)
        step = trainer.state.progress.step
    origin = {"cache": str(trainer.identity["cache"]), "step": step}
    tokenizer = tokenizer_files(trainer.config.out / TOKENIZER)
    with export_lock(out, wait=_OTHER_EXPORT):
        with writing(out):
            if os.path.lexists(out) and not is_export(out):
                moved = set_aside(out.parent, out.name, "old")
                trainer.writers.warning("export", step, f"{out} was not written by kdtrain, and is now {moved}")
        if aside := export_model(student, tokenizer, out, origin=origin):
            trainer.writers.warning("export", step, f"{out} held more than an export, and is now {aside}")


def _best(trainer: Trainer) -> Path:
    try:
        return trainer.store.choose("best")
    except (UsageError, RunError) as error:
        trainer.writers.warning("best", trainer.state.progress.step, f"{error}; taking the newest instead")
        return trainer.store.choose("latest")
