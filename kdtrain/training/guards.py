"""The non-finite guard: a step whose loss or gradient is not finite leaves no trace in the model.

`not_finite` makes one number on the device, 1 where anything is NaN or infinite on any rank, and `guarded_step` gives
it to fused AdamW, which then leaves weights, moments and its own step counters bitwise as they are. That is the
optimizer's own way with overflows of mixed precision (`found_inf`, what `torch.amp.GradScaler` sets): the decision is
made in the kernel, so that the host never waits for it, and no NaN is multiplied by zero on its way to a weight.
"""

import torch

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
