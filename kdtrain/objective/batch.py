"""A micro-batch: sequences of tokens, and what a teacher said about each of their positions.

Shape suffixes: B sequences, T positions, N tokens (B*T), V vocabulary, K kept entries, D sampled ones, G knots of beta.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

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

    def fields(self) -> dict[str, Tensor]:
        """The batch as named tensors whose first dimension is B, which any trainer can move, split and concatenate.

        tokens, loss_mask, segments as above; labels [B, T+1], the tokens with -100 where the loss mask is off, for
        trainers that count the tokens of the loss themselves. Sparse targets (`SparseTargets`): ids, logprobs
        [B, T, K], counts [B, T, D] of the last D columns, which were sampled, tail [B, T, 2G], label_logprob,
        logit_mean, logit_std [B, T], knots [B, G] and num_samples [B]. Dense targets: logprobs [B, T, V],
        label_logprob [B, T].
        """
        size, length = self.loss_mask.shape
        unseen = torch.cat([self.loss_mask.new_ones(size, 1), ~self.loss_mask], 1)
        found = {"tokens": self.tokens, "loss_mask": self.loss_mask, "segments": self.segments}
        found["labels"] = self.tokens.masked_fill(unseen, -100)
        if self.targets is None:
            return found
        return found | self.targets.fields((size, length))

    @classmethod
    def of(cls, fields: Mapping[str, Tensor], knots: tuple[float, ...] = (), num_samples: int = 0) -> "Batch":
        """The inverse of `fields`. knots, num_samples: those of sparse targets, as plain Python numbers."""
        tokens, loss_mask = fields["tokens"], fields["loss_mask"]
        segments = fields.get("segments")
        batch = cls(tokens, loss_mask, torch.zeros_like(tokens[:, :-1]) if segments is None else segments, None)
        flat: dict[str, Any] = {name: value.flatten(0, 1) for name, value in fields.items() if name in _TARGETS}
        if "ids" in flat:
            absent = flat["ids"].shape[1] - flat["counts"].shape[1]
            flat["counts"] = torch.nn.functional.pad(flat["counts"], (absent, 0))
            sparse = SparseTargets(**flat, top_k=absent, num_samples=num_samples, knots=knots)
            return replace(batch, targets=sparse)
        return replace(batch, targets=DenseTargets(**flat)) if "logprobs" in flat else batch
