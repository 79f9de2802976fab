"""Where quantised products come from: what each library can do here, and the layer's product from it.

Three back ends give the same thing, a product of quantised operands with a backward of the same kind, for fp32 master
weights that stay where they are:
- `emulated`: values rounded in fp32 (`mx`), everywhere, for every format; slower than not to quantise.
- `torchao`: fp8 by `torch._scaled_mm`. The layer's settings are taken from a stand-in that went through
  `convert_to_float8_training`, because that call also applies torchao's work-around for a miscompiled fp8 store. On a
  CPU the products run natively, but no CPU instruction makes them faster: it counts as not real.
- `transformer-engine`: fp8 by cuBLAS, with current or block scaling. Delayed scaling is never used: what it remembers
  is stale when a run comes back from its fallback. A `te.Linear` is made around the layer's own parameters, and is no
  submodule, so that names and state dicts stay.
Real fp8 needs a GPU of compute capability 8.9 (Ada, Hopper) or more; MX formats are emulated everywhere.

Shape suffixes: N tokens, D inputs, O outputs.
"""

import contextlib
import importlib
import logging
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from kdtrain.precision.linear import Product
from kdtrain.precision.products import Recipe, compute_dtype

_DTYPES = {"e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2}
_REAL_SINCE = (8, 9)


@dataclass(frozen=True)
class Torchao:
    """fp8 by torchao, one scale a tensor or a row."""

    recipe: Recipe

    def refuses(self, inputs: int, outputs: int, transposed: bool) -> str | None:
        """Why a layer of this shape cannot be quantised, or None."""
        return _no_multiple(16, inputs, outputs)

    def product(self, layer: nn.Module, inputs: int, outputs: int) -> Product:
        """The product for a layer."""
        settings = [_converted(inputs, outputs, self.recipe, high) for high in (False, True)]
        return _TorchaoProduct(settings[0], settings[1])


class _TorchaoProduct:
    def __init__(self, quantized: Any, high_forward: Any) -> None:
        from torchao.float8.float8_linear import matmul_with_hp_or_float8_args

        self.function = matmul_with_hp_or_float8_args
        self.quantized = (quantized.linear_mm_config, quantized.config)
        self.high_forward = (high_forward.linear_mm_config, high_forward.config)

    def __call__(self, x_ND: Tensor, weight_OD: Tensor, dtype: torch.dtype, high_forward: bool) -> Tensor:
        settings = self.high_forward if high_forward else self.quantized
        compute = compute_dtype(dtype)  # scaled rows give bf16 and no fp16
        y_NO: Tensor = self.function.apply(x_ND.to(compute), weight_OD.to(compute).T, *settings)
        return y_NO.to(dtype)


def _converted(inputs: int, outputs: int, recipe: Recipe, high_forward: bool) -> Any:
    """A stand-in layer without storage that torchao made its own."""
    from torchao.float8 import CastConfig, Float8LinearConfig, ScalingGranularity, convert_to_float8_training
    from torchao.float8.config import ScalingType

    rowwise = recipe.scaling == "rowwise"
    granularity = ScalingGranularity.AXISWISE if rowwise else ScalingGranularity.TENSORWISE
    forward = CastConfig(scaling_granularity=granularity, target_dtype=_DTYPES[recipe.forward])
    gradient = CastConfig(scaling_granularity=granularity, target_dtype=_DTYPES[recipe.gradient])
    high = CastConfig(scaling_type=ScalingType.DISABLED, target_dtype=_DTYPES[recipe.forward])
    config = Float8LinearConfig(
        cast_config_input=high if high_forward else forward,
        cast_config_input_for_grad_weight=forward,
        cast_config_weight=high if high_forward else forward,
        cast_config_weight_for_grad_input=forward,
        cast_config_grad_output=gradient,
        round_scales_to_power_of_2=rowwise,
        pad_inner_dim=True,  # the number of tokens, over which the weight's gradient sums, is nobody's choice
    )
    stand_in = nn.Sequential(nn.Linear(inputs, outputs, bias=False, device="meta"))
    return convert_to_float8_training(stand_in, config=config)[0]


@dataclass(frozen=True)
class TransformerEngine:
    """fp8 by TransformerEngine, one scale a tensor or a block."""

    recipe: Recipe

    def refuses(self, inputs: int, outputs: int, transposed: bool) -> str | None:
        """Why a layer of this shape cannot be quantised, or None."""
        if transposed:
            return "TransformerEngine takes no transposed weights"
        return _no_multiple(_multiple(self.recipe), inputs, outputs)

    def product(self, layer: nn.Module, inputs: int, outputs: int) -> Product:
        """The product for a layer."""
        return _TransformerEngineProduct(layer, inputs, outputs, self.recipe)


class _TransformerEngineProduct:
    def __init__(self, layer: nn.Module, inputs: int, outputs: int, recipe: Recipe) -> None:
        import transformer_engine.pytorch as te
        from transformer_engine.common import recipe as recipes

        kind = recipes.Float8BlockScaling if recipe.scaling == "blockwise" else recipes.Float8CurrentScaling
        formats = {("e4m3", "e4m3"): recipes.Format.E4M3, ("e4m3", "e5m2"): recipes.Format.HYBRID}
        self.recipe = kind(fp8_format=formats[recipe.forward, recipe.gradient])
        self.autocast = te.autocast
        self.multiple = _multiple(recipe)
        self.linear = te.Linear(inputs, outputs, bias=False, params_dtype=torch.float32, device="meta")
        self.linear.weight = layer.weight

    def __call__(self, x_ND: Tensor, weight_OD: Tensor, dtype: torch.dtype, high_forward: bool) -> Tensor:
        if self.linear.weight is not weight_OD:  # a sharded model gives its layers another parameter than they had
            self.linear.weight = weight_OD
        missing = -len(x_ND) % self.multiple
        padded_ND = F.pad(x_ND.to(dtype), (0, 0, 0, missing)) if missing else x_ND.to(dtype)
        # outside of torch's autocast a te.Linear refuses inputs that are not of its weight's dtype
        with _autocast(dtype), self.autocast(enabled=True, recipe=self.recipe):
            y_NO: Tensor = self.linear(padded_ND)
        return y_NO[: len(x_ND)]


def _autocast(dtype: torch.dtype) -> contextlib.AbstractContextManager[object]:
    return contextlib.nullcontext() if dtype == torch.float32 else torch.autocast("cuda", dtype)


def _multiple(recipe: Recipe) -> int:
    """What TransformerEngine wants all sizes, the number of tokens too, to be a multiple of."""
    return 128 if recipe.scaling == "blockwise" else 16


def _no_multiple(of: int, inputs: int, outputs: int) -> str | None:
    return f"its sizes are no multiples of {of}" if inputs % of or outputs % of else None


def why_not_torchao(device: torch.device) -> str | None:
    """Why torchao cannot be used on `device`, or None."""
    reason = _why_not_import("torchao.float8")
    if reason is not None:
        return reason
    if device.type == "cuda" and torch.cuda.get_device_capability(device) < _REAL_SINCE:
        return _too_old(device)
    return None


def why_not_transformer_engine(device: torch.device) -> str | None:
    """Why TransformerEngine cannot be used on `device`, or None."""
    if device.type != "cuda":
        return "TransformerEngine runs on CUDA devices only"
    reason = _why_not_import("transformer_engine.pytorch")
    if reason is not None:
        return reason
    te = importlib.import_module("transformer_engine.pytorch")
    available, why = te.is_fp8_available(return_reason=True)
    return None if available else str(why)


def why_not_real(device: torch.device) -> str | None:
    """Why no fp8 product on `device` is faster than a bf16 one, or None."""
    if device.type != "cuda":
        return "no CPU instruction multiplies fp8"
    return None if torch.cuda.get_device_capability(device) >= _REAL_SINCE else _too_old(device)


def _too_old(device: torch.device) -> str:
    major, minor = torch.cuda.get_device_capability(device)
    return f"compute capability {major}.{minor}, and fp8 needs 8.9"


def _why_not_import(name: str) -> str | None:
    """Why a library cannot be imported, in one line; TransformerEngine without its core raises no ImportError."""
    try:
        with _quiet_import():
            importlib.import_module(name)
    except Exception as error:
        return " ".join(f"{name.split('.')[0]} cannot be imported: {type(error).__name__}: {error}".split())[:160]
    return None


@contextlib.contextmanager
def _quiet_import() -> Iterator[None]:
    """torchao warns of each of its CUDA files that a machine cannot load, and torch of how torchao registers types."""
    loggers = [logging.getLogger(name) for name in ("torchao", "torch.utils._pytree")]
    before = [each.level for each in loggers]
    try:
        for each in loggers:
            each.setLevel(logging.ERROR)
        yield
    finally:
        for each, level in zip(loggers, before, strict=True):
            each.setLevel(level)
