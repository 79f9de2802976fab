"""The workbench of `tests/commands`."""

from tests.commands.conftest import made, workbench

__all__ = ["made", "workbench"]
