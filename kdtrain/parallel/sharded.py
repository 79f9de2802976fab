"""Tensors of which each rank may hold a part: the part, the whole, and figures of the whole.

FSDP2 keeps parameters, gradients and moments as DTensors. What is done to each entry by itself is done to the part
that lies here; what needs all entries is reduced over the ranks that share a copy, and over no other.
"""

from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from kdtrain.parallel.world import agreed_max, local, summed, with_local


def whole(tensor: torch.Tensor | None) -> torch.Tensor | None:
    """All of `tensor`, gathered where it is cut up: every rank must call it."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def is_sharded(tensors: Sequence[torch.Tensor]) -> bool:
    """Whether any of them is cut up."""
    return any(isinstance(each, DTensor) for each in tensors)


def part_of(whole: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """The part of `whole` that lies here when it is cut up like `like`; `whole` itself where that is not cut up."""
    if not isinstance(like, DTensor) or isinstance(whole, DTensor):
        return local(whole)
    shape, offsets = compute_local_shape_and_global_offset(like.shape, like.device_mesh, like.placements)
    return whole[tuple(slice(start, start + size) for start, size in zip(offsets, shape, strict=True))]


def cut_like(whole: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """`whole` cut up like `like`, on its device."""
    if not isinstance(like, DTensor) or whole.shape != like.shape:
        return whole.to(like.device)
    return with_local(like, part_of(whole, like).to(local(like).device).contiguous())


@torch.no_grad()
def clip_norm_(parameters: Sequence[torch.nn.Parameter], largest: float) -> torch.Tensor:
    """Scale the gradients so that their norm is at most `largest`, and return the norm before; 0-dim."""
    gradients = [each.grad for each in parameters if each.grad is not None]
    if not is_sharded(gradients):
        return torch.nn.utils.clip_grad_norm_(parameters, largest)
    norm = total_norm(gradients)
    # torch's own formula, so that a sharded run is clipped as one process clips
    factor = torch.clamp(largest / (norm + 1e-6), max=1.0)
    torch._foreach_mul_([local(each) for each in gradients], factor)
    return norm


def peak(tensor: torch.Tensor) -> float:
    """The largest magnitude in the part of `tensor` that lies here, infinite where some of it is NaN; 0 of nothing."""
    own = local(tensor).detach().float().abs()
    return float(torch.nan_to_num(own, nan=float("inf")).max()) if own.numel() else 0.0


def peaks(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """The largest magnitude in each, those of other ranks too, infinite where some of it is not finite; 1-dim fp32."""
    each = [local(tensor).detach().float().abs() for tensor in tensors]
    own = torch.stack([own.max() if own.numel() else own.new_zeros(()) for own in each])
    own = torch.nan_to_num(own, nan=float("inf"), posinf=float("inf"))
    return agreed_max(own) if is_sharded(tensors) else own


def total_norm(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """The Euclidean norm of all entries of all tensors, those of other ranks too; fp32, one exchange."""
    if not is_sharded(tensors):
        return torch.nn.utils.get_total_norm(tensors)
    whole = torch.zeros((), dtype=torch.float64, device=local(tensors[0]).device)
    parts = whole.clone()
    group = None
    for tensor, norm in zip(tensors, torch._foreach_norm([local(each) for each in tensors]), strict=True):
        if isinstance(tensor, DTensor):
            group = tensor.device_mesh.get_group("shard")
            parts += norm.double() ** 2
        else:
            whole += norm.double() ** 2
    if group is not None:
        dist.all_reduce(parts, group=group)
    return (whole + parts).sqrt().float()


def joiner(tensors: Sequence[torch.Tensor]) -> Callable[[torch.Tensor, str], torch.Tensor] | None:
    """What makes figures of the parts that ranks hold of `tensors` figures of the whole; None where nothing is cut up.

    It takes numbers and how they are joined: "sum", "min" or "max".
    """
    first = next((each for each in tensors if isinstance(each, DTensor)), None)
    if first is None:
        return None
    copies = dist.get_world_size() // first.device_mesh.get_group("shard").size()

    def join(numbers: torch.Tensor, how: str) -> torch.Tensor:
        if how == "sum":
            return summed(numbers) / copies
        return agreed_max(numbers) if how == "max" else -agreed_max(-numbers)

    return join
