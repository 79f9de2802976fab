"""The states that the tests of checkpoints save, their comparison, and damage to a file."""

import os
from collections.abc import Callable
from pathlib import Path

import torch

from kdtrain import faults

STATES = {"progress": {"step": 1, "best_loss": None}}
SHARD = "shard-00001-00001.safetensors"


def tensors(seed: int = 0) -> dict[str, torch.Tensor]:
    """Make one tensor of every kind: transposed, without dimensions, narrow, empty, whole numbers, truth values."""
    generator = torch.Generator().manual_seed(seed)
    weights = torch.randn(5, 3, generator=generator)
    return {
        "a": weights,
        "b": weights.t(),
        "c": torch.tensor(2.5),
        "d": torch.arange(4).bfloat16(),
        "e": torch.empty(0, 2),
        "f": torch.arange(seed, seed + 3),
        "g": weights > 0,
    }


def assert_equal(ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]) -> None:
    """Assert that names, types, shapes and bits are the same."""
    assert ours.keys() == theirs.keys()
    for name, tensor in theirs.items():
        assert (ours[name].dtype, ours[name].shape) == (tensor.dtype, tensor.shape), name
        assert torch.equal(ours[name], tensor), name


def flip(path: Path, place: int = -1, bit: int = 1) -> None:
    """Change bits of one byte of a file."""
    content = bytearray(path.read_bytes())
    content[place] ^= bit
    path.write_bytes(content)


def in_child(work: Callable[[], object], fault: str, log: Path) -> int:
    """Run `work` in a child of this process, with a fault; return its exit status, negative for a signal."""
    child = os.fork()
    if child:
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    try:
        os.environ |= {"KDTRAIN_FAULT": fault, "KDTRAIN_FAULT_LOG": str(log)}
        faults.read()
        work()
        os._exit(0)
    finally:
        os._exit(1)
