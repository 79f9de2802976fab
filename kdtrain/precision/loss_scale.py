"""The loss scale of fp16 training: gradients too small for fp16 are carried as multiples, and divided before clipping.

A step whose gradients overflow is not taken and halves the scale; many steps without an overflow double it
(arXiv 1710.03740). The scale is a power of two, so that it rounds nothing; it is a plain number on the host, which
reads each step's outcome anyway.
"""

from typing import Any, TypedDict

from kdtrain.files import typed

START = 2.0**16
LEAST = 1.0
LARGEST = 2.0**24
GROW_AFTER = 2000
"""Steps without an overflow after which the scale is doubled."""
WARN_BELOW = 2.0**8


class _Memory(TypedDict):
    value: float
    good: int
    warned_at: float


class LossScale:
    """The factor on the loss before the backward; a constant 1 outside of fp16.

    Args:
        enabled: True if gradients are fp16.
    """

    def __init__(self, enabled: bool) -> None:
        self.enabled = enabled
        self.value = START if enabled else 1.0
        self.good = 0
        self.warned_at = WARN_BELOW

    def absorbs(self, loss_is_finite: bool) -> bool:
        """Return whether a non-finite step is due to the scale, and a smaller scale prevents it."""
        return self.enabled and loss_is_finite and self.value > LEAST

    def update(self, overflowed: bool) -> str | None:
        """Grow or shrink after a step; returns a warning if the scale keeps falling."""
        if not self.enabled:
            return None
        if not overflowed:
            self.good += 1
            if self.good % GROW_AFTER == 0:
                self.value = min(2 * self.value, LARGEST)
            return None
        self.good, self.value = 0, max(self.value / 2, LEAST)
        if self.value >= self.warned_at:
            return None
        self.warned_at = self.value
        return f"the loss scale of fp16 has fallen to {self.value:g}: gradients overflow; lower --lr, or use bf16"

    def state_dict(self) -> dict[str, Any]:
        """Return the scale and its counters."""
        return {"value": self.value, "good": self.good, "warned_at": self.warned_at}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Resume from a `state_dict`."""
        if self.enabled:
            known = typed(state, _Memory)
            self.value, self.good, self.warned_at = known["value"], known["good"], known["warned_at"]
