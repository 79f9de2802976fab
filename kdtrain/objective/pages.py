"""Memory in large pages, for what is made anew at every step and is larger than a hundred megabytes.

Linux hands out memory by pages of 4 KiB, each when it is first written to, and zeroed: 45 ms for a chunk of logits of
131 MB, and passes over it then miss the processor's table of pages. Most distributions give pages of 2 MiB to who asks
for them (`madvise`, mode "madvise" in /sys/kernel/mm/transparent_hugepage/enabled). PyTorch asks for none unless
THP_MEM_ALLOC_ENABLE is set. It is advice: where it is not taken, nothing is lost but time.
"""

from __future__ import annotations

import ctypes
import functools
import sys
from collections.abc import Callable

import torch
from torch import Tensor

_PAGE = 2 << 20
_HUGEPAGE = 14
"""MADV_HUGEPAGE of Linux' mman.h."""


def empty(*shape: int, dtype: torch.dtype, device: torch.device | str = "cpu") -> Tensor:
    """As `torch.empty`; on a CPU with Linux its memory is asked for in large pages."""
    tensor = torch.empty(shape, dtype=dtype, device=device)
    madvise = _madvise()
    if madvise is not None and tensor.device.type == "cpu":
        first = -(-tensor.data_ptr() // _PAGE) * _PAGE
        last = (tensor.data_ptr() + tensor.numel() * tensor.element_size()) // _PAGE * _PAGE
        if last > first:
            madvise(first, last - first, _HUGEPAGE)
    return tensor


@functools.cache
def _madvise() -> Callable[[int, int, int], int] | None:
    if sys.platform != "linux":
        return None
    call = ctypes.CDLL(None).madvise
    call.argtypes, call.restype = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int], ctypes.c_int
    found: Callable[[int, int, int], int] = call
    return found
