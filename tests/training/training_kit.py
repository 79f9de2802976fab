"""What a run of the workshop has logged, and sources that end its run."""

import json
import os
import signal
from typing import Any

from kdtrain.errors import RunError


def lines_of(run: Any, name: str) -> list[dict[str, Any]]:
    """Read the lines of a JSONL file of a run."""
    return [json.loads(line) for line in (run.config.out / name).read_text().splitlines()]


def events(run: Any, kind: str) -> list[dict[str, Any]]:
    """Return the events of a kind."""
    return [each for each in lines_of(run, "events.jsonl") if each["event"] == kind]


def trained(run: Any) -> list[dict[str, Any]]:
    """Return the lines of the training steps."""
    return [each for each in lines_of(run, "metrics.jsonl") if "loss" in each]


def ending(workshop: Any, size: int, last: int, *, fails: bool = False, once: bool = True) -> Any:
    """Make a source that sends SIGTERM, or fails, when it is read after `last` reads; or at each read from there on."""

    class Ending(workshop.source):  # type: ignore[name-defined, misc]
        def read(self, indices: Any) -> Any:
            if len(self.reads) == last or (len(self.reads) > last and not once):
                if fails:
                    raise RunError("the cache is gone")
                os.kill(os.getpid(), signal.SIGTERM)
            return super().read(indices)

    return Ending(size, seed=0 if fails else 1)
