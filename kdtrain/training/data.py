"""Where a step's tokens and targets come from: a cache, a cache of bare tokens, or an online teacher.

All three answer `read(indices)` with the same batch, so that nothing behind them knows which it was. `Feed` runs one
micro-batch ahead in a thread: HDF5 decompression and the copy to the device overlap with the student's step.

Batches on their way to a GPU, without waiting for what it computes.

A plain copy stands in the queue of the training step: it waits for all that was launched before it, and what comes
after waits for it. Here copies go out of pinned memory on a stream of their own, and whoever asked for them (the
thread that reads ahead) waits for that stream alone. On a CPU nothing is copied.
"""

import contextlib
import dataclasses
import itertools
import threading
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Protocol

import numpy as np
import torch
from einops import rearrange
from torch import Tensor

from kdtrain import faults
from kdtrain.cache.reader import CachedBatch, CacheReader
from kdtrain.errors import RunError
from kdtrain.models.head import OutputHead
from kdtrain.objective.targets import DenseTargets, OnlineTargets
from kdtrain.parallel.parallelize import whole

Move = Callable[[Tensor], Tensor]
_MOST_PINNED = 2**30
"""Bytes of a tensor beyond which it is copied from where it lies: pinned memory is taken from everybody."""


class DeviceCopy:
    """Moves tensors of the host to one device.

    Args:
        device: where they are wanted.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._stream: torch.cuda.Stream | None = None

    @contextlib.contextmanager
    def moving(self) -> Iterator[Move]:
        """What moves a tensor; all that were moved inside the block are there when it ends."""
        if self.device.type != "cuda":
            yield lambda tensor: tensor.to(self.device)
            return
        if self._stream is None:
            self._stream = torch.cuda.Stream(self.device)
        used_by = torch.cuda.default_stream(self.device)

        def move(tensor: Tensor) -> Tensor:
            whole = tensor.contiguous()
            whole = whole.pin_memory() if whole.nbytes <= _MOST_PINNED else whole
            moved = whole.to(self.device, non_blocking=True)
            # its memory is this stream's, which must not use it again before the step is through with it
            moved.record_stream(used_by)
            return moved

        with torch.cuda.stream(self._stream):
            yield move
            self._stream.synchronize()


class Source(Protocol):
    """Sequences by number."""

    overlaps: bool
    """Whether reading ahead in a thread costs the student nothing."""

    def __len__(self) -> int: ...

    def read(self, indices: np.ndarray) -> CachedBatch:
        """The sequences `indices` and their targets, on the source's device."""
        ...


class CachedSource:
    """Sequences and targets of a cache (or tokens alone), copied to `device`.

    Args:
        reader: one split of a cache.
        device: where batches are wanted.
        vocab_size: logits of the student; a dense teacher's padding beyond them is cut off.
    """

    overlaps = True

    def __init__(self, reader: CacheReader, device: torch.device, vocab_size: int) -> None:
        self.reader = reader
        self.device = device
        self.vocab_size = vocab_size
        self._reading = threading.Lock()
        self._mover = DeviceCopy(device)

    def __len__(self) -> int:
        return len(self.reader)

    def read(self, indices: np.ndarray) -> CachedBatch:
        """The sequences `indices` on the device; two threads must not share a reader.

        RunError: a shard is damaged, or holds a token that the student has no row for.
        """
        with self._reading:
            batch = self.reader.read(indices.tolist())
        if (token := int(batch.tokens.max())) >= self.vocab_size:  # a narrower student is let in by tokenizer_size
            raise RunError(
                f"{self.reader.folder} holds token {token}, although it states a tokenizer of "
                f"{self.reader.manifest.settings.tokenizer_size} entries; the student has a vocabulary of "
                f"{self.vocab_size}: set its vocab_size to {self.reader.manifest.vocab_size}"
            )
        targets = batch.targets
        if isinstance(targets, DenseTargets):
            targets = targets.narrow(self.vocab_size)
        if targets is not None:
            assert not isinstance(targets, OnlineTargets)
            spoiled = faults.changed("train.teacher", targets.logprobs, int(indices[0]))
            targets = dataclasses.replace(targets, logprobs=spoiled)
        with self._mover.moving() as move:
            return dataclasses.replace(
                batch,
                tokens=move(batch.tokens),
                loss_mask=move(batch.loss_mask),
                segments=move(batch.segments),
                targets=None if targets is None else targets.each(move),
            )


@dataclasses.dataclass(frozen=True)
class TaughtBatch(CachedBatch):
    """A micro-batch with hidden states of its teacher."""

    states: list[torch.Tensor] = dataclasses.field(default_factory=list)
    """[N, D] a layer that was asked for, at the student's positions."""


class OnlineSource:
    """Tokens of a cache of bare tokens, with targets that a teacher computes when they are asked for.

    Its logits are made later and a few rows at a time, where they are needed.

    Args:
        tokens: where the tokens come from.
        teacher: tokens_BT, segments_BT | None -> what its head takes, [B, T, D], and the outputs [B, T, D] of the
            layers that a hidden-state loss wants, if any; run under `torch.no_grad()`.
        head: the teacher's output head.
        document_mask: whether the teacher is told the segments.
    """

    overlaps = False  # the teacher would fight the student for the same cores

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

    def read(self, indices: np.ndarray) -> TaughtBatch:
        """The sequences `indices` with targets from the teacher."""
        batch = self.tokens.read(indices)
        with torch.no_grad():
            hidden_BTD, states = self.teacher(batch.tokens[:, :-1], batch.segments if self.document_mask else None)
        labels_N = rearrange(batch.tokens[:, 1:], "B T -> (B T)")
        hidden_ND = rearrange(hidden_BTD, "B T D -> (B T) D")
        head = dataclasses.replace(self.head, weight=whole(self.head.weight), bias=whole(self.head.bias))
        return TaughtBatch(
            batch.tokens,
            batch.loss_mask,
            batch.segments,
            OnlineTargets(hidden_ND, labels_N, head, self.tokens.vocab_size),
            [rearrange(each, "B T D -> (B T) D") for each in states],
        )


class Feed:
    """The micro-batches of one step after another, without end, read one ahead.

    Args:
        source: where they are read.
        indices: 0, 1, 2, ... -> the numbers of the sequences of that step, in order.
        micro: sequences in a micro-batch.
    """

    def __init__(self, source: Source, indices: Callable[[int], np.ndarray], micro: int) -> None:
        self.source = source
        self.indices = indices
        self.micro = micro

    def steps(self) -> Iterator[Iterator[CachedBatch]]:
        """For each step an iterator over its micro-batches; all of them are to be taken."""
        batches = self._ahead() if self.source.overlaps else map(self.source.read, self._jobs())
        for step in itertools.count():
            yield itertools.islice(batches, len(self.indices(step)) // self.micro)

    def _ahead(self) -> Iterator[CachedBatch]:
        reader = ThreadPoolExecutor(max_workers=1, thread_name_prefix="feed")
        waiting: deque[Future[CachedBatch]] = deque()
        try:
            for job in self._jobs():
                waiting.append(reader.submit(self.source.read, job))
                if len(waiting) > 1:
                    yield waiting.popleft().result()
        finally:
            # not waited for: a read from a file system that does not answer would keep a command that has failed
            reader.shutdown(wait=False, cancel_futures=True)

    def _jobs(self) -> Iterator[np.ndarray]:
        for step in itertools.count():
            yield from rearrange(self.indices(step), "(a m) -> a m", m=self.micro)
