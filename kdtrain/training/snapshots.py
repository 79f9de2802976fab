"""Snapshots of a run's state that are kept in memory, as part of its checkpoints.

Adaptive quantisation goes back to them. A run that is resumed between two of its windows' ends would have lost them
and go back to another state than the run that was not stopped; a checkpoint that is written while there are any
therefore carries them, under names of their own.
"""

from collections import deque
from collections.abc import Iterable, Mapping
from typing import Any

import torch

from kdtrain.checkpoint.store import Checkpoint

_PREFIX = "snapshot."


def packed(snapshots: Iterable[Checkpoint]) -> dict[str, torch.Tensor]:
    """The tensors of `snapshots`, oldest first, by names that say whose they are."""
    return {
        f"{_PREFIX}{number}.{name}": tensor
        for number, kept in enumerate(snapshots)
        for name, tensor in kept.tensors.items()
    }


def without(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The tensors of a checkpoint that are no snapshot's."""
    return {name: tensor for name, tensor in tensors.items() if not name.startswith(_PREFIX)}


def unpacked(tensors: Mapping[str, torch.Tensor], states: list[dict[str, Any]]) -> deque[Checkpoint]:
    """The snapshots of a checkpoint, oldest first; `states` are their plain numbers."""
    found: deque[Checkpoint] = deque()
    for number, state in enumerate(states):
        start = f"{_PREFIX}{number}."
        own = {name.removeprefix(start): tensor for name, tensor in tensors.items() if name.startswith(start)}
        found.append(snapshot(own, state))
    return found


def snapshot(tensors: dict[str, torch.Tensor], state: dict[str, Any]) -> Checkpoint:
    """A snapshot of these tensors and numbers."""
    return Checkpoint(f"snapshot of step {state['progress']['step']}", tensors, state)
