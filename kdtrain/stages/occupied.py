"""One launch at a time in the folder of a run.

Rank 0 holds a lock on the file `.training` in it for all ranks, from before the folder is looked at until the end. It
ends with its process, so that what a kill leaves bars nobody. A rank 0 that torchrun starts anew may come before the
system has let go of the lock of the one before it, on a node that was lost say, and waits for that.
"""

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from kdtrain.config import DistillConfig
from kdtrain.errors import making
from kdtrain.files import HeldError, Lock, remove_empty, sweep
from kdtrain.monitor.progress import log
from kdtrain.parallel.world import on_main
from kdtrain.stages.run_folder import LOCK, claim, holds_run, launch, make

HANDOVER = 120.0
"""Seconds that a launch waits for an earlier try of its own: a file server gives up a lost node after 90 or so."""
_POLL = 0.2


@contextmanager
def occupied(config: DistillConfig) -> Iterator[bool]:
    """Keep other launches out of `config.out` for as long as the block runs; whether an earlier run is gone on with.

    Every rank must enter it; `claim` is asked on rank 0. A folder that is made for it and stays empty is removed.

    Raises:
        UsageError: another process is training there, no folder can be there, or `claim` refuses it.
        RunError: it cannot be written.
    """
    held: list[_Place] = []
    try:
        yield on_main(lambda: _enter(config, held))
    finally:
        for place in reversed(held):
            place.leave()


def _enter(config: DistillConfig, held: "list[_Place]") -> bool:
    with making(config.out):
        holds_run(config)  # what is refused stays as it was
        held.append(_Place(config.out))
        if goes_on := claim(config):
            sweep(config.out)
        if not config.out.exists():  # an earlier run was moved aside, and the file that is locked went with it
            held.append(_Place(config.out))
        return goes_on


class _Place:
    """A folder that is held, and made where it was not there."""

    def __init__(self, out: Path) -> None:
        self._made = make(out)
        try:
            self._lock = _lock(out)
        except BaseException:
            remove_empty(self._made)
            raise

    def leave(self) -> None:
        self._lock.release()
        remove_empty(self._made)


def _lock(out: Path) -> Lock:
    message = f"another process is training in {out}; wait for it, or name another --out"
    name, waits_until = _name(), None
    while True:
        try:
            return Lock(out / LOCK, message, name)
        except HeldError as error:
            if not name or error.holder != name:
                raise
            if waits_until is None:
                waits_until = time.monotonic() + HANDOVER
                log.info("waiting for an earlier try of this launch to let go of %s", out)
            if time.monotonic() > waits_until:
                raise
            time.sleep(_POLL)


def _name() -> str:
    """What the tries of one launch have in common; empty without torchrun."""
    identity = os.environ.get("TORCHELASTIC_RUN_ID", "none")
    return (launch() or "") if identity == "none" else identity
