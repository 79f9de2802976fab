"""Saving in the background: training waits for a copy of the tensors, and not for the disk.

`save` copies everything into buffers of its own, pinned where the tensors are on a GPU and used again by the next
save, and a thread does the rest: files, digests, links, pruning. One save is in flight; the next one waits for it.
What goes wrong in the thread is raised by the next `save`, `wait` or `close`, and never lost. The buffers cost as
much memory as the state has; `asynchronous=False` saves in place and needs none.

Several ranks save together: each copies and writes its part, and rank 0 publishes, links and prunes. What the
threads have to say to each other goes over a group of their own, so that training goes on with the others.
"""

import copy
import logging
import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any

import torch

from kdtrain import faults
from kdtrain.checkpoint.store import Store
from kdtrain.errors import RunError
from kdtrain.parallel.world import local, lost, of_all, on_main, with_local


@dataclass
class Published:
    """What a save has published: one state, under all of `names`."""

    names: tuple[str, ...]
    step: int
    stood_still: float = 0.0
    """Seconds for which training waited."""
    whole: bool = False
    """Whether all of it is done."""


class Saver:
    """Publishes the checkpoints of one run.

    Args:
        store: where they go.
        asynchronous: whether in a thread.
    """

    def __init__(self, store: Store, asynchronous: bool = True) -> None:
        self.store = store
        self.asynchronous = asynchronous
        self._buffers: dict[str, torch.Tensor] = {}
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None
        self._begun: list[Published] = []

    def save(
        self,
        names: Sequence[str],
        step: int,
        tensors: Mapping[str, torch.Tensor],
        state: Mapping[str, Any],
        *,
        rollbacks: int = 0,
        best: str | None = None,
        protected: Collection[str] = (),
    ) -> float:
        """Publish one state under all of `names`, then prune; the seconds for which the caller stood still.

        Args:
            names: the first is written, the others are second names of it.
            step, tensors, state, rollbacks: see `Store.save`; the caller may change them at once.
            best: the name that `best` is to point at from now on.
            protected: names that pruning must leave.

        Raises:
            RunError: this save could not be begun, or the one before it failed.
        """
        started = time.perf_counter()
        self.wait()
        if self.asynchronous:
            tensors, state = self._copied(tensors, names[0]), copy.deepcopy(state)

        begun = Published(tuple(names), step)
        self._begun.append(begun)

        def publish() -> None:
            self.store.save(names[0], step, tensors, state, rollbacks)
            on_main(finish, self.store.words)
            begun.whole = True

        def finish() -> None:
            for name in names[1:]:
                self.store.copy(names[0], name)
            if best is not None:
                self.store.link("best", best)
            faults.point("checkpoint.before-prune")
            self.store.prune(protected)

        if self.asynchronous:
            # no daemon: a process that ends without `close` still finishes what it has begun to write
            self._thread = threading.Thread(target=self._attempt, args=(publish,), name="checkpoint")
            self._thread.start()
        else:
            self._attempt(publish)
            self.wait()
        begun.stood_still = time.perf_counter() - started
        return begun.stood_still

    def published(self) -> list[Published]:
        """What was published since this was asked last, oldest first. Only the thread that calls `save` may ask."""
        news = []
        while self._begun and self._begun[0].whole:
            news.append(self._begun.pop(0))
        return news

    def wait(self) -> None:
        """Return when nothing is in flight.

        Raises:
            RunError: what was in flight failed.
        """
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        self._begun = [each for each in self._begun if each.whole]
        error, self._error = self._error, None
        if isinstance(error, RunError):
            raise error
        if (gone := lost(error)) is not None:
            raise gone from error
        if isinstance(error, OSError):
            where = error.filename or self.store.folder
            raise of_all(RunError(f"{where}: {error.strerror or error}; published checkpoints are intact")) from None
        if error is not None:
            raise RunError(f"saving into {self.store.folder} failed: {type(error).__name__}: {error}") from error

    def close(self) -> None:
        """`wait`, and give the buffers back."""
        self._buffers.clear()
        self.wait()

    def __enter__(self) -> "Saver":
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        """`close`; where the block ends by an error of its own, one of the saver's is only logged."""
        try:
            self.close()
        except RunError as own:
            if error is None:
                raise
            logging.getLogger("kdtrain").error("%s", own)

    def _attempt(self, publish: Callable[[], None]) -> None:
        try:
            publish()
        except BaseException as error:  # it is raised again in the caller's thread
            self._error = error

    def _copied(self, tensors: Mapping[str, torch.Tensor], checkpoint: str) -> dict[str, torch.Tensor]:
        """Copies of `tensors` on the CPU, finished."""
        try:
            self._buffers = {name: self._buffer(name, local(tensor)) for name, tensor in tensors.items()}
        except (RuntimeError, MemoryError):  # torch has no error of its own for a CPU without memory
            size = sum(local(tensor).nbytes for tensor in tensors.values()) / 2**20
            raise RunError(
                f"checkpoint {checkpoint} was not begun: no memory for a copy of {size:.0f} MiB; use --no-async-save"
            ) from None
        # A copy waits for memory, not for a processor; with several threads it also waited for whichever of them had
        # no core (1 ms became 100 to 300 for 12 MiB on a machine with other work).
        threads = torch.get_num_threads()
        torch.set_num_threads(1)
        try:
            for name, tensor in tensors.items():
                self._buffers[name].copy_(local(tensor.detach()), non_blocking=True)
        finally:
            torch.set_num_threads(threads)
        for device in {local(tensor).device for tensor in tensors.values() if tensor.is_cuda}:
            torch.cuda.current_stream(device).synchronize()
        return {name: with_local(tensor, self._buffers[name]) for name, tensor in tensors.items()}

    def _buffer(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        """The buffer of the last save where it fits, and a new one where it does not."""
        own = self._buffers.get(name)
        if own is not None and (own.shape, own.dtype) == (tensor.shape, tensor.dtype):
            return own
        like: dict[str, Any] = {"device": "cpu", "memory_format": torch.contiguous_format}
        return torch.empty_like(tensor, **like, pin_memory=tensor.is_cuda)
