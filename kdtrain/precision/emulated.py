"""Numbers of 8 and 4 bits, emulated on any device: a tensor's values after rounding to them, and their products.

An element format rounds to a grid that widens with the exponent. MX (OCP Microscaling Formats 1.0) gives every block
of 32 elements one scale, a power of two kept in 8 bits (e8m0); emulated fp8 gives one to a tensor, to a row, or to a
tile of 128. Everything is arithmetic on fp32 tensors of the same shape, so it runs wherever fp32 runs, and it compiles;
the results are values, not bits. Products of two such tensors in bf16 or fp32 are exact up to the order of their sums,
because the values and power-of-two scales fit into either.

Elements beyond the largest are clamped to it, in code and not by a cast, whose behaviour differs between versions of
torch. A tile that holds an infinity or a NaN becomes NaN as a whole: e8m0 has a NaN and no infinity, and clamping an
infinity would hide it from the trainer. A tile of zeros stays zero. The smallest scale is 2^-126, the smallest normal
number of fp32 (e8m0 goes to 2^-127), because some devices flush smaller numbers to zero: a tile that needs a smaller
scale is rounded on the grid of this one, or to zeros if it lies below that grid. A value that rounds beyond fp32
becomes infinite, as it would in fp32.

If a size is not a multiple of a tile, the last tile is narrower: it has the values that it would have if it were padded
with zeros, which change no scale. It is quantised apart and concatenated, not padded: inductor's code for a CPU (torch
2.13) gives wrong numbers when rows of padded tiles are cut to a length that is not a multiple of its vectors.

A linear layer makes three products of quantised operands:

    forward        y_NO  = q(x_ND) q(w_OD)^T      both in blocks along D
    input's        dx_ND = q(g_NO) q(w_OD)        both in blocks along O
    weight's       dw_OD = q(g_NO)^T q(x_ND)      both in blocks along N, the tokens

Each product quantises its operands along the axis that it sums over, as a tensor core requires; a tensor in two
products is quantised twice from its own values, never from a rounded copy. Sums are fp32 inside bf16 products, or fp32
throughout if the high mode is fp32.

Where several ranks hold parts of a weight, its outputs or its inputs, each makes its part of the products. A scale that
reaches over the cut, of a tensor, or of a row along the sum, takes the largest magnitude of all ranks (`WeightParts`):
scales and quantised values are those of one process. Tiles and blocks end at the cut, see `Emulated.part_multiple`.

Shape suffixes: N tokens, D inputs, O outputs.
"""

import contextlib
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from kdtrain.precision.draws import DrawsApart
from kdtrain.ranks import agreed_max

MX_BLOCK = 32
FP8_TILE = 128

ScalingControl = Literal["max", "max_minus_1"]

_SMALLEST_SCALE, _LARGEST_SCALE = 2.0**-126, 2.0**127


@dataclass(frozen=True)
class Element:
    """A format of few bits: sign, exponent, mantissa (OCP MX 1.0, section 5.3)."""

    mantissa_bits: int
    min_exponent: int
    """Of the smallest normal number; smaller ones are subnormal, on one even grid."""
    max_exponent: int
    largest: float


ELEMENTS = {
    "e4m3": Element(3, -6, 8, 448.0),
    "e5m2": Element(2, -14, 15, 57344.0),
    "e2m1": Element(1, 0, 2, 6.0),
}


def round_to(values: Tensor, element: Element, *, stochastic: bool = False) -> Tensor:
    """Round fp32 `values`, clamped to the largest of `element`, to its grid; NaN stays NaN.

    It rounds to nearest, ties to even; or, `stochastic`, up or down at random (by the device's default generator) so
    that the mean is the value itself.
    """
    clamped = values.clamp(-element.largest, element.largest)
    step = _power_of_two(clamped).clamp(min=2.0**element.min_exponent) * 2.0**-element.mantissa_bits
    ratio = clamped / step
    rounded = torch.floor(ratio + torch.rand_like(ratio)) if stochastic else torch.round(ratio)
    return rounded * step


def quantize_mx(
    values_RC: Tensor,
    element: Element,
    axis: int,
    control: ScalingControl = "max",
    *,
    stochastic: bool = False,
) -> Tensor:
    """Return fp32 `values_RC` [R, C] after rounding to MX, in blocks of 32 along `axis` (0 or 1).

    control: the shared exponent of a block whose largest magnitude is a, for an element of largest exponent e:
    `max` floor(log2 a) - e, the OCP's rule, which clamps up to half of the top binade; `max_minus_1` one more, which
    clamps nothing.
    """

    def quantize(tiles: Tensor) -> Tensor:
        scale = _shared_scale(_largest(tiles), element, control)
        return round_to(tiles / scale, element, stochastic=stochastic) * scale

    return _by_tiles(values_RC, _block(axis), quantize)


def mx_scale(values_RC: Tensor, element: Element, axis: int, control: ScalingControl) -> Tensor:
    """Return the scale [R, C] that `quantize_mx` gives each element of `values_RC`."""
    return _by_tiles(
        values_RC, _block(axis), lambda tiles: _shared_scale(_largest(tiles), element, control).expand_as(tiles)
    )


def quantize_fp8(
    values_RC: Tensor,
    element: Element,
    tile: tuple[int, int] | None,
    *,
    stochastic: bool = False,
    group: Any = None,
) -> tuple[Tensor, Tensor | None]:
    """Return fp32 `values_RC` [R, C] after rounding to fp8, and a scalar with which the caller multiplies them.

    tile: None for one scale a tensor, the fp32 number largest / amax; the scalar is its inverse, because rescaled
    values would not fit into bf16. Else the sizes [r, c] of the tiles that share a scale, the largest power of two that
    is at most largest / amax; the scalar is None. group: of the ranks whose values share each scale.
    """
    if tile is None:
        scale = element.largest / _largest_or_nan(values_RC.abs().amax(), group).clamp(min=1e-30)
        return round_to(values_RC * scale, element, stochastic=stochastic), 1.0 / scale

    def quantize(tiles: Tensor) -> Tensor:
        scale = _power_of_two(element.largest / _largest(tiles, group).clamp(min=1e-30))
        scale = torch.where(torch.isfinite(scale), scale, torch.nan)
        return round_to(tiles * scale, element, stochastic=stochastic) / scale

    return _by_tiles(values_RC, tile, quantize), None


def _power_of_two(values: Tensor) -> Tensor:
    """Return 2^floor(log2 |v|) by the exponent's bits: 0 for zeros and subnormals, infinity for infinities and NaN."""
    return (values.view(torch.int32) & 0x7F800000).view(torch.float32)


def _shared_scale(largest: Tensor, element: Element, control: ScalingControl) -> Tensor:
    exponent = element.max_exponent - (control == "max_minus_1")
    scale = _power_of_two(largest) * 2.0**-exponent
    scale = scale.clamp(_SMALLEST_SCALE, _LARGEST_SCALE)
    return torch.where(torch.isfinite(largest), scale, torch.nan)


def _block(axis: int) -> tuple[int, int]:
    return (1, MX_BLOCK) if axis == 1 else (MX_BLOCK, 1)


def _by_tiles(values_RC: Tensor, tile: tuple[int, int], function: Callable[[Tensor], Tensor]) -> Tensor:
    """Apply `function` to [R, C] as tiles [R / r, r, C / c, c]; the result has the shape [R, C]."""
    for axis, width in enumerate(tile):
        rest = values_RC.shape[axis] % width
        if rest and rest < values_RC.shape[axis]:
            parts = values_RC.split([values_RC.shape[axis] - rest, rest], axis)
            return torch.cat([_by_tiles(each, tile, function) for each in parts], axis)
    rows, columns = (min(width, size) for width, size in zip(tile, values_RC.shape, strict=True))
    tiles = values_RC.unflatten(1, (-1, columns)).unflatten(0, (-1, rows))
    return function(tiles).flatten(2, 3).flatten(0, 1)


def _largest(tiles: Tensor, group: Any = None) -> Tensor:
    """Return the largest magnitude of each tile [R / r, 1, C / c, 1]; NaN if it is non-finite."""
    return _largest_or_nan(tiles.abs().amax(dim=(1, 3), keepdim=True), group)


def _largest_or_nan(largest: Tensor, group: Any = None) -> Tensor:
    if group is not None:  # the largest of a NaN and a number is either
        largest = agreed_max(torch.nan_to_num(largest, nan=torch.inf, posinf=torch.inf), group)
    return torch.where(torch.isfinite(largest), largest, torch.nan)


Scaling = Literal["tensorwise", "rowwise", "blockwise", "mx"]


@dataclass(frozen=True)
class FormatRecipe:
    """The recipe by which operands are quantised."""

    scaling: Scaling
    """The unit with one scale: a tensor, a row along the sum, a tile of 1 x 128 (weights 128 x 128), or an MX block."""
    forward: str = "e4m3"
    """Element of activations and weights."""
    gradient: str = "e4m3"
    """Element of gradients."""
    control: ScalingControl = "max"
    """How the largest magnitude of an MX block decides its exponent."""
    stochastic: bool = False
    """Round gradients stochastically."""

    def rounded(self, values_RC: Tensor, kind: str) -> tuple[Tensor, Tensor | float]:
        """Return an operand [R, C] of a sum along C as the format holds it, in fp32, and its largest magnitudes [R, C].

        kind: weight, activation or gradient. The largest magnitudes are infinite where no element is clamped.
        """
        kept, scale = quantized_operand(values_RC, self, kind, 1, torch.float32)
        element = ELEMENTS[self.gradient if kind == "gradient" else self.forward]
        if self.scaling == "mx":
            return kept, element.largest * mx_scale(values_RC, element, 1, self.control)
        return kept if scale is None else kept * scale, math.inf


@dataclass(frozen=True)
class WeightParts:
    """A weight [O, D] of which each rank of a mesh of one dimension holds a part."""

    mesh: Any
    dimension: int
    """That is cut: 0, the outputs, and gradients with them; 1, the inputs, and activations with them."""

    def cut(self, kind: str) -> int | None:
        """Return the dimension along which an operand is cut; None if each rank has it whole."""
        if kind == "weight":
            return self.dimension
        return 1 if (kind == "activation") == (self.dimension == 1) else None

    def sharing(self, scaling: Scaling, kind: str, axis: int) -> Any:
        """Return the mesh if scales of an operand, for a sum along `axis`, reach over the cut; else None."""
        cut = self.cut(kind)
        reach = cut is not None and (scaling == "tensorwise" or (scaling == "rowwise" and axis == cut))
        return self.mesh if reach else None


Held = tuple[Tensor, Tensor | None, Tensor | None, Tensor | None]
"""A weight quantised for the sum along D and its scale, and both for the sum along O; None where they are the same: the
compiler takes no tensor twice."""


def hold(weight_OD: Tensor, recipe: FormatRecipe) -> Held:
    """Quantise a weight that does not change, for `QuantizedLinear`; bf16, which holds every quantised value."""
    with torch.no_grad():
        along_D = quantized_operand(weight_OD, recipe, "weight", 1, torch.bfloat16)
        along_O: tuple[Tensor | None, Tensor | None] = (None, None)
        if recipe.scaling in ("rowwise", "mx"):
            along_O = quantized_operand(weight_OD, recipe, "weight", 0, torch.bfloat16)
    return *along_D, *along_O


class QuantizedLinear(torch.autograd.Function):
    """Computes `x_ND @ weight_OD^T` with quantised operands, in this product and in the two of its backward.

    x_ND: of any float dtype. weight_OD: fp32 master weights. dtype: of the result; products are in bf16, or in fp32 if
    that is `dtype`. high_forward: quantise in the backward only. parts: of what x and weight are this rank's. The last
    four: the weight by `hold`, if it is constant.
    """

    @staticmethod
    def forward(
        ctx: torch.autograd.function.FunctionCtx,
        x_ND: Tensor,
        weight_OD: Tensor,
        recipe: FormatRecipe,
        dtype: torch.dtype,
        high_forward: bool,
        parts: WeightParts | None,
        w_D: Tensor | None,
        scale_D: Tensor | None,
        w_O: Tensor | None,
        scale_O: Tensor | None,
    ) -> Tensor:
        w_O, scale_O = (w_D, scale_D) if w_O is None else (w_O, scale_O)
        ctx.save_for_backward(x_ND, weight_OD, w_O, scale_O)  # type: ignore[arg-type]
        ctx.recipe, ctx.dtype, ctx.parts = recipe, dtype, parts  # type: ignore[attr-defined]
        if high_forward:
            return x_ND.to(dtype) @ weight_OD.to(dtype).T
        compute = compute_dtype(dtype)
        x, x_scale = quantized_operand(x_ND, recipe, "activation", 1, compute, parts)
        w, w_scale = _operand(weight_OD, recipe, 1, compute, w_D, scale_D, parts)
        # Autocast to fp16 would compute this product in fp16, which scaled values of fp8 overflow.
        with torch.autocast(x_ND.device.type, enabled=False):
            return _scaled(x @ w.T, x_scale, w_scale, dtype)

    @staticmethod
    def backward(  # type: ignore[override]
        ctx: torch.autograd.function.FunctionCtx, g_NO: Tensor
    ) -> tuple[Tensor | None, ...]:
        x_ND, weight_OD, w_O, scale_O = ctx.saved_tensors  # type: ignore[attr-defined]
        recipe, compute, parts = ctx.recipe, compute_dtype(ctx.dtype), ctx.parts  # type: ignore[attr-defined]
        g, g_scale = quantized_operand(g_NO, recipe, "gradient", 1, compute, parts)
        w, w_scale = _operand(weight_OD, recipe, 0, compute, w_O, scale_O, parts)
        dx_ND = _scaled(g @ w, g_scale, w_scale, x_ND.dtype)
        if not ctx.needs_input_grad[1]:  # type: ignore[attr-defined]
            return dx_ND, *(None,) * 9
        g, g_scale = quantized_operand(g_NO, recipe, "gradient", 0, compute, parts)
        x, x_scale = quantized_operand(x_ND, recipe, "activation", 0, compute, parts)
        return dx_ND, _scaled(g.T @ x, g_scale, x_scale, weight_OD.dtype), *(None,) * 8


def _operand(
    weight_OD: Tensor,
    recipe: FormatRecipe,
    axis: int,
    compute: torch.dtype,
    held: Tensor | None,
    scale: Tensor | None,
    parts: WeightParts | None,
) -> tuple[Tensor, Tensor | None]:
    """Return the weight for a sum along `axis`, quantised now or `held`."""
    if held is None:
        return quantized_operand(weight_OD, recipe, "weight", axis, compute, parts)
    return held.to(compute), scale


def compute_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return fp32 for fp32; else bf16, which has fp32's range: in fp16 a block's scale could overflow."""
    return torch.float32 if dtype == torch.float32 else torch.bfloat16


def quantized_operand(
    values_RC: Tensor,
    recipe: FormatRecipe,
    kind: str,
    axis: int,
    dtype: torch.dtype,
    parts: WeightParts | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Return the quantised operand [R, C] in `dtype`, for a sum along `axis`, and a scalar factor of the product.

    parts: where the operand belongs to a weight in parts. A part is rounded stochastically by draws of its own, a whole
    operand by the same draws on each rank.
    """
    element = ELEMENTS[recipe.gradient if kind == "gradient" else recipe.forward]
    stochastic = recipe.stochastic and kind == "gradient"
    values_RC = values_RC.float()
    scale = None
    draws: contextlib.AbstractContextManager[None] = contextlib.nullcontext()
    if stochastic and parts is not None and parts.cut(kind) is not None:
        draws = DrawsApart(parts.mesh.get_local_rank(), values_RC.device)
    with draws:
        if recipe.scaling == "mx":
            quantized = quantize_mx(values_RC, element, axis, recipe.control, stochastic=stochastic)
        else:
            tile = _tile(recipe.scaling, kind, axis, values_RC.shape)
            mesh = None if parts is None else parts.sharing(recipe.scaling, kind, axis)
            group = None if mesh is None else mesh.get_group()
            quantized, scale = quantize_fp8(values_RC, element, tile, stochastic=stochastic, group=group)
    return quantized.to(dtype), scale


def _tile(scaling: Scaling, kind: str, axis: int, shape: torch.Size) -> tuple[int, int] | None:
    if scaling == "tensorwise":
        return None
    if scaling == "blockwise" and kind == "weight":
        return (FP8_TILE, FP8_TILE)
    along = FP8_TILE if scaling == "blockwise" else shape[axis]
    return (1, along) if axis == 1 else (along, 1)


def _scaled(product: Tensor, first: Tensor | None, second: Tensor | None, dtype: torch.dtype) -> Tensor:
    scaled = product if first is None or second is None else product * (first * second)
    return scaled if scaled.dtype == dtype else scaled.to(dtype)  # as in models.frozen: no cast to its own dtype
