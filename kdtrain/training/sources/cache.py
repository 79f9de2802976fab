"""The source `cache`: sequences and targets of a cache, or tokens alone where it has no teacher.

A run without a cache packs its text once into a cache of bare tokens in its own folder: all runs read in the same way
and the same order, in constant memory, and a resumed run does not tokenize again.
"""

import numpy as np

from kdtrain.cache.read import reader
from kdtrain.errors import UsageError
from kdtrain.objective.batch import Batch
from kdtrain.objective.targets import ANY_T
from kdtrain.training.sources.source import Facts, Growing, SourceRequest, register_source

MEASURED, _MOST = 2**16, 4_000_000
"""Tokens that a loss is measured on, at most, and that a bigram is fitted on."""
_SHARDS = 4
"""Shards that are read for either, at most."""


class CachedSource:
    """One split of a cache, on the CPU."""

    overlaps = True
    repeatable = True

    def __init__(self, split: reader.CacheReader) -> None:
        manifest, settings, codec = split.manifest, split.manifest.settings, split.manifest.codec
        span = manifest.temperature_range
        self.reader = split
        self.growing = split.remote if isinstance(split.remote, Growing) else None
        self.facts = Facts(
            name=split.name,
            identity=manifest.digest,
            seq_len=settings.seq_len,
            vocab_size=manifest.vocab_size,
            tokenizer_size=settings.tokenizer_size,
            tokenizer_digest=settings.tokenizer_digest,
            tokenizer=split.folder / "tokenizer",
            document_mask=settings.document_mask,
            targets=codec.kind if codec.taught else "none",
            top_k=codec.top_k,
            num_samples=codec.num_samples,
            temperature_range=ANY_T if span is None else (span["min"], span["max"]),
            labels=manifest.knows_labels,
            teacher=settings.teacher or {},
            end_tokens=manifest.end_tokens,
        )

    def __len__(self) -> int:
        return len(self.reader)

    def read(self, indices: np.ndarray) -> Batch:
        """Return the sequences `indices`. RunError: a shard is missing or damaged (named)."""
        return self.reader.read(indices.tolist())

    def bigram_loss(self, other: reader.CacheReader, most: int = _MOST) -> float | None:
        """Return the cross-entropy of a bigram of at most `most` tokens of this split on some of `other`.

        In nats per token; None: no token counts there. It has the smoothing of Witten and Bell (1991): of a token that
        was seen n times, before t different ones, a share of t / (n + t) goes to the unigrams, of whose N tokens of T
        kinds a share of T / (N + T) is even.
        """
        tokens = self.reader.text(first_rows(self.reader, most))["tokens"]
        text = other.text(first_rows(other, MEASURED))
        held = text["tokens"]
        mask = text["loss_mask"].astype(bool)
        before, label = held[:, :-1][mask], held[:, 1:][mask]
        if not len(label):
            return None
        size = int(max(tokens.max(), held.max())) + 1
        counts = np.bincount(tokens.ravel(), minlength=size)
        kinds = np.count_nonzero(counts)
        number = tokens.size
        unigram = (counts + kinds / size) / (number + kinds)
        pairs = tokens[:, :-1].astype(np.int64).ravel() * size + tokens[:, 1:].ravel()
        pairs, seen = np.unique(pairs, return_counts=True)
        firsts = pairs // size
        followed, others = np.bincount(firsts, seen, size), np.bincount(firsts, minlength=size)
        wanted = before.astype(np.int64) * size + label
        at = np.searchsorted(pairs, wanted).clip(max=len(pairs) - 1)
        found = np.where(pairs[at] == wanted, seen[at], 0)
        total = followed[before] + others[before]
        chance = np.where(total > 0, (found + others[before] * unigram[label]) / np.maximum(total, 1), unigram[label])
        return float(-np.log(chance).mean())


def first_rows(split: reader.CacheReader, tokens: int) -> list[int]:
    """Return the first sequences of a few shards, about so many tokens in all: a shard is hashed when it is opened."""
    shards = split.manifest.splits[split.split]["shards"]
    chosen = sorted({*np.linspace(0, len(shards) - 1, _SHARDS).astype(int).tolist()})
    each = max(1, tokens // split.manifest.settings.seq_len // len(chosen))
    firsts = np.cumsum([0, *(shard["sequences"] for shard in shards)]).tolist()
    return [row for at in chosen for row in range(firsts[at], min(firsts[at] + each, firsts[at + 1]))]


@register_source("cache")
def open_cache(request: SourceRequest) -> CachedSource:
    """Open a cache, or the packed tokens of --data."""
    if request.cache is None:
        raise UsageError("--source cache needs --cache FOLDER or --data SOURCE")
    return CachedSource(request.cache[request.split])
