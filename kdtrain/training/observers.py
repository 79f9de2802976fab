"""Observers see the steps of a run: what is before and after forward, backward and optimizer.

An observer does not change a run. A plugin or a package adds one by a function that `registered.register_observer`
decorates: it gets an `ObserverRequest` for each run, and returns an observer, or None for a run without it.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import nn

from kdtrain.config import DistillConfig
from kdtrain.config.registered import OBSERVERS
from kdtrain.objective.batch import Batch
from kdtrain.objective.loss import LossOutput
from kdtrain.precision.emulated import Recipe
from kdtrain.training.student import Student


class Observer:
    """Sees steps, on every rank; a subclass overrides the methods it needs."""

    def before_step(self, step: int, student: Student, batch: Batch, normalizer: float) -> bool:
        """Before the first micro-batch, `batch`, of the step with number `step` (from 1).

        Returns:
            True if it ran `student(batch, normalizer)` itself: gradients are then cleared, and random generators set as
            they were.
        """
        return False

    def before_forward(self, batch: Batch) -> None:
        """Before each micro-batch."""

    def after_forward(self, output: LossOutput) -> None:
        """Before the backward of a micro-batch with these sums over its tokens."""

    def after_backward(self) -> None:
        """After the gradients of a micro-batch were added."""

    def before_optimizer(self, student: Student) -> None:
        """With the gradients of the step, clipped; a fused optimizer on a GPU clips them itself."""

    def after_optimizer(self, metrics: Mapping[str, float], taken: bool) -> None:
        """After a step, with what is logged of it. taken: False if it was skipped because it is non-finite."""

    def resume(self, step: int) -> None:
        """The run continues after `step`: later steps that were seen before come again."""


@dataclass(frozen=True, kw_only=True)
class ObserverRequest:
    """The run that an observer is made for."""

    config: DistillConfig
    model: nn.Module
    """The student as transformers has it, whole on every rank."""
    recipe: Recipe | None
    """The format of its quantised products; None if it has none."""
    dtype: torch.dtype
    """Of its other products."""


def observers_of(request: ObserverRequest) -> tuple[Observer, ...]:
    """The observers of a run. UsageError: one of them refuses it."""
    made = (OBSERVERS.get(name)(request) for name in OBSERVERS.help())
    return tuple(each for each in made if each is not None)
