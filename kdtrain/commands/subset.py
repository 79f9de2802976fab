"""`kdtrain subset`: cuts a cache to some of its rows."""

from kdtrain.cache.reader import Cache
from kdtrain.cache.subset import subset
from kdtrain.commands.made_cache import show_cache
from kdtrain.commands.run_folder import refuse_no_folder
from kdtrain.config import SubsetConfig
from kdtrain.monitor.progress import bar, log, setup_logging


def main(config: SubsetConfig) -> int:
    """Cut a cache, or what an interrupted command left to cut, and print what the result is.

    Raises:
        UsageError: the cache has no such rows, or the folder holds something else.
        RunError: a shard is damaged, the disk is full or cannot be written.
    """
    setup_logging()
    refuse_no_folder(config.out)
    cache = Cache(config.cache, local_limit=config.local_limit)
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
    show_cache(config.out, manifest, config.json)
    return 0
