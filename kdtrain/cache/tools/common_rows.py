"""Rows that caches have in common, as far as their manifests tell: by the caches that they were merged and cut from."""

import re
from collections.abc import Iterator, Sequence

from kdtrain.cache.format.manifest import Parent
from kdtrain.cache.read.reader import Cache

_RANGE = re.compile(r"(\d{1,18}):(?:\d{1,18})?")

Span = tuple[tuple[str, str], int, int]
"""Rows START to STOP of a cache (its digest) in an order: as they lie there, or by the hash of their tokens."""


def with_common_rows(caches: Sequence[Cache], split: str) -> list[Cache]:
    """The first two caches found that hold rows of one and the same cache; empty: none are known to."""
    spans: dict[tuple[str, str], list[tuple[int, int, int]]] = {}
    for number, cache in enumerate(caches):
        total = len(cache[split])
        for key, start, stop in _spans(cache.manifest.digest, cache.manifest.parents, split, 0, total, total):
            spans.setdefault(key, []).append((start, stop, number))
    for found in spans.values():
        reach: dict[int, int] = {}  # the largest STOP so far, by cache
        for start, stop, number in sorted(found):
            others = [each for each, end in reach.items() if each != number and start < end]
            if others:
                return [caches[each] for each in sorted((others[0], number))]
            reach[number] = max(stop, reach.get(number, 0))
    return []


def _spans(
    digest: str, parents: Sequence[Parent] | None, split: str, start: int, stop: int, total: int
) -> Iterator[Span]:
    """What the rows `start` to `stop` of a cache of `total` are, there and in all caches that it was made of."""
    yield (digest, "rows"), start, stop
    if stop - start == total:
        yield (digest, "hash"), 0, total
    totals = [parent["sequences"].get(split, 0) for parent in parents or []]
    if parents and split in parents[0].get("splits", []):  # a cut has one parent
        rows = parents[0].get("rows", "")
        if found := _RANGE.fullmatch(rows):
            moved = int(found[1])
            yield from _spans_of(parents[0], split, moved + start, moved + stop)
        elif stop - start == total:  # a fraction has the rows of the lowest hashes
            yield (parents[0]["digest"], "hash"), 0, total
    elif all(each == total for each in totals):  # a sum, a split that was not cut, or one that all had
        for parent in parents or []:
            yield from _spans_of(parent, split, start, stop)
    elif sum(totals) == total:
        first = 0
        for parent, number in zip(parents or [], totals, strict=True):
            if (begin := max(start - first, 0)) < (end := min(stop - first, number)):
                yield from _spans_of(parent, split, begin, end)
            first += number


def _spans_of(parent: Parent, split: str, start: int, stop: int) -> Iterator[Span]:
    return _spans(parent["digest"], parent.get("parents"), split, start, stop, parent["sequences"].get(split, 0))
