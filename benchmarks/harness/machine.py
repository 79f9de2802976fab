"""The machine in a record: device, driver, processor, libraries and commit; nothing that names a person."""

import importlib.metadata
import importlib.util
import os
import platform
import subprocess
from pathlib import Path
from typing import Any

import torch

from benchmarks.harness import ROOT

LIBRARIES = (
    *("kdtrain", "torch", "transformers", "numpy", "h5py", "hdf5plugin", "triton", "torchao"),
    *("transformer-engine", "trl", "liger-kernel"),
)


def machine(device: torch.device) -> dict[str, Any]:
    """The device, its driver or its cores, and the libraries."""
    found: dict[str, Any] = {"device": cpu_model(), "capability": torch.backends.cpu.get_cpu_capability()}
    found |= {"cores": os.cpu_count(), "threads": torch.get_num_threads(), "driver": None}
    if device.type == "cuda":
        facts = torch.cuda.get_device_properties(device)
        found = {"device": facts.name, "driver": _driver(), "memory_gib": round(facts.total_memory / 2**30, 1)}
        found |= {"capability": f"{facts.major}.{facts.minor}", "cuda": torch.version.cuda}
    return found | {"python": platform.python_version(), "libraries": {name: version(name) for name in LIBRARIES}}


def _driver() -> str | None:
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=30).stdout.splitlines()[0].strip()
    except (OSError, IndexError, subprocess.TimeoutExpired):
        return None


def cpu_model() -> str:
    """The name of the processor, if the system gives one."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def version(name: str) -> str | None:
    """The version of a package, or None if it is not installed."""
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def commit() -> str | None:
    """The measured commit, or None outside a clone."""
    try:
        asked = subprocess.run(["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True)
    except OSError:
        return None
    return asked.stdout.strip() if asked.returncode == 0 else None


def missing(*names: str) -> str | None:
    """Which of these packages cannot be imported here, in words; None when all can."""
    absent = [name for name in names if importlib.util.find_spec(name) is None]
    return f"not installed: {', '.join(absent)} (docs/performance.md says how to bring it along)" if absent else None
