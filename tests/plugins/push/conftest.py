"""The bench of `tests/commands`, with the stand-in of the hub."""

from tests.commands.conftest import hub, made, workbench

__all__ = ["hub", "made", "workbench"]
