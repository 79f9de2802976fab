"""What installed packages and plugins add to the commands: commands, sections of options, and observers of steps.

`kdtrain.cli` registers the built-in commands. A section is a dataclass of options that a plugin adds to `distill` or
`cache-teacher`: it appears in `--help`, TOML files and completion like any other, and its values are in
`config.plugins[NAME]`.
"""

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

from kdtrain.errors import UsageError
from kdtrain.registry import Registry

COMMANDS = Registry("kdtrain", "kdtrain.commands", "kdtrain.cli", {})
SECTIONS = Registry("the section", "kdtrain.sections", __name__, {})
OBSERVERS = Registry("the observer", "kdtrain.observers", __name__, {})
"""Functions that make an observer of a run's steps (`kdtrain.training.observers`)."""

Main = Callable[[Any], int | None]
"""A configuration -> the exit code, None for 0."""


Maker = TypeVar("Maker", bound=Callable[[Any], Any])


@dataclass(frozen=True)
class Command:
    """A command."""

    config: type
    """Its configuration, whose fields are its options."""
    main: Main
    """What runs it."""
    models: bool = True
    """Whether it loads models, which `python -OO` prevents."""
    resumes: bool = False
    """Whether the same command resumes an interrupted one."""


def register_section(name: str, kinds: Mapping[str, type]) -> None:
    """Add the section `name` to commands.

    Args:
        name: its table in a TOML file.
        kinds: the frozen dataclass of its options by command, `distill` or `cache-teacher`; its base is `Options`, and
            every option has a default. It may have a method `check`, which gets the whole configuration of the command
            and refuses, by a `UsageError`, what does not go with its own values. One with a teacher that runs elsewhere
            has `teacher_kind`, a name of `kdtrain.teachers` or None, and for distill `capture(config, **options)`: the
            `CacheTeacherConfig` by which its answers are cached.

    Raises:
        UsageError: another module has registered this name, or an option has no default.
    """
    for kind in kinds.values():
        for each in dataclasses.fields(kind):
            if each.default is dataclasses.MISSING and each.default_factory is dataclasses.MISSING:
                raise UsageError(f"the section [{name}] of {kind.__module__}: its option '{each.name}' has no default")
    SECTIONS.add(name, dict(kinds), next(iter(kinds.values())))


def register_observer(name: str, *, help: str = "") -> Callable[[Maker], Maker]:
    """Decorator: call a function for each run that is built; the observer that it returns sees the run's steps.

    The function gets an `ObserverRequest`, and returns None for a run that it does not observe. Its module should
    import nothing heavy.
    """
    return OBSERVERS.registers(name, help)


def sections_of(kind: type) -> dict[str, type]:
    """The sections that plugins add to a command, by name; none if `kind` is no configuration that takes any."""
    command = getattr(kind, "EXTENDED", "")
    if not command:
        return {}
    found, fields = SECTIONS.every(), {each.name for each in dataclasses.fields(kind)}
    for name in found.keys() & fields:
        SECTIONS.leave_out(name, f"the section [{name}] of {SECTIONS.modules[name]} has the name of a command's own")
        del found[name]
    return {name: kinds[command] for name, kinds in found.items() if command in kinds}
