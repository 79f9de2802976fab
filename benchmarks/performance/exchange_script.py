"""One rank of `kdtrain distill` that counts what it exchanges: FILE, then the words of the command.

parallel.py starts it in each rank. Rank 0 writes [{collective: [calls, bytes]}] of the training steps to FILE. The
calls are those of PyTorch, FSDP2 and kdtrain; the bytes are those of its input or output, the larger of the two.
"""

import json
import sys
from collections import defaultdict
from pathlib import Path
from typing import Any

import torch
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from kdtrain import cli
from kdtrain.ranks import is_main
from kdtrain.training.step import Stepper

SMALL = 1024
"""Bytes below which a call is about numbers that ranks agree on, and is counted as "numbers"."""
NAMES = {"allreduce": "all_reduce", "allgather_base": "all_gather", "reduce_scatter_base": "reduce_scatter"}


class Counted(TorchDispatchMode):
    """A counter of calls and bytes by collective in the block."""

    def __init__(self) -> None:
        super().__init__()
        self.entries: dict[str, list[int]] = defaultdict(lambda: [0, 0])

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function.namespace == "c10d":
            size = max((each.nbytes for each in pytree.tree_leaves(args) if isinstance(each, torch.Tensor)), default=0)
            name = function._schema.name.split("::")[1].strip("_")
            entry = self.entries[NAMES.get(name, name) if size > SMALL else "numbers"]
            entry[0], entry[1] = entry[0] + 1, entry[1] + size
        return function(*args, **(kwargs or {}))


def main(file: str, *words: str) -> None:
    """Run the command, and write what was counted."""
    steps, take = list[dict[str, list[int]]](), Stepper.take

    def counting(*args: Any) -> Any:
        with Counted() as counted:
            result = take(*args)
        steps.append(dict(counted.entries))
        return result

    Stepper.take = counting  # type: ignore[method-assign]
    try:
        cli.main(list(words))
    finally:
        if is_main():
            Path(file).write_text(json.dumps(steps))


if __name__ == "__main__":
    main(*sys.argv[1:])
