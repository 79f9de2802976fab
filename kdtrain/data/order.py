"""The order in which sequences are read: pure functions of integers, so that a resume needs one number and no state.

The training stream is endless: permutation(epoch 0), permutation(epoch 1), ... one after the other; its position p is
entry p % n of epoch p // n. Evaluation reads range(n). A permutation is computed whole, 8 bytes a sequence, and the
last few are cached.
"""

import hashlib
from functools import lru_cache

import numpy as np

_Indices = np.ndarray[tuple[int], np.dtype[np.int64]]


@lru_cache(maxsize=4)
def permutation(seed: int, epoch: int, n: int) -> _Indices:
    """The order of `n` sequences in `epoch`: int64 [n], read-only.

    `np.random.RandomState` because NumPy guarantees its streams for ever, which it does not for `Generator` (NEP 19).
    Its seed is the SHA-256 of (seed, epoch), so that neighbouring seeds and epochs are unrelated. Raises ValueError for
    n < 1.
    """
    if n < 1:
        raise ValueError(f"there is no order of {n} sequences")
    digest = hashlib.sha256(f"{seed},{epoch}".encode()).digest()
    order = np.random.RandomState(np.frombuffer(digest, dtype="<u4")).permutation(n).astype(np.int64)
    order.setflags(write=False)
    return order


def batch(seed: int, start: int, size: int, n: int) -> _Indices:
    """The sequences at positions [start, start + size) of the stream over `n` sequences: int64 [size]."""
    stop, pieces = start + size, [np.empty(0, dtype=np.int64)]
    while start < stop:
        epoch, offset = divmod(start, n)
        taken = min(n - offset, stop - start)
        pieces.append(permutation(seed, epoch, n)[offset : offset + taken])
        start += taken
    return np.concatenate(pieces)
