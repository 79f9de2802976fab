"""What was given for the options of a command, and what messages say about it."""

from dataclasses import dataclass

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


def short(word: str) -> str:
    """`word` as a message shows it."""
    return word if len(word) <= _LONGEST else f"{word[:_LONGEST]}..."
