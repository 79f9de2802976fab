"""The passes over a chunk of logits as Triton kernels for a GPU: the two functions of `sparse` with fewer bytes.

A chunk's elementwise work is bound by memory: of a logit these move 18 bytes, products included, the compiled passes 22
to 30. `tail_stats` needs one pass because its sums are taken relative to the largest logit so far, and rescaled when a
larger one comes (online softmax: Milakov and Gimelshein, arXiv 1805.02867), with what is carried from block to block in
fp64. `tail_grad` also sets the gradient at the single logits of a row (the targets' ids and the label), for which
adding to a rounded gradient would round twice.

One program handles one row, in blocks. Only the last needs a mask: a masked access is not vectorised if the length is
no multiple of 16. Triton comes with CUDA builds of torch and is no requirement: it is imported when a kernel is first
requested; hence kernels are plain functions here, and `_compiled` decorates them.

Shape suffixes: R rows of a chunk, V vocabulary, E single logits of a row.
"""

from __future__ import annotations

import functools
import os
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from kdtrain.models.output_head import HeadPart
from kdtrain.objective.engine.matmul import maybe_compiled, take_rows
from kdtrain.objective.engine.sparse import Shares, TailSums, reduce_logits, spread_gradients

if TYPE_CHECKING:
    import triton.language as tl

_BLOCK = 4096
"""Logits of a row that a program holds at a time."""

_TIMED = 256
"""Rows on which a GPU times both ways: few, because a step's memory is nearly full then."""

_PROGRAMS = 2048
"""Of `scale_unless_one`: enough to fill a GPU, and few to start where nothing is to be done."""


choices: dict[str, str] = {}
"""What the clock decided in this process, by the width of the logits and the dtype of their gradient."""


def available(device: torch.device) -> bool:
    """Return whether the kernels run on `device`: a GPU, or any under Triton's interpreter (TRITON_INTERPRET=1)."""
    if device.type != "cuda" and os.environ.get("TRITON_INTERPRET") != "1":
        return False
    try:
        import triton  # noqa: F401
    except ImportError:
        return False
    return True


def chosen(z_RV: Tensor, into_RV: Tensor | None, slopes: bool, softcap: float | None) -> bool:
    """Return whether these kernels walk over chunks like `z_RV`, and not the compiled functions of `sparse`.

    On a GPU both are timed once a process, on a few rows. Under torch.use_deterministic_algorithms it is always these,
    so that a resumed run does not depend on a clock.
    """
    if z_RV.dtype != torch.float32 or not available(z_RV.device):
        return False
    if z_RV.device.type != "cuda" or torch.are_deterministic_algorithms_enabled():
        return True
    kind = torch.float32 if into_RV is None else into_RV.dtype
    return _faster(z_RV.device, z_RV.shape[1], kind, slopes, softcap)


@functools.cache
def _faster(device: torch.device, size: int, kind: torch.dtype, slopes: bool, softcap: float | None) -> bool:
    z_RV, out_RV = (take_rows("", _TIMED, size, dtype=each, device=device) for each in (torch.float32, kind))
    z_RV.zero_()
    beta, row_R = torch.ones((), device=device), torch.ones(_TIMED, device=device)
    shares = Shares(row_R, row_R, row_R)
    head = HeadPart(softcap=softcap)
    ids_RE = torch.zeros(_TIMED, 1, dtype=torch.int64, device=device)

    def of_sparse() -> None:
        maybe_compiled(reduce_logits, True)(z_RV, beta, True, slopes)
        maybe_compiled(spread_gradients, True)(z_RV, beta, shares, head, out_RV)

    def own() -> None:
        tail_stats(z_RV, beta, True, slopes)
        tail_grad(z_RV, beta, shares, ids_RE, row_R[:, None], head, out_RV)

    times: dict[Callable[[], None], list[float]] = {of_sparse: [], own: []}
    for _ in range(6):  # the first compiles
        for walk, taken in times.items():
            torch.cuda.synchronize(device)
            start = time.perf_counter()
            walk()
            torch.cuda.synchronize(device)
            taken.append(time.perf_counter() - start)
    faster = min(times[own][1:]) < min(times[of_sparse][1:])
    choices[f"logits of {size}, {kind}"] = "triton" if faster else "compiled"
    return faster


def tail_stats(z_RV: Tensor, beta: Tensor, distils: bool, slopes: bool) -> TailSums:
    """Compute `sparse.reduce_logits` in one pass.

    Args:
        z_RV: fp32; rows may lie apart.
        beta: scalar on the same device, > 0.
        distils, slopes: as there.
    Returns:
        each in fp32. Unwanted ones are the mass.
    """
    rows, size = z_RV.shape
    assert z_RV.dtype == torch.float32 and z_RV.stride(1) == 1
    found = z_RV.new_empty(4, rows)
    arguments = (z_RV, beta, found, z_RV.stride(0), rows, size, distils, distils and slopes, _BLOCK)
    _launch(_tail_stats, rows, *arguments)
    return TailSums(*found.unbind())


def tail_grad(
    z_RV: Tensor, beta: Tensor | None, shares: Shares, ids_RE: Tensor, dz_RE: Tensor, head: HeadPart, out_RV: Tensor
) -> None:
    """Write `sparse.spread_gradients` to `out_RV`, and over it the gradient in single logits, in one pass.

    Args:
        z_RV, beta: as for `tail_stats`; beta may be None where it is known to be 1.
        shares: of any float dtype.
        ids_RE: int64, the columns of single logits. One may come twice in a row, with the same gradient.
        dz_RE: fp32, the whole gradient in them.
        head: scale and soft cap.
        out_RV: fp32, bf16 or fp16; rows may lie apart. Each number is rounded once. It may be `z_RV`.
    """
    rows, size = z_RV.shape
    assert z_RV.dtype == torch.float32 and z_RV.stride(1) == out_RV.stride(1) == 1
    distils = shares.share_beta is not None
    rows_R = (shares.top, shares.share, shares.share if shares.share_beta is None else shares.share_beta)
    assert all(each.is_contiguous() for each in (*rows_R, ids_RE, dz_RE))
    tensors = (z_RV, shares.top if beta is None else beta, *rows_R, ids_RE, dz_RE, out_RV)
    numbers = (z_RV.stride(0), out_RV.stride(0), size, ids_RE.shape[1], head.scale, head.softcap or 1.0)
    _launch(_tail_grad, rows, *tensors, *numbers, distils, beta is None, head.softcap is not None, _BLOCK)


def scale_unless_one(tensor: Tensor, factor: Tensor) -> None:
    """Multiply `tensor`, which is contiguous, by a scalar on its device, in place; a factor of 1 reads none of it."""
    assert tensor.is_contiguous()
    programs = min(_PROGRAMS, -(-tensor.numel() // _BLOCK))
    _launch(_scale_unless_one, programs, tensor, factor, tensor.numel(), _BLOCK)


def _launch(kernel: Callable[..., None], programs: int, *arguments: Any) -> None:
    with torch.cuda.device_of(arguments[0]):  # Triton launches on the current device
        _compiled(kernel)[(programs,)](*arguments, num_warps=8)


@functools.cache
def _compiled(kernel: Callable[..., None]) -> Any:
    """Return the kernel, ready to launch."""
    import triton

    globals()["tl"] = triton.language  # where Triton looks up the name
    return triton.jit(kernel)


def _tail_stats(  # type: ignore[no-untyped-def]
    z, beta, found, stride, rows, size, DISTILS: tl.constexpr, SLOPES: tl.constexpr, BLOCK: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    inverse = tl.load(beta).to(tl.float32)
    # Below every logit, a masked one too, and finite: an infinite rise times no mass would be no number.
    top = tl.full((), -3e38, tl.float32)
    mass = tl.full((), 0.0, tl.float64)
    mass_beta = tl.full((), 0.0, tl.float64)
    moment = tl.full((), 0.0, tl.float64)
    for start in range(0, size, BLOCK):
        inside = start + columns < size
        place = z + row * stride + start + columns
        if start + BLOCK <= size:
            logits = tl.load(place)
        else:
            logits = tl.load(place, mask=inside, other=float("-inf"))
        higher = tl.maximum(top, tl.max(logits, 0))
        if higher > top:
            rise = higher.to(tl.float64) - top.to(tl.float64)
            mass = mass * tl.exp(-rise)
            if DISTILS:
                cooling = tl.exp(-rise * inverse)
                moment = (moment - rise * mass_beta) * cooling
                mass_beta = mass_beta * cooling
            top = higher
        shifted = tl.where(inside, logits - top, -1e30)  # beyond the row: 0 in every sum
        mass += tl.sum(tl.exp(shifted), 0)
        if DISTILS:
            scaled = tl.exp(inverse * shifted)
            mass_beta += tl.sum(scaled, 0)
            if SLOPES:
                moment += tl.sum(scaled * shifted, 0)
    tl.store(found + row, top)
    tl.store(found + rows + row, mass.to(tl.float32))
    tl.store(found + 2 * rows + row, (mass_beta if DISTILS else mass).to(tl.float32))
    tl.store(found + 3 * rows + row, (moment if SLOPES else mass).to(tl.float32))


def _tail_grad(  # type: ignore[no-untyped-def]
    z,
    beta,
    top,
    share,
    share_beta,
    ids,
    dz,
    out,
    z_stride,
    out_stride,
    size,
    singles,
    scale,
    softcap,
    DISTILS: tl.constexpr,
    AT_ONE: tl.constexpr,
    CAPPED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    inverse = tl.load(beta).to(tl.float32)
    largest = tl.load(top + row).to(tl.float32)
    weight = tl.load(share + row).to(tl.float32)
    weight_beta = tl.load(share_beta + row).to(tl.float32)
    z_row = z + row * z_stride
    out_row = out + row * out_stride
    for start in range(0, size, BLOCK):
        inside = start + columns < size
        if start + BLOCK <= size:
            logits = tl.load(z_row + start + columns)
        else:
            logits = tl.load(z_row + start + columns, mask=inside, other=0.0)
        shifted = logits - largest
        plain = tl.exp(shifted)
        gradient = weight * plain
        if DISTILS:
            gradient += weight_beta * (plain if AT_ONE else tl.exp(inverse * shifted))
        if CAPPED:
            ratio = tl.maximum(logits, -softcap) / softcap
            gradient *= scale * (1.0 - ratio * ratio)
        else:
            gradient *= scale
        gradient = gradient.to(out.dtype.element_ty)
        if start + BLOCK <= size:
            tl.store(out_row + start + columns, gradient)
        else:
            tl.store(out_row + start + columns, gradient, mask=inside)
    tl.debug_barrier()  # other threads of this program wrote where a single logit's gradient goes
    for start in range(0, singles, 128):
        which = start + tl.arange(0, 128)
        place = tl.load(ids + row * singles + which, mask=which < singles, other=0)
        single = tl.load(dz + row * singles + which, mask=which < singles, other=0.0)
        tl.store(out_row + place, single.to(out.dtype.element_ty), mask=which < singles)


def _scale_unless_one(tensor, factor, size, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    by = tl.load(factor)
    if by != 1.0:
        first = tl.program_id(0).to(tl.int64) * BLOCK
        for start in range(first, size, tl.num_programs(0) * BLOCK):
            places = start + tl.arange(0, BLOCK)
            numbers = tl.load(tensor + places, mask=places < size, other=0.0)
            tl.store(tensor + places, (numbers * by).to(tensor.dtype.element_ty), mask=places < size)
