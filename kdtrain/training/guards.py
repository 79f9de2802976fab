"""Watchers of the numbers of each step: non-finite values, exploding gradients, spikes, divergence, a plateau.

**Non-finite steps.** A step with a non-finite loss or gradient changes nothing in the model. `non_finite` returns one
number on the device, 1 where anything is NaN or infinite on any rank, which the optimizer's `guarded_step` takes.

**Exploding gradients** (`GradientExplosion`) are finite and stay huge: clipping hides them, and the run learns nothing.

**Spikes** (`SpikeDetector`): the training loss jumps. The detector watches each part of the loss on its own:
cross-entropy, divergence at T = 1, hidden-state loss. These mean the same at every T, so that a learned T does not look
like a spike; and where the loss doubles, at least one of them doubles. Where alpha moves, cross-entropy must rise as it
does over text that is known by heart, and the divergence as it falls: both are then watched as one, (1 - alpha) CE +
alpha KD, the earlier values at today's alpha too. A part is spiky above a threshold computed from its earlier clean
values:

    median + max(6 * 1.4826 * MAD, 0.5 * |median|, 0.1 nats)

MAD is the median distance from the median, and 1.4826 MAD estimates one sigma. The two floors are for parts that hardly
vary: a rise by less than half is not a spike.

`patience` spiky steps in a row confirm a spike, so that a single bad batch does not. Only clean steps enter the
windows: a median that included the spike would soon accept it. Non-finite values are left to the non-finite
guard, and a cross-entropy of exactly 0 comes from a step without an unmasked token: neither is clean or spiky.

What it gives up: a rise that the window can follow, such as a slow drift, is never a spike; `DivergenceWatch` sees it.

**Divergence** (`DivergenceWatch`): the student stays worse than it was before the first step. It watches cross-entropy,
which means the same at every T, alpha and divergence. The limit is `factor` times the initial loss, the larger of the
first validation loss and the first training loss (both of weights before any update), and at least 0.1 nats above it.
The run has diverged when a validation loss, or the median of the last 20 training losses, exceeds the limit; a few bad
batches do not. It needs no clean losses: it detects a run that blows up in its first steps, and one that rises too
slowly for the spike detector.

**Early stopping** (`EarlyStopping`). Every `--early-stopping-interval` steps it compares the newest validation loss
with the best one so far; a loss is better when it is more than `min_delta` nats lower. Where the validation split has
no unmasked token, it uses the mean of the last 50 training losses. A plateau is `patience` comparisons in a row without
an improvement, none of them during the warm-up. A non-finite loss is not an improvement.
"""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any, Generic, TypeVar

import torch

from kdtrain.config.sections import GuardsConfig, StoppingConfig
from kdtrain.files import typed
from kdtrain.precision.loss_scale import LossScale
from kdtrain.ranks import agreed_max
from kdtrain.tables import MAD_FACTOR, median_and_mad


def non_finite(*tensors: torch.Tensor) -> torch.Tensor:
    """Return 1 where any entry of any tensor is NaN or infinite on any rank, else 0; 0-dim fp32 on the device.

    tensors: on one device, of any shape and float dtype; loss, gradient norm, and the gradients outside the norm.
    """
    bad = torch.stack([torch.isfinite(each.detach()).all() for each in tensors]).all().logical_not()
    return agreed_max(bad.float())


M = TypeVar("M", bound="_Huge | _Losses | _Plateau | _Clean")


class Watcher(Generic[M]):
    """A watcher of numbers, pure but for its `memory`, which is a dataclass of plain numbers."""

    memory: M

    def state_dict(self) -> dict[str, Any]:
        """Return the memory; JSON keeps the numbers to the last bit."""
        return asdict(self.memory)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore what `state_dict` returned. ValueError: an entry is missing, of another type, or non-finite."""
        memory = typed(state, type(self.memory))
        text = json.dumps(asdict(memory))
        if "NaN" in text or "Infinity" in text:
            raise ValueError("it holds a non-finite number")
        self.memory = memory


@dataclass
class _Huge:
    huge: int


EXPLODED_STEPS = 3
"""Steps in a row with a huge gradient after which a run ends."""


class GradientExplosion(Watcher[_Huge]):
    """Counts the steps in a row whose gradient norm lies above a threshold, after the warm-up steps."""

    def __init__(self, config: StoppingConfig) -> None:
        self.config = config
        self.memory = _Huge(0)

    def update(self, step: int, grad_norm: float) -> str | None:
        """Take the gradient norm of a step before clipping; return why the run must end, or None."""
        config = self.config
        if step <= config.stopping_warmup or not math.isfinite(grad_norm):
            return None
        self.memory.huge = self.memory.huge + 1 if grad_norm > config.explosion_threshold else 0
        if self.memory.huge < EXPLODED_STEPS:
            return None
        return (
            f"gradient norm above {config.explosion_threshold:g} (--explosion-threshold) at {self.memory.huge} steps "
            f"in a row, {grad_norm:.4g} at step {step}; lower --lr"
        )


LEAST_RISE = 0.5
"""The smallest rise of a spike, as a share of the median."""
LEAST_NATS = 0.1


@dataclass
class _Clean:
    clean: dict[str, list[float]]
    spiky: int
    suspicious_since: int | None


class SpikeDetector(Watcher[_Clean]):
    """Watches the parts of the loss at each step.

    Args:
        patience: spiky steps in a row that confirm a spike; 0 disables the detector.
        window: how many clean values of each part are kept.
        minimum: clean values of a part that a threshold needs.
    """

    def __init__(self, patience: int = 3, window: int = 32, minimum: int = 10) -> None:
        self.patience, self.window, self.minimum = patience, window, minimum
        self.memory = _Clean({}, 0, None)

    @property
    def suspicious_since(self) -> int | None:
        """The first step of the current series of spiky steps; None after a clean step."""
        return self.memory.suspicious_since

    def update(self, step: int, parts: Mapping[str, float], alpha: float | None = None) -> int | None:
        """Take the parts of a step's loss, nats; return the first step of a confirmed spike, or None.

        alpha: the weight of the divergence `kd_T1`, where it moves.
        """
        if not self.patience or not all(map(math.isfinite, parts.values())) or parts.get("ce") == 0:
            return None
        clean = self.memory.clean
        watched = {name: [value, *reversed(clean.get(name, ()))] for name, value in parts.items()}  # the newest first
        if alpha is not None:
            both = zip(watched["ce"], watched.pop("kd_T1"), strict=False)
            watched["ce"] = [(1 - alpha) * ce + alpha * kd for ce, kd in both]
        if all(value <= self.threshold(before) for value, *before in watched.values()):
            # of a part that is not watched for a while, nothing before counts
            self.memory.clean = {name: [*clean.get(name, ()), value][-self.window :] for name, value in parts.items()}
            self.reset()
            return None
        if self.memory.suspicious_since is None:
            self.memory.suspicious_since = step
        self.memory.spiky += 1
        return self.memory.suspicious_since if self.memory.spiky >= self.patience else None

    def threshold(self, clean: Sequence[float]) -> float:
        """Return the value above which a part with these clean values is spiky; infinite while there are too few."""
        if len(clean) < self.minimum:
            return math.inf
        middle, spread = median_and_mad(clean)
        return middle + max(MAD_FACTOR * spread, LEAST_RISE * abs(middle), LEAST_NATS)

    def reset(self) -> None:
        """Forget the spike; the clean values from before it stay."""
        self.memory.suspicious_since = None
        self.memory.spiky = 0


DIVERGENCE_WINDOW = 20
"""Training losses in the median, which needs at least half as many."""
DIVERGENCE_LEAST_NATS = 0.1


@dataclass
class _Losses:
    validation: float | None
    first: float | None
    losses: list[float]


class DivergenceWatch(Watcher[_Losses]):
    """Watches training and validation loss. factor: `--max-loss-ratio`."""

    def __init__(self, factor: float) -> None:
        self.factor = factor
        self.memory = _Losses(None, None, [])

    @property
    def limit(self) -> float:
        """The largest loss that is not a divergence, nats; infinite before the first loss."""
        known = [each for each in (self.memory.validation, self.memory.first) if each is not None]
        return max(self.factor * max(known), max(known) + DIVERGENCE_LEAST_NATS) if known else math.inf

    def validated(self, loss: float) -> bool:
        """Take the cross-entropy of a validation; return whether the run has diverged. A non-finite loss has."""
        if self.memory.validation is None:
            self.memory.validation = loss
        return not loss <= self.limit

    def update(self, loss: float) -> bool:
        """Take the cross-entropy of a training step; return whether the run has diverged. 0: no unmasked token."""
        if not math.isfinite(loss) or loss == 0:
            return False
        if self.memory.first is None:
            self.memory.first = loss
        self.memory.losses = [*self.memory.losses, loss][-DIVERGENCE_WINDOW:]
        return len(self.memory.losses) >= DIVERGENCE_WINDOW // 2 and median(self.memory.losses) > self.limit

    def reset(self) -> None:
        """Forget the last training losses, after a rollback."""
        self.memory.losses = []


AVERAGE_WINDOW = 50
"""Training losses in the average."""


@dataclass
class _Plateau:
    losses: list[float]
    validation: float | None
    """The newest one, until it is compared."""
    validates: bool
    best: float | None
    waited: int


class EarlyStopping(Watcher[_Plateau]):
    """Watches the loss for a plateau, and averages the last 50 training losses."""

    def __init__(self, config: StoppingConfig) -> None:
        self.config = config
        self.memory = _Plateau([], None, False, None, 0)

    @property
    def average(self) -> float:
        """Mean of the last 50 finite losses, nats; NaN while there is none."""
        losses = self.memory.losses
        return math.fsum(losses) / len(losses) if losses else math.nan

    def add(self, loss: float) -> None:
        """Take the training loss of a step, nats."""
        if math.isfinite(loss):
            self.memory.losses = [*self.memory.losses, loss][-AVERAGE_WINDOW:]

    def validated(self, loss: float) -> None:
        """Take a validation loss, nats; from the first one on, only validation losses count."""
        self.memory.validates = True
        self.memory.validation = loss

    def plateau(self, step: int) -> str | None:
        """Return the reason for a plateau after step `step` and its validation, or None."""
        config, memory = self.config, self.memory
        if not config.early_stopping or step <= config.stopping_warmup or step % config.early_stopping_interval:
            return None
        loss = memory.validation if memory.validates else self.average
        if loss is None:
            return None  # no validation since the last comparison
        memory.validation = None
        if math.isfinite(loss) and (memory.best is None or loss < memory.best - config.early_stopping_min_delta):
            memory.best = loss
            memory.waited = 0
            return None
        memory.waited += 1
        if memory.waited < config.early_stopping_patience:
            return None
        what = "validation loss" if memory.validates else f"{AVERAGE_WINDOW}-step average of the training loss"
        best = "a finite one" if memory.best is None else f"{config.early_stopping_min_delta:g} below {memory.best:.4f}"
        return f"{what} {loss:.4f} at step {step}, not {best} in {memory.waited} comparisons in a row"


class Guards:
    """All watchers of a run and its loss scale; every checkpoint holds their state.

    Args:
        guards, stopping: their options.
        fp16: whether gradients are fp16 and need a loss scale.
    """

    def __init__(self, guards: GuardsConfig, stopping: StoppingConfig, fp16: bool) -> None:
        self.spikes = SpikeDetector(guards.spike_patience)
        self.divergence = DivergenceWatch(guards.max_loss_ratio)
        self.explosion = GradientExplosion(stopping)
        self.stopping = EarlyStopping(stopping)
        self.scale = LossScale(fp16)
