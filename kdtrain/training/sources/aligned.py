"""A cache of a teacher with another tokenizer, in the student's own tokens (`view_builder`), or such a teacher online.

An online teacher answers on its own tokens of the same text: for a row of the student, on the two or three of its own
rows that hold the same bytes.
"""

import copy
from dataclasses import replace

import numpy as np
import torch

from kdtrain.cache.format.spec import CodecSpec
from kdtrain.objective.batch import Batch
from kdtrain.objective.targets import Targets
from kdtrain.teaching.teacher import OnlineTeacher
from kdtrain.tokenizers.teacher_cells import MOST_CELLS
from kdtrain.tokenizers.view import View, ViewReader, identity_of
from kdtrain.training.sources.source import Facts


def aligned_facts(name: str, *, seq_len: int, document_mask: bool, size: int, codec: CodecSpec) -> Facts:
    """Return the facts of a text in a student's tokens before the tokens are made.

    size: entries of the student's tokenizer. codec: of the cache; tokens alone for an online teacher.
    """
    whole = not codec.coded
    top_k = 0 if codec.num_samples else codec.top_k
    if whole:
        top_k = MOST_CELLS
    return Facts(
        name=name,
        identity="",
        seq_len=seq_len,
        vocab_size=size,
        tokenizer_size=size,
        document_mask=document_mask,
        targets="sparse",
        top_k=top_k,
        num_samples=0 if whole else codec.num_samples,
        temperature_range=(1.0, 1.0),
        alignment={},
    )


class AlignedSource:
    """One split of a view, on the CPU. UsageError: the cells disagree with the text."""

    overlaps = True
    repeatable = True

    def __init__(self, view: View, split: str) -> None:
        stated = view.cache.manifest.settings
        size = view.record.sizes[1]
        self.reader = ViewReader(view, split)
        facts = aligned_facts(
            view.cache.name,
            seq_len=view.seq_len,
            document_mask=stated.document_mask,
            size=size,
            codec=stated.codec,
        )
        partner = {pair[0]: pair[1] for pair in view.record.settings["events"]}
        ends = {partner.get(each, -1) for each in view.cache.manifest.end_tokens}
        self.facts = replace(
            facts,
            end_tokens=tuple(sorted(each for each in ends if each >= 0)),
            identity=f"{identity_of(view)}-cells",  # as runs had it when there were other terms
            tokenizer_digest=view.record.settings["tokenizer"],
            tokenizer=view.folder / "tokenizer",
            alignment={"terms": ["cells"], **view.facts()},
            labels=view.cache.manifest.knows_labels,
            teacher=stated.teacher or {},
        )

    def __len__(self) -> int:
        return len(self.reader)

    def read(self, indices: np.ndarray) -> Batch:
        """Return the rows `indices`. RunError: a shard of the cache is missing or damaged (named)."""
        return self.reader.read(indices.tolist())

    def taught_by(self, teacher: OnlineTeacher, device: torch.device) -> "AlignedSource":
        """Return the same source with an online teacher, prepared on `device`, that answers on its own tokens."""
        taught = copy.copy(self)
        mask = self.facts.document_mask
        width = min(teacher.vocab_size, self.reader.view.record.sizes[0])

        def ask(batch: Batch) -> Targets:
            moved = batch.each(lambda tensor: tensor.to(device))
            targets = teacher.targets(moved, width, document_mask=mask).targets
            assert targets is not None
            return targets

        taught.reader = self.reader.asking(ask)
        taught.overlaps = False  # the teacher and the student compete for the same cores
        taught.facts = replace(self.facts, teacher={"spec": teacher.name})
        return taught
