"""Measurements of an untrained `Student` on a batch, for `--sanity`.

They run in eager mode without dropout, and leave the student unchanged, except `overfit`, which trains it.

Shape suffixes: B sequences, T tokens, N tokens (B*T), D width, V vocabulary, K kept entries.
"""

import math
import re
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from einops import rearrange
from torch import nn
from torch._dynamo.utils import counters
from transformers.pytorch_utils import Conv1D

from kdtrain.config import OptimizerConfig
from kdtrain.objective.batch import Batch
from kdtrain.objective.logits import chunk_logits
from kdtrain.objective.temperature import Temperature
from kdtrain.precision.compiled import COLLECTS_ONCE, CompiledLayers
from kdtrain.precision.modes import autocast
from kdtrain.training.optimizers import Optimizer
from kdtrain.training.student import Student


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
    student: Student, optimizer: Optimizer, batches: Sequence[Batch], config: OptimizerConfig
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
        optimizer.guarded_step(torch.zeros((), device=student.device))
        yield loss


def correlation(student: Student, batch: Batch, most: int = 256) -> float | None:
    """Return the correlation of the teacher's and the student's logits, -1 to 1: a mean over unmasked tokens.

    It covers the first `most` tokens and the top-k entries, or the drawn ones where there is no top-k, each side less
    its mean over the whole vocabulary: Pearson's with dense targets. None without targets, or with those of a teacher
    with another tokenizer.
    """
    targets = batch.targets
    if targets is None or targets.common() is not None:
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
    # a unit is dead if its range is below this share of the median range of its layer
    dead = {name: int((range_D <= 1e-6 * range_D.median()).sum()) for name, range_D in ranges.items()}
    return sum(dead.values()), sum(map(len, ranges.values())), [name for name in dead if dead[name]]


def graph_breaks(student: Student, batch: Batch) -> list[str]:
    """Return where torch.compile would cut the student's forward in training, each as file:line, reason and advice.

    A break before the first operation leaves no graph with a line number; it is listed by its reason alone. This
    resets the compiled code of the process, which compiles again when needed.
    """
    inputs = batch.tokens[:, :-1], batch.segments if student.document_mask else None
    training = student.training
    counters["graph_break"].clear()
    student.train()
    with student.eager(), autocast(student.mode, student.device):
        if student.compiled:
            torch.compiler.reset()
            CompiledLayers(student.model, backend="eager").calling(student.backbone)(*inputs)
            reasons = []
        else:
            explain = torch._dynamo.config.patch(COLLECTS_ONCE)(torch._dynamo.explain(student.backbone))
            reasons = explain(*inputs).break_reasons
    student.train(training)
    breaks: dict[str, str | None] = {}
    for each in reasons:
        if each.user_stack:
            frame = each.user_stack[-1]
            breaks[f"{frame.filename}:{frame.lineno}: {_first_line(each.reason)}"] = remedy(each.reason, frame.line)
    known = {_first_line(each.reason) for each in reasons if each.user_stack}
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
