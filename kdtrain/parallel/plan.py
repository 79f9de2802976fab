"""How student and teacher are spread over the ranks: a pure function of sizes and options."""

from dataclasses import dataclass
from typing import Literal

from kdtrain.config import ParallelConfig


@dataclass(frozen=True)
class Plan:
    """What each rank holds."""

    student: Literal["single", "ddp", "fsdp"]
    """The whole student in the one process there is, the whole of it on each rank, or a part of it."""
    teacher: Literal["none", "replicate", "fsdp"]
    """No online teacher, the whole of it on each rank, or a part of it."""
    shard_size: int | None = None
    """Ranks that share one copy of what is sharded; all when None."""


def choose(options: ParallelConfig, world: int, *, online: bool) -> Plan:
    """The plan for `world` ranks.

    online: whether there is a teacher to be asked while the student trains.
    """
    student: Literal["ddp", "fsdp"] = "fsdp" if options.parallel == "fsdp" else "ddp"
    teacher: Literal["replicate", "fsdp"] = "fsdp" if options.teacher_parallel == "fsdp" else "replicate"
    if world == 1:
        return Plan("single", "replicate" if online else "none")
    return Plan(student, teacher if online else "none", options.shard_size)
