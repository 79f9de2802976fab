"""Reads a run from its folder: options, environment, metrics, events and result, each typed and bounded.

`RunRecord.read` is the one place that parses what `monitor.writers` and `commands` write, for reports, comparisons and
studies. A run may be of unknown origin, or still be training: a file that is missing is empty here, and a line that
cannot be read (cut short by a kill, or damaged) is left out, as a resuming run would leave it out.
"""

import itertools
import json
import math
import os
import statistics
import time
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

from msgspec import Meta

from kdtrain.errors import UsageError, as_path, printable, writing
from kdtrain.files import SMALL, open_regular, parse_json, read_json, read_toml, typed
from kdtrain.tables import finite

MOST_BYTES = 2**30
"""Most bytes of a log that is read; a million steps have about 4e8."""
_FARTHEST = 1e30
"""No place on an axis is as far; what lies beyond was not written by a run."""
EVALUATIONS = "evaluations.jsonl"
SWEEP = "sweep.json"
_LARGEST = 2**53
"""The largest step; beyond it floats do not count."""
_Share = Annotated[float, Meta(ge=0, le=1)]
_Bins = Annotated[list[tuple[Annotated[float, Meta(ge=0, le=_LARGEST)], _Share, _Share]], Meta(max_length=100)]
"""A reliability diagram as it is logged."""

Line = dict[str, float]
"""The numbers of one line of metrics.jsonl by name, `step` among them; NaN where a number was non-finite."""


@dataclass(frozen=True)
class Event:
    """An intervention or a warning: a line of events.jsonl."""

    event: str
    """Its kind: start, resume, switch, skip, rollback, stop, ..."""
    level: str
    """info, warning or error."""
    step: int
    """The last finished step."""
    details: dict[str, Any]
    """Its other fields."""


@dataclass(frozen=True)
class RunRecord:
    """The logs of a run, as read from its folder."""

    options: dict[str, dict[str, Any]] = field(default_factory=dict)
    """The options of config.toml by section."""
    environment: dict[str, Any] = field(default_factory=dict)
    metrics: list[Line] = field(default_factory=list)
    """In the order of the file: a step, then its validation."""
    events: list[Event] = field(default_factory=list)
    result: dict[str, Any] | None = None
    """How the run ended; None while it trains, and after a kill."""
    evaluations: list[dict[str, Any]] = field(default_factory=list)
    """What `evaluate` measured of it, in order: split, cache or data, checkpoint, step, date, and numbers by name."""
    calibration: list[dict[str, float]] = field(default_factory=list)
    """The reliability diagram of the last validation: `tokens`, `confidence` and `accuracy` of each bin of confidence,
    in order; empty where the run did not log it."""

    @classmethod
    def read(cls, folder: Path | str, last: int | None = None) -> "RunRecord":
        """Read the run in `folder`; of its metrics and events only the `last` bytes, or all.

        Raises:
            OSError: a file cannot be read.
            ValueError: a file is not what a run writes, or is too large; names the file.
            UsageError: there is no such folder.
        """
        if not (folder := as_path(folder, "folder")).is_dir():
            raise UsageError(f"{folder} is not a run")
        metrics = []
        bins = list[tuple[float, float, float]]()
        for _, record in lines(folder / "metrics.jsonl", last):
            if record is not None and 0 <= record["step"] <= _LARGEST:
                found = {name: math.nan if value is None else value for name, value in record.items()}
                metrics.append({name: value for name, value in found.items() if _is_number(value)})
                if (diagram := record.get("validation/calibration")) is not None:
                    with suppress(ValueError):
                        bins = typed(diagram, _Bins) or bins
        return cls(
            _table(folder / "config.toml"),
            _table(folder / "environment.json"),
            metrics,
            list(events(folder, last)),
            _table(folder / "result.json") or None,
            [record for _, record in lines(folder / EVALUATIONS, last) if record is not None],
            [dict(zip(("tokens", "confidence", "accuracy"), each, strict=True)) for each in bins],
        )

    @property
    def given(self) -> dict[str, Any]:
        """The options of config.toml, by name."""
        return {name: value for table in self.options.values() for name, value in as_table(table).items()}

    @staticmethod
    def arm_of(folder: Path) -> tuple[str, ...]:
        """Return the names of sweep and arm to which the run in `folder` belongs; nothing outside a sweep."""
        arm = folder.resolve().parent
        return (arm.parent.name, arm.name) if (arm.parent / SWEEP).is_file() else ()

    def stated(self, table: str, name: str) -> Any:
        """Return an entry of a table of environment.json; None where either is missing."""
        return as_table(self.environment.get(table)).get(name)

    @property
    def steps(self) -> list[Line]:
        """The lines of optimizer steps."""
        return [line for line in self.metrics if "loss" in line]

    @property
    def validations(self) -> list[Line]:
        """The lines of validations."""
        return [line for line in self.metrics if "validation/loss" in line]

    @property
    def last_step(self) -> int:
        """The step of the last line; 0 without one."""
        return int(self.metrics[-1]["step"]) if self.metrics else 0

    @property
    def newest(self) -> Line:
        """The last line of a step; empty without one."""
        return next(reversed(self.steps), {})

    @property
    def validated(self) -> Line:
        """The last line of a validation; empty without one."""
        return next(reversed(self.validations), {})

    @property
    def test(self) -> dict[str, Any]:
        """The last numbers of `evaluate` on a test split; empty without one."""
        return next((each for each in reversed(self.evaluations) if each.get("split") == "test"), {})

    @property
    def tested_on(self) -> str | None:
        """The text of the last test, and the teacher that read it too, in words; None without a test."""
        return text_of(self.test) if self.test else None

    @property
    def alphas(self) -> tuple[float, float] | None:
        """The mean and the last of the weights of an alpha that moves; None without one."""
        found = [value for _, value in self.curve("alpha")]
        return (math.fsum(found) / len(found), found[-1]) if found else None

    def median_rate(self, name: str = "tok/s_last") -> float | None:
        """Return the median of a rate, tokens/s, over the later half of the steps: early ones wait for the compiler."""
        rates = [line[name] for line in self.metrics if line.get(name)]
        return statistics.median(rates[len(rates) // 2 :]) if rates else None

    def curve(self, name: str) -> list[tuple[int, float]]:
        """Return step and value of a number of metrics.jsonl, where it was logged and finite."""
        return [(int(line["step"]), line[name]) for line in self.metrics if math.isfinite(line.get(name, math.nan))]

    def places(self, axis: str) -> dict[int, float]:
        """Return each step's place on the axis `steps`, `tokens` or `minutes`, the steps of a rollback left out.

        Minutes count optimizer steps alone, without validation, checkpoints and pauses. The first step of a process,
        which waits for the compiler, counts as the median step.
        """
        steps = self.steps
        numbers = [int(line["step"]) for line in steps]
        if axis == "steps":
            return {int(line["step"]): line["step"] for line in self.metrics}
        counts = (line.get("tokens", 0.0) for line in steps)
        tokens = [number if 0 <= number < _FARTHEST else 0.0 for number in counts]
        if axis == "tokens":
            each = tokens
        else:
            rates = [line.get("tok/s_last", 0.0) for line in steps]
            times = [count / rate / 60 if rate > 0 else None for count, rate in zip(tokens, rates, strict=True)]
            usual = statistics.median([time for time in times if time is not None] or [0.0])
            each = [usual if time is None else time for time in times]
        places = zip(numbers, itertools.accumulate(each), strict=True)
        return {0: 0.0, **{step: place for step, place in places if place < _FARTHEST}}


def events(folder: Path, last: int | None = None) -> Iterator[Event]:
    """Yield the events of the run in `folder`, or the events in its `last` bytes. OSError, ValueError: as `lines`."""
    for _, record in lines(folder / "events.jsonl", last):
        with suppress(ValueError):
            known = {name: (record or {}).pop(name, None) for name in ("event", "level", "step")}
            yield typed({**known, "details": record or {}}, Event)


def text_of(found: Mapping[str, Any]) -> str:
    """Describe the text of an evaluation, and the teacher that read it too."""
    text = f"the cache {str(found['cache'])[:12]}" if found.get("cache") else found.get("data")
    beside = f", beside {found['teacher']}" if found.get("teacher") else ""
    return printable(f"{found.get('sequences')} sequences of the {found.get('split')} split of {text}{beside}")[:160]


def add_evaluation(folder: Path, found: Mapping[str, Any]) -> None:
    """Append the numbers of `evaluate` to the record of a run. RunError: it cannot be written."""
    line = json.dumps(finite({"date": time.strftime("%Y-%m-%d"), **found})) + "\n"
    with writing(folder / EVALUATIONS), open(folder / EVALUATIONS, "a", encoding="utf-8") as file:
        file.write(line)


def lines(path: Path, last: int | None = None) -> Iterator[tuple[str, dict[str, Any] | None]]:
    """Yield each line of a log, as text and as a record; None for a line that is not a record. Without a file: nothing.

    last: read only the lines that begin in so many bytes at the end of the file.

    Raises:
        OSError: the file cannot be read.
        ValueError: it is not a regular file, or too large to be a log.
    """
    try:
        file = open_regular(path)
    except FileNotFoundError:
        return
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None
    with file:
        length = os.fstat(file.fileno()).st_size
        if last is not None and length > last:
            file.seek(length - last)
            file.readline(SMALL)
        elif length > MOST_BYTES:
            raise ValueError(f"{path}: it has more than {MOST_BYTES:,} bytes")
        for line in iter(lambda: file.readline(SMALL), b""):
            text = line.decode(errors="replace").rstrip("\n")
            record = None
            with suppress(ValueError):
                found = typed(parse_json(line.decode()), dict[str, Any])
                typed(found.get("step"), int)
                record = found
            yield text, record


def _is_number(value: Any) -> bool:
    return type(value) is float or (type(value) is int and abs(value) <= _LARGEST)


def as_table(value: Any) -> Mapping[str, Any]:
    """Return a value that should be a mapping; empty if it is not one."""
    return value if isinstance(value, Mapping) else {}


def as_finite(value: Any) -> float | None:
    """Return a value that should be a number; None if it is not one, is non-finite, or beyond what a run measures."""
    usable = isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < 1e100
    return float(value) if usable and math.isfinite(value) else None


def _table(path: Path) -> dict[str, Any]:
    try:
        return read_toml(path) if path.suffix == ".toml" else read_json(path, dict[str, Any])
    except FileNotFoundError:
        return {}
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None
