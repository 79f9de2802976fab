"""Saving in the background: training waits for a copy of the tensors, not for the disk.

`save` copies the tensors into buffers, which the next save reuses, and a thread does the rest: files, digests, links,
pruning. One save is in flight at a time; the next one waits for it. The next `save`, `wait` or `close` raises an error
of the thread. If the disk is full, the oldest checkpoints that retention can spare are removed, and the save is tried
again, at once and then once a minute. The buffers take as much memory as the state; `asynchronous=False` saves in the
calling thread and needs none.

Several ranks save together: each copies and writes its part, and rank 0 publishes, links and prunes. Their threads use
their own process group, so that training has the other groups for itself.

On a GPU a copy (`HostCopies`) runs on a stream of its own, into pinned memory, once everything queued before it is
done. The device waits before it changes a tensor that is being copied (`before_change`), and the thread that writes
waits for the event `done`. In training that leaves a forward and a backward to hide the copy behind: weights and
moments change in the optimizer's step only, buffers are constants, and whatever else a checkpoint holds is plain
numbers. A tensor that is dropped meanwhile is safe, because its memory is not reused before the copy is done. On a CPU
a copy is complete when `copy` returns.
"""

import contextlib
import copy
import itertools
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from kdtrain import faults
from kdtrain.checkpoint.store import Store
from kdtrain.errors import RunError, log, reason
from kdtrain.ranks import control_group, local, lost_rank, on_main, reported, with_local
from kdtrain.tables import size

MINUTE = 60.0
"""Seconds between two attempts on a full disk."""


def host_buffers(tensors: Mapping[str, Tensor], old: Mapping[str, Tensor] | None = None) -> dict[str, Tensor]:
    """Return memory for copies of this rank's parts of `tensors`, by name: of `old` where it fits, else new.

    Pinned for tensors on a GPU; torch keeps pinned memory that is freed for the next request of that size.

    Raises:
        MemoryError: the host has too little memory; the message names the size.
    """
    buffers = {}
    try:
        for name, own in ((name, local(tensor)) for name, tensor in tensors.items()):
            buffer = (old or {}).get(name)
            if buffer is None or (buffer.shape, buffer.dtype) != (own.shape, own.dtype):
                like: dict[str, Any] = {"device": "cpu", "memory_format": torch.contiguous_format}
                buffer = torch.empty_like(own, **like, pin_memory=own.is_cuda)
            buffers[name] = buffer
    except (RuntimeError, MemoryError):  # torch raises no specific error when a CPU has no memory
        needed = sum(local(tensor).nbytes for tensor in tensors.values()) / 2**20
        raise MemoryError(f"no memory for a copy of {size(needed)}") from None
    return buffers


class HostCopies:
    """Makes the copies of one run, all on one stream. For the training thread alone, except the event `done`."""

    def __init__(self) -> None:
        self.done: torch.cuda.Event | None = None
        """Of the last copy: it is done, and all before it. None where nothing was copied from a GPU."""
        self._stream: torch.cuda.Stream | None = None

    def copy(self, tensors: Mapping[str, Tensor], buffers: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Begin to copy `tensors` into `buffers`; return the copies, sharded as the tensors are."""
        own = {name: local(tensor.detach()) for name, tensor in tensors.items()}
        # A copy is bound by memory. With several threads it also waits for a thread without a core: 100 to 300 ms
        # instead of 1 ms for 12 MiB on a busy machine.
        threads = torch.get_num_threads()
        torch.set_num_threads(1)
        try:
            with self._stream_of(next((each.device for each in own.values() if each.is_cuda), None)) as stream:
                for name, tensor in own.items():
                    buffers[name].copy_(tensor, non_blocking=True)
                    if stream is not None and tensor.is_cuda:
                        tensor.record_stream(stream)
        finally:
            torch.set_num_threads(threads)
        return {name: with_local(tensor, buffers[name]) for name, tensor in tensors.items()}

    def before_change(self) -> None:
        """Let the device finish the copies before whatever is queued next; the host does not wait."""
        if self.done is not None and self._stream is not None:
            torch.cuda.current_stream(self._stream.device).wait_event(self.done)

    def wait(self) -> None:
        """Wait until the copies are complete."""
        if self.done is not None:
            self.done.synchronize()

    @contextlib.contextmanager
    def _stream_of(self, device: torch.device | None) -> Iterator[torch.cuda.Stream | None]:
        """Run the block on the stream of the copies, after the work queued already; yield None on a CPU."""
        if device is None:
            yield None
            return
        self._stream = self._stream or torch.cuda.Stream(device)
        self._stream.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(self._stream):
            yield self._stream
            done = torch.cuda.Event(blocking=True)  # a waiting thread sleeps: the core is for the one that trains
            done.record(self._stream)
            self.done = done


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
            try:
                self._buffers = host_buffers(tensors, self._buffers)
            except MemoryError as error:
                raise RunError(f"checkpoint {names[0]} was not started: {error}; use --no-async-save") from None
            tensors = self.copies.copy(tensors, self._buffers)
            state = copy.deepcopy(state)
        tensors = {**tensors, **(kept or {})}
        done = self.copies.done

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
        """Return the saves completed since the last call, oldest first. Only for the thread that calls `save`."""
        news = []
        while self._begun and self._begun[0].whole:
            news.append(self._begun.pop(0))
        return news

    def warnings(self) -> list[tuple[str, str]]:
        """Return the warnings since the last call, by kind (disk-full, prune). Only the saving thread may call it."""
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
        error = self._error
        self._error = None
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
        """Wait for the save in flight, and free the buffers."""
        self._buffers.clear()
        self.wait()

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
        """Make room for a checkpoint of `size` bytes at first, later wait a minute; return whether to try again."""
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
