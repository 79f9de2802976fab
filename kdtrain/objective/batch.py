"""A micro-batch: sequences of tokens, and a teacher's distribution at each of their positions.

Shape suffixes: B sequences, T positions, N tokens (B*T), V vocabulary, K kept entries, D sampled ones, G knots of beta.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from kdtrain.errors import UsageError
from kdtrain.objective.targets import DenseTargets, SparseTargets, Supervision, Targets

SPARSE = ("ids", "logprobs", "counts", "tail", "label_logprob", "logit_mean", "logit_std")
_WHOLE = ("logprobs", "label_logprob", "policy")


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

    @classmethod
    def joined(cls, parts: "Sequence[Batch]", members: tuple[int, ...] = (), taught: bool = False) -> "Batch":
        """Return the sequences of several batches, one behind the other, as one batch.

        members: the numbers of the members of a mixture that the parts are of, if the loss goes through each by itself.
        taught: whether other batches have targets; rows without any are then a part of the loss like theirs.
        """
        from kdtrain.objective.mixed import MixedTargets, join

        own = [(each.loss_mask.numel(), each.targets) for each in parts]
        targets = MixedTargets(tuple(own), members) if members else join(own)
        if targets is None and taught:
            targets = MixedTargets(((sum(rows for rows, _ in own), None),))
        names = ("tokens", "loss_mask", "segments")
        tokens, loss_mask, segments = (torch.cat([getattr(each, name) for each in parts]) for name in names)
        return cls(tokens, loss_mask, segments, targets)

    def rows(self) -> Supervision:
        """Return the labels, the mask and the targets of all N positions, sequence by sequence."""
        return Supervision(self.tokens[:, 1:].flatten(), self.loss_mask.flatten(), self.targets)

    def each(self, change: Callable[[Tensor], Tensor]) -> "Batch":
        """Return the same batch with `change` applied to every tensor."""
        targets = None if self.targets is None else self.targets.each(change)
        own = change(self.tokens), change(self.loss_mask), change(self.segments)
        return Batch(*own, targets, tuple(map(change, self.states)))

    def fields(self) -> dict[str, Tensor]:
        """Return the batch as named tensors of first dimension B, which any trainer can move, split and concatenate.

        tokens, loss_mask, segments as above; labels [B, T+1], the tokens with -100 where the loss mask is off, for
        trainers that count the tokens of the loss themselves. Sparse targets (`SparseTargets`): ids, logprobs
        [B, T, K], counts [B, T, D] of the last D columns, which were sampled, tail [B, T, 2G], label_logprob,
        logit_mean, logit_std [B, T], knots [B, G] and num_samples [B]. Dense targets: logprobs [B, T, V],
        label_logprob [B, T]. policy [B, T], where a student wrote the text. Other kinds of targets have tensors of
        their own.
        """
        size, length = self.loss_mask.shape
        unseen = torch.cat([self.loss_mask.new_ones(size, 1), ~self.loss_mask], 1)
        found = {"tokens": self.tokens, "loss_mask": self.loss_mask, "segments": self.segments}
        found["labels"] = self.tokens.masked_fill(unseen, -100)
        if self.targets is None:
            return found
        return found | self.targets.fields((size, length))


Codec = tuple[tuple[float, ...], int]
"""The knots of beta, and the number of samples, of sparse targets."""


class Collator:
    """A maker of batches from named tensors, as `Batch.fields` has them, with what all sequences of a data set share.

    codec: of the sparse targets. None: the tensors state it. On a GPU a read waits for all queued work; there only the
    first batch with as many knots, entries and top-k entries is read, and later ones are compared with it on the
    device, where a difference is an error.
    """

    def __init__(self, codec: Codec | None = None) -> None:
        self.codec = codec
        self._known: dict[tuple[int, int, int, torch.device], tuple[Tensor, Tensor, Codec]] = {}

    def batch(self, fields: Mapping[str, Tensor]) -> Batch:
        """Make a batch of named tensors. UsageError: a tensor is missing, or caches with different codecs are mixed."""
        tokens = fields["tokens"]
        segments = fields.get("segments")
        segments = torch.zeros_like(tokens[:, :-1]) if segments is None else segments
        return Batch(tokens, fields["loss_mask"], segments, self.targets(fields))

    def targets(self, fields: Mapping[str, Tensor]) -> Targets | None:
        """Return the targets of a batch; None without a teacher. UsageError: see `batch`."""
        if "compared" in fields:
            raise UsageError(
                "the batch has a student's own tokens and a teacher with another tokenizer; give the data set to the "
                "student too: Student(model, loss, data=...)"
            )
        if "ids" in fields:
            return self.sparse(fields)
        if "logprobs" in fields:
            return DenseTargets(**{k: v.flatten(0, 1) for k, v in fields.items() if k in _WHOLE})
        if "replay" in fields:  # of a mixture, and not of a loop that has lost the targets
            from kdtrain.objective.mixed import MixedTargets

            return MixedTargets(((fields["loss_mask"].numel(), None),))
        return None

    def sparse(self, fields: Mapping[str, Tensor]) -> SparseTargets:
        """Return the sparse targets of a batch. UsageError: see `batch`."""
        needed = (*SPARSE, *(("knots", "num_samples") if self.codec is None else ()))
        if missing := sorted({*needed} - set(fields)):
            raise UsageError(f"the batch has no tensor '{missing[0]}'; make batches by collate, of a cache's sequences")
        names = (*SPARSE, "partial", "policy")
        flat: dict[str, Any] = {name: fields[name].flatten(0, 1) for name in names if name in fields}
        top_k = flat["ids"].shape[1] - flat["counts"].shape[1]
        flat["counts"] = torch.nn.functional.pad(flat["counts"], (top_k, 0))
        knots, num_samples = self.codec or self._read(fields, top_k)
        return SparseTargets(**flat, top_k=top_k, num_samples=num_samples, knots=knots)

    @staticmethod
    def of(data: Any) -> "Collator":
        """Return the collator of a data set, of a part of one, or the one that the members of a mixture share.

        UsageError: they have different ones.
        """
        if (own := getattr(data, "collator", None)) is not None:
            return own  # type: ignore[no-any-return]
        parts = [*getattr(data, "members", ()), *([data.dataset] if hasattr(data, "dataset") else [])]
        found = [each for each in map(Collator.of, parts) if type(each) is not Collator]
        if any(not each.same(found[0]) for each in found):
            raise UsageError("the members of the mixture have different cells; mix views of one cache, or train on one")
        return found[0] if found else Collator()

    def same(self, other: "Collator") -> bool:
        """Return whether this collator and `other` read batches alike."""
        return self.codec == other.codec

    def _read(self, fields: Mapping[str, Tensor], top_k: int) -> Codec:
        knots_BG, num_samples_B = fields["knots"], fields["num_samples"]
        shape = knots_BG.shape[1], top_k, fields["ids"].shape[-1], knots_BG.device
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
