"""`kdtrain subset`: cuts a cache to some of its rows."""

from kdtrain.cache.tools.merge_plan import refuse_rows, stated
from kdtrain.commands.cache_result import made_of, show_cache
from kdtrain.config.cache_commands import SubsetConfig
from kdtrain.errors import log
from kdtrain.monitor.progress import bar, setup_logging


def main(config: SubsetConfig) -> int:
    """Cut a cache, or what an interrupted command left to cut, and print what the result is.

    Raises:
        UsageError: the cache has no such rows, or the folder holds something else.
        RunError: a shard is damaged, the disk is full or cannot be written.
    """
    setup_logging()
    known = stated(config.cache)
    splits = tuple(known.manifest.splits) if config.split == "all" else (config.split,)
    refuse_rows(known, splits, config.range)  # before torch is imported
    from kdtrain.cache.read.reader import open_cache
    from kdtrain.cache.tools.merge import subset
    from kdtrain.run.folder import refuse_no_folder

    refuse_no_folder(config.out)
    log.info("cutting %s into %s", config.cache, config.out)
    with bar("subset", None) as shown:
        manifest = subset(
            open_cache(config.cache),
            config.out,
            rows=config.range,
            fraction=config.share,
            splits=splits,
            progress=lambda done, total: shown.update(done, total=total),
        )
    show_cache(config.out, manifest, config.json, parents=made_of(manifest))
    return 0
