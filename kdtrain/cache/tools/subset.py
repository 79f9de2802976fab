"""Cutting a cache: some of its rows as a cache of their own, without decoding them (`pieces`).

A fraction takes the rows whose tokens have the lowest hashes. So it does not depend on their order, a smaller fraction
of a cache lies in a larger one, and a tenth of a tenth is a hundredth of the whole, up to rounding. Rows with the same
tokens have the same hash; of these, the first are taken.
"""

from collections.abc import Sequence
from dataclasses import replace
from fractions import Fraction
from itertools import pairwise
from pathlib import Path

import numpy as np

from kdtrain.cache.build.rank_rounds import Progress
from kdtrain.cache.format.manifest import Manifest, Parent, first_rows
from kdtrain.cache.format.names import PIECES
from kdtrain.cache.read.reader import Cache
from kdtrain.cache.read.rows import stored_rows
from kdtrain.cache.tools.copy_shards import Piece, parent_record, write_pieces
from kdtrain.cache.tools.merge_plan import between, refuse_rows
from kdtrain.data.corpus import rank


def subset(
    cache: Cache,
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
    refuse_rows(cache, splits, rows)
    words = "" if fraction is None else f"fraction {float(fraction):.9g}"
    if rows is not None:
        words = f"{rows[0]}:{'' if rows[1] is None else rows[1]}"
    cut = {"of": manifest.digest, "rows": words, "splits": sorted(splits)}
    chosen = {}
    for split in splits:
        if fraction is None:
            chosen[split] = np.arange(*between(rows, len(cache[split])))
        else:
            ranks = [rank(row.tokens.astype("<u4").tobytes().hex()) for row in stored_rows(cache[split])]
            number = max(1, round(fraction * len(ranks)))
            chosen[split] = np.sort(np.argsort(ranks, kind="stable")[:number])
    pieces: dict[str, list[Piece]] = {split: [] for split in cache}
    for split in cache:
        reader = cache[split]
        for shard, (start, stop) in enumerate(pairwise(first_rows(manifest.splits[split]))):
            rows_n = np.arange(start, stop)
            if split in chosen:
                rows_n = chosen[split][(chosen[split] >= start) & (chosen[split] < stop)]
            if len(rows_n):
                pieces[split].append(Piece(reader, shard, None if len(rows_n) == stop - start else rows_n - start))
    parent: Parent = {**parent_record(cache), "rows": words, "splits": sorted(splits)}
    return write_pieces(
        out,
        replace(manifest.settings, data={**manifest.settings.data, "cut": cut}, sequences={}, format_version=PIECES),
        pieces,
        tokenizer=cache,
        parents=[parent],
        # The sample that it was measured on is of the validation split.
        measured=(None if "validation" in splits else manifest.fidelity, manifest.temperature_range),
        stated={
            "capture": None if "validation" in splits else manifest.capture,
            # of a cache with other text beside it, which rows were written is not known
            **({"generated": None} if "temperature" not in manifest.settings.data.get("generated", {}) else {}),
        },
        progress=progress,
    )
