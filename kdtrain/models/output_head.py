"""An output head: the last linear layer of a language model, with what is done to its product."""

from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor

from kdtrain.errors import UsageError


@dataclass(frozen=True)
class OutputHead:
    """The map from hidden states to logits, `softcap(scale * (hidden @ weight^T + bias))`.

    The tensors are the model's own parameters, not copies. Without a weight it is the identity, for a model that is
    not split and returns logits.
    """

    weight: Tensor | None = None
    """[V, D]"""
    bias: Tensor | None = None
    """[V]"""
    scale: float = 1.0
    softcap: float | None = None
    """Bound of the logits: softcap(z) = c tanh(z / c)."""

    def __call__(self, hidden_BTD: Tensor) -> Tensor:
        """Return logits [..., V] of hidden states [..., D], in the dtype of the matrix product."""
        if self.weight is None:
            return hidden_BTD
        bias = None if self.bias is None else self.bias.to(self.weight.dtype)
        return self.shape(F.linear(hidden_BTD.to(self.weight.dtype), self.weight, bias))

    def to(self, device: torch.device) -> "OutputHead":
        """The same head on a device."""
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

    def slope(self, z: Tensor) -> Tensor | float:
        """Derivative of the logits `z` in the product with the weight; 0 where z is masked."""
        if self.softcap is None:
            return self.scale
        return self.scale * (1.0 - (z.clamp(min=-self.softcap) / self.softcap) ** 2)


Head = OutputHead  # the name that `import kdtrain` offers


def refuse_vocabulary(vocab_size: int, cached: int, used: int) -> None:
    """UsageError: a student's `vocab_size` logits cannot hold the ids of a cache (both sizes named).

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
