"""The numbers of each step: `metrics.jsonl`, `events.jsonl`, and the boards that are asked for.

A run that resumes from step s first removes what was written after s, so that each step stands once; so does a run that
rolls back while it trains (`rewind`). Events are never removed; each has a level, and every warning is one. A
line that cannot be read, because a kill cut it short or a byte was damaged, is left out and counted; what is appended
then begins a line of its own.
"""

import json
import math
import os
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import torch

from kdtrain.config import MonitorConfig
from kdtrain.errors import UsageError
from kdtrain.files import SMALL, open_regular, parse_json, publish_text, typed
from kdtrain.monitor.loggers import Logger, TensorBoard, WeightsAndBiases, histograms
from kdtrain.monitor.progress import early_warnings, log, warn_early
from kdtrain.ranks import copies

Level = Literal["info", "warning", "error"]

MOST_BYTES = 2**30
"""Of a log that is filtered; a million steps have about 4e8."""


class Writers:
    """The files and boards of one run that hold numbers.

    Args:
        folder: the run.
        resume_step: the step that the run resumes from; what was written of later ones is removed.
        validated_step: the last step whose validation the run remembers; of later ones it is removed as well.
        config: which boards are written.
    Raises:
        UsageError: W&B is asked for, and its package is missing; or something other than a file has the name of one.
        RunError: W&B does not start.
    """

    def __init__(self, folder: Path, resume_step: int, validated_step: int | None, config: MonitorConfig) -> None:
        self.folder = folder
        self.watched = config.tensorboard or config.wandb_project is not None
        self.boards: list[Logger] = []
        if config.tensorboard:
            self.boards.append(TensorBoard(folder / "tensorboard", resume_step + 1 if resume_step else 0))
        if config.wandb_project is not None:
            fresh = resume_step == 0
            self.boards.append(WeightsAndBiases(folder, fresh, config.wandb_project, config.wandb_name))
        for name in ("metrics.jsonl", "samples.jsonl"):
            _forget(folder / name, resume_step, -1 if validated_step is None else validated_step)
        _forget(folder / "events.jsonl", math.inf, math.inf)
        self.file = open(folder / "metrics.jsonl", "a", buffering=1)  # noqa: SIM115  # closed by close()
        for kind, text in early_warnings():
            self.event(kind, resume_step, "warning", message=text)

    def metrics(self, step: int, numbers: Mapping[str, float]) -> None:
        """Write the numbers of `step`; a non-finite number is written as null."""
        finite = {name: value if math.isfinite(value) else None for name, value in numbers.items()}
        self.file.write(json.dumps({"step": step, **finite}) + "\n")
        shown = {
            name if name.startswith("validation/") else f"train/{name.replace('/', '_per_')}": value
            for name, value in numbers.items()
        }
        for board in self.boards:
            board.scalars(step, shown)

    def event(self, kind: str, step: int, level: Level = "info", **details: Any) -> None:
        """Write an intervention (start, resume, stop, best, ...) with its time in seconds since 1970."""
        record = {"time": time.time(), "event": kind, "level": level, "step": step, **details}
        _append(self.folder / "events.jsonl", record)
        for board in self.boards:
            board.event(step, kind, details)

    def warning(self, kind: str, step: int, text: str, **details: Any) -> None:
        """Log `text` as a warning, and write it as an event of this kind, its `message`."""
        log.warning(text)
        self.event(kind, step, "warning", message=text, **details)

    def histograms(self, step: int, tensors: Mapping[str, torch.Tensor]) -> None:
        """Show the distributions of `tensors`; nothing where no board is written."""
        if not self.watched:
            return
        found = histograms(tensors)
        for board in self.boards:
            board.histograms(step, found)

    def samples(self, step: int, rows: Sequence[Mapping[str, str]]) -> None:
        """Write texts of the student (`monitor.samples`) into `samples.jsonl`, and show them."""
        for row in rows:
            _append(self.folder / "samples.jsonl", {"step": step, **row})
        for board in self.boards if rows else ():
            board.table(step, "samples", rows)

    def hyperparameters(self, options: Mapping[str, Mapping[str, Any]]) -> None:
        """Show the options of a run, given by section (`config.sections`); options that are None are left out."""
        flat = {
            f"{section}/{name}": value if isinstance(value, bool | int | float | str) else str(value)
            for section, table in options.items()
            for name, value in table.items()
            if value is not None
        }
        for board in self.boards:
            board.hyperparameters(flat)

    def rewind(self, step: int) -> None:
        """Forget what was written of later steps than `step`."""
        self.file.close()
        for name in ("metrics.jsonl", "samples.jsonl"):
            _forget(self.folder / name, step, step)
        self.file = open(self.folder / "metrics.jsonl", "a", buffering=1)  # noqa: SIM115  # closed by close()
        for board in self.boards:
            board.rewind(step)

    def close(self) -> None:
        """Flush and close everything; events may still be written."""
        self.file.close()
        while self.boards:
            self.boards.pop().close()


class SilentWriters(Writers):
    """The writers of every rank but the first: they write nothing."""

    def __init__(self, config: MonitorConfig) -> None:
        self.watched = config.tensorboard or config.wandb_project is not None
        self.boards = []

    def metrics(self, step: int, numbers: Mapping[str, float]) -> None:
        """Nothing."""

    def event(self, kind: str, step: int, level: Level = "info", **details: Any) -> None:
        """Nothing."""

    def histograms(self, step: int, tensors: Mapping[str, torch.Tensor]) -> None:
        """Add this rank's parts to what the first one shows; nothing where it has them all."""
        if self.watched and any(map(copies, tensors.values())):
            histograms(tensors)

    def samples(self, step: int, rows: Sequence[Mapping[str, str]]) -> None:
        """Nothing."""

    def hyperparameters(self, options: Mapping[str, Mapping[str, Any]]) -> None:
        """Nothing."""

    def rewind(self, step: int) -> None:
        """Nothing."""

    def close(self) -> None:
        """Nothing."""


def _append(path: Path, entry: Mapping[str, Any]) -> None:
    """Write one line.

    Raises:
        OSError: with the file's name, which an error while writing does not have.
    """
    try:
        with open(path, "a") as file:
            file.write(json.dumps(entry) + "\n")
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(path)) from None


def _forget(path: Path, trained: float, validated: float) -> None:
    """Leave out the lines of later steps, of training and of validation, and those that cannot be read.

    Raises:
        UsageError: something other than a file stands there, or one that is too large to be a run's.
    """
    kept, unreadable = [], []
    try:
        with open_regular(path) as file:
            if os.fstat(file.fileno()).st_size > MOST_BYTES:
                raise ValueError(f"it has more than {MOST_BYTES:,} bytes")
            for number, line in enumerate(iter(lambda: file.readline(SMALL), b""), 1):
                try:
                    record = typed(parse_json(line.decode()), dict[str, Any])
                    if typed(record.get("step"), int) <= (validated if "validation/loss" in record else trained):
                        kept.append(line.decode().rstrip("\n"))
                except ValueError:
                    unreadable.append(number)
    except FileNotFoundError:
        return
    except ValueError as error:
        raise UsageError(f"{path}: {error}; move it away") from None
    if unreadable:
        lines = f"{len(unreadable)} lines that cannot be read, first line {unreadable[0]}"
        warn_early("unreadable-lines", f"{path}: left out {lines}")
    publish_text(path, "".join(text + "\n" for text in kept), "monitor.forget")
