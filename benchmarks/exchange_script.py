"""One rank of `kdtrain distill` that counts what it exchanges: FILE, then the words of the command.

Started once a rank by `benchmarks/parallel.py`. Every call of a collective in a training step is seen by PyTorch's
dispatcher, whoever makes it: DDP, FSDP2 or kdtrain. Rank 0 writes [{collective: [calls, bytes]}] of the steps to FILE.
A collective's bytes are those of what goes in or comes out of it, the larger of the two.
"""

import json
import sys
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from kdtrain import cli
from kdtrain.parallel.world import is_main
from kdtrain.training import loop

SMALL = 1024
"""Bytes below which a call is about numbers that ranks agree on, and is counted as "numbers"."""
NAMES = {"allreduce_": "all_reduce", "_allgather_base_": "all_gather", "_reduce_scatter_base_": "reduce_scatter"}


class Counter(TorchDispatchMode):
    """Counts collectives while it is entered."""

    def __init__(self) -> None:
        super().__init__()
        self.found: dict[str, list[int]] = defaultdict(lambda: [0, 0])

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function.namespace in ("c10d", "_c10d_functional"):
            size = max((_bytes(each) for each in args), default=0)
            plain = function._schema.name.split("::")[1]
            name = NAMES.get(plain, plain) if size > SMALL else "numbers"
            self.found[name][0] += 1
            self.found[name][1] += size
        return function(*args, **(kwargs or {}))


def _bytes(value: Any) -> int:
    if isinstance(value, torch.Tensor):
        return value.nbytes
    return sum(map(_bytes, value)) if isinstance(value, list | tuple) else 0


def counting(take_step: Callable[..., Any], steps: list[dict[str, list[int]]]) -> Callable[..., Any]:
    """`take_step`, which leaves what it exchanged in `steps`."""

    def counted(*args: Any) -> Any:
        counter = Counter()
        with counter:
            result = take_step(*args)
        steps.append(dict(counter.found))
        return result

    return counted


def main(file: str, *words: str) -> None:
    """Run the command, and write what was counted."""
    steps: list[dict[str, list[int]]] = []
    loop.take_step = counting(loop.take_step, steps)  # type: ignore[attr-defined]
    try:
        cli.main(list(words))
    finally:
        if is_main():
            Path(file).write_text(json.dumps(steps))


if __name__ == "__main__":
    main(*sys.argv[1:])
