"""Saving in the background: training waits for a copy of the tensors, not for the disk.

`save` copies the tensors into buffers, pinned for tensors on a GPU and reused by the next save, and a thread does the
rest: files, digests, links, pruning. One save is in flight at a time; the next one waits for it. The next `save`,
`wait` or `close` raises an error of the thread. If the disk is full, the oldest checkpoints that retention can spare
are removed, and the save is tried again, at once and then once a minute. The buffers take as much memory as the state;
`asynchronous=False` saves in the calling thread and needs none.

Several ranks save together: each copies and writes its part, and rank 0 publishes, links and prunes. Their threads use
their own process group, so that training has the other groups for itself.
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
    """A save: one state, published under all of `names`."""

    names: tuple[str, ...]
    step: int
    stood_still: float = 0.0
    """Seconds that training waited."""
    whole: bool = False
    """Whether the save is complete."""


class Saver:
    """Publishes the checkpoints of one run. Every rank makes one, in the same order as its collectives.

    Args:
        store: the checkpoints.
        asynchronous: whether a thread saves.
        patience: minutes that a save waits for space on a full disk.
    """

    def __init__(self, store: Store, asynchronous: bool = True, patience: int = 0) -> None:
        self.store = store
        self.asynchronous = asynchronous
        self.patience = patience
        self.group = control_group()
        self.asked_to_stop: Callable[[], bool] = lambda: False
        """Whether a save must stop waiting for space; called on rank 0."""
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
        """Publish one state under all of `names`, then prune; return the seconds that the caller waited.

        Args:
            names: the first is written, the others are further names of the same files.
            step, tensors, state, rollbacks: see `Store.save`; the caller may change them when this returns.
            best: the new target of the link `best`.
            protected: names that pruning keeps.

        Raises:
            RunError: this save could not start, or the previous one failed.
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
            # not a daemon: a process that ends without `close` still finishes the save
            self._thread = threading.Thread(target=self._attempt, args=(work,), name="checkpoint")
            self._thread.start()
        else:
            self._attempt(work)
            self.wait()
        begun.stood_still = time.perf_counter() - started
        return begun.stood_still

    def published(self) -> list[Published]:
        """The saves completed since the last call, oldest first. Only for the thread that calls `save`."""
        news = []
        while self._begun and self._begun[0].whole:
            news.append(self._begun.pop(0))
        return news

    def warnings(self) -> list[str]:
        """Warnings about a full disk since the last call. Only for the thread that calls `save`."""
        news = []
        while self._warnings:
            news.append(self._warnings.pop(0))
        return news

    def wait(self) -> None:
        """Wait for the save in flight.

        Raises:
            RunError: it failed.
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
        """`wait`, and free the buffers."""
        self._buffers.clear()
        self.wait()

    def __enter__(self) -> "Saver":
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        """`close`; if the block raises, an error of the saver is only logged."""
        try:
            self.close()
        except RunError as own:
            if error is None:
                raise
            log.error("%s", own)

    def _patiently(self, publish: Callable[[], None], when_full: Callable[[int], bool]) -> None:
        """Call `publish` until the disk has space, or `when_full`, given the number of attempts, returns False."""
        for attempt in itertools.count():
            try:
                return publish()
            except (RunError, OSError) as error:
                full = error
            if reason(full) != "disk" or not on_main(partial(when_full, attempt), self.group):
                raise full

    def _when_full(self, name: str, size: int, protected: Collection[str], attempt: int) -> bool:
        """First make room for a checkpoint of `size` bytes, later wait a minute; return whether to try again."""
        if attempt == 0:
            removed = self.store.make_room(size, protected)
            done = f"removed {', '.join(removed)}" if removed else "nothing can be removed"
            self._warn(f"the disk is full: {done} to make room for checkpoint {name}")
            return True
        if attempt > self.patience:
            return False
        where = self.store.folder
        self._warn(f"the disk is full: {name} waits for space in {where}, minute {attempt} of {self.patience}")
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
        except BaseException as error:  # raised again in the caller's thread
            self._error = error

    def _copied(self, tensors: Mapping[str, torch.Tensor], checkpoint: str) -> dict[str, torch.Tensor]:
        """Copies of `tensors` on the CPU, complete."""
        try:
            self._buffers = {name: self._buffer(name, local(tensor)) for name, tensor in tensors.items()}
        except (RuntimeError, MemoryError):  # torch raises no specific error when a CPU has no memory
            size = sum(local(tensor).nbytes for tensor in tensors.values()) / 2**20
            raise RunError(
                f"checkpoint {checkpoint} was not started: no memory for a copy of {size:.0f} MiB; use --no-async-save"
            ) from None
        # A copy is bound by memory. With several threads it also waits for a thread without a core: 100 to 300 ms
        # instead of 1 ms for 12 MiB on a busy machine.
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
        """The buffer of the last save if it fits, else a new one."""
        own = self._buffers.get(name)
        if own is not None and (own.shape, own.dtype) == (tensor.shape, tensor.dtype):
            return own
        like: dict[str, Any] = {"device": "cpu", "memory_format": torch.contiguous_format}
        return torch.empty_like(tensor, **like, pin_memory=tensor.is_cuda)
