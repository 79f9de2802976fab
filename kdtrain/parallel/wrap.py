"""The student and the teacher spread over ranks by PyTorch's own engines: DDP, and FSDP2's `fully_shard`.

A training step is called through one of three wrappers, which differ in when gradients travel. Losses are divided by
a constant and not by tokens or ranks, so that gradients are summed over ranks, never averaged; the mean over the
tokens of all ranks is taken once, behind that (`training.update`). Before the last micro-batch of a step nothing is
exchanged. What a run learns beside the student (the temperature, projections) is a handful of numbers that only some
steps give a gradient: it stays whole on each rank, out of both engines, and the step adds it up itself.

FSDP2 cuts each transformer layer by itself, and embedding, last norm and output head as one root: its weights are
whole from the forward to the end of the backward, as the fused head needs them. Masters and reductions are fp32; a
layer's weights travel in the format that autocast would round them to, and the root's in fp32, so that the student
computes what it does in one process, but for the weights of norms, which are rounded as well.

What it gives up: a quantised student's weights travel in fp32, because a second rounding would change its values;
each rank loads a model whole before it keeps its part.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel


class Alone:
    """A step that one process takes: called as it is.

    Args:
        step: one micro-batch -> the loss to differentiate, and what to report.
        student: the part of it that is spread over ranks.
    """

    kind = "single"

    def __init__(self, step: nn.Module, student: nn.Module) -> None:
        self.step, self.student = step, student

    def __call__(self, *batch: Any, **options: Any) -> Any:
        """Call the step through its wrapper."""
        return self.step(*batch, **options)

    @contextmanager
    def micro_batch(self, last: bool) -> Iterator[None]:
        """Around forward and backward of a micro-batch; gradients are exchanged in the last one of a step."""
        yield

    def reshard(self) -> None:
        """Give back what a forward without a backward has gathered."""


class Replicated(Alone):
    """A step under DDP, with the whole student on each rank.

    Args:
        own: names of the step's parameters that DDP leaves alone, beside those that no loss reaches.
        probe: a call whose result, summed and differentiated, reaches what training reaches.
    """

    kind = "ddp"

    def __init__(self, step: nn.Module, student: nn.Module, own: set[str], probe: Callable[[], torch.Tensor]) -> None:
        super().__init__(step, student)
        # buffers are constants, the same on each rank, and need no broadcast
        left = own | _unreached(step, probe) | {name for name, _ in step.named_buffers()}
        # a private name for want of a public one: DDP's documentation has none for parameters that are not its own
        DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(step, sorted(left))
        device = next(student.parameters()).device
        self.wrapper = DistributedDataParallel(
            step,
            device_ids=[device] if device.type == "cuda" else None,
            gradient_as_bucket_view=True,
            init_sync=True,
        )
        self.wrapper.register_comm_hook(None, _sum)

    def __call__(self, *batch: Any, **options: Any) -> Any:
        """Call the step through DDP."""
        return self.wrapper(*batch, **options)

    @contextmanager
    def micro_batch(self, last: bool) -> Iterator[None]:
        """Around forward and backward: what DDP decides in the one holds for the other."""
        if last:
            yield
        else:
            with self.wrapper.no_sync():
                yield


class Sharded(Alone):
    """A step whose student was cut up by `shard`."""

    kind = "fsdp"

    @contextmanager
    def micro_batch(self, last: bool) -> Iterator[None]:
        """FSDP2 keeps unreduced gradients, whole and in fp32, until the last micro-batch."""
        self.student.set_requires_gradient_sync(last)  # type: ignore[operator]
        yield

    def reshard(self) -> None:
        """Drop the gathered root, which would be out of date once weights are loaded."""
        reshard(self.student)


def shard(
    model: nn.Module,
    device: torch.device,
    *,
    dtype: torch.dtype | None = None,
    shard_size: int | None = None,
    compile: Callable[[Any], Any] | None = None,
) -> None:
    """Cut `model` up in place: its parameters become DTensors, their names stay. Every rank must call it.

    Args:
        model: on any device, whole, with the same values on each rank; its forward is what is called.
        device: where its parts are put.
        dtype: what a layer's floating weights are gathered in; as they are when None.
        shard_size: ranks that share one copy; all of them when None.
        compile: makes a layer's forward a compiled one.
    """
    mesh = mesh_of(device, shard_size)
    for layer in layers_of(model):
        if compile is not None:
            layer.forward = compile(layer.forward)
        # inputs keep their format: the residual stream is fp32 under autocast, and stays so
        policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32, cast_forward_inputs=False)
        _sum_up(fully_shard(layer, mesh=mesh, mp_policy=policy))
    policy = MixedPrecisionPolicy(reduce_dtype=torch.float32, cast_forward_inputs=False)
    _sum_up(fully_shard(model, mesh=mesh, mp_policy=policy))


def reshard(model: nn.Module) -> None:
    """Give back what a forward of a model that was cut up has left whole; nothing for any other."""
    if isinstance(model, FSDPModule):
        model.reshard()


def mesh_of(device: torch.device, shard_size: int | None) -> DeviceMesh:
    """The ranks in a row, or, with `shard_size`, in rows that each hold a copy of the model."""
    world = dist.get_world_size()
    if shard_size is None or shard_size == world:
        return init_device_mesh(device.type, (world,), mesh_dim_names=("shard",))
    assert world % shard_size == 0
    shape = (world // shard_size, shard_size)
    return init_device_mesh(device.type, shape, mesh_dim_names=("replicate", "shard"))


def layers_of(model: nn.Module) -> list[nn.Module]:
    """The transformer layers: the members of the longest list of modules."""
    lists = [module for module in model.modules() if isinstance(module, nn.ModuleList)]
    return list(max(lists, key=lambda modules: len(modules), default=[]))


def _sum_up(module: Any) -> None:
    """Let gradients be sums over ranks, which FSDP2 would divide by their number."""
    module.set_gradient_divide_factor(1.0)
    module.set_force_sum_reduction_for_comms(True)


def _sum(state: None, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    """DDP's exchange of a bucket, without its division by the number of ranks."""
    work = dist.all_reduce(bucket.buffer(), async_op=True)
    return work.get_future().then(lambda future: future.value()[0])


def _unreached(step: nn.Module, probe: Callable[[], torch.Tensor]) -> set[str]:
    """Names of the parameters whose gradient is never made, which DDP would wait for."""
    named = {name: each for name, each in step.named_parameters() if each.requires_grad}
    with torch.enable_grad():
        found = torch.autograd.grad(probe().float().sum(), list(named.values()), allow_unused=True)
    return {name for name, gradient in zip(named, found, strict=True) if gradient is None}
