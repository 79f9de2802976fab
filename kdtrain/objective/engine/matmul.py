"""The three matrix products of an output head, each in the fastest way that is accurate on a device.

    u = h W^T            never rounded below fp32: logits rounded to bf16 before the softmax put 4 to 23 % of
                         error into the gradient (Liger-Kernel #1432)
    dHidden = dz W       rounded like the hidden states; in fp32 where a sum over ranks follows
    dWeight += dz^T h    summed over chunks in fp32

Inputs in bf16 are multiplied as 16-bit numbers with an fp32 result where the back end can: on a GPU by `out_dtype`,
where dWeight is added up inside the product if this torch can (a probe decides). A CPU has no `out_dtype`. There the
logits are oneDNN's fp32 product, which may take its inputs as bf16: on a CPU with AMX it rounds them, elsewhere it is
exact, and for bf16 inputs both are exact. The gradients' products take dz rounded to bf16, an error as large as that of
rounding their results. fp16 has too few exponents for dz, so only its logits are 16-bit products. oneDNN's fp32 product
is also faster than MKL's on some CPUs; without AMX it takes fp32 inputs as well, once a probe has proven it exact.

Given up: on a CPU the part of dWeight from one chunk is rounded to bf16 before it is added to the rest; a CPU with
AVX512-BF16 and no AMX makes bf16 logits at the price of an fp32 product, because PyTorch has no operator for a bf16
product with an fp32 result; and the process keeps the large buffers of a step (`take_buffer`) until `release_buffers`.

Shape suffixes: R rows of a chunk, D model width, V vocabulary, B a block of it.
"""

from __future__ import annotations

import contextlib
import functools
import math
import threading
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

_BLOCK = 4096
"""Columns of dz that a CPU rounds and multiplies at a time: these and their part of dWeight stay in its cache."""

_STRIP = 16_384
"""Rows of dWeight that a GPU computes at a time if it cannot add in place: as many rows of extra memory."""


class Products:
    """The products of hidden states with the weight of an output head.

    Args:
        hidden_ND: any float dtype, which decides how products are computed.
        weight_VD: any float dtype, without padding.
        compile: torch.compile the elementwise work.
    """

    def __init__(self, hidden_ND: Tensor, weight_VD: Tensor, compile: bool = False) -> None:
        device, kind = hidden_ND.device.type, hidden_ND.dtype
        self.dtype = torch.promote_types(kind, torch.float32)
        self.store, self.add = (maybe_compiled(each, compile and device == "cpu") for each in (_store, _add))
        self.out_dtype = device == "cuda" and kind in (torch.bfloat16, torch.float16)
        narrow = kind == torch.bfloat16 and (device == "cuda" or (device == "cpu" and _has_bf16()))
        self.gradient_dtype = kind if narrow else self.dtype
        """Of the gradient in the logits that `gradients` takes; fp16 has too few exponents for it."""
        exact = self.dtype == torch.float32 and device == "cpu" and _onednn_is_exact()
        self.onednn = exact or (device == "cpu" and narrow)
        self.narrow_VD = weight_VD.to(kind) if self.out_dtype or narrow else weight_VD
        self.wide_VD = self.narrow_VD if narrow and self.out_dtype else weight_VD.to(self.dtype)

    def logits(self, hidden_RD: Tensor, out_RV: Tensor) -> Tensor:
        """Return h W^T in `self.dtype`, written to `out_RV`."""
        if self.out_dtype:
            logits_RV: Tensor = torch.ops.aten.mm.dtype_out(hidden_RD, self.narrow_VD.T, self.dtype, out=out_RV)
            return logits_RV
        with _onednn(self.onednn):
            return torch.mm(hidden_RD.to(self.dtype), self.wide_VD.T, out=out_RV)

    def gradients(
        self, dz_RV: Tensor, hidden_RD: Tensor, into_RD: Tensor | None, into_VD: Tensor | None, first: bool = False
    ) -> None:
        """Write dz W to `into_RD`, rounded to its dtype, and add dz^T h to `into_VD`, which is in `self.dtype`.

        A result whose output is None is not computed. first: overwrite `into_VD` instead of adding to it.

        Args:
            dz_RV: in `gradient_dtype`.
        """
        block = _BLOCK if self.gradient_dtype != self.dtype and not self.out_dtype else dz_RV.shape[1]
        sum_RD = None
        for start in range(0, dz_RV.shape[1], block):
            part = slice(start, start + block)
            if into_RD is not None:
                product_RD = self._into_hidden(dz_RV[:, part], part, into_RD.dtype)
                # In fp32: each part is rounded once, and their sum only at the end.
                sum_RD = product_RD.to(self.dtype) if sum_RD is None else self.add(product_RD, sum_RD)
            if into_VD is not None:
                self._into_weight(dz_RV[:, part], hidden_RD, into_VD[part], first)
        if into_RD is not None and sum_RD is not None:
            into_RD.copy_(sum_RD)

    def _into_hidden(self, dz_RB: Tensor, part: slice, dtype: torch.dtype) -> Tensor:
        if self.out_dtype and self.gradient_dtype != self.dtype:  # bf16 products add up V numbers: not in bf16
            return torch.mm(dz_RB, self.narrow_VD[part], out_dtype=self.dtype)
        if self.dtype in (self.gradient_dtype, dtype):
            with _onednn(self.onednn), _tf32(self.out_dtype):
                return torch.mm(dz_RB.to(self.dtype), self.wide_VD[part])
        return torch.mm(dz_RB, self.narrow_VD[part])

    def _into_weight(self, dz_RB: Tensor, hidden_RD: Tensor, into_BD: Tensor, first: bool) -> None:
        if self.gradient_dtype == self.dtype:
            with _onednn(self.onednn), _tf32(self.out_dtype):
                torch.addmm(into_BD, dz_RB.T, hidden_RD.to(self.dtype), beta=0 if first else 1, out=into_BD)
        elif not self.out_dtype:
            product_BD = torch.mm(dz_RB.T, hidden_RD)
            (self.store if first else self.add)(product_BD, into_BD)
        elif first:
            torch.ops.aten.mm.dtype_out(dz_RB.T, hidden_RD, self.dtype, out=into_BD)
        elif _adds_in_place(hidden_RD.dtype, hidden_RD.device):
            _add_product(into_BD, dz_RB.T, hidden_RD)
        else:
            for start in range(0, len(into_BD), _STRIP):
                part = slice(start, start + _STRIP)
                into_BD[part].add_(torch.mm(dz_RB[:, part].T, hidden_RD, out_dtype=self.dtype))


def wide_product(left_ND: Tensor, right_OD: Tensor) -> Tensor:
    """Return `left_ND @ right_OD^T` in at least fp32, not rounded below; on a GPU 16-bit operands are not converted."""
    kind = left_ND.dtype
    if left_ND.is_cuda and kind == right_OD.dtype and kind in (torch.bfloat16, torch.float16):
        return torch.mm(left_ND, right_OD.T, out_dtype=torch.float32)
    dtype = torch.promote_types(torch.promote_types(kind, right_OD.dtype), torch.float32)
    return left_ND.to(dtype) @ right_OD.to(dtype).T


def _add_product(into_BD: Tensor, left_BR: Tensor, right_RD: Tensor) -> None:
    """Add a product of 16-bit matrices to an fp32 matrix, in place."""
    torch.ops.aten.addmm.dtype_out(into_BD, left_BR, right_RD, into_BD.dtype, out=into_BD)


@functools.cache
def _adds_in_place(kind: torch.dtype, device: torch.device) -> bool:
    """Return whether `_add_product` works on this GPU and rounds nothing: older PyTorch refuses an fp32 sum."""
    into = torch.full((64, 64), 1 + 2.0**-12, device=device)
    ones = torch.ones(64, 64, dtype=kind, device=device)
    try:
        _add_product(into, ones, ones)  # 1 + 2^-12 is 1 in bf16
    except (RuntimeError, AttributeError):
        return False
    return bool((into == 65 + 2.0**-12).all())


# Compiled, these take a quarter of the time of PyTorch's own operators between two dtypes on a CPU.


def _store(product: Tensor, into: Tensor) -> Tensor:
    return into.copy_(product)


def _add(product: Tensor, into: Tensor) -> Tensor:
    return into.add_(product)


@contextlib.contextmanager
def _rounding_inputs(settings: Any, kind: str, wanted: bool) -> Iterator[None]:
    """Let a back end round the inputs of one fp32 product; the whole process has this setting."""
    before = wanted and settings.fp32_precision
    if wanted:
        settings.fp32_precision = kind
    try:
        yield
    finally:
        if wanted:
            settings.fp32_precision = before


def _onednn(wanted: bool) -> contextlib.AbstractContextManager[None]:
    """Let oneDNN compute fp32 products on a CPU; it may round their inputs to bf16. torch.compile fails under it."""
    return _rounding_inputs(torch.backends.mkldnn.matmul, "bf16", wanted)  # type: ignore[attr-defined]


def _tf32(wanted: bool) -> contextlib.AbstractContextManager[None]:
    """Let a GPU round the inputs of fp32 products to TF32, which has more digits than the 16-bit numbers they hold."""
    return _rounding_inputs(torch.backends.cuda.matmul, "tf32", wanted)


def _has_bf16() -> bool:
    return bool(torch.backends.mkldnn.is_available() and torch.ops.mkldnn._is_mkldnn_bf16_supported())


@functools.cache
def _onednn_is_exact() -> bool:
    """Return whether oneDNN, allowed to round its inputs to bf16, still multiplies in full fp32 on this CPU."""
    if not _has_bf16() or torch.cpu._is_amx_tile_supported():
        return False
    # 1 + 2^-12 is 1 in bf16: a product that rounds its inputs gives exactly 64.
    value = 1 + 2.0**-12
    ones = torch.full((64, 64), value)
    with _onednn(True):
        product = torch.mm(ones, ones)
    return bool((product - 64 * value**2).abs().max() < 1e-4)


_idle: dict[str, list[torch.UntypedStorage]] = {}
_lock = threading.Lock()


def take_buffer(name: str, *shape: int, dtype: torch.dtype, device: torch.device | str = "cpu") -> Tensor:
    """Return memory as `torch.empty` does; on a CPU a buffer that was returned under `name`, if one is large enough.

    Linux zeroes each page of fresh memory at its first write, and PyTorch returns freed memory of this size at once.
    """
    if torch.device(device).type != "cpu":
        return torch.empty(shape, dtype=dtype, device=device)
    with _lock:
        idle = _idle.get(name, [])
        fitting = [each for each in idle if each.nbytes() >= math.prod(shape) * dtype.itemsize]
        storage = min(fitting, key=lambda each: each.nbytes(), default=None)
        if storage is None:
            idle.clear()  # free the old memory before allocating the new
            del fitting
            return torch.empty(shape, dtype=dtype)
        idle.remove(storage)
    return torch.empty(0, dtype=dtype).set_(storage, 0, shape)  # type: ignore[call-overload, no-any-return]


def take_rows(name: str, rows: int, columns: int, *, dtype: torch.dtype, device: torch.device | str = "cpu") -> Tensor:
    """Return a `take_buffer` of a matrix whose rows begin at multiples of 64 numbers, as a GPU's products need."""
    return take_buffer(name, rows, -(-columns // 64) * 64, dtype=dtype, device=device)[:, :columns]


def return_buffer(name: str, tensor: Tensor) -> None:
    """Give the memory of `tensor` to the next `take_buffer` of this name; `tensor` must not be used any more."""
    if tensor.device.type == "cpu":
        with _lock:
            _idle.setdefault(name, []).append(tensor.untyped_storage())


def release_buffers() -> None:
    """Free all buffers that are not in use."""
    with _lock:
        _idle.clear()


_OPTIONS: dict[str, Any] = {f"realize_{each}_threshold": 1000 for each in ("opcount", "reads", "acc_reads")}
"""By default the compiler writes an intermediate result as large as a chunk to memory if it takes 30 operations or is
read four times; for a divergence and its gradient this is six times slower than computing it again."""


@functools.cache
def _compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    return torch.compile(function, dynamic=False, options=_OPTIONS)


def more_graphs(compile: bool) -> contextlib.AbstractContextManager[Any]:
    """Let a function have 64 graphs, not 8, in the block: one for each kind of targets and length of a last chunk."""
    return torch._dynamo.config.patch(recompile_limit=64) if compile else contextlib.nullcontext()


def maybe_compiled(function: Callable[..., Any], compile: bool) -> Callable[..., Any]:
    """Return `function` or its compiled form, made once a process; it must be defined at the top of a module."""
    return _compiled(function) if compile else function
