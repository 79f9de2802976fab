"""Loss spikes: when a training loss has jumped, and where the jump began.

Watched are the parts of the loss, each for itself: cross-entropy, divergence at T = 1, hidden-state loss. They mean the
same at every T and alpha, so that neither a learned T nor a schedule of alpha looks like a spike; and where the loss
doubles, one of them doubles at least. A part is spiky above a threshold made from its clean values before:

    mad      median + max(6 * 1.4826 * MAD, 0.5 * |median|, 0.1 nats)
    factor   factor * mean

MAD is the median distance from the median, and 1.4826 MAD estimate one sigma. The two floors are for parts that hardly
vary: a rise that is none of a half is no spike of theirs. A factor of a mean says something of values above 0 only;
where a clean one is 0 or below, as on sampled targets that the student has learned by heart, `factor` judges as `mad`.

A spike is confirmed by `patience` spiky steps in a row, so that one bad batch is none. Only clean steps enter the
windows: a median or a mean that has seen the spike would soon accept it. Non-finite values belong to the guard
(`guards`), and a cross-entropy of exactly 0 is that of a step without an unmasked token: neither is clean or spiky.

What it gives up: a rise that each window can follow, such as a slow drift, is never a spike; `divergence` watches that.
"""

import math
from collections import deque
from collections.abc import Mapping
from statistics import median
from typing import Any, TypedDict

from kdtrain.config import GuardsConfig
from kdtrain.files import typed

MAD_FACTOR = 6 * 1.4826
LEAST_RISE = 0.5
"""Of the median, that a spike rises at least."""
LEAST_NATS = 0.1


class _Memory(TypedDict):
    clean: dict[str, list[float]]
    spiky: int
    suspicious_since: int | None


class SpikeDetector:
    """Watches the parts of the loss at each step; pure but for what it remembers.

    Args:
        rule: mad, factor, or none, which never finds anything.
        factor: of the rule `factor`.
        patience: spiky steps in a row that make a spike.
        window: clean values of a part that are remembered.
        minimum: clean values of a part without which it is not judged.
    """

    def __init__(self, rule: str, factor: float = 3.0, patience: int = 3, window: int = 32, minimum: int = 10) -> None:
        self.rule = rule
        self.factor = factor
        self.patience = patience
        self.window = window
        self.minimum = minimum
        self.suspicious_since: int | None = None
        """The step of the first of the spiky ones that came last; None after a clean one."""
        self._spiky = 0
        self._clean: dict[str, deque[float]] = {}

    @classmethod
    def of(cls, config: GuardsConfig) -> "SpikeDetector":
        """The detector that the options ask for."""
        return cls(config.spike_rule, config.spike_factor, config.spike_patience)

    def update(self, step: int, parts: Mapping[str, float]) -> int | None:
        """Take the parts of a step's loss, nats; the first step of a spike that they confirm, or that has not ended."""
        if self.rule == "none" or not all(map(math.isfinite, parts.values())) or parts.get("ce") == 0:
            return None
        if all(value <= self.threshold(name) for name, value in parts.items()):
            for name, value in parts.items():
                self._clean.setdefault(name, deque(maxlen=self.window)).append(value)
            self.reset()
            return None
        if self.suspicious_since is None:
            self.suspicious_since = step
        self._spiky += 1
        return self.suspicious_since if self._spiky >= self.patience else None

    def threshold(self, part: str) -> float:
        """What a part must lie above to be spiky; infinite while too little is known."""
        clean = self._clean.get(part, ())
        if len(clean) < self.minimum:
            return math.inf
        if self.rule == "factor" and min(clean) > 0:
            return self.factor * math.fsum(clean) / len(clean)
        middle = median(clean)
        spread = median([abs(value - middle) for value in clean])
        return middle + max(MAD_FACTOR * spread, LEAST_RISE * abs(middle), LEAST_NATS)

    def reset(self) -> None:
        """Forget the spike; the clean values before it stay, and judge what follows."""
        self.suspicious_since, self._spiky = None, 0

    def state_dict(self) -> dict[str, Any]:
        """What is remembered, as numbers that JSON keeps to the last bit."""
        clean = {name: list(values) for name, values in self._clean.items()}
        return {"clean": clean, "spiky": self._spiky, "suspicious_since": self.suspicious_since}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take over what another detector remembered."""
        known = typed(state, _Memory)
        if not all(math.isfinite(value) for values in known["clean"].values() for value in values):
            raise ValueError("clean holds a non-finite value")
        self._clean = {name: deque(values, maxlen=self.window) for name, values in known["clean"].items()}
        self._spiky, self.suspicious_since = known["spiky"], known["suspicious_since"]
