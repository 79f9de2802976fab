"""The host waits for the device once a step, counted on a CPU: each operation for which a GPU's queue would drain."""

import dataclasses

import pytest
import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from kdtrain.objective import targets
from kdtrain.objective.cells import CellIndex
from kdtrain.objective.engine import fused as engine
from kdtrain.objective.targets import SparseTargets
from kdtrain.parallel import layout
from kdtrain.parallel.layout import RankLayout
from kdtrain.tokenizers.targets import AlignedTargets
from kdtrain.training import guards, step
from kdtrain.training.signals import StopRequest

READS = {"item", "tolist", "cpu", "numpy", "__bool__", "__float__", "__int__", "__index__", "equal"}
"""Methods that read a number from the device."""
WRITES = {"new_tensor", "tensor", "as_tensor", "asarray", "from_numpy"}
"""What makes a tensor of the host's numbers: copied from memory that is not pinned, for which the host waits."""
INSIDE = {"_local_scalar_dense", "nonzero", "masked_select", "_unique2", "unique_consecutive", "lift_fresh"}
"""The same as operators, where torch or a library calls them; `repeat_interleave` where it has to find its size."""


class Waits(TorchFunctionMode):
    """A record of what waits, by name and in order; an operator inside a method that waits is not counted again."""

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_function__(self, function, types, args=(), kwargs=None):
        name = getattr(function, "__name__", "")
        if name in READS | WRITES:
            self.names.append(name)
            return function(*args, **(kwargs or {}))
        with Operators(self.names):
            return function(*args, **(kwargs or {}))


class Operators(TorchDispatchMode):
    def __init__(self, names):
        super().__init__()
        self.names = names

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        name = function.overloadpacket.__name__
        sized = name == "repeat_interleave" and (kwargs or {}).get("output_size") is None
        if name in INSIDE or sized:
            self.names.append(name)
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize(
    "wait",
    [
        float,
        bool,
        torch.Tensor.tolist,
        lambda x: x.new_tensor(1.0),
        lambda x: torch.ones(3)[x > 0],
        lambda x: torch.repeat_interleave(torch.arange(1), x.long()[None]),
    ],
)
def test_a_wait_is_noticed(wait):
    with Waits() as waits:
        wait(torch.ones(()) if wait is not torch.Tensor.tolist else torch.ones(1))
    assert len(waits.names) == 1


def over_cells(source):
    """Give a source targets over cells of three tokens, as a top-k of five."""
    plain = source.read

    def read(indices):
        batch = plain(indices)
        size = batch.targets.width
        index = CellIndex.of(torch.arange(size) // 3, size // 3)
        mass, ids = batch.targets.logprobs.exp().unflatten(1, (-1, 3)).sum(2).topk(5)
        none = mass.new_zeros(len(mass))
        tail = torch.stack([(1 - mass.sum(1)).log(), none], 1)
        near = SparseTargets(ids, mass.log(), mass * 0, tail, none, none, none, 5, 0, (1.0,))
        aligned = AlignedTargets(near, none == 0, none, index)
        return dataclasses.replace(batch, targets=aligned)

    source.read = read
    return source


def test_cells_are_moved_once_and_cost_one_wait_a_micro_batch(workshop, monkeypatch):
    index, device = CellIndex.of(torch.arange(6) // 2, 3), torch.device("meta")
    assert index.to(device) is index.to(device) is not index and index.to(torch.device("cpu")) is index
    monkeypatch.setattr(engine, "_scale", lambda gradient, factor, _: gradient.mul_(factor.to(gradient.dtype)))
    for module in (engine, targets):
        monkeypatch.setattr(module, "readable", lambda tensor: False)
    monkeypatch.setattr(engine, "chunk_rows", lambda *_: 5)
    monkeypatch.setattr(step, "_scales_in_optimizer", lambda *_: True)
    with workshop.run(steps=3, train=over_cells(workshop.source(10)), micro_batch_size=2) as run:
        read = run.stepper.feed()
        run.stepper.take(next(read), StopRequest())
        batches = iter(list(next(read)))
        with Waits() as waits:
            result = run.stepper.take(batches, StopRequest())
    assert result.status is step.Status.TAKEN
    assert waits.names == ["tolist"] * 3  # two micro-batches of four chunks, and the step


@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.parametrize(
    "options",
    [{}, {"temperature_mode": "likelihood", "temperature": 2.0}, {"precision": "fp16"}, {"micro_batch_size": 2}],
    ids=["plain", "learned temperature", "fp16", "accumulation"],
)
def test_a_step_waits_for_the_device_once(workshop, options, world, monkeypatch):
    def scale(gradient, factor, use_kernels):  # as on a GPU: only a CPU looks at the factor
        gradient.mul_(factor.to(gradient.dtype))

    monkeypatch.setattr(engine, "_scale", scale)
    for module in (engine, targets):
        monkeypatch.setattr(module, "readable", lambda tensor: False)
    monkeypatch.setattr(step, "_scales_in_optimizer", lambda *_: True)
    with workshop.run(steps=3, **options) as run:
        read = run.stepper.feed()
        run.stepper.take(next(read), StopRequest())  # the first names parameters without a gradient
        batches = iter(list(next(read)))  # reading data is not the device's
        run.stepper.micro //= world
        run.stepper.wrapper.layout = RankLayout(0, world)
        monkeypatch.setattr(layout, "all_reduce_sum", lambda tensor, group: tensor.clone())
        monkeypatch.setattr(guards, "agreed_max", torch.clone)
        with Waits() as waits:
            result = run.stepper.take(batches, StopRequest())
    assert result.status is step.Status.TAKEN
    assert waits.names == ["tolist"]
