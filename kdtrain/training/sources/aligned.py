"""A cache of a teacher with another tokenizer, in the student's own tokens (`cache.view`)."""

from dataclasses import replace

import numpy as np

from kdtrain.cache.reader import Cache
from kdtrain.cache.view import View, ViewReader, identity_of
from kdtrain.errors import UsageError
from kdtrain.objective.batch import Batch
from kdtrain.training.sources.source import Facts


def aligned_facts(cache: Cache, size: int, terms: tuple[bool, bool] | None) -> tuple[Facts, tuple[bool, bool]]:
    """What is known of a cache in the tokens of a student before they are made, and the terms of the loss.

    size: entries of the student's tokenizer. terms: whether the loss has cells, and chunks; None: what the cache has
    numbers for.

    UsageError: the cache has no numbers for these terms.
    """
    settings, codec = cache.manifest.settings, cache.manifest.codec
    if codec.kind == "tokens":
        raise UsageError(f"{cache.name} holds no teacher's numbers; --cross-tokenizer needs them")
    cells, chunks = terms or (codec.kind == "sparse", True)
    if cells and codec.kind != "sparse":
        raise UsageError(
            f"cells need samples or a top-k, and {cache.name} keeps whole distributions; use --cross-tokenizer chunks"
        )
    facts = Facts(
        name=cache.name,
        identity=cache.manifest.digest,
        seq_len=settings.seq_len,
        vocab_size=size,
        tokenizer_size=size,
        document_mask=settings.document_mask,
        targets="sparse",
        top_k=codec.top_k if cells and not codec.num_samples else 0,
        num_samples=codec.num_samples if cells else 1,
        temperature_range=(1.0, 1.0),
        alignment={},
        teacher=settings.teacher or {},
    )
    return facts, (cells, chunks)


class AlignedSource:
    """One split of a view, on the CPU."""

    overlaps = True
    repeatable = True

    def __init__(self, view: View, split: str, terms: tuple[bool, bool] | None) -> None:
        facts, (cells, chunks) = aligned_facts(view.cache, view.record.sizes[1], terms)
        self.reader = ViewReader(view, split, cells=cells, chunks=chunks)
        named = [name for name, used in (("cells", cells), ("chunks", chunks)) if used]
        self.facts = replace(
            facts,
            identity=f"{identity_of(view)}{'-cells' * cells}{'-chunks' * chunks}",
            tokenizer_digest=view.record.settings["tokenizer"],
            tokenizer=view.folder / "tokenizer",
            alignment={"terms": named, **view.facts()},
        )

    def __len__(self) -> int:
        return len(self.reader)

    def read(self, indices: np.ndarray) -> Batch:
        """Return the rows `indices`. RunError: a shard of the cache is missing or damaged (named)."""
        return self.reader.read(indices.tolist())
