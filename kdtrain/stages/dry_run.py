"""`kdtrain distill --dry-run`: what a run would do, and what it would take, by two steps and a save of the real thing.

The estimate of time is the second step, which a compiler no longer slows down, times the steps, and the measured cost
of validations and checkpoints. It leaves out what another process takes of the machine. Memory is the peak of the two
steps, one validation forward and the save; a longer run adds to it what its log (`mem_delta=`) shows.
"""

import math
import shutil
import time
from dataclasses import replace
from typing import Any

import torch

from kdtrain.checkpoint.store import Store
from kdtrain.config import DistillConfig
from kdtrain.errors import RunError
from kdtrain.monitor.progress import log, setup_logging
from kdtrain.parallel import traffic
from kdtrain.parallel.plan import Plan
from kdtrain.parallel.world import is_main, peak_memory_mb, together, world_size
from kdtrain.parallel.wrap import layers_of
from kdtrain.precision.modes import head_dtype
from kdtrain.stages.assemble import Assembled
from kdtrain.stages.begin import start_from
from kdtrain.stages.common import show
from kdtrain.stages.rehearsal import (
    checkpoints_kept,
    existing,
    rehearsal,
    save,
    saves,
    state_bytes,
    steps,
)
from kdtrain.stages.run_folder import is_run, refuse_changes
from kdtrain.training.run import Run
from kdtrain.training.schedule import decay_steps
from kdtrain.training.state import read_saved
from kdtrain.training.validate import validate


def main(config: DistillConfig) -> int:
    """Print the plan of a run and its estimates; nothing stays.

    Raises:
        UsageError: the run cannot be.
        RunError: a step or the save failed, as the run would have.
    """
    setup_logging(quiet=not is_main())
    with rehearsal(config) as made:
        if config.checkpoint.load is not None:
            start_from(made.run, config.checkpoint.load)
        with together():
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
        return traffic.ddp([each.shape for each in student.parameters()]).sent(1, world) / 1e9
    layers = layers_of(student)
    inside = {id(each) for layer in layers for each in layer.parameters()}
    sharing = plan.shard_size or world
    found = traffic.fsdp(
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
