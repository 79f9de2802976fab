"""`kdtrain merge`: adds up caches of samples of the same rows, or appends caches of other rows."""

from kdtrain.cache.tools.merge_plan import plan, stated
from kdtrain.commands.cache_result import made_of, show_cache
from kdtrain.config.cache_commands import MergeConfig
from kdtrain.errors import log
from kdtrain.monitor.progress import bar, setup_logging


def main(config: MergeConfig) -> int:
    """Merge caches, or what an interrupted command left to merge, and print what the result is.

    Raises:
        UsageError: the caches do not fit together, or the folder holds something else.
        RunError: a shard is damaged, the disk is full or cannot be written.
    """
    setup_logging()
    plan([stated(each) for each in config.caches])  # refuses before torch is imported
    from kdtrain.cache.read.reader import open_cache
    from kdtrain.cache.tools.merge import merge
    from kdtrain.run.folder import refuse_no_folder

    refuse_no_folder(config.out)
    caches = [open_cache(each) for each in config.caches]
    log.info("merging %s into %s", " and ".join(config.caches), config.out)
    with bar("merge", None) as shown:
        manifest = merge(caches, config.out, lambda done, total: shown.update(done, total=total))
    show_cache(config.out, manifest, config.json, parents=made_of(manifest))
    return 0
