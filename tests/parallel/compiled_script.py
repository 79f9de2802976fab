"""Ranks that check compiled layers in one process, under DDP and under FSDP2.

Every function is a promise, and is called on each rank. The compiler's backend is one that generates no code.
"""

import functools
from collections.abc import Callable
from unittest import mock

import torch
from functorch.compile import make_boxed_func
from torch._dynamo.backends.common import aot_autograd
from wrap_script import CPU, VOCABULARY, batch

from kdtrain.models.head import layers_of, split
from kdtrain.models.loading import checkpoint_activations
from kdtrain.objective.loss import DistillationLoss
from kdtrain.parallel.layout import RankLayout
from kdtrain.parallel.parallelize import SingleProcess, parallelize, shard
from kdtrain.ranks import local, process_group
from kdtrain.testing import tiny_model, tiny_tokenizer
from kdtrain.training.reporter import sample_texts
from kdtrain.training.student import Student

WRAPPERS = ("single", "ddp", "fsdp")
graphs: list[torch.fx.GraphModule] = []


def keep(graph: torch.fx.GraphModule, inputs: object) -> Callable[..., object]:
    graphs.append(graph)
    return make_boxed_func(graph.forward)


def wrapped(kind: str, *, compile: bool = True, checkpoints: bool = False) -> SingleProcess:
    """Wrap a step with a fresh student; compile nothing yet."""
    torch.compiler.reset()
    graphs.clear()
    model = tiny_model("llama", VOCABULARY, seed=3)
    if checkpoints:
        checkpoint_activations(model)
    student, layout = split(model), RankLayout.of_ranks(CPU)
    if kind == "fsdp":
        shard(student, layout.mesh)
    step = Student(student, DistillationLoss(), vocab_size=VOCABULARY, compile=compile, by_layer=kind != "single")
    step.compile_objective = False
    return parallelize(step, kind, layout)


def kept(step: SingleProcess) -> int:
    """Count the bytes that a forward keeps for the backward, besides weights."""
    storages = {local(each.detach()).untyped_storage().data_ptr() for each in step.model.parameters()}
    found = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in storages:
            found[storage._cdata] = storage
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        hidden, _ = step.module._hidden(step.module.backbone, batch(1))
    held = sum(each.nbytes() for each in found.values())  # gathered weights are freed by now
    hidden.sum().backward()
    return held


def layers_that_recompute_keep_little_in_every_wrapper_compiled_or_not() -> None:
    for kind in WRAPPERS:
        all_of_it = kept(wrapped(kind, compile=False))
        for compile in (False, True):
            little = kept(wrapped(kind, compile=compile, checkpoints=True))
            assert little < all_of_it / 3, (kind, compile, little, all_of_it)


def validation_runs_layers_plainly_and_what_they_compile_themselves_compiled() -> None:
    own: list[object] = []

    def fused(graph: torch.fx.GraphModule, inputs: object) -> torch.fx.GraphModule:
        own.append(graph)
        return graph

    attention = torch.compile(torch.sin, backend=fused)

    def attend(module: torch.nn.Module, inputs: object) -> None:
        attention(torch.ones(3))

    for kind in WRAPPERS:
        step = wrapped(kind)
        own.clear()
        layer = layers_of(step.model)[0]
        with layer.self_attn.register_forward_pre_hook(attend):
            with torch.no_grad():
                found = step.module.eval().hidden_eager(batch(1))
            assert own and not graphs, kind
        with torch.no_grad():
            plain = wrapped(kind, compile=False).module.eval().hidden_eager(batch(1))
        assert torch.equal(found, plain), kind


def layers_share_one_graph_whatever_a_bucket_holds_and_samples_of_text_compile_none() -> None:
    class Source:
        def __len__(self) -> int:
            return 2

        def read(self, indices: object) -> object:
            return batch(1)

    for kind in WRAPPERS:
        step = wrapped(kind)
        assert len(sample_texts(step.module, Source(), tiny_tokenizer(VOCABULARY), 0)) == 2
        assert not graphs, kind
        if kind == "ddp":
            step.ddp.bucket_bytes_cap = 1000
        with mock.patch.object(torch.distributed, "_DEFAULT_FIRST_BUCKET_BYTES", 1000):
            for number in (1, 2):
                step(batch(number), 100.0).loss.backward()
        assert len(graphs) == 2, (kind, len(graphs))  # one forward, one backward


PROMISES = (
    layers_that_recompute_keep_little_in_every_wrapper_compiled_or_not,
    validation_runs_layers_plainly_and_what_they_compile_themselves_compiled,
    layers_share_one_graph_whatever_a_bucket_holds_and_samples_of_text_compile_none,
)

if __name__ == "__main__":
    torch.set_num_threads(1)
    torch.compile = functools.partial(torch.compile, backend=aot_autograd(fw_compiler=keep, bw_compiler=keep))
    with process_group(CPU, 300):
        for promise in PROMISES:
            promise()
            print(promise.__name__, flush=True)
