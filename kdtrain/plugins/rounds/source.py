"""The stream of a run in rounds: which rows a step reads, which rounds there are, and who writes them.

A place of the stream belongs to a round by its number alone: after `cold` places of fixed text each round has
`sequences` of them, of which `share`, evenly spread, are rollouts. A place that is no rollout is the next of the fixed
text, in the order that it would have alone. A rollout is a row of the present round, or in turn of the `stale` ones
before it, in an order of that round's own.

A round is written before the first step that reads it, by the weights of that moment, into a folder that is named by
its number and its attempt, and stays as it is. A run that resumes reads it, or captures the rest. A rollback behind the
beginning of a round leaves its folder, and the next rounds are of another attempt. A replay reads of each round the
attempt that the run read last.

What it gives up: a round is read only when it is whole; the student waits for it.
"""

import hashlib
import math
from collections.abc import Callable, Iterable, Mapping, Sized
from dataclasses import KW_ONLY, dataclass, field, replace
from fractions import Fraction
from functools import partial
from itertools import count
from pathlib import Path
from typing import Annotated, Any, Protocol

import numpy as np
import torch
from msgspec import Meta

from kdtrain.cache.read.reader import CacheReader, LocalCache
from kdtrain.data.order import Order
from kdtrain.errors import RunError
from kdtrain.files import typed
from kdtrain.objective.batch import Batch
from kdtrain.plugins.rounds.figures import beside_first, figures, refuse_collapse, some
from kdtrain.plugins.rounds.writing import Interrupted
from kdtrain.ranks import on_main, raise_on_all_ranks
from kdtrain.training.sources.source import Facts, Source, order_of

STRIDE = 2**32
"""Row r of round n has the index n STRIDE + r; fixed text is round 0."""
_BASELINE_ROWS = 128

Count = Annotated[int, Meta(ge=0, le=2**53)]
Attempts = list[Annotated[list[Count], Meta(min_length=2, max_length=2)]]
"""The number and the attempt of each round."""


@dataclass(frozen=True, kw_only=True)
class StreamShape:
    """The shape of the stream: which places are of which round; `rollouts.json` of a run holds it."""

    rows: Annotated[int, Meta(ge=1, lt=STRIDE)]
    """Prompts in a round."""
    sequences: Annotated[int, Meta(ge=1, le=2**53)]
    """Places of the stream that belong to a round."""
    cold: Count
    """First places, of fixed text alone."""
    stale: Count
    share: str
    """A fraction, such as 1/2."""

    def epoch(self, fixed: Sized | None) -> int:
        """Return the length of an epoch: a round, or beside fixed text a pass over that."""
        if fixed is None or not (share := 1 - Fraction(self.share)):
            return self.rows
        return max(1, round(len(fixed) / share))

    def round_of(self, place: int) -> int:
        """Return the round of a place, from 1; 0 for a cold place."""
        return 0 if place < self.cold else (place - self.cold) // self.sequences + 1

    def before(self, places: np.ndarray | int) -> Any:
        """Count the rollouts before a place."""
        share = Fraction(self.share)
        behind = np.maximum(np.asarray(places) - self.cold, 0).astype(object)  # products above 2^63
        return np.asarray(behind * share.numerator // share.denominator, np.int64)


class Writer(Protocol):
    """A writer of rounds, on all ranks."""

    def meet(self, student: Any, teacher: Any) -> None: ...

    def write(self, number: int, attempt: int, folder: Path) -> Mapping[str, float]:
        """Write the missing parts of a round; return numbers for the log. Interrupted: a stop was requested."""
        ...

    def begun(self, number: int, attempt: int, folder: Path) -> bool:
        """Return True if the folder is free, or holds this round by these weights; called on rank 0 alone."""
        ...


class Fixed:
    """A source that keeps its own targets beside an online teacher."""

    def __init__(self, source: Source) -> None:
        self.source = source
        self.facts = source.facts
        self.overlaps, self.repeatable = source.overlaps, source.repeatable

    def __getattr__(self, name: str) -> Any:
        return getattr(self.source, name)

    def __len__(self) -> int:
        return len(self.source)

    def taught_by(self, teacher: Any, device: Any) -> "Fixed":
        """Return this source: it has targets."""
        return self

    def meet(self, student: Any, teacher: Any) -> None:
        """Hand the student on; the source has the answers of its own teacher."""
        if hasattr(self.source, "meet"):
            self.source.meet(student, teacher)

    def read(self, indices: np.ndarray) -> Batch:
        return self.source.read(indices)


@dataclass(eq=False)
class Rounds:
    """The training split of a run in rounds.

    Args:
        folder: where the rounds are.
        seed: of their order.
        writer: None: they are another run's, and only read.
        attempts: the attempt of each round that this run read last.
        fixed: the text that is no rollout; None: there is none.
        text: for the bigram that a round is compared with.
        sampled: whether the loss subtracts a baseline.
        stops: whether a round that has collapsed ends the run.
        shown: shows texts of a round, by its name, and returns numbers of them.
        score: a number of the student with its present weights, None at a stop request; None: the loss marks the best.
    """

    facts: Facts
    shape: StreamShape
    folder: Path
    _: KW_ONLY
    seed: int
    writer: Writer | None
    attempts: Mapping[int, int] = field(default_factory=dict)
    fixed: Fixed | None
    text: Source | None = None
    sampled: bool = False
    stops: bool = False
    shown: Callable[[LocalCache, str], dict[str, float]] = lambda cache, name: {}
    score: Callable[[], float | None] | None = None

    overlaps, repeatable = False, True

    def __post_init__(self) -> None:
        self.growing = self
        self.attempt = 1
        """Of the rounds that begin from now on."""
        self.rounds = dict[int, int]()
        """The attempt of each round that was read."""
        self.first: dict[str, float] | None = None
        self._open = dict[int, tuple[LocalCache, float]]()
        self._digests = dict[Path, str]()

    def __len__(self) -> int:
        return self.shape.epoch(self.fixed)

    def meet(self, student: Any, teacher: Any) -> None:
        """Hand student and teacher to the writer and to the fixed text."""
        if self.writer is not None:
            self.writer.meet(student, teacher)
        if self.fixed is not None:
            self.fixed.meet(student, teacher)

    def taught_by(self, teacher: Any, device: Any) -> "Rounds":
        """Return this source: the teacher's targets are in the rounds."""
        return self

    # The stream ------------------------------------------------------------------------------------------------------

    def order(self, seed: int) -> Order:
        """Return the order of the stream above; a rank reads its part of a step round by round."""
        return Order(partial(self._places, seed), lambda found: found[np.argsort(found // STRIDE, kind="stable")])

    def _places(self, seed: int, start: int, size: int) -> np.ndarray:
        shape = self.shape
        places = np.arange(start, start + size, dtype=np.int64)
        found = np.empty(size, np.int64)
        before = shape.before(places)
        drawn = (shape.before(places + 1) > before) & (places >= shape.cold)
        if not drawn.all():
            assert self.fixed is not None, "there is fixed text"
            first = int((places - before)[~drawn][0])
            found[~drawn] = order_of(self.fixed, seed).batch(first, int((~drawn).sum()))
        for place, at in zip(places[drawn].tolist(), np.flatnonzero(drawn).tolist(), strict=True):
            found[at] = self._rollout(seed, place)
        return found

    def _rollout(self, seed: int, place: int) -> int:
        """Return the index of the rollout at a place."""
        shape = self.shape
        now = shape.round_of(place)
        offset = int(shape.before(place)) - int(shape.before(shape.cold + (now - 1) * shape.sequences))
        mixed = min(shape.stale, now - 1) + 1
        turn, age = divmod(offset, mixed)
        # each round gives another part of its rows as it grows old
        epoch, row = divmod(turn + age * (shape.rows // (shape.stale + 1)), shape.rows)
        return (now - age) * STRIDE + int(
            Order.shuffled(seed, shape.rows, now - age).batch(epoch * shape.rows + row, 1)[0]
        )

    # The rounds ------------------------------------------------------------------------------------------------------

    def write_collective(self, indices: np.ndarray) -> dict[str, float] | None:
        """Write the rounds that a step is the first to read; None where a stop was requested."""
        found = dict[str, float]()
        for number in np.unique(indices // STRIDE).tolist():
            if number and number not in self.rounds:
                try:
                    found |= self._begin(number)
                except Interrupted:
                    return None
            found["rollouts/round"] = float(number)
        return found if found.get("rollouts/round") else {}

    def _begin(self, number: int) -> dict[str, float]:
        """Begin a round and return its numbers; every rank calls it. RunError: it collapsed, or does not exist."""
        attempt = on_main(lambda: self._attempt(number))
        folder = self._folder(number, attempt)
        spent = dict[str, float]()
        if self.writer is not None:
            spent |= self.writer.write(number, attempt, folder)
        digest = LocalCache(folder).manifest.digest
        with raise_on_all_ranks():
            if on_main(lambda: digest) != digest:
                raise RunError(f"{folder} is another round on this rank than on rank 0; give all ranks one --out")
        self.attempt = max(self.attempt, attempt)
        self.rounds[number] = attempt
        for old in [each for each in self._open if each < number - self.shape.stale]:
            self._open.pop(old)[0]["train"].close()
        numbers = on_main(lambda: figures(LocalCache(folder), self.text))
        numbers = beside_first(numbers, self._first(numbers))
        if self.stops:
            refuse_collapse(numbers)
        scores = on_main(lambda: self.shown(LocalCache(folder), f"round {number}"))
        return {**numbers, **scores, **spent, "rollouts/attempt": float(attempt)}

    def _first(self, numbers: dict[str, float]) -> dict[str, float]:
        """Return the numbers of the first round of the run."""
        if self.first is None:
            earliest = min(self.rounds)
            path = self._folder(earliest, self.rounds[earliest])
            self.first = numbers if len(self.rounds) == 1 else on_main(lambda: figures(LocalCache(path), None))
        return self.first

    def _attempt(self, number: int) -> int:
        """Find the attempt of a round that begins: ours, or in a replay that of the run. RunError: it has none."""
        if self.writer is not None:
            return next(
                each for each in count(self.attempt) if self.writer.begun(number, each, self._folder(number, each))
            )
        if number not in self.attempts:
            raise RunError(f"{self.folder} has no round {number}: the run did not get that far; lower --steps")
        return self.attempts[number]

    def _folder(self, number: int, attempt: int) -> Path:
        return self.folder / f"round-{number:04d}{f'-{attempt}' if attempt > 1 else ''}"

    def read(self, indices: np.ndarray) -> Batch:
        """Return these rows. RunError: one cannot be read, or its round is not written (a stop was requested)."""
        numbers = indices // STRIDE
        missing = any(number and number not in self.rounds for number in np.unique(numbers).tolist())
        if missing and self.write_collective(indices) is None:
            raise RunError("stopped while the student wrote; the same command resumes")
        runs = np.split(np.arange(len(indices)), np.flatnonzero(np.diff(numbers)) + 1)
        parts = [self._part(int(numbers[run[0]]), indices[run] % STRIDE) for run in runs]
        return Batch.joined(parts, taught=True)

    def _part(self, number: int, rows: np.ndarray) -> Batch:
        if not number:
            assert self.fixed is not None, "there is fixed text"
            return self.fixed.read(rows)
        if number not in self._open:
            cache = LocalCache(self._folder(number, self.rounds[number]))
            self._open[number] = cache, _baseline(cache["train"]) if self.sampled else 0.0
        cache, baseline = self._open[number]
        batch = cache["train"].read(rows.tolist())
        if not self.sampled:
            return batch
        targets: Any = batch.targets
        return replace(batch, targets=replace(targets, baseline=torch.full_like(targets.policy, baseline)))

    # What a checkpoint holds -----------------------------------------------------------------------------------------

    def state_dict(self, sequences: int) -> dict[str, Any]:
        """Return the attempt, and [number, attempt] of each round that the first `sequences` places are read from."""
        last = self.shape.round_of(sequences - 1) if sequences else 0
        rounds = [[number, attempt] for number, attempt in sorted(self.rounds.items()) if number <= last]
        return {"attempt": self.attempt, "rounds": rounds, "sha256": self._digest(rounds)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore these rounds; later ones that were read are left behind, and the next rounds are of another attempt.

        ValueError: it is not such a state, or the rounds differ.
        """
        saved = typed(state, _State)
        found = dict[int, int](saved.rounds)  # type: ignore[arg-type]
        if self._digest(saved.rounds) != saved.sha256:
            raise ValueError(f"the rounds in {self.folder} are not those that the run was trained on")
        left = self.rounds.keys() - found.keys()
        self.attempt = max(self.attempt + bool(left), saved.attempt)
        for number in left:
            self._open.pop(number, None)
        self.rounds = found
        self.first = None

    def _digest(self, rounds: Iterable[list[int]]) -> str:
        """Compute a digest over the digests of rounds; return `missing` where one is not there."""
        sha = hashlib.sha256()
        for number, attempt in rounds:
            path = self._folder(number, attempt)
            if path not in self._digests:
                if not path.is_dir():
                    return "missing"
                self._digests[path] = LocalCache(path).manifest.digest
            sha.update(self._digests[path].encode())
        return sha.hexdigest()


@dataclass
class _State:
    attempt: Annotated[int, Meta(ge=1, le=2**31)]
    rounds: Attempts
    sha256: str


def _baseline(reader: CacheReader) -> float:
    """Compute the baseline b that reduces the variance of a sum of (d - b) grad log q most, d = log q - log p.

    It is computed over the tokens of some rows: the mean of d as they were written, each by (1 - q)^2, the square of
    the gradient in its own logit.
    """
    batch = reader.read(some(reader, _BASELINE_ROWS))
    targets = batch.targets
    mask_N = batch.loss_mask.flatten()
    assert targets is not None and targets.policy is not None
    own_N, theirs_N = (each[mask_N].double() for each in (targets.policy, targets.label_logprob))
    weight_N = (1 - own_N.exp()).square()
    mean = float((weight_N * (own_N - theirs_N)).sum() / weight_N.sum())
    return mean if math.isfinite(mean) else 0.0
