"""Encoding beside the teacher on a GPU: a stream of its own for the thread that takes what the main stream made.

On the main stream each copy to the host would wait for the teacher's next forward, which is queued there already, and
the forward behind it for the encoding: they would run one after the other with the host between them. On a CPU none of
this does anything.
"""

import contextlib
from collections.abc import Iterator

import torch
from torch import Tensor


class Beside:
    """A tensor that the current stream has in work, for another thread to work on.

    Args:
        tensor: on any device, or None.
    """

    def __init__(self, tensor: Tensor | None) -> None:
        self.device = tensor.device if tensor is not None and tensor.is_cuda else None
        self.ready: torch.cuda.Event | None = None
        if self.device is not None:
            with torch.cuda.device(self.device):
                self.ready = torch.cuda.Event()
                self.ready.record(torch.cuda.current_stream(self.device))

    @contextlib.contextmanager
    def stream(self) -> Iterator[None]:
        """The block runs on a stream of its own behind what makes the tensor, and is done when it ends.

        So the tensor may be freed by then, although its memory belongs to another stream.
        """
        if self.device is None or self.ready is None:
            yield
            return
        own = torch.cuda.Stream(self.device)
        with torch.cuda.stream(own):
            own.wait_event(self.ready)
            try:
                yield
            finally:
                own.synchronize()
