"""`kdtrain audit`: a cache's teacher scores some of its rows again (docs/audit.md)."""

from kdtrain.cli import register_command
from kdtrain.plugins.audit.options import AuditConfig


@register_command("audit", AuditConfig, models=True)
def main(config: AuditConfig) -> int:
    """Run the command."""
    from kdtrain.plugins.audit import command

    return command.main(config)
