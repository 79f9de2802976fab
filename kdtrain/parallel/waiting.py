"""Waiting for ranks that work for as long as they must, and not for ranks that are silent.

What one rank does for all, packing a text say, may take hours, so that no limit fits the work itself. Instead a thread
of each rank says every few seconds whether the rank is still at work. The words go over a group with the timeout of any
other exchange: who is dead closes its connection and is noticed at once, who is stopped, cut off, or never comes, after
the timeout. What it gives up: a rank whose threads live while its work stands still, in a read from a file system that
does not answer say, counts as one at work.
"""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist


@contextmanager
def at_work(group: Any, every: float) -> Iterator[None]:
    """A block that takes each rank as long as it must; all leave it together, when the last one is at its end.

    An error inside leaves it as soon as the turn in flight is over; the others then hear nothing more of this rank.

    Args:
        group: of gloo, over all ranks, which all of them enter the block with and none uses inside.
        every: seconds between two signs of life, well under the group's timeout.

    Raises:
        RuntimeError: torch's; a rank is gone, or was silent for the group's timeout.
    """
    done, left, errors = threading.Event(), threading.Event(), []

    def tell() -> None:
        try:
            while True:
                working = not done.wait(every)
                if left.is_set() or not _any(working, group):
                    return
        except Exception as error:  # it is raised again in the thread that waits
            errors.append(error)

    # a daemon, so that a second signal ends a process that waits for the others' turns
    thread = threading.Thread(target=tell, name="at-work", daemon=True)
    thread.start()
    try:
        yield
        done.set()
        thread.join()
    except BaseException:
        left.set()
        done.set()
        thread.join()  # a process that ends with an exchange in flight aborts
        raise
    if errors:
        raise errors[0]


def _any(own: bool, group: Any) -> bool:
    """Whether any rank says yes."""
    said = torch.tensor(int(own))
    dist.all_reduce(said, dist.ReduceOp.MAX, group=group)
    return bool(said)
