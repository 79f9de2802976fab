"""Early stopping: when to end a run because its training loss is flat or its gradients stay huge.

Every 50 steps the mean of the last 50 losses is compared with the best one so far; it is better when it lies more than
`min_delta` nats below. A run stops after `patience` looks in a row without a better one, or after a few steps in a row
whose gradient norm lies above a threshold. Nothing counts in the warm-up steps.

A number that is not finite is never an improvement, and never a reason to stop: what to do about it is the guard's
(`guards`), which ends a broken run with an error, while an early stop is a good end. The best validation loss picks the
best student and stops nothing.
"""

import math
from collections import deque
from typing import Any, TypedDict

from kdtrain.config import StoppingConfig
from kdtrain.files import typed

WINDOW = 50
"""Losses in the average, and steps between two looks at it."""


class _Memory(TypedDict):
    losses: list[float]
    best: float | None
    waited: int
    spikes: int


class EarlyStopping:
    """Watches loss and gradient norm of each step; owns the average of the last 50 losses."""

    def __init__(self, config: StoppingConfig) -> None:
        self.config = config
        self._losses: deque[float] = deque(maxlen=WINDOW)
        self._best: float | None = None
        self._waited = 0
        self._spikes = 0

    @property
    def average(self) -> float:
        """Mean of the last 50 finite losses, nats; NaN while there is none."""
        return math.fsum(self._losses) / len(self._losses) if self._losses else math.nan

    def update(self, step: int, loss: float, grad_norm: float) -> str | None:
        """Take the numbers of a step; the reason to stop after it, or None.

        Args:
            step: 1, 2, ...
            loss: the step's training loss, nats.
            grad_norm: norm of the step's gradient before clipping.
        """
        if math.isfinite(loss):
            self._losses.append(loss)
        if not self.config.early_stopping or step <= self.config.early_stopping_warmup:
            return None
        return self._huge_gradients(step, grad_norm) or (self._plateau(step) if step % WINDOW == 0 else None)

    def _huge_gradients(self, step: int, grad_norm: float) -> str | None:
        config = self.config
        if math.isfinite(grad_norm):
            self._spikes = self._spikes + 1 if grad_norm > config.grad_spike_threshold else 0
        if self._spikes < config.grad_spike_patience:
            return None
        return (
            f"gradient norm above {config.grad_spike_threshold:g} at {self._spikes} steps in a row, "
            f"{grad_norm:.4g} at step {step}; lower --lr, or add --no-early-stopping to go on"
        )

    def _plateau(self, step: int) -> str | None:
        config, average = self.config, self.average
        better = math.isfinite(average) and (
            self._best is None or average < self._best - config.early_stopping_min_delta
        )
        if better:
            self._best, self._waited = average, 0
            return None
        self._waited += 1
        if self._waited < config.early_stopping_patience:
            return None
        best = "none is known" if self._best is None else f"the best is {self._best:.4f}"
        return (
            f"{WINDOW}-step average of the loss {average:.4f} at step {step}, {best}: not "
            f"{config.early_stopping_min_delta:g} better at {self._waited} looks in a row; "
            "add --no-early-stopping to go on"
        )

    def state_dict(self) -> dict[str, Any]:
        """What is remembered, as numbers that JSON keeps to the last bit."""
        return {"losses": list(self._losses), "best": self._best, "waited": self._waited, "spikes": self._spikes}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take over what another one remembered."""
        known = typed(state, _Memory)
        self._losses = deque(known["losses"], maxlen=WINDOW)
        self._best, self._waited, self._spikes = known["best"], known["waited"], known["spikes"]
