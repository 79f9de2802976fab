"""`kdtrain distill --dry-run`: the plan of a run and its cost, estimated from two real steps and a real save.

The estimate of time is the number of steps times the second step, which includes no compilation, plus the measured cost
of validations and checkpoints. It does not foresee other processes on the machine. The estimate of memory is the peak
of the two steps, one validation forward and the save; the log of a longer run shows what it adds (`mem_delta=`).

`trial_run` builds the run for `--dry-run` and `--sanity` in a hidden folder beside `--out`, on the disk of the run, and
removes that folder at the end. It neither reads nor changes an earlier run in `--out`.
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
from kdtrain.commands.build_run import BuiltRun, build_run, run_device
from kdtrain.commands.common import show
from kdtrain.commands.resume import start_from
from kdtrain.commands.run_folder import is_run, refuse_changes, refuse_foreign_files
from kdtrain.config import DistillConfig
from kdtrain.errors import RunError, UsageError, making
from kdtrain.files import hidden_folder
from kdtrain.monitor.progress import log, setup_logging
from kdtrain.parallel import parallelize
from kdtrain.parallel.memory_plan import Plan
from kdtrain.precision.backends import formats_of
from kdtrain.precision.linear import layers_of
from kdtrain.ranks import (
    all_gather_object,
    is_main,
    on_main,
    peak_memory_mb,
    raise_on_all_ranks,
    reported,
    world_size,
)
from kdtrain.training.schedule import decay_steps, warmup_steps
from kdtrain.training.signals import StopRequest
from kdtrain.training.state import packed, read_saved
from kdtrain.training.trainer import Trainer, validate


@contextmanager
def trial_run(config: DistillConfig) -> Iterator[BuiltRun]:
    """Build and open the run of `config`, untrained; all its files are removed when the block ends.

    Raises:
        UsageError: data, cache, student or options do not fit together, or `--out` holds something that is not a run.
        RunError: the folder of `--out` cannot be written.
    """
    silent = replace(config.monitor, log_to="none", on_event=None)
    with run_device(config) as device, same_ranks(config, device), _folder(config.out) as folder:
        built = build_run(replace(config, out=folder, monitor=silent), resuming=False)
        built.open()
        try:
            yield built
        finally:
            built.trainer.saver.close()
            built.trainer.writers.close()


def existing(path: Path) -> Path:
    """Return `path` or its nearest existing parent, which is on the disk where `path` will be."""
    path = path.resolve()
    while not path.exists():
        path = path.parent
    return path


@contextmanager
def _folder(out: Path) -> Iterator[Path]:
    """Make a hidden folder beside `out`, the same for all ranks, and remove it with its contents."""
    with ExitStack() as stack:

        def make() -> str:
            with making(out):
                if out.exists() and not out.is_dir():
                    raise UsageError(f"--out {out} is a file; name a folder")
                if not is_run(out):
                    refuse_foreign_files(out)
                return str(stack.enter_context(hidden_folder(existing(out.resolve().parent) / f"{out.name}.trial")))

        yield Path(on_main(make))
        all_gather_object(None)  # a barrier: every rank has finished reading


@dataclass(frozen=True)
class TimedStep:
    """The time and the numbers of a step."""

    seconds: float
    numbers: dict[str, float]


def timed_steps(trainer: Trainer, count: int) -> list[TimedStep]:
    """Take the next steps of a run.

    Raises:
        RunError: the loss or a gradient is non-finite.
    """
    taken: list[TimedStep] = []
    started = time.perf_counter()
    for batches in trainer.feed().steps():
        stop = StopRequest()
        numbers = trainer.step(batches, stop)
        stop.raise_failed()
        if numbers is None:  # there are no stop requests here: the micro-batch was halved
            return timed_steps(trainer, count)
        if numbers.pop("skipped"):
            if trainer.guards.scale.absorbs(math.isfinite(numbers["loss"])):
                trainer.guards.scale.update(overflowed=True)
                continue
            text = (
                f"step {len(taken) + 1}: loss {numbers['loss']} with gradient norm {numbers['grad_norm']}; "
                "look at the data (kdtrain verify) or lower --lr"
            )
            raise reported(RunError(text))
        trainer.count(numbers)
        taken.append(TimedStep(time.perf_counter() - started, numbers))
        if len(taken) == count:
            break
        started = time.perf_counter()
    return taken


def state_bytes(trainer: Trainer) -> int:
    """Bytes of the tensors of a checkpoint after the first step: mostly weights and two moments."""
    return sum(tensor.numel() * tensor.element_size() for tensor in trainer.state.tensors().values())


def checkpoints_kept(trainer: Trainer) -> int:
    """Largest number of checkpoints on disk: all tiers full, the best one, and the one in writing."""
    keep = trainer.config.checkpoint
    epochs = trainer.total * trainer.config.batch_size // len(trainer.train_source)
    rolling = min(keep.keep_rolling, len(checkpoint_steps(trainer)))
    windows = trainer.config.quantization.quant_recovery_buffer if trainer.adaptive is not None else 0
    return rolling + min(keep.keep_epochs, epochs) + keep.keep_special + windows + 2


def checkpoint_steps(trainer: Trainer) -> Sequence[int]:
    """The steps with a rolling checkpoint."""
    every = trainer.config.checkpoint.checkpoint_freq
    return sorted({*range(every, trainer.total + 1, every), trainer.total})


def saves(trainer: Trainer) -> int:
    """How many checkpoints the run writes: rolling ones, epochs', and those of the windows of adaptive quantisation."""
    own, windows = trainer.config.quantization, 0
    size, sequences = trainer.config.batch_size, len(trainer.train_source)
    epochs = {step for step in range(1, trainer.total + 1) if step * size // sequences > (step - 1) * size // sequences}
    if trainer.adaptive is not None:
        windows = trainer.total // own.quant_window_size
        windows += trainer.total // own.quant_checkpoint_interval if own.quant_snapshot == "disk" else 0
    return len(epochs.union(checkpoint_steps(trainer))) + windows


def main(config: DistillConfig) -> int:
    """Print the plan of a run and its estimates, and leave nothing on disk.

    Raises:
        UsageError: the run is impossible.
        RunError: a step or the save fails, as it would in the run.
    """
    setup_logging(quiet=not is_main())
    with trial_run(config) as built:
        if config.checkpoint.load is not None:
            start_from(built.trainer, config.checkpoint.load)
        with raise_on_all_ranks():
            start = _start(config, built.trainer.config)
        log.info("built the run; two steps, a validation forward and a save follow")
        table = {"run": str(config.out), "begins": start, **_plan(config, built), **_estimates(config, built.trainer)}
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
    first, second = timed_steps(trainer, 2)
    validation = _validation_seconds(trainer)
    step, started = trainer.state.progress.step, time.perf_counter()
    numbers = {**trainer.identity, **trainer.state.numbers()}
    tensors, snapshots = trainer.state.own_tensors(), packed(trainer.state.snapshots)
    stall = trainer.saver.save([tiers.rolling_name(step)], step, tensors, numbers, kept=snapshots)
    trainer.saver.wait()
    saving = time.perf_counter() - started
    size = sum(
        file.stat().st_size for file in trainer.store.folder.rglob("*") if file.is_file() and not file.is_symlink()
    )
    times = {
        "first step": first.seconds,
        "steps": (trainer.total - 1) * second.seconds,
        "validations": len(_validation_steps(trainer)) * validation,
        "checkpoints": saves(trainer) * stall,
    }
    kept, device = checkpoints_kept(trainer), trainer.student.device
    # on a CPU None: other processes use the same memory
    memory = torch.cuda.get_device_properties(device).total_memory if device.type == "cuda" else None
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
        "peak_memory_mb": round(peak_memory_mb(device), 1),
        "memory of the device (MiB)": None if memory is None else round(memory / 2**20, 1),
        "checkpoint (MiB)": round(max(size, state_bytes(trainer)) / 2**20, 1),
        "disk for checkpoints (MiB)": round(kept * size / 2**20, 1),
        "disk free (MiB)": round(shutil.disk_usage(existing(config.out)).free / 2**20, 1),
    }


def _sent(trainer: Trainer, plan: Plan) -> float:
    """GB that a rank sends over a ring in a step, by its formula."""
    world, student = world_size(), trainer.student.model
    if plan.student != "fsdp":
        return parallelize.ddp([each.shape for each in student.parameters()]).sent(1, world) / 1e9
    layers = layers_of(student)
    inside = {id(each) for layer in layers for each in layer.parameters()}
    sharing = plan.shard_size or world
    formats = formats_of(trainer.config.precision, trainer.config.quantization, trainer.student.device)
    traffic = parallelize.fsdp(
        [[each.shape for each in layer.parameters()] for layer in layers],
        [each.shape for each in student.parameters() if id(each) not in inside],
        sharing=sharing,
        replicas=world // sharing,
        micro_batches=trainer.micros,
        gathered=4 if formats.gathered is None else 2,
        accumulate=plan.accumulate,
    )
    return traffic.sent(sharing, world // sharing) / 1e9


def _start(config: DistillConfig, complete: DistillConfig) -> str:
    """Where the run would start, given the present contents of its folder.

    complete: `config` with the values that depend on cache and machine, as the run saves it.
    """
    if config.checkpoint.resume == "never" or not is_run(config.out):
        return "from the beginning" if config.checkpoint.load is None else f"with {config.checkpoint.load}"
    store = Store(config.out / "checkpoints")
    if config.checkpoint.resume != "auto":
        path = store.choose(config.checkpoint.resume)
    else:
        name, damaged = store.newest_valid()
        for text in damaged:
            log.warning(text)
        if name is None:
            return "from the beginning"
        path = store.path(name)
    refuse_changes(read_saved(path)["options"], replace(complete, out=config.out), path.name)
    return f"at {path.name}"


def _schedule(trainer: Trainer) -> str:
    own = trainer.config.optimizer
    text = f"{own.lr:g}, {own.lr_schedule} after {warmup_steps(trainer.total, own)} steps of warm-up"
    if own.lr_schedule == "wsd":
        text += f", the last {decay_steps(trainer.total, own)} steps down to {own.min_lr:g} ({own.decay_shape})"
    elif own.lr_schedule == "cosine":
        text += f", down to {own.min_lr:g}"
    return text


def _validation_steps(trainer: Trainer) -> list[int]:
    return sorted({*range(0, trainer.total + 1, trainer.eval_freq), trainer.total})


def _validation_seconds(trainer: Trainer) -> float:
    """Seconds of a whole validation, extrapolated from one forward on each rank."""
    most = trainer.validation_batches
    forwards = math.ceil(min(math.ceil(len(trainer.validation_source) / trainer.micro), most) / world_size())
    started = time.perf_counter()
    validate(trainer.student.eval(), trainer.validation_source, micro=trainer.micro, batches=1)
    trainer.engine.reshard()
    return forwards * (time.perf_counter() - started)
