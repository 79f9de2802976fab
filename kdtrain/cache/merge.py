"""Merging caches: samples of the same rows are added, other rows are appended.

Same rows, one teacher: grids of samples that interleave become one finer grid (`cache-teacher --refine` draws the
points between those of a cache); the result is bit by bit the cache that one capture would have made. Same rows,
several teachers: the result holds samples of their mixture (`adding`). Other rows: the shards are appended undecoded
(`pieces`); a validation split that all share is kept once.

Caches are sorted by their digests first, so that the order in which they are named does not matter.
"""

import logging
from collections.abc import Iterator, Sequence
from dataclasses import replace
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np

from kdtrain.cache.adding import ADDABLE, add, total_shares, whole_shares
from kdtrain.cache.codec import grid_name, grid_offset, uniforms
from kdtrain.cache.common import with_common_rows
from kdtrain.cache.compression import Arrays
from kdtrain.cache.folder import differences
from kdtrain.cache.format import BROKEN, PIECES
from kdtrain.cache.manifest import CacheSettings, Manifest
from kdtrain.cache.pieces import Piece, TokenizerFiles, parent_record, write_pieces
from kdtrain.cache.reader import Cache
from kdtrain.cache.rounds import Progress
from kdtrain.cache.shard_writer import ShardRows
from kdtrain.cache.writer import CacheBuilder
from kdtrain.data.packing import PackedRow
from kdtrain.errors import UsageError, printable
from kdtrain.files import json_digest
from kdtrain.objective.targets import SparseTargets

log = logging.getLogger("kdtrain")

MIXTURE = "mixture"
"""`sampling` of samples that are not of one grid."""
_BATCH = 16
_NAME = 60


def merge(
    caches: Sequence[Cache], out: Path, weights: Sequence[Fraction] | None = None, progress: Progress | None = None
) -> Manifest:
    """Merge finished caches into the folder `out`; an interrupted merge of the same caches is resumed.

    weights: of the teachers of caches of the same rows, above 0; by default their numbers of samples.

    UsageError: the caches do not fit together (named, with the reason), or `out` holds something else. RunError: a
    shard is damaged, the disk is full or cannot be written.
    """
    if len(caches) < 2:
        raise UsageError("there is one cache and nothing to merge it with; name two or more")
    if weights is not None and len(weights) != len(caches):
        raise UsageError(f"{len(weights)} weights for {len(caches)} caches; give one a cache")
    order = sorted(range(len(caches)), key=lambda number: caches[number].manifest.digest)
    caches, weights = [caches[each] for each in order], None if weights is None else [weights[each] for each in order]
    for cache in caches[1:]:
        _refuse_unlike(caches[0], cache)
    texts = [_text(cache) for cache in caches]
    if len(set(texts)) == 1:
        return _add(caches, out, weights, progress)
    if len(set(texts)) < len(caches):
        same = [cache for cache, text in zip(caches, texts, strict=True) if texts.count(text) > 1]
        raise UsageError(f"{_names(same)} have rows in common and others do not; merge those of the same rows first")
    if weights is not None:
        raise UsageError(f"{_names(caches)} have different rows, which weights mean nothing for; leave --weights out")
    return _append(caches, out, progress)


def _names(caches: Sequence[Cache]) -> str:
    return " and ".join(str(cache.folder) for cache in caches)


def _shown(changed: Sequence[str]) -> str:
    return "; ".join(each.replace(" there", " in the one").replace(" asked", " in the other") for each in changed[:3])


def _text(cache: Cache) -> tuple[tuple[str, str], ...]:
    """The rows of a cache; of validation only where there is nothing else."""
    found = {split: each["tokens_sha256"] for split, each in cache.manifest.splits.items()}
    return tuple(sorted((name, sha) for name, sha in found.items() if name != "validation" or len(found) == 1))


def _refuse_unlike(one: Cache, other: Cache) -> None:
    """UsageError: a student could not learn from both."""
    names = ("vocab_size", "seq_len", "tokenizer_digest", "tokenizer_size", "document_mask")
    for name in names:
        ours, theirs = (getattr(cache.manifest.settings, name) for cache in (one, other))
        if ours != theirs:
            raise UsageError(f"{one.folder} has {name} {ours} and {other.folder} {theirs}; they cannot be merged")


# Adding ---------------------------------------------------------------------------------------------------------------


def _add(caches: Sequence[Cache], out: Path, weights: Sequence[Fraction] | None, progress: Progress | None) -> Manifest:
    for cache in caches:
        _refuse_not_addable(cache)
    for cache in caches[1:]:
        if _tokens(cache) != _tokens(caches[0]):
            raise UsageError(
                f"{_names([caches[0], cache])} have the same rows to train on and others to validate on; cut both with "
                "kdtrain subset, or capture the same text"
            )
    numbers = [cache.manifest.codec.num_samples for cache in caches]
    number = sum(numbers)
    if number > 255:
        raise UsageError(
            f"{_names(caches)} have {number} samples a token together; counts are kept in 8 bits, so 255 are the most"
        )
    one = _equal([_who(cache) for cache in caches])
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
    return _sum(caches, out, replace(settings, codec=codec), shares, progress)


def _tokens(cache: Cache) -> dict[str, str]:
    return {split: each["tokens_sha256"] for split, each in cache.manifest.splits.items()}


def _refuse_not_addable(cache: Cache) -> None:
    codec, where = cache.manifest.codec, cache.folder
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


def _who(cache: Cache) -> dict[str, Any]:
    """A teacher but for its name, where its weights say who it is."""
    teacher = cache.manifest.settings.teacher or {}
    return {name: value for name, value in teacher.items() if name != "spec" or "weights_digest" not in teacher}


def _of_one(caches: Sequence[Cache]) -> CacheSettings:
    """The settings of a capture of all samples of one teacher. UsageError: their grids do not make up one."""
    first, points = caches[0], dict[Fraction, Cache]()
    total = sum(cache.manifest.codec.num_samples for cache in caches)
    hint = "draw others with kdtrain cache-teacher --refine CACHE"
    for cache in caches:
        settings = cache.manifest.settings
        number, offset = settings.codec.num_samples, grid_offset(settings.sampling)
        if offset is None:
            raise UsageError(
                f"{cache.folder} has {settings.sampling or 'independent'} samples, which do not interleave with others "
                "of the same teacher over the same rows; capture it again"
            )
        for point in ((offset + Fraction(i, number)) % 1 for i in range(number)):
            if point in points and settings.seed == points[point].manifest.settings.seed:
                raise UsageError(
                    f"{_names([points[point], cache])} hold the same samples of the same teacher (their grids "
                    f"coincide), which adds nothing: {hint}"
                )
            points[point] = cache
    ours = _comparable(first)
    for cache in caches[1:]:
        if changed := list(differences(ours, _comparable(cache))):
            shown = _shown(changed)
            raise UsageError(f"{_names([first, cache])} are of one teacher and differ ({shown}): {hint}")
    start = min(points)
    if any(start + Fraction(i, total) not in points for i in range(total)):
        raise UsageError(
            f"{_names(caches)} hold {total} samples that are not one even grid: {hint}, and merge all of it"
        )
    plain = min(caches, key=lambda cache: grid_offset(cache.manifest.settings.sampling) or Fraction(0))
    return replace(plain.manifest.settings, sampling=grid_name(start))


def _comparable(cache: Cache) -> dict[str, Any]:
    """What two caches whose samples add up to a capture have in common."""
    settings = cache.manifest.settings
    codec = replace(settings.codec, num_samples=1)
    return replace(settings, codec=codec, sampling=None, teacher=_who(cache)).to_json()


def _of_several(caches: Sequence[Cache], shares: Sequence[Fraction]) -> CacheSettings:
    members = [
        {"weight": float(share), "cache": cache.manifest.digest, "teacher": cache.manifest.settings.teacher}
        for share, cache in zip(shares, caches, strict=True)
    ]
    names = [f"{float(share):.3g} {_spec(cache)}" for share, cache in zip(shares, caches, strict=True)]
    teacher = {"spec": " + ".join(names), "mixture": members}
    return replace(caches[0].manifest.settings, teacher=teacher, sampling=MIXTURE)


def _spec(cache: Cache) -> str:
    return printable(str((cache.manifest.settings.teacher or {}).get("spec")))[:_NAME]


def _sum(
    caches: Sequence[Cache],
    out: Path,
    settings: CacheSettings,
    shares: Sequence[Fraction],
    progress: Progress | None,
) -> Manifest:
    length = settings.seq_len

    def kept(rows: ShardRows) -> Arrays:
        numbers = range(rows.first, rows.first + len(rows))
        parts = [cache[rows.split].read(numbers).targets for cache in caches]
        place_N = np.concatenate([uniforms(MIXTURE, settings.seed, rows.split, row, length) for row in numbers])
        assert all(isinstance(part, SparseTargets) for part in parts)
        found = add(parts, shares, place_N, settings.codec.absent)  # type: ignore[arg-type]
        return {name: values.reshape(len(rows), length, *values.shape[1:]) for name, values in found.items()}

    tokenizer = TokenizerFiles(caches[0])
    builder = CacheBuilder(
        out, settings, teacher=None, kept=kept, tokenizer=tokenizer, batch_size=_BATCH, progress=progress
    )
    try:
        if (there := builder.manifest) is None:
            builder.measured = None, _common_range(caches)
            builder.stated["parents"] = [
                parent_record(cache, float(each)) for cache, each in zip(caches, shares, strict=True)
            ]
            for split in caches[0]:
                builder.build(split, _rows(caches, split))
            there = builder.finish()
        elif {split: each["tokens_sha256"] for split, each in there.splits.items()} != _tokens(caches[0]):
            raise UsageError(f"{out} holds a finished cache of other rows; choose another --out or remove that folder")
    finally:
        builder.close()
    assert there is not None
    return there


def _rows(caches: Sequence[Cache], split: str) -> Iterator[PackedRow]:
    """The rows of caches that have the same, with no targets where any of the teachers had none."""
    for number, row in enumerate(zip(*(cache[split].rows() for cache in caches), strict=True)):
        masks = [each.loss_mask for each in row if (each.loss_mask != BROKEN).any()]
        same = all(np.array_equal(each, masks[0]) for each in masks)
        if not same or any(not np.array_equal(each.segments, row[0].segments) for each in row):
            raise UsageError(f"{_names(caches)} have other masks over the same tokens (row {number} of {split})")
        yield row[0] if len(masks) == len(row) else replace(row[0], loss_mask=np.full_like(row[0].loss_mask, BROKEN))


def _common_range(caches: Sequence[Cache]) -> Any:
    """The temperatures at which all caches are right; None for bare tokens."""
    spans = [cache.manifest.temperature_range for cache in caches]
    known = [span for span in spans if span is not None]
    if not known:
        return None
    rules = {span["rule"] for span in known}
    return {
        "min": max(span["min"] for span in known),
        "max": min(span["max"] for span in known),
        "worst_error": max(span["worst_error"] for span in known),
        "rule": known[0]["rule"] if len(rules) == 1 else "the range that all merged caches have in common",
    }


# Appending ------------------------------------------------------------------------------------------------------------


def _append(caches: Sequence[Cache], out: Path, progress: Progress | None) -> Manifest:
    first = caches[0].manifest
    for cache in caches[1:]:
        if changed := list(differences(first.codec.to_json(), cache.manifest.codec.to_json())):
            shown = _shown(changed)
            raise UsageError(
                f"{_names([caches[0], cache])} keep different things of a distribution ({shown}), and shards are "
                "appended as they are"
            )
    splits: dict[str, list[Piece]] = {}
    for split in dict.fromkeys(split for cache in caches for split in cache):
        holders = [cache for cache in caches if split in cache]
        if split == "validation" and len({_content(cache) for cache in holders}) == 1:
            holders = holders[:1]
        if found := with_common_rows(holders, split):
            log.warning("%s have rows of %s in common, which will be there twice", _names(found), split)
        shards = [(cache[split], number) for cache in holders for number in _numbers(cache, split)]
        splits[split] = [Piece(reader, number) for reader, number in shards]
    digests = [cache.manifest.digest for cache in caches]
    known = [cache.manifest.settings for cache in caches]
    data = known[0].data if _equal([each.data for each in known]) else _listed([each.data for each in known], "source")
    teacher = known[0].teacher
    if not _equal([each.teacher for each in known]):
        teacher = _listed([each.teacher or {} for each in known], "spec")
    settings = replace(
        known[0],
        data={**data, "appended": digests},
        teacher=teacher,
        sampling=known[0].sampling if _equal([each.sampling for each in known]) else MIXTURE,
        sequences={},
        format_version=PIECES,
    )
    fidelity = first.fidelity if _equal([cache.manifest.fidelity for cache in caches]) else None
    return write_pieces(
        out,
        settings,
        splits,
        tokenizer=caches[0],
        parents=[parent_record(cache) for cache in caches],
        measured=(fidelity, _common_range(caches)),
        progress=progress,
    )


def _numbers(cache: Cache, split: str) -> range:
    return range(len(cache.manifest.splits[split]["shards"]))


def _content(cache: Cache) -> tuple[str, str]:
    """What two validation splits that are the same have in common: rows and teacher."""
    return cache.manifest.splits["validation"]["tokens_sha256"], json_digest(_who(cache))


def _equal(values: Sequence[Any]) -> bool:
    return all(value == values[0] for value in values)


def _listed(records: Sequence[dict[str, Any]], name: str) -> dict[str, Any]:
    """One record of several, under a name that lists theirs."""
    names = dict.fromkeys(printable(str(record.get(name)))[:_NAME] for record in records)
    return {name: ", ".join(names), "members": list(records)}
