"""`kdtrain merge` and `kdtrain subset`: caches made of other caches (docs/caches.md)."""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import Literal

from kdtrain.cli import register_module
from kdtrain.config.commands import conflicts_with_own
from kdtrain.config.values import Printed, option
from kdtrain.errors import UsageError


@dataclass(frozen=True, kw_only=True)
class MergeConfig(Printed):
    """Add up caches of samples of the same rows, or append caches of other rows; the order does not matter.

    The same command resumes an interrupted one.
    """

    caches: tuple[str, ...] = option((), positional=True, reads="cache")
    """Two or more finished caches: folders, or addresses (hf:datasets/ORG/NAME, https://...)."""
    out: Path
    """The folder of the merged cache."""

    EXAMPLES = ("kdtrain merge cache/a cache/b --out cache/both",)

    def conflicts(self) -> Iterator[tuple[object, str]]:
        yield len(self.caches) < 2, "nothing to merge; give two or more caches"
        yield from conflicts_with_own(self.out, self.caches)


@dataclass(frozen=True, kw_only=True)
class SubsetConfig(Printed):
    """Cut a cache to some of its rows.

    The same command resumes an interrupted one.
    """

    cache: str = option(positional=True, reads="cache")
    """A finished cache: a folder, or an address (hf:datasets/ORG/NAME, https://...)."""
    out: Path
    """The folder of the cut cache."""
    rows: str | None = None
    """The rows to take, START:STOP, counted from 0; STOP is not taken."""
    fraction: str | None = None
    """The share of the rows to take, above 0 and at most 1, by the hash of their tokens."""
    split: Literal["train", "validation", "test", "all"] = "train"
    """The split to cut, or all; the others stay whole."""

    EXAMPLES = ("kdtrain subset cache/t --fraction 0.01 --out cache/small",)

    def conflicts(self) -> Iterator[tuple[object, str]]:
        yield (self.rows is None) == (self.fraction is None), "give --rows START:STOP or --fraction SHARE, one of them"
        yield self.share is not None and self.share > 1, f"--fraction {self.fraction} is above 1"
        _ = self.range
        yield from conflicts_with_own(self.out, [self.cache])

    @property
    def share(self) -> Fraction | None:
        """The fraction exactly as it is written. UsageError: it is not a number above 0."""
        if self.fraction is None:
            return None
        if not re.fullmatch(r"[0-9]{1,9}(\.[0-9]{1,9})?|\.[0-9]{1,9}", self.fraction.strip()) or not Fraction(
            self.fraction.strip()
        ):
            raise UsageError(f"--fraction: '{self.fraction[:80]}' is not a number above 0, such as 0.3")
        return Fraction(self.fraction.strip())

    @property
    def range(self) -> tuple[int, int | None] | None:
        """Start and stop, None: the end."""
        if self.rows is None:
            return None
        found = re.fullmatch(r"([0-9]{0,18}):([0-9]{0,18})", self.rows)
        if found is None:
            raise UsageError(f"--rows {self.rows[:80]} is not START:STOP; give whole numbers, such as 0:10000")
        return int(found[1] or 0), int(found[2]) if found[2] else None


register_module("merge", MergeConfig, "kdtrain.plugins.caches.command:merge_caches", models=True, resumes=True)
register_module("subset", SubsetConfig, "kdtrain.plugins.caches.command:cut_cache", models=True, resumes=True)
