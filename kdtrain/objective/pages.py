"""Memory of a CPU that a step writes over and that nobody sees after it: it is kept for the next step.

Linux hands out memory by pages of 4 KiB, each when it is first written to, and zeroed: 45 ms for a chunk of logits of
131 MB. PyTorch hands freed memory of that size back at once (that of a GPU it keeps), so that a step would pay for it
again. Passes over it also miss the processor's table of pages; most distributions give pages of 2 MiB to who asks for
them (`madvise`, mode "madvise" in /sys/kernel/mm/transparent_hugepage/enabled), which is advice: where it is not taken,
nothing is lost but time. Large pages that are freed are no good: some virtual machines lose them within two seconds,
and to have them again takes several times as long.

What it gives up: as much memory as a step needs of each kind stays with the process until `release`.
"""

from __future__ import annotations

import ctypes
import functools
import math
import sys
import threading
from collections.abc import Callable

import torch
from torch import Tensor

_PAGE = 2 << 20
_HUGEPAGE = 14
"""MADV_HUGEPAGE of Linux' mman.h."""

_idle: dict[str, list[torch.UntypedStorage]] = {}
_lock = threading.Lock()


def borrow(name: str, *shape: int, dtype: torch.dtype, device: torch.device | str = "cpu") -> Tensor:
    """As `torch.empty`; on a CPU in memory that was given back under `name`, if some of it is large enough.

    Who does not give it back has it for good, and the next one gets other memory.
    """
    if torch.device(device).type != "cpu":
        return torch.empty(shape, dtype=dtype, device=device)
    with _lock:
        idle = _idle.get(name, [])
        fitting = [each for each in idle if each.nbytes() >= math.prod(shape) * dtype.itemsize]
        storage = min(fitting, key=lambda each: each.nbytes(), default=None)
        if storage is None:
            idle.clear()  # the old memory goes before the new one comes
            del fitting
            return _in_large_pages(torch.empty(shape, dtype=dtype))
        idle.remove(storage)
    return torch.empty(0, dtype=dtype).set_(storage, 0, shape)  # type: ignore[call-overload, no-any-return]


def give_back(name: str, tensor: Tensor) -> None:
    """Let the next `borrow` of this name have the memory of `tensor`, which nobody may use any more."""
    if tensor.device.type == "cpu":
        with _lock:
            _idle.setdefault(name, []).append(tensor.untyped_storage())


def release() -> None:
    """Free what nobody has borrowed."""
    with _lock:
        _idle.clear()


def _in_large_pages(tensor: Tensor) -> Tensor:
    """A tensor that was not written to yet, whose memory is asked for in large pages."""
    madvise = _madvise()
    if madvise is not None:
        first = -(-tensor.data_ptr() // _PAGE) * _PAGE
        last = (tensor.data_ptr() + tensor.nbytes) // _PAGE * _PAGE
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
