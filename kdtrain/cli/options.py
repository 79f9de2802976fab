"""What was given for the options of a command, and what messages say about it."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from kdtrain.config.values import flag

MOST = 5
"""Mistakes that one message names, and for which a hint is looked for."""
_LONGEST = 60
"""Characters of a word in a message."""


@dataclass(frozen=True)
class Given:
    """What was given for an option: words of the command line, or of a file."""

    words: tuple[str, ...]
    where: str = ""
    """How a message about it begins: empty, or the file."""


def replaced(old: Mapping[str, Any], given: Iterable[tuple[str, Any]]) -> list[str]:
    """What replaces options of an earlier version, by name or by value; `old` is the class's `OLD`."""
    keys = [key for name, value in given for key in (name, name.removeprefix("no_"), f"{name} {value}")]
    return [f"{flag(key)} {old[key][0]}" for key in dict.fromkeys(keys) if key in old]


def short(word: str) -> str:
    """`word` as a message shows it."""
    return word if len(word) <= _LONGEST else f"{word[:_LONGEST]}..."
