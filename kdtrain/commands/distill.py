"""`kdtrain distill`: trains a student from a cache, from an online teacher, or by cross-entropy on text."""

import os
import sys
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

from kdtrain.config.commands import DistillConfig
from kdtrain.config.values import configured
from kdtrain.errors import RunError, UsageError, log
from kdtrain.imports import quiet_libraries
from kdtrain.models.loading import is_adapter, is_model_folder
from kdtrain.monitor.facts import closing_page, is_run
from kdtrain.monitor.progress import setup_logging
from kdtrain.ranks import is_main, on_main, raise_on_all_ranks, reported, world_size
from kdtrain.run.build import build
from kdtrain.run.recipe import resolve, run_device, student_spec, table_rate
from kdtrain.run.run import Run
from kdtrain.training.signals import interruptible
from kdtrain.training.sources.plan import CachedData


def main(config: DistillConfig) -> int:
    """Train the student of `config` and export it, or try the run out; return 0 when done or gracefully stopped.

    UsageError: data, cache, student or options do not fit together. RunError: the training failed.
    """
    tries = config.sanity or config.dry_run
    try:
        with interruptible():
            if tries:
                from kdtrain.run.trial import main as try_out

                return try_out(config)
            _confirm(config)
            result = distill(config)
    except KeyboardInterrupt as interrupt:
        outside = "stopped while not training; the same command resumes"
        log.info("interrupted; the trial run is removed" if tries else outside)
        result = {"run": str(config.out), "stop_reason": "signal", "stopped_by": str(interrupt) or "SIGINT"}
    config.show(closing_page(config.out, result), result)
    return 0


def _confirm(config: DistillConfig) -> None:
    """Ask a user at a terminal whether to resume an earlier run. UsageError: the user declines."""
    at_terminal = "RANK" not in os.environ and sys.stdin.isatty() and sys.stderr.isatty()
    if not (at_terminal and config.checkpoint.resume == "auto" and is_run(config.out)):
        return
    print(f"{config.out} holds an earlier run. Resume it? [Y/n] ", end="", file=sys.stderr, flush=True)
    if sys.stdin.readline().strip().lower() not in ("", "y", "yes"):
        raise UsageError(f"--out {config.out} holds a run; name another folder, or use --resume never --overwrite")


def distill(config: DistillConfig | None = None, **options: Any) -> dict[str, Any]:
    """Train a student and export it: `kdtrain distill` as a function. The same call again resumes.

    Args:
        config: every option by section; None: the defaults.
        options: options by their names on the command line, over those of `config`: `lr=3e-4`, `compile=False`.

    Returns:
        The contents of result.json: stop_reason, steps, validation losses in nats per token, the exported student's
        folder.

    UsageError: data, cache, student or options do not fit together. RunError: the training failed, or diverged.
    """

    def export(run: Run, result: dict[str, Any]) -> None:
        try:
            result |= on_main(run.export)
        except UsageError as error:  # training is over: it failed while running
            raise reported(RunError(str(error))) from None
        result["student"] = str(run.out / "student")

    return train(configured(DistillConfig, config, options), finish=export)


def foresee(config: DistillConfig) -> tuple[float, str, int | None]:
    """Return the rate of a run's --lr, where it is from, and the run's sequences; None: its text is not packed yet.

    UsageError: cache or student cannot be read, or the rate is that of a loaded run.
    """
    start = config.checkpoint
    run = start.load is not None and not is_model_folder(start.load) and not is_adapter(start.load)
    if run and not start.override_opt_param_scheduler:
        raise UsageError(
            "--load keeps the rate of the loaded run; add --override-opt-param-scheduler to look for another"
        )
    student = student_spec(config)
    size = sequences = None
    if config.data.data is None and not config.cross_tokenizer:
        train = CachedData(config, config.cache).sources["train"]
        size = train.facts.vocab_size
        sequences = len(train)
    lr = config.optimizer.lr
    return (*table_rate(config, student, size), sequences) if isinstance(lr, str) else (lr, "--lr", sequences)


def train(config: DistillConfig, finish: Callable[[Run, dict[str, Any]], None]) -> dict[str, Any]:
    """Train the student of `config`, or resume its run; return the contents of result.json.

    finish: takes the run, trained and unless a signal stopped it, and its result, as a group of ranks and under the
    run's lock.

    UsageError, RunError: as `distill`.
    """
    setup_logging(quiet=not is_main())
    with ExitStack() as stack:
        stack.enter_context(quiet_libraries())
        device = stack.enter_context(run_device(config))
        if world_size() > 1:
            from kdtrain.parallel.agreement import same_ranks

            stack.enter_context(same_ranks(config, device))
        recipe = resolve(config, device, stack)
        run = build(recipe)
        trainer, loaded = run.trainer, run.resume_or_load()  # writes nothing yet, so that a refusal changes nothing
        length = on_main(run.new_length) if recipe.resumed else None  # before environment.json has the new one
        run.write_metadata()
        with run.recording_failure():
            # what observers do about the last events ends, if the logs were opened
            stack.callback(lambda: trainer.writers.end_observers(trainer.state.progress.step))
            run.open(init=None if loaded is None else "loaded")
            run.log_start(loaded, length)
            run.fit()
            if trainer.stopped_by is None:
                recipe.data.finish()
                with raise_on_all_ranks():
                    run.refuse_no_progress()
                run.log_outcome()
            trainer.writers.close()
            if trainer.stopped_by:
                ended = "signal"
            else:
                ended = "done" if trainer.state.progress.stopped is None else "early-stop"
            result = run.result(ended)
            if trainer.stopped_by is None:
                finish(run, result)
        run.write_result(result)
        return result
