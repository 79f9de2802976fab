"""`kdtrain distill --sanity`: the checks that a careful researcher does by hand before a long run, each with a verdict.

`ok`: as expected. `look`: unexpected; docs/monitoring.md lists what it may mean. `-`: there is no expectation. The
limits are rules of thumb.
"""

import math
import statistics
import time
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from einops import rearrange
from rich.console import Console
from rich.table import Table
from torch import nn

from kdtrain.checkpoint import tiers
from kdtrain.config import DistillConfig
from kdtrain.monitor.progress import log, setup_logging
from kdtrain.objective.batch import Batch
from kdtrain.ranks import refuse_many_processes
from kdtrain.run.trial import Trial, trial_run
from kdtrain.tables import literal, show
from kdtrain.training.optimizers import Optimizer, make_optimizer
from kdtrain.training.reporter import gradients_of, initial_loss
from kdtrain.training.state import load_saved
from kdtrain.training.student import Student
from kdtrain.training.validate import validate

SEQUENCES, STEPS = 16, 100
"""How many sequences `check_overfitting` trains on, and for how many steps at most."""


@dataclass(frozen=True)
class Check:
    """One line of the table."""

    check: str
    verdict: str
    """ok, look, or - without an expectation."""
    found: str
    wanted: str
    values: dict[str, Any]
    """The numbers, for `--json`."""


def main(config: DistillConfig) -> int:
    """Print the table, and leave nothing on disk.

    UsageError: the run is impossible. RunError: a step fails, as it would in the run.
    """
    setup_logging()
    if not config.cache:
        # these checks need little text, and packing all of it may take long
        most = max(4 * config.batch_size, 4 * SEQUENCES)
        few = min(config.data.num_sequences or most, most)
        config = replace(config, data=replace(config.data, num_sequences=few))
    found: list[Check] = []
    refuse_many_processes()
    with trial_run(config) as trial:
        for number, check in enumerate(CHECKS, 1):
            log.info("check %d of %d: %s", number, len(CHECKS), (check.__doc__ or "").splitlines()[0].rstrip("."))
            found.append(check(trial))
    if config.json:
        show("", {"run": str(config.out), "checks": [asdict(each) for each in found]}, as_json=True)
        return 0
    table = Table(title=literal(f"distill {config.out}, sanity", "table.title"), title_justify="left")
    for name in ("check", "verdict", "found", "wanted"):
        table.add_column(name, overflow="fold")
    for each in found:
        table.add_row(*map(literal, (each.check, each.verdict, each.found, each.wanted)))
    Console(soft_wrap=True).print(table)
    return 0


def check_initial_loss(trial: Trial) -> Check:
    """The loss before the first step."""
    trainer, init = trial.trainer, trial.recipe.student.init
    batches = min(4, trial.recipe.config.monitor.eval_batches)
    metrics = validate(trainer.student.eval(), trainer.validation_source, micro=trainer.stepper.micro, batches=batches)
    loss = math.nan if metrics is None else metrics.mean("cross_entropy")
    assert loss is not None
    sound, text = initial_loss(loss, trainer.student.vocab_size, init)
    wanted = {"scratch": "ln V, within a tenth", "pretrained": "below ln V"}.get(init, "finite")
    values = {"loss": loss, "ln_vocabulary": math.log(trainer.student.vocab_size)}
    return Check("initial loss", _verdict(sound), text.removeprefix("initial loss "), wanted, values)


def check_gradients(trial: Trial) -> Check:
    """The gradient of every parameter."""
    student, stepper = trial.trainer.student, trial.trainer.stepper
    student.train()
    with student.eager():
        student(stepper.source.read(stepper.sequences(0)[: stepper.micro]), stepper.full_tokens).loss.backward()
    found = gradients_of(student.model)
    student.zero_grad(set_to_none=True)
    unsound = {"without": found.missing, "zero": found.zero, "non-finite": found.broken}
    total = found.good + sum(map(len, unsound.values()))
    named = [f"{kind}: {_first(names)}" for kind, names in unsound.items() if names]
    return Check(
        "gradients",
        _verdict(found.good == total),
        "; ".join([f"{found.good} of {total} parameters sound", *named]),
        "all finite and not zero",
        {"sound": found.good, **{kind.replace("-", "_"): names for kind, names in unsound.items()}},
    )


def check_loader(trial: Trial) -> Check:
    """Reading against training."""
    taken = trial.timed_steps(3)
    step = min(each.seconds for each in taken[1:])
    reading = statistics.median(_reading_seconds(trial, number) for number in range(4, 8))
    hidden = trial.trainer.stepper.source.overlaps
    how = "read during a step" if hidden else "computed by the teacher before each step"
    return Check(
        "loader",
        _verdict(reading < step) if hidden else "-",
        f"{1000 * reading:.1f} ms to read the data of a step of {1000 * step:.1f} ms ({how})",
        "less than a step" if hidden else "",
        {"loader_seconds": reading, "step_seconds": step, "first_step_seconds": taken[0].seconds},
    )


def _reading_seconds(trial: Trial, step: int) -> float:
    stepper = trial.trainer.stepper
    indices = stepper.sequences(step * trial.recipe.config.batch_size)
    started = time.perf_counter()
    for each in rearrange(indices, "(a m) -> a m", m=stepper.micro):
        stepper.source.read(each)
    return time.perf_counter() - started


def check_resume(trial: Trial) -> Check:
    """A step, and the same step after a save and a resume."""
    trainer, name = trial.trainer, tiers.name_of("rolling", trial.trainer.state.progress.step)
    trainer.checkpoints.save(name)
    trainer.saver.wait()

    def state_after_a_step() -> dict[str, torch.Tensor]:
        trial.timed_steps(1)
        return {name: each.detach().to("cpu", copy=True) for name, each in trainer.state.own_tensors().items()}

    first = state_after_a_step()
    saved = load_saved(trainer.store.path(name), trainer.state.like)
    trainer.state.load(saved.tensors, saved.state)
    second = state_after_a_step()
    differ = [each for each in first if not torch.equal(first[each], second[each])]
    exact = trainer.student.device.type == "cpu" or trial.recipe.config.precision.deterministic
    where = f"{len(differ)} of {len(first)} tensors differ ({_first(differ)})"
    return Check(
        "resume",
        _verdict(not differ) if exact else "-",
        where if differ else f"{len(first)} tensors equal to the last bit",
        "equal bits" if exact else "nothing: the device repeats its bits only with --deterministic",
        {"tensors": len(first), "differ": differ},
    )


def check_overfitting(trial: Trial) -> Check:
    """Sixteen sequences memorized."""
    config, stepper, student = trial.recipe.config, trial.trainer.stepper, trial.trainer.student
    numbers = stepper.order.batch(0, min(SEQUENCES, len(stepper.source)))
    batches = [stepper.source.read(numbers[at : at + stepper.micro]) for at in range(0, len(numbers), stepper.micro)]
    floor = entropy_floor(batches, student.document_mask)
    least = 1e-3 if trial.recipe.student.init == "scratch" else 0.0
    options = replace(config.optimizer, lr=max(config.optimizer.peak_lr, least))
    trial.trainer.state.optimizer.state.clear()
    optimizer = make_optimizer(student, options, config.objective.temperature_lr)
    losses: list[float] = []
    for loss in overfit(student, optimizer, batches, options.clip):
        losses.append(loss)
        if len(losses) > STEPS or loss - floor < 0.05 * (losses[0] - floor):
            break
    share = (losses[0] - min(losses)) / max(losses[0] - floor, 1e-9)
    return Check(
        "overfitting",
        _verdict(share > 0.5),
        f"{len(numbers)} sequences from {losses[0]:.3f} to {min(losses):.3f} nats in {len(losses) - 1} steps at "
        f"lr {options.peak_lr:g}; their floor is {floor:.3f}",
        "over half of the way to the floor",
        {"first": losses[0], "lowest": min(losses), "floor": floor, "steps": len(losses) - 1, "share": share},
    )


CHECKS = (check_initial_loss, check_gradients, check_loader, check_resume, check_overfitting)


def entropy_floor(batches: Sequence[Batch], document_mask: bool) -> float:
    """Return the lowest mean cross-entropy, nats a token, that any model can have on these sequences.

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
    nats, tokens = 0.0, 0
    for follower in followers.values():
        total = sum(follower.values())
        nats -= sum(count * math.log(count / total) for count in follower.values())
        tokens += total
    return nats / max(tokens, 1)


def overfit(student: Student, optimizer: Optimizer, batches: Sequence[Batch], clip: float) -> Iterator[float]:
    """Train on the same batches by cross-entropy, without end; yield the loss of each step, nats a token.

    The student runs eagerly, without dropout and hidden-state loss, and keeps these settings. The learning rate rises
    to that of the optimizer over ten steps and stays.
    """
    tokens = float(sum(batch.loss_mask.sum() for batch in batches))
    peaks = [group["lr"] for group in optimizer.param_groups]
    student.eval()
    student.loss.alpha, student.hidden_loss, number = 0.0, None, 0
    while True:
        number += 1
        for group, peak in zip(optimizer.param_groups, peaks, strict=True):
            group["lr"] = peak * min(1.0, number / 10)
        optimizer.zero_grad(set_to_none=True)
        loss = 0.0
        with student.eager():
            for batch in batches:
                part = student(batch, tokens).loss
                part.backward()
                loss += float(part.detach())
        nn.utils.clip_grad_norm_(student.model.parameters(), clip or math.inf)
        optimizer.guarded_step(torch.zeros((), device=student.device))
        yield loss


def _verdict(sound: bool) -> str:
    return "ok" if sound else "look"


def _first(names: list[str]) -> str:
    return f"{', '.join(names[:3])}{', ...' if len(names) > 3 else ''}"
