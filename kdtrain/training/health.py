"""Signs that a run is not well, as pure functions of its numbers: each gives a line for people, or None.

Nothing here changes the training or survives a restart: what is said once a process is said again by the next one.
"""

import math
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field

from torch import nn

from kdtrain.parallel.sharded import peaks


class ClippedShare:
    """The share of the last steps whose gradient was clipped; above a tenth the learning rate is too high.

    Args:
        clip: largest norm of a gradient; 0 clips nothing.
        window: steps counted.
    """

    limit = 0.1

    def __init__(self, clip: float, window: int = 100) -> None:
        self.clip = clip
        self.steps: deque[bool] = deque(maxlen=window)
        self.warned = False

    @property
    def share(self) -> float:
        """0 to 1; 0 before the first step."""
        return sum(self.steps) / len(self.steps) if self.steps else 0.0

    def add(self, norm: float) -> str | None:
        """Count a step whose gradient had `norm`; the warning when a full window gets over the limit."""
        self.steps.append(0 < self.clip < norm)
        over = len(self.steps) == self.steps.maxlen and self.share > self.limit
        news, self.warned = over and not self.warned, over
        if not news:
            return None
        return (
            f"the gradient was clipped in {self.share:.0%} of the last {len(self.steps)} steps (above --clip "
            f"{self.clip:g}); more than {self.limit:.0%} says that the steps are too long: lower --lr"
        )


class LearnedSamples:
    """Whether the student has learned the samples in its targets by heart, said once.

    A divergence is at least 0, and so is the mean of its estimates from fresh samples. A cache's samples are the same
    in every epoch: a student that fits them brings the estimate to 0 and below while it moves away from the teacher.

    Args:
        samples: entries drawn for a token; with 0 there is nothing to be learned.
        window: steps in the mean.
    """

    def __init__(self, samples: int, window: int = 50) -> None:
        self.samples = samples
        self.steps: deque[float] = deque(maxlen=window)
        self.warned = False

    @property
    def mean(self) -> float:
        """Of the divergence in the last steps, nats; infinite before there are enough."""
        return math.fsum(self.steps) / len(self.steps) if len(self.steps) == self.steps.maxlen else math.inf

    def add(self, divergence: float, epochs: float) -> str | None:
        """Take the divergence of a step, a mean over its tokens; the warning when the window's mean is 0 or less."""
        if not self.samples or not math.isfinite(divergence):
            return None
        self.steps.append(divergence)
        if self.warned or self.mean > 0:
            return None
        self.warned = True
        return (
            f"the divergence from the teacher is {self.mean:.3f} nats over the last {len(self.steps)} steps, and fresh "
            f"samples give none below 0: after {epochs:.1f} epochs the student has learned the {self.samples} samples "
            "a token by heart; cache more text, or with a larger --head or --draws, or train fewer steps"
        )


class MemoryGrowth:
    """How much more memory a process holds than after its warm-up; more than half again is said once.

    The reference is taken after `warmup` steps of the process, and again behind the first checkpoint and the first
    validation, whose buffers stay.

    Args:
        first: the first step of this process.
        warmup: steps until the memory is expected to be settled.
        every: numbers of steps between what settles it anew (checkpoints, validations).
    """

    limit = 0.5

    def __init__(self, first: int, warmup: int = 50, every: Iterable[int] = ()) -> None:
        warm = first + warmup - 1
        self.settles = {warm + 1, *(max(warm, -(-first // each) * each) + 1 for each in every)}
        self.reference: float | None = None
        self.warned = False

    def add(self, step: int, held: float) -> tuple[float, str | None]:
        """MiB above the reference (0 before there is one) when `held` MiB are held in `step`, and the warning."""
        if step in self.settles:
            self.reference = held
        if not self.reference:
            return 0.0, None
        grown = held - self.reference
        if self.warned or grown <= self.limit * self.reference:
            return grown, None
        self.warned = True
        return grown, (
            f"the process holds {held:,.0f} MiB, {grown:,.0f} more than after its warm-up; if it goes on growing "
            "something leaks, and the run can be stopped and gone on with"
        )


@dataclass(frozen=True)
class Gradients:
    """The parameters whose gradient is no good, by name."""

    missing: list[str] = field(default_factory=list)
    """Without one: they took no part in the loss."""
    zero: list[str] = field(default_factory=list)
    """All of it 0: they take part, and nothing they do matters."""
    broken: list[str] = field(default_factory=list)
    """Some of it nan or inf."""
    good: int = 0
    """Parameters whose gradient is finite and not all 0."""

    def lines(self) -> list[str]:
        """A line for each kind that there is."""
        kinds = (
            (self.broken, "a gradient that is not finite"),
            (self.missing, "no gradient: nothing they do reaches the loss"),
            (self.zero, "a gradient of nothing but zeros: they will not learn"),
        )
        return [f"{_count(names)} {text} ({_first(names)})" for names, text in kinds if names]


def gradients_of(module: nn.Module) -> Gradients:
    """Look at the gradient of every parameter that wants one; waits for the device once."""
    wanting = {name: each for name, each in module.named_parameters() if each.requires_grad}
    there = {name: each.grad for name, each in wanting.items() if each.grad is not None}
    largest = peaks(list(there.values())).tolist() if there else []
    by_name = dict(zip(there, largest, strict=True))
    return Gradients(
        missing=[name for name in wanting if name not in there],
        zero=[name for name, size in by_name.items() if size == 0],
        broken=[name for name, size in by_name.items() if not math.isfinite(size)],
        good=sum(math.isfinite(size) and size > 0 for size in by_name.values()),
    )


def initial_loss(loss: float, vocab_size: int, init: str) -> tuple[bool, str]:
    """Whether the cross-entropy before the first step is what it should be, and a line that says so.

    Args:
        loss: nats a token.
        vocab_size: V; knowing nothing costs ln V.
        init: where the weights come from, as a spec says it. From scratch they know nothing: the loss is ln V, and up
            to a tenth more where random logits are wide. Pretrained ones are below. Others may be anywhere.
    """
    even = math.log(vocab_size)
    text = f"initial loss {loss:.3f} nats a token, ln V is {even:.3f}"
    if not math.isfinite(loss):
        return False, f"{text}: not finite; look at the weights and the data"
    if init == "scratch" and loss > 1.1 * even:
        return False, f"{text}: fresh weights are worse than knowing nothing; their scale is too large"
    if init == "scratch" and loss < 0.9 * even:
        return (
            False,
            f"{text}: fresh weights know too much; a label is seen before it is to be told, or they are not fresh",
        )
    if init == "pretrained" and loss > even:
        return False, f"{text}: a trained student is worse than knowing nothing; is the tokenizer its own?"
    return True, text


def _count(names: list[str]) -> str:
    return f"{len(names)} parameter{'s have' if len(names) > 1 else ' has'}"


def _first(names: list[str], most: int = 5) -> str:
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")
