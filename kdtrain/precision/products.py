"""The three products of a linear layer with quantised operands, emulated.

    forward        y_NO  = q(x_ND) q(w_OD)^T      both in blocks along D
    input's        dx_ND = q(g_NO) q(w_OD)        both in blocks along O
    weight's       dw_OD = q(g_NO)^T q(x_ND)      both in blocks along N, the tokens

Each product quantises its operands along the axis it sums over, as a tensor core would want them; a tensor that enters
two products is quantised twice from what it was, never from an already rounded copy. Sums are fp32 inside bf16
products, or fp32 throughout where the high mode is fp32.

Shape suffixes: N tokens, D inputs, O outputs.
"""

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from kdtrain.precision.mx import ELEMENTS, FP8_TILE, ScalingControl, quantize_fp8, quantize_mx

Scaling = Literal["tensorwise", "rowwise", "blockwise", "mx"]


@dataclass(frozen=True)
class Recipe:
    """How operands are quantised."""

    scaling: Scaling
    """What shares a scale: a tensor, a row along the sum, a tile of 1 x 128 (weights 128 x 128), or an MX block."""
    forward: str = "e4m3"
    """Element of activations and weights."""
    gradient: str = "e4m3"
    """Element of gradients."""
    control: ScalingControl = "max"
    """How an MX block's exponent follows from its largest magnitude."""
    stochastic: bool = False
    """Whether gradients are rounded up or down by chance."""


def quantized_linear(
    x_ND: Tensor, weight_OD: Tensor, recipe: Recipe, dtype: torch.dtype, high_forward: bool = False
) -> Tensor:
    """`x_ND @ weight_OD^T` with quantised operands, in this product and in the two of its backward.

    x_ND: of any float dtype. weight_OD: fp32 master weights. dtype: of the result; products are taken in bf16, or in
    fp32 where that is asked for. high_forward: leave this product's operands alone, and quantise in the backward only.
    """
    result: Tensor = _QuantizedLinear.apply(x_ND, weight_OD, recipe, dtype, high_forward)
    return result


class _QuantizedLinear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: torch.autograd.function.FunctionCtx,
        x_ND: Tensor,
        weight_OD: Tensor,
        recipe: Recipe,
        dtype: torch.dtype,
        high_forward: bool,
    ) -> Tensor:
        ctx.save_for_backward(x_ND, weight_OD)
        ctx.recipe, ctx.dtype = recipe, dtype  # type: ignore[attr-defined]
        if high_forward:
            return x_ND.to(dtype) @ weight_OD.to(dtype).T
        compute = compute_dtype(dtype)
        x, x_scale = quantized_operand(x_ND, recipe, "activation", 1, compute)
        w, w_scale = quantized_operand(weight_OD, recipe, "weight", 1, compute)
        # autocast to fp16 would take this product in fp16, which scaled values of fp8 overflow
        with torch.autocast(x_ND.device.type, enabled=False):
            return _scaled(x @ w.T, x_scale, w_scale).to(dtype)

    @staticmethod
    def backward(  # type: ignore[override]
        ctx: torch.autograd.function.FunctionCtx, g_NO: Tensor
    ) -> tuple[Tensor, Tensor, None, None, None]:
        x_ND, weight_OD = ctx.saved_tensors  # type: ignore[attr-defined]
        recipe, compute = ctx.recipe, compute_dtype(ctx.dtype)  # type: ignore[attr-defined]
        g, g_scale = quantized_operand(g_NO, recipe, "gradient", 1, compute)
        w, w_scale = quantized_operand(weight_OD, recipe, "weight", 0, compute)
        dx_ND = _scaled(g @ w, g_scale, w_scale)
        g, g_scale = quantized_operand(g_NO, recipe, "gradient", 0, compute)
        x, x_scale = quantized_operand(x_ND, recipe, "activation", 0, compute)
        dw_OD = _scaled(g.T @ x, g_scale, x_scale)
        return dx_ND.to(x_ND.dtype), dw_OD.to(weight_OD.dtype), None, None, None


def compute_dtype(dtype: torch.dtype) -> torch.dtype:
    """fp32 for fp32; else bf16, which has fp32's range: in fp16 a block's scale could overflow."""
    return torch.float32 if dtype == torch.float32 else torch.bfloat16


def quantized_operand(
    values_RC: Tensor, recipe: Recipe, kind: str, axis: int, dtype: torch.dtype
) -> tuple[Tensor, Tensor | None]:
    """The quantised operand [R, C] in `dtype`, summed over along `axis`, and a scalar that is left for the product."""
    element = ELEMENTS[recipe.gradient if kind == "gradient" else recipe.forward]
    stochastic = recipe.stochastic and kind == "gradient"
    values_RC, scale = values_RC.float(), None
    if recipe.scaling == "mx":
        quantized = quantize_mx(values_RC, element, axis, recipe.control, stochastic=stochastic)
    else:
        tile = _tile(recipe.scaling, kind, axis, values_RC.shape)
        quantized, scale = quantize_fp8(values_RC, element, tile, stochastic=stochastic)
    return quantized.to(dtype), scale


def _tile(scaling: Scaling, kind: str, axis: int, shape: torch.Size) -> tuple[int, int] | None:
    if scaling == "tensorwise":
        return None
    if scaling == "blockwise" and kind == "weight":
        return (FP8_TILE, FP8_TILE)
    along = FP8_TILE if scaling == "blockwise" else shape[axis]
    return (1, along) if axis == 1 else (along, 1)


def _scaled(product: Tensor, first: Tensor | None, second: Tensor | None) -> Tensor:
    return product if first is None or second is None else product * (first * second)
