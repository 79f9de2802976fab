"""The source `cache`: sequences and targets of a cache, or tokens alone where it has no teacher."""

import numpy as np

from kdtrain.cache.read.reader import CacheReader
from kdtrain.errors import UsageError
from kdtrain.objective.batch import Batch
from kdtrain.training.sources.source import Facts, Growing, SourceRequest, register_source


class CachedSource:
    """One split of a cache, on the CPU."""

    overlaps = True
    repeatable = True

    def __init__(self, reader: CacheReader) -> None:
        manifest, settings, codec = reader.manifest, reader.manifest.settings, reader.manifest.codec
        span = manifest.temperature_range
        self.reader = reader
        self.growing = reader.remote if isinstance(reader.remote, Growing) else None
        self.facts = Facts(
            name=reader.name,
            identity=manifest.digest,
            seq_len=settings.seq_len,
            vocab_size=manifest.vocab_size,
            tokenizer_size=settings.tokenizer_size,
            tokenizer_digest=settings.tokenizer_digest,
            tokenizer=reader.folder / "tokenizer",
            document_mask=settings.document_mask,
            targets=codec.kind if codec.taught else "none",
            top_k=codec.top_k,
            num_samples=codec.num_samples,
            temperature_range=(0.25, 20.0) if span is None else (span["min"], span["max"]),
            labels=manifest.knows_labels,
            teacher=settings.teacher or {},
            end_tokens=manifest.end_tokens,
        )

    def __len__(self) -> int:
        return len(self.reader)

    def read(self, indices: np.ndarray) -> Batch:
        """Return the sequences `indices`. RunError: a shard is missing or damaged (named)."""
        return self.reader.read(indices.tolist())


@register_source("cache")
def open_cache(request: SourceRequest) -> CachedSource:
    """Open a cache, or the packed tokens of --data."""
    if request.cache is None:
        raise UsageError("--source cache needs --cache FOLDER or --data SOURCE")
    return CachedSource(request.cache[request.split])
