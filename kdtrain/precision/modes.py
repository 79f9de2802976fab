"""The number format of a forward: plain fp32, or bf16 or fp16 products over fp32 weights by autocast; its switch."""

import contextlib
import shutil
import subprocess
import sysconfig
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

import torch

from kdtrain.errors import UsageError, log

Position = Literal["high", "quantized", "high-forward"]
MODES = ("fp32", "bf16", "fp16")
"""The modes of a forward, but for quantised layers."""


@dataclass
class Switch:
    """The position of all layers of a model."""

    position: Position = "high"
    """high; quantized in all three products; or `high-forward`, quantised in the two of the backward only."""

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "position" and value not in get_args(Position):
            raise UsageError(f"position '{value}' of the switch is unknown; use {', '.join(get_args(Position))}")
        super().__setattr__(name, value)

    @contextlib.contextmanager
    def at(self, position: Position) -> Iterator[None]:
        """Put the switch in another position while the block runs."""
        before = self.position
        self.position = position
        try:
            yield
        finally:
            self.position = before


def pick_mode(name: str, device: torch.device, *, training: bool = False) -> str:
    """Return the mode that `name` means on `device`: `auto` is bf16 if the device has bf16 products.

    Else it is fp32, or fp16 on a GPU that trains: the loss scale detects an overflow, which a teacher would not.
    A log line names a format that is emulated.
    """
    if name == "bf16" and not has_bf16(device):
        slow = "bf16 products are emulated on this %s, many times slower than fp32; --precision fp32 is faster here"
        log.warning(slow, "GPU" if device.type == "cuda" else "CPU")
    if name != "auto":
        return name
    if has_bf16(device):
        return "bf16"
    return "fp16" if training and device.type == "cuda" else "fp32"


def has_bf16(device: torch.device) -> bool:
    """Return whether bf16 matrix products run in hardware: AVX512-BF16 or AMX on a CPU, Ampere or newer on a GPU."""
    if device.type == "cuda":
        return torch.cuda.is_bf16_supported(including_emulation=False)
    if not (torch.backends.mkldnn.is_available() and torch.ops.mkldnn._is_mkldnn_bf16_supported()):
        return False
    flags = Path("/proc/cpuinfo")
    text = flags.read_text() if flags.exists() else ""
    return "avx512_bf16" in text or "amx_bf16" in text


def autocast(mode: str, device: torch.device) -> contextlib.AbstractContextManager[object]:
    """Return the context in which a forward runs in `mode`."""
    dtype = head_dtype(mode)
    return contextlib.nullcontext() if dtype is None else torch.autocast(device.type, dtype)


def head_dtype(mode: str) -> torch.dtype | None:
    """Return the dtype to which autocast in `mode` rounds the inputs of an output head; None if it rounds nothing."""
    return {"bf16": torch.bfloat16, "fp16": torch.float16}.get(mode)


def why_not_tf32(device: torch.device) -> str | None:
    """Return why fp32 products on `device` cannot be made in TF32, or None."""
    if device.type != "cuda":
        return "only a GPU multiplies in TF32"
    major, minor = torch.cuda.get_device_capability(device)
    return None if major >= 8 else f"compute capability {major}.{minor}, and TF32 needs 8.0 (Ampere)"


def compiles_teacher(wanted: bool, device: torch.device, cut: bool = False) -> bool:
    """Whether a teacher's layers are compiled: not on a CPU, where a small cache would wait longer than it gains, and
    not where they are cut over tensor ranks.
    """
    wanted = wanted and device.type == "cuda"
    if wanted and cut:
        log.info("the teacher is not compiled: torch.compile fails on the parts of tensor ranks")
    return wanted and not cut


def why_not_compile(device: torch.device) -> str | None:
    """Return what torch.compile lacks here, or None: on a CPU its compiler needs a C++ compiler and Python.h."""
    if device.type == "cuda":
        return None
    compiler = shutil.which("g++") or shutil.which("clang++")
    if compiler is None:
        return "no C++ compiler (g++) was found"
    if not (Path(sysconfig.get_paths()["include"]) / "Python.h").exists():
        return "the headers of Python (Python.h) are not installed"
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder) / "probe.cpp"
        source.write_text("#include <vector>\nint main() { return std::vector<int>(1)[0]; }\n")
        done = subprocess.run([compiler, str(source), "-o", str(Path(folder) / "probe")], capture_output=True)
    return None if done.returncode == 0 else f"{compiler} cannot build a program"
