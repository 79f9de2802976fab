"""Checking the values that Python gives an option: the command's own parser has converted its words already."""

import dataclasses
import os
from numbers import Integral, Real
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin

from kdtrain.errors import UsageError


def settle(config: Any) -> None:
    """Refuse values of a wrong type, by a `UsageError` that names the option.

    A path may be given as text, text as a path, and a tuple as a list; they are converted.
    """
    for each in dataclasses.fields(config):
        value = getattr(config, each.name)
        kinds = get_args(each.type) if get_origin(each.type) in (Union, UnionType) else (each.type,)
        if isinstance(value, str) and Path in kinds:
            object.__setattr__(config, each.name, Path(value))
        elif isinstance(value, os.PathLike) and str in kinds:
            object.__setattr__(config, each.name, os.fspath(value))
        elif not any(_fits(value, kind) for kind in kinds):
            wanted = " or ".join(map(_named, kinds))
            raise UsageError(f"--{each.name.replace('_', '-')} {value!r} is not {wanted}")
        elif isinstance(value, list):
            object.__setattr__(config, each.name, tuple(value))


def _fits(value: Any, kind: Any) -> bool:
    if get_origin(kind) is Literal:
        return value in get_args(kind)
    if get_origin(kind) is tuple:
        wanted = get_args(kind)
        length = len(value) if isinstance(value, tuple | list) and wanted[-1] is ... else len(wanted)
        return (
            isinstance(value, tuple | list) and len(value) == length and all(_fits(each, wanted[0]) for each in value)
        )
    if kind in (int, float):
        return isinstance(value, Integral if kind is int else Real) and not isinstance(value, bool)
    return isinstance(value, kind)


def _named(kind: Any) -> str:
    """A type as a message names it."""
    if get_origin(kind) is Literal:
        return " or ".join(map(repr, get_args(kind)))
    if get_origin(kind) is tuple:
        return f"a tuple, each {_named(get_args(kind)[0])}"
    names = {int: "a whole number", float: "a number", str: "text", bool: "True or False", Path: "a path"}
    return names.get(kind) or ("None" if kind is NoneType else f"a {kind.__name__}")
