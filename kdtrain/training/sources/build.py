"""Completes a source for a student: for training, validation, `evaluate` and checks alike.

A plain copy to a GPU stands in the queue of the training step: it waits for everything launched before it, and
everything launched later waits for it. Here the copy comes from pinned memory on a stream of its own, and only the
reading thread waits for that stream. On a CPU nothing is copied.
"""

import dataclasses
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from kdtrain import faults
from kdtrain.data.order import Order
from kdtrain.errors import RunError
from kdtrain.objective.batch import Batch
from kdtrain.objective.targets import ANY_T
from kdtrain.training.sources.source import Growing, Source, order_of

if TYPE_CHECKING:
    from kdtrain.teaching.teacher import OnlineTeacher

_PIN_LIMIT = 2**30
"""Larger tensors, in bytes, are copied from pageable memory: pinned memory is taken from every process."""


class StudentSource:
    """A source whose batches are on the student's device, checked against its vocabulary.

    Args:
        source: an opened one.
        device: the student's.
        vocab_size: logits of the student that count; a token beyond them is an error, dense targets are narrowed.
        teacher: an online teacher, loaded and prepared, whose targets replace those of the source. It runs in the
            thread that reads.
        layers: the teacher's layers that a hidden-state loss compares.
    """

    def __init__(
        self,
        source: Source,
        device: torch.device,
        vocab_size: int,
        teacher: "OnlineTeacher | None" = None,
        layers: tuple[int, ...] = (),
    ) -> None:
        if teacher is not None and (taught_by := getattr(source, "taught_by", None)) is not None:
            source = taught_by(teacher, device)
            teacher = None
            layers = ()
        self.source, self.device, self.vocab_size = source, device, vocab_size
        self.teacher, self.layers = teacher, layers
        self.facts, self.overlaps, self.repeatable = source.facts, source.overlaps, source.repeatable
        if teacher is not None:
            self.overlaps = False  # the teacher and the student compete for the same cores
            taught: dict[str, Any] = {
                "targets": "dense",
                "top_k": 0,
                "num_samples": 0,
                "temperature_range": ANY_T,
            }
            self.facts = dataclasses.replace(self.facts, **taught, teacher={"spec": teacher.name})
        self.growing: Growing | None = getattr(source, "growing", None)
        self.write_collective = getattr(source, "write_collective", None)
        self.score = getattr(source, "score", None)
        self.overlaps = self.overlaps and self.write_collective is None
        self._stream: torch.cuda.Stream | None = None

    def __len__(self) -> int:
        return len(self.source)

    def order(self, seed: int) -> Order:
        """Return the order of the source."""
        return order_of(self.source, seed)

    def read(self, indices: np.ndarray) -> Batch:
        """Return the sequences `indices` on the device.

        Raises:
            RunError: the source fails, or yields a token outside the student's vocabulary.
        """
        batch = self.source.read(indices)
        if (token := int(batch.tokens.max())) >= self.vocab_size:  # tokenizer_size may admit a narrower student
            raise RunError(
                f"{self.facts.name} holds token {token}, although it states a tokenizer of "
                f"{self.facts.tokenizer_size} entries; the student has a vocabulary of {self.vocab_size}: set its "
                f"vocab_size to {self.facts.vocab_size}"
            )
        if batch.targets is not None:
            first = int(indices[0])
            targets = batch.targets.narrow(self.vocab_size).map(
                lambda name, each: faults.changed("train.teacher", each, first) if name == "logprobs" else each
            )
            batch = dataclasses.replace(batch, targets=targets)
        batch = self._moved(batch)
        if self.teacher is None:
            return batch
        mask = self.facts.document_mask
        return self.teacher.targets(batch, self.vocab_size, document_mask=mask, layers=self.layers)

    def _moved(self, batch: Batch) -> Batch:
        if self.device.type != "cuda":
            return batch.each(lambda tensor: tensor.to(self.device))
        step_stream = torch.cuda.default_stream(self.device)
        if self._stream is None:
            self._stream = torch.cuda.Stream(self.device)

        def copy(tensor: Tensor) -> Tensor:
            if tensor.is_cuda:
                return tensor.to(self.device)
            source = tensor.contiguous()
            source = source.pin_memory() if source.nbytes <= _PIN_LIMIT else source
            copied = source.to(self.device, non_blocking=True)
            # the memory belongs to this stream, which must not reuse it before the step has finished with it
            copied.record_stream(step_stream)
            return copied

        with torch.cuda.stream(self._stream):
            moved = batch.each(copy)
            self._stream.synchronize()
        return moved
