"""Observers of a run: code that looks at tensors while a step runs, without an edit of `step`, and at events.

A `Stepper` calls each of its observers before and after the forward and the backward of every micro-batch, and before
and after the optimizer's update. An observer changes nothing: neither weights, gradients nor random numbers. What it
needs from a pass of its own it gets from `StepView.run_eagerly`, which leaves no trace.

A plugin or a package adds one by a function that `registered.register_observer` decorates: it gets an
`ObserverRequest` for each run, and returns an observer, or None for a run without it.

What it gives up: an observer sees no compiled graph from inside. Hooks on modules are called in eager passes alone.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from kdtrain.config.choices import OBSERVERS
from kdtrain.config.commands import DistillConfig
from kdtrain.objective.batch import Batch
from kdtrain.objective.loss import LossOutput
from kdtrain.training.student import Student

if TYPE_CHECKING:
    from kdtrain.precision.emulated import FormatRecipe


@dataclass
class StepView:
    """The step that is under way, as observers see it."""

    number: int
    """The step, from 1."""
    student: Student
    """The model and its loss; gradients are in its parameters."""
    run_eagerly: Callable[[Batch], None]
    """Runs forward and backward of a batch without compiled graphs, so that hooks on modules are called, then drops the
    gradients and restores the random generators. Only in `before_forward` of micro-batch 1; every rank must call it."""
    micro_batch: int = 0
    """The micro-batch of this rank, from 1."""


class Observer:
    """Looks at every step of a run; each method does nothing unless a subclass overrides it."""

    def before_step(self, step: StepView) -> None:
        """Look at a step before it reads its first micro-batch; learning rate and random generators are set."""

    def before_forward(self, step: StepView, batch: Batch) -> None:
        """Look at a micro-batch before its forward."""

    def after_forward(self, step: StepView, output: LossOutput) -> None:
        """Look at a forward's output; with the objective's engine it has made the gradient of the output head."""

    def before_backward(self, step: StepView, output: LossOutput) -> None:
        """Look at an output before the backward of its micro-batch, after `after_forward` of all observers."""

    def after_backward(self, step: StepView) -> None:
        """Look at a step after the backward of a micro-batch; parameters hold the sum of the gradients so far."""

    def before_optimizer(self, step: StepView) -> None:
        """Look at a step before its update, with the exchanged gradients.

        On a GPU fused AdamW still divides and clips them.
        """

    def after_optimizer(self, step: StepView, metrics: Mapping[str, float], skipped: bool) -> None:
        """Look at a step after its update; gradients are dropped.

        Args:
            metrics: the step's numbers, by their names in metrics.jsonl.
            skipped: whether loss or gradient was non-finite, so that nothing was updated.
        """

    def rewound(self, step: int) -> None:
        """Forget the steps after `step`: a run resumes there, or is rolled back to it, and takes later steps again."""

    def event(self, record: Mapping[str, Any]) -> None:
        """Take an event on rank 0, as events.jsonl has it, before it is written: the disk may be full."""

    def warn(self, warning: Callable[[str, str], None]) -> None:
        """Log background failures by `warning(kind, text)`; called on rank 0 after each step and at the end."""

    def close(self) -> None:
        """End the work that events began; called on rank 0 at the end of a run whose logs were opened."""


@dataclass(frozen=True, kw_only=True)
class ObserverRequest:
    """The run that an observer is made for."""

    config: DistillConfig
    model: nn.Module
    """The student as transformers has it, whole on every rank."""
    recipe: "FormatRecipe | None"
    """The format of its quantised products; None if it has none."""
    dtype: torch.dtype
    """Of its other products."""
    main: bool = True
    """Whether this is rank 0, which writes."""


def observers_of(request: ObserverRequest) -> tuple[Observer, ...]:
    """Make the observers that packages add to a run. UsageError: one of them refuses it."""
    made = (make(request) for make in OBSERVERS.every().values())
    return tuple(each for each in made if each is not None)
