"""What a careful researcher measures by hand before a long run: of a student that has not been trained yet.

Each function measures one thing of a `DistillStep` and a batch, in eager mode and without dropout, and leaves the
student as it was, but for `overfit`, which trains it. What the numbers should be is said by `stages/sanity.py`.

Shape suffixes: B sequences, T tokens, N tokens (B*T), D width, V vocabulary, K kept entries.
"""

import math
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from einops import rearrange
from torch import nn
from torch._dynamo.utils import counters
from transformers.pytorch_utils import Conv1D

from kdtrain.cache.reader import CachedBatch
from kdtrain.config import OptimizerConfig
from kdtrain.objective.logits import chunk_logits
from kdtrain.objective.targets import OnlineTargets, SparseTargets
from kdtrain.objective.temperature import Temperature
from kdtrain.precision.modes import autocast
from kdtrain.training.step import DistillStep

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
    dense targets it is Pearson's. None without targets, or where they are draws without a head.
    """
    targets = batch.targets
    if targets is None or (isinstance(targets, SparseTargets) and targets.head == 0):
        return None
    with _probing(step), torch.no_grad():
        hidden_ND = step.hidden_eager(batch)[:most]
        logits_NV = chunk_logits(hidden_ND, step.student.head, step.vocab_size)
    ours_NV = logits_NV - logits_NV.mean(-1, keepdim=True)
    rows = targets[: len(ours_NV)]
    if isinstance(rows, SparseTargets):
        known_NK = rows.ids[:, : rows.head] < step.vocab_size
        ids_NK = rows.ids[:, : rows.head].where(known_NK, 0)
        theirs_NK = (rows.logprobs[:, : rows.head] - rows.logit_mean[:, None]).where(known_NK, 0.0)
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
