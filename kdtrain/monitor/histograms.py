"""Histograms of weights and gradients, counted on the device of each tensor.

The bins are the same for every tensor, step and rank: half octaves of magnitude, for both signs, from 2^-30 to 2^10,
with one bin around 0. Weights and gradients span many orders of magnitude, which even bins would put into one. Fixed
bins need no pass for the extremes, so the counts of a tensor's parts add up. What it gives up: the extreme bins are
open, and numbers that differ by less than 40 % may share a bin.
"""

from collections.abc import Mapping

import torch

from kdtrain.monitor.loggers import Histogram
from kdtrain.ranks import agreed_max, all_reduce_sum, copies, local, world_size

_MAGNITUDES = torch.pow(2.0, torch.arange(-60, 21) / 2.0)
EDGES = torch.cat([-_MAGNITUDES.flip(0), _MAGNITUDES])
_BINS = len(EDGES) + 1
_CHUNK = 1 << 22


def histograms(tensors: Mapping[str, torch.Tensor]) -> dict[str, Histogram]:
    """Return the histogram of each tensor of any float dtype, on any device; none for one without a finite number.

    If one tensor is sharded, every rank must call this; one that is not is the same on each rank.
    """
    filled = {name: tensor.detach() for name, tensor in tensors.items() if tensor.numel()}
    if not filled:
        return {}
    rows = torch.stack([_row(local(tensor)).cpu() for tensor in filled.values()])
    if any(numbers := [copies(tensor) for tensor in filled.values()]):
        each = torch.tensor([number or world_size() for number in numbers], dtype=rows.dtype)[:, None]
        rows = torch.cat([all_reduce_sum(rows[:, :-2]) / each, agreed_max(rows[:, -2:])], dim=1)
    return {name: _histogram(row) for name, row in zip(filled, rows.tolist(), strict=True) if sum(row[:_BINS])}


def _row(tensor: torch.Tensor) -> torch.Tensor:
    """Return counts of the bins and non-finite numbers, sum, sum of squares, -minimum, maximum: fp64, on the device."""
    edges = EDGES.to(tensor.device)
    counts = torch.zeros(_BINS + 1, dtype=torch.int64, device=tensor.device)
    sums = torch.zeros(2, dtype=torch.float64, device=tensor.device)
    ends = torch.tensor([-torch.inf, -torch.inf], dtype=torch.float64, device=tensor.device)
    for part in tensor.reshape(-1).split(_CHUNK) if tensor.numel() else ():
        values = part.float()
        sound = values.isfinite()
        places = torch.where(sound, torch.bucketize(values, edges), _BINS)
        counts += torch.bincount(places, minlength=_BINS + 1)
        clean = values.where(sound, 0.0).double()
        sums += torch.stack([clean.sum(), clean.square().sum()])
        ends = ends.maximum(
            torch.stack([(-values).where(sound, -torch.inf).max(), values.where(sound, -torch.inf).max()])
        )
    return torch.cat([counts.double(), sums, ends])


def _histogram(row: list[float]) -> Histogram:
    counts = [int(count) for count in row[:_BINS]]
    used = [place for place, count in enumerate(counts) if count]
    shown = slice(used[0], used[-1] + 1)
    _, total, squares, lowest, highest = row[_BINS:]
    limits = [*EDGES.tolist(), max(highest, float(EDGES[-1]) * 2)]
    return Histogram(-lowest, highest, sum(counts), total, squares, limits[shown], counts[shown])
