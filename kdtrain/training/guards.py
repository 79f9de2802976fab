"""The non-finite guard: a step whose loss or gradient is not finite leaves no trace in the model.

`not_finite` makes one number on the device, 1 where anything is NaN or infinite on any rank, and `guarded_step` gives
it to fused AdamW, which then leaves weights, moments and its own step counters bitwise as they are. That is the
optimizer's own way with overflows of mixed precision (`found_inf`, what `torch.amp.GradScaler` sets): the decision is
made in the kernel, so that the host never waits for it, and no NaN is multiplied by zero on its way to a weight.

`GradientExplosion` is for gradients that are finite and stay huge: the clip hides them, and the run learns nothing.
"""

import math
from typing import Any, TypedDict

import torch

from kdtrain.config import StoppingConfig
from kdtrain.files import typed
from kdtrain.parallel.world import agreed_max


def not_finite(*tensors: torch.Tensor) -> torch.Tensor:
    """1 where any entry of any tensor is NaN or infinite on any rank, else 0; 0-dim fp32 on the device.

    tensors: on one device, of any shape and float dtype; loss, gradient norm, and whatever the norm leaves out.
    """
    bad = torch.stack([torch.isfinite(each.detach()).all() for each in tensors]).all().logical_not()
    return agreed_max(bad.float())


def guarded_step(optimizer: torch.optim.AdamW, found_inf: torch.Tensor) -> None:
    """Take the optimizer's step where `found_inf` is 0, and change nothing at all where it is 1.

    Moments that did not exist before are made, as zeros. The optimizer must be a fused one: others do not know this
    way, and would take the step.
    """
    assert getattr(optimizer, "_step_supports_amp_scaling", False), "the guard needs a fused optimizer"
    optimizer.found_inf = found_inf  # type: ignore[attr-defined]
    try:
        optimizer.step()
    finally:
        del optimizer.found_inf  # type: ignore[attr-defined]


class _Memory(TypedDict):
    huge: int


class GradientExplosion:
    """Counts the steps in a row whose gradient norm lies above a threshold, after the warm-up steps."""

    def __init__(self, config: StoppingConfig) -> None:
        self.config = config
        self._huge = 0

    def update(self, step: int, grad_norm: float) -> str | None:
        """Take the norm of a step's gradient before clipping; why the run cannot go on, or None."""
        config = self.config
        if step <= config.early_stopping_warmup or not math.isfinite(grad_norm):
            return None
        self._huge = self._huge + 1 if grad_norm > config.grad_spike_threshold else 0
        if self._huge < config.grad_spike_patience:
            return None
        return (
            f"gradient norm above {config.grad_spike_threshold:g} (--grad-spike-threshold) at {self._huge} steps in a "
            f"row, {grad_norm:.4g} at step {step}; lower --lr"
        )

    def state_dict(self) -> dict[str, Any]:
        """What is remembered."""
        return {"huge": self._huge}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take over what another one remembered."""
        self._huge = typed(state, _Memory)["huge"]
