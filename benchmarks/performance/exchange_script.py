"""One rank of `kdtrain distill` that counts what it exchanges: FILE, then the words of the command.

Started once a rank by parallel.py. The collectives of `torch.distributed` are wrapped, by which FSDP2,
DDP (whose exchange is a hook of kdtrain's) and kdtrain itself all go. Rank 0 writes [{collective: [calls, bytes]}] of
the training steps to FILE. A collective's bytes are those of what goes in or comes out of it, the larger of the two.
"""

import functools
import json
import sys
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from kdtrain import cli
from kdtrain.ranks import is_main
from kdtrain.training.step import Stepper

SMALL = 1024
"""Bytes below which a call is about numbers that ranks agree on, and is counted as "numbers"."""
NAMES = {
    **{"all_reduce": "all_reduce", "broadcast": "broadcast", "all_gather": "all_gather"},
    **{"all_gather_single": "all_gather", "all_gather_into_tensor": "all_gather"},
    **{"reduce_scatter_single": "reduce_scatter", "reduce_scatter_tensor": "reduce_scatter"},
    **{"reduce": "reduce", "reduce_scatter": "reduce_scatter", "all_to_all_single": "all_to_all", "send": "send"},
}

counted: dict[str, list[int]] = defaultdict(lambda: [0, 0])
"""Calls and bytes of the step in work."""


def count(name: str, collective: Callable[..., Any]) -> Callable[..., Any]:
    """`collective`, counted."""

    @functools.wraps(collective)
    def wrapped(*args: Any, **options: Any) -> Any:
        size = max(map(_bytes, (*args, *options.values())), default=0)
        entry = counted[name if size > SMALL else "numbers"]
        entry[0] += 1
        entry[1] += size
        return collective(*args, **options)

    return wrapped


def _bytes(value: Any) -> int:
    if isinstance(value, torch.Tensor):
        return value.nbytes
    return sum(map(_bytes, value)) if isinstance(value, list | tuple) else 0


def counting(step: Callable[..., Any], steps: list[dict[str, list[int]]]) -> Callable[..., Any]:
    """`Stepper.take`, which leaves what it exchanged in `steps`."""

    def taken(*args: Any) -> Any:
        counted.clear()
        result = step(*args)
        steps.append({name: list(entry) for name, entry in counted.items()})
        return result

    return taken


def main(file: str, *words: str) -> None:
    """Run the command, and write what was counted."""
    steps: list[dict[str, list[int]]] = []
    for name, collective in NAMES.items():
        if hasattr(dist, name):
            setattr(dist, name, count(collective, getattr(dist, name)))
    Stepper.take = counting(Stepper.take, steps)  # type: ignore[method-assign]
    try:
        cli.main(list(words))
    finally:
        if is_main():
            Path(file).write_text(json.dumps(steps))


if __name__ == "__main__":
    main(*sys.argv[1:])
