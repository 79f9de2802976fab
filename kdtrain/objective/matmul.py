"""The three matrix products of an output head, each in the fastest way that is right on a device.

    u = h W^T            never rounded below fp32: logits rounded to bf16 before the softmax put 4 to 23 % of
                         error into the gradient (Liger-Kernel #1432)
    dHidden = dz W       rounded like the hidden states
    dWeight += dz^T h    summed over chunks in fp32

Inputs in bf16 are multiplied as 16-bit numbers with an fp32 result where the back end can: by `out_dtype` on a
GPU, where dWeight is added up inside the product if this torch can (a probe says so). A CPU has no `out_dtype`. There
it is the kernel of `brgemm` where that can be had, else oneDNN's fp32 product, told that bf16 inputs will do: it rounds
its inputs to bf16 on a CPU with AMX and is exact elsewhere, and for bf16 both are right. The gradients' products take
dz rounded to bf16, which costs as much as rounding their results. fp16 has too few exponents for dz, so that only its
logits are 16-bit products.

oneDNN's fp32 product is also faster than MKL's on some CPUs (2.3 times on an AMD EPYC with AVX-512). Without AMX it
rounds nothing, and takes fp32 inputs as well; a probe proves that before it is used.

Given up: on a CPU the part of dWeight from one chunk is rounded to bf16 before it is added to the rest.

Shape suffixes: R rows of a chunk, D model width, V vocabulary, B a block of it.

Memory of a CPU that a step writes over and that nobody sees after it: it is kept for the next step.

Linux hands out memory by pages of 4 KiB, each when it is first written to, and zeroed: 45 ms for a chunk of logits of
131 MB. PyTorch hands freed memory of that size back at once (that of a GPU it keeps), so that a step would pay for it
again. Passes over it also miss the processor's table of pages; most distributions give pages of 2 MiB to who asks for
them (`madvise`, mode "madvise" in /sys/kernel/mm/transparent_hugepage/enabled), which is advice: where it is not taken,
nothing is lost but time. Large pages that are freed are no good: some virtual machines lose them within two seconds,
and to have them again takes several times as long.

What it gives up: as much memory as a step needs of each kind stays with the process until `release`.

torch.compile for the engine's elementwise work: each function of a module once a process.

The compiler writes an intermediate result to memory, as large as a chunk of logits, once it took 30 operations or is
read four times. A divergence and its gradient go beyond that, and are then six times slower than recomputed (jsd over
16 M logits on one core of an AMD EPYC: 271 ms against 43), hence the options.

bf16 matrix products with an fp32 result, on a CPU that has AVX512-BF16 and no AMX.

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

import contextlib
import ctypes
import functools
import math
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

pass

_BLOCK = 4096
"""Columns of dz that a CPU rounds and multiplies at a time: they, and their part of dWeight, stay in its cache."""

_STRIP = 16_384
"""Rows of dWeight that a GPU makes at a time where it cannot add to them: as many once more in memory."""


class Products:
    """The products of hidden states with the weight of an output head.

    Args:
        hidden_ND: any float dtype, which decides how products are made.
        weight_VD: any float dtype, without padding.
        compile: torch.compile what is not a product.
    """

    def __init__(self, hidden_ND: Tensor, weight_VD: Tensor, compile: bool = False) -> None:
        device, kind = hidden_ND.device.type, hidden_ND.dtype
        self.dtype = torch.promote_types(kind, torch.float32)
        self.round, self.store, self.add = (
            maybe_compiled(each, compile and device == "cpu") for each in (_round, _store, _add)
        )
        self.out_dtype = device == "cuda" and kind in (torch.bfloat16, torch.float16)
        self.narrow_gradient = kind == torch.bfloat16 and (device == "cuda" or (device == "cpu" and _has_bf16()))
        exact = self.dtype == torch.float32 and device == "cpu" and _onednn_is_exact()
        self.onednn = exact or (device == "cpu" and self.narrow_gradient)
        self.narrow_VD = weight_VD.to(kind) if self.out_dtype or self.narrow_gradient else weight_VD
        packs = device == "cpu" and self.narrow_gradient and hidden_ND.shape[1] % 2 == 0 and usable()
        self.packed = PackedWeight(self.narrow_VD, compile) if packs else None
        narrow = self.narrow_gradient and (self.out_dtype or packs)
        self.wide_VD = self.narrow_VD if narrow else weight_VD.to(self.dtype)

    def logits(self, hidden_RD: Tensor, out_RV: Tensor) -> Tensor:
        """h W^T in `self.dtype`; in `out_RV` where the back end can."""
        if self.out_dtype:
            logits_RV: Tensor = torch.ops.aten.mm.dtype_out(hidden_RD, self.narrow_VD.T, self.dtype, out=out_RV)
            return logits_RV
        if self.packed is not None:
            return self.packed.logits(hidden_RD, out_RV)
        with _onednn(self.onednn):
            return torch.mm(hidden_RD.to(self.dtype), self.wide_VD.T, out=out_RV)

    def gradients(
        self, dz_RV: Tensor, hidden_RD: Tensor, into_RD: Tensor | None, into_VD: Tensor | None, first: bool = False
    ) -> None:
        """Write dz W to `into_RD`, rounded to its dtype, and add dz^T h to `into_VD`, which is in `self.dtype`.

        What is None is not made.

        first: whether nothing was written to `into_VD` yet, whatever it holds.
        """
        rows, size = dz_RV.shape
        block = _BLOCK if self.narrow_gradient and not self.out_dtype else size
        # One buffer for all blocks: fresh memory costs several times the rounding.
        narrow = dz_RV.new_empty(rows * min(block, size), dtype=torch.bfloat16) if self.narrow_gradient else None
        sum_RD = None
        for start in range(0, size, block):
            part = slice(start, start + block)
            dz_RB = dz_RV[:, part]
            if narrow is not None:
                # Rounded once for both products.
                dz_RB = self.round(dz_RB, narrow[: dz_RB.numel()].view(dz_RB.shape))
            if into_RD is not None:
                product_RD = self._into_hidden(dz_RB, part)
                if block >= size:
                    sum_RD = product_RD
                else:  # in fp32: each part is rounded once and their sum not again before the end
                    sum_RD = product_RD.to(self.dtype) if sum_RD is None else self.add(product_RD, sum_RD)
            if into_VD is not None:
                self._into_weight(dz_RB, hidden_RD, into_VD[part], first)
        if into_RD is not None and sum_RD is not None:
            into_RD.copy_(sum_RD)

    def _into_hidden(self, dz_RB: Tensor, part: slice) -> Tensor:
        with _onednn(self.onednn and not self.narrow_gradient):
            return torch.mm(dz_RB, self.narrow_VD[part] if self.narrow_gradient else self.wide_VD[part])

    def _into_weight(self, dz_RB: Tensor, hidden_RD: Tensor, into_BD: Tensor, first: bool) -> None:
        if self.narrow_gradient and not self.out_dtype:
            product_BD = torch.mm(dz_RB.T, hidden_RD)
            (self.store if first else self.add)(product_BD, into_BD)
            return
        if first:
            into_BD.zero_()
        if not self.narrow_gradient:
            with _onednn(self.onednn):
                into_BD.addmm_(dz_RB.T, hidden_RD.to(self.dtype))
        elif _adds_in_place(hidden_RD.dtype):
            _add_product(into_BD, dz_RB.T, hidden_RD)
        else:
            for start in range(0, len(into_BD), _STRIP):
                part = slice(start, start + _STRIP)
                into_BD[part].add_(torch.mm(dz_RB[:, part].T, hidden_RD, out_dtype=self.dtype))


def wide_product(left_ND: Tensor, right_OD: Tensor) -> Tensor:
    """`left_ND @ right_OD^T` in at least fp32, not rounded below it; 16-bit operands of a GPU stay 16-bit numbers."""
    kind = left_ND.dtype
    if left_ND.is_cuda and kind == right_OD.dtype and kind in (torch.bfloat16, torch.float16):
        return torch.mm(left_ND, right_OD.T, out_dtype=torch.float32)
    dtype = torch.promote_types(torch.promote_types(kind, right_OD.dtype), torch.float32)
    return left_ND.to(dtype) @ right_OD.to(dtype).T


def _add_product(into_BD: Tensor, left_BR: Tensor, right_RD: Tensor) -> None:
    """Add a product of 16-bit matrices to an fp32 one, where it lies."""
    torch.ops.aten.addmm.dtype_out(into_BD, left_BR, right_RD, into_BD.dtype, out=into_BD)


@functools.cache
def _adds_in_place(kind: torch.dtype) -> bool:
    """Whether `_add_product` works on this GPU and rounds nothing: older releases want a sum as narrow as the rest."""
    into = torch.full((64, 64), 1 + 2.0**-12, device="cuda")  # 1 in bf16
    try:
        _add_product(into, *torch.ones(2, 64, 64, dtype=kind, device="cuda"))
    except (RuntimeError, AttributeError):
        return False
    return bool((into == 65 + 2.0**-12).all())


# Compiled these take a quarter of the time that PyTorch's own operators take on a CPU between two dtypes.


def _round(dz_RB: Tensor, into_RB: Tensor) -> Tensor:
    return into_RB.copy_(dz_RB)


def _store(product: Tensor, into: Tensor) -> Tensor:
    return into.copy_(product)


def _add(product: Tensor, into: Tensor) -> Tensor:
    return into.add_(product)


@contextlib.contextmanager
def _onednn(wanted: bool) -> Iterator[None]:
    """Let fp32 products on a CPU be made by oneDNN, which may take their inputs as bf16.

    The setting belongs to the whole process, and torch.compile refuses to work under it: it is held for one product.
    """
    if not wanted:
        yield
        return
    settings: Any = torch.backends.mkldnn.matmul  # type: ignore[attr-defined]
    before = settings.fp32_precision
    settings.fp32_precision = "bf16"
    try:
        yield
    finally:
        settings.fp32_precision = before


def _has_bf16() -> bool:
    return bool(torch.backends.mkldnn.is_available() and torch.ops.mkldnn._is_mkldnn_bf16_supported())


@functools.cache
def _onednn_is_exact() -> bool:
    """Whether oneDNN, allowed to round its inputs to bf16, multiplies in full fp32 on this CPU."""
    if not _has_bf16() or torch.cpu._is_amx_tile_supported():
        return False
    # 1 + 2^-12 is 1 in bf16: a product that had rounded its inputs would give 64 exactly.
    value = 1 + 2.0**-12
    ones = torch.full((64, 64), value)
    with _onednn(True):
        product = torch.mm(ones, ones)
    return bool((product - 64 * value**2).abs().max() < 1e-4)


_PAGE = 2 << 20
_HUGEPAGE = 14
"""MADV_HUGEPAGE of Linux' mman.h."""

_idle: dict[str, list[torch.UntypedStorage]] = {}
_lock = threading.Lock()


def take_buffer(name: str, *shape: int, dtype: torch.dtype, device: torch.device | str = "cpu") -> Tensor:
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


def return_buffer(name: str, tensor: Tensor) -> None:
    """Let the next `borrow` of this name have the memory of `tensor`, which nobody may use any more."""
    if tensor.device.type == "cpu":
        with _lock:
            _idle.setdefault(name, []).append(tensor.untyped_storage())


def release_buffers() -> None:
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


_OPTIONS: dict[str, Any] = {
    "realize_opcount_threshold": 1000,
    "realize_reads_threshold": 1000,
    "realize_acc_reads_threshold": 1000,
}


@functools.cache
def _compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    return torch.compile(function, dynamic=False, options=_OPTIONS)


def maybe_compiled(function: Callable[..., Any], compile: bool) -> Callable[..., Any]:
    """`function`, or its compiled form, which is made once a process; `function` must be a module's own."""
    return _compiled(function) if compile else function


pass

_SYMBOL = "_ZN2at6native7cpublas6brgemmEllllllbPKN3c108BFloat16ES5_Pfb"
_PACK_BLOCK = 128
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
        count, rest = divmod(self.size, _PACK_BLOCK)
        self.parts = []
        for blocks, columns in ((count, _PACK_BLOCK), (1, rest)):
            if blocks * columns:
                self.parts.append(take_buffer(_memory(columns), blocks, pairs.shape[1], columns, dtype=pairs.dtype))
                rows, pairs = pairs.split([blocks * columns, len(pairs) - blocks * columns])
                maybe_compiled(_pack, compile and columns == _PACK_BLOCK)(rows, self.parts[-1])
        bytes_of_block = _PACK_BLOCK * self.width * weight_VD.element_size()
        self.blocks = [
            (part.data_ptr() + block * bytes_of_block, part.shape[2])
            for part in self.parts
            for block in range(len(part))
        ]
        """Address and columns of each block."""

    def close(self) -> None:
        """Give the memory of the blocks back; nothing can be multiplied with any more."""
        for part in self.parts:
            return_buffer(_memory(part.shape[2]), part)
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
                to = c + (first + number * step) * _PACK_BLOCK * out_RV.element_size()
                kernel(rows, columns, width, width, columns, stride, False, a, b, to, True)

        _in_threads(share)
        return out_RV


def _memory(columns: int) -> str:
    return "packed weight" if columns == _PACK_BLOCK else "end of packed weight"


def _pack(pairs: Tensor, into: Tensor) -> None:
    """Pairs of numbers along D, each as one 32-bit number, from [rows, D/2] to [blocks, D/2, rows of a block]."""
    into.copy_(pairs.view(len(into), into.shape[2], -1).transpose(1, 2))


@functools.cache
def usable() -> bool:
    """Whether this CPU and this PyTorch have the kernel, and it multiplies right."""
    if not torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported() or _kernel() is None:
        return False
    g = torch.Generator().manual_seed(0)
    a, b = (torch.randn(rows, 32, generator=g).bfloat16() for rows in (8, _PACK_BLOCK + 24))
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
