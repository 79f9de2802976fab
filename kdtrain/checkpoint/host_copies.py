"""Copies of a state in host memory, which a GPU makes while it computes on.

A copy runs on a stream of its own, into pinned memory, once everything queued before it is done. Nothing waits for it
at once: the device waits before it changes a tensor that is being copied (`before_change`), and a thread that reads a
copy waits for the event `done`. In training that leaves a forward and a backward to hide the copy behind: weights and
moments change in the optimizer's step only, buffers are constants, and whatever else a checkpoint holds is plain
numbers. A tensor that is dropped meanwhile is safe, because its memory is not reused before the copy is done.

On a CPU a copy is complete when `copy` returns, and there is nothing to wait for.
"""

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from kdtrain.ranks import local, with_local


def host_buffers(tensors: Mapping[str, Tensor], old: Mapping[str, Tensor] | None = None) -> dict[str, Tensor]:
    """Memory for copies of this rank's parts of `tensors`, by name: that of `old` where it fits, else new.

    Pinned for tensors on a GPU; torch keeps pinned memory that is freed for the next request of that size.

    Raises:
        MemoryError: the host has too little memory; the message says how much was asked for.
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
        size = sum(local(tensor).nbytes for tensor in tensors.values()) / 2**20
        raise MemoryError(f"no memory for a copy of {size:.0f} MiB") from None
    return buffers


class HostCopies:
    """Makes the copies of one run, all on one stream. Only for the thread that trains, but for the event `done`."""

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
        """Run the block on the stream of the copies, after what is queued already; None on a CPU."""
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
