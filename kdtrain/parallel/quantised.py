"""Quantised products of layers that tensor ranks have in parts (`parallel.tensor`).

A layer is made switchable while it is whole; cutting it leaves its class and its switch. Here its product gets the
parts out of the DTensors that a plan makes, and learns how the weight is cut: scales that reach over the cut take the
largest magnitude of all tensor ranks, so that they are those of one process (`precision.emulated.WeightParts`).

What it gives up: blocks with a scale of their own that would reach over a cut, products that have no parts
(TransformerEngine makes scales of each rank's part alone), and weights that are quantised once and held.
"""

from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Partial, Shard

from kdtrain.precision.emulated import WeightParts
from kdtrain.precision.linear import Product


class PartProduct:
    """The product of this rank's part of a layer, over DTensors.

    Args:
        product: of the whole layer.
        mesh: the tensor ranks.
        style: of the plan: `colwise` cuts the outputs, `rowwise` the inputs.
    """

    def __init__(self, product: Any, mesh: Any, style: str) -> None:
        self.mesh = mesh
        inputs = style == "rowwise"
        self.own: Product = product.across(WeightParts(mesh, int(inputs)))
        self.gradient = [Shard(1) if inputs else Partial()]
        self.result = [Partial() if inputs else Shard(1)]

    def __call__(self, x_ND: DTensor, weight_OD: DTensor, dtype: torch.dtype, high_forward: bool) -> Tensor:
        """Compute this rank's part of `x_ND @ weight_OD^T`."""
        x, weight = x_ND.to_local(grad_placements=self.gradient), weight_OD.to_local()
        return DTensor.from_local(self.own(x, weight, dtype, high_forward), self.mesh, self.result, run_check=False)


def cut_product(layer: Any, mesh: Any, style: str) -> None:
    """Make the product of a layer, if it is switchable, that of this rank's part."""
    if (product := getattr(layer, "product", None)) is not None:
        layer.product = PartProduct(product, mesh, style)
