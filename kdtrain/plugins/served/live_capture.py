"""A cache that is captured while a run reads it, such as that of a server's answers.

The text is packed first, so every sequence has its number, and its place in the run's order, before a teacher answers.
The training split is stored in the order of the run's first epoch, and captured in it by a thread, at most `AHEAD`
shards beyond what was read. Readers ask for sequences by their numbers in the text (`_LiveReader`), and wait for the
shard: the batches are those of a cache that was captured before, whatever the speed of the teacher. A published shard
never changes, so a run that resumes reads what it has read.

The cache is `finish`ed with the run, and holds what the run could read: the first sequences of the order. One that is
to give more is opened again. A run knows it by the digest of its settings (`Manifest.settings`), which name the text
and the order and are there before the first shard.

What it gives up: several ranks capture all that is planned before they train, because their threads would meet in the
collectives of the training; how far the capture was ahead when a run stopped early depends on its speed.

Shapes: n sequences of the training split.
"""

import hashlib
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from kdtrain.cache.format.manifest import CacheSettings, Manifest, read_sidecar
from kdtrain.cache.read.reader import CacheReader, LocalCache
from kdtrain.data.packed import PackedRow
from kdtrain.errors import RunError, UsageError, log
from kdtrain.files import typed
from kdtrain.outputs import OutFolder

AHEAD = 4
"""Shards after the one that is read that are captured ahead."""
_POLL = 0.1
_ABANDON = 5.0
"""Seconds to wait for the last answer of a capture that is cancelled."""


class _Abandoned(Exception):
    """An exception that cancels the capture thread."""


@dataclass(frozen=True, kw_only=True)
class Capture:
    """The way in which a run captures what it reads."""

    seed: int
    """Of the run."""
    order: Callable[[int], np.ndarray]
    """n -> the order of n sequences in the run's first epoch."""
    planned: Callable[[int], int]
    """n -> sequences that the run reads in its first epoch."""
    build: Callable[[Callable[..., Any]], None]
    """Builds the cache by what `begin` returns; runs in a thread, or in `open`."""
    trial: bool = False
    """Capture only what is read, and of validation the first shard."""
    whole: bool = False
    """Capture all that is planned in `open`, which every rank calls."""
    asked_to_stop: Callable[[], bool] = lambda: False
    """Whether a reader must not wait any longer."""


class _LiveReader(CacheReader):
    """A reader that waits for the shards of a split, and numbers its sequences as in the text."""

    def _places(self, indices: Sequence[int] | np.ndarray) -> tuple[dict[int, np.ndarray], np.ndarray]:
        if self.split == "train" and isinstance(self.remote, LiveCache):
            indices = self.remote.places_n[np.asarray(indices, dtype=np.int64)]
        return super()._places(indices)


class LiveCache(LocalCache):
    """A cache in `folder` that is captured while it is read. `open` begins; `finish` or `close` ends."""

    split_type = _LiveReader

    def __init__(self, folder: Path, capture: Capture) -> None:
        self.folder = folder
        self.name = str(folder)
        self.remote = self
        self.address = folder
        self._splits: dict[str, CacheReader] = {}
        self._capture = capture
        self._ahead = 0 if capture.trial else AHEAD
        self._changed = threading.Condition()
        """Guards what both threads change."""
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None
        self._ending = self._abandoned = False
        self._wanted = -1
        """The last shard of the training split that was requested."""
        self._done = 0
        """Sequences that are published: all of validation, then those of train."""
        self._times: list[tuple[float, int]] = []
        """The clock and `_done` at the teacher's first answer, and at its last."""

    @property
    def planned(self) -> int:
        """Sequences of the training split that the run reads in its first epoch."""
        return self._capture.planned(self.manifest.splits["train"]["sequences"])

    @property
    def rate(self) -> float:
        """Sequences a second, since the teacher's first answer; 0 before its second one."""
        (began, first), (now, last) = self._times if len(self._times) == 2 else ((0.0, 0), (0.0, 0))
        return (last - first) / (now - began) if now > began else 0.0

    def open(self) -> None:
        """Begin the capture, and return when it is known what it will be. UsageError, RunError: as `capture`."""
        if self._capture.whole:
            self._work()
        else:
            self._start()
        with self._changed:
            self._changed.wait_for(lambda: hasattr(self, "manifest") or self._error is not None)
        if self._error is not None:
            raise self._error

    def begin(
        self, settings: CacheSettings, text: LocalCache
    ) -> tuple[CacheSettings, dict[str, Iterator[PackedRow]], Callable[[int, int | None], None]]:
        """Return the capture's settings, the rows of each split in the order of the capture, and `progress`.

        The capture calls it. text: the packed tokens, whole.
        """
        stated = text.manifest.splits
        size = settings.sequences_per_shard
        order = {"seed": self._capture.seed, "text_sha256": stated["train"]["tokens_sha256"]}
        settings = replace(settings, data={**settings.data, "order": order})
        numbers_n = self._capture.order(stated["train"]["sequences"])
        kept = range(min(size, len(text["validation"])) if self._capture.trial else len(text["validation"]))
        with self._changed:
            self.manifest = Manifest.planned(settings, {name: each["sequences"] for name, each in stated.items()})
            if self._capture.whole:  # nothing is requested later, and a rollback reads further
                self._ending = True
                self._wanted = -(-self.planned // size) - 1 + AHEAD
            self.places_n = np.argsort(numbers_n)
            self._validation = len(kept)
            self._changed.notify_all()
        rows = {
            "train": self._ordered(text["train"], numbers_n, size),
            "validation": text["validation"].rows(kept),
        }
        return settings, {name: rows[name] for name in ("validation", "train")}, self._progress

    def finish(self) -> None:
        """Complete the cache of what was captured: the run has read all that it reads."""
        with self._changed:
            self._ending = True
            self._ahead = 0
            self._changed.notify_all()
        if self._thread is not None:
            self._thread.join()
        if self._error is not None:
            log.warning("the capture ended early, after all that the run read: %s", self._error)

    def close(self) -> None:
        """Abandon a capture that is not finished; the shard in work is lost."""
        with self._changed:
            self._abandoned = True
            self._changed.notify_all()
        if self._thread is not None:
            self._thread.join(_ABANDON)
        for each in self._splits.values():
            each.close()

    def bring_tokenizer(self) -> None:
        """Wait until the folder has a tokenizer. RunError: it will not."""
        self._wait(lambda: self.tokenizer.is_dir())

    def ensure(self, record: Any, altered: bool = False) -> None:
        """Wait until a shard is published, and fill in its record. RunError: it will not be.

        altered: no matter, since the reader names a shard that was altered, and a resumed capture replaces it.
        """
        split, number = record["name"].rsplit("-", 1)
        last = int(number) * self.manifest.settings.sequences_per_shard + record["sequences"]
        if split == "train":
            last += self._validation
            with self._changed:
                self._wanted = max(self._wanted, int(number))
                self._changed.notify_all()
        self._wait(lambda: self._done >= last)
        try:
            self._complete(record)
        except (OSError, ValueError) as error:
            raise RunError(f"{self.folder}: the record of shard {record['name']} is damaged ({error})") from None

    def _published(self, name: str) -> bool:
        """Return whether a shard is there, if it is as it was written or not."""
        try:
            read_sidecar(self.folder, name)
        except OSError:
            return False
        except ValueError:
            pass  # the builder makes it again
        return True

    def _complete(self, record: Any) -> str:
        """Fill in the record of a published shard, and return its digest. OSError, ValueError: its sidecar is lost."""
        if not record["bytes"]:
            found = read_sidecar(self.folder, record["name"])
            record["sha256"], record["bytes"] = found["sha256"], found["bytes"]
        return record["sha256"]

    def state_dict(self, sequences: int) -> dict[str, Any]:
        """Return the number of shards of the first `sequences` of the order, and the digest of their digests."""
        size = self.manifest.settings.sequences_per_shard
        shards = self.manifest.splits["train"]["shards"]
        digests = []
        with suppress(OSError, ValueError):  # of what was left out, and so never captured
            for record in shards[: -(-sequences // size)]:
                digests.append(self._complete(record))
        return {"shards": len(digests), "sha256": hashlib.sha256(" ".join(digests).encode()).hexdigest()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Warn where the shards that the run has read differ from `state`. ValueError: it is not a state."""
        try:
            count = typed(state["shards"], int)
            there = self.state_dict(count * self.manifest.settings.sequences_per_shard)
        except KeyError as error:
            raise ValueError(f"it has no {error}") from None
        if there != state:
            log.warning("%s is not what the run was trained on: the server answers for the rest again", self.folder)

    def ahead(self, records: Iterable[Any]) -> None:
        """Do nothing: the capture runs ahead by itself."""

    def _wait(self, there: Callable[[], bool]) -> None:
        """Wait for what the capture publishes, and begin it again where it ended before that."""
        with self._changed:
            while not there():
                if self._error is not None:
                    known = isinstance(self._error, UsageError | RunError)
                    raise RunError(str(self._error)) from None if known else self._error
                if self._abandoned or self._capture.asked_to_stop():
                    raise RunError("stopped while waiting for the teacher")
                if self._thread is None or not self._thread.is_alive():
                    if self._capture.whole or self._capture.trial:
                        raise RunError(f"{self.folder} holds less than the run reads: run the same command again")
                    self._start()
                self._changed.wait(_POLL)

    def _start(self) -> None:
        if self._thread is not None:  # it may have been finished with less than the run reads now
            OutFolder(self.folder).remove(self.manifest.files[-1])
        # a daemon: the end of the process does not wait for a server
        self._thread = threading.Thread(target=self._work, daemon=True, name="capture")
        self._thread.start()

    def _work(self) -> None:
        error: BaseException | None = None
        try:
            self._capture.build(self.begin)
            done = self._validation + LocalCache(self.folder).manifest.splits["train"]["sequences"]
        except _Abandoned:
            return
        except BaseException as found:
            error = found
            done = 0
        with self._changed:
            self._error, self._done = error, max(self._done, done)
            self._changed.notify_all()

    def _ordered(self, text: CacheReader, numbers_n: np.ndarray, size: int) -> Iterator[PackedRow]:
        """Yield the training split in the order of the capture, each shard when it may be captured."""
        planned = -(-self.planned // size) - 1
        for shard, first in enumerate(range(0, len(numbers_n), size)):
            name = self.manifest.splits["train"]["shards"][shard]["name"]
            with self._changed:
                while not self._published(name) and shard > max(
                    0, self._wanted, min(planned, self._wanted + self._ahead)
                ):
                    if self._abandoned:
                        raise _Abandoned
                    if self._ending:
                        return
                    self._changed.wait()
            yield from text.rows(numbers_n[first : first + size])

    def _progress(self, done: int, _: int | None) -> None:
        """Take what the builder reports between two batches: after a shard is published it counts all of it."""
        with self._changed:
            if self._abandoned:
                raise _Abandoned
            self._times = [*self._times[:1], (time.monotonic(), done)]
            self._done = max(self._done, done)
            self._changed.notify_all()
