"""Student and teacher on several ranks by PyTorch's own engines: DDP, and FSDP2's `fully_shard`.

A training step is called through one of three wrappers, which differ in when gradients are exchanged. Losses are
divided by a constant and not by tokens or ranks, so gradients are summed over ranks, never averaged; the step divides
once by the tokens of all ranks (`training.step`). Before the last micro-batch of a step no gradient is exchanged, but
by FSDP2 where micro-batches add up shards (`--accumulate sharded`): whole gradients are 4 P bytes on each rank.
Parameters besides the student's (temperature, projections) are a handful of numbers that only some steps give a
gradient: they stay whole on each rank, outside both engines, and the step reduces their gradients itself.

FSDP2 shards each transformer layer by itself, and embedding, last norm and output head as one root, whose weights are
whole from the forward to the end of the backward, as the fused head needs them. Masters and reductions are fp32; a
layer's weights are gathered in the format to which autocast would round them, and the root's in fp32, so that the
student computes the same as in one process, but for the weights of norms, which are rounded as well. Weights that are
quantised are gathered in that format too, and in fp32 where quantisation is emulated from fp32. Parameters,
gradients and moments are DTensors: elementwise work runs on the local shard, and sums over all entries are reduced over
the ranks that share a copy.

The bytes that ranks exchange in a step follow from shapes alone. The payload of a collective is a rank's input or
output, the larger of the two; over a ring of w ranks a rank sends (w - 1) / w of it for an all-gather or a
reduce-scatter, and twice that for an all-reduce (Patarasuk and Yuan 2009; NCCL's bus bandwidth is defined so). With P
parameters, of which L in layers, c bytes a gathered number (2 for a student in bf16, 4 in fp32) and m micro-batches:

    DDP    all-reduce 4 P, once a step, whatever m is
    FSDP2  all-gather m (2 c L + 4 (P - L)): layers for the forward and again for the backward, the root once;
           reduce-scatter 4 P, once a step; m 4 P with --accumulate sharded
    with --shard-size s: the same among s ranks, and an all-reduce of 4 P / s among the ranks that hold the same part,
           once a step

FSDP2 shards a parameter along its first dimension and pads it to a multiple of the ranks: small ones cost more than
their size. The few numbers on which ranks agree each step are left out.

Given up: torchao could gather fp8, but only from parameters of a class of its own, which checkpoints, other back ends
and a fallback to the high format would meet; each rank loads the whole model before it keeps its shard.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from torch.nn.parallel import DistributedDataParallel

from kdtrain.models.head import default_probe, layers_of
from kdtrain.parallel.layout import RankLayout
from kdtrain.ranks import agreed_max, all_reduce_sum, local, with_local


class SingleProcess:
    """A module in one process, called as it is.

    Args:
        module: one micro-batch -> the loss to differentiate, and the numbers to report.
        model: the part of it that is replicated or sharded.
        layout: which part of the data this rank reads; by default all.
    """

    kind = "single"

    def __init__(self, module: nn.Module, model: nn.Module, layout: RankLayout = RankLayout()) -> None:
        self.module, self.model, self.layout = module, model, layout

    def __call__(self, *batch: Any, **options: Any) -> Any:
        """Call the module through its wrapper."""
        return self.module(*batch, **options)

    @contextmanager
    def micro_batch(self, last: bool) -> Iterator[None]:
        """Wrap forward and backward of a micro-batch; the last one of a step exchanges gradients."""
        yield

    def reshard(self) -> None:
        """Free the weights that a forward without a backward has gathered, before others are loaded."""
        reshard(self.model)


class Replicated(SingleProcess):
    """A module under DDP, with the whole model on each rank.

    Args:
        own: names of the module's parameters that DDP ignores, besides those that no loss reaches.
        probe: a call whose summed result has a gradient in every parameter that training reaches.
    """

    kind = "ddp"

    def __init__(
        self,
        module: nn.Module,
        model: nn.Module,
        layout: RankLayout,
        own: set[str],
        probe: Callable[[], torch.Tensor],
    ) -> None:
        super().__init__(module, model, layout)
        # DDP would wait for the gradient of a parameter that no loss reaches.
        named = {name: each for name, each in module.named_parameters() if each.requires_grad}
        with torch.enable_grad():
            found = torch.autograd.grad(probe().float().sum(), list(named.values()), allow_unused=True)
        unreached = {name for name, gradient in zip(named, found, strict=True) if gradient is None}
        # Buffers are constants, the same on each rank, and need no broadcast.
        left = own | unreached | {name for name, _ in module.named_buffers()}
        # A private method: DDP has no public one to ignore parameters.
        DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(module, sorted(left))
        device = next(model.parameters()).device
        self.ddp = DistributedDataParallel(
            module,
            device_ids=[device] if device.type == "cuda" else None,
            process_group=layout.data_group,
            gradient_as_bucket_view=True,
            init_sync=True,
        )
        self.ddp.register_comm_hook(layout.data_group, _sum)

    def __call__(self, *batch: Any, **options: Any) -> Any:
        """Call the module through DDP."""
        return self.ddp(*batch, **options)

    @contextmanager
    def micro_batch(self, last: bool) -> Iterator[None]:
        """Wrap forward and backward: DDP decides in the forward whether the backward exchanges gradients."""
        if last:
            yield
        else:
            with self.ddp.no_sync():
                yield


class Summed(SingleProcess):
    """A module of tensor ranks whose parts are the same on each data rank: DDP takes no DTensors.

    The gradients of a step are summed after its last backward.
    """

    kind = "summed"

    @contextmanager
    def micro_batch(self, last: bool) -> Iterator[None]:
        """Wrap forward and backward of a micro-batch; sum the gradients over data ranks behind a step's last one."""
        yield
        if last and self.layout.data_size > 1:
            gradients = [local(each.grad) for each in self.model.parameters() if each.grad is not None]
            for work in [dist.all_reduce(each, group=self.layout.data_group, async_op=True) for each in gradients]:
                work.wait()


class Sharded(SingleProcess):
    """A module whose model was sharded by `shard`.

    Args:
        accumulate: what each rank holds while micro-batches add up, in fp32: `whole` gradients, not exchanged before
            the last one, or `sharded` ones, which copies of a model exchange with the last one.
    """

    kind = "fsdp"

    def __init__(self, module: nn.Module, model: nn.Module, layout: RankLayout, accumulate: str = "whole") -> None:
        super().__init__(module, model, layout)
        self.accumulate = accumulate

    @contextmanager
    def micro_batch(self, last: bool) -> Iterator[None]:
        """Wrap forward and backward: FSDP2 decides in the backward what it exchanges."""
        model: Any = self.model
        model.set_requires_gradient_sync(last or self.accumulate == "sharded")
        model.set_requires_all_reduce(last)
        yield


def parallelize(student: Any, kind: str, layout: RankLayout, accumulate: str = "whole") -> SingleProcess:
    """Return the wrapper of a `training.student.Student`: `single`, `ddp`, or `fsdp` for a sharded model.

    With tensor ranks, `ddp` sums the gradients without DDP (`Summed`).
    """
    if kind == "single":
        return SingleProcess(student, student.model, layout)
    if kind == "fsdp":
        return Sharded(student, student.model, layout, accumulate)
    if layout.tensor_size > 1:
        return Summed(student, student.model, layout)
    own = {name for name, _ in student.named_parameters() if not name.startswith("model.")}
    model = student.model
    with student.eager():  # the probe is shorter than any batch
        return Replicated(student, model, layout, own, lambda: model.logits(default_probe(model.model)))


def shard(model: nn.Module, mesh: DeviceMesh, *, dtype: torch.dtype | None = None) -> None:
    """Shard `model` in place: its parameters become DTensors, with the same names. Every rank must call it.

    Args:
        model: on any device, whole, with the same values on each rank; only its forward may be called.
        mesh: of the ranks that share it (`RankLayout.sharing`), on the device of the shards.
        dtype: the dtype in which a layer's floating weights are gathered; their own when None.
    """
    for layer in layers_of(model):
        # Inputs keep their dtype: the residual stream is fp32 under autocast.
        policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32, cast_forward_inputs=False)
        _sum_up(fully_shard(layer, mesh=mesh, mp_policy=policy))
    policy = MixedPrecisionPolicy(reduce_dtype=torch.float32, cast_forward_inputs=False)
    _sum_up(fully_shard(model, mesh=mesh, mp_policy=policy))


def reshard(model: nn.Module) -> None:
    """Free the weights that a forward of a sharded model has left gathered; no effect on any other model."""
    if isinstance(model, FSDPModule):
        model.reshard()


def _sum_up(module: Any) -> None:
    """Make gradients sums over ranks: by default FSDP2 divides them by the number of ranks."""
    module.set_gradient_divide_factor(1.0)
    module.set_force_sum_reduction_for_comms(True)


def _sum(group: Any, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    """All-reduce a bucket of DDP over a group, without dividing by the number of ranks."""
    work = dist.all_reduce(bucket.buffer(), group=group, async_op=True)
    return work.get_future().then(lambda future: future.value()[0])


def sum_over_tensor_ranks(model: Any, layout: RankLayout) -> None:
    """Make the gradients of weights that each tensor rank of a `SplitModel` holds whole the same as in one process.

    Called once a step. They are the sum of what the ranks see, or where all see the same the first rank's, so that
    no rounding parts them.
    """
    if layout.tensor_size == 1:
        return
    group = layout.tensor_mesh.get_group()
    named = [(name, each.grad) for name, each in model.named_parameters() if each.grad is not None]
    parts = [local(each) for name, each in named if model.once.get(name, False)]
    same = [local(each) for name, each in named if not model.once.get(name, True)]
    exchange(parts, lambda flat: all_reduce_sum(flat, group))
    exchange(same, lambda flat: all_reduce_sum(layout.once(flat), group))


def exchange(tensors: Sequence[torch.Tensor], how: Callable[[torch.Tensor], torch.Tensor]) -> None:
    """Replace tensors by what `how` returns for all of them in one row."""
    if tensors:
        flat = how(torch.cat([each.flatten() for each in tensors]))
        for each, new in zip(tensors, flat.split([each.numel() for each in tensors]), strict=True):
            each.copy_(new.view_as(each))


def is_sharded(tensors: Sequence[torch.Tensor]) -> bool:
    """Return whether any of the tensors is sharded."""
    return any(isinstance(each, DTensor) for each in tensors)


def part_of(whole: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """Return the part of `whole` on this rank when it is sharded like `like`; all of it if `like` is not sharded."""
    if not isinstance(like, DTensor) or isinstance(whole, DTensor):
        return local(whole)
    shape, offsets = compute_local_shape_and_global_offset(like.shape, like.device_mesh, like.placements)
    return whole[tuple(slice(start, start + size) for start, size in zip(offsets, shape, strict=True))]


def cut_like(whole: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """Return `whole` sharded like `like`, on its device."""
    if not isinstance(like, DTensor) or whole.shape != like.shape:
        return whole.to(like.device)
    return with_local(like, part_of(whole, like).to(local(like).device).contiguous())


@torch.no_grad()
def clip_norm_(parameters: Sequence[torch.nn.Parameter], largest: float) -> torch.Tensor:
    """Scale the gradients so that their norm is at most `largest`, and return the norm before; 0-dim."""
    gradients = [each.grad for each in parameters if each.grad is not None]
    if not is_sharded(gradients):
        return torch.nn.utils.clip_grad_norm_(parameters, largest)
    norm = total_norm(gradients)
    torch._foreach_mul_([local(each) for each in gradients], clip_factor(norm, largest))
    return norm


def clip_factor(norm: torch.Tensor, largest: float) -> torch.Tensor:
    """Return the factor of torch's `clip_grad_norm_`, so that a sharded run clips as one process does."""
    return torch.clamp(largest / (norm + 1e-6), max=1.0)


def peak(tensor: torch.Tensor) -> float:
    """Return the largest magnitude in this rank's part of `tensor`; infinite if it has a NaN, 0 if it is empty."""
    own = local(tensor).detach().float().abs()
    return float(torch.nan_to_num(own, nan=float("inf")).max()) if own.numel() else 0.0


def peaks(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return the largest magnitude of each tensor, over all ranks; infinite if any part is non-finite; 1-dim fp32."""
    each = [local(tensor).detach().float().abs() for tensor in tensors]
    own = torch.stack([own.max() if own.numel() else own.new_zeros(()) for own in each])
    own = torch.nan_to_num(own, nan=float("inf"), posinf=float("inf"))
    return agreed_max(own) if is_sharded(tensors) else own


def total_norm(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return the Euclidean norm of all tensors, over all ranks; fp32, one all-reduce for each group that shares."""
    if not is_sharded(tensors):
        return torch.nn.utils.get_total_norm(tensors)
    squares: dict[Any, Any] = {}
    for tensor, norm in zip(tensors, torch._foreach_norm([local(each) for each in tensors]), strict=True):
        groups: tuple[Any, ...] = ()
        if isinstance(tensor, DTensor):
            # also `_StridedShard`, of a parameter that tensor and data ranks cut along one dimension
            sharded = (number for number, each in enumerate(tensor.placements) if not each.is_replicate())
            groups = tuple(map(tensor.device_mesh.get_group, sharded))
        squares[groups] = squares.get(groups, 0.0) + norm.double() ** 2
    for groups, part in squares.items():
        for group in groups:
            dist.all_reduce(part, group=group)
    return torch.stack([*squares.values()]).sum().sqrt().float()


Shape = Sequence[int]


@dataclass(frozen=True)
class Traffic:
    """Payload in bytes of one step on one rank, by collective."""

    all_reduce: float = 0.0
    all_gather: float = 0.0
    reduce_scatter: float = 0.0

    def sent(self, sharing: int, replicas: int = 1) -> float:
        """Return the bytes a rank sends over rings: of `sharing` ranks for shards, of `replicas` for all-reduces."""
        parts, copies = (sharing - 1) / sharing, (replicas - 1) / replicas
        return parts * (self.all_gather + self.reduce_scatter) + 2 * copies * self.all_reduce


def ddp(shapes: Sequence[Shape]) -> Traffic:
    """Return the traffic of a step under DDP, for parameters of these shapes."""
    return Traffic(all_reduce=4.0 * sum(map(math.prod, shapes)))


def fsdp(
    layers: Sequence[Sequence[Shape]],
    root: Sequence[Shape],
    *,
    sharing: int,
    replicas: int = 1,
    micro_batches: int,
    gathered: int,
    accumulate: str = "whole",
    frozen: Sequence[Shape] = (),
) -> Traffic:
    """Return the traffic of a step under FSDP2.

    Args:
        layers: shapes of the parameters of each layer.
        root: of all others.
        sharing: ranks that share a copy, of which there are `replicas`.
        micro_batches: of a step on a rank.
        gathered: bytes of a gathered number of a layer.
        accumulate: see `Sharded`.
        frozen: shapes of the parameters among these that are not trained.
    """
    inside = sum(padded(shape, sharing) for layer in layers for shape in layer)
    outside = sum(padded(shape, sharing) for shape in root)
    scatters = micro_batches if accumulate == "sharded" else 1
    trained = inside + outside - sum(padded(shape, sharing) for shape in frozen)
    return Traffic(
        all_gather=micro_batches * (2.0 * gathered * inside + 4.0 * outside),
        reduce_scatter=scatters * 4.0 * trained,
        all_reduce=4.0 * trained / sharing if replicas > 1 else 0.0,
    )


def padded(shape: Shape, sharing: int) -> int:
    """Count the numbers of a parameter of `shape`, padded along its first dimension to `sharing` equal parts."""
    first, *rest = shape if len(shape) else (1,)
    return math.ceil(first / sharing) * sharing * math.prod(rest)


def part_shape(parameter: torch.Tensor) -> Shape:
    """Return the shape of a parameter, or of the first tensor rank's part of it; data ranks may shard it further."""
    shape = list(parameter.shape)
    if isinstance(parameter, DTensor) and (parameter.device_mesh.mesh_dim_names or ("",))[-1] == "tensor":
        cut = parameter.placements[-1]
        if isinstance(cut, Shard):
            shape[cut.dim] = math.ceil(shape[cut.dim] / parameter.device_mesh.shape[-1])
    return shape
