"""Histograms of weights and gradients, counted where they lie.

The bins are the same for every tensor and step: half octaves of magnitude, for both signs, from 2^-30 to 2^10, with
one bin around 0. Weights and gradients are spread over many orders of magnitude, which even bins would put into one;
and fixed ones need no look at the extremes first, so that a whole model costs one transfer to the host. Given up: the
extreme bins are open, and no bin tells numbers apart that differ by less than 40 %.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch

_MAGNITUDES = torch.pow(2.0, torch.arange(-60, 21) / 2.0)
EDGES = torch.cat([-_MAGNITUDES.flip(0), _MAGNITUDES])
_BINS = len(EDGES) + 1
_CHUNK = 1 << 22

Joined = Callable[[torch.Tensor, str], torch.Tensor]
"""(tensor, "sum", "min" or "max") -> that of all ranks, entry by entry."""


@dataclass(frozen=True)
class Histogram:
    """Counts of the finite numbers of one tensor; how many were not finite is `broken`."""

    minimum: float
    maximum: float
    count: int
    total: float
    squares: float
    """Sum of the squares."""
    broken: int
    limits: list[float]
    """Upper edges of the bins, ascending, without empty bins at either end."""
    counts: list[int]
    """Numbers a bin, as many as `limits`."""


def histograms(tensors: Mapping[str, torch.Tensor], joined: Joined | None = None) -> dict[str, Histogram]:
    """The histogram of each tensor of any float dtype, on any device; empty ones and those all broken are left out.

    joined: figures of all ranks, where each has a part of every tensor; all of them then call this.
    """
    filled = {name: tensor for name, tensor in tensors.items() if tensor.numel() or joined}
    if not filled:
        return {}
    rows = torch.stack([_row(tensor.detach()).cpu() for tensor in filled.values()])
    if joined is not None:
        rows = _joined(rows, joined)
    return {name: _histogram(row) for name, row in zip(filled, rows.tolist(), strict=True) if sum(row[:_BINS])}


def _joined(rows: torch.Tensor, joined: Joined) -> torch.Tensor:
    """What `_row` says, of whole tensors."""
    parts = zip(rows.split([rows.shape[1] - 2, 1, 1], dim=1), ("sum", "min", "max"), strict=True)
    return torch.cat([joined(part.contiguous(), how) for part, how in parts], dim=1)


def _row(tensor: torch.Tensor) -> torch.Tensor:
    """Counts a bin, broken ones, sum, sum of squares, minimum and maximum, as fp64 on the tensor's device."""
    edges = EDGES.to(tensor.device)
    counts = torch.zeros(_BINS + 1, dtype=torch.int64, device=tensor.device)
    sums = torch.zeros(2, dtype=torch.float64, device=tensor.device)
    ends = torch.tensor([torch.inf, -torch.inf], dtype=torch.float64, device=tensor.device)
    for part in tensor.reshape(-1).split(_CHUNK) if tensor.numel() else ():
        values = part.float()
        sound = values.isfinite()
        places = torch.where(sound, torch.bucketize(values, edges), _BINS)
        counts += torch.bincount(places, minlength=_BINS + 1)
        clean = values.where(sound, 0.0).double()
        sums += torch.stack([clean.sum(), clean.square().sum()])
        low, high = values.where(sound, torch.inf).min(), values.where(sound, -torch.inf).max()
        ends = torch.stack([ends[0].minimum(low), ends[1].maximum(high)])
    return torch.cat([counts.double(), sums, ends])


def _histogram(row: list[float]) -> Histogram:
    counts = [int(count) for count in row[:_BINS]]
    used = [place for place, count in enumerate(counts) if count]
    first, last = used[0], used[-1]
    broken, total, squares, minimum, maximum = row[_BINS:]
    limits = [*EDGES.tolist(), max(maximum, float(EDGES[-1]) * 2)]
    return Histogram(
        minimum=minimum,
        maximum=maximum,
        count=sum(counts),
        total=total,
        squares=squares,
        broken=int(broken),
        limits=limits[first : last + 1],
        counts=counts[first : last + 1],
    )
