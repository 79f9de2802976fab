"""Back ends of quantised products: what each can do on a device, which one a run gets, and its formats.

A back end gives each linear layer a product of quantised operands with a backward of the same kind, over the layer's
own fp32 master weights:
- `emulated`: values rounded in fp32 (`kdtrain.precision.emulated`), everywhere, for every format; slower than no
  quantisation.
- `torchao`: fp8 by `torch._scaled_mm`. The layer's settings come from a stand-in that `convert_to_float8_training` has
  converted, because that call also applies torchao's work-around for a miscompiled fp8 store. On a CPU the products run
  natively, but no CPU instruction makes them faster: it counts as not real.
- `transformer-engine`: fp8 by cuBLAS, with current or block scaling. Delayed scaling is never used: its history is
  stale when a run comes back from its fallback. A `te.Linear` wraps the layer's own parameters and is not a submodule,
  so that names and state dicts stay the same.
Real fp8 needs a GPU of compute capability 8.9 (Ada, Hopper) or more; MX formats are emulated everywhere. A small
product decides what a device can do, not a version. `register_backend` adds a back end; `auto` never chooses it.

Shape suffixes: N tokens, D inputs, O outputs.
"""

import contextlib
import importlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from kdtrain.config.choices import BACKENDS
from kdtrain.config.sections import QUANTIZED, QuantizationConfig
from kdtrain.errors import UsageError
from kdtrain.imports import quiet_import
from kdtrain.precision.controller import Policy
from kdtrain.precision.emulated import FormatRecipe, Scaling, ScalingControl, WeightParts, compute_dtype
from kdtrain.precision.linear import Backend, Emulated, Product, convert
from kdtrain.precision.modes import Switch, has_bf16

_DTYPES = {"e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2}

_ORDER = ("torchao", "transformer-engine", "emulated")
"""The order in which `auto` tries them: torchao compiles with the model, keeps no state, and works with every
wrapper."""


def why_not_torchao(device: torch.device) -> str | None:
    """Return why torchao cannot be used on `device`, or None."""
    return _why_not_import("torchao.float8") or (why_not_real(device) if device.type == "cuda" else None)


def why_not_transformer_engine(device: torch.device) -> str | None:
    """Return why TransformerEngine cannot be used on `device`, or None."""
    if device.type != "cuda":
        return "TransformerEngine runs on CUDA devices only"
    reason = _why_not_import("transformer_engine.pytorch")
    if reason is not None:
        return reason
    te = importlib.import_module("transformer_engine.pytorch")
    missing = [name for name in ("Linear", "autocast", "is_fp8_available") if not hasattr(te, name)]
    if missing:
        return f"this TransformerEngine has no {missing[0]}; install 2.9 or newer"
    available, why = te.is_fp8_available(return_reason=True)
    return None if available else str(why)


def why_not_real(device: torch.device) -> str | None:
    """Return why no fp8 product on `device` is faster than a bf16 one, or None."""
    if device.type != "cuda":
        return "no CPU instruction multiplies fp8"
    major, minor = torch.cuda.get_device_capability(device)
    return None if (major, minor) >= (8, 9) else f"compute capability {major}.{minor}, and fp8 needs 8.9"


def _why_not_import(name: str) -> str | None:
    """Return why a library cannot be imported, in a line; TransformerEngine without its core raises no ImportError."""
    try:
        with quiet_import():
            importlib.import_module(name)
    except Exception as error:
        return " ".join(f"{name.split('.')[0]} cannot be imported: {type(error).__name__}: {error}".split())[:160]
    return None


@dataclass(frozen=True)
class BackendEntry:
    """A back end, and the modes and recipes that it supports."""

    make: Callable[[FormatRecipe], Backend]
    modes: tuple[str, ...]
    scalings: tuple[str, ...]
    every_recipe: bool
    why_not: Callable[[torch.device], str | None]
    why_not_real: Callable[[torch.device], str | None]


Maker = TypeVar("Maker", bound=Callable[[FormatRecipe], Backend])


def register_backend(
    name: str,
    *,
    modes: tuple[str, ...] = ("fp8",),
    scalings: tuple[str, ...] = ("tensorwise",),
    every_recipe: bool = False,
    why_not: Callable[[torch.device], str | None] = lambda device: None,
    why_not_real: Callable[[torch.device], str | None] = why_not_real,
    help: str = "",
) -> Callable[[Maker], Maker]:
    """Return a decorator that makes a class (a `Backend` built from a `FormatRecipe`) what `--fp8-backend NAME` takes.

    Args:
        name: as users write it.
        modes: the modes that it supports, of `QUANTIZED`.
        scalings: the values of `--fp8-recipe` that it supports.
        every_recipe: True if it supports pure e5m2 and stochastic rounding too.
        why_not: why it cannot be used on a device, or None.
        why_not_real: why its products are not faster there than those of the high mode, or None.
        help: its line in `--help`; by default the first of the docstring.
    """
    how = (modes, scalings, every_recipe, why_not, why_not_real)
    return BACKENDS.registers(name, help, lambda make: BackendEntry(make, *how))


@register_backend("torchao", scalings=("tensorwise", "rowwise"), why_not=why_not_torchao)
@dataclass(frozen=True)
class Torchao:
    """fp8 by torchao, one scale a tensor or a row."""

    recipe: FormatRecipe
    part_multiple = 16

    def refuses(self, inputs: int, outputs: int, transposed: bool) -> str | None:
        """Return why a layer of this shape cannot be quantised, or None."""
        return _no_multiple(self.part_multiple, inputs, outputs)

    def product(self, layer: nn.Module, inputs: int, outputs: int) -> Product:
        """Return the product for a layer."""
        quantized, late = (_converted(inputs, outputs, self.recipe, high_forward) for high_forward in (False, True))
        return _TorchaoProduct(quantized, late, self.recipe.scaling)


class _TorchaoProduct:
    def __init__(self, quantized: Any, high_forward: Any, scaling: Scaling) -> None:
        from torchao.float8.float8_linear import matmul_with_hp_or_float8_args

        self.function, self.scaling = matmul_with_hp_or_float8_args, scaling
        self.quantized = (quantized.linear_mm_config, quantized.config)
        self.high_forward = (high_forward.linear_mm_config, high_forward.config)

    def __call__(self, x_ND: Tensor, weight_OD: Tensor, dtype: torch.dtype, high_forward: bool) -> Tensor:
        settings = self.high_forward if high_forward else self.quantized
        compute = compute_dtype(dtype)  # scaled rows support bf16 and not fp16
        y_NO: Tensor = self.function.apply(x_ND.to(compute), weight_OD.to(compute).T, *settings)
        return y_NO.to(dtype)

    def of_constant(self, weight_OD: Tensor) -> Product:
        """Return the product for a layer whose weight does not change."""
        return _ConstantTorchaoProduct(self, weight_OD)

    def across(self, parts: WeightParts) -> Product:
        """Return the product for this rank's part of a layer."""
        return _TorchaoPart(self, parts)

    def cast(self, values: Tensor, how: Any, role: Any, axis: int, mesh: Any = None) -> Any:
        """Cast `values` to fp8, with scales along `axis` where rows have their own, over the ranks of `mesh`."""
        from torchao.float8.float8_linear import get_maybe_axiswise_dim, hp_tensor_to_float8_dynamic

        mm, config = self.quantized
        return hp_tensor_to_float8_dynamic(
            values,
            how.target_dtype,
            mm,
            reduce_amax=mesh is not None,
            gemm_input_role=role,
            device_mesh=mesh,
            scaling_granularity=how.scaling_granularity,
            axiswise_dim=get_maybe_axiswise_dim(axis, how.scaling_granularity),
            round_scales_to_power_of_2=config.round_scales_to_power_of_2,
        )


class _TorchaoPart:
    """`_TorchaoProduct` of a part of a weight, whose scales reach over the parts."""

    def __init__(self, product: _TorchaoProduct, parts: WeightParts) -> None:
        self.product = product
        self.parts = parts
        self.config = product.quantized[1]

    def __call__(self, x_ND: Tensor, weight_OD: Tensor, dtype: torch.dtype, high_forward: bool) -> Tensor:
        compute = compute_dtype(dtype)
        y_NO: Tensor = _PartOfWeight.apply(x_ND.to(compute), weight_OD.to(compute), self, high_forward)
        return y_NO.to(dtype)

    def cast(self, values: Tensor, how: Any, kind: str, axis: int) -> Any:
        """Cast an operand to fp8 for a sum along `axis`."""
        from torchao.float8.float8_training_tensor import GemmInputRole

        roles = {"activation": GemmInputRole.INPUT, "weight": GemmInputRole.WEIGHT}
        role = roles.get(kind, GemmInputRole.GRAD_OUTPUT)
        last = -axis  # torchao calls the second dimension the last
        return self.product.cast(values, how, role, last, self.parts.sharing(self.product.scaling, kind, axis))


class _PartOfWeight(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_ND: Tensor, weight_OD: Tensor, part: _TorchaoPart, high_forward: bool) -> Tensor:
        ctx.save_for_backward(x_ND, weight_OD)
        ctx.part = part
        config = part.config
        if high_forward:
            return x_ND @ weight_OD.T
        x = part.cast(x_ND, config.cast_config_input, "activation", 1)
        return torch.mm(x, part.cast(weight_OD, config.cast_config_weight, "weight", 1).t())

    @staticmethod
    def backward(ctx: Any, g_NO: Tensor) -> tuple[Tensor, Tensor, None, None]:  # type: ignore[override]
        (x_ND, weight_OD), part, config = ctx.saved_tensors, ctx.part, ctx.part.config
        g = part.cast(g_NO, config.cast_config_grad_output, "gradient", 1)
        dx_ND = torch.mm(g, part.cast(weight_OD, config.cast_config_weight_for_grad_input, "weight", 0))
        g = part.cast(g_NO, config.cast_config_grad_output_for_grad_weight, "gradient", 0)
        x = part.cast(x_ND, config.cast_config_input_for_grad_weight, "activation", 0)
        return dx_ND, torch.mm(g.t(), x), None, None


class _ConstantTorchaoProduct:
    """`_TorchaoProduct` with a weight that is cast once, and without its gradient."""

    def __init__(self, product: _TorchaoProduct, weight_OD: Tensor) -> None:
        from torchao.float8.float8_training_tensor import GemmInputRole

        self.product = product
        self.config = product.quantized[1]
        config = self.config
        role = GemmInputRole.WEIGHT
        with torch.no_grad():
            weight_DO = weight_OD.detach().to(torch.bfloat16).T
            self.along_D = product.cast(weight_DO, config.cast_config_weight, role, 0)
            self.along_O = product.cast(weight_DO, config.cast_config_weight_for_grad_input, role, -1)

    def __call__(self, x_ND: Tensor, weight_OD: Tensor, dtype: torch.dtype, high_forward: bool) -> Tensor:
        compute = compute_dtype(dtype)
        if compute == torch.float32:  # the weight is held as cast from bf16
            return self.product(x_ND, weight_OD, dtype, high_forward)
        y_NO: Tensor = _ConstantWeight.apply(x_ND.to(compute), weight_OD.to(compute) if high_forward else None, self)
        return y_NO.to(dtype)


class _ConstantWeight(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_ND: Tensor, high_OD: Tensor | None, product: _ConstantTorchaoProduct) -> Tensor:
        from torchao.float8.float8_training_tensor import GemmInputRole

        ctx.product = product
        if high_OD is not None:
            return x_ND @ high_OD.T
        x = product.product.cast(x_ND, product.config.cast_config_input, GemmInputRole.INPUT, -1)
        return torch.mm(x, product.along_D)

    @staticmethod
    def backward(ctx: Any, g_NO: Tensor) -> tuple[Tensor, None, None]:  # type: ignore[override]
        from torchao.float8.float8_training_tensor import GemmInputRole

        product = ctx.product
        g = product.product.cast(g_NO, product.config.cast_config_grad_output, GemmInputRole.GRAD_OUTPUT, -1)
        return torch.mm(g, product.along_O.t()), None, None


def _converted(inputs: int, outputs: int, recipe: FormatRecipe, high_forward: bool) -> Any:
    """Return a stand-in layer without storage, converted by torchao."""
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
        pad_inner_dim=True,  # the number of tokens, over which the weight's gradient sums, need not be a multiple of 16
    )
    stand_in = nn.Sequential(nn.Linear(inputs, outputs, bias=False, device="meta"))
    return convert_to_float8_training(stand_in, config=config)[0]


@register_backend("transformer-engine", scalings=("tensorwise", "blockwise"), why_not=why_not_transformer_engine)
@dataclass(frozen=True)
class TransformerEngine:
    """fp8 by TransformerEngine, one scale a tensor or a block."""

    recipe: FormatRecipe

    def refuses(self, inputs: int, outputs: int, transposed: bool) -> str | None:
        """Return why a layer of this shape cannot be quantised, or None."""
        if transposed:
            return "TransformerEngine takes no transposed weights"
        return _no_multiple(_multiple(self.recipe), inputs, outputs)

    def product(self, layer: nn.Module, inputs: int, outputs: int) -> Product:
        """Return the product for a layer."""
        return _TransformerEngineProduct(layer, inputs, outputs, self.recipe)


class _TransformerEngineProduct:
    def __init__(self, layer: nn.Module, inputs: int, outputs: int, recipe: FormatRecipe) -> None:
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
        if self.linear.weight is not weight_OD:  # sharding replaces a layer's parameter
            self.linear.weight = weight_OD
        missing = -len(x_ND) % self.multiple
        padded_ND = F.pad(x_ND.to(dtype), (0, 0, 0, missing)) if missing else x_ND.to(dtype)
        # Outside of torch's autocast a te.Linear refuses inputs of another dtype than its weight's.
        cast = contextlib.nullcontext() if dtype == torch.float32 else torch.autocast("cuda", dtype)
        with cast, self.autocast(enabled=True, recipe=self.recipe):
            y_NO: Tensor = self.linear(padded_ND)
        return y_NO[: len(x_ND)]


def _multiple(recipe: FormatRecipe) -> int:
    """Return the number whose multiples all sizes must be for TransformerEngine, the number of tokens too."""
    return 128 if recipe.scaling == "blockwise" else 16


def _no_multiple(of: int, inputs: int, outputs: int) -> str | None:
    return f"its sizes are not multiples of {of}" if inputs % of or outputs % of else None


register_backend(
    "emulated",
    modes=QUANTIZED,
    scalings=("tensorwise", "rowwise", "blockwise"),
    every_recipe=True,
    why_not_real=lambda device: "values are rounded in fp32, products are the high mode's",
)(Emulated)


@dataclass(frozen=True)
class Capability:
    """The support of one back end for one mode on one device."""

    mode: str
    backend: str
    works: bool
    real: bool
    """True if products are faster than the high mode's; else they are emulated."""
    reason: str | None
    """Why it does not work, or is not real."""

    def __str__(self) -> str:
        verdict = "no"
        if self.works:
            verdict = "real" if self.real else "emulated"
        return verdict if self.reason is None else f"{verdict}: {self.reason}"


def capabilities(device: torch.device) -> list[Capability]:
    """Return what every mode and built-in back end can do on `device`."""
    table = [capability("fp8", backend, device) for backend in _ORDER]
    return table + [capability(mode, "emulated", device) for mode in QUANTIZED[1:]]


def capability(mode: str, backend: str, device: torch.device, recipe: FormatRecipe | None = None) -> Capability:
    """Find out whether `backend` supports `mode` on `device`, with the plain recipe when none is given."""
    entry: BackendEntry = BACKENDS.get(backend)
    if mode not in entry.modes:
        return Capability(mode, backend, False, False, f"{backend} has no {mode} that trains here")
    reason = entry.why_not(device)
    if reason is None and backend != "emulated":
        reason = _why_not_a_product(entry.make(recipe or FormatRecipe("tensorwise")), device)
    if reason is not None:
        return Capability(mode, backend, False, False, reason)
    unreal = entry.why_not_real(device)
    return Capability(mode, backend, True, unreal is None, unreal)


@dataclass(frozen=True)
class FormatChoice:
    """The quantised products of a run."""

    mode: str
    name: str
    backend: Backend
    real: bool
    line: str
    """The choice, for the log."""


def choose(mode: str, wanted: str, recipe: FormatRecipe, scaling: str, device: torch.device) -> FormatChoice | str:
    """Choose the back end for `mode`, or return why there is none.

    wanted: `auto` takes the first that is real, else emulation. scaling: the recipe by its option's name.

    Raises:
        UsageError: the named back end does not support the recipe.
    """
    tried: list[str] = []
    for name in _ORDER if wanted == "auto" else [wanted]:
        if (unsupported := _unsupported(mode, name, recipe, scaling)) is not None:
            if wanted == "auto":
                continue
            raise UsageError(f"--fp8-backend {name} {unsupported}")
        found = capability(mode, name, device, recipe)
        if found.works and (found.real or wanted != "auto" or name == "emulated"):
            if found.real:
                kind = "real"
            else:
                kind = "emulated" if name == "emulated" else "not faster here"
            why = f" ({'; '.join(tried)})" if tried else ""
            by = "" if name == kind else f" by {name}"
            return FormatChoice(mode, name, BACKENDS.get(name).make(recipe), found.real, f"{mode}{by}, {kind}{why}")
        tried.append(f"{name}: {found.reason}")
    return "; ".join(tried)


def make_recipe(mode: str, scaling: str, form: str | None, control: ScalingControl, stochastic: bool) -> FormatRecipe:
    """Make the recipe of a mode; the default elements are those commonly used with its scaling.

    form: hybrid (e4m3, and e5m2 for gradients), e4m3 or e5m2, for the modes of 8 bits. Hybrid is the default with one
    scale a tensor, whose gradients need the range; e4m3 with finer scales.
    """
    if mode == "mxfp4":
        return FormatRecipe("mx", "e2m1", "e2m1", control, stochastic)
    tensorwise = mode == "fp8" and scaling == "tensorwise"
    form = form or ("hybrid" if tensorwise else "e4m3")
    elements = {"hybrid": ("e4m3", "e5m2"), "e4m3": ("e4m3", "e4m3"), "e5m2": ("e5m2", "e5m2")}[form]
    kind: Scaling = "rowwise"
    if mode == "mxfp8":
        kind = "mx"
    elif tensorwise:
        kind = "tensorwise"
    elif mode == "fp8" and scaling == "blockwise":
        kind = "blockwise"
    return FormatRecipe(kind, *elements, control, stochastic)


def _unsupported(mode: str, backend: str, recipe: FormatRecipe, scaling: str) -> str | None:
    """Return why a back end cannot make the mode or the recipe, and what to do; None if it can."""
    entry: BackendEntry = BACKENDS.get(backend)
    if mode not in entry.modes:
        return f"has no {mode}; leave it out, {mode} is emulated everywhere"
    if scaling not in entry.scalings:
        return f"has no --fp8-recipe {scaling}; use {', '.join(entry.scalings)}"
    if recipe.forward == "e5m2" and not entry.every_recipe:
        return "has no pure e5m2; use --fp8-format hybrid, or --fp8-backend emulated"
    if recipe.stochastic and not entry.every_recipe:
        return "does not round stochastically; use --fp8-backend emulated"
    return None


def _why_not_a_product(backend: Backend, device: torch.device) -> str | None:
    """Return the error of a small product and its backward, or None."""
    layer = torch.nn.Linear(128, 128, bias=False, device=device)
    x = torch.ones(16, 128, device=device, requires_grad=True)
    dtype = torch.bfloat16 if has_bf16(device) else torch.float32
    try:
        with torch.enable_grad():
            backend.product(layer, 128, 128)(x, layer.weight, dtype, False).float().sum().backward()
    except Exception as error:
        return " ".join(f"a small product fails: {type(error).__name__}: {error}".split())[:160]
    return None


def policy(config: QuantizationConfig, mode: str, lr_schedule: str, decay_start: int) -> Policy:
    """Return the controller's settings for a run in `mode`; decay_start: the last step before the rate's decay."""
    rules = config.rules(lr_schedule)
    return Policy(
        quantized=mode,
        fallback=config.quant_fallback_strategy,
        rules=rules,
        threshold=config.quant_loss_threshold,
        window=config.quant_window_size,
        snapshot_every=config.quant_checkpoint_interval,
        snapshot_to_disk=config.quant_snapshot == "disk",
        keep=config.quant_recovery_buffer,
        probe_every=config.quant_probe_every,
        min_dwell=config.quant_min_dwell,
        decay_start=decay_start if "schedule" in rules else None,
    )


def quantize_(
    model: nn.Module,
    mode: str,
    *,
    backend: str = "auto",
    recipe: str = "tensorwise",
    skip_first: int = 0,
    skip_last: int = 0,
) -> Switch:
    """Make the linear layers of a model switchable and quantise their products, in place; the output head stays.

    Parameters, their names, the optimizer's state and the state dict do not change.

    Args:
        model: of `transformers`, or a `Student`, whose validation then stays in the high format.
        mode: fp8, mxfp8 or mxfp4.
        backend: torchao, transformer-engine, emulated or a registered one; auto: the first fast one, else emulation.
        recipe: of fp8: tensorwise, rowwise or blockwise scales.
        skip_first, skip_last: transformer layers at either end that stay high.

    Returns:
        The switch of all layers; set `position` between two steps to `quantized` or `high`.

    Raises:
        UsageError: the mode or back end is unknown, or does not work on the model's device.

    >>> from kdtrain.testing import tiny_model
    >>> switch = quantize_(tiny_model("llama", 300), "mxfp4")
    >>> switch.position
    'quantized'
    """
    from kdtrain.models.adapters import adapter_parts  # transformers' models, not to be read to ask for capabilities

    if not isinstance(model, nn.Module):
        raise UsageError(f"model is a {type(model).__name__}; give a torch.nn.Module")
    if mode not in QUANTIZED:
        raise UsageError(f"mode {mode} is not a quantised one; use {', '.join(QUANTIZED)}")
    if recipe not in ("tensorwise", "rowwise", "blockwise") or (mode != "fp8" and recipe != "tensorwise"):
        raise UsageError(f"recipe {recipe} is not one of {mode}; fp8 has tensorwise, rowwise and blockwise")
    device = next(model.parameters()).device
    found = choose(mode, backend, make_recipe(mode, recipe, None, "max", False), recipe, device)
    if isinstance(found, str):
        raise UsageError(f"no {mode} on {device}: {found}")
    modules: list[Any] = list(model.modules())
    head = next((each.get_output_embeddings() for each in modules if hasattr(each, "get_output_embeddings")), None)
    owner = next((each for each in modules if isinstance(getattr(each, "switch", None), Switch)), None)
    switch: Switch = Switch() if owner is None else owner.switch
    adapters = adapter_parts(model)
    convert(model, switch, found.backend, head=head, adapters=adapters, skip_first=skip_first, skip_last=skip_last)
    if owner is not None:
        owner.quantized = mode
    switch.position = "quantized"
    return switch
