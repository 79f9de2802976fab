"""The layout of ranks: which part of a step's data each reads, and with whom it shares a layer or a sequence.

A run trains with data parallelism: each rank is a data rank of its own. With tensor or context parallelism several
ranks would share a data rank, and read the same sequences with the same random numbers. What means the data rank takes
it from here; `kdtrain.ranks` counts all ranks, for checkpoints, messages and stop requests.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
from torch import Tensor

from kdtrain.ranks import all_reduce_sum, rank, world_size


@dataclass(frozen=True)
class RankLayout:
    """The place of this rank."""

    data_rank: int = 0
    data_size: int = 1
    """How many parts the data of a step has."""
    tensor_group: Any = None
    """The ranks that share each layer; None: this one alone."""
    context_group: Any = None
    """The ranks that share each sequence; None: this one alone."""

    @classmethod
    def of_ranks(cls) -> "RankLayout":
        """Data parallelism over all ranks."""
        return cls(rank(), world_size())

    def share(self, indices: np.ndarray) -> np.ndarray:
        """The part of a step's sequences that this data rank reads: an even one, in order."""
        return np.array_split(indices, self.data_size)[self.data_rank]

    def sum(self, tensor: Tensor) -> Tensor:
        """The sum over the data ranks, entry by entry; every rank must call it."""
        return tensor if self.data_size == 1 else all_reduce_sum(tensor)
