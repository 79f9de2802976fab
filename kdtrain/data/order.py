"""The order in which sequences are read: pure functions of integers, so that a resume needs one number and no state.

The training stream is endless: permutation(epoch 0), permutation(epoch 1), ... one after the other; its position p is
entry p % n of epoch p // n. Evaluation reads range(n). A permutation is computed whole, 8 bytes a sequence, and the
last two of a stream are cached.

A mixture of several data sets (`MixedOrder`) has such a stream for each member, and an order in which the members take
turns. An epoch is as many sequences as all members hold together, whatever the weights: each member gives its share of
them, to within one sequence, spread evenly over the epoch. A member whose share is larger than its size goes through
its permutations several times an epoch, a member with a smaller one takes several epochs for one pass: nothing of a
member is repeated before all of it was read.
"""

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache, partial

import numpy as np

_Indices = np.ndarray[tuple[int], np.dtype[np.int64]]


def permutation(seed: int, epoch: int, n: int, stream: int = 0) -> _Indices:
    """Return the order of `n` sequences in `epoch`: int64 [n], read-only. `stream` numbers the members of a mixture.

    `np.random.RandomState` because NumPy guarantees its streams for ever, which it does not for `Generator` (NEP 19).
    Its seed is the SHA-256 of (seed, epoch), and of a stream above 0, so that neighbouring ones are unrelated. Raises
    ValueError for n < 1.
    """
    found: _Indices = _stream(seed, n, stream)(epoch)
    return found


@lru_cache(maxsize=64)
def _stream(seed: int, n: int, stream: int) -> partial[_Indices]:
    return partial(lru_cache(maxsize=2)(_permuted), seed, n, stream)


def _permuted(seed: int, n: int, stream: int, epoch: int) -> _Indices:
    if n < 1:
        raise ValueError(f"there is no order of {n} sequences")
    digest = hashlib.sha256(f"{seed},{epoch}{f',{stream}' if stream else ''}".encode()).digest()
    order = np.random.RandomState(np.frombuffer(digest, dtype="<u4")).permutation(n).astype(np.int64)
    order.setflags(write=False)
    return order


def batch(seed: int, start: int, size: int, n: int, stream: int = 0) -> _Indices:
    """Return the sequences at positions [start, start + size) of the stream over `n` sequences: int64 [size]."""
    stop = start + size
    pieces = [np.empty(0, dtype=np.int64)]
    while start < stop:
        epoch, offset = divmod(start, n)
        taken = min(n - offset, stop - start)
        pieces.append(permutation(seed, epoch, n, stream)[offset : offset + taken])
        start += taken
    return np.concatenate(pieces)


@dataclass(frozen=True)
class Order:
    """The endless order in which a run reads its sequences."""

    batch: Callable[[int, int], _Indices]
    """(start, size) -> the sequences at positions [start, start + size) of the stream: int64 [size]."""
    arranged: Callable[[np.ndarray], np.ndarray] = lambda indices: indices
    """What a rank reads of a step, as it cuts it into micro-batches."""

    @classmethod
    def shuffled(cls, seed: int, n: int, stream: int = 0) -> "Order":
        """Return the order in which every epoch of `n` sequences is shuffled anew."""
        return cls(partial(batch, seed, n=n, stream=stream))


@dataclass(frozen=True)
class MixedOrder:
    """The order of several data sets in one stream. Sequences are numbered as if the data sets lay end to end."""

    sizes: tuple[int, ...]
    """Sequences of each member."""
    quotas: tuple[int, ...]
    """Sequences that each member gives an epoch; their sum is the length of an epoch."""

    @classmethod
    def weighted(cls, sizes: Sequence[int], weights: Sequence[float] | None = None) -> "MixedOrder":
        """Return a mixture in proportion to `weights`, by default to the sizes, so that an epoch is one pass over all.

        Quotas are rounded by the largest remainder, exactly. ValueError: a member is empty, or a weight is not above 0
        or so small that its member gives no sequence an epoch.
        """
        weights = sizes if weights is None else weights
        if not sizes or len(weights) != len(sizes) or not all(0 < each < float("inf") for each in (*weights, *sizes)):
            raise ValueError(f"{len(sizes)} members need as many weights above 0, and hold at least a sequence each")
        total, whole = sum(sizes), sum(map(Fraction, weights))
        exact = [Fraction(each) * total / whole for each in weights]
        quotas = [int(each) for each in exact]
        first = sorted(range(len(exact)), key=lambda member: (quotas[member] - exact[member], member))
        for member in first[: total - sum(quotas)]:
            quotas[member] += 1
        if 0 in quotas:
            member = quotas.index(0)
            raise ValueError(
                f"weight {weights[member]:g} of member {member + 1} gives it no sequence in an epoch of {total}"
            )
        return cls(tuple(sizes), tuple(quotas))

    def __len__(self) -> int:
        """Return the length of an epoch."""
        return sum(self.quotas)

    def batch(self, seed: int, start: int, size: int) -> _Indices:
        """Return the sequences at positions [start, start + size) of the stream: int64 [size]."""
        members_E, before_E = _turns(self.quotas)
        epochs, offsets = np.divmod(np.arange(start, start + size, dtype=np.int64), len(self))
        members = members_E[offsets]
        places = epochs * np.array(self.quotas)[members] + before_E[offsets]
        found = np.empty(size, dtype=np.int64)
        for member, first in enumerate(self.firsts):
            own = np.flatnonzero(members == member)
            if len(own):  # their places follow each other: a member gives all of its own stream
                drawn = batch(seed, int(places[own[0]]), len(own), self.sizes[member], member)
                found[own] = first + drawn
        return found

    def turns(self) -> _Indices:
        """Return the member whose turn it is at each place of an epoch: int64 [E]."""
        return _turns(self.quotas)[0]

    @property
    def firsts(self) -> tuple[int, ...]:
        """The number of each member's first sequence."""
        return tuple(sum(self.sizes[:member]) for member in range(len(self.sizes)))

    def order(self, seed: int) -> Order:
        """Return the order of `batch`; a rank reads its part of a step by member: most micro-batches hold one."""
        return Order(partial(self.batch, seed), self.grouped)

    def members(self, indices: np.ndarray) -> _Indices:
        """Return the member of each of these sequences: int64 [N]."""
        return np.searchsorted(self.firsts, indices, side="right") - 1

    def grouped(self, indices: np.ndarray) -> np.ndarray:
        """Return the same sequences, member by member."""
        return indices[np.argsort(self.members(indices), kind="stable")]


@lru_cache(maxsize=4)
def _turns(quotas: tuple[int, ...]) -> tuple[_Indices, _Indices]:
    """Return for each position of an epoch its member, and how many sequences this gave before it: two int64 [E].

    A member's j-th sequence has its turn at the time (j + 1/2) / quota: of two members each has given its share at any
    place of an epoch, to within half a sequence.
    """
    given = [np.arange(each, dtype=np.int64) for each in quotas]
    times = np.concatenate([(2 * each + 1) / (2 * len(each)) for each in given])
    turns = np.argsort(times, kind="stable")  # members in their order where times are equal
    members = np.repeat(np.arange(len(quotas), dtype=np.int64), quotas)
    return members[turns], np.concatenate(given)[turns]
