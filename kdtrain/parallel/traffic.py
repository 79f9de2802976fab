"""Bytes that ranks exchange in a step, from shapes alone: what DDP and FSDP2 send as `wrap` sets them up.

The payload of a collective is what a rank puts in or gets out, the larger of the two; over a ring of w ranks a rank
sends (w - 1) / w of it for an all-gather or a reduce-scatter, and twice that for an all-reduce (Patarasuk and Yuan
2009; NCCL counts its bus bandwidth so). P parameters, of which L in layers; c bytes a gathered number (2 for a student
in bf16, 4 in fp32); m micro-batches a step:

    DDP    all-reduce 4 P, once a step, whatever m is
    FSDP2  all-gather m (2 c L + 4 (P - L)): layers for the forward and again for the backward, the root once;
           reduce-scatter 4 P, once a step
    with --shard-size s: the same among s ranks, and an all-reduce of 4 P / s among the ranks that hold the same part

FSDP2 cuts a parameter along its first dimension and pads it to a multiple of the ranks: small ones cost more than
their size. The handful of numbers that ranks agree on each step is left out.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

Shape = Sequence[int]


@dataclass(frozen=True)
class Traffic:
    """Payload in bytes and calls of one step on one rank, by collective."""

    all_reduce: float = 0.0
    all_gather: float = 0.0
    reduce_scatter: float = 0.0
    calls: dict[str, int] | None = None
    """Where they are known beforehand."""

    def sent(self, sharing: int, replicas: int = 1) -> float:
        """Bytes that a rank sends over rings: of `sharing` ranks for what is sharded, else of `replicas`."""
        parts, copies = (sharing - 1) / sharing, (replicas - 1) / replicas
        return parts * (self.all_gather + self.reduce_scatter) + 2 * copies * self.all_reduce


def ddp(shapes: Sequence[Shape]) -> Traffic:
    """A step under DDP, of parameters of these shapes."""
    return Traffic(all_reduce=4.0 * sum(map(math.prod, shapes)))


def fsdp(
    layers: Sequence[Sequence[Shape]],
    root: Sequence[Shape],
    *,
    sharing: int,
    replicas: int = 1,
    micro_batches: int,
    gathered: int,
) -> Traffic:
    """A step under FSDP2.

    Args:
        layers: shapes of the parameters of each layer.
        root: of all others.
        sharing: ranks that share a copy; `replicas` copies there are.
        micro_batches: of a step on a rank.
        gathered: bytes of a layer's number on its way.
    """
    inside = sum(padded(shape, sharing) for layer in layers for shape in layer)
    outside = sum(padded(shape, sharing) for shape in root)
    groups = len(layers) + 1
    calls = {"all_gather": micro_batches * (2 * groups - 1), "reduce_scatter": groups}
    return Traffic(
        all_gather=micro_batches * (2.0 * gathered * inside + 4.0 * outside),
        reduce_scatter=4.0 * (inside + outside),
        all_reduce=4.0 * (inside + outside) / sharing if replicas > 1 else 0.0,
        calls=calls | ({"all_reduce": groups} if replicas > 1 else {}),
    )


def padded(shape: Shape, sharing: int) -> int:
    """Numbers of a parameter of `shape` that is cut along its first dimension into equal parts."""
    first, *rest = shape if len(shape) else (1,)
    return math.ceil(first / sharing) * sharing * math.prod(rest)
