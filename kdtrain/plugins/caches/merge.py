"""Caches made of others: samples of the same rows are added, shards of other rows are appended, and some rows are cut.

Same rows, one teacher: grids of samples that interleave become one finer grid (`cache-teacher --refine` draws the
points between those of a cache); the result is bit by bit the cache that one capture would have made. A cache of
samples alone holds counts c with the mean D p, so the counts of all are added. The label has log sum w p, w the share
of each cache in all samples; the other numbers are weighted means.

Other rows: the shards are appended undecoded; a validation split that all share is kept once. A whole shard is the same
file again, a hard link where the disk allows one. Of a shard that is cut, the stored bytes of each sequence are copied,
with the lists of the whole shard: few sequences of one take more bytes per token. The settings are `in_pieces`: the
manifest states how many sequences each shard has.

A fraction takes the rows whose tokens have the lowest hashes. So it does not depend on their order, a smaller fraction
of a cache lies in a larger one, and a tenth of a tenth is a hundredth of the whole, up to rounding. Rows with the same
tokens have the same hash; of these, the first are taken.

Caches are sorted by their digests first, so that the order in which they are named does not matter. A resume keeps the
shards that are there, as a capture does.

Shapes: N tokens, D samples of one cache, K samples of all.
"""

import json
import os
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from fractions import Fraction
from functools import partial
from itertools import combinations, pairwise
from pathlib import Path
from typing import Any

import numpy as np

from kdtrain.cache.format.manifest import CacheSettings, Manifest
from kdtrain.cache.read.reader import CacheReader, LocalCache
from kdtrain.cache.write.answers import ShardAnswers, ShardRows
from kdtrain.cache.write.writer import CacheBuilder
from kdtrain.data.corpus import rank
from kdtrain.data.packed import PackedRow
from kdtrain.errors import UsageError, log, printable
from kdtrain.files import file_digest, json_digest
from kdtrain.objective.targets import SparseTargets
from kdtrain.plugins.caches.plan import Stated, between, names, plan, refuse_rows, tokens_of, who

_SHOWN = 60
"""Characters of a name among several."""
_ANCESTRY = 2**18
"""Characters of a parent's own parents that a manifest takes over: one of 32 MiB could not be read."""


Progress = Callable[[int, int | None], None]
"""As `CacheBuilder` calls it."""


def merge(caches: Sequence[LocalCache], out: Path, progress: Progress | None = None) -> Manifest:
    """Merge finished caches into the folder `out`; an interrupted merge of the same caches is resumed.

    UsageError: the caches do not fit together (named, with the reason), or `out` holds something else. RunError: a
    shard is damaged, the disk is full or cannot be written.
    """
    order, settings = plan([Stated(cache.name, cache.manifest) for cache in caches])
    caches = [caches[each] for each in order]
    return _append(caches, out, progress) if settings is None else _sum(caches, out, settings, progress)


def _make(
    out: Path,
    settings: CacheSettings,
    fill: Callable[[CacheBuilder], None],
    tokenizer: LocalCache,
    stated: Mapping[str, Any],
    measured: tuple[Any, Any],
    progress: Progress | None,
    answers: ShardAnswers | None = None,
) -> Manifest:
    """Build the cache in `out` by `fill`, unless it is finished. measured: fidelity and range of T."""
    builder = CacheBuilder(out, settings, teacher=answers, tokenizer=TokenizerFiles(tokenizer), progress=progress)
    with closing(builder):
        if builder.manifest is None:
            builder.measured = measured
            builder.stated = dict(stated)
            fill(builder)
            builder.finish()
        assert builder.manifest is not None
        return builder.manifest


def _sum(caches: Sequence[LocalCache], out: Path, settings: CacheSettings, progress: Progress | None) -> Manifest:
    numbers = [cache.manifest.codec.num_samples for cache in caches]
    shares = [float(Fraction(each, sum(numbers))) for each in numbers]
    parents = [parent_record(cache, share) for cache, share in zip(caches, shares, strict=True)]

    def add(builder: CacheBuilder) -> None:
        for split in caches[0]:
            builder.build(split, _rows(caches, split))

    answers = _Added(caches, shares, settings)
    measured = (None, _common_range(caches))
    made = _make(out, settings, add, caches[0], {"parents": parents}, measured, progress, answers)
    if tokens_of(made) != tokens_of(caches[0].manifest):
        raise UsageError(f"{out} holds a finished cache of other rows; choose another --out or remove that folder")
    return made


class _Added(ShardAnswers):
    """Answers that add up the samples of several caches of the same rows."""

    def __init__(self, caches: Sequence[LocalCache], shares: Sequence[float], settings: CacheSettings) -> None:
        self._caches = caches
        self._shares = shares
        self._absent = settings.codec.absent

    def rows(self, rows: ShardRows) -> tuple[ShardRows, Callable[[], dict[str, np.ndarray]]]:
        """Add up the samples of the caches; the rest is as in `ShardAnswers.rows`."""
        places = range(rows.first, rows.first + len(rows))
        parts: list[Any] = [cache[rows.split].read(places).targets for cache in self._caches]

        found = _added(parts, self._shares, self._absent)
        kept = {name: values.reshape(len(rows), -1, *values.shape[1:]) for name, values in found.items()}
        return rows, lambda: kept


def _added(parts: Sequence[SparseTargets], shares: Sequence[float], absent: int) -> dict[str, np.ndarray]:
    """Add up the targets of N tokens in several caches, as the arrays that `codec.encode` makes.

    shares: one a cache, summing to 1. absent: the id of an absent entry.
    """
    ids_NK, counts_NK = (
        np.concatenate([each.numpy() for each in found], -1)
        for found in ([part.ids for part in parts], [part.counts.long() for part in parts])
    )
    order_NK = np.argsort(ids_NK, axis=-1, kind="stable")
    ids_NK, counts_NK = (np.take_along_axis(each, order_NK, -1) for each in (ids_NK, counts_NK))
    # the place of each distinct id, in ascending order; zeros in the columns left over
    group_NK = np.cumsum(np.diff(ids_NK, axis=-1, prepend=-1) != 0, axis=-1) - 1
    rows_N1 = np.arange(len(ids_NK))[:, None]
    united_NK, total_NK = np.zeros_like(ids_NK), np.zeros_like(counts_NK)
    united_NK[rows_N1, group_NK] = ids_NK
    np.add.at(total_NK, (rows_N1, group_NK), counts_NK)
    label_N = np.zeros(len(ids_NK))
    means: Any = {"tail": 0.0, "logit_mean": 0.0, "logit_std": 0.0}
    for part, share in zip(parts, shares, strict=True):
        label_N += share * np.exp(part.label_logprob.numpy().astype(np.float64))
        for name in means:
            means[name] = means[name] + share * getattr(part, name).numpy().astype(np.float64)
    with np.errstate(divide="ignore"):
        label_N = np.log(label_N)
    return {
        "ids": np.where(total_NK > 0, united_NK, absent),
        "counts": total_NK.astype(np.uint8),
        "label_logprob": label_N,
        **means,
    }


def _rows(caches: Sequence[LocalCache], split: str) -> Iterator[PackedRow]:
    """Yield the rows that caches share, without targets where any of the teachers had none.

    UsageError: their masks differ over the same tokens.
    """
    for number, row in enumerate(zip(*(cache[split].rows() for cache in caches), strict=True)):
        found = ShardRows.of(split, 0, number, row)
        masks = found.loss_mask[~found.broken]
        if (masks != masks[:1]).any() or (found.segments != found.segments[0]).any():
            raise UsageError(f"{names(caches)} have other masks over the same tokens (row {number} of {split})")
        yield row[int(found.broken.argmax())]  # the first where none is broken


def _common_range(caches: Sequence[LocalCache]) -> Any:
    """Intersect the ranges of temperatures at which the caches are right; return None for bare tokens."""
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


def _append(caches: Sequence[LocalCache], out: Path, progress: Progress | None) -> Manifest:
    first = caches[0].manifest
    splits, written = dict[str, list[_Piece]](), dict[str, dict[str, int]]()
    for split in dict.fromkeys(split for cache in caches for split in cache):
        holders = [cache for cache in caches if split in cache]
        if split == "validation":  # one is enough where rows and teacher are the same
            contents = {
                (cache.manifest.splits[split]["tokens_sha256"], json_digest(who(cache.manifest.settings)))
                for cache in holders
            }
            holders = holders[:1] if len(contents) == 1 else holders
        shards = [(cache[split], len(cache.manifest.splits[split]["shards"])) for cache in holders]
        splits[split] = [_Piece(reader, number) for reader, count in shards for number in range(count)]
        counts = [each for cache in holders if (each := (cache.manifest.generated or {}).get(split))]
        if counts:
            written[split] = {name: sum(each.get(name, 0) for each in counts) for name in counts[0]}
    digests = [cache.manifest.digest for cache in caches]
    known = [cache.manifest.settings for cache in caches]
    data = known[0].data if _equal([each.data for each in known]) else _listed([each.data for each in known], "source")
    ends = {token for cache in caches for token in cache.manifest.end_tokens}
    if ends and "generated" not in data:  # by several teachers, or beside other text
        data = {**data, "generated": {"end_tokens": sorted(ends)}}
    teacher = known[0].teacher
    if not _equal([each.teacher for each in known]):
        teacher = _listed([each.teacher or {} for each in known], "spec")
    mixed = not _equal([each.sampling for each in known])
    settings = known[0].in_pieces(mixed, data={**data, "appended": digests}, teacher=teacher)
    fidelity = first.fidelity if _equal([cache.manifest.fidelity for cache in caches]) else None
    stated = {
        "parents": [parent_record(cache) for cache in caches],
        "capture": joined([cache.manifest.capture for cache in caches]),
        "generated": written or None,
    }
    measured = (fidelity, _common_range(caches))
    return _make(out, settings, partial(_copy, splits), caches[0], stated, measured, progress)


def _listed(records: Sequence[dict[str, Any]], name: str) -> dict[str, Any]:
    """Join several records in one, under a name that lists their names."""
    names = dict.fromkeys(printable(str(record.get(name)))[:_SHOWN] for record in records)
    return {name: ", ".join(names), "members": list(records)}


def _equal(values: Sequence[Any]) -> bool:
    return all(value == values[0] for value in values)


def subset(
    cache: LocalCache,
    out: Path,
    *,
    rows: tuple[int, int | None] | None = None,
    fraction: Fraction | None = None,
    splits: Sequence[str] = ("train",),
    progress: Progress | None = None,
) -> Manifest:
    """Cut a finished cache into the folder `out`; an interrupted cut of the same rows is resumed.

    rows: start and stop (None: the end); or fraction: above 0, at most 1, of which one row is the least. splits: those
    that are cut, the others stay whole.

    UsageError: the cache has no such rows or split, or `out` holds something else. RunError: a shard is damaged, the
    disk is full or cannot be written.
    """
    manifest = cache.manifest
    assert (rows is None) != (fraction is None)
    refuse_rows(Stated(cache.name, manifest), splits, rows)
    words = "" if fraction is None else f"fraction {float(fraction):.9g}"
    if rows is not None:
        words = f"{rows[0]}:{'' if rows[1] is None else rows[1]}"
    cut = {"of": manifest.digest, "rows": words, "splits": sorted(splits)}
    chosen = {}
    for split in splits:
        if fraction is None:
            chosen[split] = np.arange(*between(rows, len(cache[split])))
        else:
            ranks = [rank(row.tokens.astype("<u4").tobytes().hex()) for row in cache[split].rows()]
            number = max(1, round(fraction * len(ranks)))
            chosen[split] = np.sort(np.argsort(ranks, kind="stable")[:number])
    pieces: dict[str, list[_Piece]] = {split: [] for split in cache}
    for split in cache:
        reader = cache[split]
        for shard, (start, stop) in enumerate(pairwise(reader.first_rows.tolist())):
            rows_n = np.arange(start, stop)
            if split in chosen:
                rows_n = chosen[split][(chosen[split] >= start) & (chosen[split] < stop)]
            if len(rows_n):
                pieces[split].append(_Piece(reader, shard, None if len(rows_n) == stop - start else rows_n - start))
    parent = {**parent_record(cache), "rows": words, "splits": sorted(splits)}
    settings = manifest.settings.in_pieces(data={**manifest.settings.data, "cut": cut})
    # The sample that fidelity and capture were measured on is of the validation split.
    whole = "validation" not in splits
    stated: dict[str, Any] = {"parents": [parent], "capture": manifest.capture if whole else None}
    if "temperature" not in manifest.settings.data.get("generated", {}):
        stated["generated"] = None  # of a cache with other text beside it, which rows were written is not known
    measured = (manifest.fidelity if whole else None, manifest.temperature_range)
    return _make(out, settings, partial(_copy, pieces), cache, stated, measured, progress)


# Pieces -------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Piece:
    """A shard of another cache, or some of its sequences."""

    reader: CacheReader
    shard: int
    rows: np.ndarray | None = None
    """Which, within the shard, ascending; None: all."""

    def __len__(self) -> int:
        shards = self.reader.manifest.splits[self.reader.split]["shards"]
        return shards[self.shard]["sequences"] if self.rows is None else len(self.rows)

    def text(self, number: int, first: int) -> ShardRows:
        """Read the text of this piece as the shard `number`.

        first: the first sequence that a cut shard states; a whole shard keeps its own.
        """
        split = self.reader.manifest.splits[self.reader.split]
        start, stop = self.reader.first_rows[self.shard : self.shard + 2].tolist()
        if self.rows is None:
            first = split["shards"][self.shard].get("first_sequence", start)
        rows = self.reader.rows(np.arange(start, stop) if self.rows is None else start + self.rows)
        return ShardRows.of(self.reader.split, number, first, [*rows])

    def copy(self, part: ShardRows, path: Path) -> tuple[dict[str, int], list[str]]:
        """Write the shard `part` to `path`: its stored bytes by data set, and its broken sequences."""
        # renaming one link over another to the same file does nothing
        link = not os.path.lexists(path.with_name(f"{part.name}.h5"))
        stored = self.reader.copy_shard(self.shard, path, self.rows, first=part.first, link=link)
        # The numbers of the rows here: those of the sidecar it came with are of another cache.
        return stored, [f"{part.split} {part.first + row}" for row in np.flatnonzero(part.broken)]


def _copy(splits: Mapping[str, Sequence[_Piece]], builder: CacheBuilder) -> None:
    """Publish a shard for each piece by a builder."""
    builder.rounds.total = sum(len(piece) for pieces in splits.values() for piece in pieces)
    for split, pieces in splits.items():
        hashes = dict[CacheReader, set[int]]()
        own = builder.open_split(split)
        for number, piece in enumerate(pieces):
            part = piece.text(number, own.taken)
            teacher = json_digest(who(piece.reader.manifest.settings))  # the same text by two is not the same row
            hashes.setdefault(piece.reader, set()).update(hash((teacher, row.tobytes())) for row in part.tokens)
            builder.add_shard(part, partial(piece.copy, part))
        builder.end_split(split)
        for pair in combinations(hashes, 2):
            if not hashes[pair[0]].isdisjoint(hashes[pair[1]]):
                log.warning("%s have rows of %s in common, which will be there twice", names(pair), split)
                break


class TokenizerFiles:
    """The tokenizer in the folder of a cache, as a builder of another takes it."""

    def __init__(self, cache: LocalCache) -> None:
        self._folder = cache.tokenizer
        self._digests = cache.manifest.tokenizer_files
        self._remote = cache.remote

    def save_pretrained(self, folder: Path) -> None:
        """Copy the files. UsageError: one is missing or damaged. RunError: one cannot be fetched."""
        if self._remote is not None:
            self._remote.bring_tokenizer()
        for name, digest in self._digests.items():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            try:
                found = file_digest(self._folder / name)
                shutil.copyfile(self._folder / name, folder / name)
            except (OSError, ValueError) as error:
                raise UsageError(f"{self._folder / name} cannot be read ({error})") from None
            if found != digest:
                raise UsageError(f"{self._folder / name}: its content changed (SHA-256 differs)")


def parent_record(cache: LocalCache, weight: float = 1.0) -> dict[str, Any]:
    """Return the record of `cache` that the manifest of a cache made from it holds."""
    manifest = cache.manifest
    found: dict[str, Any] = {
        "digest": manifest.digest,
        "teacher": manifest.settings.teacher,
        "num_samples": manifest.codec.num_samples,
        "weight": weight,
        "sequences": {split: each["sequences"] for split, each in manifest.splits.items()},
    }
    if manifest.parents and len(json.dumps(manifest.parents, separators=(",", ":"))) < _ANCESTRY:
        found["parents"] = manifest.parents
    if manifest.origin:
        found["origin"] = manifest.origin
    return found


def joined(captures: Sequence[Mapping[str, Any] | None]) -> dict[str, Any] | None:
    """Average `kept_mass` over the samples of several caches in one split; return None where one has no number."""
    found = [dict(each or {}) for each in captures]
    if all(each == found[0] for each in found):
        return found[0] or None
    names = ("positions", "kept_mass", "mass_loss")
    numbers = [[each.get(name) for name in names] for each in found]
    if any(not isinstance(value, int | float) for row in numbers for value in row):
        return None
    sizes, *means = zip(*numbers, strict=True)
    total = max(1, sum(sizes))
    both = [round(sum(size * value for size, value in zip(sizes, mean, strict=True)) / total, 6) for mean in means]
    return {**found[0], **dict(zip(names, (sum(sizes), *both), strict=True))}
