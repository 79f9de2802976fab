"""`kdtrain find-lr`: the learning rate of a run, by short real ones (docs/learning-rate.md)."""

from kdtrain.cli import register_command
from kdtrain.plugins.find_lr.options import FindLrConfig


@register_command("find-lr", FindLrConfig, models=True, resumes=True)
def main(config: FindLrConfig) -> int:
    """Run the command."""
    from kdtrain.plugins.find_lr import command

    return command.main(config)
