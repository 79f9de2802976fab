"""A run that is tried out and removed: `kdtrain distill --dry-run`, and what `--sanity` (`run.sanity`) needs of it.

`trial_run` builds it in a hidden folder beside `--out`, on the disk of the run, and removes that folder at the end. It
does not change an earlier run in `--out`, of which it reads only attention and rate.

`--dry-run` shows the plan of the run and its cost, estimated from two real steps and a real save. The estimate of time
is the number of steps times the second step, which includes no compilation, plus the measured cost of validations and
checkpoints; it assumes that each validation is the best so far. It does not foresee other processes on the machine. The
estimate of memory is the peak of the two steps, one validation forward and the save; the log of a longer run shows what
it adds (`mem_delta=`).
"""

import math
import shutil
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn

from kdtrain.checkpoint import tiers
from kdtrain.checkpoint.store import Store
from kdtrain.config import DistillConfig, OptimizerConfig
from kdtrain.errors import RunError, making
from kdtrain.files import hidden_folder
from kdtrain.models.head import layers_of
from kdtrain.models.loading import active_parameters
from kdtrain.monitor.progress import log, setup_logging
from kdtrain.parallel import parallelize
from kdtrain.ranks import all_gather_object, is_main, on_main, peak_memory_mb, raise_on_all_ranks, reported, world_size
from kdtrain.run.agreement import same_ranks
from kdtrain.run.build import build
from kdtrain.run.folder import check_out, is_run
from kdtrain.run.recipe import Recipe, resolve, run_device
from kdtrain.run.run import Run
from kdtrain.tables import show
from kdtrain.training.schedule import decay_steps, warmup_steps
from kdtrain.training.signals import StopRequest
from kdtrain.training.state import packed, read_saved
from kdtrain.training.step import Status
from kdtrain.training.validate import validate


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


def main(config: DistillConfig) -> int:
    """Print the plan of a run and its estimates, and leave nothing on disk.

    UsageError: the run is impossible. RunError: a step or the save fails, as it would in the run.
    """
    setup_logging(quiet=not is_main())
    with trial_run(config) as trial:
        if (path := trial.recipe.loads) is not None:
            trial.run.load(path)
        with raise_on_all_ranks():
            begins = _begins(config, trial.run)
        log.info("built the run; two steps, a validation forward and a save follow")
        table = {"run": str(config.out), "begins": begins, **_plan(trial.run), **_estimates(trial), **_capture(trial)}
    show(f"distill {config.out}, dry run", table, config.json)
    return 0


def _begins(config: DistillConfig, run: Run) -> str:
    """Where the run would start, given the present contents of its folder."""
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
    if run.recipe.live is None:  # whose data are not those in the folder
        run.refuse_changes(read_saved(path), config.out, path.name)
    return f"at {path.name}"


def _plan(run: Run) -> dict[str, Any]:
    trainer, recipe, config, student = run.trainer, run.recipe, run.recipe.config, run.trainer.student
    each = f" on each of {world_size()} ranks" if world_size() > 1 else ""
    several = "es" if trainer.stepper.micros > 1 else ""
    micro_batches = f"{trainer.stepper.micros} micro-batch{several} of {trainer.stepper.micro}"
    sequences, seq_len = len(trainer.stepper.source), recipe.facts.seq_len
    sent = gigabytes_sent(student.model, recipe, trainer.stepper.micros)
    total, active = run.parameters, active_parameters(student.model)
    mixture = {} if active == total else {"active for a token": active}
    return {
        "student": {"name": recipe.student.name, "parameters": total, **run.trained, **mixture},
        "teacher": recipe.teacher_name,
        "device": str(student.device),
        "parallel": {"ranks": world_size(), **recipe.plan.table(), "GB sent a step": sent},
        "mode": run.mode,
        **({"quantised": list(run.quantised)} if run.quantised else {}),
        "compiled": student.compile_objective,
        "steps": trainer.total,
        "batch": f"{config.batch_size} x {seq_len} tokens, {micro_batches}{each}",
        "sequences": {"train": sequences, "validation": len(trainer.validation_source)},
        **({"caches": recipe.members} if recipe.members else {}),
        "epochs": round(trainer.total * config.batch_size / sequences, 3),
        "tokens": trainer.total * config.batch_size * seq_len,
        "learning rate": _schedule(trainer.total, config.optimizer, recipe.lr_from),
    }


def _estimates(trial: Trial) -> dict[str, Any]:
    trainer, device, config = trial.trainer, trial.trainer.student.device, trial.recipe.config
    state, keep, adaptive = trainer.state, config.checkpoint, config.quantization
    first, second = trial.timed_steps(2)
    validation = _validation_seconds(trial)
    step, started = state.progress.step, time.perf_counter()
    numbers, tensors, snapshots = (
        {**trial.run.identity, **state.numbers()},
        state.own_tensors(),
        packed(state.snapshots),
    )
    stall = trainer.saver.save([tiers.name_of("rolling", step)], step, tensors, numbers, kept=snapshots)
    trainer.saver.wait()
    saving = time.perf_counter() - started
    files = (file for file in trainer.store.folder.rglob("*") if file.is_file() and not file.is_symlink())
    in_memory = sum(tensor.numel() * tensor.element_size() for tensor in state.tensors().values())
    size = max(sum(file.stat().st_size for file in files), in_memory)
    # the most checkpoints that there can be, if each validation is better than those before
    total, count, batch = trainer.total, len(trainer.stepper.source), config.batch_size
    validations = {*range(0, total + 1, trainer.eval_freq), total}
    rolling = {*range(0, total, keep.checkpoint_freq), *validations}
    epochs = {each for each in range(1, total + 1) if each * batch // count > (each - 1) * batch // count}
    saves, kept = len(epochs | rolling), min(keep.keep_rolling, len(rolling)) + min(keep.keep_epochs, len(epochs))
    kept += keep.keep_special + 2  # the best one, and the one in writing
    if state.adaptive is not None:
        kept += adaptive.quant_recovery_buffer
        saves += total // adaptive.quant_window_size
        saves += total // adaptive.quant_checkpoint_interval if adaptive.quant_snapshot == "disk" else 0
    times = {
        "first step": first.seconds,
        "steps": (total - 1) * second.seconds,
        "validations": len(validations) * validation,
        "checkpoints": saves * stall,
    }
    # on a CPU None: other processes use the same memory
    memory = torch.cuda.get_device_properties(device).total_memory if device.type == "cuda" else None
    return {
        "validations": len(validations),
        "checkpoints": saves,
        "loss of the two steps": [round(each.numbers["loss"], 4) for each in (first, second)],
        "seconds": {
            "first step": round(first.seconds, 3),
            "a step": round(second.seconds, 3),
            "a validation": round(validation, 3),
            "a checkpoint": round(saving, 3),
            "training paused for it": round(stall, 4),
        },
        "tokens_per_second": round(second.numbers["tokens"] / second.seconds, 1),
        "estimated_hours": round(sum(times.values()) / 3600, 4),
        "shares of the time": {name: round(seconds / sum(times.values()), 4) for name, seconds in times.items()},
        "peak_memory_mb": round(peak_memory_mb(device), 1),
        "memory of the device (MiB)": None if memory is None else round(memory / 2**20, 1),
        "checkpoint (MiB)": round(size / 2**20, 1),
        "disk for checkpoints (MiB)": round(kept * size / 2**20, 1),
        "disk free (MiB)": round(shutil.disk_usage(existing_parent(trial.out)).free / 2**20, 1),
    }


def _capture(trial: Trial) -> dict[str, Any]:
    """What the run requests from a server meanwhile, at the rate of the trial's first sequences."""
    if (live := trial.recipe.live) is None:
        return {}
    rate, sequences = live.rate, live.planned + len(trial.trainer.validation_source)
    hours = round(sequences / rate / 3600, 4) if rate else None
    speed = round(rate * trial.recipe.facts.seq_len, 1)
    found = {"sequences": sequences, "tokens_per_second": speed, "estimated_hours": hours}
    return {"server": {**found, "fingerprint of an earlier capture": "not compared"}}


def gigabytes_sent(student: nn.Module, recipe: Recipe, micro_batches: int) -> float:
    """GB that a rank sends over a ring in a step, by its formula (`parallel.parallelize`)."""
    world, plan = world_size(), recipe.plan
    if plan.student != "fsdp":
        return parallelize.ddp([each.shape for each in student.parameters() if each.requires_grad]).sent(1, world) / 1e9
    layers = layers_of(student)
    inside = {id(each) for layer in layers for each in layer.parameters()}
    sharing = plan.shard_size or world
    traffic = parallelize.fsdp(
        [[each.shape for each in layer.parameters()] for layer in layers],
        [each.shape for each in student.parameters() if id(each) not in inside],
        sharing=sharing,
        replicas=world // sharing,
        micro_batches=micro_batches,
        gathered=4 if recipe.formats.gathered is None else 2,
        accumulate=plan.accumulate,
        frozen=[each.shape for each in student.parameters() if not each.requires_grad],
    )
    return traffic.sent(sharing, world // sharing) / 1e9


def _schedule(total: int, options: OptimizerConfig, auto: str | None) -> str:
    rate = f"{options.lr:g}" + ("" if auto is None else f" (auto: {auto})")
    text = f"{rate}, {options.lr_schedule} after {warmup_steps(total, options)} steps of warm-up"
    if options.lr_schedule == "wsd":
        last = decay_steps(total, options)
        text += f", the last {last} steps down to {options.min_lr:g} ({options.decay_shape})"
    elif options.lr_schedule == "cosine":
        text += f", down to {options.min_lr:g}"
    return text


def _validation_seconds(trial: Trial) -> float:
    """Seconds of a whole validation, extrapolated from one forward on each rank."""
    trainer = trial.trainer
    student, source, micro = trainer.student.eval(), trainer.validation_source, trainer.stepper.micro
    sizes = [len(each.place) for each in source.facts.members.values()] or [len(source)]
    batches = (min(math.ceil(size / micro), trainer.validation_batches) for size in sizes)
    forwards = sum(math.ceil(each / trainer.stepper.layout.data_size) for each in batches)
    started = time.perf_counter()
    validate(student, source, micro=micro, batches=1)
    parallelize.reshard(student.model)
    return forwards * (time.perf_counter() - started)
