"""The workshop of `tests/cache`, and the workbench of `tests/commands`."""

from tests.cache.conftest import workshop
from tests.commands.conftest import made, workbench

__all__ = ["made", "workbench", "workshop"]
