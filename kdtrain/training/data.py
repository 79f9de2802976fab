"""Where the tokens and targets of a step come from: a cache, a cache of bare tokens, or an online teacher.

All three return the same batch from `read(indices)`, so that the code after them does not know which one it is. `Feed`
reads one micro-batch ahead in a thread: HDF5 decompression and the copy to the device overlap with the student's step.

`DeviceCopy` copies batches to a GPU without waiting for its computation. A plain copy stands in the queue of the
training step: it waits for everything launched before it, and everything launched later waits for it. `DeviceCopy`
copies from pinned memory on a stream of its own, and only the reading thread waits for that stream. On a CPU nothing is
copied.
"""

import contextlib
import dataclasses
import itertools
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Protocol

import numpy as np
import torch
from einops import rearrange
from torch import Tensor

from kdtrain import faults
from kdtrain.cache.reader import CacheReader
from kdtrain.errors import RunError
from kdtrain.models.head import OutputHead
from kdtrain.objective.batch import Batch
from kdtrain.objective.targets import OnlineTargets
from kdtrain.parallel.parallelize import whole

_PIN_LIMIT = 2**30
"""Larger tensors, in bytes, are copied from pageable memory: pinned memory is taken from every process."""


class DeviceCopy:
    """Copies tensors from the host to one device.

    Args:
        device: the target.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._stream: torch.cuda.Stream | None = None

    @contextlib.contextmanager
    def copying(self) -> Iterator[Callable[[Tensor], Tensor]]:
        """Yield a function that copies a tensor; all copies are complete when the block ends."""
        if self.device.type != "cuda":
            yield lambda tensor: tensor.to(self.device)
            return
        if self._stream is None:
            self._stream = torch.cuda.Stream(self.device)
        step_stream = torch.cuda.default_stream(self.device)

        def copy(tensor: Tensor) -> Tensor:
            source = tensor.contiguous()
            source = source.pin_memory() if source.nbytes <= _PIN_LIMIT else source
            copied = source.to(self.device, non_blocking=True)
            # the memory belongs to this stream, which must not reuse it before the step has finished with it
            copied.record_stream(step_stream)
            return copied

        with torch.cuda.stream(self._stream):
            yield copy
            self._stream.synchronize()


class Source(Protocol):
    """Sequences by index."""

    overlaps: bool
    """Whether a thread can read ahead without slowing the student down."""

    def __len__(self) -> int: ...

    def read(self, indices: np.ndarray) -> Batch:
        """Return the sequences `indices` and their targets, on the source's device."""
        ...


class CachedSource:
    """Sequences and targets of a cache (or tokens alone), copied to `device`.

    Args:
        reader: one split of a cache.
        device: where the batches go.
        vocab_size: logits of the student; the padding of dense targets beyond them is cut off.
    """

    overlaps = True

    def __init__(self, reader: CacheReader, device: torch.device, vocab_size: int) -> None:
        self.reader = reader
        self.device = device
        self.vocab_size = vocab_size
        self._device_copy = DeviceCopy(device)

    def __len__(self) -> int:
        return len(self.reader)

    def read(self, indices: np.ndarray) -> Batch:
        """Return the sequences `indices` on the device.

        Raises:
            RunError: a shard is damaged, or holds a token outside the student's vocabulary.
        """
        batch = self.reader.read(indices.tolist())
        if (token := int(batch.tokens.max())) >= self.vocab_size:  # tokenizer_size may admit a narrower student
            raise RunError(
                f"{self.reader.folder} holds token {token}, although it states a tokenizer of "
                f"{self.reader.manifest.settings.tokenizer_size} entries; the student has a vocabulary of "
                f"{self.vocab_size}: set its vocab_size to {self.reader.manifest.vocab_size}"
            )
        targets = (
            None
            if batch.targets is None
            else batch.targets.narrow(self.vocab_size).map(
                lambda name, each: (
                    faults.changed("train.teacher", each, int(indices[0])) if name == "logprobs" else each
                )
            )
        )
        with self._device_copy.copying() as copy:
            return dataclasses.replace(
                batch,
                tokens=copy(batch.tokens),
                loss_mask=copy(batch.loss_mask),
                segments=copy(batch.segments),
                targets=None if targets is None else targets.each(copy),
            )


class OnlineSource:
    """Tokens of a cache of bare tokens, with targets that a teacher computes when they are read.

    The loss computes the teacher's logits later, a few rows at a time.

    Args:
        tokens: where the tokens come from.
        teacher: tokens_BT, segments_BT | None -> the input of its head, [B, T, D], and the outputs [B, T, D] of the
            layers of the hidden-state loss, if any; run under `torch.no_grad()`.
        head: the teacher's output head.
        document_mask: whether the teacher receives the segments.
    """

    overlaps = False  # the teacher and the student compete for the same cores

    def __init__(
        self,
        tokens: CachedSource,
        teacher: Callable[[torch.Tensor, torch.Tensor | None], tuple[torch.Tensor, list[torch.Tensor]]],
        head: OutputHead,
        document_mask: bool,
    ) -> None:
        self.tokens = tokens
        self.teacher = teacher
        self.head = head
        self.document_mask = document_mask

    def __len__(self) -> int:
        return len(self.tokens)

    def read(self, indices: np.ndarray) -> Batch:
        """Return the sequences `indices` with targets from the teacher."""
        batch = self.tokens.read(indices)
        with torch.no_grad():
            hidden_BTD, states = self.teacher(batch.tokens[:, :-1], batch.segments if self.document_mask else None)
        labels_N = rearrange(batch.tokens[:, 1:], "B T -> (B T)")
        hidden_ND = rearrange(hidden_BTD, "B T D -> (B T) D")
        head = dataclasses.replace(self.head, weight=whole(self.head.weight), bias=whole(self.head.bias))
        return Batch(
            batch.tokens,
            batch.loss_mask,
            batch.segments,
            OnlineTargets(hidden_ND, labels_N, head, self.tokens.vocab_size),
            tuple(rearrange(each, "B T D -> (B T) D") for each in states),
        )


class Feed:
    """An endless stream of the micro-batches of each step, read one ahead.

    Args:
        source: where they are read.
        indices: 0, 1, 2, ... -> the indices of the sequences of that step, in order.
        micro: sequences in a micro-batch.
    """

    def __init__(self, source: Source, indices: Callable[[int], np.ndarray], micro: int) -> None:
        self.source = source
        self.indices = indices
        self.micro = micro

    def steps(self) -> Iterator[Iterator[Batch]]:
        """For each step, yield an iterator over its micro-batches; the caller must exhaust it."""
        batches = self._read_ahead() if self.source.overlaps else map(self.source.read, self._micro_batches())
        for step in itertools.count():
            yield itertools.islice(batches, len(self.indices(step)) // self.micro)

    def _read_ahead(self) -> Iterator[Batch]:
        reader = ThreadPoolExecutor(max_workers=1, thread_name_prefix="feed")
        pending: deque[Future[Batch]] = deque()
        try:
            for indices in self._micro_batches():
                pending.append(reader.submit(self.source.read, indices))
                if len(pending) > 1:
                    yield pending.popleft().result()
        finally:
            # no wait: a read from a file system that does not answer would keep a failed command alive
            reader.shutdown(wait=False, cancel_futures=True)

    def _micro_batches(self) -> Iterator[np.ndarray]:
        for step in itertools.count():
            yield from rearrange(self.indices(step), "(a m) -> a m", m=self.micro)
