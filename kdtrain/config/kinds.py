"""What the annotation of an option means on a command line: how its words are read, and how it is shown in help.

An annotation is `str`, `int`, `float`, `bool`, a path, a `Literal`, a union of these, a tuple or a list of them, or a
class that makes its value from one word.
"""

import ast
import dataclasses
import inspect
import os
import sys
from collections.abc import Sequence
from contextlib import suppress
from enum import Enum
from functools import cache
from itertools import pairwise
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

import msgspec

from kdtrain.errors import UsageError

_WANTED = {int: "a whole number", float: "a number", bool: "true or false", str: "text"}
_MANY = {int: "whole numbers", float: "numbers"}
_SHOWN = {int: "N", float: "X", bool: "true|false", str: "TEXT"}


def alternatives(kind: Any) -> list[Any]:
    """Return the annotations that `kind` is a union of, without None."""
    if get_origin(kind) is Annotated:
        return alternatives(get_args(kind)[0])
    if get_origin(kind) in (Union, UnionType):
        return [each for part in get_args(kind) for each in alternatives(part)]
    return [] if kind is NoneType else [kind]


def choices(kind: Any) -> list[str]:
    """Return the words that `kind` names itself."""
    items = _items(kind)
    listed = items[0] if items else kind
    found = [get_args(each) if get_origin(each) is Literal else _members(each) for each in alternatives(listed)]
    return [str(each) for names in found for each in names]


def words_wanted(kind: Any) -> int | None:
    """Return how many words a value has; None for any number of them."""
    items = _items(kind)
    if items is None:
        return 1
    return None if items[-1] is ... else len(items)


def read_words(words: Sequence[str], kind: Any) -> Any:
    """Convert `words` to a value of `kind`. UsageError: states which values fit."""
    if words == ["None"] and NoneType in get_args(kind):
        return None
    items = _items(kind)
    count = words_wanted(kind)
    kinds: Sequence[Any] = [kind]
    if items is not None:
        kinds = items[:1] * len(words) if count is None else items
    if len(kinds) != len(words):
        raise UsageError(wanted(kind))
    try:
        values = [_read_word(*each) for each in zip(words, kinds, strict=True)]
    except UsageError:
        raise UsageError(wanted(kind)) from None
    return values[0] if items is None else convert(values, kind)


def convert(value: Any, kind: Any) -> Any:
    """Convert `value` to `kind`: a list to a tuple, text to a path and back. UsageError: states which values fit."""
    value = value.item() if hasattr(value, "item") else value  # a number of numpy
    if value is None and NoneType in get_args(kind):
        return None
    for each in alternatives(kind):
        if each is type(value):
            return value
        if dataclasses.is_dataclass(each):  # never of a dict: an unknown key would be dropped
            if isinstance(value, each):  # type: ignore[arg-type]
                return value
            continue
        with suppress(msgspec.ValidationError, TypeError):
            return msgspec.convert(os.fspath(value) if each is str else value, each, dec_hook=_made)
    raise UsageError(wanted(kind))


def wanted(kind: Any) -> str:
    """Describe the values that fit `kind`, as a sentence."""
    items = _items(kind)
    names = choices(kind)
    if items is not None and items[-1] is not ...:
        many = _MANY.get(items[0], "values") if len({*items}) == 1 else "values"
        return f"{len(items)} {many} are wanted, with a space between them"
    kind = items[0] if items else kind
    texts = _described(kind, _WANTED, "a path") + names
    if names == texts and names:
        return f"choose {' or '.join([', '.join(names[:-1]), names[-1]] if names[1:] else names)}"
    return f"{' or '.join(texts) or 'a ' + getattr(kind, '__name__', 'value')} is wanted"


def metavar(kind: Any) -> str:
    """Return the placeholder for a value of `kind` in help."""
    if (items := _items(kind)) is not None:
        return f"{metavar(items[0])} ..." if items[-1] is ... else " ".join(metavar(each) for each in items)
    return "|".join(_described(kind, _SHOWN, "PATH") + choices(kind)) or "VALUE"


@cache
def documented(kind: type) -> dict[str, str]:
    """Return the docstring of each field of a dataclass, its bases' included; empty where there is no source."""
    found: dict[str, str] = {}
    for owner in reversed(kind.__mro__[:-1]):
        for line, text in pairwise(_classes(owner.__module__).get(owner.__name__, ())):
            if isinstance(line, ast.AnnAssign) and isinstance(text, ast.Expr):
                found[ast.unparse(line.target)] = " ".join(str(ast.literal_eval(text.value)).split())
    return found


@cache
def _classes(module: str) -> dict[str, list[ast.stmt]]:
    """Return the statements in the body of each class of a module, by the class's name; empty without a source."""
    with suppress(OSError, TypeError, SyntaxError, KeyError):
        nodes = ast.walk(ast.parse(inspect.getsource(sys.modules[module])))
        return {each.name: each.body for each in nodes if isinstance(each, ast.ClassDef)}
    return {}


def _items(kind: Any) -> tuple[Any, ...] | None:
    """Return the annotations of a tuple's or list's items, with ... at the end for any number; None for one value."""
    found = alternatives(kind)
    if len(found) != 1 or get_origin(found[0]) not in (tuple, list):
        return None
    return get_args(found[0]) if get_origin(found[0]) is tuple else (*get_args(found[0]), ...)


def _read_word(word: str, kind: Any) -> Any:
    members = [each.__members__ for each in alternatives(kind) if _members(each)]
    for read in (int, float, *(each.__getitem__ for each in ({"true": True, "false": False}, *members))):
        with suppress(ValueError, KeyError, UsageError):
            return convert(read(word), kind)
    return convert(word, kind)


def _made(kind: Any, value: Any) -> Any:
    """Make a value of a class that takes one word."""
    if not isinstance(value, str | kind):
        raise TypeError
    return value if isinstance(value, kind) else kind(value)


def _members(kind: Any) -> list[str]:
    return list(kind.__members__) if isinstance(kind, type) and issubclass(kind, Enum) else []


def _described(kind: Any, names: dict[type, str], path: str) -> list[str]:
    """Return the word in `names` for each alternative of a kind that has one, and `path` for each kind of path."""
    found = [names.get(each, path if hasattr(each, "__fspath__") else "") for each in alternatives(kind)]
    return [each for each in found if each]
