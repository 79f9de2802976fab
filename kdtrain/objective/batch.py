"""A micro-batch: sequences of tokens, and a teacher's predictions at each of their positions.

Shape suffixes: B sequences, T positions, N tokens (B*T), V vocabulary, K kept entries, D sampled ones, G knots of beta.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from kdtrain.errors import UsageError
from kdtrain.objective.aligned import AlignedTargets
from kdtrain.objective.cells import CellIndex
from kdtrain.objective.mixed import MixedTargets
from kdtrain.objective.targets import DenseTargets, SparseTargets, Targets

_TARGETS = ("ids", "logprobs", "counts", "tail", "label_logprob", "logit_mean", "logit_std")


@dataclass(frozen=True)
class Batch:
    """B sequences and a teacher's targets."""

    tokens: Tensor
    """[B, T+1] int64; tokens[:, t+1] is the label of position t."""
    loss_mask: Tensor
    """[B, T] bool."""
    segments: Tensor
    """[B, T] int64, document number within the sequence."""
    targets: Targets | None
    """N = B*T rows, sequence by sequence; None without a teacher."""
    states: tuple[Tensor, ...] = ()
    """[N, D] for each layer of the teacher that a hidden-state loss compares, at the student's positions."""

    def each(self, change: Callable[[Tensor], Tensor]) -> "Batch":
        """The same batch with `change` applied to every tensor."""
        targets = None if self.targets is None else self.targets.each(change)
        own = change(self.tokens), change(self.loss_mask), change(self.segments)
        return Batch(*own, targets, tuple(map(change, self.states)))

    def fields(self) -> dict[str, Tensor]:
        """The batch as named tensors whose first dimension is B, which any trainer can move, split and concatenate.

        tokens, loss_mask, segments as above; labels [B, T+1], the tokens with -100 where the loss mask is off, for
        trainers that count the tokens of the loss themselves. Sparse targets (`SparseTargets`): ids, logprobs
        [B, T, K], counts [B, T, D] of the last D columns, which were sampled, tail [B, T, 2G], label_logprob,
        logit_mean, logit_std [B, T], knots [B, G] and num_samples [B]. Dense targets: logprobs [B, T, V],
        label_logprob [B, T]. Of a teacher with another tokenizer: see `AlignedTargets.fields`.
        """
        size, length = self.loss_mask.shape
        unseen = torch.cat([self.loss_mask.new_ones(size, 1), ~self.loss_mask], 1)
        found = {"tokens": self.tokens, "loss_mask": self.loss_mask, "segments": self.segments}
        found["labels"] = self.tokens.masked_fill(unseen, -100)
        if self.targets is None:
            return found
        return found | self.targets.fields((size, length))

    @classmethod
    def of(cls, fields: Mapping[str, Tensor], codecs: "Codecs") -> "Batch":
        """The inverse of `fields`. UsageError: a tensor is missing, or caches with different codecs are mixed."""
        tokens, loss_mask = fields["tokens"], fields["loss_mask"]
        segments = fields.get("segments")
        batch = cls(tokens, loss_mask, torch.zeros_like(tokens[:, :-1]) if segments is None else segments, None)
        named = (*_TARGETS, "partial")
        flat: dict[str, Any] = {name: value.flatten(0, 1) for name, value in fields.items() if name in named}
        alignment = fields.get("alignment", tokens.new_zeros(len(tokens), 0))
        known: tuple[float, ...] = ()
        sparse = None
        if "ids" in flat:
            if missing := {*_TARGETS, "knots", "num_samples"} - set(fields):
                name = sorted(missing)[0]
                raise UsageError(f"the batch has no tensor '{name}'; make batches by collate, of a cache's sequences")
            absent = flat["ids"].shape[1] - flat["counts"].shape[1]
            flat["counts"] = torch.nn.functional.pad(flat["counts"], (absent, 0))
            stated = torch.cat([alignment.to(fields["knots"].dtype), fields["knots"]], 1)
            knots, num_samples = codecs.read(stated, fields["num_samples"], absent, flat["ids"].shape[1])
            known, knots = knots[: alignment.shape[1]], knots[alignment.shape[1] :]
            sparse = SparseTargets(**flat, top_k=absent, num_samples=num_samples, knots=knots)
        elif alignment.shape[1]:
            known, _ = codecs.read(alignment, torch.zeros_like(alignment[:, 0]), 0, 0)
        if alignment.shape[1]:
            return replace(batch, targets=_aligned(fields, sparse, known))
        if sparse is not None:
            return replace(batch, targets=sparse)
        if "logprobs" in flat:
            return replace(batch, targets=DenseTargets(**flat))
        if "replay" in fields:  # of a mixture, and not of a loop that has lost the targets
            return replace(batch, targets=MixedTargets(((loss_mask.numel(), None),)))
        return batch


def _aligned(fields: Mapping[str, Tensor], near: SparseTargets | None, known: tuple[float, ...]) -> AlignedTargets:
    names = ("chunk_length", "chunk_logprob", "compared")
    if missing := [name for name in names if name not in fields]:
        raise UsageError(f"the batch has no tensor '{missing[0]}'; make batches by collate, of an aligned data set")
    length, logprob, compared = (fields[name].flatten(0, 1) for name in names)
    key, chunks = known
    return AlignedTargets(
        length=length,
        label_logprob=logprob,
        compared=compared,
        near=near,
        cells=CellIndex.by_key(int(key)) if key else None,
        chunks=bool(chunks),
    )


class Codecs:
    """Reads the codec of each batch: knots of beta and number of samples, as Python numbers.

    On a GPU a read waits for all queued work. There only the first batch with as many knots, entries and top-k entries
    is read; later ones are compared with it on the device, where a difference is an error.
    """

    def __init__(self) -> None:
        self._known: dict[tuple[int, int, int, torch.device], tuple[Tensor, Tensor, tuple[tuple[float, ...], int]]] = {}

    def read(self, knots_BG: Tensor, num_samples_B: Tensor, top_k: int, columns: int) -> tuple[tuple[float, ...], int]:
        """Knots and number of samples of a batch of sparse targets. UsageError: its sequences differ in them."""
        shape = knots_BG.shape[1], top_k, columns, knots_BG.device
        if knots_BG.is_cuda and shape in self._known:
            knots_G, num_samples, codec = self._known[shape]
            same = (knots_BG == knots_G).all() & (num_samples_B == num_samples).all()
            torch._assert_async(same, "the batch is of another cache than earlier ones, with other knots or samples")
            return codec
        rows = {(*knots, number) for *knots, number in torch.column_stack([knots_BG, num_samples_B]).tolist()}
        if len(rows) > 1:
            raise UsageError("the batch mixes sequences of caches with different codecs; make batches of one cache")
        *knots, number = rows.pop()
        self._known[shape] = knots_BG[0], num_samples_B[0], (tuple(knots), int(number))
        return self._known[shape][-1]
