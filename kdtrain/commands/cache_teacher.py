"""`kdtrain cache-teacher`: runs the teacher once over the data and caches its distributions, on one or many ranks."""

import time
from dataclasses import replace
from typing import Any

import torch

from kdtrain.cache.build.live_capture import LiveCache
from kdtrain.cache.format.manifest import Manifest, weights_line
from kdtrain.cache.format.names import MANIFEST
from kdtrain.cache.read.reader import Cache
from kdtrain.commands.cache_pages import capture_lines
from kdtrain.commands.cache_result import show_cache
from kdtrain.config import CacheTeacherConfig
from kdtrain.config.values import configured
from kdtrain.errors import UsageError
from kdtrain.models.loading import load_tokenizer
from kdtrain.models.spec import read_spec, with_weights
from kdtrain.monitor.progress import log, setup_logging
from kdtrain.monitor.tables import duration, size
from kdtrain.parallel.memory_plan import free_everywhere, shards_teacher
from kdtrain.precision.modes import MODES, pick_mode
from kdtrain.ranks import is_main, on_main, peak_memory_mb, pick_device, raise_on_all_ranks, reported, world_size
from kdtrain.run.agreement import same_ranks
from kdtrain.run.build_cache import (
    begun_with,
    build_cache,
    known_text,
    pin_date,
    refined_cache,
    refuse_no_rows,
    refuse_other_vocabulary,
    validation_rows,
)
from kdtrain.run.folder import refuse_no_folder
from kdtrain.teaching.teacher import MEASURED, open_teacher


def main(config: CacheTeacherConfig) -> int:
    """Build the cache, or what an interrupted command left to build, and print what it is.

    Raises:
        UsageError, RunError: as `cache_teacher`.
    """
    started = time.monotonic()
    _build_among_ranks(config, wait=False)
    if is_main():
        _show(config, Cache(config.out).manifest, pick_device(config.device), time.monotonic() - started)
    return 0


def cache_teacher(config: CacheTeacherConfig | None = None, **options: Any) -> Cache:
    """Run a teacher over text and keep its distributions: `kdtrain cache-teacher` as a function.

    The same call again finishes what an interrupted one left. Every rank returns the finished cache. Arguments: as
    those of `kd.distill`.

    Raises:
        UsageError: teacher, data and folder do not fit together.
        RunError: the disk is full or cannot be written, or a rank was lost; published shards stay.
    """
    config = configured(CacheTeacherConfig, config, options)
    _build_among_ranks(config, wait=True)
    return Cache(config.out)


def _build_among_ranks(config: CacheTeacherConfig, *, wait: bool) -> None:
    """Build the cache. Ranks but the first `wait` for its manifest, or return before it is written."""
    setup_logging(quiet=not is_main())
    device = pick_device(config.device)
    with same_ranks(config, device):
        try:
            build(config, device)
        except UsageError as error:
            raise reported(error) from None  # options, text and folder are the same on every rank
        if wait:
            on_main(lambda: None)
    if config.text.generate and is_main():
        written = (Cache(config.out).manifest.generated or {}).get("train", {})
        if not written.get("stop"):
            log.warning("no text of the training split ended, all were cut: nothing teaches the student to stop")


def build(config: CacheTeacherConfig, device: torch.device, live: LiveCache | None = None) -> None:
    """Build the cache, inside `same_ranks`; rank 0 returns last. UsageError, RunError: as `cache_teacher`.

    live: of a run that reads it meanwhile.
    """
    on_main(lambda: refuse_no_folder(config.out))
    with raise_on_all_ranks():
        refined = None if config.refine is None else refined_cache(config.refine)
        seq_len, document_mask = config.data.seq_len, config.data.document_mask
        if refined is not None:
            seq_len, document_mask = refined.manifest.settings.seq_len, refined.manifest.settings.document_mask
        spec = read_spec(config.teacher, "teachers")
        if config.from_logprobs is not None:
            load_tokenizer(spec)  # a spec without one is refused by name
            spec = replace(spec, kind="recorded", weights=None, options={"logprobs": str(config.from_logprobs)})
        if config.server.teacher_server:
            spec = replace(spec, kind="served", weights=None)
        spec = with_weights(spec, config.teacher_weights, "--teacher-weights", config.parallel.teacher_parallel)
        teacher = open_teacher(spec, device, _mode(config, refined, device), online=False)
        if config.server.teacher_server:
            teacher.connect(config.server, config.codec)
        _ = teacher.tokenizer  # one that is missing is found before the weights are loaded
        if refined is not None:
            refuse_other_vocabulary(refined, teacher)
    text = date = None
    if config.data.data is not None and live is None:
        text = on_main(lambda: known_text(config.out, config.data))
        date = on_main(lambda: pin_date(config.out, config.data, teacher.tokenizer))
        if refined is None:
            on_main(lambda: None if (config.out / MANIFEST).exists() else refuse_no_rows(config, teacher))
    teacher.tokenizer.date = date  # type: ignore[attr-defined]
    free = free_everywhere(device, config.parallel.device_memory)
    with raise_on_all_ranks():
        sharded = shards_teacher(config, teacher.footprint(seq_len), free, seq_len)
        teacher.load(sharded)
        teacher.check(seq_len, document_mask)
        measured = spec.weights is not None and is_main() and not (config.out / MANIFEST).exists()
        rows = validation_rows(config, teacher, refined, MEASURED) if measured else ()
        teacher.pack(rows, document_mask=document_mask)
    # the shapes of decoding change with every step, and a compiled layer with each of them
    teacher.prepare(sharded=sharded, compile=config.compile and not config.text.generate)
    over = f" over {source}" if (source := config.data.data or config.refine) else ""
    many = f" in {world_size()} ranks" if world_size() > 1 else ""
    log.info("caching %s%s into %s%s", teacher, over, config.out, many)
    if teacher.cost is not None:
        log.info("%s", weights_line(teacher.cost))
    build_cache(config, teacher, refined, live, text)


def _mode(config: CacheTeacherConfig, refined: Cache | None, device: torch.device) -> str:
    """The mode of the forward; `auto` keeps that of a cache which is resumed or refined."""
    mode = pick_mode(config.precision, device)
    earlier = (begun_with(config.out) if refined is None else refined.manifest.settings.teacher) or {}
    if config.precision == "auto" and (before := earlier.get("precision")) in MODES and before != mode:
        log.info("the teacher runs in %s, as this cache was begun; on %s auto is %s", before, device, mode)
        mode = pick_mode(before, device)
    return mode


def _show(config: CacheTeacherConfig, manifest: Manifest, device: torch.device, seconds: float) -> None:
    peak, ranks = peak_memory_mb(device), world_size()
    among = f" in {ranks} ranks" if ranks > 1 else ""
    said, facts = [], dict[str, Any]()
    if (cost := manifest.weights_cost) is not None:
        said, facts = [weights_line(cost)], {"weights_cost": cost}
    show_cache(
        config.out,
        manifest,
        config.json,
        [*capture_lines(manifest), *said, f"took {duration(seconds)}{among}, peak memory {size(peak)}"],
        **({} if manifest.capture is None else {"capture": manifest.capture}),
        **({} if manifest.generated is None else {"generated": manifest.generated}),
        ranks=ranks,
        seconds=round(seconds, 1),
        peak_memory_mb=round(peak, 1),
        **facts,
    )
