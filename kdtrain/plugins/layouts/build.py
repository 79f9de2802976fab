"""Building a cache from the files of a source: one pass over them, each row into its split, shard after shard.

A row goes into the validation split by a hash of its tokens, as all text does; of a source of few rows by its place in
the order of hashes, so that no split is empty. The pass is repeated when an interrupted import resumes, but shards that
are there are not encoded again.
"""

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch

from kdtrain.cache.format.codec import decode
from kdtrain.cache.format.manifest import CacheSettings, Manifest
from kdtrain.cache.format.spec import CodecSpec
from kdtrain.cache.tools.self_check import Outside, detect
from kdtrain.cache.write.writer import CacheBuilder
from kdtrain.data.corpus import assign, by_hash, rank
from kdtrain.errors import UsageError
from kdtrain.objective.batch import Batch
from kdtrain.plugins.layouts.layout import Record
from kdtrain.plugins.layouts.rows import COUNTS, Cutter
from kdtrain.plugins.layouts.source import SourceFile

_SAMPLE, _PLACES, _POSITIONS = 64, 8, 512
"""Rows that are tried before the work begins, the places in the source they are from, and the labels of each."""
_STRANGE = 0.05
"""Share of positions without a distribution from which on the source is taken for something else."""
_FEW_ROWS = 1000
_SPLITS = ("train", "validation")


def sample(files: Sequence[SourceFile]) -> Iterator[tuple[str, Record]]:
    """Yield up to `_SAMPLE` records, from evenly spaced places of a source."""
    total = sum(map(len, files))
    places = min(_PLACES, max(1, total // (_SAMPLE // _PLACES)))
    for place in range(places):
        first = place * total // places
        for file in files:
            if first < len(file):
                yield from islice(file.records(begin=first / len(file)), -(-min(_SAMPLE, total) // places))
                break
            first -= len(file)


def try_sample(files: Sequence[SourceFile], cutter: Cutter) -> Any:
    """Test a sample in the form in which it would be stored, and return the shift that `detect` finds.

    UsageError: the entries are not about the next token, are no log-probabilities, or were renormalised.
    """
    short = replace(cutter, seq_len=min(cutter.seq_len, _POSITIONS))
    first = files[0].path
    tally = defaultdict[str, Any](int)
    batches = []
    for where, record in sample(files):
        for row in islice(short.sequences(record, where, tally), 1):
            tokens, mask, segments = (
                torch.from_numpy(each[None]) for each in (row.tokens, row.loss_mask, row.segments)
            )
            targets = decode({name: values[None] for name, values in row.kept.items()}, cutter.codec)
            batches.append(Batch(tokens.long(), mask, segments.long(), targets))
    tried = tally["counted"] + tally["no_distribution"] + tally["too_few"]
    for name, what in {
        "too_few": f"have fewer than {cutter.codec.top_k} entries; choose a smaller --top-k, or the "
        "--mask-column of padded rows",
        "no_distribution": "are no distributions: their entries are NaN, above 0, sum to more than 1, or have an id "
        "twice or beyond the vocabulary; they must be natural logarithms of probabilities, coded as the options say",
    }.items():
        if tally[name] > _STRANGE * max(1, tried):
            raise UsageError(f"{first}: {tally[name]:,} of {tried:,} positions of a sample {what}")
    found = detect(batches)
    if found.shift:
        there = cutter.shift + found.shift
        advice = f"give --shift {there}" if abs(there) <= 1 else "the source is shifted further than --shift can mend"
        side = "before" if found.shift < 0 else "after"
        raise UsageError(f"{first}: the entries are about the token {side} the next one: {found}; {advice}")
    if (labels := Outside.of(batches)) is not None and labels.wrong:
        raise UsageError(f"{first}: {labels}; import log-probabilities as the teacher gives them")
    return found


def build(
    folder: Path,
    settings: CacheSettings,
    files: Sequence[SourceFile],
    cutter: Cutter,
    origin: Mapping[str, Any],
    *,
    tokenizer: Any,
    progress: Callable[[int], None],
) -> Manifest:
    """Build or resume the cache; a finished one is returned as it is. `progress`: rows done.

    UsageError: the folder holds something else, a record does not fit, or a split would have no sequence. RunError:
    the folder cannot be written.
    """
    builder = CacheBuilder(folder, settings, teacher=None, tokenizer=tokenizer)
    try:
        if builder.manifest is not None:
            return builder.manifest
        for split in _SPLITS:
            builder.open_split(split)
        tally = defaultdict[str, Any](int)
        tokens = cutter.layout.tokens
        assigned = None
        if sum(map(len, files)) <= _FEW_ROWS:  # the hashes of all are compared first
            ranks = [_rank(record[tokens]) for file in files for _, record in file.records([tokens])]
            assigned = assign(ranks, _SPLITS[1:])
        for file in files:
            for where, record in file.records():
                split = assigned[tally["rows"]] if assigned else by_hash(_rank(record[tokens]), _SPLITS[1:])
                for row in cutter.sequences(record, where, tally):
                    builder.add(split, row)
                progress(tally["rows"])
        for split, own in builder.splits.items():
            builder.end_split(split)
            if not own.taken:
                raise UsageError(f"{files[0].path}: there is no sequence for {split}: {tally['rows']} rows are too few")
        builder.stated["origin"] = {**origin, **_summary(tally, cutter.codec)}
        manifest = builder.finish()
        assert manifest is not None
        return manifest
    finally:
        builder.close()


def _rank(tokens: np.ndarray) -> float:
    return rank(tokens.astype("<u4").tobytes().hex())


def _summary(tally: Mapping[str, Any], spec: CodecSpec) -> dict[str, Any]:
    """Summarise the tally for the manifest: what was left out, the kept mass, and a bound of the loss that results.

    With the mass m inside of the top-k the rest is one bucket of V - K entries, spread evenly. KL(full || cache) is
    (1 - m) (log(V - K) - H), H >= 0 the entropy within the rest, and so at most (1 - m) log(V - K). Nothing is claimed
    (None) where the labels show that m is not the teacher's.
    """
    counted = max(1, tally["counted"])
    rest = spec.vocab_size - spec.top_k
    mass = min(1.0, tally["kept_mass"] / counted)
    kept = tally["labels_kept"] / counted
    bound = round((1 - mass) * float(np.log(max(1, rest))), 6)
    return {
        **{name: tally[name] for name in COUNTS},
        "kept_mass": round(mass, 6),
        "kl_at_most": None if Outside(1 - kept, 1 - mass, True).wrong else bound,
        "label_loss": round(tally["label_loss"] / counted, 6),
        "labels_kept": round(kept, 6),
    }
