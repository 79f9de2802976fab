"""`kdtrain distill --sanity`: the checks a careful researcher does by hand before a long run, with a verdict each.

`ok`: as it should be. `look`: it is not, or it need not be; the note says what it may mean. `-`: nothing is to be
expected here, the number is told. The limits are rules of thumb; docs/monitoring.md says where each comes from.

What a careful researcher measures by hand before a long run: of a student that has not been trained yet.

Each function measures one thing of a `DistillStep` and a batch, in eager mode and without dropout, and leaves the
student as it was, but for `overfit`, which trains it. What the numbers should be is said by `commands/sanity.py`.

Shape suffixes: B sequences, T tokens, N tokens (B*T), D width, V vocabulary, K kept entries.
"""

import math
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

from kdtrain.cache.reader import CachedBatch
from kdtrain.commands.build_run import Assembled
from kdtrain.commands.common import literal, show
from kdtrain.commands.dry_run import checkpoints_kept, existing, state_bytes, steps, trial_run
from kdtrain.config import DistillConfig, OptimizerConfig
from kdtrain.data import order
from kdtrain.models.loading import model_digest
from kdtrain.models.spec import DTYPES, read_spec
from kdtrain.monitor.progress import log, setup_logging
from kdtrain.objective.logits import chunk_logits
from kdtrain.objective.targets import OnlineTargets, SparseTargets
from kdtrain.objective.temperature import Temperature
from kdtrain.precision.modes import autocast
from kdtrain.ranks import refuse_many_processes
from kdtrain.training.reporter import gradients_of, initial_loss
from kdtrain.training.run import Run
from kdtrain.training.state import make_optimizer
from kdtrain.training.student import DistillStep
from kdtrain.training.trainer import validate
from kdtrain.training.update import full_tokens

_NOTHING = 1e-6
"""A unit that moves less than this part of what the median unit of its layer moves does not move."""


def entropy_floor(batches: Sequence[CachedBatch], document_mask: bool) -> float:
    """The lowest mean cross-entropy, nats a token, that any model can have on these sequences.

    It has learned them by heart, and errs only where the same tokens from the start of a sequence (of a document, where
    documents are kept apart) are followed by different ones: the entropy of the next token given all before it.
    """
    followers: dict[int, Counter[int]] = defaultdict(Counter)
    places: dict[tuple[int, int], int] = {}  # a tree of prefixes: (place before, token) -> place
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
    for counted in followers.values():
        total = sum(counted.values())
        nats -= sum(count * math.log(count / total) for count in counted.values())
        tokens += total
    return nats / max(tokens, 1)


def overfit(
    step: DistillStep, optimizer: torch.optim.Optimizer, batches: Sequence[CachedBatch], config: OptimizerConfig
) -> Iterator[float]:
    """Train on the same batches by cross-entropy for as long as is asked for; yield each loss, nats a token.

    The rate rises to the optimizer's own over ten steps and stays.
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
        with _probing(step, alpha=0.0):
            for batch in batches:
                part, _ = step(batch, normalizer=tokens)
                part.backward()
                loss += float(part.detach())
        nn.utils.clip_grad_norm_(step.student.parameters(), config.clip or math.inf)
        optimizer.step()
        yield loss


def correlation(step: DistillStep, batch: CachedBatch, most: int = 256) -> float | None:
    """Mean over at most `most` unmasked tokens of the correlation of teacher's and student's logits, -1 to 1.

    Over the entries whose teacher's log-probability is known, each side less its mean over the whole vocabulary: with
    dense targets it is Pearson's. None without targets, or where they are samples without a top-k.
    """
    targets = batch.targets
    if targets is None or (isinstance(targets, SparseTargets) and targets.top_k == 0):
        return None
    with _probing(step), torch.no_grad():
        hidden_ND = step.hidden_eager(batch)[:most]
        logits_NV = chunk_logits(hidden_ND, step.student.head, step.vocab_size)
    ours_NV = logits_NV - logits_NV.mean(-1, keepdim=True)
    rows = targets[: len(ours_NV)]
    if isinstance(rows, SparseTargets):
        known_NK = rows.ids[:, : rows.top_k] < step.vocab_size
        ids_NK = rows.ids[:, : rows.top_k].where(known_NK, 0)
        theirs_NK = (rows.logprobs[:, : rows.top_k] - rows.logit_mean[:, None]).where(known_NK, 0.0)
        ours_NK = ours_NV.gather(1, ids_NK).where(known_NK, 0.0)
    else:
        energies_NV = (rows.dense() if isinstance(rows, OnlineTargets) else rows).energies()
        theirs_NK, ours_NK = energies_NV - energies_NV.mean(-1, keepdim=True), ours_NV
    similar_N = nn.functional.cosine_similarity(ours_NK, theirs_NK, dim=-1)
    mask_N = rearrange(batch.loss_mask, "B T -> (B T)")[: len(similar_N)]
    return float(similar_N[mask_N].mean()) if mask_N.any() else None


def dead_units(step: DistillStep, batch: CachedBatch) -> tuple[int, int, list[str]]:
    """Units that say the same at every token of the batch, all units, and the names of the layers that have such.

    A unit is an input of a linear layer: an output of a norm, of attention, or of an activation.
    """
    moves: dict[str, torch.Tensor] = {}

    def look(name: str, inputs_D: torch.Tensor) -> None:
        flat_ND = inputs_D.detach().float().flatten(0, -2)
        moves[name] = flat_ND.amax(0) - flat_ND.amin(0)

    head = step.student.model.get_output_embeddings()
    handles = [
        module.register_forward_pre_hook(lambda module, inputs, name=name: look(name, inputs[0]))
        for name, module in step.student.model.named_modules()
        if isinstance(module, nn.Linear | Conv1D) and module is not head
    ]
    try:
        with _probing(step), torch.no_grad():
            step.hidden_eager(batch)
    finally:
        for handle in handles:
            handle.remove()
    dead = {name: int((move_D <= _NOTHING * move_D.median()).sum()) for name, move_D in moves.items()}
    return sum(dead.values()), sum(len(move_D) for move_D in moves.values()), [name for name in dead if dead[name]]


def graph_breaks(step: DistillStep, batch: CachedBatch) -> list[str]:
    """Where torch.compile would cut the student's forward in training, each as file:line and reason.

    A break before anything was computed leaves no graph behind that tells its line; it is given by its reason alone.
    Compiled code of this process is forgotten and made again when it is next needed.
    """
    segments_BT = batch.segments if step.document_mask else None
    training = step.training
    counters["graph_break"].clear()
    step.train()
    with autocast(step.mode, step.device):
        explained = torch._dynamo.explain(step.student.forward)(batch.tokens[:, :-1], segments_BT)
    step.train(training)
    placed = {_first_line(each.reason): each.user_stack[-1] for each in explained.break_reasons if each.user_stack}
    found = [f"{frame.filename}:{frame.lineno}: {reason}" for reason, frame in placed.items()]
    return found + [reason for reason in map(_first_line, counters["graph_break"]) if reason not in placed]


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


def kd_at(step: DistillStep, batch: CachedBatch, temperature: float) -> KdAt:
    """Measure the distillation term alone at `temperature`, in fp32; the student's gradients are cleared."""
    parameters = [each for each in step.student.parameters() if each.requires_grad]
    tokens = max(float(batch.loss_mask.sum()), 1.0)
    with _probing(step, alpha=1.0, temperature=temperature, mode="fp32"):
        step.student.zero_grad(set_to_none=True)
        loss, output = step(batch, normalizer=tokens)
        loss.backward()
        towards = [each.grad if each.grad is not None else torch.zeros_like(each) for each in parameters]
        norm = float(torch.linalg.vector_norm(torch.stack([torch.linalg.vector_norm(each) for each in towards])))
        slope = 1.0
        if norm > 0:
            # a change of the loss by a thousandth: above the rounding of fp32, below the curvature
            reach = 1e-3 * max(abs(float(loss.detach())), 1e-3) / norm**2
            ahead, behind = (_loss_at(step, batch, tokens, parameters, towards, sign * reach) for sign in (1, -1))
            slope = (ahead - behind) / (2 * reach * norm**2)
        step.student.zero_grad(set_to_none=True)
    return KdAt(temperature, float(output.kd) / tokens, float(loss.detach()), slope)


@torch.no_grad()
def _loss_at(
    step: DistillStep,
    batch: CachedBatch,
    tokens: float,
    parameters: Sequence[torch.Tensor],
    towards: Sequence[torch.Tensor],
    reach: float,
) -> float:
    """The loss with the parameters moved by `reach` times `towards`; they are put back bit by bit."""
    before = [each.clone() for each in parameters]
    for parameter, direction in zip(parameters, towards, strict=True):
        parameter.add_(direction, alpha=reach)
    loss, _ = step(batch, normalizer=tokens)
    for parameter, value in zip(parameters, before, strict=True):
        parameter.copy_(value)
    return float(loss)


@contextmanager
def _probing(
    step: DistillStep, alpha: float | None = None, temperature: float | None = None, mode: str | None = None
) -> Iterator[None]:
    """Eager, without dropout, without hidden-state losses, and with some settings replaced while the block runs."""
    training, before = step.training, (step.alpha, step.temperature, step.mode, step.hidden_loss)
    step.eval()
    step.alpha = step.alpha if alpha is None else alpha
    step.mode = step.mode if mode is None else mode
    step.hidden_loss = None
    if temperature is not None:
        step.temperature = Temperature(temperature).to(step.device)
    try:
        with step.eager():
            yield
    finally:
        step.train(training)
        step.alpha, step.temperature, step.mode, step.hidden_loss = before


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
    with trial_run(config) as made:
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
