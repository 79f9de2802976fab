"""The commands that there are: the built-in ones, which `kdtrain.cli` registers, and those of installed packages."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from kdtrain.registry import Registry

COMMANDS = Registry("kdtrain", "kdtrain.commands", "kdtrain.cli", {})

Main = Callable[[Any], int | None]
"""A configuration -> the exit code, None for 0."""


@dataclass(frozen=True)
class Command:
    """A command."""

    config: type
    """Its configuration, whose fields are its options."""
    main: Main
    """What runs it."""
