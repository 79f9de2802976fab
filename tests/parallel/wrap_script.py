"""Ranks that check the wrappers' exchanges, and that together they equal one process.

Every function is a promise, and is called on each rank; an assertion that fails ends the rank, and so the test.
"""

import shutil
import tempfile
from collections import defaultdict
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from kdtrain.checkpoint import shards
from kdtrain.config.sections import OptimizerConfig
from kdtrain.errors import RunError, UsageError
from kdtrain.models.head import layers_of, split
from kdtrain.monitor.histograms import histograms
from kdtrain.objective.batch import Batch
from kdtrain.objective.loss import DistillationLoss
from kdtrain.objective.targets import DenseTargets
from kdtrain.objective.temperature import build_temperature
from kdtrain.parallel import parallelize
from kdtrain.parallel.layout import RankLayout
from kdtrain.parallel.parallelize import SingleProcess, clip_norm_, peaks, shard, total_norm
from kdtrain.ranks import all_gather_object, all_reduce_max, local, on_main, process_group, raise_on_all_ranks
from kdtrain.testing import tiny_model
from kdtrain.training.guards import non_finite
from kdtrain.training.optimizers import make_optimizer
from kdtrain.training.state import TrainState
from kdtrain.training.student import Student

VOCABULARY, SEQ_LEN, MICROS = 300, 8, 3
CPU = torch.device("cpu")
KINDS = ("ddp", "fsdp", "hybrid")


def whole(tensor: torch.Tensor) -> torch.Tensor:
    """Gather `tensor` if it is sharded."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def parallelized(kind: str, accumulate: str = "whole") -> SingleProcess:
    """Wrap a step with a fresh student, the same on each rank."""
    student = split(tiny_model("llama", VOCABULARY, seed=3))
    temperature = build_temperature("minimize", start=2.0, minimum=0.5, maximum=4.0)
    layout = RankLayout.of_ranks(CPU)
    if kind in ("fsdp", "hybrid"):
        shard(student, layout.sharing(1 if kind == "hybrid" else None))
    step = Student(student, DistillationLoss(alpha=0.9, temperature=temperature), vocab_size=VOCABULARY)
    return parallelize.parallelize(step, "fsdp" if kind == "hybrid" else kind, layout, accumulate)


def batch(number: int) -> Batch:
    """Make micro-batch `number` of a step, with a mask of its own."""
    g = torch.Generator().manual_seed(number)
    tokens = torch.randint(VOCABULARY, (2, SEQ_LEN + 1), generator=g)
    mask = torch.rand(2, SEQ_LEN, generator=g) < 0.2 + 0.1 * number
    logits = 3 * torch.randn(2 * SEQ_LEN, VOCABULARY, generator=g)
    targets = DenseTargets.from_logits(logits, tokens[:, 1:].flatten())
    return Batch(tokens, mask, torch.zeros(2, SEQ_LEN, dtype=torch.int64), targets)


def accumulate(wrapped: SingleProcess, numbers: range) -> None:
    """Accumulate the gradients of some micro-batches, exchanged with the last."""
    for number in numbers:
        with wrapped.micro_batch(last=number == numbers[-1]):
            wrapped(batch(number), 100.0).loss.backward()


def own() -> range:
    """Return the micro-batches of this rank."""
    return range(MICROS * dist.get_rank(), MICROS * (dist.get_rank() + 1))


def gradients(wrapped: SingleProcess) -> dict[str, torch.Tensor]:
    """Return whole gradients of the student by name."""
    return {name: whole(each.grad) for name, each in wrapped.model.named_parameters() if each.grad is not None}


def of_one_process() -> SingleProcess:
    """Train on all ranks' micro-batches in one step that is not wrapped."""
    alone = parallelized("single")
    for number in range(MICROS * dist.get_world_size()):
        alone(batch(number), 100.0).loss.backward()
    return alone


def near(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> bool:
    assert found.keys() == expected.keys()
    return all((found[name] - each).norm() <= 3e-6 * each.norm() + 1e-9 for name, each in expected.items())


class Counted(TorchDispatchMode):
    """A counter of the bytes of each exchange in the block, by collective.

    The larger of input and output counts, also in exchanges of PyTorch.
    """

    def __init__(self) -> None:
        super().__init__()
        self.calls: dict[str, list[int]] = defaultdict(list)

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if function.namespace == "c10d":
            tensors = [each for each in pytree.tree_leaves(args) if isinstance(each, torch.Tensor)]
            self.calls[function._schema.name.split("::")[1].strip("_")].append(max(each.nbytes for each in tensors))
        return function(*args, **(kwargs or {}))


def gradients_are_the_sum_over_ranks_and_travel_with_the_last_micro_batch() -> None:
    expected, size = gradients(of_one_process()), dist.get_world_size()
    shapes = [list(each.shape) for each in parallelized("single").model.parameters()]
    for kind in KINDS:
        wrapped = parallelized(kind)
        for _ in range(2):  # DDP orders its buckets in the second
            wrapped.module.zero_grad(set_to_none=True)
            with Counted() as early:
                for number in own()[:-1]:
                    with wrapped.micro_batch(last=False):
                        wrapped(batch(number), 100.0).loss.backward()
            # FSDP2 gathers weights for every micro-batch, and DDP broadcasts once the order of its buckets
            assert not early.calls.keys() & {"allreduce", "reduce_scatter_base"}, kind
            with Counted() as late, wrapped.micro_batch(last=True):
                wrapped(batch(own()[-1]), 100.0).loss.backward()
            assert near(gradients(wrapped), expected), kind
        if kind == "ddp":
            assert sum(late.calls["allreduce"]) == parallelize.ddp(shapes).all_reduce
        elif kind == "fsdp":
            layers = [[list(each.shape) for each in layer.parameters()] for layer in layers_of(wrapped.model)]
            inside = {id(each) for layer in layers_of(wrapped.model) for each in layer.parameters()}
            root = [list(each.shape) for each in wrapped.model.parameters() if id(each) not in inside]
            formula = parallelize.fsdp(layers, root, sharing=size, micro_batches=1, gathered=4)
            assert sum(late.calls["reduce_scatter_base"]) == formula.reduce_scatter
            assert sum(late.calls["allgather_base"]) == formula.all_gather
            assert len(late.calls["reduce_scatter_base"]) == len(layers) + 1
            assert late.calls["allreduce"] == []
        else:
            assert late.calls["allreduce"]


def gradients_added_up_in_shards_are_the_same_sum_and_copies_exchange_theirs_with_the_last_micro_batch() -> None:
    expected = gradients(of_one_process())
    groups = len(layers_of(parallelized("single").model)) + 1
    for kind in ("fsdp", "hybrid"):
        wrapped = parallelized(kind, "sharded")
        for _ in range(2):
            wrapped.module.zero_grad(set_to_none=True)
            with Counted() as early:
                for number in own()[:-1]:
                    with wrapped.micro_batch(last=False):
                        wrapped(batch(number), 100.0).loss.backward()
            assert "allreduce" not in early.calls
            if kind == "fsdp":  # copies of a model keep their partial sums elsewhere
                assert len(early.calls["reduce_scatter_base"]) == (MICROS - 1) * groups
                assert all(each.grad is not None for each in wrapped.model.parameters())
            with wrapped.micro_batch(last=True):
                wrapped(batch(own()[-1]), 100.0).loss.backward()
            assert near(gradients(wrapped), expected), kind


def a_call_past_the_wrapper_leaves_gradients_that_this_test_would_see() -> None:
    expected, wrapped = gradients(of_one_process()), parallelized("ddp")
    for number in own():
        wrapped.ddp.module(batch(number), 100.0).loss.backward()
    assert not near(gradients(wrapped), expected)


def norms_clipping_peaks_and_histograms_are_those_of_the_whole() -> None:
    alone = of_one_process()
    names = {name: each.grad.clone() for name, each in alone.model.named_parameters()}
    shown, highest = histograms(names), peaks(list(names.values()))
    norm = clip_norm_(list(alone.model.parameters()), 0.01)
    for kind in ("fsdp", "hybrid"):
        wrapped = parallelized(kind)
        accumulate(wrapped, own())
        parameters = dict(wrapped.model.named_parameters())
        assert torch.allclose(peaks([each.grad for each in parameters.values()]), highest, rtol=1e-5)
        found = histograms({name: each.grad for name, each in parameters.items()})
        assert {name: each.num for name, each in found.items()} == {name: each.num for name, each in shown.items()}
        for name, each in shown.items():
            assert abs(found[name].sum - each.sum) <= 1e-5 * each.sum_squares**0.5 + 1e-9
            assert abs(found[name].max - each.max) <= 1e-5 * abs(each.max)
        assert torch.allclose(clip_norm_(list(parameters.values()), 0.01), norm, rtol=1e-6)
        assert near(gradients(wrapped), gradients(alone))
    mesh = RankLayout.of_ranks(CPU).mesh
    one = distribute_tensor(torch.tensor([3.0]), mesh, [Shard(0)])  # ranks without an entry of it
    found = histograms({"one": one})["one"]
    assert (found.num, found.min, found.max) == (1, 3.0, 3.0)


def sums_and_norms_go_over_the_groups_of_the_layout_and_of_a_mesh_of_any_dimensions() -> None:
    size, rank = dist.get_world_size(), dist.get_rank()
    pair = dist.new_group([0, 1])
    if rank < 2:
        assert float(RankLayout(rank, 2, None, pair).sum(torch.tensor(1.0 + rank))) == 3.0
    numbers = torch.arange(1.0, 13.0).view(6, 2)
    for shape in ((size, 1), (1, size)):
        mesh = init_device_mesh("cpu", shape, mesh_dim_names=("shard", "tensor"))
        parts = [distribute_tensor(numbers, mesh, each) for each in ([Shard(0), Shard(0)], [Replicate(), Shard(0)])]
        for part in parts:
            assert torch.allclose(total_norm([part, torch.ones(3)]), (numbers.square().sum() + 3).sqrt()), part


def a_step_with_nan_on_one_rank_changes_no_bit_and_the_next_one_the_same_bits_on_all() -> None:
    for kind in KINDS:
        wrapped = parallelized(kind)
        optimizer = make_optimizer(wrapped.module, OptimizerConfig(lr=3e-4), temperature_lr=0.01)
        for broken in (False, True, False):
            before = [local(each.detach()).clone() for each in wrapped.model.parameters()]
            accumulate(wrapped, own())
            loss = torch.tensor(float("nan") if broken and dist.get_rank() == 1 else 1.0)
            optimizer.guarded_step(non_finite(loss))
            optimizer.zero_grad(set_to_none=True)
            after = [local(each.detach()) for each in wrapped.model.parameters()]
            assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True)) is broken, kind
        weights = torch.cat([whole(each.detach()).flatten() for each in wrapped.model.parameters()])
        parts = [torch.empty_like(weights) for _ in range(dist.get_world_size())]
        dist.all_gather(parts, weights)
        assert all(torch.equal(each, parts[0]) for each in parts), kind


def a_state_is_loaded_into_parts_bit_by_bit_under_the_same_names() -> None:
    def state(kind: str) -> TrainState:
        wrapped = parallelized(kind)
        optimizer = make_optimizer(wrapped.module, OptimizerConfig(lr=3e-4), temperature_lr=0.01)
        numbers = own() if kind != "single" else range(MICROS * dist.get_world_size())
        accumulate(wrapped, numbers)
        optimizer.step()
        return TrainState(wrapped.module, optimizer)

    one = state("single")
    for kind in KINDS:
        many = state(kind)
        assert list(many.tensors()) == list(one.tensors())
        assert any(isinstance(each, DTensor) for each in many.tensors().values()) == (kind != "ddp")
        many.load(one.tensors(), {**one.numbers(), "watchers": {}})
        for name, each in one.tensors().items():
            assert torch.equal(whole(many.tensors()[name]), each), (kind, name)
        comes_back_from_the_disk_in_parts(many)


def comes_back_from_the_disk_in_parts(state: TrainState) -> None:
    """Assert that each rank writes and reads its own parts of a checkpoint, and one process reads all of it."""
    folder = Path(on_main(tempfile.mkdtemp))
    tensors = state.tensors()
    shards.write(folder, tensors)
    in_parts = shards.read(folder, state.like)
    for name, each in tensors.items():
        assert isinstance(in_parts[name], DTensor) == isinstance(each, DTensor), name
        assert torch.equal(local(in_parts[name]), local(each)), name
    everything = shards.read(folder)
    assert all(torch.equal(everything[name], whole(each)) for name, each in tensors.items())
    all_gather_object(None)
    on_main(lambda: shutil.rmtree(folder))


def words_go_to_all_and_errors_are_raised_on_all() -> None:
    assert on_main(lambda: {"rank": dist.get_rank()}) == {"rank": 0}
    assert all_gather_object(["ü", dist.get_rank()]) == [["ü", rank] for rank in range(dist.get_world_size())]
    assert all_reduce_max(15 if dist.get_rank() == 1 else 0) == 15

    def refuse() -> None:
        raise UsageError("no such thing")

    for block, kind, says, words in (
        (lambda: on_main(refuse), UsageError, 0, "no such thing"),
        (in_block, RunError, 1, "rank 1 alone"),
    ):
        with pytest.raises(kind, match=words) as caught:
            block()
        assert getattr(caught.value, "reported", False) is (dist.get_rank() != says)


def in_block() -> None:
    """Fail on rank 1 alone in a block."""
    with raise_on_all_ranks():
        if dist.get_rank() == 1:
            raise RunError("rank 1 alone")


PROMISES = (
    words_go_to_all_and_errors_are_raised_on_all,
    gradients_are_the_sum_over_ranks_and_travel_with_the_last_micro_batch,
    gradients_added_up_in_shards_are_the_same_sum_and_copies_exchange_theirs_with_the_last_micro_batch,
    a_call_past_the_wrapper_leaves_gradients_that_this_test_would_see,
    norms_clipping_peaks_and_histograms_are_those_of_the_whole,
    sums_and_norms_go_over_the_groups_of_the_layout_and_of_a_mesh_of_any_dimensions,
    a_step_with_nan_on_one_rank_changes_no_bit_and_the_next_one_the_same_bits_on_all,
    a_state_is_loaded_into_parts_bit_by_bit_under_the_same_names,
)

if __name__ == "__main__":
    torch.set_num_threads(1)
    with process_group(CPU, 300):
        for promise in PROMISES:
            promise()
            if dist.get_rank() == 0:
                print(promise.__name__, flush=True)
