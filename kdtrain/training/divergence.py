"""Divergence: a student that stays worse than it was before the first step.

Watched is cross-entropy, which means the same at every T, alpha and divergence. The level to stay below is `factor`
times what the run began with, the larger of the first validation and the first step's training loss (both of them of
weights that no update has touched), and at least 0.1 nats above it. The run has diverged where a validation lies above
that level, or the median of the last 20 training losses: a few bad batches are none.

Unlike a spike (`spike`) this needs no clean losses before it: it sees a run that blew up in its first steps, and one
that rose too slowly for the window of a spike.
"""

import math
from collections import deque
from statistics import median
from typing import Any, TypedDict

from kdtrain.files import typed

WINDOW = 20
"""Training losses in the median; fewer are judged from half of it on."""
LEAST_NATS = 0.1


class _Memory(TypedDict):
    validation: float | None
    first: float | None
    losses: list[float]


class DivergenceWatch:
    """Watches training and validation loss; pure but for what it remembers. factor: `--divergence-factor`."""

    def __init__(self, factor: float) -> None:
        self.factor = factor
        self._validation: float | None = None
        self._first: float | None = None
        self._losses: deque[float] = deque(maxlen=WINDOW)

    @property
    def limit(self) -> float:
        """What the loss has to stay below, nats; infinite before anything is known."""
        known = [each for each in (self._validation, self._first) if each is not None]
        return max(self.factor * max(known), max(known) + LEAST_NATS) if known else math.inf

    def validated(self, loss: float) -> bool:
        """Take the cross-entropy of a validation; whether the run has diverged. A non-finite one has."""
        if self._validation is None:
            self._validation = loss
        return not loss <= self.limit

    def update(self, loss: float) -> bool:
        """Take the cross-entropy of a training step, in which a token was unmasked; whether the run has diverged."""
        if not math.isfinite(loss) or loss == 0:
            return False
        if self._first is None:
            self._first = loss
        self._losses.append(loss)
        return len(self._losses) >= WINDOW // 2 and median(self._losses) > self.limit

    def reset(self) -> None:
        """Forget the last losses, which the run has gone back behind."""
        self._losses.clear()

    def state_dict(self) -> dict[str, Any]:
        """What is remembered, as numbers that JSON keeps to the last bit."""
        return {"validation": self._validation, "first": self._first, "losses": list(self._losses)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take over what another one remembered."""
        known = typed(state, _Memory)
        found = [*known["losses"], *(each for each in (known["validation"], known["first"]) if each is not None)]
        if not all(map(math.isfinite, found)):
            raise ValueError("a loss is non-finite")
        self._validation, self._first = known["validation"], known["first"]
        self._losses = deque(known["losses"], maxlen=WINDOW)
