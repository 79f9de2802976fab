"""A run that is tried out and removed, for `--dry-run` and `--sanity`.

`trial_run` builds it in a hidden folder beside `--out`, on the disk of the run, and removes that folder at the end. It
does not change an earlier run in `--out`, of which it reads only the attention.
"""

import math
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from kdtrain.config import DistillConfig
from kdtrain.errors import RunError, making
from kdtrain.files import hidden_folder
from kdtrain.monitor.progress import log
from kdtrain.ranks import all_gather_object, on_main, reported
from kdtrain.run.agreement import same_ranks
from kdtrain.run.build import build
from kdtrain.run.folder import check_out
from kdtrain.run.recipe import resolve, run_device
from kdtrain.run.run import Run
from kdtrain.training.signals import StopRequest
from kdtrain.training.step import Status


class TimedStep(NamedTuple):
    """The time and the numbers of a step."""

    seconds: float
    numbers: dict[str, float]


class Trial:
    """A run that is tried out, and what it would write into `out`."""

    def __init__(self, run: Run, out: Path) -> None:
        self.run, self.recipe, self.trainer, self.out = run, run.recipe, run.trainer, out

    def timed_steps(self, count: int) -> list[TimedStep]:
        """Take the next steps of the run. RunError: the loss or a gradient is non-finite."""
        trainer, taken = self.trainer, list[TimedStep]()
        started = time.perf_counter()
        for batches in trainer.stepper.feed().steps():
            stop = StopRequest()
            result = trainer.stepper.take(batches, stop)
            stop.raise_failed()
            if result.status is Status.OUT_OF_MEMORY:
                log.warning(result.message)
                return self.timed_steps(count)
            if result.status is Status.SKIPPED and result.tokens:
                if trainer.state.guards.scale.absorbs(math.isfinite(result.loss)):
                    trainer.state.guards.scale.update(overflowed=True)
                    continue
                found = f"loss {result.loss} with gradient norm {result.grad_norm}"
                advice = "look at the data (kdtrain verify) or lower --lr"
                raise reported(RunError(f"step {len(taken) + 1}: {found}; {advice}"))
            taken.append(TimedStep(time.perf_counter() - started, result.metrics))
            if len(taken) == count:
                break
            started = time.perf_counter()
        return taken


@contextmanager
def trial_run(config: DistillConfig) -> Iterator[Trial]:
    """Build and open the run of `config`, untrained; all its files are removed when the block ends.

    UsageError: data, cache, student or options do not fit together, or `--out` holds something that is not a run.
    RunError: the folder of `--out` cannot be written.
    """
    silent = replace(config.monitor, log_to="none", on_event=None)
    with ExitStack() as held:
        device = held.enter_context(run_device(config))
        held.enter_context(same_ranks(config, device))
        hidden = replace(config, out=held.enter_context(trial_folder(config.out)), monitor=silent)
        run = build(resolve(hidden, device, held, earlier=config.out))
        run.open()
        try:
            yield Trial(run, config.out)
        finally:
            run.trainer.saver.close()
            run.trainer.writers.close()


@contextmanager
def trial_folder(out: Path) -> Iterator[Path]:
    """Make a hidden folder beside `out`, the same for all ranks, and remove it with its contents."""
    with ExitStack() as stack:

        def make() -> str:
            with making(out):
                check_out(out)
                return str(
                    stack.enter_context(hidden_folder(existing_parent(out.resolve().parent) / f"{out.name}.trial"))
                )

        yield Path(on_main(make))
        all_gather_object(None)  # a barrier: every rank has finished reading


def existing_parent(path: Path) -> Path:
    """Return `path` or its nearest existing parent, which is on the disk where `path` will be."""
    path = path.resolve()
    while not path.exists():
        path = path.parent
    return path
