"""Saving in the background: training waits for a copy of the tensors, and not for the disk.

`save` copies everything into buffers of its own, pinned where the tensors are on a GPU and used again by the next
save, and a thread does the rest: files, digests, links, pruning. One save is in flight; the next one waits for it.
What goes wrong in the thread is raised by the next `save`, `wait` or `close`, and never lost. Where the disk is full,
the oldest of what can be missed goes, and the save is tried again, at once and then once a minute. The buffers cost as
much memory as the state has; `asynchronous=False` saves in place and needs none.

Several ranks save together: each copies and writes its part, and rank 0 publishes, links and prunes. Their threads
talk over a group of their own, so that training keeps the others for itself.
"""

import contextlib
import copy
import itertools
import logging
import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from types import TracebackType
from typing import Any

import torch

from kdtrain import faults
from kdtrain.checkpoint.store import Store
from kdtrain.errors import RunError, reason
from kdtrain.ranks import control_group, local, lost_rank, on_main, reported, with_local

MINUTE = 60.0
"""Seconds between two attempts on a full disk."""
log = logging.getLogger("kdtrain")


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
    """Publishes the checkpoints of one run. Every rank makes one, in the same order as its collectives.

    Args:
        store: where they go.
        asynchronous: whether in a thread.
        patience: minutes that a save waits for room on a full disk.
    """

    def __init__(self, store: Store, asynchronous: bool = True, patience: int = 0) -> None:
        self.store = store
        self.asynchronous = asynchronous
        self.patience = patience
        self.group = control_group()
        self.asked_to_stop: Callable[[], bool] = lambda: False
        """Whether a save is to wait for room no longer; asked on rank 0."""
        self._warnings: list[str] = []
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
            self.store.save(names[0], step, tensors, state, rollbacks, self.group)
            on_main(finish, self.group)
            begun.whole = True

        def finish() -> None:
            for name in names[1:]:
                self.store.copy(names[0], name)
            if best is not None:
                self.store.link("best", best)
            faults.point("checkpoint.before-prune")
            self.store.prune(protected)

        size = sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())
        work = partial(self._patiently, publish, partial(self._when_full, names[0], size, protected))
        if self.asynchronous:
            # no daemon: a process that ends without `close` still finishes what it has begun to write
            self._thread = threading.Thread(target=self._attempt, args=(work,), name="checkpoint")
            self._thread.start()
        else:
            self._attempt(work)
            self.wait()
        begun.stood_still = time.perf_counter() - started
        return begun.stood_still

    def published(self) -> list[Published]:
        """What was published since this was asked last, oldest first. Only the thread that calls `save` may ask."""
        news = []
        while self._begun and self._begun[0].whole:
            news.append(self._begun.pop(0))
        return news

    def warnings(self) -> list[str]:
        """What was logged about a full disk since this was asked last. Asked as `published` is."""
        news = []
        while self._warnings:
            news.append(self._warnings.pop(0))
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
        if (gone := lost_rank(error)) is not None:
            raise gone from error
        if isinstance(error, OSError):
            where = error.filename or self.store.folder
            text = f"{where}: {error.strerror or error}; published checkpoints are intact"
            raise reported(RunError(text, reason=reason(error))) from None
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
            log.error("%s", own)

    def _patiently(self, publish: Callable[[], None], when_full: Callable[[int], bool]) -> None:
        """`publish`, until there is room, or `when_full`, called with the attempts so far, gives up."""
        for attempt in itertools.count():
            try:
                return publish()
            except (RunError, OSError) as error:
                full = error
            if reason(full) != "disk" or not on_main(partial(when_full, attempt), self.group):
                raise full

    def _when_full(self, name: str, size: int, protected: Collection[str], attempt: int) -> bool:
        """Make room for a checkpoint of `size` bytes the first time, then wait a minute; whether to try again."""
        if attempt == 0:
            gone = self.store.make_room(size, protected)
            done = f"removed {', '.join(gone)}" if gone else "nothing can be removed"
            self._warn(f"the disk is full: {done} to make room for checkpoint {name}")
            return True
        if attempt > self.patience:
            return False
        where = self.store.folder
        self._warn(f"the disk is full: {name} waits for room in {where}, minute {attempt} of {self.patience}")
        until = time.monotonic() + MINUTE
        while time.monotonic() < until and not self.asked_to_stop():
            time.sleep(min(1.0, MINUTE))
        return not self.asked_to_stop()

    def _warn(self, text: str) -> None:
        """Log a warning; a log file on the same disk may be full as well."""
        with contextlib.suppress(OSError):
            log.warning(text)
        self._warnings.append(text)

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
