"""What a plan of data is: where the sequences of a run come from, before anything is built.

A run takes the plans that its options name (`DistillConfig.plans`), those of plugins first. Each may build on the
next one: one that has the student write takes prompts and validation from the plan of the other options.
"""

from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, TypeVar

import torch

from kdtrain.config.choices import PLANS
from kdtrain.config.commands import DistillConfig
from kdtrain.models.spec import ModelSpec
from kdtrain.training.sources.source import Facts, Source

if TYPE_CHECKING:
    from kdtrain.teaching.online import OnlineTeacher

T = TypeVar("T", bound=Callable[[Any], Any])


class DataPlan:
    """Where the sequences of a run come from."""

    facts: Facts | None = None
    """None for text, of which more is known when it is packed."""
    live: Any = None
    """The `LiveCache` that the run reads while it is captured."""
    options: Mapping[str, Any] = {}
    """Options in place of those given, with which the run would read the same data again."""

    def masked(self) -> bool:
        """Whether documents are kept apart."""
        return self.facts is not None and self.facts.document_mask

    def refuse_no_rows(self) -> None:
        """UsageError: a text gives a split no sequence, which is seen before a teacher is loaded."""

    def prepare(self, resumed: bool) -> tuple[dict[str, Source], Source]:
        """The splits train and validation, and sequences for validation in the teacher's own tokens.

        Validation may be of another plan (`PlanRequest.next`). Every rank calls it, once the folder is the run's.
        resumed: whether that holds an earlier part of this run.

        UsageError, RunError: the data cannot be read, or do not fit the options.
        """
        raise NotImplementedError


@dataclass(frozen=True, kw_only=True)
class PlanRequest:
    """What the data of a run are planned for."""

    config: DistillConfig
    student: ModelSpec
    teacher: "OnlineTeacher | None"
    """An online one, not yet loaded."""
    device: torch.device
    held: ExitStack
    """Ends what runs beside the training, such as a capture."""
    trial: bool
    """Whether a server answers for what is read only."""
    names: tuple[str, ...]
    """The plans that are left, the next one first."""

    def next(self) -> DataPlan:
        """Plan the data by the first of `names`. Every rank calls it. UsageError, RunError: they cannot be read."""
        plan: DataPlan = PLANS.get(self.names[0])(replace(self, names=self.names[1:]))
        return plan


def register_plan(name: str) -> Callable[[T], T]:
    """Decorator: make a function, or a class, the plan that a section of options names as its `data_plan`.

    Every rank calls it with a `PlanRequest`; what may fail on one alone stands in `ranks.raise_on_all_ranks`.
    """
    return PLANS.registers(name, "")
