"""What a run reads: planned before its folder is touched, and prepared in it. One function for each kind of data.

A run without a cache packs its text once into a cache of bare tokens in its own folder: all runs read in the same way
and the same order, in constant memory, and a resumed run does not tokenize again. A run whose teacher is behind a
server reads a cache in its own folder too, which is captured while the student trains (`cache.build.live_capture`):
there is one way to train from a server's answers, and they can be resumed, reused and audited as any cache.
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch

from kdtrain.cache.build.live_capture import Capture, LiveCache
from kdtrain.cache.read.reader import Cache
from kdtrain.cache.read.remote import open_cache
from kdtrain.config import DataConfig, DistillConfig
from kdtrain.errors import UsageError
from kdtrain.files import set_aside
from kdtrain.models.spec import ModelSpec
from kdtrain.models.tokenizer import load_tokenizer
from kdtrain.objective.divergence import refuse
from kdtrain.ranks import on_main, raise_on_all_ranks, world_size
from kdtrain.run.build_cache import SERVED, TEXT, build_tokens, holds_tokens
from kdtrain.run.capture import capture
from kdtrain.run.folder import check_out
from kdtrain.run.tokenizer_view import across, align, open_view
from kdtrain.teaching.online import OnlineTeacher
from kdtrain.tokenizers.view import viewed_cache
from kdtrain.training.schedule import total_steps
from kdtrain.training.signals import asked_to_stop
from kdtrain.training.sources.build import open_source
from kdtrain.training.sources.mixture import mix
from kdtrain.training.sources.source import Facts, Source, SourceRequest

_STEPS, _MOST = 16, 256
"""Steps of a shard, and sequences at most: the student's first step waits for one, and the server rests between two."""


Prepared = tuple[dict[str, Source], Source]
"""The splits train and validation, and sequences for validation in the teacher's own tokens."""


@dataclass(frozen=True)
class DataPlan:
    """Where the sequences of a run come from."""

    facts: Facts | None
    """None for text, of which more is known when it is packed."""
    prepare: Callable[[bool], Prepared]
    """Called on every rank, once the folder is the run's, with whether that holds an earlier part of this run.

    UsageError, RunError: the data cannot be read, or do not fit the options."""
    live: LiveCache | None = None
    """The capture that the run reads while it is made."""
    options: Mapping[str, Any] = field(default_factory=dict)
    """Options in place of those given, with which the run would read the same data again."""


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
    if config.remote is not None:
        return _served(config, device, held, trial)
    with raise_on_all_ranks():
        if (facts := across(config, student, teacher)) is not None:
            return DataPlan(facts, partial(_aligned, config, student, teacher))
        if config.data.data is not None:
            return DataPlan(None, partial(_packed, config, student, teacher))
        return _cached(config, config.cache)


def open_sources(config: DistillConfig, places: Sequence[Path | str | Cache]) -> dict[str, Source]:
    """The splits train and validation of the caches in `places`, or of another --source."""
    caches: list[Cache | None] = [each if isinstance(each, Cache) else open_cache(each) for each in places] or [None]
    found: dict[str, list[Source]] = {}
    for split in ("train", "validation"):
        requests = (SourceRequest(split=split, cache=each, seed=config.seed) for each in caches)
        found[split] = [open_source(config.source, each) for each in requests]
    if len(caches) > 1:
        return mix(found, config.cache_weights or None)
    return {split: members[0] for split, members in found.items()}


def _cached(config: DistillConfig, caches: Sequence[str | Cache], **more: Any) -> DataPlan:
    """One cache or a mixture of several, one that is captured while it is read, or another --source without text."""
    sources = open_sources(config, caches)
    return DataPlan(sources["train"].facts, lambda resumed: (sources, sources["validation"]), **more)


def _packed(config: DistillConfig, student: ModelSpec, teacher: OnlineTeacher | None, resumed: bool) -> Prepared:
    """Text, packed with the tokenizer of an online teacher, or without one of the student.

    What an earlier attempt with other options packed is set aside, unless a run has read it.
    """
    folder = config.out / TEXT

    def pack() -> None:
        tokenizer = load_tokenizer(student) if teacher is None else teacher.tokenizer
        width = len(tokenizer) if teacher is None else teacher.vocab_size
        if not resumed and viewed_cache(folder) is not None:  # of an earlier attempt across tokenizers
            set_aside(config.out, folder.name, "left")
        try:
            build_tokens(folder, config.data, tokenizer, width)
        except UsageError:
            if resumed or not holds_tokens(folder):
                raise
            set_aside(config.out, folder.name, "left")
            build_tokens(folder, config.data, tokenizer, width)

    on_main(pack)
    with raise_on_all_ranks():
        sources = open_sources(config, [folder])
    return sources, sources["validation"]


def _aligned(config: DistillConfig, student: ModelSpec, teacher: OnlineTeacher | None, resumed: bool) -> Prepared:
    """A cache, or an online teacher's own text, in the tokens of a student with another tokenizer."""
    text = None if teacher is None else _packed(config, student, teacher, resumed)
    on_main(lambda: align(config, student, resumed))
    with raise_on_all_ranks():
        sources = open_view(config)
    return sources, sources["validation"] if text is None else text[1]


def _served(config: DistillConfig, device: torch.device, held: ExitStack, trial: bool) -> DataPlan:
    """Begin to capture what a server answers into a cache in the run's folder; a finished one requests nothing."""

    def refuse_moving() -> None:
        if check_out(config.out) and config.checkpoint.resume == "never":
            raise UsageError(
                f"--out {config.out} holds a run, and --resume never would move aside the server's answers with it; "
                "name another folder"
            )

    on_main(refuse_moving)
    per_shard = (4 if trial else _STEPS) * min(config.batch_size, _MOST // _STEPS)
    capture_config = config.remote.capture(config, out=config.out / SERVED, sequences_per_shard=per_shard)
    objective, codec = config.objective, capture_config.codec
    if objective.distils:  # several ranks capture all before they train
        refuse(objective.divergence, objective.tail, top_k=codec.top_k, num_samples=codec.samples)

    def capture_all(live: LiveCache) -> None:
        capture(capture_config, device, live)
        on_main(lambda: None)  # rank 0 writes the manifest after the others have finished

    how = Capture(
        seed=config.seed,
        planned=lambda sequences: min(sequences, total_steps(config, sequences) * config.batch_size),
        build=capture_all,
        trial=trial,
        whole=world_size() > 1,
        asked_to_stop=asked_to_stop,
    )
    live = LiveCache(capture_config.out, how)
    held.callback(live.close)
    live.open()
    options: dict[str, Any] = {
        "cache": (str(capture_config.out),),
        "teacher": None,
        "data": DataConfig(num_workers=config.data.num_workers),
        "plugins": {name: each for name, each in config.plugins.items() if each is not config.remote},
    }
    return _cached(config, [live], live=live, options=options)
