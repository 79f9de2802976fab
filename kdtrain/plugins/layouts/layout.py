"""What a layout of someone else's cache is: the columns it has, and how a row of them becomes lists of entries.

A layout is a class that `register_layout` adds. It is made from the options of the command and is handed one record at
a time (`source`), whose columns are arrays of numbers of the right depth; all that follows is the same for every layout
(`rows`).
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, TypeVar

import numpy as np

from kdtrain.errors import UsageError
from kdtrain.plugins.layouts.options import LAYOUTS, ImportConfig

MOST_ENTRIES = 2**26
"""Most entries of a row, with shorter lists filled up: 512 a token in a row of 131,072."""


class Lists(NamedTuple):
    """Lists of numbers for m positions, one list behind the other."""

    values: np.ndarray
    lengths: np.ndarray
    """[m] int64."""


Record = Mapping[str, Any]
"""A row of a source: an array [n] or `Lists`, by the name of the column; columns that it lacks are left out."""


class Layout(ABC):
    """A layout of others' caches; a subclass defines `entries` and `decode`.

    UsageError: it cannot use the options.
    """

    entries: Mapping[str, int]
    """The columns that it decodes, and whether each holds one number a token (1) or a list of them (2)."""
    optional: frozenset[str] = frozenset()
    """Names of columns that a source may lack."""
    vocab_size: int | None = None
    """V, if the layout states it."""
    top_k: int | None = None
    """Entries of each position, if the layout states it."""

    def __init__(self, options: ImportConfig) -> None:
        self.options = options
        self.tokens, self.mask, self.segments = options.tokens_column, options.mask_column, options.segments_column
        """Columns of a number a token; mask 0: it is no label of the loss; segments: its document's number, 0: none."""

    @property
    def columns(self) -> dict[str, int]:
        """Every column, and its depth."""
        plain = [name for name in (self.tokens, self.mask, self.segments) if name is not None]
        return dict.fromkeys(plain, 1) | dict(self.entries)

    @property
    def facts(self) -> Mapping[str, Any]:
        """The settings by which the entries were coded, in plain values for the manifest."""
        return {}

    @abstractmethod
    def decode(self, record: Record, where: str) -> tuple[np.ndarray, np.ndarray]:
        """Return the entries of m positions: ids int64 [m, K] and their log p, floating point [m, K].

        log p are natural logarithms of probabilities. The entries are in any order, and NaN throughout a position
        without any. UsageError: names `where` and what does not fit.
        """

    def refuse_given(self, *names: str) -> None:
        """Raise UsageError if an option is given that has no effect with this layout."""
        for name in names:
            if getattr(self.options, name) != getattr(ImportConfig, name):
                given = f"--{name.replace('_', '-')} has no effect with --layout {self.options.layout}"
                raise UsageError(f"{given}; leave it out")


Kind = TypeVar("Kind", bound=Callable[[ImportConfig], Layout])


def register_layout(name: str, *, help: str = "") -> Callable[[Kind], Kind]:
    """Register a subclass of `Layout` as that of `--layout NAME` (a decorator).

    help: a line about it; by default the first line of the docstring.
    """

    def register(kind: Kind) -> Kind:
        LAYOUTS.add(name, kind, kind, help)
        return kind

    return register
