"""Whether caches fit together, told from their manifests: `merge` and `subset` refuse early, without torch.

What a merge does is a `Plan`: which caches in which order, and what the sum of their samples is.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from itertools import pairwise
from pathlib import Path
from typing import Any, Protocol

from kdtrain.cache.format.manifest import CacheSettings, Manifest, check_sizes, differences, read_manifest
from kdtrain.cache.format.names import PIECES
from kdtrain.cache.format.spec import grid_name, grid_offset
from kdtrain.cache.read.remote import open_remote
from kdtrain.errors import UsageError, printable
from kdtrain.net.address import parse_address

MIXTURE = "mixture"
"""`sampling` of samples that are not of one grid."""
SHOWN = 60
"""Characters of a teacher's name in that of a mixture."""
ADDABLE = 2**62
"""`total_shares` times the number of samples must stay below it."""


class Made(Protocol):
    """A finished cache, open or not."""

    @property
    def name(self) -> str:
        """What it is called in messages."""

    @property
    def manifest(self) -> Manifest:
        """Its manifest."""


@dataclass(frozen=True)
class Stated:
    """A cache as its manifest states it, with none of its shards open."""

    name: str
    manifest: Manifest


def stated(where: str) -> Stated:
    """What a cache states. UsageError, RunError: as of `reader.Cache`, or a shard of a folder is missing."""
    if (address := parse_address(where)) is not None:
        return Stated(str(address), open_remote(address).manifest)
    manifest = read_manifest(where)
    check_sizes(where, manifest)
    return Stated(str(Path(where)), manifest)


@dataclass(frozen=True)
class Plan:
    """What a merge makes."""

    order: Sequence[int]
    """The caches by their digests."""
    settings: CacheSettings | None = None
    """Of the sum; None: the shards are appended."""
    shares: Sequence[Fraction] = ()
    """Of each cache in the sum, in this order."""


def plan(caches: Sequence[Made], weights: Sequence[Fraction] | None = None) -> Plan:
    """What a merge of these caches makes. UsageError: they do not fit together (named, with the reason)."""
    if len(caches) < 2:
        raise UsageError("there is one cache and nothing to merge it with; name two or more")
    if weights is not None and len(weights) != len(caches):
        raise UsageError(f"{len(weights)} weights for {len(caches)} caches; give one a cache")
    order = sorted(range(len(caches)), key=lambda number: caches[number].manifest.digest)
    caches, weights = [caches[each] for each in order], None if weights is None else [weights[each] for each in order]
    for one, other in pairwise(caches):
        if one.manifest.digest == other.manifest.digest:
            twice = f"{one.name} is named twice" if one.name == other.name else f"{names([one, other])} are one cache"
            raise UsageError(
                f"{twice}, which adds nothing; name another (samples to add: kdtrain cache-teacher --refine)"
            )
    for cache in caches[1:]:
        _refuse_unlike(caches[0], cache)
    texts = [_text(cache) for cache in caches]
    if len(set(texts)) == 1:
        return Plan(order, *_sum(caches, weights))
    if len(set(texts)) < len(caches):
        same = [cache for cache, text in zip(caches, texts, strict=True) if texts.count(text) > 1]
        raise UsageError(f"{names(same)} have rows in common and others do not; merge those of the same rows first")
    if weights is not None:
        raise UsageError(f"{names(caches)} have different rows, which weights mean nothing for; leave --weights out")
    for cache in caches[1:]:
        if changed := list(differences(caches[0].manifest.codec.to_json(), cache.manifest.codec.to_json())):
            shown = _shown(changed)
            raise UsageError(
                f"{names([caches[0], cache])} keep different things of a distribution ({shown}), and shards are "
                "appended as they are"
            )
    return Plan(order)


def refuse_rows(cache: Made, splits: Sequence[str], rows: tuple[int, int | None] | None) -> None:
    """UsageError: a cache has no such split, or a split no such rows (start and stop, None: the end)."""
    there = cache.manifest.splits
    if missing := [split for split in splits if split not in there]:
        raise UsageError(f"{cache.name} has no split '{missing[0]}'; it has {', '.join(there)}")
    for split in splits if rows is not None else ():
        number = there[split]["sequences"]
        start, stop = between(rows, number)
        if not 0 <= start < stop <= number:
            raise UsageError(
                f"{cache.name} has the rows 0 to {number} of {split}, not {start} to {stop}; name some of them"
            )


def between(rows: tuple[int, int | None] | None, number: int) -> tuple[int, int]:
    """Start and stop of rows among a number of them; None: all."""
    start, stop = rows or (0, None)
    return start, number if stop is None else stop


def names(caches: Sequence[Made]) -> str:
    """What several caches are called."""
    return " and ".join(cache.name for cache in caches)


def _shown(changed: Sequence[str]) -> str:
    return "; ".join(each.replace(" there", " in the one").replace(" asked", " in the other") for each in changed[:3])


def _text(cache: Made) -> tuple[tuple[str, str], ...]:
    """The rows of a cache; of validation only where there is nothing else."""
    found = {split: each["tokens_sha256"] for split, each in cache.manifest.splits.items()}
    return tuple(sorted((name, sha) for name, sha in found.items() if name != "validation" or len(found) == 1))


def _refuse_unlike(one: Made, other: Made) -> None:
    """UsageError: a student could not learn from both."""
    names = ("vocab_size", "seq_len", "tokenizer_digest", "tokenizer_size", "document_mask")
    for name in names:
        ours, theirs = (getattr(cache.manifest.settings, name) for cache in (one, other))
        if ours != theirs:
            raise UsageError(f"{one.name} has {name} {ours} and {other.name} {theirs}; they cannot be merged")


def whole_shares(weights: Sequence[Fraction], numbers: Sequence[int]) -> list[int]:
    """Whole numbers in proportion to w / D: how much one draw of each cache counts in the sum."""
    shares = [weight / number for weight, number in zip(weights, numbers, strict=True)]
    common = math.lcm(*(share.denominator for share in shares))
    found = [int(share * common) for share in shares]
    divisor = math.gcd(*found)
    return [each // divisor for each in found]


def total_shares(shares: Sequence[int], numbers: Sequence[int]) -> int:
    """What all draws of a token count together."""
    return sum(share * number for share, number in zip(shares, numbers, strict=True))


def _sum(caches: Sequence[Made], weights: Sequence[Fraction] | None) -> tuple[CacheSettings, list[Fraction]]:
    """The settings of the sum of the samples, and the share of each cache."""
    for cache in caches:
        _refuse_not_addable(cache)
    for cache in caches[1:]:
        if tokens_of(cache) != tokens_of(caches[0]):
            raise UsageError(
                f"{names([caches[0], cache])} have the same rows to train on and others to validate on; cut both with "
                "kdtrain subset, or capture the same text"
            )
    numbers = [cache.manifest.codec.num_samples for cache in caches]
    number = sum(numbers)
    if number > 255:
        raise UsageError(
            f"{names(caches)} have {number} samples a token together; counts are kept in 8 bits, so 255 are the most"
        )
    one = equal([who(cache) for cache in caches])
    if one and weights is not None:
        raise UsageError(
            "--weights is for several teachers; samples of one teacher add up by their numbers, so leave it out"
        )
    asked = list(weights) if weights is not None else [Fraction(each) for each in numbers]
    shares = [each / sum(asked) for each in asked]
    if total_shares(whole_shares(shares, numbers), numbers) * number >= ADDABLE:
        raise UsageError("--weights have too many digits for these numbers of samples; round them")
    settings = _of_one(caches) if one else _of_several(caches, shares)
    codec = replace(settings.codec, num_samples=number)
    return replace(settings, codec=codec), shares


def tokens_of(cache: Made) -> dict[str, str]:
    """What says which tokens each split has."""
    return {split: each["tokens_sha256"] for split, each in cache.manifest.splits.items()}


def _refuse_not_addable(cache: Made) -> None:
    codec, where = cache.manifest.codec, cache.name
    if codec.kind == "tokens":
        raise UsageError(f"{where} has the same rows as the others and no targets: there is nothing to add")
    if codec.top_k:
        raise UsageError(
            f"{where} has the same rows as the others and a top-k: the top-k of a sum is not in two top-ks; "
            "only caches of samples alone add up"
        )
    if not codec.counts_only:
        raise UsageError(f"{where} has the same rows as the others; only caches of samples alone add up")
    if cache.manifest.settings.format_version == PIECES:
        raise UsageError(f"{where} was appended or cut; add up the caches it was made of, then append or cut the sum")


def who(cache: Made) -> dict[str, Any]:
    """A teacher but for its name, where its weights say who it is."""
    teacher = cache.manifest.settings.teacher or {}
    return {name: value for name, value in teacher.items() if name != "spec" or "weights_digest" not in teacher}


def _of_one(caches: Sequence[Made]) -> CacheSettings:
    """The settings of a capture of all samples of one teacher. UsageError: their grids do not make up one."""
    first, points = caches[0], dict[Fraction, Made]()
    total = sum(cache.manifest.codec.num_samples for cache in caches)
    hint = "draw others with kdtrain cache-teacher --refine CACHE"
    for cache in caches:
        settings = cache.manifest.settings
        number, offset = settings.codec.num_samples, grid_offset(settings.sampling)
        if offset is None:
            raise UsageError(
                f"{cache.name} has {settings.sampling or 'independent'} samples, which do not interleave with others "
                "of the same teacher over the same rows; capture it again"
            )
        for point in ((offset + Fraction(i, number)) % 1 for i in range(number)):
            if point in points and settings.seed == points[point].manifest.settings.seed:
                raise UsageError(
                    f"{names([points[point], cache])} hold the same samples of the same teacher (their grids "
                    f"coincide), which adds nothing: {hint}"
                )
            points[point] = cache
    ours = _comparable(first)
    for cache in caches[1:]:
        if changed := list(differences(ours, _comparable(cache))):
            shown = _shown(changed)
            raise UsageError(f"{names([first, cache])} are of one teacher and differ ({shown}): {hint}")
    start = min(points)
    if any(start + Fraction(i, total) not in points for i in range(total)):
        raise UsageError(
            f"{names(caches)} hold {total} samples that are not one even grid: {hint}, and merge all of it"
        )
    plain = min(caches, key=lambda cache: grid_offset(cache.manifest.settings.sampling) or Fraction(0))
    return replace(plain.manifest.settings, sampling=grid_name(start))


def _comparable(cache: Made) -> dict[str, Any]:
    """What two caches whose samples add up to a capture have in common."""
    settings = cache.manifest.settings
    codec = replace(settings.codec, num_samples=1)
    return replace(settings, codec=codec, sampling=None, teacher=who(cache)).to_json()


def _of_several(caches: Sequence[Made], shares: Sequence[Fraction]) -> CacheSettings:
    members = [
        {"weight": float(share), "cache": cache.manifest.digest, "teacher": cache.manifest.settings.teacher}
        for share, cache in zip(shares, caches, strict=True)
    ]
    names = [f"{float(share):.3g} {_spec(cache)}" for share, cache in zip(shares, caches, strict=True)]
    teacher = {"spec": " + ".join(names), "mixture": members}
    return replace(caches[0].manifest.settings, teacher=teacher, sampling=MIXTURE)


def _spec(cache: Made) -> str:
    return printable(str((cache.manifest.settings.teacher or {}).get("spec")))[:SHOWN]


def equal(values: Sequence[Any]) -> bool:
    """Whether all are the same."""
    return all(value == values[0] for value in values)
