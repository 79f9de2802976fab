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
from kdtrain.commands.build_run import BuiltRun, build_run
from kdtrain.commands.common import show
from kdtrain.commands.resume import start_from
from kdtrain.commands.run_folder import is_run, refuse_changes, refuse_strange
from kdtrain.config import DistillConfig
from kdtrain.errors import RunError, UsageError, making
from kdtrain.files import hidden_folder
from kdtrain.monitor.progress import log, setup_logging
from kdtrain.parallel import parallelize
from kdtrain.parallel.memory_plan import Plan
from kdtrain.precision.linear import layers_of
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
from kdtrain.training.schedule import decay_steps
from kdtrain.training.signals import StopRequest
from kdtrain.training.state import read_saved
from kdtrain.training.trainer import Trainer, validate


@contextmanager
def trial_run(config: DistillConfig) -> Iterator[BuiltRun]:
    """The run of `config` with everything open but nothing trained; all it writes is gone when the block ends.

    Raises:
        UsageError: data, cache, student or options do not go together, or `--out` holds something that is no run.
        RunError: nothing can be written beside `--out`.
    """
    silent = replace(config.monitor, tensorboard=False, wandb_project=None, wandb_name=None)
    with same_ranks(config, pick_device(config.device)), _folder(config.out) as folder:
        built = build_run(replace(config, out=folder, monitor=silent), resuming=False)
        built.open()
        try:
            yield built
        finally:
            built.trainer.saver.close()
            built.trainer.writers.close()


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


def steps(trainer: Trainer, count: int) -> list[Timed]:
    """Take the next steps of a run.

    Raises:
        RunError: loss or gradient are not finite.
    """
    taken: list[Timed] = []
    started = time.perf_counter()
    for batches in trainer.feed().steps():
        stop = StopRequest()
        numbers = trainer.step(batches, stop)
        stop.raise_failed()
        if numbers is None:  # nobody asks this one to stop: half the micro-batch is tried
            return steps(trainer, count)
        if numbers.pop("skipped"):
            if trainer.guards.scale.absorbs(math.isfinite(numbers["loss"])):
                trainer.guards.scale.update(overflowed=True)
                continue
            broken = (
                f"step {len(taken) + 1}: loss {numbers['loss']} with gradient norm {numbers['grad_norm']}; "
                "look at the data (kdtrain verify) or lower --lr"
            )
            raise reported(RunError(broken))
        trainer.count(numbers)
        taken.append(Timed(time.perf_counter() - started, numbers))
        if len(taken) == count:
            break
        started = time.perf_counter()
    return taken


def state_bytes(trainer: Trainer) -> int:
    """Bytes of the tensors of a checkpoint, once a step was taken: weights, two moments, and little else."""
    return sum(tensor.numel() * tensor.element_size() for tensor in trainer.state.tensors().values())


def checkpoints_kept(trainer: Trainer) -> int:
    """How many checkpoints lie on the disk at most: all tiers full, the best one, and one that is being written."""
    keep = trainer.config.checkpoint
    epochs = trainer.total * trainer.config.batch_size // len(trainer.train_source)
    rolling = min(keep.keep_rolling, len(checkpoint_steps(trainer)))
    windows = trainer.config.quantization.quant_recovery_buffer if trainer.adaptive is not None else 0
    return rolling + min(keep.keep_epochs, epochs) + keep.keep_special + windows + 2


def checkpoint_steps(trainer: Trainer) -> Sequence[int]:
    """The steps after which a rolling checkpoint is due."""
    every = trainer.config.checkpoint.checkpoint_freq
    return sorted({*range(every, trainer.total + 1, every), trainer.total})


def saves(trainer: Trainer) -> int:
    """How often the run is to be saved: rolling checkpoints, epochs', and those of adaptive quantisation's windows."""
    own, windows = trainer.config.quantization, 0
    size, sequences = trainer.config.batch_size, len(trainer.train_source)
    epochs = {step for step in range(1, trainer.total + 1) if step * size // sequences > (step - 1) * size // sequences}
    if trainer.adaptive is not None:
        windows = trainer.total // own.quant_window_size
        windows += trainer.total // own.quant_checkpoint_interval if own.quant_snapshot == "disk" else 0
    return len(epochs.union(checkpoint_steps(trainer))) + windows


def save(trainer: Trainer) -> tuple[float, float]:
    """Save the run as it would be, and return for how many seconds training stood still and how many it took."""
    progress = trainer.state.progress
    started = time.perf_counter()
    stall = trainer.saver.save(
        [tiers.rolling_name(progress.step)],
        progress.step,
        trainer.state.tensors(),
        {**trainer.identity, **trainer.state.numbers()},
    )
    trainer.saver.wait()
    return stall, time.perf_counter() - started


def main(config: DistillConfig) -> int:
    """Print the plan of a run and its estimates; nothing stays.

    Raises:
        UsageError: the run cannot be.
        RunError: a step or the save failed, as the run would have.
    """
    setup_logging(quiet=not is_main())
    with trial_run(config) as built:
        if config.checkpoint.load is not None:
            start_from(built.trainer, config.checkpoint.load)
        with raise_on_all_ranks():
            begins = _begins(config, built.trainer.config)
        log.info("put together; two steps, a validation forward and a save follow")
        table = {"run": str(config.out), "begins": begins, **_plan(config, built), **_estimates(config, built.trainer)}
    show(f"distill {config.out}, dry run", table, config.json)
    return 0


def _plan(config: DistillConfig, built: BuiltRun) -> dict[str, Any]:
    trainer, settings = built.trainer, built.manifest.settings
    student = trainer.student.model
    each = f" on each of {world_size()} ranks" if world_size() > 1 else ""
    micro_batches = f"{trainer.micros} micro-batches of {trainer.micro}"
    return {
        "student": {"name": built.spec.name, "parameters": sum(each.numel() for each in student.parameters())},
        "teacher": (config.teacher or (settings.teacher or {}).get("spec")) if trainer.has_teacher else None,
        "device": str(trainer.student.device),
        "parallel": {"ranks": world_size(), **built.plan.table(), "GB sent a step": _sent(trainer, built.plan)},
        "mode": trainer.student.quantized or trainer.student.mode,
        **({"quantised": list(built.quantised)} if built.quantised else {}),
        "compiled": trainer.student.compile_objective,
        "steps": trainer.total,
        "batch": f"{config.batch_size} x {trainer.seq_len} tokens, {micro_batches}{each}",
        "sequences": {"train": len(trainer.train_source), "validation": len(trainer.validation_source)},
        "epochs": round(trainer.total * config.batch_size / len(trainer.train_source), 3),
        "tokens": trainer.total * config.batch_size * trainer.seq_len,
        "learning rate": _schedule(trainer),
        "validations": len(_validation_steps(trainer)),
        "checkpoints": saves(trainer),
    }


def _estimates(config: DistillConfig, trainer: Trainer) -> dict[str, Any]:
    first, second = steps(trainer, 2)
    validation = _validation_seconds(trainer)
    stall, saving = save(trainer)
    size = sum(
        file.stat().st_size for file in trainer.store.folder.rglob("*") if file.is_file() and not file.is_symlink()
    )
    times = {
        "first step": first.seconds,
        "steps": (trainer.total - 1) * second.seconds,
        "validations": len(_validation_steps(trainer)) * validation,
        "checkpoints": saves(trainer) * stall,
    }
    kept = checkpoints_kept(trainer)
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
        "peak_memory_mb": round(peak_memory_mb(trainer.student.device), 1),
        "memory of the device (MiB)": _device_memory(trainer.student.device),
        "checkpoint (MiB)": round(max(size, state_bytes(trainer)) / 2**20, 1),
        "disk for checkpoints (MiB)": round(kept * size / 2**20, 1),
        "disk free (MiB)": round(shutil.disk_usage(existing(config.out)).free / 2**20, 1),
    }


def _sent(trainer: Trainer, plan: Plan) -> float:
    """GB that a rank sends over a ring in a step, by formula."""
    world, student = world_size(), trainer.student.model
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
        micro_batches=trainer.micros,
        gathered=4 if head_dtype(trainer.student.mode) is None or trainer.student.quantized else 2,
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


def _schedule(trainer: Trainer) -> str:
    own = trainer.config.optimizer
    text = f"{own.lr:g}, {own.lr_schedule} after {min(own.warmup_steps, trainer.total)} steps of warm-up"
    if own.lr_schedule == "wsd":
        text += f", the last {decay_steps(trainer.total, own)} steps down to {own.min_lr:g} ({own.decay_shape})"
    elif own.lr_schedule == "cosine":
        text += f", down to {own.min_lr:g}"
    return text


def _validation_steps(trainer: Trainer) -> list[int]:
    every = trainer.config.monitor.eval_freq
    return sorted({*range(0, trainer.total + 1, every), trainer.total})


def _validation_seconds(trainer: Trainer) -> float:
    """Seconds of a whole validation, by those of one forward of each rank."""
    most = trainer.validation_batches
    forwards = math.ceil(min(math.ceil(len(trainer.validation_source) / trainer.micro), most) / world_size())
    started = time.perf_counter()
    found = validate(trainer.student.eval(), trainer.validation_source, micro=trainer.micro, batches=1)
    trainer.engine.reshard()
    if found is None:
        raise RunError("the validation was stopped")
    return forwards * (time.perf_counter() - started)


def _device_memory(device: torch.device) -> float | None:
    """MiB that a GPU has; None on a CPU, whose memory others use as well."""
    if device.type != "cuda":
        return None
    return round(torch.cuda.get_device_properties(device).total_memory / 2**20, 1)
