"""Frozen weights in fewer bits: what a packed layer computes, what it keeps, and what is refused."""

import copy
import sys
from dataclasses import replace

import pytest
import torch
from torch import nn

from kdtrain.config.sections import LoraConfig
from kdtrain.errors import UsageError
from kdtrain.models import frozen
from kdtrain.models.adapters import frozen_digest, frozen_names, merged_state, restrict
from kdtrain.models.frozen import PackedLinear, frozen_bytes, pack, whole_size
from kdtrain.models.head import SplitModel, split
from kdtrain.models.spec import ModelSpec
from kdtrain.objective.batch import Batch
from kdtrain.objective.loss import DistillationLoss
from kdtrain.parallel.footprint import model_footprint
from kdtrain.testing import SHAPES, tiny_model
from kdtrain.training.student import Student

CPU = torch.device("cpu")
KINDS = ["bf16", "int8", "nf4"]


def ready(kind: str) -> None:
    pytest.importorskip({"bf16": "torch", "int8": "torchao", "nf4": "bitsandbytes"}[kind])


def student_of(shape: str, kind: str | None) -> SplitModel:
    """Make a student with adapters that change its output, and pack its frozen weights."""
    pytest.importorskip("peft")
    student = split(tiny_model(shape, 300, seed=3))
    restrict(student, LoraConfig(lora_rank=4), freeze_head=False, seed=0)
    generator = torch.Generator().manual_seed(1)
    for parameter in student.parameters():
        if parameter.requires_grad:
            parameter.data += 0.03 * torch.randn(parameter.shape, generator=generator)
    if kind is not None:
        pack(student.model, kind, fused=student.fused, device=CPU)
        student.frozen = frozen_names(student)
    return student


def unpacked(packed: SplitModel, shape: str) -> SplitModel:
    """Make the same student with ordinary layers, of the numbers that the packed one holds."""
    whole = student_of(shape, None)
    for name, each in packed.named_modules():
        if isinstance(each, PackedLinear):
            whole.get_submodule(name).weight.data = each.weight.clone().contiguous()
        elif isinstance(each, nn.Embedding | nn.Linear) and each.weight.dtype == torch.bfloat16:
            whole.get_submodule(name).weight.data = each.weight.float()
    return whole


def loss_and_gradients(student: SplitModel) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    tokens = torch.randint(0, 300, (2, 17), generator=torch.Generator().manual_seed(5))
    batch = Batch(tokens, torch.ones(2, 16, dtype=torch.bool), torch.zeros(2, 16, dtype=torch.int64), None)
    loss = Student(student, DistillationLoss(alpha=0.0))(batch).loss
    loss.backward()
    return loss.detach(), {name: each.grad for name, each in student.named_parameters() if each.requires_grad}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("shape", ["llama", "gpt2", "phi", "qwen3"])
def test_a_packed_student_computes_what_its_unpacked_weights_do_and_so_do_its_gradients(shape, kind):
    ready(kind)
    packed = student_of(shape, kind)
    loss, gradients = loss_and_gradients(packed)
    whole, expected = loss_and_gradients(unpacked(packed, shape))
    torch.testing.assert_close(loss, whole, rtol=1e-5, atol=1e-6)
    assert gradients.keys() == expected.keys()
    for name, each in expected.items():
        torch.testing.assert_close(gradients[name], each, rtol=1e-3, atol=1e-6)
    assert {each.dtype for each in gradients.values()} == {torch.float32}
    other, _ = loss_and_gradients(student_of(shape, None))
    assert 0 < abs(float(loss - other)) < 0.1  # it is another model, and a near one


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [None, torch.bfloat16, torch.float16])
def test_a_packed_layer_multiplies_in_the_format_of_autocast_and_passes_gradients_on(kind, dtype):
    ready(kind)
    torch.manual_seed(0)
    layer = nn.Linear(64, 48).requires_grad_(False)
    packed = PackedLinear(layer, kind, CPU)
    exact = nn.functional.linear(x := torch.randn(3, 5, 64, requires_grad=True), packed.weight, layer.bias)
    with torch.autocast("cpu", dtype or torch.bfloat16, enabled=dtype is not None):
        y = packed(x)
    assert y.dtype == (dtype or torch.float32)
    tolerance = {"rtol": 3e-2, "atol": 3e-2} if dtype else {"rtol": 1e-5, "atol": 1e-5}
    torch.testing.assert_close(y.float(), exact, **tolerance)
    g = torch.randn_like(exact)
    (found,) = torch.autograd.grad(y, x, g.to(y.dtype))
    torch.testing.assert_close(found, torch.autograd.grad(exact, x, g)[0], **tolerance)


def test_int8_weights_are_those_of_an_int8_export():
    quantization = pytest.importorskip("torchao.quantization")
    layer = nn.Linear(64, 48, bias=False).requires_grad_(False)
    packed, exported = PackedLinear(layer, "int8", CPU), copy.deepcopy(layer)
    quantization.quantize_(exported, quantization.Int8WeightOnlyConfig(version=2))
    assert torch.equal(packed.packed, exported.weight.qdata)
    x = torch.randn(7, 64)
    torch.testing.assert_close(packed(x), exported(x), rtol=1e-6, atol=1e-6)
    assert (packed.weight - layer.weight).abs().max() <= layer.weight.abs().max() / 254 * 1.01


def test_packing_changes_no_setting_of_the_compiler():
    pytest.importorskip("torchao")
    from torch._inductor import config

    before = config.get_config_copy()
    PackedLinear(nn.Linear(16, 16).requires_grad_(False), "int8", CPU)
    assert config.get_config_copy() == before


@pytest.mark.parametrize("kind", KINDS)
def test_autograd_keeps_no_unpacked_weight_and_no_input(kind):
    ready(kind)
    packed = PackedLinear(nn.Linear(64, 64).requires_grad_(False), kind, CPU)
    own = {each.untyped_storage().data_ptr() for each in packed.buffers()}
    kept = []

    def keep(tensor):
        kept.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        packed(torch.randn(8, 64, requires_grad=True))
    assert kept and {each.untyped_storage().data_ptr() for each in kept} <= own


@pytest.mark.parametrize("kind", KINDS)
def test_a_compiled_packed_layer_is_one_graph_and_equals_the_eager_one(kind):
    ready(kind)
    packed = PackedLinear(nn.Linear(64, 32).requires_grad_(False), kind, CPU)
    compiled = torch.compile(packed, fullgraph=True, backend="aot_eager")
    x, y = (torch.randn(8, 64, generator=torch.Generator().manual_seed(2)).requires_grad_() for _ in range(2))
    one, other = packed(x), compiled(y)
    torch.testing.assert_close(other, one, rtol=1e-5, atol=1e-6)
    one.sum().backward()
    other.sum().backward()
    torch.testing.assert_close(y.grad, x.grad, rtol=1e-5, atol=1e-6)


def test_the_digest_is_that_of_the_full_weights_and_nothing_packed_is_trained_or_saved():
    pytest.importorskip("torchao")
    whole, packed = student_of("qwen3", None), student_of("qwen3", "int8")
    assert packed.base == whole.base == frozen_digest(whole, whole.frozen)
    assert packed.frozen == frozen_names(packed)
    saved = {name for name in packed.state_dict() if name not in packed.frozen}
    assert saved == {name for name in whole.state_dict() if name not in whole.frozen} != set()
    assert whole_size(packed) == whole_size(whole)


@pytest.mark.parametrize("shape", ["llama", "qwen3"])
def test_head_and_embedding_are_bf16_tied_as_before_and_the_residual_stream_stays_fp32(shape):
    packed = student_of(shape, "bf16")
    embedding, head = packed.model.get_input_embeddings(), packed.model.get_output_embeddings()
    assert embedding.weight.dtype == head.weight.dtype == torch.bfloat16
    assert (embedding.weight is head.weight) == SHAPES[shape]["tie_word_embeddings"]
    assert embedding(torch.arange(3)).dtype == torch.float32


def test_packed_weights_are_never_merged():
    student = student_of("llama", "bf16")
    with pytest.raises(AssertionError, match="packed weights are not merged"):
        merged_state(student.model)


@pytest.mark.parametrize("kind", ["bf16", "int8"])
@pytest.mark.parametrize("shape", ["llama", "gpt2"])
def test_the_plan_counts_the_bytes_that_packed_weights_take(shape, kind):
    ready(kind)
    spec = ModelSpec(name=shape, config=SHAPES[shape], init="scratch", lora=LoraConfig(lora_rank=4))
    how = {"vocab_size": 300, "seq_len": 16, "mode": "bf16", "trained": True}
    found, whole = model_footprint(replace(spec, weights=kind), **how), model_footprint(spec, **how)
    assert found.packed and not whole.packed and whole.frozen_bytes == 4
    assert found.frozen_bytes * found.frozen == pytest.approx(frozen_bytes(student_of(shape, kind)))
    assert (found.parameters, found.frozen, found.trained) == (whole.parameters, whole.frozen, whole.trained)
    assert found.kept_once < whole.kept_once or whole.kept_once == 0
    teacher = replace(spec, lora=None, weights=kind)
    assert 1 < model_footprint(teacher, **how | {"trained": False}).weight_bytes < 2.5


def test_formats_that_are_not_to_be_had_are_refused_in_one_line(monkeypatch):
    with pytest.raises(UsageError, match="--base-weights nf4 needs a CUDA device, and this runs on cpu"):
        frozen.refuse_weights("nf4", "--base-weights", CPU)
    monkeypatch.setitem(sys.modules, "bitsandbytes", None)
    with pytest.raises(UsageError, match=r"needs the package bitsandbytes; pip install 'kdtrain\[nf4\]'"):
        frozen.refuse_weights("nf4", "--teacher-weights", torch.device("cuda"))
    monkeypatch.setitem(sys.modules, "torchao", None)
    with pytest.raises(
        UsageError, match=r"--base-weights int8 needs the package torchao; pip install 'kdtrain\[fp8\]'"
    ):
        frozen.refuse_weights("int8", "--base-weights", CPU)
    with pytest.raises(ValueError, match="weights = 'int4' is unknown; use bf16, int8, nf4"):
        ModelSpec(name="t", source="t", weights="int4")
    with pytest.raises(ValueError, match="weights are those of a model that is loaded here"):
        ModelSpec(name="t", source="t", tokenizer="t", kind="served", weights="int8")


def test_a_teacher_of_16_bits_keeps_the_format_of_all_but_its_linear_layers():
    pytest.importorskip("torchao")
    model = tiny_model("llama", 300, seed=3).to(torch.bfloat16).requires_grad_(False)
    pack(model, "int8", fused=True)
    assert {each.dtype for each in model.parameters()} == {torch.bfloat16}
    assert {each.packed.dtype for each in model.modules() if isinstance(each, PackedLinear)} == {torch.int8}
    assert model.get_input_embeddings()(torch.arange(3)).dtype == torch.bfloat16
