"""The sections of options about number formats: which ones, and when a run changes between them."""

import dataclasses
from dataclasses import dataclass
from typing import Literal

from kdtrain.config.sections import refuse

_QUANTIZING = ("stochastic_rounding", "skip_first", "skip_last")


@dataclass(frozen=True, kw_only=True)
class PrecisionConfig:
    """Number formats and compilation."""

    precision: Literal["auto", "fp32", "bf16", "fp16", "fp8", "mxfp8", "mxfp4"] = "auto"
    """Format of the matrix products; auto is bf16 where the device has it, else fp16 on a GPU and fp32 on a CPU."""
    fp8_backend: Literal["auto", "transformer-engine", "torchao", "emulated"] = "auto"
    """What makes fp8 products; auto takes what is real on this device, else emulation."""
    fp8_recipe: Literal["tensorwise", "rowwise", "blockwise", "current"] | None = None
    """What shares a scale in fp8: a tensor (also called current), a row, or a tile of 128; a tensor when not given."""
    fp8_format: Literal["hybrid", "e4m3", "e5m2"] | None = None
    """Elements of fp8 and mxfp8; hybrid has e5m2 gradients. Hybrid for tensorwise fp8, else e4m3, when not given."""
    scaling_control: Literal["max", "max_minus_1", "rceil", "ceil", "even"] | None = None
    """How the scale of an MX block follows from its largest value (docs/precision.md); max when not given."""
    quant_stochastic_rounding: bool = False
    """Round quantised gradients up or down by chance instead of to the nearest; emulated formats only."""
    quant_skip_first: int = 0
    """Transformer layers at the input that are never quantised."""
    quant_skip_last: int = 0
    """Transformer layers at the output that are never quantised."""
    collect_tensors: str | None = None
    """Write statistics of the linear layers whose names match this pattern, such as '*.mlp.*', into tensors.h5."""
    collect_every: int = 100
    """Steps between two collections."""
    compile: bool = True
    """Compile the student and the objective with torch.compile."""
    compile_mode: Literal["default", "reduce-overhead", "max-autotune"] = "default"
    """Mode of torch.compile."""
    deterministic: bool = False
    """Refuse operations that are not bitwise repeatable on the device."""

    def __post_init__(self) -> None:
        for name in ("quant_skip_first", "quant_skip_last"):
            refuse(getattr(self, name) < 0, f"--{name.replace('_', '-')} must be 0 or more")
        refuse(self.collect_every < 1, "--collect-every must be at least 1")

    def refuse_idle(self, mode: str) -> None:
        """Raise a `UsageError` for an option that `mode` makes no use of."""
        users = {
            "fp8_recipe": ("fp8",),
            "fp8_format": ("fp8", "mxfp8"),
            "scaling_control": ("mxfp8", "mxfp4"),
            **dict.fromkeys(("fp8_backend", *(f"quant_{each}" for each in _QUANTIZING)), ("fp8", "mxfp8", "mxfp4")),
        }
        for each in dataclasses.fields(self):
            idle = each.name in users and mode not in users[each.name] and getattr(self, each.name) != each.default
            wanted = " or ".join(users.get(each.name, ()))
            refuse(idle, f"--{each.name.replace('_', '-')} has no effect on {mode}; it needs --precision {wanted}")


@dataclass(frozen=True, kw_only=True)
class QuantizationConfig:
    """Adaptive quantisation: leaving a quantised format for a high one and coming back, by rule, while training."""

    time_resume: bool = False
    """Train quantised (fp8 when --precision says nothing else) and fall back by the rules below."""
    quant_rule: str | None = None
    """What sends to the fallback: loss, gap, spike, schedule, or several joined with +; schedule+gap when not given."""
    quant_loss_threshold: float = 0.1
    """In nats: of the loss under rule loss; under rule gap the most that quantisation may cost, whatever its noise."""
    quant_window_size: int = 5
    """Steps in a window: a checkpoint ends each, and a whole one must be calm before quantisation comes back."""
    quant_checkpoint_interval: int = 1
    """Steps between snapshots within a window."""
    quant_snapshot: Literal["memory", "disk"] = "memory"
    """Where snapshots are kept."""
    quant_recovery_buffer: int = 2
    """Snapshots, and checkpoints of windows, that are kept to go back to."""
    quant_fallback_strategy: Literal["bf16", "fp16"] = "bf16"
    """The high format; evaluation and what is never quantised run in it throughout."""
    quant_fallback_scope: Literal["all", "forward"] = "all"
    """Which products the fallback takes back to the high format: all three of a layer, or the forward's only."""
    quant_probe_every: int = 100
    """Steps between two measurements of what quantisation costs, under rule gap."""
    quant_min_dwell: int = 10
    """Least steps between a switch and the next that a rule asks for."""
    quant_max_switches: int = 20
    """Switches after which the run stays in the fallback."""

    def __post_init__(self) -> None:
        for name in ("quant_window_size", "quant_checkpoint_interval", "quant_recovery_buffer", "quant_probe_every"):
            refuse(getattr(self, name) < 1, f"--{name.replace('_', '-')} must be at least 1")
        for name in ("quant_min_dwell", "quant_max_switches"):
            refuse(getattr(self, name) < 0, f"--{name.replace('_', '-')} must be 0 or more")
        refuse(not 0 < self.quant_loss_threshold < float("inf"), "--quant-loss-threshold must be above 0")
        unknown = set((self.quant_rule or "gap").split("+")) - {"loss", "gap", "spike", "schedule"}
        refuse(
            bool(unknown),
            f"--quant-rule '{self.quant_rule}' is unknown; use loss, gap, spike, schedule, or gap+schedule",
        )

    def rules(self, lr_schedule: str) -> tuple[str, ...]:
        """The rules by name, of a run whose learning rate follows `lr_schedule`."""
        default = "gap" if lr_schedule == "constant" else "schedule+gap"
        return tuple((self.quant_rule or default).split("+"))

    def mode(self, precision: str) -> str:
        """The mode that --precision means: auto is fp8 where quantisation is adaptive."""
        return "fp8" if precision == "auto" and self.time_resume else precision

    def refuse_idle(self, mode: str, lr_schedule: str) -> None:
        """Raise a `UsageError` for what has no effect without --time-resume, or cannot be with it."""
        for each in dataclasses.fields(self):
            changed = not self.time_resume and getattr(self, each.name) != each.default
            refuse(changed, f"--{each.name.replace('_', '-')} has no effect without --time-resume; add it")
        refuse(
            self.time_resume and mode not in ("fp8", "mxfp8", "mxfp4"),
            f"--time-resume has nothing to fall back from with --precision {mode}; use fp8, mxfp8 or mxfp4",
        )
        refuse(
            "schedule" in self.rules(lr_schedule) and lr_schedule == "constant",
            "--quant-rule schedule needs a decay phase, and --lr-schedule constant has none; use wsd or cosine",
        )
