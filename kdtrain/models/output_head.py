"""An output head: the last linear layer of a language model, with what is done to its product, or a part of it.

A rank may hold some rows of the weight, and others the rest. Losses and metrics ask for columns of the logits by the
ids of the whole vocabulary, and for sums over all of it, through the head, so that each rank of the group gets the same
answers; for a whole head these are plain operators on the logits.

Shape suffixes: R rows, V columns of this part, E ids of a row.
"""

from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from kdtrain.errors import UsageError


@dataclass(frozen=True)
class HeadPart:
    """The map from hidden states to logits, `softcap(scale * (hidden @ weight^T + bias))`.

    The tensors are the model's own parameters, not copies. Without a weight it is the identity, for a model that is
    not split and returns logits.

    Where the ranks of `group`, a process group, each hold a part of the rows, the weight's first row is that of the id
    `first`, and `size` counts the ids of the whole vocabulary; by default this is the whole head. Cells of several
    tokens need a whole one.
    """

    weight: Tensor | None = None
    """[V, D]"""
    bias: Tensor | None = None
    """[V]"""
    scale: float = 1.0
    softcap: float | None = None
    """Bound of the logits: softcap(z) = c tanh(z / c)."""
    first: int = 0
    size: int | None = None
    group: Any = None

    def __call__(self, hidden_BTD: Tensor) -> Tensor:
        """Return logits [..., V] of hidden states [..., D], in the dtype of the product; of parts without gradients."""
        if self.weight is None:
            return hidden_BTD
        if self.group is not None:
            own = replace(self.gathered(), group=None)(hidden_BTD).detach()
            assert self.size is not None
            return self.sum(F.pad(own, (self.first, self.size - self.first - own.shape[-1])))
        bias = None if self.bias is None else self.bias.to(self.weight.dtype)
        return self.shape(F.linear(hidden_BTD.to(self.weight.dtype), self.weight, bias))

    def to(self, device: torch.device) -> "HeadPart":
        """Return the same head on a device."""
        weight, bias = (None if each is None else each.to(device) for each in (self.weight, self.bias))
        return replace(self, weight=weight, bias=bias)

    def shape(self, product: Tensor) -> Tensor:
        """Apply scale and soft cap to the product with the weight, bias included; in place where it has no gradient."""
        if product.requires_grad:
            logits = product if self.scale == 1.0 else product * self.scale
            return logits if self.softcap is None else self.softcap * torch.tanh(logits / self.softcap)
        if self.scale != 1.0:
            product.mul_(self.scale)
        return product if self.softcap is None else product.div_(self.softcap).tanh_().mul_(self.softcap)

    def gathered(self, size: int | None = None) -> "HeadPart":
        """Return the head with tensors that are sharded over data ranks (FSDP2's DTensor) gathered.

        Their gradient is the sum over ranks, of which each keeps its shard: a loss is divided by the tokens of all.

        size: ids of the vocabulary without padding, if it is to know them.
        """

        def whole(tensor: Any) -> Any:
            if not hasattr(tensor, "full_tensor"):
                return tensor
            from torch.distributed.tensor import Partial, Replicate

            if self.group is None:
                return tensor.full_tensor(grad_placements=[Partial()] * tensor.device_mesh.ndim)
            *data, own = tensor.placements  # the last dimension of the mesh is that of the parts, which stay
            if data:
                tensor = tensor.redistribute(placements=[*(Replicate() for _ in data), own])
            return tensor.to_local(grad_placements=[*(Partial() for _ in data), own])

        return replace(self, weight=whole(self.weight), bias=whole(self.bias), size=size or self.size)

    def columns(self, vocab_size: int) -> int:
        """Return how many rows of the weight belong to the first `vocab_size` ids; the others are padding."""
        if self.weight is None:
            return vocab_size
        return min(max(vocab_size - self.first, 0), len(self.weight))

    def sum(self, own: Tensor) -> Tensor:
        """Return the sum over the parts, entry by entry; every rank of the group must call it, and all below."""
        if self.group is None:
            return own
        from kdtrain.ranks import all_reduce_sum  # one who reads a cache has no ranks

        return all_reduce_sum(own, self.group)

    def largest(self, own: Tensor) -> Tensor:
        """Return the largest over the parts, entry by entry."""
        if self.group is None:
            return own
        from kdtrain.ranks import agreed_max

        return agreed_max(own, self.group)

    def take(self, z_RV: Tensor, ids_RE: Tensor) -> Tensor:
        """Return the logits [R, E] of ids."""
        if self.group is None:
            return z_RV.gather(1, ids_RE)
        column_RE, here_RE = self._find(z_RV, ids_RE)
        return self.sum(z_RV.gather(1, column_RE).masked_fill(~here_RE, 0.0))

    def places(self, into_RV: Tensor, ids_RE: Tensor, values_RE: Any) -> tuple[Tensor, Any]:
        """Return the columns [R, E] of `into_RV` at which to write the values of ids, and the values, or one of all.

        In place of an id of another part it repeats one of the row that is here, or what the first column holds. An id
        that comes twice in a row has the same value.
        """
        if self.group is None:
            return ids_RE, values_RE
        values_RE = values_RE + into_RV.new_zeros(ids_RE.shape)
        column_RE, here_RE = self._find(into_RV, ids_RE)
        every_E = torch.arange(ids_RE.shape[1], device=ids_RE.device)
        own_RE = torch.where(here_RE, every_E, here_RE.int().argmax(1, keepdim=True))
        values_RE = torch.where(here_RE.any(1, keepdim=True), values_RE.gather(1, own_RE), into_RV[:, :1])
        return column_RE.gather(1, own_RE), values_RE

    def most_likely(self, z_RV: Tensor) -> tuple[Tensor, Tensor]:
        """Return the largest logit [R], and its id, the first of several."""
        top_R, id_R = z_RV.max(dim=-1)
        if self.group is None:
            return top_R, id_R
        highest_R = self.largest(top_R)
        id_R = (id_R + self.first).masked_fill(top_R < highest_R, 1 << 62)
        return highest_R, -self.largest(-id_R)

    def log_sum_exp(self, z_RV: Tensor) -> Tensor:
        """Return log sum exp(z), [R]."""
        lse_R = torch.logsumexp(z_RV, dim=-1)
        if self.group is None:
            return lse_R
        top_R = self.largest(lse_R)
        return top_R + self.sum((lse_R - top_R).exp()).log()

    def _find(self, z_RV: Tensor, ids_RE: Tensor) -> tuple[Tensor, Tensor]:
        """Return the column of each id, 0 for an id of another part, and which ids are here."""
        column_RE = ids_RE - self.first
        here_RE = (column_RE >= 0) & (column_RE < z_RV.shape[1])
        return column_RE.masked_fill(~here_RE, 0), here_RE

    def slope(self, z: Tensor) -> Tensor | float:
        """Return the derivative of the logits `z` in the product with the weight; 0 where z is masked."""
        if self.softcap is None:
            return self.scale
        return self.scale * (1.0 - (z.clamp(min=-self.softcap) / self.softcap) ** 2)


Head = HeadPart  # the name that `import kdtrain` offers


def refuse_vocabulary(vocab_size: int, cached: int, used: int) -> None:
    """Raise a UsageError if a student's `vocab_size` logits cannot hold the ids of a cache (both sizes named).

    More rows than the teacher's are fine, the trainer ignores them. Fewer are fine while only padding is missing: the
    tokenizer fits, and the difference is at most 1,024 or 1 % of the teacher's rows.

    cached: rows of the teacher's output head. used: entries of its tokenizer.
    """
    if vocab_size >= cached or (vocab_size >= used and cached - vocab_size <= max(1024, cached // 100)):
        return
    raise UsageError(
        f"the student has a vocabulary of {vocab_size}, the cache one of {cached} (tokenizer {used}): "
        f"give a fresh student a vocab_size of {cached}; one with a tokenizer of its own is trained across tokenizers, "
        "by --cross-tokenizer or the rows of aligned(tokenizer)"
    )
