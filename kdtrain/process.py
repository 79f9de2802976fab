"""Which process of a run this is, as its launcher states in the environment; `ranks` has what they exchange.

Commands that only read files use these alone, and import no torch.
"""

import os
from typing import TypeVar

E = TypeVar("E", bound=Exception)


def rank() -> int:
    """The number of this process, from 0."""
    return int(os.environ.get("RANK") or 0)


def world_size() -> int:
    """How many processes the run has."""
    return int(os.environ.get("WORLD_SIZE") or 1)


def local_rank() -> int:
    """The number of this process on its node, from 0."""
    return int(os.environ.get("LOCAL_RANK") or 0)


def is_main() -> bool:
    """Whether this is rank 0, the only one that prints and writes what all ranks share."""
    return rank() == 0


def reported(error: E) -> E:
    """Mark `error`, which every rank raises, as reported by rank 0, so that only rank 0 prints it."""
    error.reported = not is_main()  # type: ignore[attr-defined]
    return error
