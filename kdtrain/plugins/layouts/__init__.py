"""`kdtrain import`: makes a cache of teacher outputs that others published, in a layout that `LAYOUTS` knows."""

from kdtrain.cli import register_module
from kdtrain.plugins.layouts.options import ImportConfig

register_module("import", ImportConfig, "kdtrain.plugins.layouts.command", models=True, resumes=True)
