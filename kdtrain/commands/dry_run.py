"""`kdtrain distill --dry-run`: what a run would do, and what it would take, by two steps and a save of the real thing.

The estimate of time is the second step, which a compiler no longer slows down, times the steps, and the measured cost
of validations and checkpoints. It leaves out what another process takes of the machine. Memory is the peak of the two
steps, one validation forward and the save; a longer run adds to it what its log (`mem_delta=`) shows.

A run that is put together, tried and thrown away: what `--dry-run` and `--sanity` begin with.

It lives in a hidden folder beside `--out`, on the disk that the run will be written to, which is removed at the end.
An earlier run in `--out` is neither read nor touched.
"""

import math
import shutil
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from kdtrain.checkpoint import tiers
from kdtrain.checkpoint.store import Store
from kdtrain.commands.agreement import same_ranks
from kdtrain.commands.build_run import Assembled, assemble
from kdtrain.commands.common import show
from kdtrain.commands.resume import start_from
from kdtrain.commands.run_folder import is_run, refuse_changes, refuse_strange
from kdtrain.config import DistillConfig
from kdtrain.errors import RunError, UsageError, making
from kdtrain.files import hidden_folder
from kdtrain.models.loading import load_tokenizer
from kdtrain.monitor.progress import log, setup_logging
from kdtrain.monitor.writers import SilentWriters, Writers
from kdtrain.parallel import parallelize
from kdtrain.parallel.memory_plan import Plan
from kdtrain.parallel.parallelize import layers_of
from kdtrain.precision.modes import head_dtype
from kdtrain.ranks import (
    all_gather_object,
    is_main,
    on_main,
    peak_memory_mb,
    pick_device,
    raise_on_all_ranks,
    reported,
    world_size,
)
from kdtrain.training.reporter import Reporter
from kdtrain.training.run import Run
from kdtrain.training.schedule import decay_steps
from kdtrain.training.signals import StopRequest
from kdtrain.training.state import read_saved
from kdtrain.training.trainer import validate
from kdtrain.training.update import take_step


@contextmanager
def trial_run(config: DistillConfig) -> Iterator[Assembled]:
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
        all_gather_object(None)  # until every rank has read in it what it wants


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
            raise reported(RunError(broken))
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


def main(config: DistillConfig) -> int:
    """Print the plan of a run and its estimates; nothing stays.

    Raises:
        UsageError: the run cannot be.
        RunError: a step or the save failed, as the run would have.
    """
    setup_logging(quiet=not is_main())
    with trial_run(config) as made:
        if config.checkpoint.load is not None:
            start_from(made.run, config.checkpoint.load)
        with raise_on_all_ranks():
            begins = _begins(config, made.run.config)
        log.info("put together; two steps, a validation forward and a save follow")
        table = {"run": str(config.out), "begins": begins, **_plan(config, made), **_estimates(config, made.run)}
    show(f"distill {config.out}, dry run", table, config.json)
    return 0


def _plan(config: DistillConfig, made: Assembled) -> dict[str, Any]:
    run, settings = made.run, made.manifest.settings
    student = run.state.student
    each = f" on each of {world_size()} ranks" if world_size() > 1 else ""
    return {
        "student": {"name": made.spec.name, "parameters": sum(each.numel() for each in student.parameters())},
        "teacher": (config.teacher or (settings.teacher or {}).get("spec")) if run.step.has_teacher else None,
        "device": str(run.step.device),
        "parallel": {"ranks": world_size(), **made.plan.table(), "GB sent a step": _sent(run, made.plan)},
        "mode": run.step.quantized or run.step.mode,
        **({"quantised": list(made.lines)} if made.lines else {}),
        "compiled": run.step.compile_objective,
        "steps": run.total,
        "batch": f"{config.batch_size} x {run.step.seq_len} tokens, {run.micros} micro-batches of {run.micro}{each}",
        "sequences": {"train": len(run.train_source), "validation": len(run.validation_source)},
        "epochs": round(run.total * config.batch_size / len(run.train_source), 3),
        "tokens": run.total * config.batch_size * run.step.seq_len,
        "learning rate": _schedule(run),
        "validations": len(_validation_steps(run)),
        "checkpoints": saves(run),
    }


def _estimates(config: DistillConfig, run: Run) -> dict[str, Any]:
    first, second = steps(run, 2)
    validation = _validation_seconds(run)
    stall, saving = save(run)
    size = sum(file.stat().st_size for file in run.store.folder.rglob("*") if file.is_file() and not file.is_symlink())
    times = {
        "first step": first.seconds,
        "steps": (run.total - 1) * second.seconds,
        "validations": len(_validation_steps(run)) * validation,
        "checkpoints": saves(run) * stall,
    }
    kept = checkpoints_kept(run)
    return {
        "loss of the two steps": [round(each.numbers["loss"], 4) for each in (first, second)],
        "seconds": {
            "first step": round(first.seconds, 3),
            "a step": round(second.seconds, 3),
            "a validation": round(validation, 3),
            "a checkpoint": round(saving, 3),
            "of it training stands still": round(stall, 4),
        },
        "tokens_per_second": round(second.numbers["tokens"] / second.seconds, 1),
        "estimated_hours": round(sum(times.values()) / 3600, 4),
        "shares of the time": {name: round(seconds / sum(times.values()), 4) for name, seconds in times.items()},
        "peak_memory_mb": round(peak_memory_mb(run.step.device), 1),
        "memory of the device (MiB)": _device_memory(run.step.device),
        "checkpoint (MiB)": round(max(size, state_bytes(run)) / 2**20, 1),
        "disk for checkpoints (MiB)": round(kept * size / 2**20, 1),
        "disk free (MiB)": round(shutil.disk_usage(existing(config.out)).free / 2**20, 1),
    }


def _sent(run: Run, plan: Plan) -> float:
    """GB that a rank sends over a ring in a step, by formula."""
    world, student = world_size(), run.state.student
    if plan.student != "fsdp":
        return parallelize.ddp([each.shape for each in student.parameters()]).sent(1, world) / 1e9
    layers = layers_of(student)
    inside = {id(each) for layer in layers for each in layer.parameters()}
    sharing = plan.shard_size or world
    found = parallelize.fsdp(
        [[each.shape for each in layer.parameters()] for layer in layers],
        [each.shape for each in student.parameters() if id(each) not in inside],
        sharing=sharing,
        replicas=world // sharing,
        micro_batches=run.micros,
        gathered=4 if head_dtype(run.step.mode) is None or run.step.quantized else 2,
    )
    return found.sent(sharing, world // sharing) / 1e9


def _begins(config: DistillConfig, settled: DistillConfig) -> str:
    """Where the run would begin, by what is in its folder now.

    settled: `config` with what was taken from the cache and the machine, as the run keeps it.
    """
    if config.checkpoint.resume == "never" or not is_run(config.out):
        return "anew" if config.checkpoint.load is None else f"with {config.checkpoint.load}"
    store = Store(config.out / "checkpoints")
    if config.checkpoint.resume != "auto":
        path = store.choose(config.checkpoint.resume)
    else:
        name, damaged = store.newest_valid()
        for text in damaged:
            log.warning(text)
        if name is None:
            return "anew"
        path = store.path(name)
    refuse_changes(read_saved(path)["options"], replace(settled, out=config.out), path.name)
    return f"at {path.name}"


def _schedule(run: Run) -> str:
    own = run.config.optimizer
    text = f"{own.lr:g}, {own.lr_schedule} after {min(own.warmup_steps, run.total)} steps of warm-up"
    if own.lr_schedule == "wsd":
        text += f", the last {decay_steps(run.total, own)} steps down to {own.min_lr:g} ({own.decay_shape})"
    elif own.lr_schedule == "cosine":
        text += f", down to {own.min_lr:g}"
    return text


def _validation_steps(run: Run) -> list[int]:
    every = run.config.monitor.eval_freq
    return sorted({*range(0, run.total + 1, every), run.total})


def _validation_seconds(run: Run) -> float:
    """Seconds of a whole validation, by those of one forward of each rank."""
    most = run.config.monitor.eval_batches * (run.config.micro_batch_given or run.config.batch_size) // run.micro
    forwards = math.ceil(min(math.ceil(len(run.validation_source) / run.micro), most) / world_size())
    run.step.eval()
    started = time.perf_counter()
    found = validate(
        run.validation_source,
        run.step.hidden_eager,
        run.step.student.head,
        vocab_size=run.step.vocab_size,
        micro=run.micro,
        batches=1,
    )
    run.spread.reshard()
    if found is None:
        raise RunError("the validation was stopped")
    return forwards * (time.perf_counter() - started)


def _device_memory(device: torch.device) -> float | None:
    """MiB that a GPU has; None on a CPU, whose memory others use as well."""
    if device.type != "cuda":
        return None
    return round(torch.cuda.get_device_properties(device).total_memory / 2**20, 1)
