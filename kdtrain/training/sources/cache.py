"""The source `cache`: sequences and targets of a cache, or tokens alone where it has no teacher; the splits of caches.

A run without a cache packs its text once into a cache of bare tokens in its own folder: all runs read in the same way
and the same order, in constant memory, and a resumed run does not tokenize again.

The plans that make data are imported by their names (`config.choices.PLANS`): a run of a finished cache imports none.
"""

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from kdtrain.cache.read import reader
from kdtrain.config.commands import DistillConfig
from kdtrain.errors import UsageError
from kdtrain.objective.batch import Batch
from kdtrain.ranks import raise_on_all_ranks
from kdtrain.training.sources.build import open_source
from kdtrain.training.sources.plan import DataPlan, PlanRequest, register_plan
from kdtrain.training.sources.source import Facts, Growing, Source, SourceRequest, register_source


class CachedSource:
    """One split of a cache, on the CPU."""

    overlaps = True
    repeatable = True

    def __init__(self, split: reader.CacheReader) -> None:
        manifest, settings, codec = split.manifest, split.manifest.settings, split.manifest.codec
        span = manifest.temperature_range
        self.reader = split
        self.growing = split.remote if isinstance(split.remote, Growing) else None
        self.facts = Facts(
            name=split.name,
            identity=manifest.digest,
            seq_len=settings.seq_len,
            vocab_size=manifest.vocab_size,
            tokenizer_size=settings.tokenizer_size,
            tokenizer_digest=settings.tokenizer_digest,
            tokenizer=split.folder / "tokenizer",
            document_mask=settings.document_mask,
            targets=codec.kind if codec.taught else "none",
            top_k=codec.top_k,
            num_samples=codec.num_samples,
            temperature_range=(0.25, 20.0) if span is None else (span["min"], span["max"]),
            labels=manifest.knows_labels,
            teacher=settings.teacher or {},
            end_tokens=manifest.end_tokens,
        )

    def __len__(self) -> int:
        return len(self.reader)

    def read(self, indices: np.ndarray) -> Batch:
        """Return the sequences `indices`. RunError: a shard is missing or damaged (named)."""
        return self.reader.read(indices.tolist())


@register_source("cache")
def open_cache(request: SourceRequest) -> CachedSource:
    """Open a cache, or the packed tokens of --data."""
    if request.cache is None:
        raise UsageError("--source cache needs --cache FOLDER or --data SOURCE")
    return CachedSource(request.cache[request.split])


class CachedData(DataPlan):
    """One cache or a mixture of several, or another --source without text."""

    def __init__(self, config: DistillConfig, caches: Sequence[str | reader.LocalCache]) -> None:
        self.sources = open_sources(config, caches)
        self.facts = self.sources["train"].facts

    def prepare(self, resumed: bool) -> tuple[dict[str, Source], Source]:
        return self.sources, self.sources["validation"]


@register_plan("cached")
def cached_data(request: PlanRequest) -> CachedData:
    """Plan the data of --cache, or of another --source."""
    with raise_on_all_ranks():
        return CachedData(request.config, request.config.cache)


def open_sources(config: DistillConfig, places: Sequence[Path | str | reader.LocalCache]) -> dict[str, Source]:
    """Open the splits train and validation of the caches in `places`, or of another --source."""
    caches: list[reader.LocalCache | None] = [
        each if isinstance(each, reader.LocalCache) else reader.open_cache(each) for each in places
    ] or [None]
    found: dict[str, list[Source]] = {}
    for split in ("train", "validation"):
        requests = (SourceRequest(split=split, cache=each, seed=config.seed) for each in caches)
        found[split] = [open_source(config.source, each) for each in requests]
    if len(caches) > 1:
        from kdtrain.training.sources.mixture import mix

        return mix(found, config.cache_weights or None)
    return {split: members[0] for split, members in found.items()}
