"""Withheld text, by which `--alpha auto` follows what labels confirm: which sequences, when, and what they show.

The sample is alpha's own: evenly spaced validation sequences with `TOKENS` unmasked tokens, of each member of a mixture
its own. It is fixed, is read at steps that follow from the options and the sample alone, and asks nothing of
`--eval-freq` or `--eval-batches`, which thus change no bit of a run. What it costs is bounded by `SHARE` of the run's
time.
"""

import math
from collections.abc import Callable
from functools import partial

import numpy as np

from kdtrain.objective.alpha import MeasuredAlpha, too_few
from kdtrain.objective.batch import Batch
from kdtrain.objective.measured import measured
from kdtrain.parallel.layout import RankLayout
from kdtrain.training.sources.source import Member, Source
from kdtrain.training.student import Student
from kdtrain.training.validate import own_batches

TOKENS = 8192
SHARE = 0.02
_FORWARD, _WITH_TEACHER = 0.6, 1.0
"""What a token costs here, as a share of what one costs in training: an eager forward of the student beside a forward
and a backward; with an online teacher's forward in both."""
_AT_ONCE = 32
"""Sequences that are read at once, for their masks."""
_SPARSEST = 8
"""The sample has at most so many times `TOKENS` positions, where most are masked."""
_NEARLY = 0.9
"""The share of `TOKENS` with which the sample is large enough."""


Read = Callable[[Callable[[], Batch]], Batch | None]
"""Reads a batch, on every rank; None at a stop request. See `StopRequest.read`."""


class Withheld:
    """The sample of withheld sequences on which a run measures alpha.

    Args:
        alpha: what is measured by it, and from now on moved by steps alone.
        source: the validation split, as the student reads it.
        micro: sequences in a forward of one rank.
        step_tokens: positions that an optimizer step trains on, over all ranks.
    """

    def __init__(self, alpha: MeasuredAlpha, source: Source, micro: int, step_tokens: int) -> None:
        self.alpha, self.source, self.micro, self.step_tokens = alpha, source, micro, step_tokens
        alpha.by_forward = False
        self.parts, self.counts = dict[str, range](), dict[str, int]()
        """Of each member its sequences, none where they are too few; of those with a teacher the unmasked tokens."""
        self.every = 0
        """Steps between two measurements; 0 until the sample is chosen: none."""

    def choose(self, read: Read) -> bool:
        """Choose the sequences, by reading their masks; False when `read` returns None. It reads no teacher."""
        source = self.source
        for name, each in (source.facts.members or {"": Member(source.facts, range(len(source)), 1, 1.0)}).items():
            self.parts[name] = each.place[:0]
            if each.facts.targets == "none":
                continue
            if (found := spread(each.place, source.facts.seq_len, partial(self._tokens, read))) is None:
                return False
            part, self.counts[name] = found
            if not too_few(self.counts[name]):
                self.parts[name] = part
        positions = sum(map(len, self.parts.values())) * source.facts.seq_len
        self.every = interval(positions, self.step_tokens, getattr(source, "teacher", None) is not None)
        return True

    def _tokens(self, read: Read, part: range) -> int | None:
        """Return how many unmasked tokens some sequences have; None when `read` returns None."""
        own = getattr(self.source, "source", self.source)
        tokens = 0
        for start in range(0, len(part), _AT_ONCE):
            if (batch := read(partial(own.read, np.array(part[start : start + _AT_ONCE])))) is None:
                return None
            tokens += int(batch.loss_mask.sum())
        return tokens

    def due(self, number: int) -> bool:
        """Return whether to measure before step `number`, from 2 on; before the first step it is measured once."""
        return self.every > 0 and number > 1 and (number - 1) % self.every == 0

    def measure(self, student: Student, layout: RankLayout, read: Read, step: int) -> dict[str, float] | None:
        """Measure alpha after `step`, over all ranks; return what was measured, None when `read` returns None."""
        found = []
        for part in self.parts.values():
            batches = own_batches(self.source, part, self.micro, read, layout, "withheld.batch")
            if (each := measured(student.eval(), batches, layout.sum)) is None:
                return None
            found.append(each)
        if step or not self.alpha.measured:  # else the checkpoint of step 0 has it, and what followed
            self.alpha.observe(found)
        rows = zip(self.parts, found, self.alpha.gaps.tolist(), strict=True)
        known = {name and f"{name}/": each.figures(gap) for name, each, gap in rows if each.tokens}
        return {f"withheld/{name}{key}": value for name, each in known.items() for key, value in each.items()}


def interval(positions: int, step_tokens: int, online: bool = False) -> int:
    """Return the steps between two measurements that cost `SHARE` of the time; 0 without positions: none.

    positions: of the sample. step_tokens: positions of a step. online: a teacher answers in both.
    """
    cost = _WITH_TEACHER if online else _FORWARD
    return math.ceil(positions * cost / (SHARE * step_tokens))


def spread(place: range, seq_len: int, count: Callable[[range], int | None]) -> tuple[range, int] | None:
    """Take evenly spaced sequences with about `TOKENS` unmasked tokens together, or all, and how many they have.

    count: of some sequences the unmasked tokens; where it returns None, so does this.
    """
    least = max(len(place) * seq_len // (_SPARSEST * TOKENS), 1)
    step = max(len(place) * seq_len // TOKENS, 1)
    while (tokens := count(place[::step])) is not None:
        if tokens > _NEARLY * TOKENS or step <= least:
            return place[::step], tokens
        step = max(step * tokens // TOKENS, least)
    return None
