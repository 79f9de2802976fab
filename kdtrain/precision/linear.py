"""Linear layers whose products change their number format between two steps.

`convert` makes the linear layers of a built model switchable, in place: the modules, their parameters and their names
stay the same objects, and so do the optimizer's state, state-dict keys and wrappers around the model. All layers share
one `Switch`. A compiled graph reads it once, as a constant: each position of the switch gets its own graph when it
first runs, and uses it again later. The switch is set between steps only.

Only the matrix products change. Weights are fp32 masters in every position, biases are added in the high format, and
everything but the linear layers of the backbone (output head, norms, embeddings, attention, the residual stream) never
changes. Experts that a model keeps as one three-dimensional parameter are not linear layers, and stay high as well.

Shape suffixes: N tokens, D inputs, O outputs.
"""

from collections import Counter
from collections.abc import Collection
from dataclasses import dataclass, field, replace
from typing import Any, Protocol, cast

import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from kdtrain.precision.emulated import (
    FP8_TILE,
    MX_BLOCK,
    FormatRecipe,
    Held,
    QuantizedLinear,
    WeightParts,
    hold,
)
from kdtrain.precision.modes import Switch


class Product(Protocol):
    """A back end's quantised product for one layer."""

    def __call__(self, x_ND: Tensor, weight_OD: Tensor, dtype: torch.dtype, high_forward: bool) -> Tensor:
        """Compute `x_ND @ weight_OD^T` in `dtype`, quantised here (unless `high_forward`) and in the backward."""
        ...


class Backend(Protocol):
    """A source of quantised products.

    One for layers in parts (`--tensor-parallel`) also has `part_multiple`, of which the width of each part must be a
    multiple, and its products `across(parts)`, which returns the product of this rank's `emulated.WeightParts`.
    """

    def refuses(self, inputs: int, outputs: int, transposed: bool) -> str | None:
        """Return why a layer of this shape cannot be quantised, or None."""
        ...

    def product(self, layer: nn.Module, inputs: int, outputs: int) -> Product:
        """Return the product for a layer."""
        ...


@dataclass(frozen=True)
class Emulated:
    """Quantised values in products of the high format: on every device, any shape, slower than no quantisation."""

    recipe: FormatRecipe
    held: Held | None = None
    """The weight of the only layer, quantised once, where it is constant."""
    parts: WeightParts | None = None
    """Of which weight the layer has this rank's."""

    @property
    def part_multiple(self) -> int:
        """The values in a tile or block, of which none reaches over a cut."""
        return {"mx": MX_BLOCK, "blockwise": FP8_TILE}.get(self.recipe.scaling, 1)

    def refuses(self, inputs: int, outputs: int, transposed: bool) -> str | None:
        """Return None: every shape can be quantised."""
        return None

    def product(self, layer: nn.Module, inputs: int, outputs: int) -> Product:
        """Return the product for a layer: the same for all."""
        return self

    def of_constant(self, weight_OD: Tensor) -> Product:
        """Return the product for a layer whose weight does not change."""
        return Emulated(self.recipe, hold(weight_OD, self.recipe))

    def across(self, parts: WeightParts) -> Product:
        """Return the product for this rank's part of a layer."""
        return replace(self, parts=parts)

    def __call__(self, x_ND: Tensor, weight_OD: Tensor, dtype: torch.dtype, high_forward: bool) -> Tensor:
        """Compute `x_ND @ weight_OD^T` (`emulated.QuantizedLinear`)."""
        held = self.held or (None,) * 4
        result: Tensor = QuantizedLinear.apply(x_ND, weight_OD, self.recipe, dtype, high_forward, self.parts, *held)
        return result


class _Switchable(nn.Module):
    switch: Switch
    product: Product
    transposed = False

    def forward(self, x: Tensor) -> Tensor:
        """Map x [..., D] to [..., O], in the format of the switch."""
        if self.switch.position == "high":
            return cast(Tensor, super().forward(x))
        layer = cast(Any, self)
        kind = x.device.type
        high_forward = self.switch.position == "high-forward"
        weight_OD = layer.weight.T if self.transposed else layer.weight
        dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else x.dtype
        y_NO = self.product(x.reshape(-1, x.shape[-1]), weight_OD, dtype, high_forward)
        y_NO = y_NO if layer.bias is None else y_NO + layer.bias.to(dtype)
        return y_NO.unflatten(0, x.shape[:-1])


class SwitchableLinear(_Switchable, nn.Linear):
    """An `nn.Linear` made by `convert`."""


class SwitchableConv1D(_Switchable, Conv1D):
    """GPT-2's linear layer, whose weight is [D, O], made by `convert`."""

    transposed = True


@dataclass
class Conversion:
    """The result of `convert`."""

    quantized: list[str] = field(default_factory=list)
    """Names of the layers that switch."""
    left: dict[str, str] = field(default_factory=dict)
    """Names of the layers that stay high, and why."""

    def __str__(self) -> str:
        reasons = Counter(self.left.values())
        left = ", ".join(f"{count} left high ({reason})" for reason, count in reasons.items())
        return f"{len(self.quantized)} linear layers quantised" + (f", {left}" if left else "")


def convert(
    model: nn.Module,
    switch: Switch,
    backend: Backend,
    *,
    head: nn.Module | None = None,
    adapters: Collection[nn.Module] = (),
    skip_first: int = 0,
    skip_last: int = 0,
    hold: bool = False,
) -> Conversion:
    """Make the linear layers of a model switchable, in place.

    head, adapters: the output head and the modules of adapters, which stay high. skip_first, skip_last: transformer
    layers at either end whose linear layers stay high (they lose most: arXiv 2509.25149); layers are the members of the
    model's longest list of modules. hold: quantise weights that are not trained once, and keep them so beside the
    weights, which must not change any more; TransformerEngine quantises them each time.
    """
    from kdtrain.models.head import layers_of  # transformers' models, which a list of capabilities does not need

    layers = layers_of(model)
    ends = layers[:skip_first] + (layers[-skip_last:] if skip_last else [])
    kept = {module for layer in ends for module in layer.modules()}
    done = Conversion()
    for name, layer in model.named_modules():
        if layer is head or type(layer) not in (nn.Linear, Conv1D):
            continue
        transposed = type(layer) is Conv1D
        outputs, inputs = reversed(layer.weight.shape) if transposed else layer.weight.shape
        reason: str | None
        if layer in kept:
            reason = "at the ends"
        elif layer in adapters:
            reason = "an adapter"
        else:
            reason = backend.refuses(inputs, outputs, transposed)
        if reason is not None:
            done.left[name] = reason
            continue
        layer.__class__ = SwitchableConv1D if transposed else SwitchableLinear
        switchable = cast(SwitchableLinear, layer)
        switchable.switch = switch
        switchable.product = backend.product(layer, inputs, outputs)
        if (
            hold
            and not layer.weight.requires_grad
            and (of_constant := getattr(switchable.product, "of_constant", None))
        ):
            switchable.product = of_constant(layer.weight.T if transposed else layer.weight)
        done.quantized.append(name)
    return done
