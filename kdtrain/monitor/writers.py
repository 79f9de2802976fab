"""The logs of a run: `metrics.jsonl`, `events.jsonl`, `samples.jsonl`, and its loggers.

A run that resumes from step s first removes the lines after s, so that each step has one line; so does a run that rolls
back while it trains (`rewind`). Events are never removed; each has a level, and every warning is an event. A line that
cannot be read, because a kill cut it short or a byte is damaged, is removed and counted.
"""

import json
import math
import os
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Literal

import torch

from kdtrain.config.choices import LOGGERS
from kdtrain.config.sections import MonitorConfig
from kdtrain.errors import RunError, UsageError, early_warnings, log, warn_early
from kdtrain.files import publish_text
from kdtrain.monitor.loggers import Logger
from kdtrain.monitor.record import lines
from kdtrain.ranks import copies
from kdtrain.tables import finite

Level = Literal["info", "warning", "error"]


class Writers:
    """The log files of one run, and its loggers.

    Args:
        folder: the run.
        resume_step: the step from which the run resumes; lines of later steps are removed.
        validated_step: the last step whose validation the run has; validations of later steps are removed.
        config: which loggers to use.
        observers: of the run; they get its events (`kdtrain.training.observers`).

    Raises:
        UsageError: a log is not a regular file.
        RunError: a logger does not start.
    """

    def __init__(
        self,
        folder: Path,
        resume_step: int,
        validated_step: int | None,
        config: MonitorConfig,
        observers: Sequence[Any] = (),
    ) -> None:
        self.folder, self.observers = folder, observers
        self.loggers: list[Logger] = [LOGGERS.get(name)(folder, text, resume_step) for name, text in config.loggers]
        self.shows_histograms = bool(self.loggers)
        self.failure = ""
        for name in ("metrics.jsonl", "samples.jsonl"):
            _forget(folder / name, resume_step, -1 if validated_step is None else validated_step)
        _forget(folder / "events.jsonl", math.inf, math.inf)
        self.file = open(folder / "metrics.jsonl", "a", buffering=1)  # noqa: SIM115  # closed by close()
        for kind, text in early_warnings():
            self.event(kind, resume_step, "warning", message=text)

    def metrics(
        self, step: int, numbers: Mapping[str, float], tables: Mapping[str, Sequence[Sequence[float]]] | None = None
    ) -> None:
        """Write the numbers of `step`; a non-finite number is written as null.

        tables: lists of finite numbers, for `metrics.jsonl` alone.
        """
        self.file.write(json.dumps({"step": step, **finite(dict(numbers)), **(tables or {})}) + "\n")
        shown = {
            name if name.startswith("validation/") else f"train/{name.replace('/', '_per_')}": value
            for name, value in numbers.items()
        }
        for logger in self.loggers:
            logger.scalars(step, shown)
        self._report_failures(step)

    def event(self, kind: str, step: int, level: Level = "info", **details: Any) -> None:
        """Write an intervention (start, resume, stop, best, ...) with its time in seconds since 1970.

        The `failure` of a run stays its last event.
        """
        record = {"time": time.time(), "event": kind, "level": level, "step": step, **details}
        for each in self.observers:  # first: the disk may be full
            each.event(record)
        path = self.folder / "events.jsonl"
        text = json.dumps(record) + "\n"
        if self.failure:
            publish_text(path, path.read_text().removesuffix(self.failure) + text + self.failure, "monitor.failure")
        else:
            _append(path, record)
        self.failure = text if kind == "failure" else self.failure
        for logger in self.loggers:
            logger.event(step, kind, details)

    def warning(self, kind: str, step: int, text: str, **details: Any) -> None:
        """Log `text` as a warning, and write it as the `message` of an event."""
        log.warning(text)
        self.event(kind, step, "warning", message=text, **details)

    def histograms(self, step: int, tensors: Mapping[str, torch.Tensor]) -> None:
        """Send the distributions of `tensors` to the loggers, if there are any."""
        if not self.shows_histograms:
            return
        from kdtrain.monitor.histograms import histograms  # which a run without loggers does not load

        found = histograms(tensors)
        for logger in self.loggers:
            logger.histograms(step, found)

    def samples(self, step: int, rows: Sequence[Mapping[str, str]]) -> None:
        """Write texts of the student into `samples.jsonl` and to the loggers."""
        for row in rows:
            _append(self.folder / "samples.jsonl", {"step": step, **row})
        for logger in self.loggers if rows else ():
            logger.table(step, "samples", rows)

    def hyperparameters(self, options: Mapping[str, Mapping[str, Any]]) -> None:
        """Send a run's options by section (`config.sections`) to the loggers, without options that are None."""
        flat = {
            f"{section}/{name}": value if isinstance(value, bool | int | float | str) else str(value)
            for section, table in options.items()
            for name, value in table.items()
            if value is not None
        }
        for logger in self.loggers:
            logger.hyperparameters(flat)

    def rewind(self, step: int) -> None:
        """Remove the lines of steps after `step`."""
        self.file.close()
        for name in ("metrics.jsonl", "samples.jsonl"):
            _forget(self.folder / name, step, step)
        self.file = open(self.folder / "metrics.jsonl", "a", buffering=1)  # noqa: SIM115  # closed by close()
        for logger in self.loggers:
            logger.rewind(step)

    def _report_failures(self, step: int) -> None:
        for each in self.observers:
            each.warn(lambda kind, text: self.warning(kind, step, text))

    def end_observers(self, step: int) -> None:
        """Give observers a few seconds for the last events."""
        for each in self.observers:
            each.close()
        with suppress(OSError, RunError):  # a full disk may be what the last event was about
            self._report_failures(step)

    def close(self) -> None:
        """Close all files and loggers; `event` still works, for the file."""
        self.file.close()
        while self.loggers:
            self.loggers.pop().close()


class SilentWriters(Writers):
    """The writers of all ranks but rank 0, which write nothing."""

    def __init__(self, config: MonitorConfig) -> None:
        self.shows_histograms = bool(config.loggers)
        self.loggers = []

    def _nothing(self, *_: Any, **__: Any) -> None: ...

    metrics = event = samples = hyperparameters = rewind = end_observers = close = _nothing

    def histograms(self, step: int, tensors: Mapping[str, torch.Tensor]) -> None:
        """Add this rank's parts of sharded tensors to the histograms of rank 0."""
        if self.shows_histograms and any(map(copies, tensors.values())):
            from kdtrain.monitor.histograms import histograms

            histograms(tensors)


def _append(path: Path, entry: Mapping[str, Any]) -> None:
    """Append one line.

    Raises:
        OSError: with the file's name, which an error of a write lacks.
    """
    try:
        with open(path, "a") as file:
            file.write(json.dumps(entry) + "\n")
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(path)) from None


def _forget(path: Path, trained: float, validated: float) -> None:
    """Remove the lines after step `trained` (of validation, after `validated`), and lines that cannot be read.

    Raises:
        UsageError: it is not a regular file, or too large to be a log.
    """
    if not os.path.lexists(path):
        return
    kept, unreadable = [], []
    try:
        for number, (text, record) in enumerate(lines(path), 1):
            if record is None:
                unreadable.append(number)
            elif record["step"] <= (validated if "validation/loss" in record else trained):
                kept.append(text)
    except ValueError as error:
        raise UsageError(f"{error}; move it away") from None
    if unreadable:
        count = f"{len(unreadable)} lines that cannot be read, first line {unreadable[0]}"
        warn_early("unreadable-lines", f"{path}: removed {count}")
    publish_text(path, "".join(text + "\n" for text in kept), "monitor.forget")
