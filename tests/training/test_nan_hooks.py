"""NaN hooks: the first non-finite tensor is named, and the checks leave no trace."""

import json
import math
from contextlib import contextmanager

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from kdtrain.cache.format.codec import decode, encode
from kdtrain.cache.format.spec import CodecSpec
from kdtrain.data import order
from kdtrain.models.head import split
from kdtrain.models.loading import checkpoint_activations
from kdtrain.objective.batch import Batch
from kdtrain.objective.loss import DistillationLoss
from kdtrain.testing import tiny_model
from kdtrain.training.nan_hooks import Finding, NanHooks, find_first, write_bundle
from kdtrain.training.student import Student

NORMALIZER = 32.0
ROWS = np.arange(4)


def look(run, source=None, micro=2):
    batches = [(source or run.stepper.source).read(rows) for rows in np.split(ROWS, len(ROWS) // micro)]
    return find_first(run.student, batches, NORMALIZER)


def module(run, name):
    return run.student.model.model.get_submodule(name)


class Poison(torch.autograd.Function):
    """The identity forward; a NaN in the first entry backward."""

    @staticmethod
    def forward(ctx, tensor):
        return tensor.clone()

    @staticmethod
    def backward(ctx, gradient):
        gradient = gradient.clone()
        gradient.view(-1)[0] = math.nan
        return gradient


@contextmanager
def replaced(owner, forward):
    """Replace `owner.forward` inside the block by `forward(own forward, arguments)`."""
    own = owner.forward
    owner.forward = lambda *arguments, **named: forward(own, *arguments, **named)
    try:
        yield
    finally:
        del owner.forward


def spoiled(value, call=1, place=0):
    """Make a forward whose output holds `value` at one place, from the given call on."""
    calls = []

    def forward(own, *arguments, **named):
        calls.append(1)
        output = own(*arguments, **named)
        if len(calls) < call:
            return output
        factors = torch.ones_like(output)
        factors.view(-1)[place] = value
        return output * factors

    return forward


def test_a_step_that_is_fine_has_no_finding(workshop):
    with workshop.run() as run:
        assert look(run) is None


@pytest.mark.parametrize("value", [math.nan, math.inf])
@pytest.mark.parametrize("name", ["model.layers.0.mlp.down_proj", "model.layers.1.self_attn.q_proj", "model.norm"])
def test_the_module_whose_output_goes_bad_is_named_with_place_and_micro_batch(workshop, name, value):
    with workshop.run() as run, replaced(module(run, name), spoiled(value, call=2, place=3)):
        found = look(run)
    assert (found.module, found.tensor, found.direction, found.micro_batch) == (name, "its output", "forward", 2)
    assert (found.bad, found.place) == (1, (0, 0, 3))
    assert found.shape[:2] == (2, 8)


def test_a_tensor_that_goes_bad_between_two_modules_is_the_input_of_the_second(workshop):
    def huge(own, **named):
        output, weights = own(**named)
        return output + 3e38, weights

    with workshop.run() as run:
        first, attention = module(run, "model.layers.0"), module(run, "model.layers.1.self_attn")
        with replaced(first, lambda own, hidden, **named: own(hidden, **named) + 3e38), replaced(attention, huge):
            found = look(run)
    # layer 0 and the attention of layer 1 are finite, and their sum is not
    assert (found.module, found.tensor) == ("model.layers.1.post_attention_layernorm", "its input")


@pytest.mark.parametrize("name", ["model.layers.1.mlp.up_proj", "model.embed_tokens"])
def test_a_bad_weight_is_named_before_what_it_makes_bad(workshop, name):
    with workshop.run() as run:
        with torch.no_grad():
            module(run, name).weight[5, 7] = math.nan
        found = look(run)
    assert (found.module, found.tensor, found.place, found.bad) == (name, "weight", (5, 7), 1)


def test_of_ranks_in_step_the_one_with_the_bad_weight_is_before_those_that_its_sum_reaches(workshop):
    name = "model.layers.1.mlp.down_proj"
    with workshop.run() as run, replaced(module(run, name), spoiled(math.nan)):
        reached = look(run)
    with workshop.run() as run, torch.no_grad():
        module(run, name).weight[1, 1] = math.nan
        own = look(run)
    assert (own.module, own.tensor, reached.module, reached.tensor) == (name, "weight", name, "its output")
    assert own.when < reached.when


def test_a_bad_row_of_the_teacher_is_named_and_a_masked_one_is_not(workshop):
    source = workshop.source(10, broken=(3,))
    with workshop.run(train=source) as run:
        found = look(run)
        assert (found.module, found.tensor, found.micro_batch) == ("teacher", "logprobs", 2)
        first = int(source.loss_mask[3].int().argmax())
        assert found.place == (8 + first, 0)  # the second sequence of the micro-batch, of 8 tokens each
        source.loss_mask[3] = False
        assert look(run) is None
        source.logits[:3, :, 5] = -math.inf  # a token that the teacher calls impossible is sound
        assert look(run) is None


def test_a_non_finite_learned_temperature_is_named(workshop):
    with workshop.run(temperature_mode="likelihood") as run:
        with torch.no_grad():
            run.student.temperature.theta.fill_(math.nan)
        found = look(run)
    assert (found.module, found.tensor) == ("temperature", "theta")


@pytest.mark.parametrize("name", ["model.layers.0.mlp.down_proj", "model.layers.1.self_attn.v_proj"])
def test_a_gradient_that_goes_bad_inside_a_module_is_named(workshop, name):
    with workshop.run() as run, replaced(module(run, name), lambda own, x: own(Poison.apply(x))):
        found = look(run)
    assert (found.module, found.tensor, found.direction) == (name, "the gradient of its input", "backward")
    assert (found.bad, found.micro_batch) == (1, 1)


def test_a_gradient_that_goes_bad_between_two_modules_is_that_of_the_firsts_output(workshop):
    with workshop.run() as run, replaced(run.student.model, lambda own, *arguments: Poison.apply(own(*arguments))):
        found = look(run)
    assert (found.module, found.tensor) == ("model.norm", "the gradient of its output")


def test_a_weight_whose_gradient_alone_goes_bad_is_named(workshop):
    class Weighted(nn.Module):
        def __init__(self, linear):
            super().__init__()
            self.linear = linear

        def forward(self, hidden):
            return nn.functional.linear(hidden, Poison.apply(self.linear.weight))

    with workshop.run() as run:
        mlp = module(run, "model.layers.0.mlp")
        mlp.down_proj = Weighted(mlp.down_proj)
        found = look(run)
    assert (found.module, found.tensor) == ("model.layers.0.mlp.down_proj.linear", "the gradient of weight")


def test_a_norm_that_overflows_over_finite_gradients_is_a_finding(workshop):
    with workshop.run() as run:
        name = "model.norm"
        with replaced(module(run, name), lambda own, x: own(x) + 0.0):
            module(run, name).weight.register_hook(lambda gradient: torch.full_like(gradient, 1e30))
            found = look(run)
    assert (found.module, found.direction) == (name, "backward")
    assert "norm of all gradients" in found.tensor


def step_of(shape, **changes):
    student = split(tiny_model(shape, 300, seed=1))
    return Student(student, DistillationLoss(temperature=2.0), vocab_size=300, **changes)


@pytest.mark.parametrize(
    "shape, more",
    [
        *((shape, {"document_mask": True}) for shape in ("gpt2", "qwen3", "gemma2", "granite")),
        *(("bloom", {}), ("falcon_h1", {}), ("llama", {"mode": "bf16"})),
    ],
)
def test_hooks_work_on_models_of_every_kind(workshop, shape, more):
    step = step_of(shape, **more)
    batch = workshop.source(4).read(ROWS)
    assert find_first(step, [batch], NORMALIZER) is None
    linear = next(each for each in reversed(list(step.model.model.base_model.modules())) if hasattr(each, "weight"))
    with torch.no_grad():
        linear.weight.view(-1)[0] = math.nan
    assert find_first(step, [batch], NORMALIZER).tensor == "weight"


def test_a_loss_that_goes_bad_on_finite_tensors_is_the_objectives(workshop):
    step = step_of("qwen3")
    with torch.no_grad():
        step.model.head.weight.mul_(1e30)
        step.model.model.model.norm.weight.fill_(1e20)
    found = find_first(step, [workshop.source(4).read(ROWS)], NORMALIZER)
    assert (found.module, found.tensor, found.direction) == ("objective", "the sum cross_entropy", "forward")


def test_hooks_work_on_recomputed_layers(workshop):
    step = step_of("llama")
    checkpoint_activations(step.model.model)
    batch = workshop.source(4).read(ROWS)
    assert find_first(step, [batch], NORMALIZER) is None
    name = "model.layers.0.mlp.down_proj"
    with replaced(step.model.model.get_submodule(name), lambda own, x: own(Poison.apply(x))):
        found = find_first(step, [batch], NORMALIZER)
    assert (found.module, found.tensor) == (name, "the gradient of its input")


@pytest.mark.parametrize("field", ["logprobs", "tail", "label_logprob"])
def test_a_bad_number_of_a_cached_teacher_is_named(field):
    tokens = torch.randint(0, 300, (2, 9), generator=torch.Generator().manual_seed(0))
    spec = CodecSpec(kind="sparse", vocab_size=300, top_k=6)
    labels_N = tokens[:, 1:].flatten()
    logits = torch.randn(16, 300, generator=torch.Generator().manual_seed(1))
    arrays = {key: values.reshape(2, 8, *values.shape[1:]) for key, values in encode(logits, labels_N, spec).items()}
    targets = decode(arrays, spec)
    getattr(targets, field).view(16, -1)[11, -1] = math.nan
    batch = Batch(tokens, torch.ones(2, 8, dtype=torch.bool), torch.zeros(2, 8, dtype=torch.int64), targets)
    found = find_first(step_of("llama"), [batch], NORMALIZER)
    assert (found.module, found.tensor, found.place[0]) == ("teacher", field, 11)


def test_a_compiled_graph_is_left_as_it_was(workshop):
    step = step_of("llama")
    step.backbone = torch.compile(step._backbone, backend="eager", dynamic=False)
    batch = workshop.source(4).read(ROWS)
    name = "model.layers.0.self_attn.v_proj"
    before = step(batch, NORMALIZER).loss
    before.backward()
    compiled = step.backbone
    weight = step.model.model.get_submodule(name).weight
    sound = weight.detach().clone()
    with torch.no_grad():
        weight.fill_(3e38)  # finite, and what it makes is not: only a hook sees where
    found = find_first(step, [batch], NORMALIZER)
    assert (found.module, found.tensor) == (name, "its output")
    with torch.no_grad():
        weight.copy_(sound)
    assert step.backbone is compiled
    with torch.compiler.set_stance("fail_on_recompile"):
        step(batch, NORMALIZER).loss.backward()


def test_running_out_of_memory_is_a_finding_and_not_an_error(workshop):
    def full(own, *arguments):
        raise torch.OutOfMemoryError("CUDA out of memory")

    with workshop.run() as run:
        with replaced(run.student.model, full):
            assert str(look(run)).startswith("out of memory in micro-batch 1")
        assert look(run) is None


def test_hooks_that_stay_on_see_each_step_by_itself(workshop):
    with workshop.run() as run:
        hooks = NanHooks(run.student)
        batch = run.stepper.source.read(ROWS)

        def step():
            for _ in range(2):
                run.student(batch, NORMALIZER).loss.backward()

        step()
        assert hooks.take() is None
        with replaced(module(run, "model.norm"), spoiled(math.nan, call=2)):
            step()
        found = hooks.take()
        assert (found.module, found.micro_batch) == ("model.norm", 2)
        run.student.zero_grad()
        step()
        assert hooks.take() is None
        hooks.remove()
        with replaced(module(run, "model.norm"), spoiled(math.nan)):
            step()
        assert hooks.take() is None


def test_looking_leaves_no_trace(workshop):
    learned = {"temperature_mode": "adversarial"}
    with workshop.run(**learned) as run, workshop.run("whole", **learned) as whole:
        before = {name: tensor.clone() for name, tensor in run.student.state_dict().items()}
        hooks = [len(each._forward_hooks) + len(each._forward_pre_hooks) for each in run.student.modules()]
        look(run)
        assert all(torch.equal(tensor, before[name]) for name, tensor in run.student.state_dict().items())
        assert [parameter for parameter in run.student.parameters() if parameter.grad is not None] == []
        assert [len(each._forward_hooks) + len(each._forward_pre_hooks) for each in run.student.modules()] == hooks
        batch = run.stepper.source.read(ROWS)
        for each in (run, whole):
            each.student(batch, NORMALIZER).loss.backward()
        for ours, theirs in zip(run.student.parameters(), whole.student.parameters(), strict=True):
            assert torch.equal(ours.grad, theirs.grad)


def test_a_finding_is_one_line_that_says_what_where_and_how_much():
    found = Finding("model.layers.3.mlp", "its output", "forward", (2, 8, 32), 3, (1, 0, 7), 2)
    assert str(found) == (
        "model.layers.3.mlp: its output is the first non-finite tensor "
        "(forward of micro-batch 2, 3 of 512 entries, shape [2, 8, 32], the first at [1, 0, 7])"
    )


def test_the_bundle_holds_the_batch_the_finding_and_the_options(workshop, tmp_path):
    source = workshop.source(10, broken=(3,))
    with workshop.run(train=source, micro_batch_size=2) as run:
        batches = [source.read(rows) for rows in np.split(ROWS, 2)]
        found = find_first(run.student, batches, NORMALIZER)
        write_bundle(tmp_path / "bundle", run.config, ROWS, batches, found)
    tensors = load_file(tmp_path / "bundle" / "batch.safetensors")
    assert torch.equal(tensors["tokens"], source.tokens[:4])
    assert torch.equal(tensors["loss_mask"], source.loss_mask[:4])
    assert (tensors["segments"].shape, tensors["sequences"].tolist()) == ((4, 8), [0, 1, 2, 3])
    about = json.loads((tmp_path / "bundle" / "finding.json").read_text())
    assert (about["finding"]["module"], about["finding"]["micro_batch"]) == ("teacher", 2)
    assert about["finding"]["text"] == str(found)
    assert about["options"]["run"]["micro_batch_size"] == 2
    assert about["versions"]["torch"].startswith(torch.__version__.split("+")[0])


def test_a_batch_that_cannot_be_read_again_is_kept_until_its_step_was_investigated(workshop):
    class Once(workshop.source):
        repeatable = False

    source = Once(40, broken=(order.batch(0, 4, 4, 40).tolist()[3],))
    with workshop.run(train=source, micro_batch_size=2, steps=3) as run:
        run.fit()
    indices = [index for each in source.reads for index in each]
    assert len(indices) == len(set(indices)) == 4 * (3 + 1), "nothing is read twice"
    tensors = load_file(run.config.out / "non-finite-00000002" / "batch.safetensors")
    assert torch.equal(tensors["tokens"], source.tokens[indices[4:8]])
    about = json.loads((run.config.out / "non-finite-00000002" / "finding.json").read_text())
    assert (about["finding"]["module"], about["finding"]["micro_batch"]) == ("teacher", 2)
