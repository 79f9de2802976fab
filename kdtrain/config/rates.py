"""The rates of `--lr auto`: by what a run trains and how many parameters the student has. They stand only here.

fresh       up to 10 M as measured (docs/quality.md, benchmarks/find_lr.md), and 3e-4 beyond.
pretrained  all weights of a student that begins from some: up to 10 M as measured (docs/prune.md, benchmarks/lora.md),
            beyond what recipes for distillation and fine-tuning use, which falls with size (1e-5 for 8 B).
lora        adapters learn best at about ten times the rate of all weights, whatever their rank at a fixed alpha (arXiv
            2106.09685; Thinking Machines, "LoRA Without Regret", 2025): so the size is the whole student's. Up to 10 M
            as measured (benchmarks/lora.md).
"""

import math
from typing import Literal, NamedTuple

Kind = Literal["fresh", "pretrained", "lora"]


class Rate(NamedTuple):
    """A learning rate for students up to a size: a row of `RATES`."""

    parameters: float
    """It is for students of at most this many parameters."""
    lr: float
    """Peak learning rate."""


RATES: dict[Kind, tuple[Rate, ...]] = {
    "fresh": (Rate(2e6, 2e-3), Rate(1e7, 1e-3), Rate(math.inf, 3e-4)),
    "pretrained": (Rate(1e7, 2e-3), Rate(1e8, 2e-4), Rate(1e9, 5e-5), Rate(5e9, 2e-5), Rate(math.inf, 1e-5)),
    "lora": (Rate(1e7, 1e-2), Rate(1e8, 2e-3), Rate(1e9, 5e-4), Rate(5e9, 2e-4), Rate(math.inf, 1e-4)),
}
WORDS: dict[Kind, str] = {"fresh": "fresh weights", "pretrained": "pretrained weights", "lora": "adapters"}
"""What a run trains, as its lines say it."""


def rate_of(kind: Kind, parameters: float) -> Rate:
    """Return the row for a student of `parameters`."""
    return next(each for each in RATES[kind] if parameters <= each.parameters)
