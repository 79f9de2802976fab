"""`kdtrain import`: makes a cache of teacher outputs that others published, in a layout that `LAYOUTS` knows."""

from kdtrain.cli import register_command
from kdtrain.plugins.layouts.options import ImportConfig


@register_command("import", ImportConfig, models=True, resumes=True)
def _main(config: ImportConfig) -> int:
    from kdtrain.plugins.layouts.command import main

    return main(config)
