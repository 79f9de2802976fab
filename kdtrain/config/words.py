"""What a user may have meant by a name that a command does not take: a near spelling, or the word of another tool.

words.toml has the words of other tools; it is read when something was mistyped.
"""

import difflib
import tomllib
from collections.abc import Collection
from functools import cache
from pathlib import Path

from kdtrain.config.values import flag

MOST = 5
"""Mistakes that one message names, and for which a hint is looked for."""
_LONGEST = 60
"""Characters of a word in a message."""


@cache
def words_of(table: str) -> dict[str, list[str]]:
    """Read a table of words.toml, `commands`, `options` or `values`: kdtrain's names, each with the words for it."""
    tables = tomllib.loads(Path(__file__).with_name("words.toml").read_text(encoding="utf-8"))
    return {meant: words.split() for meant, words in tables[table].items()}


def meant_by(table: str) -> dict[str, str]:
    """Return each word of a table of words.toml, with the first name that it stands for."""
    return {word: meant for meant, words in reversed(words_of(table).items()) for word in words}


def option_meant(word: str, known: Collection[str]) -> str | None:
    """Return the flag, perhaps with a value, that `word` (without --) means among the options `known`; None: nothing.

    A name of another tool wins over a near spelling: max_steps is not max_skips.
    """
    name = word.strip("-").replace("-", "_").lower()
    if name in known:
        return flag(name)
    value = meant_by("values").get(name)
    negated = name.startswith("no_") and value is None
    if value is not None and value.split()[0][2:].replace("-", "_") in known:
        return value
    for option, words in words_of("options").items():
        if option in known and name in words:
            return flag(option)
    bare = name.removeprefix("no_") if negated else name
    found = difflib.get_close_matches(bare, known, 1, 0.7)
    if not found:  # a name of another tool, misspelt
        names = meant_by("options")
        found = [names[each] for each in difflib.get_close_matches(bare, names, 1, 0.85) if names[each] in known]
    if not found:
        return None
    return flag(f"no_{found[0]}") if negated else flag(found[0])


def word_meant(word: str, known: Collection[str]) -> str | None:
    """Return the one of `known` that is spelt most like `word`; None where none is."""
    lower = {each.lower(): each for each in known}
    found = difflib.get_close_matches(word.lower(), lower, 1)
    return lower[found[0]] if found else None


def short(word: str) -> str:
    """Return `word` as a message shows it."""
    return word if len(word) <= _LONGEST else f"{word[:_LONGEST]}..."
