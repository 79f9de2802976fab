"""What a layout of someone else's cache is: the columns it has, and how a row of them becomes lists of entries.

A layout is a class that `register_layout` adds. It is made from the options of the command and is handed one record at
a time (`files`), whose columns are arrays of numbers of the right depth; all that follows is the same for every layout
(`rows`).
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar

import numpy as np

from kdtrain.errors import UsageError
from kdtrain.plugins.layouts.options import LAYOUTS, ImportConfig

MOST_ENTRIES = 2**26
"""Most entries of a row, with shorter lists filled up: 512 a token in a row of 131,072."""


class Lists(NamedTuple):
    """One list of numbers for each of m positions: position i has values[starts[i] : starts[i + 1]]."""

    values: np.ndarray
    starts: np.ndarray

    @property
    def lengths(self) -> np.ndarray:
        """[m] int64."""
        return np.diff(self.starts)

    def matrix(self, name: str, where: str, width: int | None = None) -> np.ndarray:
        """[m, width], for lists of one length. UsageError: they have several, or another one."""
        lengths = self.lengths
        wanted = int(lengths[0]) if width is None and len(lengths) else width or 0
        if (lengths != wanted).any():
            raise UsageError(f"{where}: a position has {lengths[lengths != wanted][0]} numbers in {name}, not {wanted}")
        return self.values.reshape(len(lengths), wanted)


Record = Mapping[str, Any]
"""A row of a source: an array [n] or `Lists`, by the name of the column; columns that it lacks are left out."""


@dataclass(frozen=True)
class Entries:
    """The entries of m positions: ids int64 [m, K] and natural logarithms of probabilities, floating point [m, K], in
    any order; NaN throughout a position without any.
    """

    ids: np.ndarray
    logprobs: np.ndarray


@dataclass(frozen=True, kw_only=True)
class Columns:
    """The names of columns, and whether each holds one number a token (1) or a list of them (2)."""

    tokens: str
    entries: Mapping[str, int]
    """The columns that the layout decodes."""
    optional: frozenset[str] = frozenset()
    """Names among all of these that a source may lack."""
    mask: str | None = None
    """0: the token is no label of the loss."""
    segments: str | None = None
    """The number of the document that a token is of; 0: padding."""

    def depths(self) -> dict[str, int]:
        """Every column."""
        plain = [name for name in (self.tokens, self.mask, self.segments) if name is not None]
        return dict.fromkeys(plain, 1) | dict(self.entries)


class Layout(ABC):
    """A layout; a subclass has `columns` and `decode`. Raises UsageError for options that it cannot use."""

    columns: Columns
    vocab_size: int | None = None
    """V, if the layout states it."""
    top_k: int | None = None
    """Entries of each position, if the layout states it."""

    def __init__(self, options: ImportConfig) -> None:
        self.options = options

    @property
    def facts(self) -> Mapping[str, Any]:
        """How the entries were coded, in plain values for the manifest."""
        return {}

    @abstractmethod
    def decode(self, record: Record, where: str) -> Entries:
        """The entries of a record. UsageError: names `where` and what does not fit."""


Kind = TypeVar("Kind", bound=Callable[[ImportConfig], Layout])


def register_layout(name: str, *, help: str = "") -> Callable[[Kind], Kind]:
    """Decorator: make a subclass of `Layout` the one of `--layout NAME`.

    help: a line about it; by default the first line of the docstring.
    """

    def register(kind: Kind) -> Kind:
        LAYOUTS.add(name, kind, kind, help)
        return kind

    return register
