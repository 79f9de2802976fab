"""The number formats of a run; one that is not quantised loads nothing of what quantises (`precision.backends`)."""

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch

from kdtrain.config.sections import QUANTIZED, PrecisionConfig, QuantizationConfig
from kdtrain.errors import UsageError
from kdtrain.precision.modes import Switch, head_dtype, pick_mode

if TYPE_CHECKING:
    from kdtrain.precision.backends import FormatChoice
    from kdtrain.precision.emulated import FormatRecipe


@dataclass(frozen=True)
class Formats:
    """The formats of a run."""

    high: str
    """fp32, bf16 or fp16: of the parts that are not quantised, of the fallback, and of evaluation."""
    choice: "FormatChoice | None" = None
    """The source of quantised products; None in a run without any."""
    recipe: "FormatRecipe | None" = None
    """How they are quantised."""
    lines: tuple[str, ...] = ()
    """The choice, for the log."""
    switch: Switch = field(default_factory=Switch)
    """The switch of the student's layers, for the first step."""

    @property
    def gathered(self) -> torch.dtype | None:
        """In which format the layers of a sharded student are gathered; None for fp32.

        Emulation quantises fp32 weights in one process too; other products take what autocast would give them.
        """
        return None if self.choice is not None and not self.choice.real else head_dtype(self.high)


def formats_of(precision: PrecisionConfig, quantization: QuantizationConfig, device: torch.device) -> Formats:
    """Return the formats that the options mean on `device`; a mode that it does not support becomes bf16.

    Raises:
        UsageError: the named back end does not support the mode or the recipe.
    """
    mode = quantization.mode(precision.precision)
    adaptive = quantization.time_resume
    if mode not in QUANTIZED:
        return Formats(pick_mode(mode, device, training=True))
    from kdtrain.precision.backends import choose, make_recipe  # which a run that is not quantised does without

    scaling, control = precision.fp8_recipe or "tensorwise", precision.scaling_control or "max"
    recipe = make_recipe(mode, scaling, precision.fp8_format, control, precision.quant_stochastic_rounding)
    found = choose(mode, precision.fp8_backend, recipe, scaling, device)
    if isinstance(found, str):
        return Formats(pick_mode("bf16", device), lines=(f"no {mode} here ({found}); training in bf16",))
    if found.name == "transformer-engine" and quantization.quant_fallback_scope == "forward":
        raise UsageError("--quant-fallback-scope forward needs --fp8-backend torchao or emulated")
    high = pick_mode(quantization.quant_fallback_strategy if adaptive else "auto", device, training=True)
    return Formats(high, found, recipe, (found.line,), Switch("quantized"))
