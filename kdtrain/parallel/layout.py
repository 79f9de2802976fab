"""The layout of ranks: which part of a step's data each reads, and with whom it exchanges what.

A run trains with data parallelism: each rank is a data rank of its own. With tensor or context parallelism several
ranks would share a data rank, and read the same sequences with the same random numbers. What means the data rank takes
it from here; `kdtrain.ranks` counts all ranks, for checkpoints, messages and stop requests. The layout is made once in
a run, before anything else is resolved (`run.recipe`), and handed on: gradients, sums and shards go over its groups.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
from torch import Tensor, device
from torch.distributed.device_mesh import init_device_mesh

from kdtrain.ranks import all_reduce_sum, rank, world_size


@dataclass(frozen=True)
class RankLayout:
    """The place of this rank; by default that of a single process.

    `mesh` has the data ranks in one row, its dimension `shard`, and `data_group` is their process group.
    """

    data_rank: int = 0
    data_size: int = 1
    """How many parts the data of a step has."""
    mesh: Any = None
    data_group: Any = None

    @classmethod
    def of_ranks(cls, device: device) -> "RankLayout":
        """Make the layout of data parallelism over all ranks. Every rank must call it."""
        if (size := world_size()) == 1:
            return cls()
        mesh = init_device_mesh(device.type, (size,), mesh_dim_names=("shard",))
        return cls(rank(), size, mesh, mesh.get_group())

    def sharing(self, size: int | None) -> Any:
        """Return the mesh in which `size` data ranks share one copy of a model; None: all. Every rank must call it."""
        if size in (None, self.data_size):
            return self.mesh
        shape = self.data_size // size, size
        return init_device_mesh(self.mesh.device_type, shape, mesh_dim_names=("replicate", "shard"))

    def share(self, indices: np.ndarray) -> np.ndarray:
        """The part of a step's sequences that this data rank reads: an even one, in order."""
        return np.array_split(indices, self.data_size)[self.data_rank]

    def sum(self, tensor: Tensor) -> Tensor:
        """The sum over the data ranks, entry by entry; every rank must call it."""
        return tensor if self.data_size == 1 else all_reduce_sum(tensor, self.data_group)
