"""What installed packages and plugins add to the commands: commands, sections of options, and observers of runs.

`kdtrain.cli` registers the built-in commands. A section is a dataclass of options that a plugin adds to `distill` or
`cache-teacher`: it appears in `--help`, TOML files and completion like any other, and its values are in
`config.plugins[NAME]`.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

from kdtrain.config.values import SECTIONS, Extended, options_of
from kdtrain.registry import Registry

COMMANDS = Registry("kdtrain", "kdtrain.commands", "kdtrain.cli", {})
OBSERVERS = Registry("the observer", "kdtrain.observers", __name__, {})
"""Functions that make an observer of a run's steps and events (`kdtrain.training.observers`)."""

Main = Callable[[Any], int | None]
"""A configuration -> the exit code, None for 0."""


Maker = TypeVar("Maker", bound=Callable[[Any], Any])


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


def register_section(name: str, kinds: Mapping[str, type]) -> None:
    """Add the section `name` to commands.

    Args:
        name: its table in a TOML file.
        kinds: the frozen dataclass of its options by command, `distill` or `cache-teacher`; its base is `Options`, and
            every option has a default. It may have a method `check`, which gets the whole configuration of the command
            and refuses, by a `UsageError`, what does not go with its own values. One with a teacher that runs elsewhere
            has `teacher_kind`, a name of `kdtrain.teachers` or None, and `connect(teacher, codec)`, which tells that
            teacher where it runs. One that makes data, such as a cache of its answers, has `data_plan`, a name of
            `kdtrain.plans` or None.

    Raises:
        UsageError: another module or a command has this name or that of an option, or an option has no default.
    """
    every = {**SECTIONS.entries, name: kinds}  # this one last, so that a clash is its own
    for command, kind in kinds.items():
        beside = {section: each[command] for section, each in every.items() if command in each}
        for each in Extended.__subclasses__():
            if command == each.EXTENDED:
                options_of(each, sections=beside)
        kind()
    SECTIONS.add(name, dict(kinds), next(iter(kinds.values())))


def register_observer(name: str, *, help: str = "") -> Callable[[Maker], Maker]:
    """Return a decorator of a function, which is called for each run that is built and returns its observer.

    The observer sees the run's steps and events. The function gets an `ObserverRequest`, and returns None for a run
    that it does not observe. Its module should import nothing heavy.
    """
    return OBSERVERS.registers(name, help)
