"""Progress: a bar on a terminal and in a notebook, plain lines elsewhere, and `train.log` in each case.

All output goes to stderr, so that stdout holds only the result of a command; in a notebook, which shows stderr in red,
to the cell's output. A line of a step fits 80 columns: what is least missed is left out first.
"""

import builtins
import logging
import math
import sys
import time
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from rich.console import Console, RenderableType
from rich.highlighter import NullHighlighter
from rich.logging import RichHandler
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
from rich.table import Column
from rich.text import Text

from kdtrain.errors import UsageError, early_warnings, log, printable
from kdtrain.tables import LONG, duration, loss_text, number, short

console = Console(stderr=True)
_hushed = False


def setup_logging(file: Path | None = None, quiet: bool = False) -> None:
    """Send the log of kdtrain to stderr and, if given, to the end of `file`.

    quiet: print nothing on stderr, not even bars, because another rank does.
    """
    console.quiet = quiet
    quiet = quiet or _hushed
    if file is None:
        early_warnings()
    log.setLevel(logging.INFO)
    log.propagate = False
    for handler in list(log.handlers):
        log.removeHandler(handler)
        handler.close()
    if quiet:
        log.addHandler(logging.NullHandler())
    else:  # what a person sees, with hours and minutes; the date is in the log file
        if console.is_terminal:
            handler = RichHandler(
                console=console, show_path=False, show_level=False, show_time=False, highlighter=NullHighlighter()
            )
        else:
            handler = logging.StreamHandler(sys.stdout if console.is_jupyter else sys.stderr)
            handler.setFormatter(_OneLine("%(asctime)s %(message)s", "%H:%M"))
        if console.is_terminal or console.is_jupyter:
            handler.addFilter(lambda record: not getattr(record, "in_bar", False))
        log.addHandler(handler)
    if file is not None:
        if file.exists() and not file.is_file():  # opening a pipe for writing blocks until it has a reader
            raise UsageError(f"{file} is not a regular file; move it away")
        handler = _LogFile(file)
        handler.setFormatter(_OneLine("%(asctime)s %(message)s", "%Y-%m-%d %H:%M:%S"))
        log.addHandler(handler)


@contextmanager
def hushed() -> Iterator[None]:
    """Keep lines logged in the block off stderr, where bars stay; log files get them."""
    global _hushed
    before = _hushed
    _hushed = True
    setup_logging()
    try:
        yield
    finally:
        _hushed = before
        setup_logging()


def end_log(text: str) -> None:
    """Write the error that ends a run into the log file; on stderr the command prints it."""
    record = log.makeRecord(log.name, logging.ERROR, "", 0, " ".join(text.split()), (), None)
    for handler in log.handlers:
        if isinstance(handler, _LogFile):
            handler.handle(record)


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


def log_step(text: str) -> None:
    """Log the line of a step, which the bar of a terminal or a notebook shows already."""
    log.info("%s", text, extra={"in_bar": True})


class _TwoLines(Progress):
    """Bars, each with a second line below."""

    def get_renderables(self) -> Iterator[RenderableType]:
        """Yield the lines from top to bottom."""
        for task in self.tasks:
            yield self.make_tasks_table([task])
            if task.fields["more"]:
                yield Text(task.fields["more"], no_wrap=True, overflow="ellipsis")


class _Cell:
    """Lines in a notebook's cell that are written again and again."""

    def __init__(self) -> None:
        self.shown = False

    def show(self, text: str) -> None:
        shell = vars(builtins)["get_ipython"]()  # as rich has found it
        place = {"display_id": f"kdtrain-{id(self)}"}
        shell.display_pub.publish({"text/plain": text}, transient=place, update=self.shown)
        self.shown = True


class Bar:
    """A progress bar of two lines on a terminal or in a notebook; elsewhere a plain line now and then.

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
        column = Column(no_wrap=True)
        self.bar = _TwoLines(
            TextColumn("{task.description}", table_column=column),
            BarColumn(bar_width=16, table_column=column),
            TextColumn("{task.fields[share]}", table_column=column),
            MofNCompleteColumn(table_column=column),
            # A line that is too long is cut at its end; the columns before do not shrink.
            TextColumn("{task.fields[text]}", table_column=Column(no_wrap=True, overflow="ellipsis", ratio=1)),
            console=console,
            disable=not console.is_terminal,
            transient=True,
            expand=True,
        )
        self.task = self.bar.add_task(what, total=total, completed=done, text="", more="", share="")
        self.cell = _Cell() if console.is_jupyter and not console.quiet else None

    def update(self, done: int, text: str = "", total: int | None = None, more: str = "") -> None:
        """Show that `done` units are done; `text` stands beside the bar, `more` below it."""
        self.total = self.total if total is None else total
        self.done = done
        text = text or self.rate()
        share = f"{done / self.total:.0%}".replace("%", " %") if self.total else ""
        self.bar.update(self.task, completed=done, total=self.total, text=text, more=more, share=share)
        waits = 0.5 if self.cell is not None else self.every
        if console.is_terminal or (time.monotonic() - self.logged <= waits and done != self.total):
            return
        self.logged = time.monotonic()
        if self.cell is not None:
            filled = round(16 * done / self.total) if self.total else 0
            head = f"{self.what} {'█' * filled}{'░' * (16 - filled)} {done:,}/{self.total or '?'} | {text}"
            self.cell.show("\n".join(filter(None, (head, more))))
        elif self.every < math.inf:
            log.info("%s %d/%s | %s", self.what, done, self.total or "?", text)

    def rate(self) -> str:
        """Return the units a second since the start, and the time left."""
        seconds = max(time.monotonic() - self.started, 1e-9)
        rate = (self.done - self.start_done) / seconds
        left = "" if not self.total or rate == 0 else f" | {duration((self.total - self.done) / rate)} left"
        return f"{short(rate) if rate >= 100 else number(round(rate, 1))} {self.unit}/s{left}"


@contextmanager
def bar(what: str, total: int | None, done: int = 0, unit: str = "sequences") -> Iterator[Bar]:
    """Yield a `Bar`, drawn while the block runs."""
    shown = Bar(what, total, done, unit)
    with shown.bar:
        yield shown


class Throughput:
    """The speed of training, over the last steps of this process.

    Args:
        total: number of optimizer steps.
        window: number of steps averaged.
    """

    def __init__(self, total: int, window: int = 50) -> None:
        self.total = total
        self.times: deque[tuple[float, int]] = deque(maxlen=window)

    def add(self, step: int, tokens: int, now: float) -> dict[str, float]:
        """Return tokens per second and hours left after `step`, which had `tokens` and ended at `now`, in seconds.

        Empty after the first step, whose time includes compilation.
        """
        self.times.append((now, tokens))
        seconds = now - self.times[0][0]
        steps = len(self.times) - 1
        if seconds <= 0:
            return {}
        rate = sum(count for _, count in list(self.times)[1:]) / seconds
        return {"tok/s": rate, "eta_h": (self.total - step) * seconds / steps / 3600}


def formula(
    alpha: float | str, divergence: str, hidden: float | None, replays: bool = False, router: float = 0.0
) -> str:
    """Return the objective in the words of a step's line: `.9 kl + .1 ce`; with `auto`, `alpha kl + (1 - alpha) ce`.

    replays: whether sequences without a teacher are mixed in. Their cross-entropy is part of ce, and has the weight 1.
    router: weight of the router's loss of a mixture of experts; 0 without one.
    """
    teacher, text = ("alpha", "(1 - alpha)") if isinstance(alpha, str) else (alpha, 1 - alpha)
    terms = [(teacher, "kl" if divergence == "forward-kl" else divergence), (text, "ce"), (hidden or 0.0, "hidden")]
    if replays:
        terms.append((teacher, "ce of replay"))
    terms.append((router, "router"))
    return " + ".join(f"{weight_text(weight)}{name}" for weight, name in terms if weight) or "ce"


def term_name(divergence: str) -> str:
    """Return a divergence's name in a step's line: kl for forward-kl, else its own name without numbers."""
    name = divergence.partition(":")[0]
    return "kl" if name == "forward-kl" else name


def weight_text(weight: float | str) -> str:
    """Return a weight before a term: nothing for 1, else two digits, as `.9 `, or its name."""
    if isinstance(weight, str):
        return f"{weight} "
    return "" if weight == 1 else f"{weight:.2g} ".removeprefix("0")


AVERAGED = 50
"""Steps over which the line of a step averages the loss."""


class StepText:
    """The words about a step, by part: loss, T, lr, rate, left.

    Args:
        alpha: weight of the divergence; 0 for cross-entropy alone.
        divergence: its name.
        hidden: weight of the hidden-state loss; None without one.
        learned: whether T is learned.
        router: weight of the router's loss of a mixture of experts; 0 without one.
    """

    def __init__(self, alpha: float, divergence: str, hidden: float | None, learned: bool, router: float = 0.0) -> None:
        self.alpha = alpha
        self.name = term_name(divergence)
        self.hidden = hidden
        self.learned = learned
        self.router = router
        self.window: deque[tuple[float, ...]] = deque(maxlen=AVERAGED)

    def add(self, numbers: Mapping[str, float]) -> dict[str, str]:
        """Add a step's numbers, by their names in metrics.jsonl; return its words. Losses are means of recent steps.

        The terms are those of the sum: the divergence is multiplied by T squared.
        """
        temperature = numbers.get("T", 1.0)
        kept = (numbers.get("kd", math.nan) * temperature**2, numbers.get("ce", math.nan))
        others = (numbers.get(name, 0.0) for name in ("hidden", "ce_alone", "router"))
        self.window.append((numbers.get("loss", math.nan), *kept, *others))
        loss, *terms = (sum(each) / len(self.window) for each in zip(*self.window, strict=True))
        alpha = numbers.get("alpha", self.alpha) if "kd" in numbers else 0.0
        weights = (alpha, 1 - alpha, self.hidden or 0.0, alpha if "ce_alone" in numbers else 0.0, self.router)
        shown = zip(weights, (self.name, "ce", "hidden", "ce of replay", "router"), terms, strict=True)
        sum_of = " + ".join(
            f"{weight_text(weight)}{name} {loss_text(term, 2)}" for weight, name, term in shown if weight
        )
        parts = {"loss": f"loss {loss_text(loss, 2)}" + (f" = {sum_of}" if alpha or self.hidden or self.router else "")}
        if self.learned and "T" in numbers:
            parts["T"] = f"T {temperature:.2f}"
        if "lr" in numbers:
            parts["lr"] = f"lr {numbers['lr']:.1e}"
        return parts | pace(numbers)


def pace(numbers: Mapping[str, float]) -> dict[str, str]:
    """Return the words of a step's speed and of the time left, by part, as far as its numbers have them."""
    parts = {}
    if math.isfinite(rate := numbers.get("tok/s", math.nan)):
        parts["rate"] = f"{short(rate)} tok/s"
    if math.isfinite(hours := numbers.get("eta_h", math.nan)):
        parts["left"] = f"{duration(hours * 3600)} left"
    return parts


def one_line(head: str, parts: Mapping[str, str], width: int = 74) -> str:  # beside the time, on a terminal of 80
    """Return `head` and the parts on a line of at most `width` columns, if leaving out lr, rate and time left suffices.

    Without the age of the checkpoint and the memory, which only the bar has.
    """
    kept = {name: text for name, text in parts.items() if name not in ("checkpoint", "memory")}
    for change in ("", "lr", "unit", "rate", "left"):
        if change == "unit" and "rate" in kept:
            kept["rate"] = kept["rate"].replace(" tok/s", "/s")
        kept.pop(change, None)
        if len(text := "  ".join((head, *kept.values()))) <= width:
            break
    return text


def validation_line(step: int, numbers: Mapping[str, float], before: float | None, best: bool) -> str:
    """Return the line of a validation: its loss, the change since the last, the teacher's, and whether it is best."""
    loss = numbers["validation/loss"]
    teacher = numbers.get("validation/teacher_loss")
    change = "" if before is None or abs(loss) >= LONG else f" ({loss - before:+.3f})"
    text = f"val @{step} {loss_text(loss)}{change}"
    text += ("" if teacher is None else f" teacher {loss_text(teacher)}") + (" best" if best else "")
    if "validation/compared" in numbers and (bits := numbers.get("validation/bits_per_byte")) is not None:
        own = numbers.get("validation/teacher_bits_per_byte")
        text += f", {bits:.3f} bits/byte" + ("" if own is None else f" teacher {own:.3f}")
    return text


def members_line(step: int, numbers: Mapping[str, float], members: Iterable[str]) -> str:
    """Return the line of a validation's members: the loss of each, and its teacher's."""
    texts = []
    for name in members:
        teacher = numbers.get(f"validation/{name}/teacher_loss")
        loss = f"{name} {loss_text(numbers[f'validation/{name}/loss'])}"
        texts.append(loss if teacher is None else f"{loss} teacher {loss_text(teacher)}")
    return f"val @{step} by cache: {', '.join(texts)}"
