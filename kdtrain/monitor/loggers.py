"""Loggers, which show a run by step: a package or a plugin adds one by `register_logger`."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kdtrain.config.choices import LOGGERS


@dataclass(frozen=True)
class Histogram:
    """Counts of the finite numbers of one tensor, by the names of TensorBoard's `add_histogram_raw`."""

    min: float
    max: float
    num: int
    sum: float
    sum_squares: float
    bucket_limits: list[float]
    """Upper edges of the bins, ascending, without empty bins at either end."""
    bucket_counts: list[int]
    """Numbers in each bin, as many as `bucket_limits`."""


class Logger:
    """A place that shows a run by step; a subclass overrides the methods that it supports. Rank 0 alone makes one.

    Args:
        folder: the run.
        text: what follows the name and a colon in `--log-to`, or "".
        resume_step: the step from which the run resumes; 0 for a new run.
    """

    def __init__(self, folder: Path, text: str, resume_step: int) -> None: ...

    @classmethod
    def ready(cls, text: str) -> None:
        """Raise a `UsageError` if it cannot be used here; called on every rank before anything is written."""

    def scalars(self, step: int, numbers: Mapping[str, float]) -> None:
        """Show numbers by their full name."""

    def histograms(self, step: int, found: Mapping[str, Histogram]) -> None:
        """Show histograms by their full name."""

    def table(self, step: int, name: str, rows: Sequence[Mapping[str, str]]) -> None:
        """Show at least one row of text; the columns are the keys of the first one."""

    def event(self, step: int, kind: str, details: Mapping[str, Any]) -> None:
        """Show an intervention or a warning."""

    def hyperparameters(self, options: Mapping[str, bool | float | str]) -> None:
        """Show the options of the run."""

    def rewind(self, step: int) -> None:
        """Undo the steps after `step`."""

    def close(self) -> None:
        """Finish the pending writes."""


def register_logger(name: str, *, help: str = "") -> Callable[[type[Logger]], type[Logger]]:
    """Return a decorator that adds a subclass of `Logger` as `--log-to NAME` or `NAME:TEXT`.

    A package does so in the module that its entry point of group `kdtrain.loggers` names (kdtrain.registry).

    Args:
        name: the name that users type.
        help: its line in `--help`; by default the first line of the class's docstring.
    """
    return LOGGERS.registers(name, help)
