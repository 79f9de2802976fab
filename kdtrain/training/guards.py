"""The non-finite guard: a step whose loss or gradient is not finite leaves no trace in the model.

`not_finite` makes one number on the device, 1 where anything is NaN or infinite on any rank, and `guarded_step` gives
it to fused AdamW, which then leaves weights, moments and its own step counters bitwise as they are. That is the
optimizer's own way with overflows of mixed precision (`found_inf`, what `torch.amp.GradScaler` sets): the decision is
made in the kernel, so that the host never waits for it, and no NaN is multiplied by zero on its way to a weight.

`GradientExplosion` is for gradients that are finite and stay huge: the clip hides them, and the run learns nothing.

Loss spikes: when a training loss has jumped, and where the jump began.

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

Divergence: a student that stays worse than it was before the first step.

Watched is cross-entropy, which means the same at every T, alpha and divergence. The level to stay below is `factor`
times what the run began with, the larger of the first validation and the first step's training loss (both of them of
weights that no update has touched), and at least 0.1 nats above it. The run has diverged where a validation lies above
that level, or the median of the last 20 training losses: a few bad batches are none.

Unlike a spike (`spike`) this needs no clean losses before it: it sees a run that blew up in its first steps, and one
that rose too slowly for the window of a spike.

Early stopping: when nothing is gained any more.

Every `--early-stopping-interval` steps the newest validation loss is compared with the best one so far; it is better
when it lies more than `min_delta` nats below. Where a validation split has no unmasked token, the mean of the last 50
training losses stands for it. There is a plateau after `patience` looks in a row without a better one. Nothing counts
in the warm-up steps.

A non-finite number is never an improvement, and never a reason to stop: what to do about it is the guard's (`guards`).
"""

import math
from collections import deque
from collections.abc import Mapping
from statistics import median
from typing import Any, TypedDict

import torch

from kdtrain.config import GuardsConfig, StoppingConfig
from kdtrain.files import typed
from kdtrain.precision.loss_scale import LossScale
from kdtrain.ranks import agreed_max


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


class _ExplosionMemory(TypedDict):
    huge: int


class GradientExplosion:
    """Counts the steps in a row whose gradient norm lies above a threshold, after the warm-up steps."""

    def __init__(self, config: StoppingConfig) -> None:
        self.config = config
        self._huge = 0

    def update(self, step: int, grad_norm: float) -> str | None:
        """Take the norm of a step's gradient before clipping; why the run cannot go on, or None."""
        config = self.config
        if step <= config.early_stopping_warmup or not math.isfinite(grad_norm):
            return None
        self._huge = self._huge + 1 if grad_norm > config.grad_spike_threshold else 0
        if self._huge < config.grad_spike_patience:
            return None
        return (
            f"gradient norm above {config.grad_spike_threshold:g} (--grad-spike-threshold) at {self._huge} steps in a "
            f"row, {grad_norm:.4g} at step {step}; lower --lr"
        )

    def state_dict(self) -> dict[str, Any]:
        """What is remembered."""
        return {"huge": self._huge}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take over what another one remembered."""
        self._huge = typed(state, _ExplosionMemory)["huge"]


MAD_FACTOR = 6 * 1.4826
LEAST_RISE = 0.5
"""Of the median, that a spike rises at least."""
LEAST_NATS = 0.1


class _SpikeMemory(TypedDict):
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
        known = typed(state, _SpikeMemory)
        if not all(math.isfinite(value) for values in known["clean"].values() for value in values):
            raise ValueError("clean holds a non-finite value")
        self._clean = {name: deque(values, maxlen=self.window) for name, values in known["clean"].items()}
        self._spiky, self.suspicious_since = known["spiky"], known["suspicious_since"]


DIVERGENCE_WINDOW = 20
"""Training losses in the median; fewer are judged from half of it on."""
DIVERGENCE_LEAST_NATS = 0.1


class _DivergenceMemory(TypedDict):
    validation: float | None
    first: float | None
    losses: list[float]


class DivergenceWatch:
    """Watches training and validation loss; pure but for what it remembers. factor: `--divergence-factor`."""

    def __init__(self, factor: float) -> None:
        self.factor = factor
        self._validation: float | None = None
        self._first: float | None = None
        self._losses: deque[float] = deque(maxlen=DIVERGENCE_WINDOW)

    @property
    def limit(self) -> float:
        """What the loss has to stay below, nats; infinite before anything is known."""
        known = [each for each in (self._validation, self._first) if each is not None]
        return max(self.factor * max(known), max(known) + DIVERGENCE_LEAST_NATS) if known else math.inf

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
        return len(self._losses) >= DIVERGENCE_WINDOW // 2 and median(self._losses) > self.limit

    def reset(self) -> None:
        """Forget the last losses, which the run has gone back behind."""
        self._losses.clear()

    def state_dict(self) -> dict[str, Any]:
        """What is remembered, as numbers that JSON keeps to the last bit."""
        return {"validation": self._validation, "first": self._first, "losses": list(self._losses)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take over what another one remembered."""
        known = typed(state, _DivergenceMemory)
        found = [*known["losses"], *(each for each in (known["validation"], known["first"]) if each is not None)]
        if not all(map(math.isfinite, found)):
            raise ValueError("a loss is non-finite")
        self._validation, self._first = known["validation"], known["first"]
        self._losses = deque(known["losses"], maxlen=DIVERGENCE_WINDOW)


AVERAGE_WINDOW = 50
"""Training losses in the average."""


class _EarlyMemory(TypedDict):
    losses: list[float]
    validation: float | None
    validates: bool
    best: float | None
    waited: int


class EarlyStopping:
    """Watches the loss; owns the average of the last 50 training losses."""

    def __init__(self, config: StoppingConfig) -> None:
        self.config = config
        self._losses: deque[float] = deque(maxlen=AVERAGE_WINDOW)
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
        what = "validation loss" if self._validates else f"{AVERAGE_WINDOW}-step average of the training loss"
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
        known = typed(state, _EarlyMemory)
        self._losses = deque(known["losses"], maxlen=AVERAGE_WINDOW)
        self._validation, self._validates = known["validation"], known["validates"]
        self._best, self._waited = known["best"], known["waited"]


class Guards:
    """What looks at the numbers of each step, and the loss scale; their memory is part of every checkpoint.

    Args:
        guards, stopping: their options.
        fp16: whether gradients are fp16 and need a loss scale.
    """

    def __init__(self, guards: GuardsConfig, stopping: StoppingConfig, fp16: bool) -> None:
        self.spikes = SpikeDetector.of(guards)
        self.divergence = DivergenceWatch(guards.divergence_factor)
        self.explosion = GradientExplosion(stopping)
        self.stopping = EarlyStopping(stopping)
        self.scale = LossScale(fp16)
