"""Who a server's teacher is: its answers to fixed prompts, and how far they move by themselves.

A server does not give a digest of its weights. It is recognised by log p of the `TOP` most likely entries at each token
of two probes, a text and code. Kernels round differently from batch to batch, so the probes are sent alone and among
others, and the largest distance is the noise. A later answer may differ by four times that, and by `LEAST`: weights in
fewer bits, a merged adapter or another checkpoint move log p by 0.02 nats and more.

What it gives up: a change that moves the probes by less than the noise is not seen.

Shapes: n tokens of a probe but the first, K = `TOP` entries.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any

import numpy as np
from msgspec import Meta

from kdtrain.files import json_digest, typed
from kdtrain.plugins.served.answers import apart

TEXTS = (
    "The quick brown fox jumps over the lazy dog. In 1969, three people flew to the Moon, and two of them walked on it "
    "for a few hours while the third one waited above.",
    "def mean(values):\n    total = 0.0\n    for value in values:\n        total += value\n"
    "    return total / len(values)\n\nprint(mean([1, 2, 3]))\n",
)
LENGTH, TOP = 32, 4
LEAST = 0.003
"""Nats by which any server's answers may differ."""
FACTOR = 4.0
"""Times the noise by which they may."""
UNSTEADY = 0.01
"""Nats of noise that rounding explains; two models behind one address have more."""
LOUD = 0.3
"""Nats of noise with which a server cannot be recognised, nor a student learn."""

Probe = tuple[np.ndarray, np.ndarray]
"""Ids and log p [n, K]."""


@dataclass(frozen=True)
class Fingerprint:
    """Answers to the probes."""

    tokens: list[Annotated[list[int], Meta(min_length=2, max_length=LENGTH)]]
    ids: list[list[list[Annotated[int, Meta(ge=0, lt=2**31)]]]]
    logprobs: list[list[list[float]]]
    noise: float
    """Nats."""

    @classmethod
    def take(cls, tokens: Sequence[list[int]], probes: Sequence[Probe], noise: float) -> "Fingerprint":
        """Make the fingerprint of the answers to `tokens`, with log p rounded to 1e-6 nats."""
        logprobs = [np.round(logprobs_nK, 6).tolist() for _, logprobs_nK in probes]
        return cls(list(tokens), [ids_nK.tolist() for ids_nK, _ in probes], logprobs, float(f"{noise:.3g}"))

    @classmethod
    def from_json(cls, record: Any) -> "Fingerprint | None":
        """Read the fingerprint in a record that may be a stranger's; return None if it is none."""
        try:
            found = typed(record, cls)
            shapes = [(ids.shape, logprobs.shape) for ids, logprobs in found.probes]
        except (ValueError, OverflowError):
            return None
        return found if shapes == [((len(each) - 1, TOP),) * 2 for each in found.tokens] else None

    def to_json(self) -> dict[str, Any]:
        """Return a plain record for JSON."""
        return dict(vars(self))

    def distance(self, probes: Sequence[Probe]) -> float:
        """Compute the largest distance to other answers to the same probes, in nats."""
        return farthest(self.probes, probes)

    def allowed(self, tolerance: float | None) -> float:
        """Return the distance, in nats, by which answers of the same teacher may differ."""
        return tolerance or max(LEAST, FACTOR * self.noise)

    @property
    def probes(self) -> list[Probe]:
        """The answers as arrays."""
        return [(np.array(ids), np.array(logprobs)) for ids, logprobs in zip(self.ids, self.logprobs, strict=True)]

    def __str__(self) -> str:
        """Return a short name, and the first probe's most likely entry."""
        return f"{json_digest(self.to_json())[:8]} (log p {self.logprobs[0][-1][0]:.3f} of id {self.ids[0][-1][0]})"


def farthest(some: Sequence[Probe], others: Sequence[Probe]) -> float:
    """Compute the largest distance between answers to the same probes, in nats."""
    return max(apart(one, other) for one, other in zip(some, others, strict=True))
