"""Logits of a chunk of rows: the objective's interface to an output head, and the size of a chunk.

Logits are in at least fp32 whatever the dtype of hidden states and weight, because logits rounded to bf16 before
the softmax put 4 to 23 % of error into the gradient (Liger-Kernel #1432); `matmul` computes them fast.

Shape suffixes: R rows of a chunk, D model width, V vocabulary (without padding), P rows of the weight (V and
padding).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from kdtrain.objective.matmul import wide_product

NEVER = -1e30
"""Logit of a masked entry. Finite, so that 0 * NEVER is 0 and no gradient is NaN."""

_CHUNK_ELEMENTS = {"cpu": 40_000_000, "cuda": 2**28}
"""Numbers of a chunk in fp32. A GPU needs few chunks a step: each starts up to twenty kernels beside its products, and
reads and writes the whole of dWeight."""


_WEIGHT_CHUNKS = {"cuda": 4}
"""Chunks whose 16-bit gradients in the logits wait for one product of dWeight, which reads and writes all of the fp32
dWeight however many rows it adds up."""


class Head(Protocol):
    """An output head: logits = softcap(scale * (h @ weight^T + bias)). Without a weight, h are the logits."""

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


@dataclass(frozen=True, kw_only=True)
class WholeHead:
    """An output head with whole tensors; the fields are those of `Head`."""

    weight: Tensor | None
    bias: Tensor | None
    scale: float
    softcap: float | None

    @classmethod
    def of(cls, head: Head) -> WholeHead:
        """The head, with tensors that are sharded over ranks (FSDP2's DTensor) gathered."""
        return cls(weight=_whole(head.weight), bias=_whole(head.bias), scale=head.scale, softcap=head.softcap)


def _whole(tensor: Tensor | None) -> Tensor | None:
    """A DTensor gathered; any other tensor unchanged.

    Its gradient is the sum over ranks, of which each keeps its shard: a loss is divided by the tokens of all ranks.
    """
    sharded: Any = tensor
    if not hasattr(sharded, "full_tensor"):
        return tensor
    from torch.distributed.tensor import Partial

    return sharded.full_tensor(grad_placements=[Partial()] * sharded.device_mesh.ndim)  # type: ignore[no-any-return]


def chunk_rows(vocab_size: int, width: int, dtype: torch.dtype, device: str = "cpu") -> int:
    """Rows of a chunk: a power of two, at most 40 M numbers in fp32 (160 MB; 1 GiB on a GPU) or 2,048 rows.

    A pure function of its arguments, because the order of summation, and so a resumed run, depends on it.
    """
    computing = torch.promote_types(dtype, torch.float32)
    most = _CHUNK_ELEMENTS.get(device, _CHUNK_ELEMENTS["cpu"]) * 4 // computing.itemsize // max(vocab_size, width)
    return min(2048, 1 << max(0, most.bit_length() - 1))


def weight_chunks(device: str) -> int:
    """Chunks whose share of dWeight is one product, where the gradient in the logits is in 16 bits."""
    return _WEIGHT_CHUNKS.get(device, 1)


def chunk_logits(hidden_RD: Tensor, head: Head, vocab_size: int) -> Tensor:
    """Logits [R,V] of some rows, in at least fp32 and never rounded below it; a new tensor."""
    dtype = torch.promote_types(hidden_RD.dtype, torch.float32)
    if head.weight is None:
        u_RV = bare_logits(hidden_RD.to(dtype), vocab_size)
    else:
        u_RV = wide_product(hidden_RD, head.weight[:vocab_size])
    return shape_logits(u_RV, bounded_bias(head.bias, vocab_size, dtype), head.scale, head.softcap)


def bare_logits(logits_RP: Tensor, vocab_size: int) -> Tensor:
    """A copy [R,V] of the logits of a model without a split head, -inf bounded by `NEVER`."""
    return logits_RP[:, :vocab_size].clamp(min=NEVER).contiguous()


def bounded_bias(bias_P: Tensor | None, vocab_size: int, dtype: torch.dtype) -> Tensor | None:
    """The bias [V] without padding, -inf bounded by `NEVER`."""
    return None if bias_P is None else bias_P[:vocab_size].to(dtype).clamp(min=NEVER)


def shape_logits(u_RV: Tensor, bias_V: Tensor | None, scale: float, softcap: float | None) -> Tensor:
    """Apply bias, scale and soft cap, in place."""
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
