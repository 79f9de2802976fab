"""A cache built on any device, in blocks of any size, in few passes over the logits, holds the same numbers."""

import contextlib
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch._inductor import compile_fx, metrics
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from kdtrain.cache.format import codec
from kdtrain.cache.format.codec import _encode_block, _sparse_in_passes, encode, encode_sequences
from kdtrain.cache.format.spec import CodecSpec
from kdtrain.cache.read.reader import CacheReader
from kdtrain.cache.write import answers
from kdtrain.cache.write.answers import SideStream
from kdtrain.cache.write.writer import write_cache
from kdtrain.objective.engine.matmul import maybe_compiled

PARAMETERS, FLOPS_A_SECOND, BYTES_A_SECOND = 1e9, 400e12, 4.8e12
"""A teacher of 1 B parameters on an H200: what its products reach, and the bandwidth of the memory."""


def logits_of(kind, vocab_size, rows=40):
    generator = torch.Generator().manual_seed(2)
    logits_NV = 3 * torch.randn(rows, vocab_size, generator=generator)
    if kind == "holes":
        logits_NV[torch.rand(rows, vocab_size, generator=generator) < 0.5] = -torch.inf
    if kind == "certain":
        logits_NV = torch.full((rows, vocab_size), -torch.inf).index_fill(1, torch.tensor([7]), 1.0)
    return logits_NV, torch.randint(vocab_size, (rows,), generator=generator)


def chances(spec, rows=40):
    generator = torch.Generator().manual_seed(3)
    return torch.rand(rows, spec.num_samples, generator=generator, dtype=torch.float64)


def assert_equal(found, expected):
    assert found.keys() == expected.keys()
    for name, values in expected.items():
        if values.dtype == torch.int64:
            assert torch.equal(found[name], values), name
        else:
            torch.testing.assert_close(found[name], values, rtol=1e-5, atol=1e-5, equal_nan=True, msg=name)


@pytest.mark.parametrize("top_k, num_samples", [(3, 9), (0, 20), (200, 0)])
@pytest.mark.parametrize("vocab_size", [500, 50_257])
@pytest.mark.parametrize("kind", ["plain", "holes"])
def test_few_passes_keep_what_plain_operations_keep(kind, vocab_size, top_k, num_samples):
    spec = CodecSpec(kind="sparse", vocab_size=vocab_size, top_k=top_k, num_samples=num_samples)
    logits_NV, labels_N = logits_of(kind, vocab_size)
    before_NV = logits_NV.clone()
    found = _sparse_in_passes(logits_NV, labels_N, spec, chances(spec), compile=False)
    assert_equal(found, _encode_block(logits_NV, labels_N, spec, chances(spec)))
    assert torch.equal(logits_NV, before_NV)


@pytest.mark.parametrize("top_k, num_samples", [(1, 4), (0, 4), (499, 0)])
def test_a_tail_without_any_weight_is_kept_alike(top_k, num_samples):
    spec = CodecSpec(kind="sparse", vocab_size=500, top_k=top_k, num_samples=num_samples)
    logits_NV, labels_N = logits_of("certain", 500)
    found = _sparse_in_passes(logits_NV, labels_N, spec, chances(spec), compile=False)
    expected = _encode_block(logits_NV, labels_N, spec, chances(spec))
    # Any entries may stand for those that are as likely as each other: not at all.
    assert (found["ids"].sort(-1).values.diff() != 0).logical_or(found["ids"][:, 1:] == codec.ABSENT).all()
    assert_equal({**found, "ids": expected["ids"]}, expected)


def test_entries_as_likely_as_the_edge_of_the_tail_are_counted_once():
    spec = CodecSpec(kind="sparse", vocab_size=500, top_k=12, num_samples=8)
    logits_NV, labels_N = logits_of("plain", 500)
    logits_NV = logits_NV.round()
    found = _sparse_in_passes(logits_NV.bfloat16(), labels_N, spec, chances(spec), compile=False)
    expected = _encode_block(logits_NV, labels_N, spec, chances(spec))
    assert all(len(set(row)) == 12 for row in found["ids"][:, :12].tolist())
    assert torch.equal(logits_NV.gather(1, found["ids"][:, :12]), logits_NV.gather(1, expected["ids"][:, :12]))
    for top_N, drawn_N in zip(found["ids"][:, :12].tolist(), found["ids"][:, 12:].tolist(), strict=True):
        assert not set(top_N) & set(drawn_N)
    sums = ("tail", "logit_mean", "logit_std", "label_logprob")
    assert_equal({name: found[name] for name in sums}, {name: expected[name] for name in sums})


def test_the_compiled_passes_keep_the_same():
    spec = CodecSpec(kind="sparse", vocab_size=5000, top_k=12, num_samples=8)
    logits_NV, labels_N = logits_of("plain", 5000)
    found = _sparse_in_passes(logits_NV, labels_N, spec, chances(spec))
    assert_equal(found, _encode_block(logits_NV, labels_N, spec, chances(spec)))


def test_only_a_gpu_takes_the_passes(monkeypatch):
    def fail(*arguments):
        raise AssertionError("on a CPU")

    monkeypatch.setattr(codec, "_sparse_in_passes", fail)
    spec = CodecSpec(kind="sparse", vocab_size=500, top_k=12)
    encode(*logits_of("plain", 500), spec)

    class Elsewhere(torch.Tensor):
        is_cuda = True

    with pytest.raises(AssertionError, match="on a CPU"):
        encode(logits_of("plain", 500)[0].as_subclass(Elsewhere), torch.zeros(40, dtype=torch.int64), spec)


class Moved(TorchDispatchMode):
    """A counter of the bytes that operations read and write; a view moves none."""

    def __init__(self):
        super().__init__()
        self.bytes, self.counting = 0, True

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        made = function(*args, **(kwargs or {}))
        if self.counting and not function.is_view:
            read, written = ([each for each in tree_leaves(x) if isinstance(each, torch.Tensor)] for x in (args, made))
            name = function.overloadpacket.__name__
            if name in ("gather", "index", "scatter_", "scatter", "scatter_add_"):
                # They touch as many numbers as there are indices; scatter copies the rest.
                touched = 2 * (written if name in ("gather", "index") else read[1:])[0].nbytes
                self.bytes += touched + 2 * written[0].nbytes * (name == "scatter")
            else:
                # A GPU finds the largest numbers by radix: it reads all of them for each byte, then once more.
                times = 5 if name == "topk" else 1
                self.bytes += times * sum(each.nbytes for each in read) + sum(each.nbytes for each in written)
        return made

    @contextlib.contextmanager
    def paused(self):
        self.counting = False
        yield
        self.counting = True


def bytes_of_graph(function, arguments):
    """Count the bytes that the compiled form of a function moves, as the compiler does."""
    metrics.reset()
    torch._dynamo.reset()
    with torch._inductor.config.patch(force_disable_caches=True):
        maybe_compiled(function, True)(*arguments)
    assert metrics.num_bytes_accessed > 0
    return metrics.num_bytes_accessed


def share_of_forward(bytes_a_token):
    """Return the time to move the bytes over the time of the forward of the same token."""
    return (bytes_a_token / BYTES_A_SECOND) / (2 * PARAMETERS / FLOPS_A_SECOND)


def test_encoding_moves_fewer_bytes_than_fit_into_15_percent_of_a_1b_teacher(monkeypatch):
    """V = 128,256. A pass reads or writes V fp32 numbers a token. Plain operations: 77 of them."""
    vocab_size, rows = 128_256, 4
    spec = CodecSpec(kind="sparse", vocab_size=vocab_size, top_k=8, num_samples=24)
    logits_NV, labels_N = logits_of("plain", vocab_size, rows)
    chance = chances(spec, rows)
    with Moved() as plain:
        codec.broken(logits_NV[None])
        _encode_block(logits_NV, labels_N, spec, chance)
    graphs = []

    def counted(function, compile):
        def run(*arguments):
            graphs.append((function, arguments))
            with few.paused():
                return function(*arguments)

        return run

    monkeypatch.setattr(codec, "maybe_compiled", counted)
    with Moved() as few:
        codec.broken(logits_NV[None])
        _sparse_in_passes(logits_NV, labels_N, spec, chance)
    monkeypatch.setattr(compile_fx.inductor_metrics_log, "isEnabledFor", lambda level: True)
    in_graphs = sum(bytes_of_graph(*graph) for graph in graphs)
    one = logits_NV.nbytes
    assert plain.bytes > 40 * one
    assert few.bytes + in_graphs < 6.75 * one
    assert share_of_forward((few.bytes + in_graphs) / rows) < 0.15 < share_of_forward(plain.bytes / rows)


def test_a_writer_encodes_on_one_stream(monkeypatch):
    calls = []

    class Stream:
        def __init__(self, device):
            calls.append("stream")

        def __getattr__(self, name):
            return lambda *arguments: calls.append(name)

    class Event:
        def record(self, stream):
            calls.append("record")

    monkeypatch.setattr(torch.cuda, "Stream", Stream)
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: None)
    for name in ("device", "stream"):
        monkeypatch.setattr(torch.cuda, name, lambda place: contextlib.nullcontext())
    side, logits = SideStream(), SimpleNamespace(is_cuda=True, device="cuda:0")
    for _ in range(2):
        with side.after(side.ready(logits)):
            calls.append("encode")
    batch = ["record", "wait_event", "encode", "synchronize"]
    assert calls == ["stream", *batch, *batch]


def test_all_shards_of_a_cache_share_its_stream(tmp_path, workshop, codecs, monkeypatch):
    made = []
    monkeypatch.setattr(answers, "SideStream", lambda: made.append(SideStream()) or made[-1])
    write_cache(tmp_path, workshop.settings(codecs["top_k"]), workshop.splits(), teacher=workshop.teacher())
    assert len(made) == 1


def test_a_batch_of_a_new_size_has_the_compiler_to_itself(tmp_path, workshop, codecs, monkeypatch):
    """torch.compile is not thread-safe: the teacher does not run while the thread compiles for a new size."""
    events, teach, encode_sequences = [], workshop.teacher(), answers.encode_sequences

    def teacher(tokens_BT, segments_BT):
        events.append(("teacher", len(tokens_BT)))
        return teach(tokens_BT, segments_BT)

    def encoded(logits_BTV, *arguments, **options):
        found = encode_sequences(logits_BTV, *arguments, **options)
        events.append(("encoded", len(logits_BTV)))
        return found

    monkeypatch.setattr(answers, "encode_sequences", encoded)
    splits = {"train": workshop.rows(10), "validation": workshop.rows(3, seed=1)}
    settings = workshop.settings(codecs["top_k"], sequences_per_shard=10, sequences={"train": 10, "validation": 3})
    write_cache(tmp_path, settings, splits, teacher=teacher, batch_size=4)
    for size in (4, 2, 3):
        first = events.index(("teacher", size))
        assert events[first + 1] == ("encoded", size)
        assert [kind for kind, _ in events[:first]].count("teacher") == first / 2


DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
SPECS = [
    CodecSpec(kind="sparse", vocab_size=500, top_k=12),
    CodecSpec(kind="sparse", vocab_size=500, top_k=3, num_samples=9),
    CodecSpec(kind="sparse", vocab_size=500, top_k=500),
    CodecSpec(kind="dense", vocab_size=500),
]


def encoded(spec, device):
    g = torch.Generator().manual_seed(0)
    logits_BTV = 3 * torch.randn(3, 20, 500, generator=g)
    logits_BTV[1, 4, 7] = torch.nan  # a non-finite sequence
    labels_BT = torch.randint(0, 500, (3, 20), generator=g)
    return encode_sequences(logits_BTV.to(device), labels_BT, spec, seed=0, split="train", first=5)


@pytest.mark.parametrize("spec", SPECS, ids=lambda spec: f"{spec.kind}-{spec.top_k}-{spec.num_samples}")
@pytest.mark.parametrize("cells", [1, 3000, 2**27])
def test_kept_numbers_do_not_depend_on_the_size_of_a_block(spec, cells, monkeypatch):
    expected = encoded(spec, "cpu")
    monkeypatch.setitem(codec._CELLS, "cpu", cells)
    found = encoded(spec, "cpu")
    assert found.keys() == expected.keys()
    for name, values in expected.items():
        assert found[name].dtype == values.dtype and found[name].shape == values.shape
        assert np.allclose(found[name], values, rtol=1e-5, atol=1e-5, equal_nan=True), name


def topk_of_the_last(self, k, dim=-1):
    """Replace `Tensor.topk` along the last axis, and break ties the other way round."""
    assert dim in (-1, self.ndim - 1)
    found = self.sort(dim=-1, stable=True)
    return torch.return_types.topk((found.values[..., -k:].flip(-1), found.indices[..., -k:].flip(-1)))


@pytest.mark.parametrize("spec", SPECS, ids=lambda spec: f"{spec.kind}-{spec.top_k}-{spec.num_samples}")
@pytest.mark.parametrize("device", [*DEVICES, "cpu-last"])
def test_a_device_keeps_the_numbers_that_a_cpu_keeps(spec, device, monkeypatch):
    expected = encoded(spec, "cpu")
    if device == "cpu-last":  # a device that takes the last of equal entries first
        monkeypatch.setattr(torch.Tensor, "topk", topk_of_the_last)
    found = encoded(spec, device.removesuffix("-last"))
    assert found.keys() == expected.keys()
    for name, values in expected.items():
        assert found[name].dtype == values.dtype and found[name].shape == values.shape
        if name == "ids":  # entries as likely as each other, to rounding, may change places; all of a broken sequence
            whole = ~expected["broken"]
            assert whole.sum() == 2 and (found[name][whole] == values[whole]).mean() > 0.99
            for kept in found[name][~whole].reshape(-1, values.shape[-1]):
                present = kept[kept < spec.vocab_size]
                assert len(set(present)) == len(present) >= spec.top_k
        elif name != "counts":
            bound = 0.01 if spec.kind == "dense" else 1e-3
            assert np.allclose(found[name], values, rtol=bound, atol=bound, equal_nan=True), name


@pytest.mark.gpu
def test_a_cache_built_on_a_device_reads_as_one_built_on_a_cpu(workshop, tmp_path):
    settings, on_cpu, found = workshop.settings(SPECS[1]), workshop.teacher(500), []
    for device in ("cpu", "cuda"):

        def teacher(tokens_BT, segments_BT, device=device):
            return on_cpu(tokens_BT, segments_BT).to(device)

        write_cache(tmp_path / device, settings, workshop.splits(), teacher=teacher, batch_size=2)
        found.append(CacheReader(tmp_path / device, "train").read(range(10)).targets)
    assert torch.equal(found[0].ids[:, :3], found[1].ids[:, :3])
    assert torch.allclose(found[0].logprobs[:, :3], found[1].logprobs[:, :3], atol=1e-2)


@pytest.mark.parametrize("device", DEVICES)
def test_work_on_a_side_stream_sees_the_results_of_the_main_stream(device):
    made = torch.full((1024, 1024), 1e-4, device=device)
    for _ in range(5):
        made = made @ made + 1e-4
    side = SideStream()
    with side.after(side.ready(made)):
        copied = made.cpu()
    assert torch.equal(copied, made.cpu()) and torch.isfinite(copied).all()
    with side.after(side.ready(None)):
        pass
