"""What a source is: sequences by index, with or without targets, and the facts that a run must know of them.

A source returns batches on any device. `build.StudentSource` completes it for a student: the batch moves to the
student's device, is checked against its vocabulary, and gets targets from an online teacher where there is one.
Nothing after that knows where a batch came from.
"""

import itertools
import math
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import numpy as np
from einops import rearrange

from kdtrain.config.choices import SOURCES
from kdtrain.data.order import Order
from kdtrain.objective.batch import Batch
from kdtrain.objective.targets import ANY_T


@dataclass(frozen=True, kw_only=True)
class Facts:
    """The facts of a run's data that it needs before it builds anything."""

    name: str
    """What messages call it, such as the cache's folder."""
    identity: str
    """A digest, or another name that changes with the data: a run resumes with the same one only."""
    seq_len: int
    """T, positions of a sequence."""
    vocab_size: int
    """Rows of the teacher's output head; without a teacher the entries of the tokenizer."""
    tokenizer_size: int
    """Entries of the tokenizer; at most `vocab_size`."""
    tokenizer_digest: str | None = None
    """See `models.tokenizer.tokenizer_digest`; None: not compared with the student's."""
    tokenizer: Path | None = None
    """The folder of the tokenizer's files; None: the student is exported without, and no text is sampled."""
    document_mask: bool = False
    """Packed documents must not see each other."""
    targets: str = "none"
    """What each batch brings of a teacher: none, sparse or dense; mixed where members differ."""
    top_k: int = 0
    """Entries of sparse targets that are kept exactly."""
    num_samples: int = 0
    """Samples of the rest, for sparse targets."""
    temperature_range: tuple[float, float] = ANY_T
    """The lowest and the highest T at which the targets are right."""
    labels: bool = True
    """Whether the targets hold the teacher's log p of each label, and not an estimate."""
    teacher: Mapping[str, Any] = field(default_factory=dict)
    """Of the teacher that made the targets: `spec`, its name, and where they are known `weights_digest` and `dtype`."""
    end_tokens: tuple[int, ...] = ()
    """What ends the texts, where the teacher wrote them."""
    alignment: Mapping[str, Any] | None = None
    """Of a teacher with another tokenizer, what is known of the alignment; then forward KL at T = 1 is all there is."""
    members: Mapping[str, "Member"] = field(default_factory=dict)
    """Of a mixture, its members by short names, in order; empty for one source alone."""

    def term(self, divergence: str) -> str:
        """Name the teacher's part of the loss: the divergence, or across tokenizers the compared terms."""
        return "+".join((self.alignment or {}).get("terms", ())) or divergence

    @property
    def estimator(self) -> str | None:
        """What the KL of a validation is measured from (`objective.metrics`); None: of several kinds."""
        if self.members or self.alignment is not None:
            return None
        if self.targets != "sparse":
            return "the whole distribution"
        rest = f"{self.num_samples} samples" if self.num_samples else "a bucket, a lower bound"
        return f"{self.top_k} entries and {rest}" if self.top_k else rest

    @property
    def replays(self) -> bool:
        """Whether a mixture has members without a teacher beside others with one."""
        return len({each.facts.targets == "none" for each in self.members.values()}) > 1

    @property
    def taught(self) -> list["Facts"]:
        """The facts of each member with a teacher, or of the one source that there is, if it has one."""
        alone = [each.facts for each in self.members.values()] or [self]
        return [each for each in alone if each.targets != "none"]


@dataclass(frozen=True)
class Member:
    """The part of a mixture that is one source."""

    facts: Facts
    place: range
    """The numbers of its sequences among those of the split."""
    quota: int
    """Sequences that it gives an epoch."""
    share: float
    """The same as a share of the draws."""


@runtime_checkable
class Growing(Protocol):
    """Text that appears during the run, such as a server's answers; `read` blocks until the text is there.

    What is there never changes, so that a checkpoint needs no more of it than which part was read.
    """

    def state_dict(self, sequences: int) -> dict[str, Any]:
        """Return what the first `sequences` of the order were read from, in numbers and strings, for a checkpoint."""
        ...

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Resume behind that part. ValueError: the state is not one of `state_dict`."""


class Source(Protocol):
    """Sequences by index.

    One that has its own order also has `order(seed)`, which returns a `data.order.Order`; by default every epoch has
    all sequences in an order of its own. One whose text appears during the run has it as `growing: Growing`. One that
    an online teacher answers on other tokens than the student's has `taught_by(teacher, device)`.

    One that needs the student has `meet(student, teacher)`, called at first with the `Student` that is trained, and the
    online teacher, loaded and prepared, or None. A sharded student writes on all ranks at once: such a source has
    `write_collective(indices)`, which every rank calls before each step, with the sequences of the step of all ranks;
    it may return numbers, which the step logs, and may end early at a stop request (`signals.asked_to_stop`).
    What is written never changes, as `Growing` has it, and nothing is read ahead.

    One by which a run marks its best checkpoint has `score()`, called on every rank at each validation, which returns a
    number of the student with its present weights, the highest of which is the best, or None at a stop request.
    """

    facts: Facts
    overlaps: bool
    """Whether a thread may read ahead; `read` must then be safe to call from two threads at once."""
    repeatable: bool
    """Whether the same indices give the same batch again; otherwise a failed step's batches are kept in memory."""

    def __len__(self) -> int: ...

    def read(self, indices: np.ndarray) -> Batch:
        """Return the sequences `indices` (int64, 0 .. len - 1), in that order."""
        ...


def order_of(source: Source, seed: int) -> Order:
    """Return the order in which a run with this seed reads `source`."""
    own: Callable[[int], Order] | None = getattr(source, "order", None)
    return Order.shuffled(seed, len(source)) if own is None else own(seed)


def meet(source: Source, student: Any, teacher: Any) -> None:
    """Hand the student and the online teacher to a source that has `meet`."""
    if hasattr(source, "meet"):
        source.meet(student, teacher)


def passes_of(source: Source, sequences: int) -> tuple[float, ...]:
    """Count the passes that the first `sequences` of the order make over the text of each member, or the only one."""
    members = source.facts.members.values()
    epochs = sequences / len(source)
    return tuple(epochs * each.quota / len(each.place) for each in members) or (epochs,)


def feed(
    source: Source, indices: Callable[[int], np.ndarray], micro: int, expected: float = math.inf
) -> Iterator[Iterator[Batch]]:
    """Yield for each step, without end, an iterator over its micro-batches; the caller must exhaust it.

    They are read one ahead in a thread: decompression and the copy to the device overlap with the step.

    Args:
        source: where they are read.
        indices: 0, 1, 2, ... -> the indices of the sequences of that step, in order.
        micro: sequences in a micro-batch.
        expected: steps that will be taken; those after them, in place of skipped ones, are not read ahead.
    """
    micro_batches = (part for step in itertools.count() for part in rearrange(indices(step), "(a m) -> a m", m=micro))
    batches: Iterator[Batch] = map(source.read, micro_batches)
    if source.overlaps:
        batches = _read_ahead(source, micro_batches, expected * (len(indices(0)) // micro))
    for step in itertools.count():
        yield itertools.islice(batches, len(indices(step)) // micro)


def _read_ahead(source: Source, micro_batches: Iterator[np.ndarray], most: float) -> Iterator[Batch]:
    """Yield the micro-batches; the first `most` are read one ahead."""
    reader = ThreadPoolExecutor(max_workers=1, thread_name_prefix="feed")
    pending: deque[Future[Batch]] = deque()
    try:
        for number, indices in enumerate(micro_batches):
            ahead = int(number < most)
            while len(pending) > ahead:
                yield pending.popleft().result()
            pending.append(reader.submit(source.read, indices))
            while len(pending) > ahead:
                yield pending.popleft().result()
    finally:
        # no wait: a read from a file system that does not answer would keep a failed command alive
        reader.shutdown(wait=False, cancel_futures=True)


@dataclass(frozen=True, kw_only=True)
class SourceRequest:
    """The split, cache and seed for which a source is opened."""

    split: str
    """train or validation."""
    cache: Any
    """A `kdtrain.Cache` of a teacher's, or that of the packed tokens of `--data`. None where neither is given."""
    seed: int
    """The run's."""


Opener = Callable[[SourceRequest], Source]


def register_source(name: str, *, help: str = "") -> Callable[[Opener], Opener]:
    """Return a decorator that makes a function, or a class, the source that `--source NAME` opens.

    It is called once a split with a `SourceRequest` and returns a `Source`.

    Args:
        name: the name that users type.
        help: its line in `--help`; by default the first line of the docstring.
    """
    return SOURCES.registers(name, help)
