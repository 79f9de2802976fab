"""Ranks of which two compute a forward together: they train what one process trains. See wrap_script.py."""

import itertools
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from wrap_script import CPU, MICROS, Counted, batch, comes_back_from_the_disk_in_parts, gradients, near, whole

from kdtrain.config.sections import LoraConfig, OptimizerConfig
from kdtrain.models.adapters import restrict
from kdtrain.models.head import layers_of, split
from kdtrain.models.loading import checkpoint_activations
from kdtrain.models.spec import ModelSpec
from kdtrain.objective.loss import DistillationLoss
from kdtrain.parallel import parallelize as exchanges
from kdtrain.parallel import tensor
from kdtrain.parallel.layout import RankLayout
from kdtrain.parallel.parallelize import SingleProcess, parallelize, shard, sum_over_tensor_ranks, total_norm
from kdtrain.ranks import local, process_group
from kdtrain.teaching.local import LocalTeacher
from kdtrain.testing import SHAPES as CONFIGS
from kdtrain.testing import tiny_model
from kdtrain.training.optimizers import make_optimizer
from kdtrain.training.state import TrainState
from kdtrain.training.student import Student

VOCABULARY = 301
"""Which no two ranks divide: 151 and 150."""
SHAPES = {"llama": True, "qwen3": False, "phi": False, "qwen2": True}
"""And whether their head is tied."""
SHARED = {"qwen2": {"num_key_value_heads": 1}}
"""Heads of keys and values that are fewer than the tensor ranks."""
LAYOUT = RankLayout()
WAIT = 300
"""Seconds for which a rank waits for another; torch's own are 1800."""


LORA = LoraConfig(lora_rank=4, lora_dropout=0.3)


def parallelized(
    shape: str,
    kind: str,
    sequence: bool = True,
    tied: bool | None = None,
    lora: LoraConfig | None = None,
    **config: Any,
) -> SingleProcess:
    """Make a fresh student, alike on each rank, in one process (`single`) or over a data rank's tensor ranks.

    With adapters B is not 0, as it is in a fresh one, whose A has no gradient.
    """
    tied = SHAPES[shape] if tied is None else tied
    model = split(tiny_model(shape, VOCABULARY, seed=3, tie_word_embeddings=tied, **SHARED.get(shape, {}), **config))
    restrict(model, lora, False, seed=5)
    chance = torch.Generator().manual_seed(6)
    for each in (each for name, each in model.named_parameters() if "lora_B" in name):
        each.data.normal_(std=0.1, generator=chance)
    if kind != "single":
        tensor.apply(model, LAYOUT, CPU, vocab_size=VOCABULARY, sequence=sequence)
    if kind == "fsdp":
        shard(model, LAYOUT.mesh)
    student = Student(model, DistillationLoss(alpha=0.9, temperature=2.0), vocab_size=300)
    return parallelize(
        student, "single" if LAYOUT.data_size == 1 else kind, LAYOUT if kind != "single" else RankLayout()
    )


def kinds() -> tuple[str, ...]:
    """Return the ways in which data ranks can hold the parts."""
    return ("tensor",) if LAYOUT.data_size == 1 else ("ddp", "fsdp")


def accumulate(wrapped: SingleProcess) -> None:
    """Accumulate the gradients of a step: all micro-batches in one process, else those of this data rank."""
    first, many = LAYOUT.data_rank * MICROS, MICROS
    if wrapped.layout.tensor_size == 1:
        first, many = 0, MICROS * LAYOUT.data_size
    for number in range(first, first + many):
        torch.manual_seed(number)
        with wrapped.micro_batch(last=number == first + many - 1):
            wrapped(batch(number), 100.0).loss.backward()
    sum_over_tensor_ranks(wrapped.model, wrapped.layout)


def gradients_of_three_micro_batches_are_those_of_one_process() -> None:
    cases = [(shape, sequence, None) for shape in SHAPES for sequence in (True, False)] + [("qwen3", True, True)]
    for shape, sequence, tied in cases if LAYOUT.data_size == 1 else [*cases[1:3], *cases[-3:-1]]:
        alone = parallelized(shape, "single", tied=tied)
        accumulate(alone)
        for kind in kinds():
            wrapped = parallelized(shape, kind, sequence, tied)
            accumulate(wrapped)
            assert near(gradients(wrapped), gradients(alone)), (shape, kind, sequence, tied)
            norms = [total_norm([each.grad for each in one.model.parameters()]) for one in (wrapped, alone)]
            assert torch.allclose(*norms, rtol=1e-6), (shape, kind)


def adapters_of_parts_have_the_gradients_and_the_dropout_of_one_process() -> None:
    for shape, sequence in (("qwen2", True), ("phi", False)):
        alone = parallelized(shape, "single", lora=LORA)
        accumulate(alone)
        for kind in kinds():
            wrapped = parallelized(shape, kind, sequence, lora=LORA)
            held = [sum(local(each).numel() for each in one.model.parameters()) for one in (wrapped, alone)]
            assert held[0] < 0.6 * held[1]
            accumulate(wrapped)
            assert near(gradients(wrapped), gradients(alone)), (shape, kind)
            norms = [
                total_norm([each.grad for each in one.model.parameters() if each.grad is not None])
                for one in (wrapped, alone)
            ]
            assert torch.allclose(*norms, rtol=1e-6), (shape, kind)


def a_hook_that_sums_in_each_backward_is_what_this_test_would_see() -> None:
    alone, wrapped = parallelized("qwen3", "single"), parallelized("qwen3", kinds()[0], sequence=False)
    group = LAYOUT.tensor_mesh.get_group()
    for name, each in wrapped.model.named_parameters():
        if name.endswith("q_norm.weight"):
            each.register_post_accumulate_grad_hook(lambda each: dist.all_reduce(each.grad, group=group))
            wrapped.model.once[name] = False
    accumulate(alone)
    accumulate(wrapped)
    assert not near(gradients(wrapped), gradients(alone))


def after_steps_whole_weights_have_the_same_bits_and_a_state_loads_into_any_layout() -> None:
    def state(kind: str, lora: LoraConfig | None) -> TrainState:
        wrapped = parallelized("qwen3", kind, lora=lora)
        optimizer = make_optimizer(wrapped.module, OptimizerConfig(lr=3e-4), temperature_lr=0.01)
        for _ in range(3):
            accumulate(wrapped)
            optimizer.guarded_step(torch.tensor(0.0))
            optimizer.zero_grad()
        return TrainState(wrapped.module, optimizer)

    for kind, lora in [(kind, lora) for kind in kinds() for lora in (None, LORA)]:
        one, many = state("single", lora), state(kind, lora)
        for name, each in many.student.model.named_parameters():
            if name in many.student.model.once:
                bits = [torch.empty_like(local(each.detach())) for _ in range(2)]
                dist.all_gather(bits, local(each.detach()), group=LAYOUT.tensor_mesh.get_group())
                assert torch.equal(*bits), name
        for name, each in one.tensors().items():
            found = whole(many.tensors()[name])
            assert (found - each).norm() <= 1e-4 * each.norm() + 1e-9, (kind, name)
        many.load(one.tensors(), {**one.numbers(), "watchers": {}})
        assert all(torch.equal(whole(many.tensors()[name]), each) for name, each in one.tensors().items())
        comes_back_from_the_disk_in_parts(many)


def each_rank_holds_its_part_alone_and_validates_as_one_process() -> None:
    alone, wrapped = parallelized("llama", "single"), parallelized("llama", "tensor")
    held = sum(local(each).untyped_storage().nbytes() for each in wrapped.model.parameters())
    assert held < 0.53 * sum(each.nbytes for each in alone.model.parameters())
    assert all(isinstance(each, DTensor) for name, each in wrapped.model.named_parameters() if "norm" not in name)
    tokens = batch(0).tokens[:, :-1]
    with torch.no_grad():
        found, expected = (each.module.eval().model.logits(tokens) for each in (wrapped, alone))
    assert torch.allclose(found, expected, atol=1e-5)


def tensor_ranks_of_a_teacher_give_each_rank_the_logits_of_its_own_sequences() -> None:
    chance = torch.Generator().manual_seed(dist.get_rank())
    tokens = torch.randint(VOCABULARY, (dist.get_rank() + 1, 12), generator=chance)
    segments = (torch.arange(12) > 4).long().expand_as(tokens)
    for dtype, mode, bound in (("float32", "fp32", 1e-5), ("bfloat16", "bf16", 0.1)):
        config = CONFIGS["qwen3"] | {"vocab_size": VOCABULARY}
        spec = ModelSpec(name="t", config=config, init="scratch", dtype=dtype)
        whole, cut = (LocalTeacher(spec, CPU, mode) for _ in range(2))
        cut.cut(LAYOUT, alike=1)
        for each in (whole, cut):
            each.load()
            each.prepare(mesh=LAYOUT.mesh if each is cut and LAYOUT.data_size > 1 else None)
        assert whole.digest == cut.digest and cut.sharded
        held = [sum(local(each).numel() for each in one.model.parameters()) for one in (cut, whole)]
        assert held[0] < 0.6 * held[1]
        for given in (None, segments):
            expected, found = (each.hidden_states(tokens, given, (1, 2)) for each in (whole, cut))
            for a, b in zip((expected[0], *expected[1]), (found[0], *found[1]), strict=True):
                assert (a - b).norm() <= bound * a.norm(), (mode, given)
            logits = [each.logits(tokens, given) for each in (whole, cut)]
            assert logits[1].shape == (*tokens.shape, VOCABULARY)
            assert (logits[0] - logits[1]).norm() <= bound * logits[0].norm()


class Exchanged(Counted):
    """Also what DTensors exchange."""

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        found, name = super().__torch_dispatch__(function, types, args, kwargs), function._schema.name.split("::")[1]
        if function.namespace == "_c10d_functional" and name in ("all_reduce", *SIZES):
            self.calls[name].append(max(each.nbytes for each in (args[0], found)))
        return found


SIZES = {"all_gather_into_tensor": "all_gather", "reduce_scatter_tensor": "reduce_scatter"}


def a_step_exchanges_the_bytes_of_the_formula() -> None:
    tokens, micros = batch(0).tokens[:, 1:].numel(), 2
    for kind, shape, sequence, mode, again in [
        (kind, shape, sequence, mode, again)
        for kind in kinds()
        for shape in ("qwen3", *SHARED)
        for sequence in (True, False)
        for mode, again in (("fp32", False), ("bf16", True))
        if LAYOUT.data_size == 1 or (sequence and again)
    ]:
        wrapped = parallelized(shape, kind, sequence)
        model, wrapped.module.mode = wrapped.model, mode
        if again:
            checkpoint_activations(model.model)
        with Exchanged() as counted:
            for number in range(micros):
                with wrapped.micro_batch(last=number == micros - 1):
                    wrapped(batch(number), 100.0).loss.backward()
            sum_over_tensor_ranks(model, LAYOUT)
        how = {"micro_batches": micros, "sequence": sequence, "itemsize": 4 if mode == "fp32" else 2}
        found = tensor.traffic(model, tokens, recomputes=again, **how)
        for name, each in SIZES.items():
            expected = sum(getattr(part, each) for part, _ in found)
            assert sum(counted.calls[name]) == expected, (kind, shape, sequence, mode, name)
        if LAYOUT.tensor_rank > 0:
            continue  # it has fewer rows of an odd vocabulary than the first, whom the formula is of
        summed = sum(counted.calls["all_reduce"]) + sum(counted.calls["allreduce"])
        layers = [[exchanges.part_shape(each) for each in layer.parameters()] for layer in layers_of(model)]
        inside = {id(each) for layer in layers_of(model) for each in layer.parameters()}
        root = [exchanges.part_shape(each) for each in model.parameters() if id(each) not in inside]
        if kind == "ddp":
            summed -= exchanges.ddp([*root, *itertools.chain(*layers)]).all_reduce
        elif kind == "fsdp":
            parts = exchanges.fsdp(layers, root, sharing=2, micro_batches=micros, gathered=4)
            assert sum(counted.calls["allgather_base"]) == parts.all_gather
            assert sum(counted.calls["reduce_scatter_base"]) == parts.reduce_scatter
        # with a few sums of the objective for each token
        assert 0 <= summed - found[0][0].all_reduce <= 4 * 16 * micros * tokens, (kind, shape, sequence, mode)


class Drops(TorchDispatchMode):
    """Collects what dropout keeps."""

    def __init__(self) -> None:
        super().__init__()
        self.kept: list[torch.Tensor] = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        found = function(*args, **(kwargs or {}))
        if torch.Tag.nondeterministic_seeded in function.tags:
            self.kept.append((found[1] if isinstance(found, tuple) else found) != 0)
        return found


DROPPING = {
    "phi": {"resid_pdrop": 0.5, "embd_pdrop": 0.5, "attention_dropout": 0.5},
    "llama": {  # which drops what leaves a block before the block ends
        **{"model_type": "starcoder2", "num_key_value_heads": 4},
        **{"residual_dropout": 0.5, "embedding_dropout": 0.5, "attention_dropout": 0.5},
    },
}


def dropping() -> list[tuple[str, Any, bool]]:
    """Return the students with dropout, and whether their streams are cut; beside other data ranks the first alone."""
    cases = [(shape, config, sequence) for shape, config in DROPPING.items() for sequence in (True, False)]
    return cases if LAYOUT.data_size == 1 else cases[:1]


def dropout_keeps_the_same_of_a_whole_stream_and_others_in_each_part() -> None:
    tokens = torch.randint(VOCABULARY, (4, 32), generator=torch.Generator().manual_seed(1))
    for shape, config, sequence in dropping():
        model = parallelized(shape, "tensor", sequence, **config).model
        torch.manual_seed(LAYOUT.data_rank)
        with Drops() as drops:
            hidden = model.train()(tokens).detach()
        every: list[Any] = [None, None]
        own = ([each for each in drops.kept if each.ndim > 1], hidden)
        dist.all_gather_object(every, own, group=LAYOUT.tensor_mesh.get_group())
        assert torch.equal(every[0][1], every[1][1]) and not torch.equal(hidden, model.eval()(tokens)), shape
        alike = [torch.equal(one, other) for one, other in zip(every[0][0], every[1][0], strict=True)]
        # the embedding's, and in each of two layers those of the heads and of what two blocks add
        parts = [each.ndim == 4 or each.shape[1] < 32 for each in own[0]]
        assert sum(parts) == (6 if sequence else 2) and alike == [not each for each in parts], (shape, sequence)
        for one, other in zip(every[0][0], every[1][0], strict=True):
            together = torch.stack([one.flatten(), other.flatten()]).double()
            if not torch.equal(one, other):
                assert abs(torch.corrcoef(together)[0, 1]) < 4 / one.numel() ** 0.5, (shape, sequence, one.shape)


def recomputed_layers_drop_what_they_dropped() -> None:
    for shape, config, sequence in dropping():
        found = []
        for again in (False, True):
            wrapped = parallelized(shape, kinds()[-1], sequence, **config)
            if again:
                checkpoint_activations(wrapped.model.model)
            torch.manual_seed(LAYOUT.data_rank)
            accumulate(wrapped)
            found.append([local(each.grad) for each in wrapped.model.parameters()])
        assert all(map(torch.equal, *found)), (shape, sequence)


def every_group_waits_for_a_rank_as_long_as_all_ranks_do() -> None:
    meshes = LAYOUT.mesh, LAYOUT.tensor_mesh, RankLayout.of_ranks(CPU).sharing(2), RankLayout.of_ranks(CPU, 2, 1).mesh
    groups = [LAYOUT.data_group, *(group for mesh in meshes for group in mesh.get_all_groups())]
    assert {group._get_backend(CPU).options._timeout.seconds for group in groups} == {WAIT}


PROMISES = (
    every_group_waits_for_a_rank_as_long_as_all_ranks_do,
    dropout_keeps_the_same_of_a_whole_stream_and_others_in_each_part,
    recomputed_layers_drop_what_they_dropped,
    a_step_exchanges_the_bytes_of_the_formula,
    tensor_ranks_of_a_teacher_give_each_rank_the_logits_of_its_own_sequences,
    gradients_of_three_micro_batches_are_those_of_one_process,
    adapters_of_parts_have_the_gradients_and_the_dropout_of_one_process,
    a_hook_that_sums_in_each_backward_is_what_this_test_would_see,
    after_steps_whole_weights_have_the_same_bits_and_a_state_loads_into_any_layout,
    each_rank_holds_its_part_alone_and_validates_as_one_process,
)

if __name__ == "__main__":
    torch.set_num_threads(1)
    with process_group(CPU, WAIT):
        LAYOUT = RankLayout.of_ranks(CPU, tensor=2)
        for promise in PROMISES:
            promise()
            if dist.get_rank() == 0:
                print(promise.__name__, flush=True)
