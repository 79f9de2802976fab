"""Targets of several kinds in one micro-batch, from data sets that a run mixes.

The student's backbone reads the whole micro-batch; the loss goes through the parts, each as if it were alone, and adds
their sums. Rows without a teacher count by their cross-entropy alone (`loss.DistillationLoss`).

Shape suffixes: N tokens, R rows.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from kdtrain.objective.targets import Targets

Part = tuple[int, Targets | None]
"""A number of rows, and their targets; None: no teacher's predictions; they are trained on all the same."""


@dataclass(frozen=True)
class MixedTargets(Targets):
    """Consecutive rows, each part with targets of its own kind."""

    parts: tuple[Part, ...]
    members: tuple[int, ...] = ()
    top_k = num_samples = 0
    width = None

    def __len__(self) -> int:
        return sum(count for count, _ in self.parts)

    def _each(self, change: Callable[[Targets], Targets]) -> MixedTargets:
        parts = tuple((count, None if each is None else change(each)) for count, each in self.parts)
        return replace(self, parts=parts)

    def map(self, change: Callable[[str, Tensor], Tensor]) -> MixedTargets:
        return self._each(lambda each: each.map(change))

    def narrow(self, vocab_size: int) -> MixedTargets:
        return self._each(lambda each: each.narrow(vocab_size))

    def where(self, keep_N: Tensor) -> MixedTargets:
        kept = keep_N.split([count for count, _ in self.parts])
        parts = zip(self.parts, kept, strict=True)
        found = tuple((count, None if each is None else each.where(keep)) for (count, each), keep in parts)
        return replace(self, parts=found)

    def shown(self) -> dict[str, Tensor]:
        parts = enumerate(each for _, each in self.parts if each is not None)
        return {f"{number}.{name}": tensor for number, each in parts for name, tensor in each.shown().items()}

    def log_partition(self, beta: Tensor | float, keep_N: Tensor | None = None) -> Tensor:
        raise NotImplementedError("each of the parts has its own")


def join(parts: Sequence[Part]) -> Targets | None:
    """Join the targets of rows that follow each other: neighbours of the same kind and shape become one.

    One part is returned as it is, None where it has no teacher.
    """
    joined: list[Part] = []
    for count, targets in parts:
        if joined and _kind(joined[-1][1]) == _kind(targets):
            before, last = joined.pop()
            joined.append((before + count, _concatenated(last, targets)))
        else:
            joined.append((count, targets))
    return joined[0][1] if len(joined) == 1 else MixedTargets(tuple(joined))


def _kind(targets: Targets | None) -> Any:
    """Return what must be equal in targets so that their tensors can be concatenated."""
    if targets is None:
        return None
    own = vars(targets).items()
    return type(targets), {k: (v.shape[1:], v.dtype) if isinstance(v, Tensor) else v for k, v in own}


def _concatenated(one: Targets | None, other: Targets | None) -> Targets | None:
    if one is None or other is None:
        return None
    # column by column, as a cache's targets lie in memory
    return one.map(
        lambda name, tensor: torch.cat([each.movedim(0, -1) for each in (tensor, getattr(other, name))], -1).movedim(
            -1, 0
        )
    )
