"""Named points at which tests inject faults; a point without a fault costs one dictionary look-up.

`KDTRAIN_FAULT="cache.shard.before-rename:kill:2"` makes the second call of `point("cache.shard.before-rename")` kill
the process. Actions: `kill` (SIGKILL), `term` (SIGTERM), `hang` (for `HANG` seconds), `raise` (RuntimeError),
`enospc` (OSError), `oom` (torch's OutOfMemoryError). A point that counts other things than calls, such as bytes, fires
when it reaches that number; `enospc:2-9` fires from the second call to the ninth, and `kill:2@1` on rank 1.

`KDTRAIN_FAULT="train.gradient:nan:7@1"` makes `changed("train.gradient", tensor, 7)` set the first entry to NaN on rank
1; `train.loss:x30:12-15` multiplies by 30 at the numbers 12 to 15. The number is the caller's, not a count of calls, so
that a run that resumes or rolls back meets the fault again at the same data.

Commas join several faults. The first time a fault fires in a process, it writes its name to the file
`KDTRAIN_FAULT_LOG`, so that a test can assert that it fired.
"""

import errno
import os
import signal
import time
from collections import Counter
from typing import Any

HANG = 8.0
"""Seconds for which `hang` blocks."""

_calls: Counter[str] = Counter()
_fired: set[str] = set()


_faults: dict[str, tuple[str, str]] = {}


def read() -> None:
    """Read `KDTRAIN_FAULT` and set all counts to 0: at import, and again in a fork."""
    for each in (_faults, _calls, _fired):
        each.clear()
    for fault in filter(None, os.environ.get("KDTRAIN_FAULT", "").split(",")):
        name, action, when = [*fault.split(":"), "1"][:3]
        _faults[name] = (action, when)


read()


def _requested(name: str) -> tuple[str, int, int] | None:
    """Return action, first and last number of the fault `name` on this rank; None if there is none."""
    if name not in _faults:
        return None
    action, when = _faults[name]
    numbers, _, rank = when.partition("@")
    if rank not in ("", os.environ.get("RANK", "0")):
        return None
    first, _, last = numbers.partition("-")
    return action, int(first), int(last or first)


def point(name: str, count: int = 1) -> None:
    """Fire the fault requested for this call of `name`, if any.

    count: what the call adds to the count; if it counts bytes, `enospc:4096` fires at the call with the 4096th.
    """
    if (fault := _requested(name)) is None:
        return
    action, first, last = fault
    before = _calls[name]
    _calls[name] += count
    if before >= last or _calls[name] < first:
        return
    _write_down(name)
    if action == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    elif action == "term":
        os.kill(os.getpid(), signal.SIGTERM)
    elif action == "enospc":
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), name)
    elif action == "oom":
        import torch

        raise torch.OutOfMemoryError(f"out of memory: fault {name} was requested")
    elif action == "hang":
        time.sleep(HANG)
    elif action == "raise":
        raise RuntimeError(f"fault {name} was requested")
    else:
        raise ValueError(f"KDTRAIN_FAULT: action '{action}' is unknown; use kill, term, hang, raise, enospc or oom")


def changed(name: str, tensor: Any, number: int) -> Any:
    """Return `tensor`, or a changed copy if a fault is requested at `name` and `number`; gradients flow through both.

    Args:
        tensor: a torch tensor of floats, any shape; never changed in place.
        number: identifies the data: the same number whenever the same data come again.
    """
    fault = _requested(name)
    if fault is None or not fault[1] <= number <= fault[2]:
        return tensor
    action = fault[0]
    factors = tensor.new_ones(tensor.shape)
    if action == "nan":
        factors.view(-1)[:1] = float("nan")
    elif action.startswith("x"):
        factors.mul_(float(action[1:]))
    else:
        raise ValueError(f"KDTRAIN_FAULT: action '{action}' changes no tensor; use nan or x30")
    _write_down(name)
    return tensor * factors


def _write_down(name: str) -> None:
    if name in _fired:
        return
    _fired.add(name)
    if log := os.environ.get("KDTRAIN_FAULT_LOG"):
        with open(log, "a") as file:
            file.write(name + "\n")
