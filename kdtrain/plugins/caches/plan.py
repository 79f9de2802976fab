"""Whether caches fit together, by their manifests: `merge` and `subset` refuse early, without torch."""

from collections.abc import Sequence
from dataclasses import replace
from fractions import Fraction
from itertools import pairwise
from typing import Any, NamedTuple

from kdtrain.cache.format.manifest import CacheSettings, Manifest, differences
from kdtrain.errors import UsageError


class Stated(NamedTuple):
    """A cache as its manifest states it, with none of its shards open."""

    name: str
    """What it is called in messages."""
    manifest: Manifest


def plan(caches: Sequence[Stated]) -> tuple[list[int], CacheSettings | None]:
    """Return the caches' indices in the order of their digests, and the settings of the sum of their samples.

    The settings are None where the caches have different rows, and their shards are appended. UsageError: the caches do
    not fit together (named, with the reason).

    Without settings, the caches have other rows, and their shards are appended. UsageError: they do not fit together
    (named, with the reason).
    """
    if len(caches) < 2:
        raise UsageError("there is one cache and nothing to merge it with; name two or more")
    order = sorted(range(len(caches)), key=lambda number: caches[number].manifest.digest)
    caches = [caches[each] for each in order]
    refuse_written(caches)
    for one, other in pairwise(caches):
        if one.manifest.digest == other.manifest.digest:
            twice = f"{one.name} is named twice" if one.name == other.name else f"{names([one, other])} are one cache"
            raise UsageError(
                f"{twice}, which adds nothing; name another (samples to add: kdtrain cache-teacher --refine)"
            )
    for name in ("vocab_size", "seq_len", "tokenizer_digest", "tokenizer_size", "document_mask"):
        for cache in caches[1:]:
            ours, theirs = (getattr(each.manifest.settings, name) for each in (caches[0], cache))
            if ours != theirs:
                raise UsageError(f"{caches[0].name} has {name} {ours} and {cache.name} {theirs}; they cannot be merged")
    texts = []
    for cache in caches:  # of validation only where there is nothing else
        found = tokens_of(cache.manifest)
        texts.append(sorted((name, sha) for name, sha in found.items() if name != "validation" or len(found) == 1))
    alike = max(texts.count(text) for text in texts)
    if alike == len(texts):
        return order, _sum(caches)
    if alike > 1:
        same = [cache for cache, text in zip(caches, texts, strict=True) if texts.count(text) > 1]
        raise UsageError(f"{names(same)} have rows in common and others do not; merge those of the same rows first")
    for cache in caches[1:]:
        if changed := list(differences(caches[0].manifest.codec.to_json(), cache.manifest.codec.to_json())):
            raise UsageError(
                f"{names([caches[0], cache])} keep different things of a distribution ({_shown(changed)}), and shards "
                "are appended as they are"
            )
    return order, None


def refuse_written(caches: Sequence[Stated]) -> None:
    """Raise UsageError if a student wrote the text of a cache, which belongs to one state of it."""
    for each in caches:
        if each.manifest.codec.written:
            raise UsageError(
                f"{each.name} holds what a student wrote, with its log p of each label, and is neither merged nor cut; "
                "train on the rounds of a run with kdtrain distill --rollouts RUN"
            )


def refuse_rows(cache: Stated, splits: Sequence[str], rows: tuple[int, int | None] | None) -> None:
    """Raise UsageError if a cache lacks one of the splits, or a split the rows (start and stop, None: the end)."""
    refuse_written([cache])
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


def names(caches: Sequence[Any]) -> str:
    """Join the names of several caches with "and"."""
    return " and ".join(cache.name for cache in caches)


def _shown(changed: Sequence[str]) -> str:
    return "; ".join(each.replace(" there", " in the one").replace(" here", " in the other") for each in changed[:3])


def _sum(caches: Sequence[Stated]) -> CacheSettings:
    """Combine the settings of one teacher's captures into those of a capture of all samples.

    UsageError: their grids do not make up one.
    """
    for cache in caches:
        codec, where = cache.manifest.codec, cache.name
        if not codec.taught:
            raise UsageError(f"{where} has the same rows as the others and no targets: there is nothing to add")
        if not codec.counts_only:  # the top-k of a sum is not in two top-ks
            raise UsageError(f"{where} has the same rows as the others; only caches of samples alone add up")
        if cache.manifest.settings.is_in_pieces:
            raise UsageError(
                f"{where} was appended or cut; add up the caches it was made of, then append or cut the sum"
            )
    first = caches[0]
    total = sum(cache.manifest.codec.num_samples for cache in caches)
    for cache in caches[1:]:
        if tokens_of(cache.manifest) != tokens_of(first.manifest):
            raise UsageError(
                f"{names([first, cache])} have the same rows to train on and others to validate on; cut both with "
                "kdtrain subset, or capture the same text"
            )
        if who(cache.manifest.settings) != who(first.manifest.settings):
            raise UsageError(
                f"{names([first, cache])} are of several teachers over the same rows, and samples of one teacher "
                "alone add up; train on all with kdtrain distill --cache A --cache B --cache-weights X,X"
            )
    if total > 255:
        raise UsageError(
            f"{names(caches)} have {total} samples per token together; counts are kept in 8 bits, so 255 are the most"
        )
    points = dict[Fraction, Stated]()
    hint = "draw others with kdtrain cache-teacher --refine CACHE"
    for cache in caches:
        settings = cache.manifest.settings
        number = settings.codec.num_samples
        offset = settings.grid_offset
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
            raise UsageError(f"{names([first, cache])} are of one teacher and differ ({_shown(changed)}): {hint}")
    start = min(points)
    if any(start + Fraction(i, total) not in points for i in range(total)):
        raise UsageError(
            f"{names(caches)} hold {total} samples that are not one even grid: {hint}, and merge all of it"
        )
    plain = min(caches, key=lambda cache: cache.manifest.settings.grid_offset or Fraction(0))
    settings = plain.manifest.settings
    return replace(settings.on_grid(start), codec=replace(settings.codec, num_samples=total))


def tokens_of(manifest: Manifest) -> dict[str, str]:
    """Return the digest of the tokens of each split."""
    return {split: each["tokens_sha256"] for split, each in manifest.splits.items()}


def who(settings: CacheSettings) -> dict[str, Any]:
    """Identify a teacher by its record, without its name where its weights have a digest."""
    teacher = settings.teacher or {}
    return {name: value for name, value in teacher.items() if name != "spec" or "weights_digest" not in teacher}


def _comparable(cache: Stated) -> dict[str, Any]:
    """Return the settings that two caches must have in common for their samples to add up."""
    settings = cache.manifest.settings
    codec = replace(settings.codec, num_samples=1)
    return replace(settings, codec=codec, sampling=None, teacher=who(settings)).to_json()
