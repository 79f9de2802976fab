"""`kdtrain cache-teacher`: run the teacher once over the data and keep what it says, in one process or many ranks."""

import time

import torch

from kdtrain.cache.manifest import Manifest
from kdtrain.cache.reader import Cache
from kdtrain.commands.agreement import same_ranks
from kdtrain.commands.build_cache import build_cache, build_from_logprobs
from kdtrain.commands.common import ask, check_fits, open_teacher, show, wide_head
from kdtrain.commands.run_folder import refuse_no_folder
from kdtrain.config import CacheTeacherConfig
from kdtrain.errors import UsageError
from kdtrain.models.loading import load_tokenizer, model_digest, vocabulary
from kdtrain.models.spec import read_spec
from kdtrain.monitor.progress import log, setup_logging
from kdtrain.parallel.memory_plan import free_everywhere, shards_teacher
from kdtrain.parallel.parallelize import shard
from kdtrain.precision.modes import pick_mode
from kdtrain.ranks import is_main, on_main, peak_memory_mb, pick_device, raise_on_all_ranks, reported, world_size


def main(config: CacheTeacherConfig) -> int:
    """Build the cache, or what an interrupted command left to build, and print what it is.

    Raises:
        UsageError, RunError: as `cache_teacher`.
    """
    started = time.monotonic()
    cache = cache_teacher(config)
    if is_main():
        _show(config, cache.manifest, pick_device(config.device), time.monotonic() - started)
    return 0


def cache_teacher(config: CacheTeacherConfig) -> Cache:
    """Run a teacher over text and keep its distributions: `kdtrain cache-teacher` as a function.

    The same call again finishes what an interrupted one left.

    Raises:
        UsageError: teacher, data and folder do not go together.
        RunError: the disk is full or cannot be written, or a rank was lost; what was published stays.
    """
    setup_logging(quiet=not is_main())
    device = pick_device(config.device)
    with same_ranks(config, device):
        try:
            _build(config, device)
        except UsageError as error:
            raise reported(error) from None  # options, text and folder are the same on every rank
    return Cache(config.out)


def _build(config: CacheTeacherConfig, device: torch.device) -> Manifest | None:
    """The finished cache's manifest; None on ranks but the first."""
    on_main(lambda: refuse_no_folder(config.out))
    with raise_on_all_ranks():
        spec = read_spec(config.teacher)
        tokenizer = load_tokenizer(spec)
        many = f" in {world_size()} ranks" if world_size() > 1 else ""
    if config.from_logprobs is not None:
        log.info("caching what %s says of %s into %s%s", config.from_logprobs, spec.name, config.out, many)
        return build_from_logprobs(config, spec, tokenizer, vocabulary(spec))
    mode = pick_mode(config.precision, device)
    free = free_everywhere(device, config.parallel.device_memory)
    with raise_on_all_ranks():
        sharded = shards_teacher(config, spec, mode, free)
        # one that is cut up may be too large for the device before it is
        teacher = open_teacher(spec, torch.device("cpu") if sharded else device, mode)
        check_fits(teacher, spec.name, config.data.seq_len, config.data.document_mask)
        digest = model_digest(teacher)
        head = wide_head(teacher).to(device)  # whole on each rank: there is no loss to gather it for
    if sharded:
        shard(teacher, device)
    asked = ask(teacher, device, mode, head)
    parts = ", the teacher in parts" if sharded else ""
    how = f"{mode} on {device}{many}{parts}"
    log.info("caching %s over %s into %s (%s)", spec.name, config.data.data, config.out, how)
    return build_cache(config, spec, teacher, asked, mode, tokenizer, digest=digest, sharded=sharded)


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
