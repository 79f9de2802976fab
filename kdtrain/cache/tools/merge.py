"""Merging caches: samples of the same rows are added, other rows are appended.

Same rows, one teacher: grids of samples that interleave become one finer grid (`cache-teacher --refine` draws the
points between those of a cache); the result is bit by bit the cache that one capture would have made. A cache of
samples alone holds counts c with the mean D p, so the counts of all are added. The label has log sum w p, w the share
of each cache in all samples; the other numbers are weighted means. Other rows: the shards are appended undecoded
(`copy_shards`); a validation split that all share is kept once.

Caches are sorted by their digests first, so that the order in which they are named does not matter.

Shapes: N tokens, D samples of one cache, K samples of all.
"""

import logging
from collections.abc import Iterator, Sequence
from dataclasses import replace
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np

from kdtrain.cache.build.answers import Encode, ShardAnswers
from kdtrain.cache.build.rank_rounds import Progress
from kdtrain.cache.build.shard_writer import ShardRows
from kdtrain.cache.build.writer import CacheBuilder
from kdtrain.cache.format.compression import Arrays
from kdtrain.cache.format.manifest import CacheSettings, Manifest
from kdtrain.cache.format.names import BROKEN, PIECES
from kdtrain.cache.read.reader import Cache
from kdtrain.cache.read.rows import stored_rows
from kdtrain.cache.tools.copy_shards import Piece, TokenizerFiles, parent_record, write_pieces
from kdtrain.cache.tools.kept_mass import joined
from kdtrain.cache.tools.merge_plan import MIXTURE, names, plan, tokens_of, who, with_common_rows
from kdtrain.data.packed import PackedRow
from kdtrain.errors import UsageError, printable
from kdtrain.files import json_digest
from kdtrain.objective.targets import SparseTargets

_SHOWN = 60
"""Characters of a name among several."""

log = logging.getLogger("kdtrain")


def merge(caches: Sequence[Cache], out: Path, progress: Progress | None = None) -> Manifest:
    """Merge finished caches into the folder `out`; an interrupted merge of the same caches is resumed.

    UsageError: the caches do not fit together (named, with the reason), or `out` holds something else. RunError: a
    shard is damaged, the disk is full or cannot be written.
    """
    order, settings = plan(caches)
    caches = [caches[each] for each in order]
    return _append(caches, out, progress) if settings is None else _sum(caches, out, settings, progress)


def _sum(caches: Sequence[Cache], out: Path, settings: CacheSettings, progress: Progress | None) -> Manifest:
    numbers = [cache.manifest.codec.num_samples for cache in caches]
    shares = [float(Fraction(each, sum(numbers))) for each in numbers]

    builder = CacheBuilder(
        out,
        settings,
        teacher=_Added(caches, shares, settings),
        tokenizer=TokenizerFiles(caches[0]),
        progress=progress,
    )
    try:
        if (there := builder.manifest) is None:
            builder.measured = None, _common_range(caches)
            builder.stated["parents"] = [
                parent_record(cache, share) for cache, share in zip(caches, shares, strict=True)
            ]
            for split in caches[0]:
                builder.build(split, _rows(caches, split))
            there = builder.finish()
        elif {split: each["tokens_sha256"] for split, each in there.splits.items()} != tokens_of(caches[0]):
            raise UsageError(f"{out} holds a finished cache of other rows; choose another --out or remove that folder")
    finally:
        builder.close()
    assert there is not None
    return there


class _Added(ShardAnswers):
    """The samples of several caches of the same rows, added."""

    def __init__(self, caches: Sequence[Cache], shares: Sequence[float], settings: CacheSettings) -> None:
        self._caches, self._shares, self._absent = caches, shares, settings.codec.absent

    def rows(self, rows: ShardRows) -> tuple[ShardRows, Encode]:
        """As `ShardAnswers.rows`."""
        places = range(rows.first, rows.first + len(rows))
        parts: list[Any] = [cache[rows.split].read(places).targets for cache in self._caches]

        found = _added(parts, self._shares, self._absent)
        kept = {name: values.reshape(len(rows), -1, *values.shape[1:]) for name, values in found.items()}
        return rows, lambda: kept


def _added(parts: Sequence[SparseTargets], shares: Sequence[float], absent: int) -> Arrays:
    """What is kept of N tokens (see `codec.encode`) from the targets of several caches of them.

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


def _rows(caches: Sequence[Cache], split: str) -> Iterator[PackedRow]:
    """The rows of caches that have the same, with no targets where any of the teachers had none."""
    for number, row in enumerate(zip(*(stored_rows(cache[split]) for cache in caches), strict=True)):
        masks = [each.loss_mask for each in row if (each.loss_mask != BROKEN).any()]
        same = all(np.array_equal(each, masks[0]) for each in masks)
        if not same or any(not np.array_equal(each.segments, row[0].segments) for each in row):
            raise UsageError(f"{names(caches)} have other masks over the same tokens (row {number} of {split})")
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


def _append(caches: Sequence[Cache], out: Path, progress: Progress | None) -> Manifest:
    first = caches[0].manifest
    splits, written = dict[str, list[Piece]](), dict[str, dict[str, int]]()
    for split in dict.fromkeys(split for cache in caches for split in cache):
        holders = [cache for cache in caches if split in cache]
        if split == "validation":  # one is enough where rows and teacher are the same
            contents = {(cache.manifest.splits[split]["tokens_sha256"], json_digest(who(cache))) for cache in holders}
            holders = holders[:1] if len(contents) == 1 else holders
        if found := with_common_rows(holders, split):
            log.warning("%s have rows of %s in common, which will be there twice", names(found), split)
        shards = [(cache[split], len(cache.manifest.splits[split]["shards"])) for cache in holders]
        splits[split] = [Piece(reader, number) for reader, count in shards for number in range(count)]
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
        stated={"generated": written or None, "capture": joined([cache.manifest.capture for cache in caches])},
        progress=progress,
    )


def _listed(records: Sequence[dict[str, Any]], name: str) -> dict[str, Any]:
    """One record of several, under a name that lists theirs."""
    names = dict.fromkeys(printable(str(record.get(name)))[:_SHOWN] for record in records)
    return {name: ", ".join(names), "members": list(records)}


def _equal(values: Sequence[Any]) -> bool:
    return all(value == values[0] for value in values)
