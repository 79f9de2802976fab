"""bf16 matrix products with an fp32 result, on a CPU that has AVX512-BF16 and no AMX.

PyTorch's operators round the result of a bf16 product to bf16 on a CPU, and logits may not be rounded. The product in
fp32 that is right instead costs twice as much (71 ms against 32 for 1,024 x 256 x 32,000 on one core of an AMD EPYC).
The kernel that is wanted lies in PyTorch's library all the same, `at::native::cpublas::brgemm`: a block of C in fp32 of
blocks of A and B in bf16, which attention uses. It is called here by its symbol. The mangled name spells the types of
its arguments, so that a PyTorch with another signature does not have it; a probe compares its result before it is
used; and without it nothing is lost but time.

The kernel wants B, here W^T, with pairs of rows interleaved: the weight is packed once a pass, which costs as much
memory as the weight in bf16.

Shape suffixes: R rows, D model width, V vocabulary.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch
from torch import Tensor

from kdtrain.objective.compiling import maybe_compiled

_SYMBOL = "_ZN2at6native7cpublas6brgemmEllllllbPKN3c108BFloat16ES5_Pfb"
_BLOCK = 128
"""Columns of a call: long enough to hide the call, and its part of the weight stays in a core's cache."""


class PackedWeight:
    """The weight of an output head, laid out for the kernel.

    Args:
        weight_VD: bf16, contiguous, on the CPU, D even.
        compile: torch.compile the packing, which then takes half as long.
    """

    def __init__(self, weight_VD: Tensor, compile: bool = False) -> None:
        self.size, self.width = weight_VD.shape
        pairs = weight_VD.detach().contiguous().view(torch.int32)
        whole = self.size - self.size % _BLOCK
        pack = maybe_compiled(_packed, compile)
        parts = [pack(pairs[:whole], _BLOCK)] if whole else []
        self.parts = [*parts, _packed(pairs[whole:], self.size - whole)] if whole < self.size else parts

    def logits(self, hidden_RD: Tensor, out_RV: Tensor) -> Tensor:
        """h W^T into `out_RV`, fp32 with contiguous rows; `hidden_RD` bf16."""
        # The kernel checks nothing.
        assert hidden_RD.dtype == torch.bfloat16 and out_RV.dtype == torch.float32 and out_RV.stride(1) == 1
        assert hidden_RD.shape[1] == self.width and out_RV.shape == (len(hidden_RD), self.size)
        hidden_RD = hidden_RD.contiguous()
        threads = torch.get_num_threads()
        if threads == 1:
            self._run(hidden_RD, out_RV, 0, 1)
        else:
            jobs = [_pool(threads).submit(self._run, hidden_RD, out_RV, i, threads) for i in range(threads)]
            for job in jobs:
                job.result()
        return out_RV

    def _run(self, hidden_RD: Tensor, out_RV: Tensor, first: int, step: int) -> None:
        """Every `step`-th block from `first` on."""
        kernel, (rows, width) = _kernel(), hidden_RD.shape
        assert kernel is not None
        a, c, stride = hidden_RD.data_ptr(), out_RV.data_ptr(), out_RV.stride(0)
        for number, (b, columns) in enumerate(self._blocks()):
            if number % step == first:
                to = c + number * _BLOCK * out_RV.element_size()
                kernel(rows, columns, width, width, columns, stride, False, a, b, to, True)

    def _blocks(self) -> Iterator[tuple[int, int]]:
        """Address and columns of each block."""
        for part in self.parts:
            for block in range(len(part)):
                yield part.data_ptr() + block * part.stride(0) * part.element_size(), part.shape[2]


def _packed(pairs: Tensor, block: int) -> Tensor:
    """[blocks, D/2, block] of pairs of numbers along D, each as one 32-bit number, from [rows, D/2]."""
    return pairs.view(-1, block, pairs.shape[1]).transpose(1, 2).contiguous()


@functools.cache
def usable() -> bool:
    """Whether this CPU and this PyTorch have the kernel, and it multiplies right."""
    if not torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported() or _kernel() is None:
        return False
    g = torch.Generator().manual_seed(0)
    a, b = (torch.randn(rows, 32, generator=g).bfloat16() for rows in (8, _BLOCK + 24))
    made = PackedWeight(b).logits(a, torch.full((8, len(b)), torch.nan))
    return bool((made - a.float() @ b.float().T).abs().max() < 1e-4)


@functools.cache
def _kernel() -> Callable[..., None] | None:
    library = Path(torch.__file__).parent / "lib" / "libtorch_cpu.so"
    try:
        kernel = getattr(ctypes.CDLL(str(library)), _SYMBOL)
    except (OSError, AttributeError):
        return None
    number, address = ctypes.c_int64, ctypes.c_void_p
    kernel.argtypes = [*[number] * 6, ctypes.c_bool, address, address, address, ctypes.c_bool]
    kernel.restype = None
    return kernel


@functools.cache
def _pool(threads: int) -> ThreadPoolExecutor:
    return ThreadPoolExecutor(threads, thread_name_prefix="brgemm")
