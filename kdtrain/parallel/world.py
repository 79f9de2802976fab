"""Which device a process computes on, what a device can do, and what the ranks of a run agree on."""

import os
import re
from pathlib import Path

import torch
import torch.distributed as dist

from kdtrain.errors import UsageError


def pick_device(name: str) -> torch.device:
    """The device called `name`; `auto` is the first CUDA device, else the CPU.

    Raises:
        UsageError: the name is not a device, or this machine does not have it.
    """
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError:
        raise UsageError(f"--device '{name}' is unknown; use auto, cpu, cuda or cuda:N") from None
    if device.type not in ("cpu", "cuda"):
        raise UsageError(f"--device '{name}' is not supported; use auto, cpu, cuda or cuda:N")
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise UsageError(f"--device '{name}' is not on this machine; it has {torch.cuda.device_count()} CUDA devices")
    return device


def refuse_many_processes() -> None:
    """Refuse to be one of several processes: they would write into one folder.

    Raises:
        UsageError: torchrun or another launcher says that there are more.
    """
    if int(os.environ.get("WORLD_SIZE") or 1) > 1:
        raise UsageError("started as one of several processes, and only one is supported; leave torchrun out")


def agreed_max(tensor: torch.Tensor) -> torch.Tensor:
    """The largest value of `tensor` over all ranks, entry by entry; the tensor itself where there is one process.

    Nothing waits for it on the host. Every rank must call it, in the same order as its other collectives.
    """
    if not (dist.is_available() and dist.is_initialized()):
        return tensor
    agreed = tensor.clone()
    dist.all_reduce(agreed, dist.ReduceOp.MAX)
    return agreed


def memory_mb(device: torch.device) -> float:
    """What this process holds now in MiB: of a GPU's memory (cached blocks too), or resident on a CPU; 0 if unknown."""
    if device.type == "cuda":
        return torch.cuda.memory_reserved(device) / 2**20
    pages = Path("/proc/self/statm")
    return int(pages.read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 2**20 if pages.exists() else 0.0


def peak_memory_mb(device: torch.device) -> float:
    """The high-water mark in MiB: of the allocator on a GPU, of the process on a CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 2**20
    status = Path("/proc/self/status")
    if status.exists():
        # not ru_maxrss: that one survives an exec, so that it may be the peak of the process we were started by
        return int(re.search(r"VmHWM:\s*(\d+) kB", status.read_text())[1]) / 1024  # type: ignore[index]
    import resource
    import sys

    unit = 1 if sys.platform == "darwin" else 1024  # ru_maxrss is in bytes on macOS and in KiB elsewhere
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 2**20
