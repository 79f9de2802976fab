"""Validation: measures the student against text and teacher over a split in order, each rank on a part of it."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import torch

from kdtrain import faults
from kdtrain.objective.batch import Batch
from kdtrain.objective.metrics import Metrics, measure
from kdtrain.parallel.layout import RankLayout
from kdtrain.training.sources.source import Source
from kdtrain.training.student import Student


def validate(
    student: Student,
    source: Source,
    *,
    micro: int,
    batches: int | None,
    read: Callable[[Callable[[], Batch]], Batch | None] = lambda action: action(),
    part: range | None = None,
    byte_lengths: np.ndarray | None = None,
    layout: RankLayout = RankLayout(),
) -> Metrics | None:
    """Return sums over the first sequences of `source`, over all ranks; None when `read` returns None.

    The micro-batches are dealt out to the ranks in turn. Every rank runs the same number of forwards, because a sharded
    student needs all ranks.

    Args:
        student: in evaluation mode; its compiled graph is not used.
        source: the split.
        micro: sequences in a forward; masked copies fill up the last one, so that all have the same shape.
        batches: the largest number of forwards over all ranks; None: the whole split.
        read: reads each batch, on every rank; see `StopRequest.read`.
        part: the sequences of a member of a mixture instead of the whole split.
        byte_lengths: see `models.tokenizer.byte_lengths`; None: nothing is measured in bits per byte.
        layout: of the ranks; by default a single process.
    """
    total = Metrics()
    part = part or range(len(source))
    sizes = None if byte_lengths is None else torch.from_numpy(byte_lengths)
    count = len(part) if batches is None else min(len(part), batches * micro)
    for batch in own_batches(source, part[:count], micro, read, layout):
        if batch is None:
            return None
        rows = batch.rows()
        with torch.no_grad():
            total = total + measure(
                student.hidden_eager(batch),
                student.model.head,
                rows,
                vocab_size=student.vocab_size,
                bytes_N=None if sizes is None else sizes.to(rows.labels.device)[rows.labels.clamp(0, len(sizes) - 1)],
            )
    if layout.data_size * layout.tensor_size == 1:
        return total
    return Metrics.from_vector(layout.sum(torch.tensor(total.vector(), dtype=torch.float64)).tolist())


def own_batches(
    source: Source,
    part: range,
    micro: int,
    read: Callable[[Callable[[], Batch]], Batch | None],
    layout: RankLayout,
    point: str = "validate.batch",
) -> Iterator[Batch | None]:
    """Yield this rank's micro-batches of the sequences `part`, as many as every rank's; None, and end, where `read`
    returns None. Masked copies fill up the last one.

    point: the fault that each of them is.
    """
    own = layout.data_rank * micro
    count = len(part)
    for start in range(own, count + own, layout.data_size * micro):
        faults.point(point)
        indices = np.arange(start, start + micro)
        batch = read(partial(source.read, part.start + part.step * np.minimum(indices, count - 1)))
        if batch is None:
            yield None
            return
        counts_B1 = torch.as_tensor(indices < count, device=batch.loss_mask.device)[:, None]
        yield replace(batch, loss_mask=batch.loss_mask & counts_B1)


def validate_members(student: Student, source: Source, **options: Any) -> tuple[Metrics, dict[str, Metrics]] | None:
    """Validate all of `source`, and each member of a mixture by name, on the text it is validated on when alone.

    The whole is then what a validation split would give that holds the members in the proportion in which training
    draws them; what one member does not know is unknown of it.
    """
    if not source.facts.members:
        metrics = validate(student, source, **options)
        return None if metrics is None else (metrics, {})
    whole = Metrics()
    micro = options["micro"]
    batches = options["batches"]
    found = dict[str, Metrics]()
    for name, member in source.facts.members.items():
        metrics = validate(student, source, **options, part=member.place)
        size = len(member.place)
        if metrics is None:
            return None
        found[name] = metrics
        whole += metrics.times(member.share / (size if batches is None else min(size, batches * micro)))
    tokens = sum(each.tokens for each in found.values())
    return replace(whole.times(tokens / whole.tokens if tokens else 1.0), tokens=tokens), found


def summary(metrics: Metrics) -> dict[str, float | None]:
    """Return the means by their names in logs and tables; None for what the targets do not contain.

    loss, kl, teacher_loss: nats per token; agreement: share of tokens where student and teacher have one most likely
    entry; acceptance: sum of min(p, q), the share of draft tokens that speculative decoding would accept;
    bits_per_byte, teacher_bits_per_byte: of the same text, which compares tokenizers. With a teacher of another
    tokenizer kl is that of groups of tokens where both can be compared, and compared the share of tokens there.
    """
    return {
        "loss": metrics.mean("cross_entropy"),
        "perplexity": metrics.perplexity(),
        "accuracy": metrics.mean("correct"),
        "ece": metrics.ece(),
        "kl": metrics.divergence(),
        "agreement": metrics.mean("agreement"),
        "acceptance": metrics.mean("acceptance"),
        "teacher_loss": metrics.teacher_loss(),
        "bits_per_byte": metrics.bits_per_byte(),
        "teacher_bits_per_byte": metrics.teacher_bits_per_byte(),
        "compared": metrics.mean("compared"),
        "tokens": metrics.tokens,
    }


def evaluation_metrics(found: Any) -> dict[str, float]:
    """Compute the metrics of a `Student` for `transformers.Trainer`: exact means over the unmasked tokens of a split.

    loss and ce: the cross-entropy, kl: from the teacher, and what else of `summary` the data contain; nats per token.
    `loss` replaces Trainer's own `eval_loss`, a mean over batches by their rows.

    found: an `EvalPrediction`, whose last prediction has the sums of each sequence.
    """
    means = summary(Metrics.from_vector(np.asarray(found.predictions[-1], np.float64).sum(0).tolist()))
    return {name: each for name, each in {**means, "ce": means["loss"]}.items() if each is not None}


def calibration(metrics: Metrics) -> list[dict[str, float]]:
    """Return the reliability diagram: for each bin of confidence its tokens, mean confidence and accuracy.

    15 equal bins from 0 to 1, in order; an empty one holds zeros. ECE is the mean gap of the two, weighted by tokens.
    """
    bins = zip(metrics.bin_count, metrics.bin_confidence, metrics.bin_correct, strict=True)
    return [
        {"tokens": count, "confidence": confidence / max(count, 1), "accuracy": correct / max(count, 1)}
        for count, confidence, correct in bins
    ]
