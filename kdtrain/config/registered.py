"""The commands; `kdtrain.cli` registers the built-in ones."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from kdtrain.registry import Registry

COMMANDS = Registry("kdtrain", "kdtrain.commands", "kdtrain.cli", {})

Main = Callable[[Any], int | None]
"""A configuration -> the exit code, None for 0."""


@dataclass(frozen=True)
class Command:
    """A registered command."""

    config: type
    """Its configuration, whose fields are its options."""
    main: Main
    """What runs it."""
    models: bool = True
    """Whether it loads models, which `python -OO` prevents."""
    resumes: bool = False
    """Whether the same command resumes an interrupted one."""
    alone: bool = False
    """Whether it refuses to be one of several processes."""
