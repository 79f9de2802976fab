"""`kdtrain prune`: a smaller model of what matters most in a teacher (docs/prune.md)."""

from kdtrain.cli import register_command
from kdtrain.plugins.prune.options import PruneConfig


@register_command("prune", PruneConfig, models=True, resumes=True)
def main(config: PruneConfig) -> int:
    """Run the command."""
    from kdtrain.plugins.prune import command

    return command.main(config)
