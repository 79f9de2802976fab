"""The options of a command, as its configuration's class declares them, and what was given for them."""

import dataclasses
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, get_type_hints

from kdtrain.config.kinds import alternatives, documented
from kdtrain.config.values import flag
from kdtrain.errors import UsageError

MOST = 5
"""Mistakes that one message names, and for which a hint is looked for."""
_LONGEST = 60
"""Characters of a word in a message."""


@dataclass(frozen=True)
class Option:
    """One option of a command: a field of its configuration, or of a section of it."""

    owner: type
    """The class that declares it."""
    section: str
    name: str
    kind: Any
    """Its annotation."""
    field: dataclasses.Field[Any]
    defaulted: bool = False
    """Whether its section has a default, and with it a value of every option."""

    @property
    def text(self) -> str:
        """Its docstring."""
        return documented(self.owner).get(self.name, "")

    @property
    def flag(self) -> str:
        """What users type for it."""
        return self.name.upper() if self.positional else flag(self.name)

    @property
    def switch(self) -> bool:
        """True if the flag takes no value: `--json`, `--no-compile`."""
        return alternatives(self.kind) == [bool]

    @property
    def required(self) -> bool:
        """True if it has no default."""
        return not self.defaulted and not _has_default(self.field)

    @property
    def positional(self) -> bool:
        """True if it may be given without its flag."""
        return bool(self.field.metadata.get("positional"))


@dataclass(frozen=True)
class Given:
    """What was given for an option: words of the command line, or of a file."""

    words: tuple[str, ...]
    where: str = ""
    """How a message about it begins: empty, or the file."""


def _has_default(field: dataclasses.Field[Any]) -> bool:
    return field.default is not dataclasses.MISSING or field.default_factory is not dataclasses.MISSING


def options_of(kind: type, section: str = "run", defaulted: bool = False) -> dict[str, Option]:
    """The options of a configuration's class, by name. UsageError: a section of it holds another section."""
    hints, found = get_type_hints(kind, include_extras=True), dict[str, Option]()
    for each in dataclasses.fields(kind):
        inner = hints[each.name]
        if not each.init:  # the class computes it
            continue
        if dataclasses.is_dataclass(inner):
            if section != "run":
                raise UsageError(f"[{section}] of a command holds the section '{each.name}'; put it beside [{section}]")
            found |= options_of(inner, each.name, _has_default(each))  # type: ignore[arg-type]
        else:
            found[each.name] = Option(kind, section, each.name, inner, each, defaulted)
    return found


def replaced(old: Mapping[str, Any], given: Iterable[tuple[str, Any]]) -> list[str]:
    """What replaces options of an earlier version, by name or by value; `old` is the class's `OLD`."""
    keys = [key for name, value in given for key in (name, name.removeprefix("no_"), f"{name} {value}")]
    return [f"{flag(key)} {old[key][0]}" for key in dict.fromkeys(keys) if key in old]


def short(word: str) -> str:
    """`word` as a message shows it."""
    return word if len(word) <= _LONGEST else f"{word[:_LONGEST]}..."
