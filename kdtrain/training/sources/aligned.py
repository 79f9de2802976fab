"""A cache of a teacher with another tokenizer, in the student's own tokens (`cache.view`)."""

import numpy as np

from kdtrain.cache.view import View, ViewReader, identity_of
from kdtrain.objective.batch import Batch
from kdtrain.training.sources.source import Facts


class AlignedSource:
    """One split of a view, on the CPU; `cells` and `chunks` are the terms of the loss."""

    overlaps = True
    repeatable = True

    def __init__(self, view: View, split: str, *, cells: bool, chunks: bool) -> None:
        self.reader = ViewReader(view, split, cells=cells, chunks=chunks)
        settings, codec, size = view.cache.manifest.settings, view.cache.manifest.codec, view.record.cells["student"]
        self.facts = Facts(
            name=view.cache.name,
            identity=f"{identity_of(view)}{'-cells' * cells}{'-chunks' * chunks}",
            seq_len=view.seq_len,
            vocab_size=size,
            tokenizer_size=size,
            tokenizer_digest=view.record.settings["tokenizer"],
            tokenizer=view.folder / "tokenizer",
            document_mask=settings.document_mask,
            targets="sparse",
            top_k=codec.top_k if cells and not codec.num_samples else 0,
            num_samples=codec.num_samples if cells else 1,
            temperature_range=(1.0, 1.0),
            teacher=settings.teacher or {},
        )

    def __len__(self) -> int:
        return len(self.reader)

    def read(self, indices: np.ndarray) -> Batch:
        """Return the rows `indices`. RunError: a shard of the cache is missing or damaged (named)."""
        return self.reader.read(indices.tolist())
