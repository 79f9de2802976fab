"""Validation: the student against text and teacher, over a split read in order, each rank a part of it."""

from collections.abc import Callable
from functools import partial

import numpy as np
import torch
from einops import rearrange

from kdtrain import faults
from kdtrain.cache.reader import CachedBatch
from kdtrain.objective.metrics import Metrics, measure
from kdtrain.ranks import all_reduce_sum, rank, world_size
from kdtrain.training.data import Source
from kdtrain.training.student import Student


def validate(
    student: Student,
    source: Source,
    *,
    micro: int,
    batches: int | None,
    read: Callable[[Callable[[], CachedBatch]], CachedBatch | None] = lambda action: action(),
) -> Metrics | None:
    """Sums over the first sequences of `source`, those of all ranks; None when `read` gave none in between.

    Ranks take turns by micro-batches, and all of them take as many, because a sharded student needs every rank.

    Args:
        student: in evaluation mode; no compiled graph of it is used.
        source: the split.
        micro: sequences in a forward; the last one is filled up with masked copies, so that its shape is the same.
        batches: at most this many forwards of all ranks together; all of the split when None.
        read: what each batch is read through, by every rank, see `StopRequest.read`.
    """
    total = Metrics()
    count = len(source) if batches is None else min(len(source), batches * micro)
    with torch.no_grad():
        for start in range(rank() * micro, count + rank() * micro, world_size() * micro):
            faults.point("validate.batch")
            numbers = np.minimum(np.arange(start, start + micro), count - 1)
            batch = read(partial(source.read, numbers))
            if batch is None:
                return None
            mask_BT = (
                batch.loss_mask
                & torch.as_tensor(np.arange(start, start + micro) < count, device=batch.loss_mask.device)[:, None]
            )
            total = total + measure(
                student.hidden_eager(batch),
                student.model.head,
                rearrange(batch.tokens[:, 1:], "B T -> (B T)"),
                rearrange(mask_BT, "B T -> (B T)"),
                batch.targets,
                vocab_size=student.vocab_size,
            )
    if world_size() == 1:
        return total
    return Metrics.from_vector(all_reduce_sum(torch.tensor(total.vector(), dtype=torch.float64)).tolist())


def summary(metrics: Metrics) -> dict[str, float | None]:
    """The means, by the names that logs and tables use; None for what the teacher's targets cannot tell.

    loss, kl, teacher_loss: nats a token; agreement: share of tokens where student and teacher like the same entry
    best; acceptance: sum of min(p, q), the share of draft tokens that speculative decoding would accept.
    """
    return {
        "loss": metrics.mean("cross_entropy"),
        "perplexity": metrics.perplexity(),
        "accuracy": metrics.mean("correct"),
        "ece": metrics.ece(),
        "kl": metrics.mean("kl"),
        "agreement": metrics.mean("agreement"),
        "acceptance": metrics.mean("acceptance"),
        "teacher_loss": metrics.mean("teacher_cross_entropy"),
        "tokens": metrics.tokens,
    }


def calibration(metrics: Metrics) -> list[dict[str, float]]:
    """The reliability diagram: by bin of confidence, its tokens, their mean confidence and their accuracy.

    15 equal bins from 0 to 1, in order; an empty one holds zeros. ECE is the mean gap of the two, weighted by tokens.
    """
    bins = zip(metrics.bin_count, metrics.bin_confidence, metrics.bin_correct, strict=True)
    return [
        {"tokens": count, "confidence": confidence / max(count, 1), "accuracy": correct / max(count, 1)}
        for count, confidence, correct in bins
    ]
