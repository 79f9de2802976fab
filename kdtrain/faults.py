"""Named fault points: what tests inject goes in here, and costs one dictionary look-up when nobody asked.

`KDTRAIN_FAULT="cache.shard.before-rename:kill:2"` makes the second call of `point("cache.shard.before-rename")` kill
the process; where a point passes amounts, as a writer does its bytes, the number is one of these, not of calls.
Actions: `kill` (SIGKILL), `term` (SIGTERM), `raise` (RuntimeError), `enospc` (OSError). Several, joined
with commas, may be given. A fault that fires first writes its name to the file `KDTRAIN_FAULT_LOG`, so that a test
can assert that it did.
"""

import errno
import os
import signal
from collections import Counter

_calls: Counter[str] = Counter()


def _wanted() -> dict[str, tuple[str, int]]:
    faults = {}
    for fault in filter(None, os.environ.get("KDTRAIN_FAULT", "").split(",")):
        name, action, call = [*fault.split(":"), "1"][:3]
        faults[name] = (action, int(call))
    return faults


_faults = _wanted()


def point(name: str, amount: int = 1) -> None:
    """Fire the fault asked for at `name`, if any, on the call it was asked for.

    Args:
        name: the point.
        amount: what this call counts for, such as the bytes it is about to write.
    """
    if name not in _faults:
        return
    before = _calls[name]
    _calls[name] += amount
    action, call = _faults[name]
    if not before < call <= _calls[name]:
        return
    if log := os.environ.get("KDTRAIN_FAULT_LOG"):
        with open(log, "a") as file:
            file.write(name + "\n")
    if action == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    elif action == "term":
        os.kill(os.getpid(), signal.SIGTERM)
    elif action == "enospc":
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), name)
    elif action == "raise":
        raise RuntimeError(f"fault {name} was asked for")
    else:
        raise ValueError(f"KDTRAIN_FAULT: action '{action}' is unknown; use kill, term, raise or enospc")
