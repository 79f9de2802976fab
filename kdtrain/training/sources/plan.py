"""What a plan of data is: where the sequences of a run come from, before anything is built.

A run takes the plans that its options name (`DistillConfig.plans`), those of plugins first. Each may build on the
next one: one that has the student write takes prompts and validation from the plan of the other options. That of
finished caches stands here; those that make data are imported by their names (`config.choices.PLANS`).
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
import torch

from kdtrain.cache.format.manifest import CacheSettings
from kdtrain.cache.read.reader import LocalCache, open_cache
from kdtrain.config.choices import PLANS, SOURCES
from kdtrain.config.commands import CacheTeacherConfig, DistillConfig
from kdtrain.data.order import permutation
from kdtrain.errors import UsageError
from kdtrain.models.spec import ModelSpec
from kdtrain.process import world_size
from kdtrain.ranks import all_reduce_max, raise_on_all_ranks
from kdtrain.training.signals import asked_to_stop
from kdtrain.training.sources.source import Facts, Source, SourceRequest

if TYPE_CHECKING:
    from kdtrain.data.packed import PackedRow
    from kdtrain.teaching.teacher import OnlineTeacher

T = TypeVar("T", bound=Callable[[Any], Any])
Rows = Mapping[str, "Iterator[PackedRow]"]
"""Of each split."""
Ordered = Callable[[CacheSettings, LocalCache], tuple[CacheSettings, Rows, Callable[[int, int | None], None]]]
"""Settings and packed text of a cache -> its settings, its rows when they may be taken, and its progress."""


class DataPlan:
    """The plan of a run's data: where its sequences come from."""

    facts: Facts | None = None
    """None for text, of which more is known when it is packed."""
    apart = False
    """Whether a trial reads other data than the run of its options."""
    options: Mapping[str, Any] = {}
    """Options in place of those given, with which the run would read the same data again."""

    def masked(self) -> bool:
        """Return whether documents are kept apart."""
        return self.facts is not None and self.facts.document_mask

    def refuse_no_rows(self) -> None:
        """Raise a UsageError if a text gives a split no sequence, which is seen before a teacher is loaded."""

    def cost(self, validation: int) -> Mapping[str, Any]:
        """Return rows of --dry-run: what the data cost beside the training. validation: sequences of that split."""
        return {}

    def prompts(
        self, width: int | None, resumed: bool, rows: "Callable[[], Mapping[str, list[PackedRow]]] | None" = None
    ) -> LocalCache:
        """Write the prompts of the text into the run's folder, a cache of bare tokens; every rank calls it.

        width: tokens of a prompt of plain text, None for the default. rows: reads rows of each split in their place.
        """
        raise NotImplementedError

    def finish(self) -> None:
        """End what runs beside the training, which has read all that it reads."""

    def prepare(self, resumed: bool) -> tuple[dict[str, Source], Source]:
        """Open the splits train and validation, and sequences for validation in the teacher's own tokens.

        Validation may be of another plan (`PlanRequest.next`). Every rank calls it, once the folder is the run's.
        resumed: whether that holds an earlier part of this run.

        UsageError, RunError: the data cannot be read, or do not fit the options.
        """
        raise NotImplementedError


@dataclass(frozen=True, kw_only=True)
class PlanRequest:
    """The run whose data are planned."""

    config: DistillConfig
    student: ModelSpec
    teacher: "OnlineTeacher | None"
    """An online one, not yet loaded."""
    device: torch.device
    held: ExitStack
    """Ends what runs beside the training, such as a capture."""
    trial: bool
    """Whether a server answers for what is read only."""
    capturing: Callable[[CacheTeacherConfig], Callable[[Ordered], None]]
    """Refuses a cache in the run's folder that the run cannot use, and returns what builds it by the given rows."""
    names: tuple[str, ...]
    """The plans that are left, the next one first."""

    def first_epoch(self, sequences: int) -> np.ndarray:
        """Return the order in which the run reads so many sequences first."""
        return permutation(self.config.seed, 0, sequences)

    @property
    def alone(self) -> bool:
        """Whether this process is the whole run."""
        return world_size() == 1

    def stopping(self) -> bool:
        """Return whether the run is to stop, so that nothing must wait any longer."""
        return asked_to_stop()

    def stopping_on_any(self) -> bool:
        """Return whether any rank is to stop; every rank must call it."""
        return bool(all_reduce_max(int(asked_to_stop())))

    def next(self) -> DataPlan:
        """Plan the data by the first of `names`. Every rank calls it. UsageError, RunError: they cannot be read."""
        plan: DataPlan = PLANS.get(self.names[0])(replace(self, names=self.names[1:]))
        return plan


def register_plan(name: str) -> Callable[[T], T]:
    """Return a decorator that makes a function, or a class, the plan that a section of options names as `data_plan`.

    Every rank calls it with a `PlanRequest`; what may fail on one alone stands in `ranks.raise_on_all_ranks`.
    """
    return PLANS.registers(name, "")


class CachedData(DataPlan):
    """Finished caches, one or a mixture of several, or another --source without text.

    places: folders, addresses, or caches that are open. UsageError: they cannot be read.
    """

    facts: Facts

    def __init__(self, config: DistillConfig, places: Sequence[Path | str | LocalCache]) -> None:
        caches: list[LocalCache | None] = [
            each if isinstance(each, LocalCache) else open_cache(each) for each in places
        ] or [None]
        found: dict[str, list[Source]] = {}
        for split in ("train", "validation"):
            requests = (SourceRequest(split=split, cache=each, seed=config.seed) for each in caches)
            found[split] = [SOURCES.get(config.source)(each) for each in requests]
            if not all(map(len, found[split])):
                raise UsageError(f"--source {config.source} has no sequences in the split {split}")
        self.sources = {split: members[0] for split, members in found.items()}
        if len(caches) > 1:
            from kdtrain.training.sources.mixture import mix

            self.sources = mix(found, config.cache_weights or None)
        self.facts = self.sources["train"].facts

    def prepare(self, resumed: bool) -> tuple[dict[str, Source], Source]:
        return self.sources, self.sources["validation"]


@register_plan("cached")
def cached_data(request: PlanRequest) -> CachedData:
    """Plan the data of --cache, or of another --source."""
    with raise_on_all_ranks():
        return CachedData(request.config, request.config.cache)
