"""Named faults: what tests inject goes in here, and costs one dictionary look-up when nobody asked.

`KDTRAIN_FAULT="cache.shard.before-rename:kill:2"` makes the second call of `point("cache.shard.before-rename")` kill
the process. Actions: `kill` (SIGKILL), `term` (SIGTERM), `hang` (for `HANG` seconds), `raise` (RuntimeError),
`enospc` (OSError), `oom` (torch's OutOfMemoryError). A point that counts something else than calls, such as bytes,
fires when that number is reached; `enospc:2-9` fires from the second call to the ninth, and `kill:2@1` on rank 1.

`KDTRAIN_FAULT="train.gradient:nan:7@1"` makes `changed("train.gradient", tensor, 7)` spoil the first entry on rank 1;
`train.loss:x30:12-15` multiplies by 30 at the numbers 12 to 15. The number is the caller's and no count of calls, so
that a run that is resumed, or that goes back, meets the fault again at the same data.

Several faults, joined with commas, may be given. A fault that fires first writes its name to the file
`KDTRAIN_FAULT_LOG`, once a process, so that a test can assert that it did.
"""

import errno
import os
import signal
import time
from collections import Counter
from typing import Any

HANG = 8.0
"""Seconds that a process hangs for."""

_calls: Counter[str] = Counter()
_fired: set[str] = set()


def _wanted() -> dict[str, tuple[str, str]]:
    faults = {}
    for fault in filter(None, os.environ.get("KDTRAIN_FAULT", "").split(",")):
        name, action, when = [*fault.split(":"), "1"][:3]
        faults[name] = (action, when)
    return faults


_faults = _wanted()


def read() -> None:
    """Take over what `KDTRAIN_FAULT` asks for now, with no call counted yet: for a fork, after its import."""
    global _faults
    _faults = _wanted()
    _calls.clear()
    _fired.clear()


def point(name: str, count: int = 1) -> None:
    """Fire the fault asked for at `name`, if any, on the call it was asked for.

    count: what the call counts for; with bytes, say, `enospc:4096` fires at the call that brings the 4096th.
    """
    if name not in _faults:
        return
    action, when = _faults[name]
    call, _, rank = when.partition("@")
    if rank not in ("", os.environ.get("RANK", "0")):
        return
    first, _, last = call.partition("-")
    before = _calls[name]
    _calls[name] += count
    if not (before < int(last or first) and int(first) <= _calls[name]):
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

        raise torch.OutOfMemoryError(f"out of memory: fault {name} was asked for")
    elif action == "hang":
        time.sleep(HANG)
    elif action == "raise":
        raise RuntimeError(f"fault {name} was asked for")
    else:
        raise ValueError(f"KDTRAIN_FAULT: action '{action}' is unknown; use kill, term, hang, raise, enospc or oom")


def changed(name: str, tensor: Any, number: int) -> Any:
    """`tensor`, or where a fault was asked for at `name` and `number` a changed one; gradients pass through both.

    Args:
        tensor: a torch tensor of floats, any shape; it is not changed itself.
        number: what tells the data apart, the same whenever the same data come again.
    """
    if name not in _faults or not _meant(_faults[name][1], number):
        return tensor
    factors = tensor.new_ones(tensor.shape)
    action = _faults[name][0]
    if action == "nan":
        factors.view(-1)[:1] = float("nan")
    elif action.startswith("x"):
        factors.mul_(float(action[1:]))
    else:
        raise ValueError(f"KDTRAIN_FAULT: action '{action}' changes no tensor; use nan or x30")
    _write_down(name)
    return tensor * factors


def _meant(when: str, number: int) -> bool:
    """Whether `7`, `12-15`, or either with a rank as in `7@1`, means this number on this rank."""
    numbers, _, rank = when.partition("@")
    first, _, last = numbers.partition("-")
    return int(first) <= number <= int(last or first) and rank in ("", os.environ.get("RANK", "0"))


def _write_down(name: str) -> None:
    if name in _fired:
        return
    _fired.add(name)
    if log := os.environ.get("KDTRAIN_FAULT_LOG"):
        with open(log, "a") as file:
            file.write(name + "\n")
