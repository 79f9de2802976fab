"""Building a cache from the files of a source: one pass over them, each row into its split, shard after shard.

A row goes into the validation split by a hash of its tokens, as all text does; of a source of few rows by its place in
the order of hashes, so that no split is empty. The pass is repeated when an interrupted import resumes, but shards that
are there are not encoded again.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from kdtrain.cache.build.writer import CacheBuilder
from kdtrain.cache.format.codec import CodecSpec, decode
from kdtrain.cache.format.manifest import CacheSettings, Manifest
from kdtrain.cache.tools.alignment import SHIFTS, DetectedShift, detect
from kdtrain.cache.tools.kept_mass import more_than_promised, outside
from kdtrain.data.corpus import assign, by_hash, rank
from kdtrain.data.packed import PackedRow
from kdtrain.errors import UsageError
from kdtrain.objective.batch import Batch
from kdtrain.plugins.layouts.files import SourceFile
from kdtrain.plugins.layouts.layout import Record
from kdtrain.plugins.layouts.rows import Cutter, Tally

_SAMPLE, _PLACES, _POSITIONS = 64, 8, 512
"""Rows that are tried before the work begins, the places in the source they are from, and the labels of each."""
_STRANGE = 0.05
"""Share of positions without a distribution from which on the source is taken for something else."""
_SPLITS = ("train", "validation")


def sample(files: Sequence[SourceFile], names: Sequence[str] | None = None) -> Iterator[tuple[str, Record]]:
    """Up to `_SAMPLE` records, from evenly spaced places of a source; `names`: only these columns."""
    sizes = [len(each) for each in files]
    total = sum(sizes)
    places = min(_PLACES, max(1, total // (_SAMPLE // _PLACES)))
    number = -(-min(_SAMPLE, total) // places)
    for place in range(places):
        first = place * total // places
        for file, size in zip(files, sizes, strict=True):
            if first < size:
                yield from (each for each, _ in zip(file.records(names, file.near(first)), range(number), strict=False))
                break
            first -= size


def try_sample(files: Sequence[SourceFile], cutter: Cutter) -> tuple[DetectedShift, Tally]:
    """What the detector finds in a sample as it would be stored, and its tally.

    UsageError: the entries are not about the next token, are no log-probabilities, or were renormalised.
    """
    short = replace(cutter, seq_len=min(cutter.seq_len, _POSITIONS))
    tally, rows = Tally(), list[PackedRow]()
    for where, record in sample(files):
        rows += [row for row, _ in zip(short.sequences(record, where, tally), range(1), strict=False)]
    tried = tally.counted + tally.no_distribution + tally.too_few
    if tally.too_few > _STRANGE * max(1, tried):
        raise UsageError(
            f"{files[0].path}: {tally.too_few:,} of {tried:,} positions of a sample have fewer than "
            f"{cutter.codec.top_k} entries; choose a smaller --top-k"
        )
    if tally.no_distribution > _STRANGE * max(1, tried):
        raise UsageError(
            f"{files[0].path}: {tally.no_distribution:,} of {tried:,} positions of a sample are no distributions: "
            "their entries are NaN, above 0, sum to more than 1, or have an id twice or beyond the vocabulary; they "
            "must be natural logarithms of probabilities, coded as the options say"
        )
    batches = []
    for row in rows:
        tokens, mask, segments = (torch.from_numpy(each[None]) for each in (row.tokens, row.loss_mask, row.segments))
        targets = decode({name: values[None] for name, values in row.kept.items()}, cutter.codec)
        batches.append(Batch(tokens.long(), mask, segments.long(), targets))
    found = detect(batches)
    if found.shift:
        there = cutter.shift + found.shift
        advice = f"give --shift {there}" if there in SHIFTS else "the source is shifted further than --shift can mend"
        side = "before" if found.shift < 0 else "after"
        raise UsageError(f"{files[0].path}: the entries are about the token {side} the next one: {found}; {advice}")
    if (labels := outside(batches)) is not None and labels.wrong:
        raise UsageError(f"{files[0].path}: {labels}; import log-probabilities as the teacher gives them")
    return found, tally


def build(
    folder: Path,
    settings: CacheSettings,
    files: Sequence[SourceFile],
    cutter: Cutter,
    origin: Mapping[str, Any],
    *,
    tokenizer: Any,
    progress: Callable[[int, int], None],
) -> Manifest:
    """Build or resume the cache; a finished one is returned as it is. `progress`: rows done, and of how many.

    UsageError: the folder holds something else, a record does not fit, or a split would have no sequence. RunError:
    the folder cannot be written.
    """
    builder = CacheBuilder(folder, settings, teacher=None, tokenizer=tokenizer)
    try:
        if builder.manifest is not None:
            return builder.manifest
        for split in _SPLITS:
            builder.open_split(split)
        split_of, tally = _splitter(files, cutter), Tally()
        total = sum(len(each) for each in files)
        for file in files:
            for where, record in file.records():
                split = split_of(tally.rows, record[cutter.layout.columns.tokens])
                for row in cutter.sequences(record, where, tally):
                    builder.add(split, row)
                progress(tally.rows, total)
        for split, own in builder.splits.items():
            builder.end_split(split)
            if not own.taken:
                raise UsageError(f"{files[0].path}: there is no sequence for {split}: {tally.rows} rows are too few")
        builder.stated["origin"] = {**origin, **summary(tally, cutter.codec)}
        manifest = builder.finish()
        assert manifest is not None
        return manifest
    finally:
        builder.close()


def _splitter(files: Sequence[SourceFile], cutter: Cutter) -> Callable[[int, np.ndarray], str]:
    """The split of a row, by its number and tokens."""
    if sum(len(each) for each in files) > 1000:  # of fewer rows the hashes of all are compared first
        return lambda number, tokens: by_hash(_rank(tokens), _SPLITS[1:])
    name = cutter.layout.columns.tokens
    ranks = [_rank(record[name]) for file in files for _, record in file.records([name])]
    assigned = assign(ranks, _SPLITS[1:])
    return lambda number, tokens: assigned[number]


def _rank(tokens: np.ndarray) -> float:
    return rank(tokens.astype("<u4").tobytes().hex())


def summary(tally: Tally, spec: CodecSpec) -> dict[str, Any]:
    """The tally for the manifest: what was left out, the kept mass, and what is known of the loss that this costs.

    With the mass m inside of the top-k the rest is one bucket of V - K entries, spread evenly. KL(full || cache) is
    (1 - m) (log(V - K) - H), H >= 0 the entropy within the rest, and so at most (1 - m) log(V - K). Nothing is claimed
    (None) where the labels show that m is not the teacher's.
    """
    counted = max(1, tally.counted)
    mass, rest = min(1.0, tally.kept_mass / counted), spec.vocab_size - spec.top_k
    kept = tally.labels_kept / counted
    counts = {name: value for name, value in asdict(tally).items() if isinstance(value, int) and name != "labels_kept"}
    return {
        **counts,
        "kept_mass": round(mass, 6),
        "kl_at_most": None
        if more_than_promised(1 - kept, 1 - mass)
        else round((1 - mass) * float(np.log(max(1, rest))), 6),
        "label_loss": round(tally.label_loss / counted, 6),
        "labels_kept": round(kept, 6),
    }
