"""The temperature of the distillation term: fixed, scheduled, or learnable.

A learnable temperature is one fp32 number theta with
    T = T_min (T_max / T_min)^sigmoid(theta),
log-spaced, so that it cannot leave its bounds and moves equally fast at both ends. Three ways to learn it:

likelihood   minimise over beta = 1/T the teacher's own cross-entropy with the labels, the mean of
             log Z(beta) - beta e_label: convex in beta, one optimum, from the targets alone. It calibrates
             the teacher (Guo et al. 2017, arXiv 1706.04599). The distillation loss sees T without a gradient.
adversarial  ascend the distillation loss in T through a gradient reversal layer, whose strength rises from 0
             to 1 along a cosine (CTKD, Li et al., AAAI 2023, arXiv 2211.16231). T^2 KL has a hump inside.
minimize     descend the distillation loss in T. Kept because people ask for it: T^2 KL falls on both sides of
             its hump, so that T runs to a bound; `at_bound` tells when it is there.

`register_temperature` adds a mode.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from kdtrain.config.choices import LEARNS, MAXIMIZES, SCHEDULED, TEMPERATURES
from kdtrain.errors import UsageError
from kdtrain.objective.targets import Targets, per_token

_EDGE = 0.02
"""T closer to a bound than this part of the range, in log T, counts as being on it."""
_START = 0.05
"""T starts at least this part of the range inside its bounds: closer to a bound the sigmoid hardly moves."""


class Temperature(nn.Module):
    """A fixed temperature, and the interface of all others."""

    step: int

    def __init__(self, start: float) -> None:
        super().__init__()
        if not 0 < start < math.inf:
            raise UsageError(f"--temperature {start} is not above 0")
        self.step = 0
        self.reach: tuple[float, float] = (start, start)
        """The lowest and the highest T that it takes."""
        self.stays_one = start == 1 and type(self) is Temperature
        """True where T is 1 at every step."""
        self.register_buffer("_start", torch.tensor(start, dtype=torch.float32), persistent=False)

    def set_step(self, step: int) -> None:
        """Set the optimizer step, from 0, of the next calls; every schedule depends on it."""
        self.step = step

    def value(self) -> Tensor:
        """Return T for the distillation loss, scalar fp32, with the gradient that the mode defines (or none)."""
        return self._start  # type: ignore[return-value]

    def auxiliary_loss(self, targets: Targets | None, mask_N: Tensor, normalizer: Tensor | float) -> Tensor | None:
        """Return a scalar to add to the loss, which depends on the temperature alone; None if the mode has none."""
        return None

    def at_bound(self) -> str | None:
        """Return `minimum` or `maximum` when a learned T is on that bound, else None. It waits for the device."""
        return None

    def log_gradient(self) -> Tensor | None:
        """Return the present gradient of theta, converted to log T; None if there is none."""
        return None


@dataclass(frozen=True, kw_only=True)
class TemperatureOptions:
    """The options that a mode is built from; each mode reads only what it needs."""

    start: float
    """T at step 0; a learned T starts at least 5 % of the range (in log T) inside its bounds."""
    minimum: float
    """Bounds for a T that is learned, normally the range at which the cache is right."""
    maximum: float
    end: float
    """T at the end of a schedule; the start if not given."""
    total_steps: int = 0
    """Number of the run's last step; the first is 0."""
    ramp_steps: int
    """Steps until an adversarial T is at full strength; a tenth of all if not given."""


Maker = TypeVar("Maker", bound=Callable[[TemperatureOptions], Temperature])


def register_temperature(
    name: str, *, learns: bool | None = None, maximizes: bool = False, scheduled: bool = False, help: str = ""
) -> Callable[[Maker], Maker]:
    """Return a decorator that makes a function, or a `Temperature`, the mode that `--temperature-mode NAME` takes.

    Args:
        name: as users write it.
        learns: whether T is a parameter: a run then keeps the start between the bounds, and refuses the mode where
            there is nothing to learn from (without a teacher, at alpha 0). By default all but scheduled ones.
        maximizes: whether T goes where the loss is largest, which a divergence that grows with T does not have.
        scheduled: whether T goes from `--temperature` to `--temperature-end`, which must then differ and lie where the
            cache is right.
        help: its line in `--help`; by default the first of the docstring.
    """
    learns = not scheduled if learns is None else learns
    stated = ((LEARNS, learns), (MAXIMIZES, maximizes), (SCHEDULED, scheduled))
    traits = [trait for trait, holds in stated if holds]
    return TEMPERATURES.registers(name, help, traits=traits)


class ScheduledTemperature(Temperature):
    """T from `start` to `end` over `total_steps`, a pure function of the step."""

    def __init__(self, start: float, end: float, total_steps: int, shape: str) -> None:
        super().__init__(start)
        self.start, self.end, self.total_steps, self.shape = start, end, total_steps, shape
        self.reach = (start, start) if shape == "constant" else (min(start, end), max(start, end))

    def value(self) -> Tensor:
        return torch.full_like(
            self._start,  # type: ignore[arg-type]
            scheduled(self.shape, self.start, self.end, self.step, self.total_steps),
        )


class LearnedTemperature(Temperature):
    """T between two bounds, from the one parameter `theta`."""

    def __init__(self, start: float, bounds: tuple[float, float]) -> None:
        super().__init__(start)
        minimum, maximum = bounds
        if not 0 < minimum < maximum:
            raise UsageError(
                f"a temperature cannot be learned between {minimum:g} and {maximum:g}; build the cache with --top-k, "
                "which serves more than T = 1, or give other bounds"
            )
        self.reach = (minimum, maximum)
        self.log_minimum, self.log_range = math.log(minimum), math.log(maximum / minimum)
        place = (math.log(start) - self.log_minimum) / self.log_range
        place = min(max(place, _START), 1 - _START)
        self.theta = nn.Parameter(torch.tensor(math.log(place / (1 - place)), dtype=torch.float32))

    def temperature(self) -> Tensor:
        """Return T with its plain gradient in theta."""
        return torch.exp(self.log_minimum + self.log_range * torch.sigmoid(self.theta.float()))

    def at_bound(self) -> str | None:
        place = torch.sigmoid(self.theta.detach()).item()
        if place < _EDGE:
            return "minimum"
        return "maximum" if place > 1 - _EDGE else None

    def log_gradient(self) -> Tensor | None:
        if self.theta.grad is None:
            return None
        place = torch.sigmoid(self.theta.detach())
        return self.theta.grad / (self.log_range * place * (1 - place))


class LikelihoodTemperature(LearnedTemperature):
    """The temperature at which the teacher gives the labels the highest likelihood.

    >>> LikelihoodTemperature(start=2.0, bounds=(1.0, 4.0)).value()
    tensor(2.)
    """

    def value(self) -> Tensor:
        return self.temperature().detach()

    def auxiliary_loss(self, targets: Targets | None, mask_N: Tensor, normalizer: Tensor | float) -> Tensor | None:
        """Return the mean over unmasked tokens of log Z(beta) - beta e_label, in nats; None without targets.

        `normalizer` is the number of unmasked tokens of the whole step, as for the loss.
        """
        if targets is None:
            return None
        beta = 1.0 / self.temperature()
        gap_N = targets.log_partition(beta, keep_N=mask_N) - beta * targets.label_logprob.masked_fill(~mask_N, 0.0)
        return per_token(gap_N.masked_fill(~mask_N, 0.0).sum(), normalizer)


class AdversarialTemperature(LearnedTemperature):
    """The temperature at which the student's loss is largest, found by reversing the gradient."""

    def __init__(self, start: float, bounds: tuple[float, float], ramp_steps: int) -> None:
        super().__init__(start, bounds)
        self.ramp_steps = ramp_steps

    def strength(self) -> float:
        """Return the factor on the reversed gradient: 0 at step 0, 1 from step `ramp_steps` on, a cosine in between."""
        return scheduled("cosine", 0.0, 1.0, self.step, self.ramp_steps)

    def value(self) -> Tensor:
        temperature = self.temperature()
        return temperature.detach() - self.strength() * (temperature - temperature.detach())

    def log_gradient(self) -> Tensor | None:
        """Return the loss's own gradient, as in all modes: not reversed, not ramped; None while the strength is 0."""
        reversed_gradient = super().log_gradient()
        return None if reversed_gradient is None or not self.strength() else -reversed_gradient / self.strength()


class MinimizedTemperature(LearnedTemperature):
    """The temperature that makes the distillation loss small; it runs to a bound."""

    def value(self) -> Tensor:
        return self.temperature()


def scheduled(shape: str, start: float, end: float, step: int, total_steps: int) -> float:
    """Return the value at `step` on the way from `start` (step 0) to `end` (step `total_steps` and after)."""
    if shape == "constant":
        return start
    done = min(1.0, step / total_steps) if total_steps > 0 else 1.0
    if shape == "cosine":
        done = 0.5 * (1.0 - math.cos(math.pi * done))
    return start + (end - start) * done


def build_temperature(mode: str, **given: Any) -> Temperature:
    """Build the temperature of `mode`, as `--temperature-mode` takes it, from the fields of `TemperatureOptions`.

    Raises:
        UsageError: an unknown mode, or impossible temperatures or bounds.
    """
    make: Callable[[TemperatureOptions], Temperature] = TEMPERATURES.get(mode)
    defaults = {"end": given["start"], "ramp_steps": given.get("total_steps", 0) // 10}
    return make(TemperatureOptions(**defaults | given))


register_temperature("fixed")(lambda o: Temperature(o.start))
register_temperature("schedule")(lambda o: ScheduledTemperature(o.start, o.end, o.total_steps, "linear"))
register_temperature("cosine")(lambda o: ScheduledTemperature(o.start, o.end, o.total_steps, "cosine"))
register_temperature("likelihood")(lambda o: LikelihoodTemperature(o.start, (o.minimum, o.maximum)))
register_temperature("adversarial")(lambda o: AdversarialTemperature(o.start, (o.minimum, o.maximum), o.ramp_steps))
register_temperature("minimize")(lambda o: MinimizedTemperature(o.start, (o.minimum, o.maximum)))
