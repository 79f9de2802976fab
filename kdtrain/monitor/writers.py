"""Numbers a step, for programs: `metrics.jsonl`, `events.jsonl` and TensorBoard.

A run that goes on from step s first forgets what was written after s, so that each step stands once.
"""

import json
import math
import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any


class Writers:
    """The files of one run that hold numbers.

    Args:
        folder: the run.
        resume_step: the step the run goes on from; what was written of later ones is removed.
        validated_step: the last step whose validation the run remembers; of later ones it is removed as well.
        tensorboard: whether TensorBoard events are written.
    """

    def __init__(self, folder: Path, resume_step: int, validated_step: int | None, tensorboard: bool) -> None:
        self.events_path = folder / "events.jsonl"
        _forget(folder / "metrics.jsonl", resume_step, -1 if validated_step is None else validated_step)
        self.file = open(folder / "metrics.jsonl", "a", buffering=1)  # noqa: SIM115  # closed by close()
        self.board: Any = None
        if tensorboard:
            from torch.utils.tensorboard import SummaryWriter

            self.board = SummaryWriter(str(folder / "tensorboard"), purge_step=resume_step + 1 if resume_step else None)

    def metrics(self, step: int, numbers: Mapping[str, float]) -> None:
        """Write the numbers of `step`; a number that is not finite is written as null."""
        finite = {name: value if math.isfinite(value) else None for name, value in numbers.items()}
        self.file.write(json.dumps({"step": step, **finite}) + "\n")
        if self.board is not None:
            for name, value in numbers.items():
                self.board.add_scalar(
                    name if "/" in name and name != "tok/s" else f"train/{name.replace('/', '_per_')}",
                    value,
                    step,
                )

    def event(self, kind: str, step: int, **details: Any) -> None:
        """Write an intervention (start, resume, stop, best, ...) with its time in seconds since 1970."""
        text = json.dumps({"time": time.time(), "event": kind, "step": step, **details})
        try:
            with open(self.events_path, "a") as file:
                file.write(text + "\n")
        except OSError as error:
            raise OSError(error.errno, error.strerror, str(self.events_path)) from None

    def close(self) -> None:
        """Flush and close everything."""
        self.file.close()
        if self.board is not None:
            self.board.close()


def _forget(path: Path, trained: int, validated: int) -> None:
    """Remove the lines of later steps, of training and of validation, and a last line that a kill cut short."""
    if not path.exists():
        return
    kept = []
    for text in path.read_text().splitlines():
        try:
            numbers = json.loads(text)
            if numbers["step"] <= (validated if "validation/loss" in numbers else trained):
                kept.append(text)
        except (ValueError, KeyError, TypeError):
            break
    hidden = path.with_suffix(".tmp")
    hidden.write_text("".join(text + "\n" for text in kept))
    os.replace(hidden, path)
