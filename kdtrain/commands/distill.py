"""`kdtrain distill`: train a student from a cache, from an online teacher, or by cross-entropy on text."""

import os
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

from kdtrain.cache.manifest import Manifest
from kdtrain.commands import dry_run, sanity
from kdtrain.commands.agreement import same_ranks
from kdtrain.commands.build_cache import logit_width
from kdtrain.commands.build_run import Assembled, assemble, micro_batch
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
from kdtrain.models.loading import export_model, is_export, load_tokenizer, tokenizer_files
from kdtrain.models.spec import read_spec
from kdtrain.monitor.loggers import require_wandb
from kdtrain.monitor.progress import log, setup_logging
from kdtrain.monitor.writers import SilentWriters, Writers
from kdtrain.ranks import is_main, on_main, pick_device, raise_on_all_ranks, rank, world_size
from kdtrain.training.reporter import Reporter
from kdtrain.training.run import Run
from kdtrain.training.saving import log_published
from kdtrain.training.signals import interruptible
from kdtrain.training.state import load_saved
from kdtrain.training.trainer import train
from kdtrain.training.update import FIRST_STEPS, out_of_memory


def main(config: DistillConfig) -> int:
    """Train the student of `config` and export it, or try that out; 0 when done or gracefully stopped.

    Raises:
        UsageError: data, cache, student or options do not go together.
        RunError: the training failed.
    """
    what = sanity.main if config.sanity else dry_run.main if config.dry_run else _distill
    try:
        with interruptible():
            return what(config)
    except KeyboardInterrupt as asked:
        tried = "interrupted; nothing was left behind"
        log.info("stopped while not training; the same command goes on" if what is _distill else tried)
        stopped = {"run": str(config.out), "stop_reason": "signal", "stopped_by": str(asked) or "SIGINT"}
        show(f"distill {config.out}", stopped, config.json)
        return 0


def _distill(config: DistillConfig) -> int:
    setup_logging(quiet=not is_main())
    with same_ranks(config, pick_device(config.device)):
        return _among_ranks(config)


def _among_ranks(config: DistillConfig) -> int:
    config = resuming(config, on_main(lambda: restarted(config)))
    with raise_on_all_ranks():  # what can be refused at once is refused before --overwrite moves an earlier run aside
        read_spec(config.student)
        micro_batch(config)
        require_wandb(config.monitor.wandb_project)
    with run_lock(config) as goes_on:
        return _in_folder(config, goes_on)


def _in_folder(config: DistillConfig, goes_on: bool) -> int:
    made = assemble(config, goes_on)
    run, config = made.run, made.run.config
    begun_at = resume_or_start(run, goes_on)  # before anything is written: what is refused stays as it was
    facts = _metadata(made)
    on_main(lambda: write_description(config, facts))
    on_main(lambda: write_tokenizer(config.out, made.spec, made.folder / "tokenizer"))
    setup_logging(_log_of(config), quiet=not is_main())
    at = run.state.progress
    run.halves_until = at.step + FIRST_STEPS
    try:
        run.writers = (
            Writers(config.out, at.step, at.validated_step, config.monitor)
            if is_main()
            else SilentWriters(config.monitor)
        )
        run.writers.hyperparameters(used(config))
        run.reporter = Reporter(
            *(config, run.step, run.writers, run.validation_source, load_tokenizer(made.folder / "tokenizer")),
            init=made.spec.init if begun_at is None else "loaded",
            finished=at.step,
            samples=made.manifest.codec.num_samples,
        )
        if run.collector is not None:
            run.collector.forget_after(at.step)
        _announce(made, begun_at)
        _train(run)
        if run.stopped_by is None:
            log_outcome(run)
        run.writers.close()
    except OSError as error:
        _fail(run, error)
        where, kept = error.filename or config.out, "published checkpoints are intact"
        raise RunError(f"{where}: {error.strerror or error}; {kept}{advice(error)}", reason=reason(error)) from None
    except UsageError:
        raise
    except Exception as error:
        _fail(run, error)
        raise
    return _finish(run)


def _log_of(config: DistillConfig) -> Path | None:
    """The file that this rank's lines go into, if any."""
    if is_main():
        return config.out / "train.log"
    return config.out / f"rank-{rank():05d}.log" if config.parallel.log_all_ranks else None


def _train(run: Run) -> None:
    """`train`, and nothing left in flight behind it, however it ended."""
    try:
        train(run)
    except BaseException as failure:
        try:
            run.saver.close()
            log_published(run)
        except (RunError, OSError) as error:
            log.warning("%s", error)
            with suppress(OSError):  # the disk is full, say, and the first error is the one to be raised
                run.writers.event("save", run.state.progress.step, "error", message=str(error))
        if out_of_memory(failure):
            said = "out of memory; lower --micro-batch-size, --batch-size or --seq-len"
            raise RunError(said, reason="oom") from failure
        raise
    run.saver.close()


def _metadata(made: Assembled) -> dict[str, Any]:
    """What environment.json says beside the libraries."""
    run, spec, manifest = made.run, made.spec, made.manifest
    parameters = sum(each.numel() for each in run.state.student.parameters())
    return {
        "student": {"name": spec.name, "parameters": parameters, "vocab_size": logit_width(run.state.student)},
        "cache": manifest.digest,
        "device": str(run.step.device),
        "mode": run.step.quantized or run.step.mode,
        "compiled": run.step.compile_objective,
        "ranks": world_size(),
        "student over ranks": run.spread.kind,
        "launch": launch(),
    }


def _announce(made: Assembled, begun_at: Path | None) -> None:
    run, spec, manifest = made.run, made.spec, made.manifest
    config, settings = run.config, manifest.settings
    parameters = sum(each.numel() for each in run.state.student.parameters())
    distils = run.step.has_teacher and config.objective.distils
    kind = f"distillation from {_teacher_name(config, manifest)}" if distils else "cross-entropy"
    log.info(
        "%s: %s of %s (%s parameters), %d steps of %d x %d tokens, %s on %s",
        config.out,
        kind,
        spec.name,
        f"{parameters:,}",
        run.total,
        config.batch_size,
        settings.seq_len,
        run.step.quantized or run.step.mode,
        run.step.device,
    )
    if world_size() > 1:
        log.info(
            "%d ranks, %s: each step %d micro-batches of %d sequences on each",
            *(world_size(), made.plan, run.micros, run.micro),
        )
    for line in made.lines:
        log.info(line)
    if run.adaptive is not None:
        log.info("[TimeResume] Adaptive quantization training enabled")
    if made.hidden is not None:
        log.info(made.hidden.describe())
    if begun_at is not None:
        log.info("going on from %s", begun_at)
    event = "start" if begun_at is None else "resume"
    run.writers.event(event, run.state.progress.step)


def _teacher_name(config: DistillConfig, manifest: Manifest) -> str:
    return config.teacher or str((manifest.settings.teacher or {}).get("spec"))


def _finish(run: Run) -> int:
    """Export the best student and print what became of the run."""
    config = run.config
    ended = "signal" if run.stopped_by else "early-stop" if run.state.progress.stopped else "done"
    result = how_it_ended(run, ended)
    if run.stopped_by is None:
        on_main(lambda: _export(run))
        result["student"] = str(config.out / "student")
    write_result(run, result)
    show(f"distill {config.out}", result, config.json)
    return 0


def _fail(run: Run, error: Exception) -> None:
    """Write and print what became of a run that an error ended; the caller raises it again."""
    result = how_it_ended(run, reason(error), str(error))
    with suppress(RunError):  # a full disk may be what the error is about
        write_result(run, result)
    if run.config.json:
        show("", result, True)


def _export(run: Run) -> None:
    """Write the best student, or the last one where none is best. No other rank takes part."""
    out, step = run.config.out / "student", run.state.progress.step
    student: torch.nn.Module = run.state.student
    if run.spread.kind == "fsdp":  # nobody here has all of it
        path = run.store.choose("latest") if run.state.progress.best_step is None else _best(run)
        checkpoint = load_saved(path)
        student, step = student_at(path, torch.device("cpu")), checkpoint.state["progress"]["step"]
    elif run.state.progress.best_step is not None:
        checkpoint = load_saved(_best(run))
        run.state.load(checkpoint.tensors, checkpoint.state)
        step = run.state.progress.step
    with writing(out):
        if os.path.lexists(out) and not is_export(out):
            moved = set_aside(out.parent, out.name, "old")
            run.writers.warning("export", step, f"{out} was not written by kdtrain, and is now {moved}")
    origin = {"cache": str(run.identity["cache"]), "step": step}
    tokenizer = tokenizer_files(run.config.out / TOKENIZER)
    if aside := export_model(student, tokenizer, out, origin=origin):
        run.writers.warning("export", step, f"{out} held more than an export, and is now {aside}")


def _best(run: Run) -> Path:
    try:
        return run.store.choose("best")
    except (UsageError, RunError) as error:
        run.writers.warning("best", run.state.progress.step, f"{error}; taking the newest instead")
        return run.store.choose("latest")
