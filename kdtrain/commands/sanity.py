"""`kdtrain distill --sanity`: the checks that a careful researcher does by hand before a long run, each with a verdict.

`ok`: as expected. `look`: unexpected; docs/monitoring.md says what it may mean. `-`: there is no expectation. The
limits are rules of thumb; docs/monitoring.md gives the source of each.

The first half of this file measures: each function takes an untrained `Student` and a batch, runs in eager mode without
dropout, and leaves the student unchanged, except `overfit`, which trains it. The second half compares the measurements
with what is expected.

Shape suffixes: B sequences, T tokens, N tokens (B*T), D width, V vocabulary, K kept entries.
"""

import math
import re
import shutil
import statistics
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from einops import rearrange
from rich.console import Console
from rich.table import Table
from torch import nn
from torch._dynamo.utils import counters
from transformers.pytorch_utils import Conv1D

from kdtrain.checkpoint import tiers
from kdtrain.commands.build_run import BuiltRun
from kdtrain.commands.common import literal, show
from kdtrain.commands.dry_run import checkpoints_kept, existing, state_bytes, timed_steps, trial_run
from kdtrain.config import DistillConfig, OptimizerConfig
from kdtrain.data import order
from kdtrain.models.loading import model_digest
from kdtrain.models.spec import DTYPES, read_spec
from kdtrain.monitor.progress import log, setup_logging
from kdtrain.objective.batch import Batch
from kdtrain.objective.logits import chunk_logits
from kdtrain.objective.temperature import Temperature
from kdtrain.precision.modes import autocast
from kdtrain.ranks import refuse_many_processes
from kdtrain.training.reporter import gradients_of, initial_loss
from kdtrain.training.state import load_saved, make_optimizer
from kdtrain.training.student import Student
from kdtrain.training.trainer import Trainer, validate

_DEAD_RANGE = 1e-6
"""A unit is dead if its range is below this share of the median range of its layer."""


def entropy_floor(batches: Sequence[Batch], document_mask: bool) -> float:
    """Return the lowest mean cross-entropy, nats a token, that any model can have on these sequences.

    It is the entropy of the next token given all tokens before it: a model that has memorized the sequences errs only
    where different tokens follow the same prefix of a sequence (or of a document, with a document mask).
    """
    followers: dict[int, Counter[int]] = defaultdict(Counter)
    places: dict[tuple[int, int], int] = {}  # a tree of prefixes: (place of the prefix, token) -> place
    for batch in batches:
        for row_T, mask_T, segments_T in zip(
            batch.tokens.tolist(), batch.loss_mask.tolist(), batch.segments.tolist(), strict=True
        ):
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


def overfit(
    student: Student, optimizer: torch.optim.Optimizer, batches: Sequence[Batch], config: OptimizerConfig
) -> Iterator[float]:
    """Train on the same batches by cross-entropy, without end; yield the loss of each step, nats a token.

    The learning rate rises to that of the optimizer over ten steps and stays.
    """
    tokens = float(sum(batch.loss_mask.sum() for batch in batches))
    peaks = [group["lr"] for group in optimizer.param_groups]
    number = 0
    while True:
        number += 1
        for group, peak in zip(optimizer.param_groups, peaks, strict=True):
            group["lr"] = peak * min(1.0, number / 10)
        optimizer.zero_grad(set_to_none=True)
        loss = 0.0
        with _probing(student, alpha=0.0):
            for batch in batches:
                part = student(batch, tokens).loss
                part.backward()
                loss += float(part.detach())
        nn.utils.clip_grad_norm_(student.model.parameters(), config.clip or math.inf)
        optimizer.step()
        yield loss


def correlation(student: Student, batch: Batch, most: int = 256) -> float | None:
    """Return the correlation of the teacher's and the student's logits, -1 to 1: a mean over unmasked tokens.

    It covers the first `most` tokens and the top-k entries, or the drawn ones where there is no top-k, each side less
    its mean over the whole vocabulary: Pearson's with dense targets. None without targets.
    """
    targets = batch.targets
    if targets is None:
        return None
    with _probing(student), torch.no_grad():
        hidden_ND = student.hidden_eager(batch)[:most]
        logits_NV = chunk_logits(hidden_ND, student.model.head, student.vocab_size)
    student_NV = logits_NV - logits_NV.mean(-1, keepdim=True)
    teacher_NK, student_NK = targets[: len(student_NV)].resolved().centred(student_NV)
    cosine_N = nn.functional.cosine_similarity(student_NK, teacher_NK, dim=-1)
    mask_N = rearrange(batch.loss_mask, "B T -> (B T)")[: len(cosine_N)]
    return float(cosine_N[mask_N].mean()) if mask_N.any() else None


def dead_units(student: Student, batch: Batch) -> tuple[int, int, list[str]]:
    """Return how many units are constant over the batch, how many there are, and the layers with constant units.

    A unit is an input of a linear layer: an output of a norm, of attention, or of an activation.
    """
    ranges: dict[str, torch.Tensor] = {}

    def measure(name: str, inputs_D: torch.Tensor) -> None:
        flat_ND = inputs_D.detach().float().flatten(0, -2)
        ranges[name] = flat_ND.amax(0) - flat_ND.amin(0)

    head = student.model.model.get_output_embeddings()
    handles = [
        module.register_forward_pre_hook(lambda module, inputs, name=name: measure(name, inputs[0]))
        for name, module in student.model.model.named_modules()
        if isinstance(module, nn.Linear | Conv1D) and module is not head
    ]
    try:
        with _probing(student), torch.no_grad():
            student.hidden_eager(batch)
    finally:
        for handle in handles:
            handle.remove()
    dead = {name: int((range_D <= _DEAD_RANGE * range_D.median()).sum()) for name, range_D in ranges.items()}
    return sum(dead.values()), sum(map(len, ranges.values())), [name for name in dead if dead[name]]


def graph_breaks(student: Student, batch: Batch) -> list[str]:
    """Return where torch.compile would cut the student's forward in training, each as file:line, reason and advice.

    A break before the first operation leaves no graph with a line number; it is listed by its reason alone. This
    resets the compiled code of the process, which compiles again when needed.
    """
    segments_BT = batch.segments if student.document_mask else None
    training = student.training
    counters["graph_break"].clear()
    student.train()
    with student.eager(), autocast(student.mode, student.device):
        explained = torch._dynamo.explain(student.model.forward)(batch.tokens[:, :-1], segments_BT)
    student.train(training)
    breaks: dict[str, str | None] = {}
    for each in explained.break_reasons:
        if each.user_stack:
            frame = each.user_stack[-1]
            breaks[f"{frame.filename}:{frame.lineno}: {_first_line(each.reason)}"] = remedy(each.reason, frame.line)
    known = {_first_line(each.reason) for each in explained.break_reasons if each.user_stack}
    breaks |= {_first_line(each): remedy(each) for each in counters["graph_break"] if _first_line(each) not in known}
    return [f"{text}; {advice}" if advice else text for text, advice in breaks.items()]


_REMEDIES = (
    (r"builtin operator `print`|\bprint\(|\blogg(?:ing|er)\b", "printing or logging in the forward: take it out"),
    (r"\bnp\.|[Nn]um[Pp]y|ndarray|tolist\(", "NumPy in the forward: compute it with torch, or before the forward"),
    (
        r"generic_jump|[Dd]ata[- ]dependent|\.item\(|Dynamic shape",
        "an `if`, a number or a shape that depends on a tensor's values: use torch.where, or decide before the forward",
    ),
)


def remedy(reason: str, line: str | None = None) -> str | None:
    """Advice against a graph break, by dynamo's `reason` and the `line` of code; None for an unknown cause."""
    said = f"{reason.partition('Hint:')[0]}\n{line or ''}"  # the hints speak of causes that others have
    return next((advice for pattern, advice in _REMEDIES if re.search(pattern, said)), None)


def _first_line(reason: str) -> str:
    return " ".join(reason.splitlines()[0].split())


@dataclass(frozen=True)
class KdAt:
    """The distillation term at one temperature."""

    temperature: float
    kd: float
    """The divergence, nats a token, without the factor T^2."""
    loss: float
    """The loss at alpha 1, which is T^2 times the divergence."""
    slope: float
    """The loss's slope along its own gradient, by difference, over the gradient's norm: 1 where they agree."""


def kd_at(student: Student, batch: Batch, temperature: float) -> KdAt:
    """Measure the distillation term alone at `temperature`, in fp32; the student's gradients are cleared."""
    parameters = [each for each in student.model.parameters() if each.requires_grad]
    tokens = max(float(batch.loss_mask.sum()), 1.0)
    with _probing(student, alpha=1.0, temperature=temperature, mode="fp32"):
        student.model.zero_grad(set_to_none=True)
        output = student(batch, tokens)
        loss = output.loss
        loss.backward()
        gradients = [each.grad if each.grad is not None else torch.zeros_like(each) for each in parameters]
        norm = float(torch.linalg.vector_norm(torch.stack([torch.linalg.vector_norm(each) for each in gradients])))
        slope = 1.0
        if norm > 0:
            # changes the loss by a thousandth: above the rounding of fp32, below the curvature
            size = 1e-3 * max(abs(float(loss.detach())), 1e-3) / norm**2
            ahead, behind = (_loss_at(student, batch, tokens, parameters, gradients, sign * size) for sign in (1, -1))
            slope = (ahead - behind) / (2 * size * norm**2)
        student.model.zero_grad(set_to_none=True)
    return KdAt(temperature, float(output.kd) / tokens, float(loss.detach()), slope)


@torch.no_grad()
def _loss_at(
    student: Student,
    batch: Batch,
    tokens: float,
    parameters: Sequence[torch.Tensor],
    directions: Sequence[torch.Tensor],
    size: float,
) -> float:
    """The loss with the parameters moved by `size` times `directions`; restores them bitwise."""
    before = [each.clone() for each in parameters]
    for parameter, direction in zip(parameters, directions, strict=True):
        parameter.add_(direction, alpha=size)
    loss = student(batch, tokens).loss
    for parameter, value in zip(parameters, before, strict=True):
        parameter.copy_(value)
    return float(loss)


@contextmanager
def _probing(
    student: Student, alpha: float | None = None, temperature: float | None = None, mode: str | None = None
) -> Iterator[None]:
    """Run the student in eager mode, without dropout and hidden-state loss, and with these settings, in the block."""
    training, before = student.training, (student.loss.alpha, student.temperature, student.mode, student.hidden_loss)
    student.eval()
    student.loss.alpha = student.loss.alpha if alpha is None else alpha
    student.mode = student.mode if mode is None else mode
    student.hidden_loss = None
    if temperature is not None:
        student.loss.temperature = Temperature(temperature).to(student.device)
    products = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")  # with --tf32 a small change of the loss would be lost
    try:
        with student.eager():
            yield
    finally:
        student.train(training)
        student.loss.alpha, student.loss.temperature, student.mode, student.hidden_loss = before
        torch.set_float32_matmul_precision(products)


SEQUENCES, STEPS = 16, 100
"""How many sequences `_overfit` trains on, and for how many steps at most."""
ALIGNED, RELATED = 0.9, 0.3
"""Least correlation with the teacher of a student with the teacher's weights, and of another trained student."""
DEAD = 0.05
"""Largest share of units that may be constant."""


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

    Raises:
        UsageError: the run is impossible.
        RunError: a step fails, as it would in the run.
    """
    setup_logging()
    if config.cache is None:
        # these checks need little text, and packing all of it may take long
        most = max(4 * config.batch_size, 4 * SEQUENCES)
        few = min(config.data.num_sequences or most, most)
        config = replace(config, data=replace(config.data, num_sequences=few))
    found: list[Check] = []
    refuse_many_processes()
    with trial_run(config) as built:
        for number, check in enumerate(CHECKS, 1):
            log.info("check %d of %d: %s", number, len(CHECKS), (check.__doc__ or "").splitlines()[0].rstrip("."))
            found.append(check(built, config))
    _show(config, found)
    return 0


def _initial_loss(built: BuiltRun, config: DistillConfig) -> Check:
    """The loss before the first step."""
    trainer = built.trainer
    student, source, batches = trainer.student.eval(), trainer.validation_source, min(4, config.monitor.eval_batches)
    metrics = validate(student, source, micro=trainer.micro, batches=batches)
    loss = math.nan if metrics is None else metrics.mean("cross_entropy")
    assert loss is not None
    sound, text = initial_loss(loss, trainer.student.vocab_size, built.spec.init)
    wanted = {"scratch": "ln V, within a tenth", "pretrained": "below ln V"}.get(built.spec.init, "finite")
    values = {"loss": loss, "ln_vocabulary": math.log(trainer.student.vocab_size)}
    return Check("initial loss", _verdict(sound), text.removeprefix("initial loss "), wanted, values)


def _correlation(built: BuiltRun, config: DistillConfig) -> Check:
    """The logits of teacher and student on a batch."""
    found, wanted = correlation(built.trainer.student, _batch(built.trainer)), _expected_correlation(built, config)
    if found is None:
        return Check("teacher-student correlation", "-", "there are no targets to compare", "", {})
    text = "nothing: the student is untrained" if wanted is None else f"above {wanted:g}"
    verdict = "-" if wanted is None else _verdict(found > wanted)
    return Check(
        "teacher-student correlation", verdict, f"{found:.3f}", text, {"correlation": found, "aligned": found > ALIGNED}
    )


def _expected_correlation(built: BuiltRun, config: DistillConfig) -> float | None:
    """The least correlation expected: high for the teacher's own weights, low for others, None for fresh ones."""
    if built.spec.init != "pretrained":
        return None
    teacher = built.manifest.settings.teacher or {}
    digests = (teacher.get("weights_digest"), built.trainer.identity.get("teacher"))
    stated = teacher.get("dtype") if config.teacher is None else read_spec(config.teacher).dtype
    dtype = getattr(torch, stated) if stated in DTYPES else torch.float32
    # an fp32 teacher has weights that were rounded to its dtype first
    casts = ((dtype,), (dtype, torch.float32))
    same = any(model_digest(built.trainer.student.model, *each) in digests for each in casts)
    return ALIGNED if same else RELATED


def _dead_units(built: BuiltRun, config: DistillConfig) -> Check:
    """Units that are constant over the batch."""
    dead, units, layers = dead_units(built.trainer.student, _batch(built.trainer))
    share = dead / max(units, 1)
    where = f" ({', '.join(layers[:3])}{', ...' if len(layers) > 3 else ''})" if layers else ""
    return Check(
        "dead units",
        _verdict(share < DEAD),
        f"{dead:,} of {units:,}, {share:.2%}{where}",
        f"below {DEAD:.0%}",
        {"dead": dead, "units": units, "share": share, "layers": layers},
    )


def _distillation(built: BuiltRun, config: DistillConfig) -> Check:
    """The distillation term at two temperatures, and its slope."""
    trainer = built.trainer
    if not (trainer.has_teacher and config.objective.distils):
        return Check("distillation term and T²", "-", "plain cross-entropy", "", {})
    objective = trainer.config.objective
    own, low, high = objective.temperature, objective.temperature_min, objective.temperature_max
    # a second temperature, a factor of two away, where the cache is valid there
    others = [each for each in (2 * own, own / 2) if (low or math.inf) <= each <= (high or 0.0)]
    at = [kd_at(trainer.student, _batch(trainer, most=2), each) for each in (own, *others[:1])]
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


def _gradients(built: BuiltRun, config: DistillConfig) -> Check:
    """The gradient of every parameter."""
    trainer = built.trainer
    trainer.student.train()
    with trainer.student.eager():
        trainer.student(_batch(trainer), trainer.full_tokens).loss.backward()
    found = gradients_of(trainer.student.model)
    trainer.student.zero_grad(set_to_none=True)
    unsound = {"without": found.missing, "zero": found.zero, "non-finite": found.broken}
    named = [
        f"{kind}: {', '.join(names[:3])}{', ...' if len(names) > 3 else ''}" for kind, names in unsound.items() if names
    ]
    total = found.good + sum(map(len, unsound.values()))
    return Check(
        "gradients",
        _verdict(found.good == total),
        "; ".join([f"{found.good} of {total} parameters sound", *named]),
        "all finite and not zero",
        {"sound": found.good, **{kind.replace("-", "_"): names for kind, names in unsound.items()}},
    )


def _graph_breaks(built: BuiltRun, config: DistillConfig) -> Check:
    """Where the compiled graph breaks."""
    found = graph_breaks(built.trainer.student, _batch(built.trainer))
    compiled = built.trainer.student.compile_objective
    verdict = _verdict(not found) if compiled else "-"
    text = f"{len(found)}: {'; '.join(found[:3])}" if found else "none"
    return Check("graph breaks", verdict, text if compiled else f"{text} (not compiled)", "none", {"breaks": found})


def _loader(built: BuiltRun, config: DistillConfig) -> Check:
    """Reading against training."""
    trainer = built.trainer
    taken = timed_steps(trainer, 3)
    step = min(each.seconds for each in taken[1:])
    reading = statistics.median(_reading_seconds(trainer, number) for number in range(4, 8))
    hidden = trainer.train_source.overlaps
    how = "read during a step" if hidden else "computed by the teacher before each step"
    return Check(
        "loader",
        _verdict(reading < step) if hidden else "-",
        f"{1000 * reading:.1f} ms to read the data of a step of {1000 * step:.1f} ms ({how})",
        "less than a step" if hidden else "",
        {"loader_seconds": reading, "step_seconds": step, "first_step_seconds": taken[0].seconds},
    )


def _resume(built: BuiltRun, config: DistillConfig) -> Check:
    """A step, and the same step after a save and a resume."""
    trainer, name = built.trainer, tiers.rolling_name(built.trainer.state.progress.step)
    trainer.save(name)
    trainer.saver.wait()
    first = _after_a_step(trainer)
    saved = load_saved(trainer.store.path(name), trainer.state.like)
    trainer.state.load(saved.tensors, saved.state)
    second = _after_a_step(trainer)
    differ = [each for each in first if not torch.equal(first[each], second[each])]
    exact = trainer.student.device.type == "cpu" or config.precision.deterministic
    where = (
        f"{len(differ)} of {len(first)} tensors differ ({', '.join(differ[:3])}{', ...' if len(differ) > 3 else ''})"
    )
    return Check(
        "resume",
        _verdict(not differ) if exact else "-",
        where if differ else f"{len(first)} tensors equal to the last bit",
        "equal bits" if exact else "nothing: the device repeats its bits only with --deterministic",
        {"tensors": len(first), "differ": differ},
    )


def _after_a_step(trainer: Trainer) -> dict[str, torch.Tensor]:
    """Take a step, and copy the state after it to the host."""
    timed_steps(trainer, 1)
    return {name: each.detach().to("cpu", copy=True) for name, each in trainer.state.own_tensors().items()}


def _reading_seconds(trainer: Trainer, step: int) -> float:
    indices = trainer.sequences(step * trainer.config.batch_size)
    started = time.perf_counter()
    for each in rearrange(indices, "(a m) -> a m", m=trainer.micro):
        trainer.train_source.read(each)
    return time.perf_counter() - started


def _disk(built: BuiltRun, config: DistillConfig) -> Check:
    """Disk space for the checkpoints."""
    size, kept = state_bytes(built.trainer), checkpoints_kept(built.trainer)
    free = shutil.disk_usage(existing(config.out)).free
    needed = size * kept
    return Check(
        "disk",
        _verdict(needed < free),
        f"{kept} checkpoints of {size / 2**20:,.1f} MiB are {needed / 2**20:,.0f} MiB; {free / 2**20:,.0f} are free",
        "enough for all kept checkpoints",
        {"checkpoint_bytes": size, "kept": kept, "free_bytes": free},
    )


def _overfit(built: BuiltRun, config: DistillConfig) -> Check:
    """Sixteen sequences memorized."""
    trainer = built.trainer
    count = min(SEQUENCES, len(trainer.train_source))
    numbers = order.batch(config.seed, 0, count, len(trainer.train_source))
    batches = [trainer.train_source.read(numbers[at : at + trainer.micro]) for at in range(0, count, trainer.micro)]
    floor = entropy_floor(batches, trainer.student.document_mask)
    own = replace(config.optimizer, lr=max(config.optimizer.lr, 1e-3 if built.spec.init == "scratch" else 0.0))
    trainer.state.optimizer.state.clear()
    optimizer = make_optimizer(trainer.student, own, config.objective.temperature_lr)
    losses: list[float] = []
    for loss in overfit(trainer.student, optimizer, batches, own):
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


CHECKS: tuple[Callable[[BuiltRun, DistillConfig], Check], ...] = (
    _initial_loss,
    _gradients,
    _correlation,
    _dead_units,
    _distillation,
    _graph_breaks,
    _loader,
    _resume,
    _disk,
    _overfit,
)
"""`_loader`, `_resume` and `_overfit` change the student, which does not matter to those after them."""


def _batch(trainer: Trainer, most: int | None = None) -> Batch:
    """The first micro-batch of the run, or the first `most` sequences of it."""
    return trainer.train_source.read(trainer.sequences(0)[: min(trainer.micro, most or trainer.micro)])


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
