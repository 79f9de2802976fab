"""The section of options about many processes: how student and teacher are spread over them."""

from dataclasses import dataclass
from typing import Literal

from kdtrain.config.sections import refuse


@dataclass(frozen=True, kw_only=True)
class ParallelConfig:
    """Many processes, started by torchrun."""

    parallel: Literal["auto", "ddp", "fsdp"] = "auto"
    """How the student is spread over the ranks: whole on each (ddp) or in parts (fsdp); auto takes what fits."""
    teacher_parallel: Literal["auto", "replicate", "fsdp"] = "auto"
    """How an online teacher is spread over the ranks: whole on each, or in parts; auto takes what fits."""
    shard_size: int | None = None
    """With fsdp, ranks that share one copy of a model, such as those of a node; all of them when not given."""
    device_memory: float | None = None
    """GiB of each device to plan with; what is free on it when not given."""
    log_all_ranks: bool = False
    """Write one log a rank into the run, rank-00001.log for rank 1."""
    rank_timeout: float = 600.0
    """Seconds that a rank waits for the others before the run ends."""

    def __post_init__(self) -> None:
        refuse(self.shard_size is not None and self.shard_size < 1, "--shard-size must be at least 1")
        _refuse_memory(self.device_memory)
        refuse(not 0 < self.rank_timeout < float("inf"), f"--rank-timeout {self.rank_timeout} must be above 0")


@dataclass(frozen=True, kw_only=True)
class CacheParallelConfig:
    """Many processes that cache one teacher, started by torchrun."""

    teacher_parallel: Literal["auto", "replicate", "fsdp"] = "auto"
    """How the teacher is spread over the ranks: whole on each, or in parts; auto takes what fits."""
    device_memory: float | None = None
    """GiB of each device to plan with; what is free on it when not given."""
    rank_timeout: float = 600.0
    """Seconds that a rank waits for the others before the command ends."""

    def __post_init__(self) -> None:
        _refuse_memory(self.device_memory)
        refuse(not 0 < self.rank_timeout < float("inf"), f"--rank-timeout {self.rank_timeout} must be above 0")


def _refuse_memory(wanted: float | None) -> None:
    refuse(wanted is not None and not 0 < wanted < float("inf"), f"--device-memory {wanted} must be above 0")
