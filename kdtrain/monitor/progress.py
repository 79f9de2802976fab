"""Progress: a bar with rate and ETA on a terminal, plain lines elsewhere, and `train.log` in both cases.

All output goes to stderr, so that stdout holds only the result of a command.
"""

import logging
import sys
import time
from collections import deque
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.logging import RichHandler
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Column

from kdtrain.errors import UsageError, printable

log = logging.getLogger("kdtrain")
console = Console(stderr=True)
_early: list[tuple[str, str]] = []


def setup_logging(file: Path | None = None, quiet: bool = False) -> None:
    """Send the log of kdtrain to stderr and, if given, to the end of `file`.

    quiet: print nothing on stderr, not even bars, because another rank does.
    """
    console.quiet = quiet
    if file is None:
        _early.clear()
    log.setLevel(logging.INFO)
    log.propagate = False
    for handler in list(log.handlers):
        log.removeHandler(handler)
        handler.close()
    if quiet:
        log.addHandler(logging.NullHandler())
    elif console.is_terminal:
        log.addHandler(RichHandler(console=console, show_path=False, show_level=False, markup=False))
    else:
        log.addHandler(_plain(logging.StreamHandler(sys.stderr)))
    if file is not None:
        if file.exists() and not file.is_file():  # opening a pipe for writing blocks until it has a reader
            raise UsageError(f"{file} is not a regular file; move it away")
        log.addHandler(_plain(_LogFile(file)))


def end_log(text: str) -> None:
    """Write the error that ends a run into the log file; on stderr the command prints it."""
    record = log.makeRecord(log.name, logging.ERROR, "", 0, " ".join(text.split()), (), None)
    for handler in log.handlers:
        if isinstance(handler, _LogFile):
            handler.handle(record)


def warn_early(kind: str, text: str) -> None:
    """Log a warning of a run whose files are not open yet; `Writers` later writes it as an event."""
    log.warning(text)
    _early.append((kind, text))


def early_warnings() -> list[tuple[str, str]]:
    """Kind and text of each `warn_early` since the last call."""
    found = _early.copy()
    _early.clear()
    return found


class _OneLine(logging.Formatter):
    """A record on one line, with control characters escaped."""

    def formatMessage(self, record: logging.LogRecord) -> str:
        return printable(super().formatMessage(record))


class _LogFile(logging.FileHandler):
    """A log file whose errors, such as a full disk, end the run instead of being printed on stderr."""

    def handleError(self, record: logging.LogRecord) -> None:
        error = sys.exception()
        assert error is not None
        raise OSError(getattr(error, "errno", None), str(error), self.baseFilename) from error


def _plain(handler: logging.Handler) -> logging.Handler:
    handler.setFormatter(_OneLine("%(asctime)s %(message)s", "%Y-%m-%d %H:%M:%S"))
    return handler


class Bar:
    """A progress bar on a terminal; elsewhere a plain line now and then.

    Args:
        what: the start of the line.
        total: number of units, None if unknown.
        done: units done before.
        every: seconds between plain lines.
    """

    def __init__(self, what: str, total: int | None, done: int = 0, unit: str = "", every: float = 10.0) -> None:
        self.what, self.total, self.unit, self.every = what, total, unit, every
        self.start_done, self.done = done, done
        self.started = self.logged = time.monotonic()
        self.bar = Progress(
            TextColumn("{task.description}", table_column=Column(no_wrap=True)),
            BarColumn(bar_width=16, table_column=Column(no_wrap=True)),
            MofNCompleteColumn(table_column=Column(no_wrap=True)),
            TimeRemainingColumn(table_column=Column(no_wrap=True)),
            # A line that is too long is cut at its end; the columns before do not shrink.
            TextColumn("{task.fields[text]}", table_column=Column(no_wrap=True, overflow="ellipsis", ratio=1)),
            console=console,
            disable=not console.is_terminal,
            transient=True,
            expand=True,
        )
        self.task = self.bar.add_task(what, total=total, completed=done, text="")

    def update(self, done: int, text: str = "", total: int | None = None) -> None:
        """Show that `done` units are done."""
        self.total = self.total if total is None else total
        self.done = done
        self.bar.update(self.task, completed=done, total=self.total, text=text or self.rate())
        if not console.is_terminal and time.monotonic() - self.logged > self.every:
            self.logged = time.monotonic()
            log.info("%s %d/%s %s", self.what, done, self.total or "?", text or self.rate())

    def rate(self) -> str:
        """Units a second since the start, and the time left in minutes."""
        seconds = max(time.monotonic() - self.started, 1e-9)
        rate = (self.done - self.start_done) / seconds
        left = "" if not self.total or rate == 0 else f" eta_min={(self.total - self.done) / rate / 60:.1f}"
        return f"{self.unit}/s={rate:,.1f}{left}"


@contextmanager
def bar(what: str, total: int | None, done: int = 0, unit: str = "sequences") -> Iterator[Bar]:
    """A `Bar`, drawn while the block runs."""
    shown = Bar(what, total, done, unit)
    with shown.bar:
        yield shown


class Rate:
    """The speed of training, over the last steps of this process.

    Args:
        total: number of optimizer steps.
        window: number of steps averaged.
    """

    def __init__(self, total: int, window: int = 50) -> None:
        self.total = total
        self.times: deque[tuple[float, int]] = deque(maxlen=window)

    def add(self, step: int, tokens: int, now: float) -> dict[str, float]:
        """Tokens a second and hours left after `step`, which had `tokens` and ended at `now`, in seconds.

        Empty after the first step, whose time includes compilation.
        """
        self.times.append((now, tokens))
        seconds = now - self.times[0][0]
        steps = len(self.times) - 1
        if seconds <= 0:
            return {}
        rate = sum(count for _, count in list(self.times)[1:]) / seconds
        return {"tok/s": rate, "eta_h": (self.total - step) * seconds / steps / 3600}


def formula(alpha: float, divergence: str, hidden: float | None) -> str:
    """The objective in the words of a step's line: `.9 kl + .1 ce`."""
    terms = [(alpha, term_name(divergence)), (1 - alpha, "ce"), (hidden or 0.0, "hidden")]
    return " + ".join(f"{weight_text(weight)}{name}" for weight, name in terms if weight) or "ce"


def term_name(divergence: str) -> str:
    """A divergence in a step's line: kl for forward-kl, and its own name without numbers else."""
    name = divergence.partition(":")[0]
    return "kl" if name == "forward-kl" else name


def weight_text(weight: float) -> str:
    """A weight before a term: nothing for 1, else two digits, as `.9 `."""
    return "" if weight == 1 else f"{weight:.2g} ".removeprefix("0")


STATUS = (
    *("loss", "loss_avg", "kd_T1", "hidden", "T", "dL/dlogT", "lr", "grad_norm", "tok/s", "eta_h"),
    *("ckpt", "memory_mb", "mem_delta", "mode"),
)
"""The numbers in a step's line and in the bar, in this order; docs/monitoring.md explains each."""


def status(numbers: Mapping[str, Any]) -> str:
    """The line of a step, from those of the `STATUS` numbers that it has."""
    return line({name: numbers[name] for name in STATUS if name in numbers})


def line(numbers: Mapping[str, Any]) -> str:
    """Numbers (and the mode, a word) as one line of name=value, rounded for reading."""
    formats = {
        "lr": ".2e",
        "tok/s": ",.0f",
        "eta_h": ".2f",
        "memory_mb": ",.0f",
        "mem_delta": "+,.0f",
        "ckpt": "d",
        "grad_norm": ".3f",
        "T": ".3f",
        "mode": "s",
    }
    return " ".join(
        f"{name}={value:{formats.get(name) or ('.4f' if abs(value) < 1e6 else '.4g')}}"
        for name, value in numbers.items()
    )
