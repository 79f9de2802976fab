"""A run that is put together, tried and thrown away: what `--dry-run` and `--sanity` begin with.

It lives in a hidden folder beside `--out`, on the disk that the run will be written to, which is removed at the end.
An earlier run in `--out` is neither read nor touched.
"""

import math
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from kdtrain.checkpoint import tiers
from kdtrain.config import DistillConfig
from kdtrain.errors import RunError, UsageError, making
from kdtrain.files import hidden_folder
from kdtrain.models.loading import load_tokenizer
from kdtrain.monitor.writers import SilentWriters, Writers
from kdtrain.parallel.world import gathered, is_main, of_all, on_main, pick_device
from kdtrain.stages.agreement import same_ranks
from kdtrain.stages.assemble import Assembled, assemble
from kdtrain.stages.run_folder import is_run, refuse_strange
from kdtrain.training.reporter import Reporter
from kdtrain.training.run import Run
from kdtrain.training.stopping import StopRequest
from kdtrain.training.update import take_step


@contextmanager
def rehearsal(config: DistillConfig) -> Iterator[Assembled]:
    """The run of `config` with everything open but nothing trained; all it writes is gone when the block ends.

    Raises:
        UsageError: data, cache, student or options do not go together, or `--out` holds something that is no run.
        RunError: nothing can be written beside `--out`.
    """
    silent = replace(config.monitor, tensorboard=False, wandb_project=None, wandb_name=None)
    with same_ranks(config, pick_device(config.device)), _folder(config.out) as folder:
        made = assemble(replace(config, out=folder, monitor=silent), goes_on=False)
        run = made.run
        run.writers = Writers(folder, 0, None, silent) if is_main() else SilentWriters(silent)
        tokenizer = load_tokenizer(made.folder / "tokenizer")
        run.reporter = Reporter(
            *(run.config, run.step, run.writers, run.validation_source, tokenizer), init=made.spec.init, finished=0
        )
        try:
            yield made
        finally:
            run.saver.close()
            run.writers.close()


def existing(path: Path) -> Path:
    """`path`, or the nearest folder above it that is there: it tells on which disk `path` will be."""
    path = path.resolve()
    while not path.exists():
        path = path.parent
    return path


@contextmanager
def _folder(out: Path) -> Iterator[Path]:
    """A hidden folder beside `out`, the same for all ranks, removed with all that is in it."""
    with ExitStack() as stack:

        def make() -> str:
            with making(out):
                if out.exists() and not out.is_dir():
                    raise UsageError(f"--out {out} is a file; name a folder")
                if not is_run(out):
                    refuse_strange(out)
                return str(stack.enter_context(hidden_folder(existing(out.resolve().parent) / out.name)))

        yield Path(on_main(make))
        gathered(None)  # until every rank has read in it what it wants


@dataclass(frozen=True)
class Timed:
    """A step that was taken, and what it took."""

    seconds: float
    numbers: dict[str, float]


def steps(run: Run, count: int) -> list[Timed]:
    """Take the next steps of a run.

    Raises:
        RunError: loss or gradient are not finite.
    """
    taken: list[Timed] = []
    started = time.perf_counter()
    for batches in run.feed().steps():
        stop = StopRequest()
        numbers = take_step(run, batches, stop)
        stop.raise_failed()
        assert numbers is not None  # nobody else asks this one to stop
        if numbers.pop("skipped"):
            if run.scale.absorbs(math.isfinite(numbers["loss"])):
                run.scale.update(overflowed=True)
                continue
            broken = (
                f"step {len(taken) + 1}: loss {numbers['loss']} with gradient norm {numbers['grad_norm']}; "
                "look at the data (kdtrain verify) or lower --lr"
            )
            raise of_all(RunError(broken))
        run.state.progress.step += 1
        run.state.progress.sequences += run.config.batch_size
        taken.append(Timed(time.perf_counter() - started, numbers))
        if len(taken) == count:
            break
        started = time.perf_counter()
    return taken


def state_bytes(run: Run) -> int:
    """Bytes of the tensors of a checkpoint, once a step was taken: weights, two moments, and little else."""
    return sum(tensor.numel() * tensor.element_size() for tensor in run.state.tensors().values())


def checkpoints_kept(run: Run) -> int:
    """How many checkpoints lie on the disk at most: all tiers full, the best one, and one that is being written."""
    keep = run.config.checkpoint
    epochs = run.total * run.config.batch_size // len(run.train_source)
    rolling = min(keep.keep_rolling, len(checkpoint_steps(run)))
    windows = run.config.quantization.quant_recovery_buffer if run.adaptive is not None else 0
    return rolling + min(keep.keep_epochs, epochs) + keep.keep_special + windows + 2


def checkpoint_steps(run: Run) -> Sequence[int]:
    """The steps after which a rolling checkpoint is due."""
    every = run.config.checkpoint.checkpoint_freq
    return sorted({*range(every, run.total + 1, every), run.total})


def saves(run: Run) -> int:
    """How often the run is to be saved: rolling checkpoints, epochs', and those of adaptive quantisation's windows."""
    own, windows = run.config.quantization, 0
    size, sequences = run.config.batch_size, len(run.train_source)
    epochs = {step for step in range(1, run.total + 1) if step * size // sequences > (step - 1) * size // sequences}
    if run.adaptive is not None:
        windows = run.total // own.quant_window_size
        windows += run.total // own.quant_checkpoint_interval if own.quant_snapshot == "disk" else 0
    return len(epochs.union(checkpoint_steps(run))) + windows


def save(run: Run) -> tuple[float, float]:
    """Save the run as it would be, and return for how many seconds training stood still and how many it took."""
    progress = run.state.progress
    started = time.perf_counter()
    stall = run.saver.save(
        [tiers.rolling_name(progress.step)],
        progress.step,
        run.state.tensors(),
        {**run.identity, **run.state.numbers()},
    )
    run.saver.wait()
    return stall, time.perf_counter() - started
