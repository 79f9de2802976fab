"""`kdtrain distill --sanity`: the checks a careful researcher does by hand before a long run, with a verdict each.

`ok`: as it should be. `look`: it is not, or it need not be; the note says what it may mean. `-`: nothing is to be
expected here, the number is told. The limits are rules of thumb; docs/monitoring.md says where each comes from.
"""

import math
import shutil
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from einops import rearrange
from rich.console import Console
from rich.table import Table

from kdtrain.cache.reader import CachedBatch
from kdtrain.config import DistillConfig
from kdtrain.data import order
from kdtrain.models.loading import model_digest
from kdtrain.models.spec import DTYPES, read_spec
from kdtrain.monitor.progress import log, setup_logging
from kdtrain.parallel.world import refuse_many_processes
from kdtrain.stages.assemble import Assembled
from kdtrain.stages.common import literal, show
from kdtrain.stages.rehearsal import checkpoints_kept, existing, rehearsal, state_bytes, steps
from kdtrain.training.health import gradients_of, initial_loss
from kdtrain.training.probes import correlation, dead_units, entropy_floor, graph_breaks, kd_at, overfit
from kdtrain.training.run import Run
from kdtrain.training.state import make_optimizer
from kdtrain.training.update import full_tokens
from kdtrain.training.validate import validate

SEQUENCES, STEPS = 16, 100
"""What is overfitted, and for how long at most."""
ALIGNED, RELATED = 0.9, 0.3
"""Correlation with the teacher of a student that is the teacher, and the least of another trained one."""
DEAD = 0.05
"""Share of units that may say the same at every token."""


@dataclass(frozen=True)
class Check:
    """One line of the table."""

    check: str
    verdict: str
    """ok, look, or - where nothing is to be expected."""
    found: str
    wanted: str
    values: dict[str, Any]
    """The numbers, for `--json`."""


def main(config: DistillConfig) -> int:
    """Print the table; nothing stays.

    Raises:
        UsageError: the run cannot be.
        RunError: a step failed, as the run's would have.
    """
    setup_logging()
    if config.cache is None:
        # these checks need little text, and packing all of it may take long
        most = max(4 * config.batch_size, 4 * SEQUENCES)
        few = min(config.data.num_sequences or most, most)
        config = replace(config, data=replace(config.data, num_sequences=few))
    found: list[Check] = []
    refuse_many_processes()
    with rehearsal(config) as made:
        for number, check in enumerate(CHECKS, 1):
            log.info("check %d of %d: %s", number, len(CHECKS), (check.__doc__ or "").splitlines()[0].rstrip("."))
            found.append(check(made, config))
    _show(config, found)
    return 0


def _initial_loss(made: Assembled, config: DistillConfig) -> Check:
    """The loss before the first step."""
    run = made.run
    run.step.eval()
    metrics = validate(
        run.validation_source,
        run.step.hidden_eager,
        run.step.student.head,
        vocab_size=run.step.vocab_size,
        micro=run.micro,
        batches=min(4, config.monitor.eval_batches),
    )
    loss = math.nan if metrics is None else metrics.mean("cross_entropy")
    assert loss is not None
    sound, text = initial_loss(loss, run.step.vocab_size, made.spec.init)
    wanted = {"scratch": "ln V, within a tenth", "pretrained": "below ln V"}.get(made.spec.init, "finite")
    values = {"loss": loss, "ln_vocabulary": math.log(run.step.vocab_size)}
    return Check("initial loss", _verdict(sound), text.removeprefix("initial loss "), wanted, values)


def _correlation(made: Assembled, config: DistillConfig) -> Check:
    """The logits of teacher and student on a batch."""
    found, wanted = correlation(made.run.step, _batch(made.run)), _expected_correlation(made, config)
    if found is None:
        return Check("teacher-student correlation", "-", "no teacher's likeliest entries to compare", "", {})
    text = "nothing: the student knows nothing yet" if wanted is None else f"above {wanted:g}"
    verdict = "-" if wanted is None else _verdict(found > wanted)
    return Check(
        "teacher-student correlation", verdict, f"{found:.3f}", text, {"correlation": found, "aligned": found > ALIGNED}
    )


def _expected_correlation(made: Assembled, config: DistillConfig) -> float | None:
    """What the correlation should be above: high for the teacher's own weights, low for others, None for fresh ones."""
    if made.spec.init != "pretrained":
        return None
    teacher = made.manifest.settings.teacher or {}
    digests = (teacher.get("weights_digest"), made.run.identity.get("teacher"))
    stated = teacher.get("dtype") if config.teacher is None else read_spec(config.teacher).dtype
    dtype = getattr(torch, stated) if stated in DTYPES else torch.float32
    # a teacher that is asked in fp32 has weights of its dtype in fp32
    casts = ((dtype,), (dtype, torch.float32))
    same = any(model_digest(made.run.state.student, *each) in digests for each in casts)
    return ALIGNED if same else RELATED


def _dead_units(made: Assembled, config: DistillConfig) -> Check:
    """Units that say the same at every token."""
    dead, units, layers = dead_units(made.run.step, _batch(made.run))
    share = dead / max(units, 1)
    where = f" ({', '.join(layers[:3])}{', ...' if len(layers) > 3 else ''})" if layers else ""
    return Check(
        "dead units",
        _verdict(share < DEAD),
        f"{dead:,} of {units:,}, {share:.2%}{where}",
        f"below {DEAD:.0%}",
        {"dead": dead, "units": units, "share": share, "layers": layers},
    )


def _distillation(made: Assembled, config: DistillConfig) -> Check:
    """The distillation term at two temperatures, and its slope."""
    run = made.run
    if not (run.step.has_teacher and config.objective.distils):
        return Check("distillation term and T²", "-", "plain cross-entropy", "", {})
    at = [kd_at(run.step, _batch(run, most=2), each) for each in _two_temperatures(run.config)]
    factors = [each.loss / (each.temperature**2 * each.kd) if each.kd else 1.0 for each in at]
    agree = all(abs(each.slope - 1) < 0.05 for each in at) and all(abs(factor - 1) < 1e-3 for factor in factors)
    terms = [f"{each.kd:.4f} at T = {each.temperature:g}, {each.loss:.4f} in the loss" for each in at]
    return Check(
        "distillation term and T²",
        _verdict(agree),
        f"{'; '.join(terms)}; slope / gradient {', '.join(f'{each.slope:.3f}' for each in at)}",
        "T² times as much in the loss, slope / gradient 1 within 5%",
        {"at": [asdict(each) for each in at], "factors_over_T2": factors},
    )


def _two_temperatures(config: DistillConfig) -> list[float]:
    """The run's T and one a factor of two away, where the cache is right at one."""
    objective = config.objective
    low, high = objective.temperature_min or math.inf, objective.temperature_max or 0.0
    own = objective.temperature
    others = [each for each in (2 * own, own / 2) if low <= each <= high]
    return [own, *others[:1]]


def _gradients(made: Assembled, config: DistillConfig) -> Check:
    """The gradient of every parameter."""
    run = made.run
    run.step.train()
    with run.step.eager():
        loss, _ = run.step(_batch(run), normalizer=full_tokens(run))
        loss.backward()
    found = gradients_of(run.step.student)
    run.step.zero_grad(set_to_none=True)
    wrong = {"without": found.missing, "zero": found.zero, "not finite": found.broken}
    named = [
        f"{kind}: {', '.join(names[:3])}{', ...' if len(names) > 3 else ''}" for kind, names in wrong.items() if names
    ]
    total = found.good + sum(map(len, wrong.values()))
    return Check(
        "gradients",
        _verdict(found.good == total),
        "; ".join([f"{found.good} of {total} parameters sound", *named]),
        "all finite and not zero",
        {"sound": found.good, **{kind.replace(" ", "_"): names for kind, names in wrong.items()}},
    )


def _graph_breaks(made: Assembled, config: DistillConfig) -> Check:
    """Where the compiled graph breaks."""
    found = graph_breaks(made.run.step, _batch(made.run))
    compiled = made.run.step.compile_objective
    verdict = _verdict(not found) if compiled else "-"
    text = f"{len(found)}: {'; '.join(found[:3])}" if found else "none"
    return Check("graph breaks", verdict, text if compiled else f"{text} (not compiled)", "none", {"breaks": found})


def _loader(made: Assembled, config: DistillConfig) -> Check:
    """Reading against training."""
    run = made.run
    taken = steps(run, 3)
    step = min(each.seconds for each in taken[1:])
    reading = statistics.median(_reading_seconds(run, number) for number in range(4, 8))
    hidden = run.train_source.overlaps
    how = "read while a step is trained" if hidden else "asked of the teacher, before each step"
    return Check(
        "loader",
        _verdict(reading < step) if hidden else "-",
        f"{1000 * reading:.1f} ms to read what {1000 * step:.1f} ms train ({how})",
        "less than a step" if hidden else "",
        {"loader_seconds": reading, "step_seconds": step, "first_step_seconds": taken[0].seconds},
    )


def _reading_seconds(run: Run, step: int) -> float:
    indices = run.sequences(step * run.config.batch_size)
    started = time.perf_counter()
    for each in rearrange(indices, "(a m) -> a m", m=run.micro):
        run.train_source.read(each)
    return time.perf_counter() - started


def _disk(made: Assembled, config: DistillConfig) -> Check:
    """Room for the checkpoints to come."""
    size, kept = state_bytes(made.run), checkpoints_kept(made.run)
    free = shutil.disk_usage(existing(config.out)).free
    needed = size * kept
    return Check(
        "disk",
        _verdict(needed < free),
        f"{kept} checkpoints of {size / 2**20:,.1f} MiB are {needed / 2**20:,.0f} MiB; {free / 2**20:,.0f} are free",
        "enough for all that are kept",
        {"checkpoint_bytes": size, "kept": kept, "free_bytes": free},
    )


def _overfit(made: Assembled, config: DistillConfig) -> Check:
    """Sixteen sequences learned by heart."""
    run = made.run
    count = min(SEQUENCES, len(run.train_source))
    numbers = order.batch(config.seed, 0, count, len(run.train_source))
    batches = [run.train_source.read(numbers[at : at + run.micro]) for at in range(0, count, run.micro)]
    floor = entropy_floor(batches, run.step.document_mask)
    own = replace(config.optimizer, lr=max(config.optimizer.lr, 1e-3 if made.spec.init == "scratch" else 0.0))
    run.state.optimizer.state.clear()
    optimizer = make_optimizer(run.step.student, run.step.temperature, own, config.objective)
    losses: list[float] = []
    for loss in overfit(run.step, optimizer, batches, own):
        losses.append(loss)
        if len(losses) > STEPS or loss - floor < 0.05 * (losses[0] - floor):
            break
    share = (losses[0] - min(losses)) / max(losses[0] - floor, 1e-9)
    return Check(
        "overfitting",
        _verdict(share > 0.5),
        f"{count} sequences from {losses[0]:.3f} to {min(losses):.3f} nats in {len(losses) - 1} steps at "
        f"lr {own.lr:g}; their floor is {floor:.3f}",
        "over half of the way to the floor",
        {"first": losses[0], "lowest": min(losses), "floor": floor, "steps": len(losses) - 1, "share": share},
    )


CHECKS: tuple[Callable[[Assembled, DistillConfig], Check], ...] = (
    _initial_loss,
    _gradients,
    _correlation,
    _dead_units,
    _distillation,
    _graph_breaks,
    _loader,
    _disk,
    _overfit,
)
"""In this order: the first steps and the overfitting change the student, and what follows them does not mind."""


def _batch(run: Run, most: int | None = None) -> CachedBatch:
    """The first micro-batch of the run, or the first `most` sequences of it."""
    return run.train_source.read(run.sequences(0)[: min(run.micro, most or run.micro)])


def _verdict(sound: bool) -> str:
    return "ok" if sound else "look"


def _show(config: DistillConfig, found: list[Check]) -> None:
    if config.json:
        show("", {"run": str(config.out), "checks": [asdict(each) for each in found]}, as_json=True)
        return
    table = Table(title=literal(f"distill {config.out}, sanity", "table.title"), title_justify="left")
    for name in ("check", "verdict", "found", "wanted"):
        table.add_column(name, overflow="fold")
    for each in found:
        table.add_row(*map(literal, (each.check, each.verdict, each.found, each.wanted)))
    Console(soft_wrap=True).print(table)
