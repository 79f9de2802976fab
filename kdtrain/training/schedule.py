"""The learning rate and the steps of validations, as pure functions of the step.

Warm-up is linear from 0, and takes at most half of the run. After it, `cosine` falls to the smallest rate at the last
step (SGDR, arXiv 1608.03983, one period), `constant` stays, and `wsd` (warm-up, stable, decay: MiniCPM, arXiv
2404.06395) stays until the last `decay_steps` and then falls by a cosine, a line, or 1 - sqrt (arXiv 2405.18392).
"""

import math

from kdtrain.config.sections import OptimizerConfig


def run_length(planned: int, config: OptimizerConfig, decay_from: int | None) -> int:
    """Return the steps of the whole run. decay_from: where a plateau ended the stable phase of `wsd`, None: nowhere."""
    return planned if decay_from is None else decay_from + decay_steps(planned, config)


def learning_rate(step: int, total: int, config: OptimizerConfig, decay_from: int | None = None) -> float:
    """Return the rate of step `step` (1 .. total). decay_from: where a plateau ended the stable phase of `wsd`."""
    warmup = warmup_steps(total, config)
    if step <= warmup:
        return config.peak_lr * step / max(warmup, 1)
    start = warmup
    if config.lr_schedule == "wsd":
        start = decay_start(total, config) if decay_from is None else decay_from
    return config.min_lr + (config.peak_lr - config.min_lr) * _share(step, total, start, config)


def warmup_steps(total: int, config: OptimizerConfig) -> int:
    """Return the warm-up steps of a run of `total` steps: at most half of them; a run's only step has the peak rate."""
    return min(config.warmup_steps, max(total // 2, 1))


def decay_start(total: int, config: OptimizerConfig) -> int:
    """Return the last step before the decay phase of `wsd`, which begins after the warm-up."""
    return max(total - decay_steps(total, config), warmup_steps(total, config))


def validation_interval(total: int, every: int) -> int:
    """Return the steps between validations: `every`, or a quarter of a run that is shorter."""
    return every if total >= every else max(total // 4, 1)


def decay_steps(total: int, config: OptimizerConfig) -> int:
    """Return the steps of the decay phase of `wsd`."""
    return min(config.decay_steps or max(total // 5, 1), total)


def _share(step: int, total: int, start: int, config: OptimizerConfig) -> float:
    """Return the share of the way from the smallest to the peak rate, 1 to 0."""
    if config.lr_schedule == "constant" or step <= start:
        return 1.0
    done = (step - start) / max(total - start, 1)
    shape = "cosine" if config.lr_schedule == "cosine" else config.decay_shape
    if shape == "linear":
        return 1.0 - done
    return 1.0 - math.sqrt(done) if shape == "1-sqrt" else 0.5 * (1.0 + math.cos(math.pi * done))
