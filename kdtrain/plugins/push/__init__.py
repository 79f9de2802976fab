"""`kdtrain push`: publish a cache, or a student, on the hub (docs/push.md)."""

from kdtrain.cli import register_command
from kdtrain.plugins.push.options import PushConfig


@register_command("push", PushConfig, resumes=True)
def main(config: PushConfig) -> int:
    """Run the command."""
    from kdtrain.plugins.push import command

    return command.main(config)
