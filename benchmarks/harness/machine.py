"""The machine in a record: device, driver, processor, libraries, commit, a card's clocks; nothing names a person."""

import importlib.metadata
import importlib.util
import os
import platform
import statistics
import subprocess
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

import kdtrain
from benchmarks.harness import ROOT
from kdtrain.models import attention
from kdtrain.objective.engine import kernels

LIBRARIES = (
    *("torch", "transformers", "numpy", "h5py", "hdf5plugin", "triton", "torchao"),
    *("transformer-engine", "trl", "liger-kernel", "cut-cross-entropy", "axolotl"),
)
SENSORS = {"sm_mhz": "clocks.sm", "memory_mhz": "clocks.mem", "watts": "power.draw", "celsius": "temperature.gpu"}


def machine(device: torch.device) -> dict[str, Any]:
    """Describe the device, its driver or its cores, and the libraries."""
    found: dict[str, Any] = {"device": cpu_model(), "capability": torch.backends.cpu.get_cpu_capability()}
    found |= {"cores": os.cpu_count(), "threads": torch.get_num_threads(), "driver": None}
    if device.type == "cuda":
        facts = torch.cuda.get_device_properties(device)
        found = {
            "device": facts.name,
            "driver": _smi("driver_version"),
            "memory_gib": round(facts.total_memory / 2**30, 1),
        }
        found |= {"capability": f"{facts.major}.{facts.minor}", "cuda": torch.version.cuda}
    libraries = {"kdtrain": kdtrain.__version__, **{name: version(name) for name in LIBRARIES}}
    return found | {"python": platform.python_version(), "libraries": libraries}


def chosen_kernels() -> dict[str, Any]:
    """Return what this process chose by a clock: attention's seconds a layer, and the kernels that pass over logits."""
    times = {f"attention, {shape}, {dtype}": found for (shape, dtype), found in attention._times.items()}
    return times | kernels.choices


@contextmanager
def watched(device: torch.device) -> Iterator[dict[str, list[float]]]:
    """Collect lowest, median and highest of `SENSORS` during the block, which are there at its end.

    Nothing is collected on a CPU or without nvidia-smi.
    """
    found: dict[str, list[float]] = {}
    readings, ended = list[list[float]](), threading.Event()

    def read() -> None:
        while line := _smi(",".join(SENSORS.values())):
            readings.append([float(each) for each in line.replace("[N/A]", "nan").split(",")])
            if ended.wait(1.0):
                return

    thread = threading.Thread(target=read, daemon=True)
    if device.type == "cuda":
        thread.start()
    try:
        yield found
    finally:
        if device.type == "cuda":
            ended.set()
            thread.join()
        for name, each in zip(SENSORS, zip(*readings, strict=True), strict=False):
            found[name] = [min(each), statistics.median(each), max(each)]


def _smi(query: str) -> str | None:
    """Ask nvidia-smi about this process's card; return None without an answer."""
    card = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")[0] or "0"
    command = ["nvidia-smi", f"--id={card}", f"--query-gpu={query}", "--format=csv,noheader,nounits"]
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=30, check=True).stdout.strip() or None
    except (OSError, subprocess.SubprocessError):
        return None


def cpu_model() -> str:
    """Return the name of the processor, if the system gives one."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def version(name: str) -> str | None:
    """Return the version of a package, or None if it is not installed."""
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def commit() -> str | None:
    """Return the measured commit, or None outside a clone."""
    try:
        asked = subprocess.run(["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True)
    except OSError:
        return None
    return asked.stdout.strip() if asked.returncode == 0 else None


def missing(*names: str) -> str | None:
    """Name the packages that cannot be imported here, in words; return None when all can."""
    absent = [name for name in names if importlib.util.find_spec(name) is None]
    return (
        f"not installed: {', '.join(absent)} (benchmarks/performance/gpu.md says how to bring it along)"
        if absent
        else None
    )
