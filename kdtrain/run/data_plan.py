"""What a run reads: planned before its folder is touched, and prepared in it. One class for each kind of data.

A run without a cache packs its text once into a cache of bare tokens in its own folder: all runs read in the same way
and the same order, in constant memory, and a resumed run does not tokenize again. A run whose teacher is behind a
server reads a cache in its own folder too, which is captured while the student trains (`cache.write.live_capture`):
there is one way to train from a server's answers, and they can be resumed, reused and audited as any cache.

What makes data is in `PLANS`, by name: a run that reads a finished cache imports none of it.
"""

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from pkgutil import resolve_name
from typing import Any

import torch

from kdtrain.cache.read.reader import LocalCache
from kdtrain.cache.read.remote import open_cache
from kdtrain.config import DistillConfig
from kdtrain.models.spec import ModelSpec
from kdtrain.ranks import raise_on_all_ranks
from kdtrain.teaching.online import OnlineTeacher
from kdtrain.training.sources.build import open_source
from kdtrain.training.sources.mixture import mix
from kdtrain.training.sources.source import Facts, Source, SourceRequest

PLANS = {
    "text": "kdtrain.run.build_cache:TextData",
    "aligned": "kdtrain.run.tokenizer_view:aligned_data",
    "served": "kdtrain.run.capture:served_data",
}
"""The plans of data that the run makes: text, another tokenizer's, a server's answers."""


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

        Every rank calls it, once the folder is the run's. resumed: whether that holds an earlier part of this run.

        UsageError, RunError: the data cannot be read, or do not fit the options.
        """
        raise NotImplementedError


class CachedData(DataPlan):
    """One cache or a mixture of several, one that is captured while it is read, or another --source without text."""

    def __init__(self, config: DistillConfig, caches: Sequence[str | LocalCache]) -> None:
        self.sources = open_sources(config, caches)
        self.facts = self.sources["train"].facts

    def prepare(self, resumed: bool) -> tuple[dict[str, Source], Source]:
        return self.sources, self.sources["validation"]


def plan_data(
    config: DistillConfig,
    student: ModelSpec,
    teacher: OnlineTeacher | None,
    device: torch.device,
    held: ExitStack,
    trial: bool = False,
) -> DataPlan:
    """Plan the data of `config`. Every rank calls it.

    teacher: an online one. held: ends a capture. trial: a server answers for what is read only.

    UsageError, RunError: the data cannot be read; as `cache_teacher`.
    """
    plan: DataPlan | None = None
    if config.remote is not None:
        plan = resolve_name(PLANS["served"])(config, student, device, held, trial)
    with raise_on_all_ranks():
        if plan is None and config.cross_tokenizer:
            plan = resolve_name(PLANS["aligned"])(config, student, teacher)
        if plan is None and config.data.data is not None:
            plan = resolve_name(PLANS["text"])(config, student, teacher)
        return plan or CachedData(config, config.cache)


def open_sources(config: DistillConfig, places: Sequence[Path | str | LocalCache]) -> dict[str, Source]:
    """The splits train and validation of the caches in `places`, or of another --source."""
    caches: list[LocalCache | None] = [
        each if isinstance(each, LocalCache) else open_cache(each) for each in places
    ] or [None]
    found: dict[str, list[Source]] = {}
    for split in ("train", "validation"):
        requests = (SourceRequest(split=split, cache=each, seed=config.seed) for each in caches)
        found[split] = [open_source(config.source, each) for each in requests]
    if len(caches) > 1:
        return mix(found, config.cache_weights or None)
    return {split: members[0] for split, members in found.items()}
