"""Adapters of layers that tensor ranks cut: each rank has a part of one factor, and the other one whole.

An adapted layer computes W x + scale * B A x. Where its outputs are cut, so are the rows of B, and each rank computes
all of A x. Where its inputs are cut, so are the columns of A; then A x is a sum over the ranks, and so is B A x, which
is left to the sum that follows W x anyway. So an adapter exchanges nothing in a forward or a backward, and each rank
sees a summand of the gradient of the whole factor; they are summed once a step.

Dropout is that of one process: of inputs that are cut, each rank draws the mask of all and takes its part.

Given up: DoRA, whose norms of columns go over ranks.
"""

from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import Partial, Replicate, Shard, distribute_tensor


def cut_adapter(layer: Any, mesh: Any, style: str) -> list[nn.Parameter]:
    """Cut the adapters of a layer of `peft` over the tensor ranks, in place; return the factors that stay whole.

    The layer's base is cut by itself. It takes and returns what the base does, but for sums: those are plain tensors.
    style: `colwise` or `rowwise`.
    """
    whole = []
    for name, dropout in layer.lora_dropout.items():
        first, second = layer.lora_A[name], layer.lora_B[name]
        if style == "colwise":
            dropout.register_forward_pre_hook(_plain)
        elif isinstance(dropout, nn.Dropout):
            layer.lora_dropout[name] = _DropoutOfPart(dropout.p, mesh)
        part, dim, other = (second, 0, first) if style == "colwise" else (first, 1, second)
        part.__class__ = _PartOfFactor
        part.weight = nn.Parameter(distribute_tensor(part.weight, mesh, [Shard(dim)], src_data_rank=None))
        whole.append(other.weight)
    if style == "rowwise":
        layer.base_layer.register_forward_hook(_plain_sum)
    return whole


class _PartOfFactor(nn.Linear):
    """A factor that multiplies by this rank's part of its weight."""

    def forward(self, x: Tensor) -> Tensor:
        weight: Any = self.weight
        return F.linear(x, weight.to_local(grad_placements=weight.placements))


class _DropoutOfPart(nn.Dropout):
    """Dropout of this rank's part of numbers that are cut along their last dimension."""

    def __init__(self, p: float, mesh: Any) -> None:
        super().__init__(p)
        self.mesh = mesh

    def forward(self, x: Tensor) -> Tensor:
        if not self.training:
            return x
        kept = super().forward(x.new_ones(*x.shape[:-1], x.shape[-1] * self.mesh.size()))
        return x * kept.chunk(self.mesh.size(), -1)[self.mesh.get_local_rank()]


def _plain(module: nn.Module, inputs: tuple[Any, ...]) -> Any:
    """Take inputs that are the same on all ranks, each of which sees a part of their gradient."""
    return inputs[0].to_local(grad_placements=[Partial()])


def _plain_sum(module: nn.Module, inputs: Any, output: Any) -> Tensor:
    """Return this rank's summand of a result; the gradient of each is that of the sum."""
    summand: Tensor = output.to_local(grad_placements=[Replicate()])
    return summand
