"""What test_kernels.py asks of the Triton kernels, under the interpreter (in a process of its own) or on a GPU.

A case compares kernels with the passes that they replace, and answers in plain numbers.
"""

import contextlib
from collections.abc import Iterator

import torch
from objective_cases import gradients, run, targets_for
from objective_reference import problem
from torch import Tensor

from kdtrain.models.output_head import HeadPart
from kdtrain.objective.engine import kernels
from kdtrain.objective.engine.sparse import Shares, reduce_logits, spread_gradients
from kdtrain.objective.statistics import NEVER

PADDING = 13
"""Columns behind the vocabulary that no kernel may read or write."""
CAP = 20.0
SET = -1.0
"""Stands for the size of a single logit's gradient, which is not summed."""


def round_as_a_gpu_does() -> None:
    """Round to the nearest in Triton's interpreter, as a GPU and PyTorch do; it cuts fp32 off to bf16."""
    import triton.language as tl
    from triton.runtime import interpreter

    theirs = interpreter._convert_float

    def convert(numbers, source, target, mode):
        if (source, target) != (tl.float32, tl.bfloat16):
            return theirs(numbers, source, target, mode)
        return torch.tensor(numbers).bfloat16().view(torch.uint16).numpy()

    interpreter._convert_float = convert


def padded(rows_RV: Tensor, fill: float) -> Tensor:
    """Make a buffer whose first columns are the rows."""
    buffer = torch.full((len(rows_RV), rows_RV.shape[1] + PADDING), fill, dtype=rows_RV.dtype, device=rows_RV.device)
    buffer[:, : rows_RV.shape[1]] = rows_RV
    return buffer


def logits(device: str, size: int, capped: bool = False) -> Tensor:
    """Make logits [R,V]: ordinary, rising, falling, far apart, far below 0, some masked, all but one masked, masked."""
    z_RV = 4 * torch.randn(8, size, generator=torch.Generator().manual_seed(size))
    z_RV[1] = z_RV[1].sort().values
    z_RV[2] = z_RV[2].sort(descending=True).values
    z_RV[3] *= 1e4
    z_RV[4] -= 1e4
    if capped:
        z_RV = CAP * (z_RV / CAP).tanh()
    z_RV[5, ::3] = NEVER
    z_RV[6, :-1] = NEVER
    z_RV[7] = NEVER
    return padded(z_RV.to(device), torch.nan)[:, :size]


def stats_error(device: str, size: int, beta: float, distils: bool, slopes: bool) -> list[float]:
    """Return the largest relative error of each statistic, against the compiled passes in fp64."""
    z_RV, inverse = logits(device, size), torch.tensor(beta, device=device)
    got = kernels.tail_stats(z_RV, inverse, distils, slopes)
    want = reduce_logits(z_RV.double(), inverse.double(), distils, slopes)
    assert all(each.dtype == torch.float32 for each in got)
    floor = torch.finfo(torch.float64).tiny
    return [((g - w).abs() / w.abs().clamp(min=floor)).max().item() for g, w in zip(got, want, strict=True)]


def masses_with(device: str, value: float) -> list[float]:
    """Return the mass of rows with `value` in the first and in the last column, and of one without."""
    z_RV = torch.zeros(3, 5000, device=device)
    z_RV[0, 0] = z_RV[1, -1] = value
    return kernels.tail_stats(z_RV, torch.ones((), device=device), True, True)[1].tolist()


def spread(
    z_RV: Tensor,
    out_RV: Tensor,
    singles: int = 70,
    beta: float = 0.5,
    scale: float = 0.25,
    softcap: float | None = None,
    heated: bool = True,
    at_one: bool = False,
) -> tuple[Tensor, Tensor]:
    """Run `tail_grad`; return what it should write to `out_RV`, in fp32, and the size of the parts of its sum."""
    device, (rows, size) = z_RV.device, z_RV.shape
    g, inverse = torch.Generator().manual_seed(1), torch.tensor(beta, device=device)
    top_R, mass_R, mass_beta_R, _ = reduce_logits(z_RV, inverse, True, False)
    share_R = torch.randn(rows, generator=g).to(device) / mass_R
    share_beta_R = torch.randn(rows, generator=g).to(device) / mass_beta_R if heated else None
    ids_RE = torch.randint(size, (rows, singles), generator=g)
    # The borders of blocks, and one that comes twice with the same gradient.
    for column, place in enumerate((0, size - 1, 4095, 4096, 0)[:singles]):
        ids_RE[:, column] = min(place, size - 1)
    dz_RV = torch.randn(rows, size, generator=g).to(device)
    ids_RE = ids_RE.to(device)
    dz_RE = dz_RV.gather(1, ids_RE)
    want_RV, parts_RV = z_RV.clone(), z_RV.clone()
    shares, head = Shares(top_R, share_R, share_beta_R), HeadPart(scale=scale, softcap=softcap)
    spread_gradients(want_RV, inverse, shares, head)
    want_RV.scatter_(1, ids_RE, dz_RE)
    size_beta_R = None if share_beta_R is None else share_beta_R.abs()
    spread_gradients(parts_RV, inverse, Shares(top_R, share_R.abs(), size_beta_R), HeadPart(scale=scale))
    parts_RV.scatter_(1, ids_RE, SET)
    kernels.tail_grad(z_RV, None if at_one else inverse, shares, ids_RE, dz_RE, head, out_RV)
    return want_RV, parts_RV


def grad_error(device: str, size: int, singles: int, beta: float, capped: bool, heated: bool) -> float:
    """Return the largest error relative to the parts of a sum; single logits must be exact."""
    z_RV = logits(device, size, capped)
    out_RV = torch.full_like(z_RV, torch.nan)
    softcap = CAP if capped else None
    want_RV, parts_RV = spread(z_RV, out_RV, singles, beta, 0.25, softcap, heated)
    assert torch.equal(out_RV[parts_RV == SET], want_RV[parts_RV == SET])
    tiny_RV = (parts_RV >= 0) & (parts_RV < 1e-30)  # such numbers lose digits or become 0
    assert bool((out_RV[tiny_RV].abs() < 2e-30).all())
    normal_RV = parts_RV >= 1e-30
    return ((out_RV - want_RV).abs()[normal_RV] / parts_RV[normal_RV]).max().item()


def grad_is_rounded_once(device: str, size: int, kind: torch.dtype) -> bool:
    """Return True if the gradient in `kind` is the fp32 gradient, rounded, bit by bit."""
    z_RV = logits(device, size)
    wide_RV, narrow_RV = torch.empty_like(z_RV), torch.empty_like(z_RV, dtype=kind)
    spread(z_RV, wide_RV)
    spread(z_RV, narrow_RV)
    return torch.equal(narrow_RV, wide_RV.to(kind))


def grad_at_one_is_the_same(device: str, size: int) -> bool:
    """Return True if it makes no difference whether the kernel knows that beta is 1."""
    z_RV = logits(device, size)
    one_RV, other_RV = torch.empty_like(z_RV), torch.empty_like(z_RV)
    spread(z_RV, one_RV, beta=1.0)
    spread(z_RV, other_RV, beta=1.0, at_one=True)
    return torch.equal(one_RV, other_RV)


def grad_in_place_is_the_same(device: str, size: int) -> bool:
    """Return True if `out_RV` may be `z_RV`."""
    z_RV = logits(device, size)
    out_RV = torch.empty_like(z_RV)
    spread(z_RV, out_RV)
    spread(z_RV, z_RV)
    return torch.equal(z_RV, out_RV)


def grad_leaves_alone(device: str, size: int, kind: torch.dtype) -> tuple[bool, bool]:
    """Return whether the columns behind the vocabulary keep their numbers, and whether the logits do."""
    z_RV = logits(device, size)
    before_RV, buffer = z_RV.clone(), padded(z_RV.to(kind), 7.0)
    spread(z_RV, buffer[:, :size])
    return bool((buffer[:, size:] == 7).all()), torch.equal(z_RV, before_RV)


def scaled(device: str, size: int, kind: torch.dtype, factor: float) -> bool:
    """Return True if `scale_unless_one` gives what PyTorch's product in fp32 gives, rounded once."""
    tensor = torch.randn(size, generator=torch.Generator().manual_seed(0)).to(device, kind)
    want = (tensor.float() * factor).to(kind)
    kernels.scale_unless_one(tensor, torch.tensor(factor, device=device))
    return torch.equal(tensor, want)


@contextlib.contextmanager
def counting() -> Iterator[dict[str, int]]:
    """Count the bytes that kernels read and write under the interpreter."""
    from triton.runtime.interpreter import interpreter_builder as builder

    found = {"read": 0, "written": 0}
    load, store = builder.create_masked_load, builder.create_masked_store

    def counted_load(pointers, mask, *rest):
        answer = load(pointers, mask, *rest)
        found["read"] += int(mask.data.sum()) * answer.data.itemsize
        return answer

    def counted_store(pointers, value, mask, *rest):
        found["written"] += int(mask.data.sum()) * value.data.itemsize
        return store(pointers, value, mask, *rest)

    builder.create_masked_load, builder.create_masked_store = counted_load, counted_store
    try:
        yield found
    finally:
        del builder.create_masked_load, builder.create_masked_store


def bytes_of_the_pair(device: str, rows: int, size: int) -> dict[str, dict[str, float]]:
    """Count the bytes moved by `tail_stats` and by `tail_grad` to bf16, without single logits, for each logit."""
    z_RV, inverse = torch.randn(rows, size, device=device), torch.ones((), device=device)
    one_R = torch.ones(rows, device=device)
    ids_RE, dz_RE = torch.zeros(rows, 0, dtype=torch.int64, device=device), torch.zeros(rows, 0, device=device)
    with counting() as statistics:
        kernels.tail_stats(z_RV, inverse, True, True)
    with counting() as gradient:
        out_RV = torch.empty_like(z_RV, dtype=torch.bfloat16)
        kernels.tail_grad(z_RV, inverse, Shares(one_R, one_R, one_R), ids_RE, dz_RE, HeadPart(), out_RV)
    both = {"statistics": statistics, "gradient": gradient}
    return {name: {way: count / (rows * size) for way, count in each.items()} for name, each in both.items()}


def bytes_of_scaling(device: str, factor: float, programs: int) -> dict[str, int]:
    """Count the bytes moved to scale 10,000 numbers in fp32, by fewer programs than there are blocks."""
    kernels._PROGRAMS = programs
    with counting() as found:
        kernels.scale_unless_one(torch.ones(10_000, device=device), torch.tensor(factor, device=device))
    return found


def loss_errors(device: str, rule: str, dtype: torch.dtype) -> list[float]:
    """Return the relative distance of a loss and its gradients from the results of the plain passes."""
    found = []
    for compile in (False, True):
        p = problem(n=9, d=6, vocab=67, bias=True, softcap=4.0).cast(dtype)
        targets = None if rule == "none" else targets_for(p, rule, torch.float32)
        temperature = torch.tensor(1.7, requires_grad=True)
        loss = run(p, targets, temperature, rule, compile=compile, chunk=4).loss
        found.append([loss, *gradients(3 * loss, p, temperature)])
    return [((a - b).float().norm() / a.float().norm().clamp(min=1e-20)).item() for a, b in zip(*found, strict=True)]


def chosen(device: str) -> bool:
    """Return True if a loss takes the kernels."""
    return kernels.chosen(torch.zeros(2, 8, device=device), None, True, None)
