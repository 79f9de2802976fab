"""bf16 matrix products with an fp32 result, on a CPU that has AVX512-BF16 and no AMX.

PyTorch's operators round the result of a bf16 product to bf16 on a CPU, and logits may not be rounded. The product in
fp32 that is right instead costs twice as much (71 ms against 32 for 1,024 x 256 x 32,000 on one core of an AMD EPYC).
The kernel that is wanted lies in PyTorch's library all the same, `at::native::cpublas::brgemm`: a block of C in fp32 of
blocks of A and B in bf16, which attention uses. It is called here by its symbol. The mangled name spells the types of
its arguments, so that a PyTorch with another signature does not have it; a probe compares its result before it is
used; and without it nothing is lost but time.

The blocks are dealt out to the threads that PyTorch's operators run on, by `GOMP_parallel`, which is what GCC makes of
a parallel region. Threads of Python's own would share their cores with those, which keep spinning for a while after an
operator (24 ms against 17 for the product above on two cores).

The kernel wants B, here W^T, with pairs of rows interleaved: the weight is packed once a pass, which costs as much
memory as the weight in bf16.

Shape suffixes: R rows, D model width, V vocabulary.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from kdtrain.objective import pages
from kdtrain.objective.compiling import maybe_compiled

_SYMBOL = "_ZN2at6native7cpublas6brgemmEllllllbPKN3c108BFloat16ES5_Pfb"
_BLOCK = 128
"""Columns of a call: long enough to hide the call, and its part of the weight stays in a core's cache."""
_THREADING = ("GOMP_parallel", "omp_get_thread_num", "omp_get_num_threads")


class PackedWeight:
    """The weight of an output head, laid out for the kernel.

    Args:
        weight_VD: bf16, contiguous, on the CPU, D even.
        compile: torch.compile the packing, which then takes half as long.
    """

    def __init__(self, weight_VD: Tensor, compile: bool = False) -> None:
        self.size, self.width = weight_VD.shape
        pairs = weight_VD.detach().contiguous().view(torch.int32)
        count, rest = divmod(self.size, _BLOCK)
        self.parts = []
        for blocks, columns in ((count, _BLOCK), (1, rest)):
            if blocks * columns:
                self.parts.append(pages.borrow(_memory(columns), blocks, pairs.shape[1], columns, dtype=pairs.dtype))
                rows, pairs = pairs.split([blocks * columns, len(pairs) - blocks * columns])
                maybe_compiled(_pack, compile and columns == _BLOCK)(rows, self.parts[-1])
        bytes_of_block = _BLOCK * self.width * weight_VD.element_size()
        self.blocks = [
            (part.data_ptr() + block * bytes_of_block, part.shape[2])
            for part in self.parts
            for block in range(len(part))
        ]
        """Address and columns of each block."""

    def close(self) -> None:
        """Give the memory of the blocks back; nothing can be multiplied with any more."""
        for part in self.parts:
            pages.give_back(_memory(part.shape[2]), part)
        self.parts, self.blocks = [], []

    def logits(self, hidden_RD: Tensor, out_RV: Tensor) -> Tensor:
        """h W^T into `out_RV`, fp32 with contiguous rows; `hidden_RD` bf16."""
        # The kernel checks nothing.
        assert hidden_RD.dtype == torch.bfloat16 and out_RV.dtype == torch.float32 and out_RV.stride(1) == 1
        assert hidden_RD.shape[1] == self.width and out_RV.shape == (len(hidden_RD), self.size)
        hidden_RD = hidden_RD.contiguous()
        kernel, (rows, width) = _kernel(), hidden_RD.shape
        assert kernel is not None
        a, c, stride = hidden_RD.data_ptr(), out_RV.data_ptr(), out_RV.stride(0)

        def share(first: int, step: int) -> None:
            for number, (b, columns) in enumerate(self.blocks[first::step]):
                to = c + (first + number * step) * _BLOCK * out_RV.element_size()
                kernel(rows, columns, width, width, columns, stride, False, a, b, to, True)

        _in_threads(share)
        return out_RV


def _memory(columns: int) -> str:
    return "packed weight" if columns == _BLOCK else "end of packed weight"


def _pack(pairs: Tensor, into: Tensor) -> None:
    """Pairs of numbers along D, each as one 32-bit number, from [rows, D/2] to [blocks, D/2, rows of a block]."""
    into.copy_(pairs.view(len(into), into.shape[2], -1).transpose(1, 2))


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
    kernel = getattr(_library(), _SYMBOL, None)
    if kernel is None or not all(hasattr(_library(), name) for name in _THREADING):
        return None
    number, address = ctypes.c_int64, ctypes.c_void_p
    kernel.argtypes = [*[number] * 6, ctypes.c_bool, address, address, address, ctypes.c_bool]
    kernel.restype = None
    return kernel


@functools.cache
def _library() -> ctypes.CDLL | None:
    """PyTorch's own, and the OpenMP library that it is linked to."""
    try:
        return ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libtorch_cpu.so"))
    except OSError:
        return None


def _in_threads(share: Callable[[int, int], None]) -> None:
    """Call `share(number, threads)` on each of PyTorch's threads; an error of one of them is raised."""
    threads, library = torch.get_num_threads(), _library()
    if threads == 1:
        return share(0, 1)
    assert library is not None
    errors: list[BaseException] = []

    def run(_: int | None) -> None:
        try:
            # Fewer threads than were asked for may come.
            share(library.omp_get_thread_num(), library.omp_get_num_threads())
        except BaseException as error:  # a signal's too: ctypes would swallow it
            errors.append(error)

    region = ctypes.CFUNCTYPE(None, ctypes.c_void_p)
    begin = library.GOMP_parallel
    begin.argtypes, begin.restype = [region, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint], None
    begin(region(run), None, threads, 0)
    if errors:
        raise errors[0]
