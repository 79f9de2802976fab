"""From options to the formats of a run: the high one, the quantised one and its back end, and who decides between."""

from dataclasses import dataclass, field

import torch

from kdtrain.config import PrecisionConfig, QuantizationConfig
from kdtrain.errors import UsageError
from kdtrain.precision.linear import Switch
from kdtrain.precision.modes import pick_mode
from kdtrain.precision.policy import Policy
from kdtrain.precision.probe import QUANTIZED, Choice, choose, make_recipe
from kdtrain.precision.products import Recipe


@dataclass(frozen=True)
class Plan:
    """The formats of a run."""

    high: str
    """fp32, bf16 or fp16: of everything that is not quantised, of the fallback, and of evaluation."""
    choice: Choice | None = None
    """Where quantised products come from; None in a run without any."""
    recipe: Recipe | None = None
    """How they are quantised."""
    lines: tuple[str, ...] = ()
    """What was chosen, for the log."""
    switch: Switch = field(default_factory=Switch)
    """The switch of the student's layers, for the first step."""


def plan(precision: PrecisionConfig, quantization: QuantizationConfig, device: torch.device) -> Plan:
    """The formats that the options mean on `device`; what is not there falls back to bf16.

    Raises:
        UsageError: a back end was named that cannot do what is asked of it.
    """
    mode, adaptive = quantization.mode(precision.precision), quantization.time_resume
    if mode not in QUANTIZED:
        return Plan(pick_mode(mode, device, training=True))
    scaling, control = precision.fp8_recipe or "tensorwise", precision.scaling_control or "max"
    recipe = make_recipe(mode, scaling, precision.fp8_format, control, precision.quant_stochastic_rounding)
    found = choose(mode, precision.fp8_backend, recipe, scaling, device)
    if isinstance(found, str):
        return Plan("bf16", lines=(f"no {mode} here ({found}); training in bf16",))
    if found.name == "transformer-engine" and quantization.quant_fallback_scope == "forward":
        raise UsageError("--quant-fallback-scope forward needs --fp8-backend torchao or emulated")
    high = quantization.quant_fallback_strategy if adaptive else pick_mode("auto", device, training=True)
    return Plan(high, found, recipe, (found.line,), Switch("quantized"))


def policy(config: QuantizationConfig, mode: str, lr_schedule: str, decay_start: int) -> Policy:
    """What the controller of a run in `mode` is told; decay_start: the last step before the rate's decay."""
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
        max_switches=config.quant_max_switches,
        decay_start=decay_start if "schedule" in rules else None,
    )
