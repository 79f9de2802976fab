"""Batches on their way to a GPU, without waiting for what it computes.

A plain copy stands in the queue of the training step: it waits for all that was launched before it, and what comes
after waits for it. Here copies go out of pinned memory on a stream of their own, and whoever asked for them (the
thread that reads ahead) waits for that stream alone. On a CPU nothing is copied.
"""

import contextlib
from collections.abc import Callable, Iterator

import torch
from torch import Tensor

Move = Callable[[Tensor], Tensor]
_MOST_PINNED = 2**30
"""Bytes of a tensor beyond which it is copied from where it lies: pinned memory is taken from everybody."""


class Mover:
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
