"""Targets that a teacher computes when they are read; the loss computes its logits later, a few rows at a time."""

import dataclasses
from typing import Protocol

import numpy as np

from kdtrain.objective.batch import Batch
from kdtrain.training.sources.source import Source


class Teacher(Protocol):
    """What an online source asks of a teacher."""

    @property
    def name(self) -> str: ...

    def targets(self, batch: Batch, vocab_size: int) -> Batch:
        """Return the batch with the teacher's targets, over the first `vocab_size` entries."""
        ...


class OnlineSource:
    """Another source's tokens with a teacher's targets.

    Args:
        tokens: where the tokens come from, on the student's device.
        teacher: runs under `torch.no_grad()`, in the thread that reads.
        vocab_size: logits of the student that count.
    """

    overlaps = False  # the teacher and the student compete for the same cores

    def __init__(self, tokens: Source, teacher: Teacher, vocab_size: int) -> None:
        self.tokens, self.teacher, self.vocab_size = tokens, teacher, vocab_size
        self.repeatable = tokens.repeatable
        self.facts = dataclasses.replace(
            tokens.facts, targets="dense", top_k=0, num_samples=0, temperature_range=(0.25, 20.0), teacher=teacher.name
        )

    def __len__(self) -> int:
        return len(self.tokens)

    def read(self, indices: np.ndarray) -> Batch:
        """Return the sequences `indices` with targets from the teacher."""
        return self.teacher.targets(self.tokens.read(indices), self.vocab_size)
