"""Saving in the background: training waits for a copy of the tensors, not for the disk.

`save` copies the tensors into buffers, which the next save reuses, and a thread does the rest: files, digests, links,
pruning. On a GPU the copy goes on after `save` has returned (`host_copies`): the thread waits for it, and training
only before it changes the tensors. One save is in flight at a time; the next one waits for it. The next `save`,
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
from kdtrain.checkpoint.host_copies import HostCopies, host_buffers
from kdtrain.checkpoint.store import Store
from kdtrain.errors import RunError, reason
from kdtrain.ranks import control_group, lost_rank, on_main, reported

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
        copies: makes the copies of the run; None: the saver's own.
    """

    def __init__(
        self, store: Store, asynchronous: bool = True, patience: int = 0, copies: HostCopies | None = None
    ) -> None:
        self.store = store
        self.copies = copies or HostCopies()
        self.asynchronous = asynchronous
        self.patience = patience
        self.group = control_group()
        self.asked_to_stop: Callable[[], bool] = lambda: False
        """Whether a save must stop waiting for space; called on rank 0."""
        self._warnings: list[tuple[str, str]] = []
        store.warn = lambda text: self._warn("prune", text)
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
        kept: Mapping[str, torch.Tensor] | None = None,
        rollbacks: int = 0,
        latest: str | None = None,
        best: str | None = None,
        protected: Collection[str] = (),
    ) -> float:
        """Publish one state under all of `names`, then prune; return the seconds that the caller waited.

        Args:
            names: the first is written, the others are further names of the same files.
            step, tensors, state, rollbacks: see `Store.save`; the caller may change them when this returns, but tensors
                on a GPU only after `copies.before_change`.
            kept: further tensors, in host memory, that never change: they are not copied.
            latest: which of `names` becomes the target of the link `latest`; None: the first.
            best: the new target of the link `best`.
            protected: names that pruning keeps.

        Raises:
            RunError: this save could not start, or the previous one failed.
        """
        started = time.perf_counter()
        self.wait()
        if self.asynchronous:
            tensors, state = self._copied(tensors, names[0]), copy.deepcopy(state)
        tensors, done = {**tensors, **(kept or {})}, self.copies.done

        begun = Published(tuple(names), step)
        self._begun.append(begun)

        def publish() -> None:
            if done is not None:
                done.synchronize()
            self.store.save(names[0], step, tensors, state, rollbacks, self.group)
            on_main(finish, self.group)
            begun.whole = True

        def finish() -> None:
            for name in names[1:]:
                self.store.copy(names[0], name)
            for link, target in (("latest", latest if latest != names[0] else None), ("best", best)):
                if target is not None:
                    self.store.link(link, target)
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

    def warnings(self) -> list[tuple[str, str]]:
        """Warnings since the last call, by kind (disk-full, prune). Only for the thread that calls `save`."""
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
            self._warn("disk-full", f"the disk is full: {done} to make room for checkpoint {name}")
            return True
        if attempt > self.patience:
            return False
        where = self.store.folder
        self._warn(
            "disk-full", f"the disk is full: {name} waits for space in {where}, minute {attempt} of {self.patience}"
        )
        until = time.monotonic() + MINUTE
        while time.monotonic() < until and not self.asked_to_stop():
            time.sleep(min(1.0, MINUTE))
        return not self.asked_to_stop()

    def _warn(self, kind: str, text: str) -> None:
        """Log a warning; a log file on the same disk may be full as well."""
        with contextlib.suppress(OSError):
            log.warning(text)
        self._warnings.append((kind, text))

    def _attempt(self, publish: Callable[[], None]) -> None:
        try:
            publish()
        except BaseException as error:  # raised again in the caller's thread
            self._error = error

    def _copied(self, tensors: Mapping[str, torch.Tensor], checkpoint: str) -> dict[str, torch.Tensor]:
        """Copies of `tensors` on the CPU, which are complete once `copies.done` is."""
        try:
            self._buffers = host_buffers(tensors, self._buffers)
        except MemoryError as error:
            raise RunError(f"checkpoint {checkpoint} was not started: {error}; use --no-async-save") from None
        return self.copies.copy(tensors, self._buffers)
