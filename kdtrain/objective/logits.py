"""Logits of a few rows: what an output head is to the objective, and how many rows are worked on at a time.

Hidden states and weight are multiplied in fp32 whatever their dtype, because logits rounded to bf16 before
the softmax put 4 to 23 % of error into the gradient (Liger-Kernel #1432). What this gives up is the speed of
16-bit products.

Shape suffixes: R rows of a chunk, D model width, V vocabulary (without padding), P rows of the weight (V and
padding).
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

NEVER = -1e30
"""Logit of what is masked out. Finite, so that 0 * NEVER is 0 and no gradient is NaN."""

_CHUNK_ELEMENTS = 1 << 24


class Head(Protocol):
    """An output head, logits = softcap(scale * (h @ weight^T + bias)); without a weight h are the logits."""

    @property
    def weight(self) -> Tensor | None:
        """[P,D], or None."""

    @property
    def bias(self) -> Tensor | None:
        """[P], or None."""

    @property
    def scale(self) -> float:
        """Factor on the logits, before the cap."""

    @property
    def softcap(self) -> float | None:
        """Bound of the logits, or None."""


def chunk_rows(vocab_size: int, width: int, dtype: torch.dtype) -> int:
    """Rows of a chunk: a power of two, at most 16 M numbers in fp32 or 1,024 rows.

    A pure function of its arguments, because the order of summation, and so a resumed run, depends on it.
    """
    computing = torch.promote_types(dtype, torch.float32)
    most = _CHUNK_ELEMENTS * 4 // computing.itemsize // max(vocab_size, width)
    return min(1024, 1 << max(0, most.bit_length() - 1))


def chunk_logits(hidden_RD: Tensor, head: Head, vocab_size: int) -> Tensor:
    """Logits [R,V] of some rows, in at least fp32 and never rounded below it; a tensor of its own."""
    dtype = torch.promote_types(hidden_RD.dtype, torch.float32)
    weight_VD, bias_V = (None if x is None else x[:vocab_size].to(dtype) for x in (head.weight, head.bias))
    return make_logits(hidden_RD.to(dtype), weight_VD, bias_V, head.scale, head.softcap, vocab_size)


def make_logits(
    hidden_RD: Tensor,
    weight_VD: Tensor | None,
    bias_V: Tensor | None,
    scale: float,
    softcap: float | None,
    size: int,
) -> Tensor:
    """Logits [R,V] in the dtype of the inputs; weight and bias are cut to V = `size` already."""
    if weight_VD is None:
        u_RV = hidden_RD[:, :size].clamp(min=NEVER)
    else:
        u_RV = hidden_RD @ weight_VD.T
    if bias_V is not None:
        u_RV += bias_V
    if scale != 1.0:
        u_RV *= scale
    if softcap is not None:
        u_RV = u_RV.div_(softcap).tanh_().mul_(softcap)
    return u_RV


def cap_slope(z: Tensor, softcap: float | None) -> Tensor | float:
    """dz/du / scale of the soft cap, from z; 0 where z is masked."""
    return 1.0 if softcap is None else 1.0 - (z.clamp(min=-softcap) / softcap) ** 2
