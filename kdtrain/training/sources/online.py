"""Another source's tokens, with targets that a teacher computes when they are read."""

import dataclasses

import numpy as np

from kdtrain.data.order import Order
from kdtrain.objective.batch import Batch
from kdtrain.teaching.online import OnlineTeacher
from kdtrain.training.sources.source import Source, order_of


class OnlineSource:
    """A source whose targets a teacher computes.

    Args:
        tokens: where the tokens come from, on the student's device.
        teacher: loaded and prepared; runs in the thread that reads.
        vocab_size: logits of the student that count.
        layers: the teacher's layers that a hidden-state loss compares.
    """

    overlaps = False  # the teacher and the student compete for the same cores

    def __init__(self, tokens: Source, teacher: OnlineTeacher, vocab_size: int, layers: tuple[int, ...] = ()) -> None:
        self.tokens, self.teacher, self.vocab_size, self.layers = tokens, teacher, vocab_size, layers
        self.repeatable = tokens.repeatable
        self.facts = dataclasses.replace(
            tokens.facts,
            targets="dense",
            top_k=0,
            num_samples=0,
            temperature_range=(0.25, 20.0),
            teacher={"spec": teacher.name},
        )

    def __len__(self) -> int:
        return len(self.tokens)

    def order(self, seed: int) -> Order:
        """That of the tokens."""
        return order_of(self.tokens, seed)

    def read(self, indices: np.ndarray) -> Batch:
        """Return the sequences `indices` with targets from the teacher."""
        batch, mask = self.tokens.read(indices), self.facts.document_mask
        return self.teacher.targets(batch, self.vocab_size, document_mask=mask, layers=self.layers)
