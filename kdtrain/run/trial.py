"""A run that is tried out and removed: `kdtrain distill --dry-run` and `--sanity`.

`trial_run` builds it in a hidden folder beside `--out`, on the disk of the run, and removes that folder at the end. It
does not change an earlier run in `--out`, of which it reads attention, rate and alpha alone.

`--dry-run` shows the plan of the run and its cost, estimated from two real steps and a real save. The estimate of time
is the number of steps times the second step, which includes no compilation, plus the measured cost of validations and
checkpoints; it assumes that each validation is the best so far. It does not foresee other processes on the machine. The
estimate of memory is the peak of the two steps, one validation forward and the save; the log of a longer run shows what
it adds (`mem_delta=`).

`--sanity` makes the checks that a careful researcher does by hand before a long run (`CHECKS`), each with a verdict.
`ok`: as expected. `look`: unexpected; docs/monitoring.md lists what it may mean. `-`: there is no expectation. The
limits are rules of thumb.
"""

import math
import shutil
import statistics
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from kdtrain.checkpoint import tiers
from kdtrain.checkpoint.store import Store
from kdtrain.config.commands import DistillConfig
from kdtrain.config.sections import OptimizerConfig
from kdtrain.errors import RunError, log
from kdtrain.models.head import SplitModel, layers_of
from kdtrain.models.loading import active_parameters
from kdtrain.monitor.facts import is_run
from kdtrain.monitor.progress import setup_logging
from kdtrain.monitor.rules import initial_loss
from kdtrain.objective.alpha import Alpha
from kdtrain.objective.batch import Batch
from kdtrain.parallel import parallelize
from kdtrain.parallel.agreement import same_ranks
from kdtrain.process import refuse_many_processes
from kdtrain.ranks import (
    is_main,
    on_main,
    peak_memory_mb,
    raise_on_all_ranks,
    reported,
    world_size,
)
from kdtrain.run.build import build
from kdtrain.run.folder import existing_parent, refuse_changes, trial_folder, write_config_to_copy
from kdtrain.run.planned import plan_ranks
from kdtrain.run.recipe import Recipe, resolve, run_device
from kdtrain.run.run import Run
from kdtrain.run.saved_student import start_of
from kdtrain.tables import Table
from kdtrain.training.optimizers import make_optimizer
from kdtrain.training.reporter import gradients_of
from kdtrain.training.schedule import decay_steps, warmup_steps
from kdtrain.training.signals import StopRequest
from kdtrain.training.state import load_saved, packed, read_saved
from kdtrain.training.step import Status
from kdtrain.training.trainer import Trainer
from kdtrain.training.validate import validate

SEQUENCES, STEPS = 16, 100
"""How many sequences `check_overfitting` trains on, and for how many steps at most."""


def timed_steps(trainer: Trainer, count: int) -> list[tuple[float, dict[str, float]]]:
    """Take the next steps of a run; return the seconds and the numbers of each.

    RunError: the loss or a gradient is non-finite.
    """
    taken = list[tuple[float, dict[str, float]]]()
    started = time.perf_counter()
    for batches in trainer.stepper.feed():
        stop = StopRequest()
        result = trainer.stepper.take(batches, stop)
        stop.raise_failed()
        if result.status is Status.OUT_OF_MEMORY:
            log.warning(result.message)
            return timed_steps(trainer, count)
        if result.status is Status.SKIPPED and result.tokens:
            if trainer.state.guards.scale.absorbs(math.isfinite(result.loss)):
                trainer.state.guards.scale.update(overflowed=True)
                continue
            found = f"loss {result.loss} with gradient norm {result.grad_norm}"
            advice = "look at the data (kdtrain verify) or lower --lr"
            raise reported(RunError(f"step {len(taken) + 1}: {found}; {advice}"))
        taken.append((time.perf_counter() - started, result.metrics))
        if len(taken) == count:
            break
        started = time.perf_counter()
    return taken


@contextmanager
def trial_run(config: DistillConfig) -> Iterator[Run]:
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
            yield run
        finally:
            run.trainer.saver.close()
            run.trainer.writers.close()


def main(config: DistillConfig) -> int:
    """Print the plan of a run and its estimates, or with `--sanity` the checks, and leave nothing on disk.

    UsageError: the run is impossible. RunError: a step or the save fails, as it would in the run.
    """
    setup_logging(quiet=not is_main())
    if config.sanity:
        refuse_many_processes()
        return check(config)
    if config.world_size is not None:
        refuse_many_processes()
        with run_device(config) as device, ExitStack() as held:
            table = {"run": str(config.out), **plan_ranks(config, device, held)}
        config.show(f"distill {config.out}, {config.world_size} ranks, planned from shapes", table)
        return 0
    with trial_run(config) as run:
        if (path := run.recipe.loads) is not None:
            run.load(path)
        with raise_on_all_ranks():
            begins = _begins(config, run)
        log.info("built the run; two steps, a validation forward and a save follow")
        table = {"run": str(config.out), "begins": begins, **_plan(run), **_estimates(run, config.out)}
        table |= run.recipe.data.cost(len(run.trainer.validation_source))
        if config.write_config is not None:
            on_main(lambda: write_config_to_copy(config))
            table["written"] = f"{config.write_config}, for distill --config"
    config.show(f"distill {config.out}, dry run", table)
    return 0


def _begins(config: DistillConfig, run: Run) -> str:
    """Describe where the run would start, given the present contents of its folder."""
    if config.checkpoint.resume == "never" or not is_run(config.out):
        return "from the beginning" if config.checkpoint.load is None else f"with {config.checkpoint.load}"
    path = start_of(Store(config.out / "checkpoints"), config.checkpoint.resume, log.warning)
    if path is None:
        return "from the beginning"
    if not run.recipe.data.apart:
        saved = read_saved(path)
        refuse_changes(saved["options"], run.recipe.config, config.out, path.name, but=run.same(saved))
    return f"at {path.name}"


def _plan(run: Run) -> dict[str, Any]:
    trainer, recipe, config, student = run.trainer, run.recipe, run.recipe.config, run.trainer.student
    each = f" on each of {world_size()} ranks" if world_size() > 1 else ""
    sequences = len(trainer.stepper.source)
    seq_len = recipe.facts.seq_len
    sent = gigabytes_sent(student.model, recipe, trainer.stepper.micros)
    total = run.parameters
    active = active_parameters(student.model)
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
        "batch": f"{config.batch_size} x {seq_len} tokens, {run.micro_batches}{each}",
        "sequences": {"train": sequences, "validation": len(trainer.validation_source)},
        **({"caches": recipe.members} if recipe.members else {}),
        "epochs": round(trainer.total * config.batch_size / sequences, 3),
        "tokens": trainer.total * config.batch_size * seq_len,
        "learning rate": _schedule(trainer.total, config.optimizer, recipe.lr_from),
    }


def _estimates(run: Run, out: Path) -> dict[str, Any]:
    trainer, device, config = run.trainer, run.trainer.student.device, run.recipe.config
    state = trainer.state
    keep = config.checkpoint
    adaptive = config.quantization
    (first, _), (second, numbers) = taken = timed_steps(trainer, 2)
    validation = _validation_seconds(trainer)
    step = state.progress.step
    started = time.perf_counter()
    stated = {**run.identity, **state.numbers()}
    tensors = state.own_tensors()
    stall = trainer.saver.save([tiers.name_of("rolling", step)], step, tensors, stated, kept=packed(state.snapshots))
    trainer.saver.wait()
    saving = time.perf_counter() - started
    files = (file for file in trainer.store.folder.rglob("*") if file.is_file() and not file.is_symlink())
    in_memory = sum(tensor.numel() * tensor.element_size() for tensor in state.tensors().values())
    size = max(sum(file.stat().st_size for file in files), in_memory)
    # the most checkpoints that there can be, if each validation is better than those before
    total = trainer.total
    count = len(trainer.stepper.source)
    batch = config.batch_size
    validations = {*range(0, total + 1, trainer.eval_freq), total}
    rolling = {*range(0, total, keep.checkpoint_freq), *validations}
    epochs = {each for each in range(1, total + 1) if each * batch // count > (each - 1) * batch // count}
    saves = len(epochs | rolling)
    kept = min(keep.keep_rolling, len(rolling)) + min(keep.keep_epochs, len(epochs))
    kept += keep.keep_special + 2  # the best one, and the one in writing
    if state.adaptive is not None:
        kept += adaptive.quant_recovery_buffer
        saves += total // adaptive.quant_window_size
        saves += total // adaptive.quant_checkpoint_interval if adaptive.quant_snapshot == "disk" else 0
    times = {
        "first step": first,
        "steps": (total - 1) * second,
        "validations": len(validations) * validation,
        "checkpoints": saves * stall,
    }
    # on a CPU None: other processes use the same memory
    memory = torch.cuda.get_device_properties(device).total_memory if device.type == "cuda" else None
    return {
        "validations": len(validations),
        "checkpoints": saves,
        "loss of the two steps": [round(each["loss"], 4) for _, each in taken],
        "seconds": {
            "first step": round(first, 3),
            "a step": round(second, 3),
            "a validation": round(validation, 3),
            "a checkpoint": round(saving, 3),
            "training paused for it": round(stall, 4),
        },
        "tokens_per_second": round(numbers["tokens"] / second, 1),
        "estimated_hours": round(sum(times.values()) / 3600, 4),
        "shares of the time": {name: round(seconds / sum(times.values()), 4) for name, seconds in times.items()},
        "peak_memory_mb": round(peak_memory_mb(device), 1),
        "memory of the device (MiB)": None if memory is None else round(memory / 2**20, 1),
        "checkpoint (MiB)": round(size / 2**20, 1),
        "disk for checkpoints (MiB)": round(kept * size / 2**20, 1),
        "disk free (MiB)": round(shutil.disk_usage(existing_parent(out)).free / 2**20, 1),
    }


def gigabytes_sent(student: SplitModel, recipe: Recipe, micro_batches: int) -> float:
    """GB that a rank sends over rings in a step, by the formulas of `parallel.parallelize` and `parallel.tensor`."""
    layout, plan, config, world = recipe.layout, recipe.plan, recipe.config, recipe.layout.data_size
    itemsize = 4 if recipe.formats.gathered is None else 2
    among = 0.0
    if layout.tensor_size > 1:
        from kdtrain.parallel import tensor

        seq_len = recipe.facts.seq_len
        exchanged = tensor.traffic(
            student,
            recipe.micro * seq_len,
            micro_batches=micro_batches,
            sequence=config.parallel.cuts_rows(seq_len, config.objective),
            itemsize=itemsize,
            recomputes=config.activation_checkpointing,
        )
        among = sum(each.sent(ranks, ranks) for each, ranks in exchanged)
    if plan.student != "fsdp":
        parts = [parallelize.part_shape(each) for each in student.parameters() if each.requires_grad]
        return (among + parallelize.ddp(parts).sent(1, world)) / 1e9
    layers = layers_of(student)
    inside = {id(each) for layer in layers for each in layer.parameters()}
    sharing = plan.shard_size or world
    traffic = parallelize.fsdp(
        [[parallelize.part_shape(each) for each in layer.parameters()] for layer in layers],
        [parallelize.part_shape(each) for each in student.parameters() if id(each) not in inside],
        sharing=sharing,
        replicas=world // sharing,
        micro_batches=micro_batches,
        gathered=itemsize,
        accumulate=plan.accumulate,
        frozen=[parallelize.part_shape(each) for each in student.parameters() if not each.requires_grad],
    )
    return (among + traffic.sent(sharing, world // sharing)) / 1e9


def _schedule(total: int, options: OptimizerConfig, auto: str | None) -> str:
    rate = f"{options.lr:g}" + ("" if auto is None else f" (auto: {auto})")
    text = f"{rate}, {options.lr_schedule} after {warmup_steps(total, options)} steps of warm-up"
    if options.lr_schedule == "wsd":
        last = decay_steps(total, options)
        text += f", the last {last} steps down to {options.min_lr:g} ({options.decay_shape})"
    elif options.lr_schedule == "cosine":
        text += f", down to {options.min_lr:g}"
    return text


def _validation_seconds(trainer: Trainer) -> float:
    """Estimate the seconds of a whole validation from one forward on each rank."""
    student = trainer.student.eval()
    source = trainer.validation_source
    micro = trainer.stepper.micro
    sizes = [len(each.place) for each in source.facts.members.values()] or [len(source)]
    batches = (min(math.ceil(size / micro), trainer.validation_batches) for size in sizes)
    forwards = sum(math.ceil(each / trainer.stepper.layout.data_size) for each in batches)
    started = time.perf_counter()
    validate(student, source, micro=micro, batches=1, layout=trainer.stepper.layout)
    parallelize.reshard(student.model)
    return forwards * (time.perf_counter() - started)


def check(config: DistillConfig) -> int:
    """Print what each of `CHECKS` finds."""
    if not config.cache:
        # these checks need little text, and packing all of it may take long
        most = max(4 * config.batch_size, 4 * SEQUENCES)
        few = min(config.data.num_sequences or most, most)
        config = replace(config, data=replace(config.data, num_sequences=few))
    found: list[dict[str, Any]] = []
    with trial_run(config) as run:
        for number, (name, test) in enumerate(CHECKS.items(), 1):
            log.info("check %d of %d: %s", number, len(CHECKS), (test.__doc__ or "").rstrip("."))
            sound, text, wanted, values = test(run)
            verdict = "-"
            if sound is not None:
                verdict = "ok" if sound else "look"
            found.append({"check": name, "verdict": verdict, "found": text, "wanted": wanted, "values": values})
    shown = ("check", "verdict", "found", "wanted")
    table = Table(shown, [[each[name] for name in shown] for each in found], left=shown)
    record = {"run": str(config.out), "checks": found}
    config.show([f"distill {config.out}, sanity", "", table], record)
    return 0


Verdict = tuple[bool | None, str, str, dict[str, Any]]
"""Whether what a check found is sound (None: there is no expectation), what it found, what is wanted, the numbers."""


def check_initial_loss(run: Run) -> Verdict:
    """Measure the loss before the first step."""
    trainer, init = run.trainer, run.recipe.student.init
    batches = min(4, run.recipe.config.monitor.eval_batches)
    student = trainer.student.eval()
    stepper = trainer.stepper
    metrics = validate(student, trainer.validation_source, micro=stepper.micro, batches=batches, layout=stepper.layout)
    loss = math.nan if metrics is None else metrics.mean("cross_entropy")
    assert loss is not None
    sound, text = initial_loss(loss, trainer.student.vocab_size, init)
    wanted = {"scratch": "ln V, within a tenth", "pretrained": "below ln V"}.get(init, "finite")
    values = {"loss": loss, "ln_vocabulary": math.log(trainer.student.vocab_size)}
    return sound, text.removeprefix("initial loss "), wanted, values


def check_gradients(run: Run) -> Verdict:
    """Look at the gradient of every parameter."""
    student, stepper = run.trainer.student, run.trainer.stepper
    student.train()
    with student.eager():
        student(stepper.source.read(stepper.sequences(0)[: stepper.micro]), stepper.full_tokens).loss.backward()
    found = gradients_of(student.model)
    student.zero_grad(set_to_none=True)
    sound = len(found.pop("sound"))
    total = sound + sum(map(len, found.values()))
    named = [f"{kind}: {_first(names)}" for kind, names in found.items() if names]
    text = "; ".join([f"{sound} of {total} parameters sound", *named])
    values = {"sound": sound, **{kind.replace("-", "_"): names for kind, names in found.items()}}
    return sound == total, text, "all finite and not zero", values


def check_loader(run: Run) -> Verdict:
    """Compare the time of reading with that of training."""
    first, *later = (seconds for seconds, _ in timed_steps(run.trainer, 3))
    step = min(later)
    hidden = run.trainer.stepper.source.overlaps
    reading = statistics.median(_reading_seconds(run.trainer, number) for number in range(4, 8))
    how = "read during a step" if hidden else "computed by the teacher before each step"
    text = f"{1000 * reading:.1f} ms to read the data of a step of {1000 * step:.1f} ms ({how})"
    values = {"loader_seconds": reading, "step_seconds": step, "first_step_seconds": first}
    return reading < step if hidden else None, text, "less than a step" if hidden else "", values


def _reading_seconds(trainer: Trainer, step: int) -> float:
    stepper = trainer.stepper
    started = time.perf_counter()
    for each in stepper.sequences(step * trainer.config.batch_size).reshape(-1, stepper.micro):
        stepper.source.read(each)
    return time.perf_counter() - started


def check_resume(run: Run) -> Verdict:
    """Take a step, and the same step after a save and a resume."""
    trainer = run.trainer
    name = tiers.name_of("rolling", run.trainer.state.progress.step)
    trainer.checkpoints.save(name)
    trainer.saver.wait()

    def state_after_a_step() -> dict[str, torch.Tensor]:
        timed_steps(trainer, 1)
        return {name: each.detach().to("cpu", copy=True) for name, each in trainer.state.own_tensors().items()}

    first = state_after_a_step()
    saved = load_saved(trainer.store.path(name), trainer.state.like)
    trainer.state.load(saved.tensors, saved.state)
    second = state_after_a_step()
    differ = [each for each in first if not torch.equal(first[each], second[each])]
    exact = trainer.student.device.type == "cpu" or trainer.config.precision.deterministic
    text = f"{len(differ)} of {len(first)} tensors differ ({_first(differ)})"
    text = text if differ else f"{len(first)} tensors equal to the last bit"
    wanted = "equal bits" if exact else "nothing: the device repeats its bits only with --deterministic"
    return not differ if exact else None, text, wanted, {"tensors": len(first), "differ": differ}


def check_overfitting(run: Run) -> Verdict:
    """Sixteen sequences memorized."""
    # by cross-entropy alone, eagerly and without dropout; the rate rises over ten steps and stays
    config, stepper, student = run.recipe.config, run.trainer.stepper, run.trainer.student
    numbers = stepper.order.batch(0, min(SEQUENCES, len(stepper.source)))
    batches = [stepper.source.read(numbers[at : at + stepper.micro]) for at in range(0, len(numbers), stepper.micro)]
    floor = entropy_floor(batches, student.document_mask)
    tokens = float(sum(each.loss_mask.sum() for each in batches))
    least = 1e-3 if run.recipe.student.init == "scratch" else 0.0
    options = replace(config.optimizer, lr=max(config.optimizer.peak_lr, least))
    run.trainer.state.optimizer.state.clear()
    optimizer = make_optimizer(student, options, config.objective.temperature_lr)
    losses = list[float]()
    peaks = [group["lr"] for group in optimizer.param_groups]
    student.eval()
    student.loss.alpha = Alpha(0.0)
    student.hidden_loss = None
    while len(losses) <= STEPS and not (losses and losses[-1] - floor < 0.05 * (losses[0] - floor)):
        for group, peak in zip(optimizer.param_groups, peaks, strict=True):
            group["lr"] = peak * min(1.0, (len(losses) + 1) / 10)
        optimizer.zero_grad(set_to_none=True)
        losses.append(0.0)
        with student.eager():
            for batch in batches:
                loss = student(batch, tokens).loss
                loss.backward()
                losses[-1] += float(loss.detach())
        nn.utils.clip_grad_norm_(student.model.parameters(), options.clip or math.inf)
        optimizer.guarded_step(torch.zeros((), device=student.device))
    share = (losses[0] - min(losses)) / max(losses[0] - floor, 1e-9)
    text = (
        f"{len(numbers)} sequences from {losses[0]:.3f} to {min(losses):.3f} nats in {len(losses) - 1} steps at "
        f"lr {options.peak_lr:g}; their floor is {floor:.3f}"
    )
    values = {"first": losses[0], "lowest": min(losses), "floor": floor, "steps": len(losses) - 1, "share": share}
    return share > 0.5, text, "over half of the way to the floor", values


CHECKS: dict[str, Callable[[Run], Verdict]] = {
    "initial loss": check_initial_loss,
    "gradients": check_gradients,
    "loader": check_loader,
    "resume": check_resume,
    "overfitting": check_overfitting,
}


def entropy_floor(batches: Sequence[Batch], document_mask: bool) -> float:
    """Return the lowest mean cross-entropy, nats per token, that any model can have on these sequences.

    It is the entropy of the next token given all tokens before it: a model that has memorized the sequences errs only
    where different tokens follow the same prefix of a sequence (or of a document, with a document mask).
    """
    followers: dict[int, Counter[int]] = defaultdict(Counter)
    places: dict[tuple[int, int], int] = {}  # a tree of prefixes: (place of the prefix, token) -> place
    for batch in batches:
        columns = batch.tokens.tolist(), batch.loss_mask.tolist(), batch.segments.tolist()
        for row_T, mask_T, segments_T in zip(*columns, strict=True):
            place = 0
            for at, counts in enumerate(mask_T):
                if document_mask and at and segments_T[at] != segments_T[at - 1]:
                    place = 0
                place = places.setdefault((place, row_T[at]), len(places) + 1)
                if counts:
                    followers[place][row_T[at + 1]] += 1
    nats = 0.0
    tokens = 0
    for follower in followers.values():
        total = sum(follower.values())
        nats -= sum(count * math.log(count / total) for count in follower.values())
        tokens += total
    return nats / max(tokens, 1)


def _first(names: list[str]) -> str:
    return f"{', '.join(names[:3])}{', ...' if len(names) > 3 else ''}"
