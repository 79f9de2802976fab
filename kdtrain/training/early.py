"""Early stopping: when nothing is gained any more.

Every `--early-stopping-interval` steps the newest validation loss is compared with the best one so far; it is better
when it lies more than `min_delta` nats below. Where a validation split has no unmasked token, the mean of the last 50
training losses stands for it. There is a plateau after `patience` looks in a row without a better one. Nothing counts
in the warm-up steps.

A non-finite number is never an improvement, and never a reason to stop: what to do about it is the guard's (`guards`).
"""

import math
from collections import deque
from typing import Any, TypedDict

from kdtrain.config import StoppingConfig
from kdtrain.files import typed

WINDOW = 50
"""Training losses in the average."""


class _Memory(TypedDict):
    losses: list[float]
    validation: float | None
    validates: bool
    best: float | None
    waited: int


class EarlyStopping:
    """Watches the loss; owns the average of the last 50 training losses."""

    def __init__(self, config: StoppingConfig) -> None:
        self.config = config
        self._losses: deque[float] = deque(maxlen=WINDOW)
        self._validation: float | None = None
        self._validates = False
        self._best: float | None = None
        self._waited = 0

    @property
    def average(self) -> float:
        """Mean of the last 50 finite losses, nats; NaN while there is none."""
        return math.fsum(self._losses) / len(self._losses) if self._losses else math.nan

    def add(self, loss: float) -> None:
        """Take the training loss of a step, nats."""
        if math.isfinite(loss):
            self._losses.append(loss)

    def validated(self, loss: float) -> None:
        """Take a validation loss, nats; from the first one on they alone are looked at."""
        self._validates = True
        self._validation = loss

    def plateau(self, step: int) -> str | None:
        """After step `step` and its validation: why nothing is gained any more, or None."""
        config = self.config
        if not config.early_stopping or step <= config.early_stopping_warmup or step % config.early_stopping_interval:
            return None
        loss = self._validation if self._validates else self.average
        if loss is None:
            return None  # no validation since the last look
        self._validation = None
        if math.isfinite(loss) and (self._best is None or loss < self._best - config.early_stopping_min_delta):
            self._best, self._waited = loss, 0
            return None
        self._waited += 1
        if self._waited < config.early_stopping_patience:
            return None
        what = "validation loss" if self._validates else f"{WINDOW}-step average of the training loss"
        best = "a finite one" if self._best is None else f"{config.early_stopping_min_delta:g} below {self._best:.4f}"
        return f"{what} {loss:.4f} at step {step}, not {best} at {self._waited} looks in a row"

    def state_dict(self) -> dict[str, Any]:
        """What is remembered, as numbers that JSON keeps to the last bit."""
        return {
            "losses": list(self._losses),
            "validation": self._validation,
            "validates": self._validates,
            "best": self._best,
            "waited": self._waited,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take over what another one remembered."""
        known = typed(state, _Memory)
        self._losses = deque(known["losses"], maxlen=WINDOW)
        self._validation, self._validates = known["validation"], known["validates"]
        self._best, self._waited = known["best"], known["waited"]
