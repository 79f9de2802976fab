"""Batches on the student's device, checked against its vocabulary.

A plain copy to a GPU stands in the queue of the training step: it waits for everything launched before it, and
everything launched later waits for it. Here the copy comes from pinned memory on a stream of its own, and only the
reading thread waits for that stream. On a CPU nothing is copied.
"""

import dataclasses
from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from kdtrain import faults
from kdtrain.data.order import Order
from kdtrain.errors import RunError
from kdtrain.objective.batch import Batch
from kdtrain.training.sources.source import Growing, Source, order_of

_PIN_LIMIT = 2**30
"""Larger tensors, in bytes, are copied from pageable memory: pinned memory is taken from every process."""


class OnDevice:
    """A source whose batches are on `device`.

    Args:
        source: any source.
        device: where the batches go.
        vocab_size: logits of the student; the padding of dense targets beyond them is cut off.
    """

    def __init__(self, source: Source, device: torch.device, vocab_size: int) -> None:
        self.source, self.device, self.vocab_size = source, device, vocab_size
        self.facts, self.overlaps, self.repeatable = source.facts, source.overlaps, source.repeatable
        self.growing: Growing | None = getattr(source, "growing", None)
        self._stream: torch.cuda.Stream | None = None

    def __len__(self) -> int:
        return len(self.source)

    def order(self, seed: int) -> Order:
        """That of the source."""
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
        if self.device.type != "cuda":
            return batch.each(lambda tensor: tensor.to(self.device))
        if self._stream is None:
            self._stream = torch.cuda.Stream(self.device)
        with torch.cuda.stream(self._stream):
            copied = batch.each(_copier(self.device))
            self._stream.synchronize()
        return copied


def _copier(device: torch.device) -> Callable[[Tensor], Tensor]:
    """A function that copies a tensor to a GPU in the current stream."""
    step_stream = torch.cuda.default_stream(device)

    def copy(tensor: Tensor) -> Tensor:
        if tensor.is_cuda:
            return tensor.to(device)
        source = tensor.contiguous()
        source = source.pin_memory() if source.nbytes <= _PIN_LIMIT else source
        copied = source.to(device, non_blocking=True)
        # the memory belongs to this stream, which must not reuse it before the step has finished with it
        copied.record_stream(step_stream)
        return copied

    return copy
