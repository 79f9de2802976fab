"""`kdtrain merge` adds up or appends caches, `kdtrain subset` cuts one to some of its rows."""

from pathlib import Path

import kdtrain as kd
from kdtrain.cache.format.manifest import Manifest
from kdtrain.cache.read.remote import stated_by
from kdtrain.cache.tools.facts import show_cache
from kdtrain.errors import log
from kdtrain.monitor.progress import bar, setup_logging
from kdtrain.outputs import OutFolder
from kdtrain.plugins.caches import MergeConfig, SubsetConfig
from kdtrain.plugins.caches.plan import Stated, plan, refuse_rows


def merge_caches(config: MergeConfig) -> int:
    """Merge caches, or what an interrupted command left to merge, and print what the result is.

    Raises:
        UsageError: the caches do not fit together, or the folder holds something else.
        RunError: a shard is damaged, the disk is full or cannot be written.
    """
    setup_logging()
    plan([Stated(*stated_by(each)) for each in config.caches])  # refuses before torch is imported
    from kdtrain.plugins.caches.merge import merge

    OutFolder(config.out).refuse()
    caches = [kd.Cache(each) for each in config.caches]
    log.info("merging %s into %s", " and ".join(config.caches), config.out)
    with bar("merge", None) as shown:
        manifest = merge(caches, config.out, lambda done, total: shown.update(done, total=total))
    return _show(config.out, manifest, config.json)


def cut_cache(config: SubsetConfig) -> int:
    """Cut a cache, or what an interrupted command left to cut, and print what the result is.

    Raises:
        UsageError: the cache has no such rows, or the folder holds something else.
        RunError: a shard is damaged, the disk is full or cannot be written.
    """
    setup_logging()
    known = Stated(*stated_by(config.cache))
    splits = tuple(known.manifest.splits) if config.split == "all" else (config.split,)
    refuse_rows(known, splits, config.range)  # before torch is imported
    from kdtrain.plugins.caches.merge import subset

    OutFolder(config.out).refuse()
    log.info("cutting %s into %s", config.cache, config.out)
    with bar("subset", None) as shown:
        manifest = subset(
            kd.Cache(config.cache),
            config.out,
            rows=config.range,
            fraction=config.share,
            splits=splits,
            progress=lambda done, total: shown.update(done, total=total),
        )
    return _show(config.out, manifest, config.json)


def _show(folder: Path, manifest: Manifest, as_json: bool) -> int:
    """Print what a cache is, and the digests of those that it was made of."""
    show_cache(folder, manifest, as_json, parents=[parent["digest"] for parent in manifest.parents or []])
    return 0
