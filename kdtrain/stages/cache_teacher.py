"""`kdtrain cache-teacher`: run the teacher once over the data and keep what it says."""

import time

from kdtrain.config import CacheTeacherConfig
from kdtrain.models.loading import load_tokenizer, vocabulary
from kdtrain.models.spec import read_spec
from kdtrain.monitor.progress import log, setup_logging
from kdtrain.parallel.world import peak_memory_mb, pick_device, refuse_many_processes
from kdtrain.precision.modes import pick_mode
from kdtrain.stages.build import build_cache, build_from_logprobs
from kdtrain.stages.common import ask, check_fits, open_teacher, show


def main(config: CacheTeacherConfig) -> int:
    """Build the cache, or what an interrupted command left to build, and print what it is.

    Raises:
        UsageError: teacher, data and folder do not go together.
        RunError: the disk is full or cannot be written; what was published stays.
    """
    setup_logging()
    refuse_many_processes()
    device = pick_device(config.device)
    spec = read_spec(config.teacher)
    tokenizer = load_tokenizer(spec)
    started = time.monotonic()
    if config.from_logprobs is not None:
        log.info("caching what %s says of %s into %s", config.from_logprobs, spec.name, config.out)
        manifest = build_from_logprobs(config, spec, tokenizer, vocabulary(spec))
    else:
        mode = pick_mode(config.precision, device)
        teacher = open_teacher(spec, device, mode)
        check_fits(teacher, spec.name, config.data.seq_len, config.data.document_mask)
        log.info("caching %s over %s into %s (%s on %s)", spec.name, config.data.data, config.out, mode, device)
        manifest = build_cache(config, spec, teacher, ask(teacher, device, mode), mode, tokenizer)
    sequences = {name: split["sequences"] for name, split in manifest.splits.items()}
    result = {
        "cache": str(config.out),
        "digest": manifest.digest,
        "sequences": sequences,
        "tokens": {name: count * config.data.seq_len for name, count in sequences.items()},
        "bytes_per_token": manifest.bytes_per_token["total"],
        "temperature_range": manifest.temperature_range,
        "seconds": round(time.monotonic() - started, 1),
        "peak_memory_mb": round(peak_memory_mb(device), 1),
    }
    show(f"cache {config.out}", result, config.json)
    return 0
