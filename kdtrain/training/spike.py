"""Loss spikes: when a training loss has jumped, and where the jump began.

A loss is spiky when it lies above a threshold made from the clean losses before it:

    factor   factor * mean
    mad      median + 6 * 1.4826 * MAD      (MAD: median distance from the median; 1.4826 MAD estimate one sigma)

A factor of a mean says something of losses above 0 only. Where one of the clean losses is 0 or below, as on sampled
targets that the student has learned by heart, `factor` judges as `mad` does, which knows no zero.

A spike is confirmed by `patience` spiky losses in a row, so that one bad batch is none. Only clean losses enter the
window: a mean or a deviation that has seen the spike would soon accept it. Losses that are not finite belong to the
guard (`guards`), and one of exactly 0 is that of a step without an unmasked token: neither is clean or spiky.

What it gives up: a rise that each window can follow, such as a slow drift, is never a spike.
"""

import math
from collections import deque
from collections.abc import Sequence
from typing import Any, TypedDict

from kdtrain.config import GuardsConfig
from kdtrain.files import typed

MAD_FACTOR = 6 * 1.4826
_LEAST_MAD = 1e-3
"""Of the median: losses that hardly vary must not make any rise a spike."""


class _Memory(TypedDict):
    clean: list[float]
    spiky: int
    suspicious_since: int | None


class SpikeDetector:
    """Watches one loss a step; pure but for what it remembers.

    Args:
        rule: factor, mad, or none, which never finds anything.
        factor: of the rule `factor`.
        patience: spiky losses in a row that make a spike.
        window: clean losses that are remembered.
        minimum: clean losses without which nothing is judged.
    """

    def __init__(self, rule: str, factor: float = 3.0, patience: int = 3, window: int = 128, minimum: int = 20) -> None:
        self.rule = rule
        self.factor = factor
        self.patience = patience
        self.minimum = minimum
        self.suspicious_since: int | None = None
        """The step of the first of the spiky losses that came last; None after a clean one."""
        self._spiky = 0
        self._clean: deque[float] = deque(maxlen=window)

    @classmethod
    def of(cls, config: GuardsConfig) -> "SpikeDetector":
        """The detector that the options ask for."""
        return cls(config.spike_rule, config.spike_factor, config.spike_patience)

    def update(self, step: int, loss: float) -> int | None:
        """Take the loss of a step; the first step of a spike that it confirms, or that has not ended since."""
        if self.rule == "none" or not math.isfinite(loss) or loss == 0:
            return None
        if not loss > self.threshold():
            self._clean.append(loss)
            self.suspicious_since, self._spiky = None, 0
            return None
        if self.suspicious_since is None:
            self.suspicious_since = step
        self._spiky += 1
        return self.suspicious_since if self._spiky >= self.patience else None

    def threshold(self) -> float:
        """What a loss must lie above to be spiky; infinite while too little is known."""
        if len(self._clean) < self.minimum:
            return math.inf
        if self.rule == "mad" or min(self._clean) <= 0:
            middle = _median(self._clean)
            spread = _median([abs(loss - middle) for loss in self._clean])
            return middle + MAD_FACTOR * max(spread, _LEAST_MAD * abs(middle))
        return self.factor * math.fsum(self._clean) / len(self._clean)

    def reset(self) -> None:
        """Forget the spike; the clean losses before it stay, and judge what follows."""
        self.suspicious_since, self._spiky = None, 0

    def forget(self) -> None:
        """Forget every loss: a level that nothing could be done about is the new one."""
        self._clean.clear()
        self.reset()

    def state_dict(self) -> dict[str, Any]:
        """What is remembered, as numbers that JSON keeps to the last bit."""
        return {"clean": list(self._clean), "spiky": self._spiky, "suspicious_since": self.suspicious_since}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take over what another detector remembered."""
        known = typed(state, _Memory)
        if not all(map(math.isfinite, known["clean"])):
            raise ValueError("clean holds a non-finite loss")
        self._clean = deque(known["clean"], maxlen=self._clean.maxlen)
        self._spiky, self.suspicious_since = known["spiky"], known["suspicious_since"]


def _median(numbers: Sequence[float] | deque[float]) -> float:
    ordered = sorted(numbers)
    middle = len(ordered) // 2
    return ordered[middle] if len(ordered) % 2 else (ordered[middle - 1] + ordered[middle]) / 2
