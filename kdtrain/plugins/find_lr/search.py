"""The search of `find-lr`: successive halving over rates a factor of two apart, a pure function of the losses so far.

Rate k is 2^k times the first guess. Five rates are trained for N steps, and the best three for 3 N (successive halving,
Jamieson and Talwalkar, arXiv 1502.07943). At each rung both neighbours of the best rate are trained as long: one that
was left behind catches up, because lower rates win as runs grow longer, and beyond the lowest or the highest rate the
next one joins, up to `REACH` from the guess. A run that diverges has an infinite loss.

The best rate is that with the lowest loss at the last rung. A parabola through it and its neighbours in log2(rate)
places the minimum between them, at most half a step from the best. How sure that is depends on the losses over parts of
the validation text: the runs have weights, data and order in common, so differences are compared part by part.

What it gives up: one seed; and short runs favour higher rates than long ones, which
`benchmarks/science/find_lr.toml` measures.
"""

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

FIRST = (-2, -1, 0, 1, 2)
"""The rates of the first rung."""
KEPT = (3,)
"""How many rates go on after each rung but the last."""
RUNGS, LONGER = len(KEPT) + 1, 3
"""The rungs, and how many times as long each is as the one before."""
REACH = 6
"""The farthest rate that may join."""
SURE = 2.0
"""A difference of so many standard errors is one."""


@dataclass(frozen=True)
class Trained:
    """The result of a rate's short run in one rung."""

    loss: float
    """Validation loss, nats per token; infinite where the run diverged."""
    parts: Sequence[float] = ()
    """The losses of parts of the validation text, the same parts for all rates; empty where nobody measured them."""


Losses = Mapping[int, Sequence[Trained]]
"""For each rate its rungs so far."""


def next_run(losses: Losses) -> tuple[int, int] | None:
    """Choose the rate and the rung to train next; return None when the search is over."""
    alive = [*FIRST]
    for rung in range(RUNGS):
        while True:
            for each in alive:
                if (done := len(losses.get(each, ()))) <= rung:
                    return each, done
            if (joins := _missing(alive, rung, losses)) is None:
                break
            alive = sorted([*alive, joins])
        # the best of those that did not diverge go on
        ranked = sorted((losses[each][rung].loss, each) for each in alive if math.isfinite(losses[each][rung].loss))
        alive = sorted(each for _, each in ranked[: KEPT[rung] if rung < len(KEPT) else 1])
    return None


def _missing(alive: Sequence[int], rung: int, losses: Losses) -> int | None:
    """Find a neighbour of the best rate that is missing in this rung, and did not diverge in an earlier one.

    None: there is none, or a later rung has as many rates as the first begins with.
    """
    if not alive or (rung > 0 and len(alive) == len(FIRST)):  # all rungs are at most 26 first ones
        return None
    best = min(alive, key=lambda each: (losses[each][rung].loss, each))  # the lowest where all diverged
    around = (each for each in (best - 1, best + 1) if each not in alive and abs(each) <= REACH)
    return next(
        (each for each in around if all(math.isfinite(done.loss) for done in losses.get(each, ())[:rung])), None
    )


@dataclass(frozen=True, kw_only=True)
class Suggestion:
    """The suggested rate, and how it was found. An exponent k stands for the rate 2^k times the guess."""

    best: int
    """The best rate of the last rung."""
    at: float
    """Where the minimum is: the best rate, or a place beside it."""
    low: float
    high: float
    """Between these the losses do not tell rates apart."""
    how: Literal["parabola", "best"]
    edge: bool
    """Whether the best rate is the farthest that is tried."""
    behind: dict[int, tuple[float, float | None]] = field(default_factory=dict)
    """Of the neighbours: the loss less that of the best, nats, and its standard error over parts of the text."""


def suggest(losses: Losses) -> Suggestion | None:
    """Suggest a rate from a finished search; return None where every rate diverged."""
    sound = {each: rungs for each, rungs in losses.items() if rungs and math.isfinite(rungs[-1].loss)}
    if not sound:
        return None
    last = max(len(rungs) for rungs in sound.values())
    ended = [each for each, rungs in sound.items() if len(rungs) == last]
    best = min(ended, key=lambda each: (sound[each][-1].loss, each))
    behind = {each: _difference(losses[best], losses[each]) for each in (best - 1, best + 1) if losses.get(each)}
    offset = _vertex(losses, best)
    unsure = [each for each, (off, error) in behind.items() if error is not None and off < SURE * error]
    at = best + (offset or 0.0)
    return Suggestion(
        best=best,
        at=at,
        low=min([at - 0.5, *unsure]),
        high=max([at + 0.5, *unsure]),
        how="best" if offset is None else "parabola",
        edge=not losses.get(best - 1) or not losses.get(best + 1),
        behind=behind,
    )


def _difference(best: Sequence[Trained], other: Sequence[Trained]) -> tuple[float, float | None]:
    """Compute the loss of `other` less that of `best` at the last rung of both, and its standard error.

    The standard error is None where the losses are of fewer than two parts.
    """
    rung = min(len(best), len(other)) - 1
    mine, theirs = best[rung], other[rung]
    pairs = list(zip(mine.parts, theirs.parts, strict=False))
    if len(pairs) < 2:
        return theirs.loss - mine.loss, None
    return theirs.loss - mine.loss, statistics.stdev(b - a for a, b in pairs) / math.sqrt(len(pairs))


def _vertex(losses: Losses, best: int) -> float | None:
    """Fit a parabola through the best rate and its neighbours at the last rung they share; return its minimum.

    The minimum is an exponent relative to `best`, at most half away. None where a neighbour is missing or diverged, or
    no rate between them would be better.
    """
    around = [losses.get(each, ()) for each in (best - 1, best, best + 1)]
    rung = min(map(len, around)) - 1
    if rung < 0:
        return None
    low, middle, high = (each[rung].loss for each in around)
    curvature = low - 2 * middle + high
    if not (math.isfinite(curvature) and curvature > 0):
        return None
    return max(-0.5, min(0.5, 0.5 * (low - high) / curvature))
