"""`kdtrain cache-teacher`: runs the teacher once over the data and caches its distributions, on one or many ranks."""

import time

import torch

from kdtrain.cache.manifest import Manifest
from kdtrain.cache.reader import Cache
from kdtrain.commands.agreement import same_ranks
from kdtrain.commands.build_cache import build_cache, build_from_logprobs
from kdtrain.commands.common import check_fits, compiled_teacher, open_teacher, show, teacher_logits, wide_head
from kdtrain.commands.run_folder import refuse_no_folder
from kdtrain.config import CacheTeacherConfig
from kdtrain.errors import UsageError
from kdtrain.models.loading import load_tokenizer, model_digest, vocabulary
from kdtrain.models.spec import read_spec
from kdtrain.monitor.progress import log, setup_logging
from kdtrain.parallel.memory_plan import free_everywhere, shards_teacher
from kdtrain.parallel.parallelize import shard
from kdtrain.precision.modes import compiles_teacher, pick_mode
from kdtrain.ranks import is_main, on_main, peak_memory_mb, pick_device, raise_on_all_ranks, reported, world_size


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


def cache_teacher(config: CacheTeacherConfig) -> Cache:
    """Run a teacher over text and keep its distributions: `kdtrain cache-teacher` as a function.

    The same call again finishes what an interrupted one left. Every rank returns the finished cache.

    Raises:
        UsageError: teacher, data and folder do not fit together.
        RunError: the disk is full or cannot be written, or a rank was lost; published shards stay.
    """
    _build_among_ranks(config, wait=True)
    return Cache(config.out)


def _build_among_ranks(config: CacheTeacherConfig, *, wait: bool) -> None:
    """Build the cache. Ranks but the first `wait` for its manifest, or return before it is written."""
    setup_logging(quiet=not is_main())
    device = pick_device(config.device)
    with same_ranks(config, device):
        try:
            _build(config, device)
        except UsageError as error:
            raise reported(error) from None  # options, text and folder are the same on every rank
        if wait:
            on_main(lambda: None)


def _build(config: CacheTeacherConfig, device: torch.device) -> None:
    on_main(lambda: refuse_no_folder(config.out))
    with raise_on_all_ranks():
        spec = read_spec(config.teacher)
        tokenizer = load_tokenizer(spec)
        many = f" in {world_size()} ranks" if world_size() > 1 else ""
    if config.from_logprobs is not None:
        source = f"the log-probabilities of {spec.name} in {config.from_logprobs}"
        log.info("caching %s into %s%s", source, config.out, many)
        build_from_logprobs(config, spec, tokenizer, vocabulary(spec))
        return
    mode = pick_mode(config.precision, device)
    free = free_everywhere(device, config.parallel.device_memory)
    with raise_on_all_ranks():
        sharded = shards_teacher(config, spec, mode, device, free)
        # a teacher that is sharded later may be too large for one device
        teacher = open_teacher(spec, torch.device("cpu") if sharded else device, mode)
        check_fits(teacher, spec.name, config.data.seq_len, config.data.document_mask)
        digest = model_digest(teacher)
        head = wide_head(teacher).to(device)  # whole on each rank: no loss gathers it
    if sharded:
        shard(teacher, device)
    compiled = compiled_teacher(teacher) if compiles_teacher(config.compile, device) else None
    forward = teacher_logits(teacher, device, mode, head, compiled)
    how = f"{mode} on {device}{many}{', the teacher sharded' if sharded else ''}"
    how += ", compiled" if compiled else ""
    log.info("caching %s over %s into %s (%s)", spec.name, config.data.data, config.out, how)
    parts = (config, spec, teacher, forward, mode, tokenizer)
    build_cache(*parts, digest=digest, sharded=sharded, compiled=compiled is not None)


def _show(config: CacheTeacherConfig, manifest: Manifest, device: torch.device, seconds: float) -> None:
    sequences = {name: split["sequences"] for name, split in manifest.splits.items()}
    result = {
        "cache": str(config.out),
        "digest": manifest.digest,
        "ranks": world_size(),
        "sequences": sequences,
        "tokens": {name: count * config.data.seq_len for name, count in sequences.items()},
        "bytes_per_token": manifest.bytes_per_token["total"],
        "temperature_range": manifest.temperature_range,
        "seconds": round(seconds, 1),
        "peak_memory_mb": round(peak_memory_mb(device), 1),
    }
    show(f"cache {config.out}", result, config.json)
