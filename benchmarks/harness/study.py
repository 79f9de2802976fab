"""A study: caches, a grid of students by the real command, and a record of each student.

Caches, runs and records are in one folder. Finished ones are not made again, and each command resumes, so the same
command resumes an interrupted study.
"""

import json
import math
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

from benchmarks.harness import write
from kdtrain.monitor.record import RunRecord

Entry = TypeVar("Entry")
Words = tuple[str, ...] | list[str]


class Study:
    """Caches and students in a folder.

    Args:
        kdtrain: runs the command.
        caches: options of `kdtrain cache-teacher`, by name.
        distill: options of `kdtrain distill` that all students share.
    """

    def __init__(
        self, out: Path, kdtrain: Callable[..., Any], caches: Mapping[str, Words], distill: Words = ()
    ) -> None:
        self.out, self.kdtrain, self.caches, self.distill = out, kdtrain, caches, distill
        self._locks = {name: threading.Lock() for name in caches}

    def build(self, name: str = "cache") -> dict[str, Any]:
        """Build a cache, or finish it. Returns the command's answer."""
        answer: dict[str, Any] = self.kdtrain("cache-teacher", "--out", f"{self.out / name}", *self.caches[name])
        return answer

    def cache(self, name: str = "cache") -> Path:
        """The folder of a cache, built if it is missing."""
        with self._locks[name]:
            if not (self.out / name / "manifest.json").exists():
                self.build(name)
        return self.out / name

    def train(
        self, name: str, *words: str, cache: str | None = "cache", **how: Any
    ) -> tuple[dict[str, Any], RunRecord]:
        """Train one student in the folder `name`. Returns the command's answer and the record of the run."""
        source = () if cache is None else ("--cache", f"{self.cache(cache)}")
        answer = self.kdtrain("distill", *source, "--out", f"{self.out / name}", *self.distill, *words, **how)
        return answer, RunRecord.read(self.out / name)

    def records(
        self,
        grid: Mapping[str, Entry],
        make: Callable[[str, Entry], dict[str, Any]],
        at_once: int = 1,
        minutes: float = math.inf,
    ) -> list[dict[str, Any]]:
        """A record for each entry of a grid, in its order, made where `records/NAME.json` is missing.

        at_once: entries that are made beside each other. minutes: after this time no further entry is begun.
        """
        begun, folder = time.monotonic(), self.out / "records"

        def one(name: str) -> dict[str, Any] | None:
            file = folder / f"{name}.json"
            if not file.exists():
                if time.monotonic() - begun >= 60 * minutes:
                    return None
                write(file, make(name, grid[name]))
            return dict(json.loads(file.read_text()))

        with ThreadPoolExecutor(at_once) as pool:
            return [each for each in (map if at_once == 1 else pool.map)(one, grid) if each is not None]

    def tuned(
        self,
        tried: dict[str, list[float]],
        entry: Callable[[str, float], tuple[str, Entry]],
        make: Callable[[str, Entry], dict[str, Any]],
        loss: str,
        minutes: float = math.inf,
        widen: bool = True,
    ) -> tuple[list[dict[str, Any]], dict[str, float | None]]:
        """A record for each kind and rate of `tried`, and each kind's rate with the lowest `loss`; None without one.

        widen: rates are added to `tried` while the best of a kind is at the edge. entry: the name of a kind at a rate,
        and what `make` is given.
        """
        while True:
            grid = dict(entry(kind, rate) for kind, rates in tried.items() for rate in rates)
            records, best = self.records(grid, make, minutes=minutes), dict[str, float | None]()
            for kind in tried:
                own = [each for each in records if each["kind"] == kind and each[loss] is not None]
                best[kind] = min(own, key=lambda each: each[loss])["lr"] if own else None
            more = {kind: rate for kind in tried if widen and (rate := beyond(tried[kind], best[kind])) is not None}
            if not more:
                return records, best
            for kind, rate in more.items():
                tried[kind].append(rate)


def beyond(tried: Sequence[float], best: float | None, most: int = 8) -> float | None:
    """The next rate, a factor of two beyond `tried`, where the best is at its edge; None otherwise, or after `most`."""
    if best is None or len(tried) >= most or min(tried) < best < max(tried):
        return None
    return best * 2 if best == max(tried) else best / 2
