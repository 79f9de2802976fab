"""Muon (K. Jordan, kellerjordan.github.io/posts/muon) for hidden matrices, AdamW for the rest."""

import torch

from kdtrain import register_optimizer
from kdtrain.training.optimizers import FusedAdamW

MOMENTUM = 0.95


def orthogonal(matrix):
    """Approximate the nearest orthogonal matrix by Newton-Schulz iteration."""
    x = matrix / (matrix.norm() + 1e-7)
    x = x.T if (tall := x.shape[0] > x.shape[1]) else x
    for _ in range(5):
        square = x @ x.T
        x = 3.4445 * x + (-4.7750 * square + 2.0315 * square @ square) @ x
    return x.T if tall else x


@register_optimizer("muon")
class Muon(FusedAdamW):
    """Orthogonal updates of hidden matrices; AdamW for the rest."""

    def guarded_step(self, found_inf, scale=None):
        groups = self.param_groups
        hidden = [(group, each) for group in groups if group["role"] == "hidden" for each in group["params"]]
        self.param_groups = [group for group in groups if group["role"] != "hidden"]
        super().guarded_step(found_inf, scale)
        self.param_groups, taken = groups, found_inf == 0
        for group, weight in hidden:
            momentum = self.state[weight].setdefault("momentum", torch.zeros_like(weight))
            gradient = weight.grad if scale is None else weight.grad / scale
            moved = momentum * MOMENTUM + gradient
            update = orthogonal(gradient + MOMENTUM * moved) * max(1, weight.shape[0] / weight.shape[1]) ** 0.5
            decayed = weight.detach() * (1 - group["lr"] * group["weight_decay"])
            momentum.copy_(torch.where(taken, moved, momentum))
            weight.detach().copy_(torch.where(taken, decayed - group["lr"] * update, weight.detach()))

    def slots(self, parameter):
        """Return the shape of the one momentum of a hidden matrix."""
        role = next(each["role"] for each in self.param_groups if any(parameter is p for p in each["params"]))
        return {"momentum": parameter.shape} if role == "hidden" else super().slots(parameter)
