"""One rank that trains a toy model through the wrappers and compares its exchanges with the formulas: no arguments."""

import math
from collections import defaultdict

import torch
import torch.distributed as dist
from torch import nn

from kdtrain.parallel import parallelize
from kdtrain.parallel.parallelize import Replicated, Sharded, shard
from kdtrain.ranks import process_group, world_size

WIDTH, LAYERS, VOCABULARY = 10, 3, 35  # no multiples of 3 ranks


class Toy(nn.Module):
    """Layers between an embedding and a head."""

    def __init__(self, narrow: bool = False) -> None:
        super().__init__()
        self.narrow = narrow
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS))
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16, enabled=self.narrow):
            hidden = self.embedding(tokens)
            for layer in self.layers:
                hidden = layer(hidden)
            return self.head(hidden).sum()


found: dict[str, list[float]] = defaultdict(lambda: [0, 0])


def counted(name: str, collective):
    def call(*args, **options):
        tensors = [each for each in (*args, *options.values()) if isinstance(each, torch.Tensor)]
        found[name][0] += 1
        found[name][1] += max(each.nbytes for each in tensors)
        return collective(*args, **options)

    return call


def step(spread, micro_batches: int) -> dict[str, list[float]]:
    """The exchanges of a step; the step before, in which DDP finds its buckets, is not counted."""
    for _ in range(2):
        found.clear()
        for number in range(1, micro_batches + 1):
            with spread.micro_batch(last=number == micro_batches):
                spread(torch.arange(4)).backward()
    return dict(found)


def main() -> None:
    for name, plain in (
        *(("all_gather_single", "all_gather"), ("all_gather_into_tensor", "all_gather")),
        *(("reduce_scatter_single", "reduce_scatter"), ("reduce_scatter_tensor", "reduce_scatter")),
        ("all_reduce", "all_reduce"),
    ):
        if hasattr(dist, name):
            setattr(dist, name, counted(plain, getattr(dist, name)))
    with process_group(torch.device("cpu"), 300.0):
        for micro_batches in (1, 3):
            toy = Toy()
            shapes = [each.shape for each in toy.parameters()]
            whole = Replicated(toy, toy, set(), lambda toy=toy: toy(torch.arange(4)))
            expected = parallelize.ddp(shapes)
            assert step(whole, micro_batches) == {"all_reduce": [1, expected.all_reduce]}, found
            for dtype, gathered, accumulate in (
                *((None, 4, "whole"), (None, 4, "sharded")),
                *((torch.bfloat16, 2, "whole"), (torch.bfloat16, 2, "sharded")),
            ):
                toy = Toy(narrow=gathered == 2)
                layers = [[each.shape for each in layer.parameters()] for layer in toy.layers]
                root = [each.shape for part in (toy.embedding, toy.head) for each in part.parameters()]
                shard(toy, torch.device("cpu"), dtype=dtype)
                options = {"sharing": world_size(), "micro_batches": micro_batches, "gathered": gathered}
                expected = parallelize.fsdp(layers, root, accumulate=accumulate, **options)
                assert step(Sharded(toy, toy, accumulate), micro_batches) == {
                    name: [calls, getattr(expected, name)] for name, calls in expected.calls.items()
                }, (dict(found), expected, micro_batches, dtype)
                assert math.isclose(expected.sent(world_size()) * 3 / 2, expected.all_gather + expected.reduce_scatter)


if __name__ == "__main__":
    main()
