"""Logits of a chunk of rows: the objective's interface to an output head, and the size of a chunk.

Logits are in at least fp32 whatever the dtype of hidden states and weight, because logits rounded to bf16 before
the softmax put 4 to 23 % of error into the gradient (Liger-Kernel #1432); `matmul` computes them fast.

Shape suffixes: R rows of a chunk, D model width, V vocabulary (without padding), P rows of the weight (V and
padding).
"""

from __future__ import annotations

import torch
from torch import Tensor

from kdtrain.models.output_head import HeadPart
from kdtrain.objective.engine import matmul
from kdtrain.objective.statistics import NEVER

_CHUNK_ELEMENTS = {"cpu": 40_000_000, "cuda": 2**28}
"""Numbers of a chunk in fp32. A GPU needs few chunks a step: each starts up to twenty kernels beside its products, and
reads and writes the whole of dWeight."""


WEIGHT_CHUNKS = {"cuda": 4}
"""Chunks whose 16-bit gradients in the logits wait for one product of dWeight, which reads and writes all of the fp32
dWeight however many rows it adds up; 1 elsewhere."""


def chunk_rows(vocab_size: int, width: int, dtype: torch.dtype, device: str = "cpu") -> int:
    """Return the rows of a chunk: a power of two, at most 40 M numbers in fp32 (160 MB; 1 GiB on a GPU) or 2,048 rows.

    A pure function of its arguments, because the order of summation, and so a resumed run, depends on it.
    """
    computing = torch.promote_types(dtype, torch.float32)
    most = _CHUNK_ELEMENTS.get(device, _CHUNK_ELEMENTS["cpu"]) * 4 // computing.itemsize // max(vocab_size, width)
    return min(2048, 1 << max(0, most.bit_length() - 1))


def chunk_logits(hidden_RD: Tensor, head: HeadPart, vocab_size: int) -> Tensor:
    """Compute the logits [R,V] of some rows, in at least fp32 and never rounded below it; a new tensor."""
    dtype = torch.promote_types(hidden_RD.dtype, torch.float32)
    vocab_size = head.columns(vocab_size)
    if head.weight is None:
        u_RV = _bare(hidden_RD.to(dtype), vocab_size)
    else:
        u_RV = matmul.wide_product(hidden_RD, head.weight[:vocab_size])
    return _shaped(u_RV, _bounded_bias(head, vocab_size, dtype), head)


class ChunkLogits:
    """Logits of one chunk of rows after another, all in one buffer: fresh memory would take as long as a product.

    `narrow`: gradients in the logits may be in 16 bits, beside them; `weighs`: for dWeight too.
    """

    def __init__(
        self,
        hidden_ND: Tensor,
        head: HeadPart,
        vocab_size: int,
        chunk: int,
        compile: bool,
        narrow: bool = False,
        weighs: bool = True,
    ) -> None:
        self.size = vocab_size = head.columns(vocab_size)
        self.head, self.chunk = head, chunk
        self.dtype = torch.promote_types(hidden_ND.dtype, torch.float32)
        weight = head.weight
        self.products = None if weight is None else matmul.Products(hidden_ND, weight[:vocab_size], compile)
        self.bias_V = _bounded_bias(head, vocab_size, self.dtype)
        rows = 0 if self.products is None else min(chunk, len(hidden_ND))
        self.buffer_RV = matmul.take_rows("logits", rows, vocab_size, dtype=self.dtype, device=hidden_ND.device)
        kind = None if self.products is None else self.products.gradient_dtype
        self.narrow_RV: Tensor | None = None
        self.held = chunk
        """Rows whose gradients in the logits wait for one product of dWeight."""
        if narrow and kind not in (None, self.dtype):
            self.held *= WEIGHT_CHUNKS.get(hidden_ND.device.type, 1) if weighs else 1
            rows = min(self.held, len(hidden_ND))
            self.narrow_RV = matmul.take_rows("logit gradient", rows, vocab_size, dtype=kind, device=hidden_ND.device)

    def __call__(self, hidden_RD: Tensor) -> Tensor:
        """Compute logits [R,V], in at least fp32."""
        if self.products is None:
            u_RV = _bare(hidden_RD.to(self.dtype), self.size)
        else:
            u_RV = self.products.logits(hidden_RD, self.buffer_RV[: len(hidden_RD)])
        return _shaped(u_RV, self.bias_V, self.head)

    def narrow(self, start: int, rows: int) -> Tensor | None:
        """Return the buffer for the gradient in a chunk's logits, [R,V] in 16 bits; None if it replaces the logits."""
        return None if self.narrow_RV is None else self.narrow_RV[start % self.held :][:rows]

    def close(self) -> None:
        """Return the buffers; logits and gradients become invalid."""
        matmul.return_buffer("logits", self.buffer_RV)
        if self.narrow_RV is not None:
            matmul.return_buffer("logit gradient", self.narrow_RV)


def _bare(logits_RP: Tensor, vocab_size: int) -> Tensor:
    """Return a copy [R,V] of the logits of a model without a split head, -inf bounded by `NEVER`."""
    return logits_RP[:, :vocab_size].clamp(min=NEVER).contiguous()


def _bounded_bias(head: HeadPart, vocab_size: int, dtype: torch.dtype) -> Tensor | None:
    """Return the bias [V] without padding, -inf bounded by `NEVER`."""
    return None if head.bias is None else head.bias[:vocab_size].to(dtype).clamp(min=NEVER)


def _shaped(u_RV: Tensor, bias_V: Tensor | None, head: HeadPart) -> Tensor:
    """Return the logits from the product with the weight, in its memory."""
    return head.shape(u_RV if bias_V is None else u_RV.add_(bias_V))
