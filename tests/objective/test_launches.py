"""What an objective costs a GPU besides its arithmetic, counted without one: host synchronisations and launches.

Meta tensors hold no numbers: whatever a host would wait to read raises. Launches of a chunk are what PyTorch dispatches
outside the compiled functions, and the kernels that the compiler generates for a Hopper GPU inside them.
"""

import contextlib
import dataclasses
import functools
from unittest import mock

import pytest
import torch
from objective_cases import RULES, run, targets_for
from objective_reference import problem
from torch._inductor import metrics, scheduler
from torch._inductor.debug import DebugContext
from torch._inductor.decomposition import select_decomp_table
from torch._inductor.graph import GraphLowering
from torch._inductor.runtime.hints import DeviceProperties
from torch._inductor.virtualized import V
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.passes.fake_tensor_prop import FakeTensorProp
from torch.utils._python_dispatch import TorchDispatchMode

from kdtrain.models.output_head import HeadPart
from kdtrain.objective.engine import fused as engine
from kdtrain.objective.engine import matmul
from kdtrain.objective.engine.matmul import Products
from kdtrain.objective.loss import DistillationLoss
from kdtrain.objective.targets import OnlineTargets
from kdtrain.objective.temperature import LikelihoodTemperature

SPARSE = [rule for rule in RULES if rule != "dense"]
VIEWS = {"slice", "select", "unsqueeze", "squeeze", "view", "expand", "alias", "detach", "permute", "t", "split"}


class Launches(TorchDispatchMode):
    """The names of operators that start a kernel on a GPU."""

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        name = function.overloadpacket.__name__
        if name not in VIEWS | {"empty", "promote_types"}:
            self.names.append(name)
        return function(*args, **(kwargs or {}))


def on_meta(p, targets):
    """Return the problem and its targets without numbers, with bf16 hidden states and an fp32 weight."""

    def leaf(x, dtype):
        return x.detach().to("meta", dtype).requires_grad_()

    weight = leaf(p.head.weight, torch.float32)
    head = HeadPart(weight=weight)
    return dataclasses.replace(
        p, hidden=leaf(p.hidden, torch.bfloat16), head=head, labels=p.labels.to("meta"), mask=p.mask.to("meta")
    ), None if targets is None else targets.to("meta")


def targets_of(p, rule):
    if rule == "none":
        return None
    if rule == "online":
        head = HeadPart(weight=torch.randn(p.vocab_size, 5))
        return OnlineTargets(torch.randn(len(p.labels), 5), p.labels, head, p.vocab_size)
    return targets_for(p, rule, torch.float32)


@pytest.fixture
def meta(monkeypatch):
    """Give the device without numbers the autocast that PyTorch lacks for it."""
    monkeypatch.setattr(torch, "autocast", lambda *_, **__: contextlib.nullcontext())


def test_reading_a_number_is_noticed(meta):
    ascending = torch.zeros(7, device="meta")
    for read in (torch.Tensor.item, torch.Tensor.tolist, bool, lambda x: ascending[x.long()]):
        with pytest.raises(RuntimeError):
            read(torch.zeros((), device="meta"))


@pytest.mark.parametrize("rule", ["none", "online", *RULES])
def test_no_objective_waits_for_the_device_in_forward_or_backward(meta, rule):
    p = problem(n=64, d=8, vocab=96)
    targets = targets_of(p, rule)
    p, targets = on_meta(p, targets)
    if rule == "online":
        targets = dataclasses.replace(targets, head=on_meta(problem(d=5, vocab=96), None)[0].head)
    temperature = LikelihoodTemperature(start=1.5, bounds=(1.0, 4.0)).to("meta")
    loss = DistillationLoss(alpha=0.0 if rule == "none" else 0.9, temperature=temperature)
    normalizer = torch.zeros((), device="meta")
    temperature = torch.ones((), device="meta", requires_grad=True)
    run(p, targets, temperature, rule, normalizer=normalizer, chunk=16).loss.backward()
    assert p.hidden.grad.is_meta and p.head.weight.grad.is_meta and temperature.grad.is_meta
    output = loss(p.hidden, p.head, p.labels, p.mask, targets, vocab_size=96, normalizer=normalizer)
    output.loss.backward()


def dispatched(rule, chunks):
    """Record the launches of a walk over some chunks, and the compiled functions that it calls with their arguments."""
    p = problem(n=16 * chunks, d=8, vocab=96)
    p, targets = on_meta(p, targets_of(p, rule))
    called = []

    def without_counting(function, compile):
        def call(*given):
            if compile:
                called.append((function, given))
                with mock.patch.object(
                    Launches, "__torch_dispatch__", lambda _, f, t, a=(), k=None: f(*a, **(k or {}))
                ):
                    return function(*given)
            return function(*given)

        return call

    temperature = torch.ones((), device="meta", requires_grad=True)
    with (
        mock.patch.object(engine, "maybe_compiled", without_counting),
        mock.patch.object(Products, "logits", lambda self, hidden_RD, out_RV: out_RV),
        mock.patch.object(Products, "gradients"),
        Launches() as launches,
    ):
        run(p, targets, temperature, rule, chunk=16, compile=True)
    return launches.names, called


def kernels_for_a_gpu(function, given):
    """Count the kernels that the compiler makes of a function for a Hopper GPU; it generates them and runs none."""
    parts = []
    _each_tensor(given, lambda x: parts.append(x) or x)
    parts = [torch.zeros_like(each, device="cpu") for each in parts]

    def flat(*tensors):
        following = iter(tensors)
        result = function(*_each_tensor(given, lambda _: next(following)))
        return tensors[0] if result is None else tuple(result)

    with torch.no_grad():
        graph = make_fx(flat, decomposition_table=select_decomp_table())(*parts)
    for node in graph.graph.nodes:
        if node.kwargs.get("device") is not None:
            node.kwargs = {**node.kwargs, "device": torch.device("cuda:0")}
    graph.graph.eliminate_dead_code()
    fake = FakeTensorMode(allow_non_fake_inputs=True)
    with fake:
        inputs = [torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device="cuda:0") for x in parts]
    FakeTensorProp(graph, fake).propagate_dont_convert_inputs(*inputs)
    lowering, before = GraphLowering(graph, example_inputs=inputs), metrics.generated_kernel_count
    with hopper(), V.set_debug_handler(DebugContext()), V.set_graph_handler(lowering), V.set_fake_mode(fake):
        lowering.run(*inputs)
        lowering.codegen()
    return metrics.generated_kernel_count - before


def _each_tensor(value, change):
    """Change every tensor in `value`: a tuple, a dataclass, or a method of one, to any depth."""
    if isinstance(value, torch.Tensor):
        return change(value)
    if dataclasses.is_dataclass(value):
        fields = {f.name: _each_tensor(getattr(value, f.name), change) for f in dataclasses.fields(value)}
        return dataclasses.replace(value, **fields)
    if isinstance(value, tuple):
        changed = [_each_tensor(each, change) for each in value]
        return type(value)(*changed) if hasattr(value, "_fields") else tuple(changed)
    if hasattr(value, "__self__"):
        return getattr(_each_tensor(value.__self__, change), value.__name__)
    return value


@contextlib.contextmanager
def hopper():
    """Answer the compiler's questions about a GPU as an H200 would."""
    import triton

    size = {"multi_processor_count": 132, "major": 9, "max_threads_per_multi_processor": 2048, "warp_size": 32}
    known = {"regs_per_multiprocessor": 65536, **size}
    properties = DeviceProperties(type="cuda", index=0, cc=90, **known)
    driver = mock.Mock()
    driver.get_current_target.return_value = triton.backends.compiler.GPUTarget("cuda", 90, 32)
    with (
        mock.patch.object(triton.runtime.driver, "_active", driver),
        mock.patch.object(scheduler, "has_triton", return_value=True),
        mock.patch.object(DeviceProperties, "create", return_value=properties),
        mock.patch.object(torch.cuda, "get_device_capability", return_value=(9, 0)),
        mock.patch.object(torch.cuda, "get_device_properties", return_value=mock.Mock(minor=0, **known)),
    ):
        yield


@pytest.mark.parametrize("rule", ["none", *RULES])
def test_a_chunk_starts_few_operations_outside_the_compiled_functions(meta, rule):
    few, called = dispatched(rule, 2)
    more, called_more = dispatched(rule, 5)
    assert len(called) == 2 * (5 if rule == "dense" else 3)
    assert len(called_more) == 5 * len(called) / 2
    assert (len(more) - len(few)) / 3 <= (7 if rule == "dense" else 3)


@pytest.mark.parametrize("rule", ["ghost", "control-variate", "dense"])  # of the least and of the most operations
def test_a_chunk_starts_at_most_twenty_kernels_beside_its_products(meta, rule):
    pytest.importorskip("triton", reason="Triton is there for Linux only")
    few, called = dispatched(rule, 2)
    more, _ = dispatched(rule, 5)
    outside = (len(more) - len(few)) / 3
    inside = sum(kernels_for_a_gpu(function, given) for function, given in called[: len(called) // 2])
    assert inside >= len(called) // 2
    assert inside + outside <= 20


@pytest.mark.parametrize("rule", ["none", "ghost", "dense"])
def test_another_alpha_or_temperature_or_number_of_tokens_compiles_nothing_anew(monkeypatch, rule):
    monkeypatch.setattr(engine.Request, "compile_small", lambda self, device: True)
    # what is compiled again is decided before any code is generated
    traced = functools.cache(functools.partial(torch.compile, dynamic=False, backend="aot_eager"))
    monkeypatch.setattr(matmul, "_compiled", traced)
    torch._dynamo.utils.counters.clear()
    graphs = []
    for alpha, T, tokens in ((0.9, 1.0, 11.0), (0.8, 1.5, 12.0), (0.7, 2.0, 13.0)):
        p = problem(n=16, d=6, vocab=23).cast(torch.float32)
        temperature = torch.tensor(T, requires_grad=True)
        loss = run(p, targets_of(p, rule), temperature, rule, alpha, torch.tensor(tokens), compile=True, chunk=8).loss
        loss.backward()
        graphs.append(torch._dynamo.utils.counters["stats"]["unique_graphs"])
    assert graphs[0] > 0 and len(set(graphs)) == 1


def test_a_mixture_of_three_kinds_in_micro_batches_of_1_to_8_sequences_never_leaves_its_graphs(monkeypatch):
    """Each kind has a graph for each length of a last chunk, more than the compiler's own limit of 8.

    A chunk has four sequences, as of 512 tokens in one of 2,048 rows.
    """
    monkeypatch.setattr(engine.Request, "compile_small", lambda self, device: True)
    monkeypatch.setattr(matmul, "_OPTIONS", None)
    ran, compile = [], torch.compile

    def counting(graph, inputs):
        return lambda *given: ran.append(graph) or graph.forward(*given)

    monkeypatch.setattr(torch, "compile", functools.partial(compile, backend=counting))
    matmul._compiled.cache_clear()
    torch.compiler.reset()
    chunks = 0
    for sequences in range(1, 9):
        p = problem(n=2 * sequences, d=6, vocab=23).cast(torch.float32)
        for rule in ("ghost", "sampled", "sampled-headless"):
            run(p, targets_for(p, rule, torch.float32), 1.0, rule, compile=True, chunk=8)
            chunks += -(-sequences // 4)
    matmul._compiled.cache_clear()
    assert len(ran) == 3 * chunks
