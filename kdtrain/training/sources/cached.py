"""The plan of finished caches (`training.sources.plan`), and how the splits of a run are opened.

A run without a cache packs its text once into a cache of bare tokens in its own folder: all runs read in the same way
and the same order, in constant memory, and a resumed run does not tokenize again.

The plans that make data are imported by their names (`config.choices.PLANS`): a run of a finished cache imports none.
"""

from collections.abc import Sequence
from pathlib import Path

from kdtrain.cache.read.reader import LocalCache, open_cache
from kdtrain.config.commands import DistillConfig
from kdtrain.ranks import raise_on_all_ranks
from kdtrain.training.sources.build import open_source
from kdtrain.training.sources.plan import DataPlan, PlanRequest, register_plan
from kdtrain.training.sources.source import Source, SourceRequest


class CachedData(DataPlan):
    """One cache or a mixture of several, or another --source without text."""

    def __init__(self, config: DistillConfig, caches: Sequence[str | LocalCache]) -> None:
        self.sources = open_sources(config, caches)
        self.facts = self.sources["train"].facts

    def prepare(self, resumed: bool) -> tuple[dict[str, Source], Source]:
        return self.sources, self.sources["validation"]


@register_plan("cached")
def cached_data(request: PlanRequest) -> CachedData:
    """Plan the data of --cache, or of another --source."""
    with raise_on_all_ranks():
        return CachedData(request.config, request.config.cache)


def open_sources(config: DistillConfig, places: Sequence[Path | str | LocalCache]) -> dict[str, Source]:
    """Open the splits train and validation of the caches in `places`, or of another --source."""
    caches: list[LocalCache | None] = [
        each if isinstance(each, LocalCache) else open_cache(each) for each in places
    ] or [None]
    found: dict[str, list[Source]] = {}
    for split in ("train", "validation"):
        requests = (SourceRequest(split=split, cache=each, seed=config.seed) for each in caches)
        found[split] = [open_source(config.source, each) for each in requests]
    if len(caches) > 1:
        from kdtrain.training.sources.mixture import mix

        return mix(found, config.cache_weights or None)
    return {split: members[0] for split, members in found.items()}
