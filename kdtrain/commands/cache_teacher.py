"""`kdtrain cache-teacher`: runs the teacher once over the data and caches its distributions, on one or many ranks."""

import math
import time
from contextlib import nullcontext
from typing import Any

from kdtrain.cache.read.reader import LocalCache
from kdtrain.cache.tools.facts import show_cache
from kdtrain.config.commands import CacheTeacherConfig
from kdtrain.errors import UsageError, log
from kdtrain.monitor.progress import setup_logging
from kdtrain.parallel.agreement import same_ranks
from kdtrain.ranks import is_main, on_main, peak_memory_mb, pick_device, reported, world_size
from kdtrain.run.baselines import label_loss
from kdtrain.run.capture import capture
from kdtrain.tables import duration, size
from kdtrain.training.signals import interruptible


def main(config: CacheTeacherConfig) -> int:
    """Build the cache, or the parts that an interrupted command left out, and print the facts about it.

    Raises:
        UsageError, RunError: as `kd.cache_teacher`.
    """
    started = time.monotonic()
    with interruptible() if config.dry_run else nullcontext():  # a killed build leaves nothing to remove
        plan = build_among_ranks(config, wait=False)
    if plan is not None:
        config.show(f"cache-teacher {config.out}, dry run", plan)
        return 0
    if is_main():
        cache = LocalCache(config.out)
        peak = peak_memory_mb(pick_device(config.device))
        ranks = world_size()
        manifest = cache.manifest
        losses = {split: label_loss(cache[split]) for split in cache}
        known = {split: loss for split, loss in losses.items() if loss is not None}
        read = ", ".join(f"{loss:.3f} on {split} (perplexity {math.exp(loss):.4g})" for split, loss in known.items())
        seconds = time.monotonic() - started
        among = f" in {ranks} ranks" if ranks > 1 else ""
        stated = {name: getattr(manifest, name) for name in ("capture", "generated", "weights_cost")}
        show_cache(
            config.out,
            manifest,
            config.json,
            [
                *([f"teacher's loss {read}"] if read else []),
                f"took {duration(seconds)}{among}, peak memory {size(peak)}",
            ],
            **{name: value for name, value in stated.items() if value is not None},
            teacher_loss=losses,
            ranks=ranks,
            seconds=round(seconds, 1),
            peak_memory_mb=round(peak, 1),
        )
    return 0


def build_among_ranks(config: CacheTeacherConfig, *, wait: bool) -> dict[str, Any] | None:
    """Build a cache by `run.capture.capture`. Other ranks `wait` for the manifest, or return before it is written."""
    setup_logging(quiet=not is_main())
    device = pick_device(config.device)
    with same_ranks(config, device):
        try:
            plan = capture(config, device)
        except UsageError as error:
            raise reported(error) from None  # options, text and folder are the same on every rank
        if wait:
            on_main(lambda: None)
    if config.text.generate and is_main() and plan is None:
        written = (LocalCache(config.out).manifest.generated or {}).get("train", {})
        if not written.get("stop"):
            log.warning("no text of the training split ended, all were cut: nothing teaches the student to stop")
    return plan
