"""The layout of ranks: which part of a step's data each reads, and with whom it exchanges what.

With tensor parallelism `tensor_size` ranks with consecutive numbers, on one node where the launcher counts so, compute
one forward together: they are one data rank, and read the same sequences with the same random numbers. What means the
data rank takes it from here; `kdtrain.ranks` counts all ranks, for checkpoints, messages and stop requests. A run makes
the student's layout once, before anything else is resolved (`run.recipe`), and hands it on: gradients, sums and shards
go over its groups. A teacher that is cut over another number of ranks has one of its own.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from kdtrain.errors import UsageError
from kdtrain.ranks import all_reduce_sum, device_mesh, limit_wait, rank, reported, world_size


@dataclass(frozen=True)
class RankLayout:
    """The place of this rank among all ranks; by default the place of a single process.

    `mesh` has the data ranks in its dimension `shard`, and where several share a copy of a model also `replicate`;
    `data_group` is their process group. `tensor_mesh` has the ranks of one data rank.
    """

    data_rank: int = 0
    data_size: int = 1
    """How many parts the data of a step has."""
    mesh: Any = None
    data_group: Any = None
    tensor_rank: int = 0
    tensor_size: int = 1
    """How many ranks compute one forward together."""
    tensor_mesh: Any = None

    @classmethod
    def of_ranks(
        cls, device: torch.device, tensor: int = 1, sharing: int | None = None, option: str = "--tensor-parallel"
    ) -> "RankLayout":
        """Make the layout of all ranks. Every rank must call it.

        Args:
            tensor: ranks that compute a forward together.
            sharing: with tensor parallelism, the data ranks that share one copy of a model; None: all.
            option: that gave `tensor`, for messages.

        Raises:
            UsageError: one of the numbers does not divide the ranks.
        """
        size = world_size()
        if size % tensor:
            start = f"torchrun --nproc-per-node {tensor}" if size == 1 else f"a multiple of {tensor} ranks"
            raise reported(UsageError(f"{option} {tensor} does not divide {size} ranks; start {start}"))
        if size == 1:
            return cls()
        if tensor == 1:
            mesh = device_mesh(device.type, (size,), ("shard",))
            return cls(rank(), size, mesh, mesh.get_group())
        data = size // tensor
        sharing = sharing or data
        if data % sharing:
            raise reported(
                UsageError(f"--shard-size {sharing} does not divide {data} data ranks; choose one that does")
            )
        names = ("replicate", "shard", "tensor")
        every = device_mesh(device.type, (data // sharing, sharing, tensor), names)
        mesh = every["shard"] if sharing == data else every["replicate", "shard"]
        group = mesh.get_group() if mesh.ndim == 1 else limit_wait(mesh._flatten("data").get_group())
        return cls(rank() // tensor, data, mesh, group, rank() % tensor, tensor, every["tensor"])

    def __str__(self) -> str:
        if self.tensor_size == 1:
            return f"{self.data_size} ranks"
        return f"{self.data_size} data rank{'s' if self.data_size > 1 else ''} of {self.tensor_size} tensor ranks"

    def sharing(self, size: int | None) -> Any:
        """Return the mesh in which `size` data ranks share one copy of a model; None: all. Every rank must call it."""
        if size in (None, self.data_size) or self.tensor_size > 1:
            return self.mesh
        shape = self.data_size // size, size
        return device_mesh(self.mesh.device_type, shape, ("replicate", "shard"))

    def share(self, indices: np.ndarray) -> np.ndarray:
        """Return the part of a step's sequences that this data rank reads: an even part, in order."""
        return np.array_split(indices, self.data_size)[self.data_rank]

    def sum(self, tensor: Tensor) -> Tensor:
        """Sum over the data ranks, entry by entry, with the same bits on each rank; every rank must call it."""
        if self.tensor_size > 1:
            return all_reduce_sum(self.once(tensor))
        return tensor if self.data_size == 1 else all_reduce_sum(tensor, self.data_group)

    def once(self, tensor: Tensor) -> Tensor:
        """Return `tensor` on the first tensor rank of a data rank, else 0: in a sum over all ranks each counts once.

        Tensor ranks may round apart; what follows from a sum of one of them is the same on all.
        """
        return tensor if self.tensor_rank == 0 else torch.zeros_like(tensor)
