"""`kdtrain merge` adds up or appends caches, `kdtrain subset` cuts one to some of its rows."""

from pathlib import Path

from kdtrain.cache.format.manifest import Manifest
from kdtrain.cache.read.reader import open_cache
from kdtrain.cache.tools.facts import show_cache
from kdtrain.errors import log
from kdtrain.monitor.progress import bar, setup_logging
from kdtrain.outputs import OutFolder
from kdtrain.plugins.caches import MergeConfig, SubsetConfig
from kdtrain.plugins.caches.merge import merge, subset


def merge_caches(config: MergeConfig) -> int:
    """Merge caches, or what an interrupted command left to merge, and print what the result is.

    Raises:
        UsageError: the caches do not fit together, or the folder holds something else.
        RunError: a shard is damaged, the disk is full or cannot be written.
    """
    setup_logging()
    OutFolder(config.out).refuse()
    caches = [open_cache(each) for each in config.caches]
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
    OutFolder(config.out).refuse()
    cache = open_cache(config.cache)
    log.info("cutting %s into %s", config.cache, config.out)
    with bar("subset", None) as shown:
        manifest = subset(
            cache,
            config.out,
            rows=config.range,
            fraction=config.share,
            splits=tuple(cache) if config.split == "all" else (config.split,),
            progress=lambda done, total: shown.update(done, total=total),
        )
    return _show(config.out, manifest, config.json)


def _show(folder: Path, manifest: Manifest, as_json: bool) -> int:
    """Print what a cache is, and the digests of those that it was made of."""
    show_cache(folder, manifest, as_json, parents=[parent["digest"] for parent in manifest.parents or []])
    return 0
