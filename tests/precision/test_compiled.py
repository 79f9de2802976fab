"""Layers that are compiled one by one; tests/parallel/compiled_script.py has them in several ranks."""

import inspect

import pytest
import torch
from torch._dynamo.utils import counters
from transformers.models.qwen3_moe import modeling_qwen3_moe as qwen3_moe
from transformers.utils.output_capturing import _active_collector

import kdtrain as kd
from kdtrain.config.sections import LoraConfig
from kdtrain.models.adapters import restrict
from kdtrain.models.head import layers_of, split
from kdtrain.models.loading import checkpoint_activations
from kdtrain.models.spec import ModelSpec
from kdtrain.precision.compiled import CompiledLayers
from kdtrain.teaching.local import SelfTeacher
from kdtrain.testing import SHAPES, tiny_model

MIXTURE = SHAPES["llama"] | {"model_type": "qwen3_moe", "num_experts": 4, "num_experts_per_tok": 2}
MIXTURE |= {"moe_intermediate_size": 16, "router_aux_loss_coef": 0.3}


def tiny(recomputes, **shape):
    """Make a tiny model, and a split one around it, whose layers are recomputed or not; compile nothing yet."""
    torch.compiler.reset()
    own = tiny_model("llama", **shape)
    if recomputes:
        checkpoint_activations(own)
    return own, split(own)


@torch._dynamo.config.patch(recompile_limit=2)
def test_layers_get_a_graph_for_each_length_beyond_the_compilers_own_limit_and_none_while_they_are_plain():
    torch.compiler.reset()
    graphs = []
    model = split(tiny_model())
    own = [layer.forward for layer in layers_of(model)]
    compiled = CompiledLayers(model, backend=lambda graph, inputs: graphs.append(graph) or graph.forward)
    forward = compiled.calling(model.forward)
    for length in range(4, 8):
        forward(torch.zeros(1, length, dtype=torch.int64))
    assert len(graphs) == 4
    with compiled.plain():
        assert [layer.forward for layer in layers_of(model)] == own
        forward(torch.zeros(1, 20, dtype=torch.int64))
    forward(torch.zeros(1, 7, dtype=torch.int64))
    assert len(graphs) == 4


@pytest.mark.parametrize("recomputes", [False, True])
@pytest.mark.parametrize(
    "shape, layers, balance",
    [(MIXTURE, (), True), (MIXTURE, (1, 2), True), (SHAPES["llama"], (1,), False)],
    ids=["router", "router and hidden states", "hidden states"],
)
def test_layers_share_one_whole_graph_whatever_is_collected_of_them(shape, layers, balance, recomputes):
    own, model = tiny(recomputes, **shape)
    tokens = torch.randint(0, 300, (2, 16), generator=torch.Generator().manual_seed(0))

    def collected(forward):
        own.zero_grad()
        hidden, more = forward(tokens, None, layers, balance)
        sum(each.sum() for each in (hidden, *more)).backward()
        return [hidden, *more, *(each.grad for each in own.parameters())]

    expected = collected(model)
    forward = CompiledLayers(model, backend="eager").calling(model.forward)
    counters.clear()
    for _ in range(2):
        for one, other in zip(collected(forward), expected, strict=True):
            assert torch.equal(one, other)
    # transformers 5.17 recomputes a layer around its `forward`: in the backward, where no router is asked for
    around = recomputes and balance and not hasattr(type(layers_of(model)[0]).forward, "__wrapped__")
    assert counters["stats"]["unique_graphs"] == (2 if around else 1) and not counters["graph_break"]


@pytest.mark.parametrize("recomputes", [False, True])
def test_a_layer_that_fails_leaves_nothing_collected_behind(monkeypatch, recomputes):
    (_, model), tokens = tiny(recomputes, **MIXTURE), torch.zeros(1, 9, dtype=torch.int64)
    forward = CompiledLayers(model, backend="eager").calling(model.forward)
    before = _active_collector.get()  # other tests of the process may have left an empty one

    @torch.compiler.disable
    def fail(*_):
        raise torch.OutOfMemoryError("of the layer")

    monkeypatch.setattr(layers_of(model)[1].mlp, "forward", fail)
    with pytest.raises(torch.OutOfMemoryError, match="of the layer"):
        forward(tokens, None, (1,), True)
    assert (_active_collector.get(), _active_collector.compiling) == (before, False)


@pytest.mark.parametrize("recomputes", [False, True])
def test_a_whole_mixture_of_experts_is_one_graph(monkeypatch, recomputes):
    (model, _), compile = tiny(recomputes, **MIXTURE), torch.compile
    monkeypatch.setattr(torch, "compile", lambda function, **_: compile(function, dynamic=False, backend="eager"))
    student = kd.Student(model, kd.DistillationLoss(alpha=0.0), compile=True)
    counters.clear()
    for _ in range(2):
        student.backbone(torch.zeros(1, 9, dtype=torch.int64), None)
    # transformers 5.17 counts with bincount for the router's loss, where the graph is cut
    counts = "bincount" in inspect.getsource(qwen3_moe.load_balancing_loss_func)
    assert [each for each in counters["graph_break"] if not counts or "aten.bincount" not in each] == []
    assert counts or counters["stats"]["unique_graphs"] == 1


@torch._dynamo.config.patch(recompile_limit=2)
def test_a_student_that_teaches_itself_has_a_graph_for_each_length_too():
    pytest.importorskip("peft")
    torch.compiler.reset()
    graphs = []
    student = split(tiny_model())
    restrict(student, LoraConfig(lora_rank=4), freeze_head=False, seed=0)
    CompiledLayers(student, backend=lambda graph, inputs: graphs.append(graph) or graph.forward)
    spec = ModelSpec(name="self", config={"model_type": "llama"}, init="scratch")
    teacher = SelfTeacher(spec, torch.device("cpu"), "fp32")
    teacher.meet(student)
    for length in range(4, 8):
        teacher.hidden_states(torch.zeros(1, length, dtype=torch.int64), None)
    assert len(graphs) == 4
