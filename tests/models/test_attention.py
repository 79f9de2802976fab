"""Packed documents: mask, positions, and equality of a packed row with its documents one by one."""

from types import SimpleNamespace

import pytest
import torch
from torch.nn.attention import SDPBackend, _cur_sdpa_kernel_backends
from torch.nn.attention import flex_attention as torch_flex
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from kdtrain.errors import UsageError
from kdtrain.models import attention
from kdtrain.models.attention import CAUSAL, block_mask, dense_mask, first_seen, resolve_attention
from kdtrain.models.head import split
from kdtrain.testing import SHAPES, tiny_model

# Lengths of the documents of two rows of 16, one of them a document of a single token.
DOCUMENTS = [(5, 1, 10), (12, 3, 1)]


def packed_row():
    tokens_BT = torch.randint(300, (2, 16), generator=torch.Generator().manual_seed(1))
    numbers = [[number for number, length in enumerate(row, start=3) for _ in range(length)] for row in DOCUMENTS]
    return tokens_BT, torch.tensor(numbers)


@pytest.mark.parametrize(
    "changed, expected",
    [
        ({}, "eager"),
        ({"compiled": False}, "sdpa"),
        ({"length": 257}, "sdpa"),
        ({"document_mask": True}, "sdpa"),
        ({"mode": "fp32"}, "sdpa"),
        ({"device": torch.device("cuda")}, "sdpa"),
        ({"attention": "sdpa"}, "sdpa"),
        ({"attention": "flash_attention_2"}, "flash_attention_2"),
    ],
)
def test_auto_is_eager_only_where_that_is_faster_and_a_name_stays(changed, expected):
    given = {"attention": "auto", "device": torch.device("cpu"), "mode": "bf16"}
    given |= {"compiled": True, "length": 256, "document_mask": False}
    assert resolve_attention(**given | changed) == expected


@pytest.mark.parametrize("kind", ["sdpa", "eager"])
@pytest.mark.parametrize("shape", sorted(SHAPES.keys() - {"bloom", "falcon_h1"}))
def test_a_packed_row_has_the_logits_of_each_document_alone(shape, kind):
    model = tiny_model(shape).eval()
    model.set_attn_implementation("eager" if shape == "gemma2" else kind)
    pieces = split(model)
    tokens_BT, segments_BT = packed_row()
    packed_BTV = pieces.logits(tokens_BT, segments_BT)
    for row, lengths in enumerate(DOCUMENTS):
        start = 0
        for length in lengths:
            here = slice(start, start + length)
            alone_TV = model(tokens_BT[row : row + 1, here], use_cache=False).logits[0]
            torch.testing.assert_close(packed_BTV[row, here], alone_TV, rtol=0, atol=1e-5)
            start += length
    assert (packed_BTV - pieces.logits(tokens_BT)).abs().max() > 1e-2


@pytest.mark.parametrize("shape", ["llama", "mistral", "gpt2"])
def test_plain_causal_attention_is_that_of_transformers(shape):
    model = tiny_model(shape).eval()
    tokens_BT, _ = packed_row()
    expected_BTV = model(tokens_BT).logits
    pieces = split(model)
    assert model.config._attn_implementation == CAUSAL
    torch.testing.assert_close(pieces.logits(tokens_BT), expected_BTV, rtol=0, atol=1e-6)


def masks_given(monkeypatch, run):
    masks, real = [], torch.nn.functional.scaled_dot_product_attention

    def watch(*args, attn_mask=None, **keywords):
        masks.append((attn_mask, keywords["is_causal"]))
        return real(*args, attn_mask=attn_mask, **keywords)

    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", watch)
    run()
    return masks


def test_without_documents_no_mask_is_built_and_the_kernel_is_causal(monkeypatch):
    pieces = split(tiny_model().eval())
    masks = masks_given(monkeypatch, lambda: pieces(packed_row()[0]))
    assert masks == [(None, True)] * 2


def test_fp32_with_grouped_queries_on_a_gpu_repeats_the_keys_for_the_memory_efficient_kernel(monkeypatch):
    pieces = split(tiny_model().eval())
    config = pieces.model.config
    assert config.num_key_value_heads < config.num_attention_heads
    expected = pieces(packed_row()[0])
    seen, real = [], torch.nn.functional.scaled_dot_product_attention

    def watch(query, key, value, **keywords):
        # torch's rule, sdp_utils: kernels besides flash (16 bits only) and the plain one want equal numbers of heads
        seen.append(query.shape[1] == key.shape[1] == value.shape[1] and keywords["is_causal"])
        return real(query, key, value, **keywords)

    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", watch)
    monkeypatch.setattr(attention, "is_cuda", lambda query: True)
    torch.testing.assert_close(pieces(packed_row()[0]), expected, rtol=0, atol=1e-6)
    assert seen == [True] * config.num_hidden_layers
    torch._dynamo.reset()
    compiled = torch.compile(pieces, fullgraph=True, backend="eager")
    torch.testing.assert_close(compiled(packed_row()[0]), expected, rtol=0, atol=1e-6)
    query, key = torch.zeros(1, 4, 8, 16), torch.zeros(1, 2, 8, 16)
    assert attention.grouped_in_fp32(query, key)
    assert not attention.grouped_in_fp32(query, query) and not attention.grouped_in_fp32(query.half(), key.half())
    with monkeypatch.context() as patch:
        patch.setattr(torch, "is_autocast_enabled", lambda device: True)  # to 16 bits, which flash takes grouped
        assert not attention.grouped_in_fp32(query, key)


@pytest.fixture
def timed(monkeypatch):
    """Time kernels by a table, and count how often."""
    monkeypatch.setattr(attention, "kernel_orders", {})
    monkeypatch.setattr(attention, "_times", {})
    asked = []

    def choose(model, flash, cudnn, device="cuda", dtype=torch.bfloat16, batch=4):
        def seconds(kernel, shape, dtype, device):
            asked.append(shape)
            return {SDPBackend.FLASH_ATTENTION: flash, SDPBackend.CUDNN_ATTENTION: cudnn}[kernel]

        return attention.choose_kernel(model.config, batch, 4096, dtype, torch.device(device), seconds)

    choose.asked = asked
    return choose


def test_the_faster_attention_kernel_is_tried_first_and_timed_once_a_process(timed):
    pieces = split(tiny_model())
    width = pieces.model.config.head_dim
    assert timed(pieces.model, 2e-3, 1e-3) == "attention by cuDNN: flash 2 ms, cuDNN 1 ms a layer"
    heads = (pieces.model.config.num_attention_heads, pieces.model.config.num_key_value_heads)
    assert timed.asked == [(2, *heads, 4096, width)] * 2
    assert attention.kernel_orders[width][:2] == [SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION]
    assert set(attention.kernel_orders[width][2:]) == {SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH}
    timed(pieces.model, 9.0, 9.0)
    assert len(timed.asked) == 2
    timed(pieces.model, 1e-3, float("inf"), dtype=torch.float16)
    assert attention.kernel_orders[width][0] == SDPBackend.FLASH_ATTENTION


@pytest.mark.parametrize("options", [{"device": "cpu"}, {"dtype": None}, {"flash": float("inf")}], ids=str)
def test_where_no_kernel_is_timed_torchs_own_order_stays(timed, options):
    given = {"flash": 1.0, "cudnn": float("inf")} | options
    assert timed(split(tiny_model()).model, **given) is None
    assert timed(tiny_model(), 1.0, 2.0) is None  # not ours: transformers' attention
    assert not attention.kernel_orders


def test_a_deterministic_run_times_no_kernel(timed, monkeypatch):
    monkeypatch.setattr(torch, "are_deterministic_algorithms_enabled", lambda: True)
    assert "nothing is timed with --deterministic" in timed(split(tiny_model()).model, 1.0, 2.0)
    assert not timed.asked and not attention.kernel_orders


def test_the_chosen_order_holds_in_eager_and_compiled_layers_and_nowhere_else(timed, monkeypatch):
    pieces, orders = split(tiny_model().eval()), []
    plain = _cur_sdpa_kernel_backends(with_priority=True)
    expected = pieces(packed_row()[0])
    timed(pieces.model, 2.0, 1.0)
    real = torch.nn.functional.scaled_dot_product_attention

    class Watch(TorchFunctionMode):
        def __torch_function__(self, function, types, args=(), kwargs=None):
            if function is real:
                orders.append(_cur_sdpa_kernel_backends(with_priority=True)[0])
            return function(*args, **(kwargs or {}))

    with Watch():
        torch.testing.assert_close(pieces(packed_row()[0]), expected)
    assert orders == [SDPBackend.CUDNN_ATTENTION] * 2
    graphs = []
    torch._dynamo.reset()
    compiled = torch.compile(
        pieces, fullgraph=True, backend=lambda graph, inputs: graphs.append(graph) or graph.forward
    )
    torch.testing.assert_close(compiled(packed_row()[0]), expected)
    names = [getattr(node.target, "__name__", "") for node in graphs[0].graph.nodes]
    places = [place for place, name in enumerate(names) if name in ("_sdpa_kernel", "scaled_dot_product_attention")]
    assert [names[place] for place in places] == ["_sdpa_kernel", "scaled_dot_product_attention", "_sdpa_kernel"] * 2
    assert _cur_sdpa_kernel_backends(with_priority=True) == plain


def attention_inputs(graph):
    calls = [node for node in graph.graph.nodes if "scaled_dot_product" in str(node.target)]
    return [(call.kwargs.get("attn_mask"), call.kwargs.get("is_causal")) for call in calls]


@pytest.mark.parametrize("shape", ["llama", "qwen3", "gpt2"])
def test_a_split_model_compiles_to_one_graph_with_and_without_documents(shape):
    graphs = []

    def keep(graph, example_inputs):
        graphs.append(graph)
        return graph.forward

    torch._dynamo.reset()
    pieces = split(tiny_model(shape))
    compiled = torch.compile(pieces, fullgraph=True, backend=keep)
    tokens_BT, segments_BT = packed_row()
    torch.testing.assert_close(compiled(tokens_BT), pieces(tokens_BT), rtol=0, atol=1e-5)
    assert attention_inputs(graphs[0]) == [(None, True)] * 2
    torch.testing.assert_close(compiled(tokens_BT, segments_BT), pieces(tokens_BT, segments_BT), rtol=0, atol=1e-5)
    assert len(graphs) == 2 and all(mask is not None for mask, _ in attention_inputs(graphs[1]))


@pytest.mark.parametrize("shape, name", [("bloom", "Bloom"), ("falcon_h1", "FalconH1")])
def test_a_model_that_cannot_keep_documents_apart_raises_instead_of_mixing_them(shape, name):
    pieces = split(tiny_model(shape).eval())
    assert pieces.fused and not pieces.separates_documents
    with pytest.raises(UsageError, match=f"{name}ForCausalLM cannot keep documents apart"):
        pieces(*packed_row())
    pieces(packed_row()[0])


LENGTH = 300
"""Three blocks of FlexAttention, the last one not full."""


def long_row(rows=2, length=LENGTH):
    generator = torch.Generator().manual_seed(1)
    segments_BT = (torch.rand(rows, length, generator=generator) < 0.02).cumsum(dim=1)
    return torch.randint(300, (rows, length), generator=generator), segments_BT


def long_model(shape, **config):
    positions = {"n_positions": 512} if shape == "gpt2" else {"max_position_embeddings": 512}
    return tiny_model(shape, **positions, **config)


@pytest.fixture
def flex_calls(monkeypatch):
    """Run FlexAttention on a CPU in its plain form, which has a backward too, and record its calls."""
    calls, real = [], attention.flex_attention_forward

    def counted(module, query, key, value, mask, **keywords):
        calls.append((mask, query.dtype, value.dtype))
        return real(module, query, key, value, mask, **keywords)

    monkeypatch.setattr(attention, "flex_fits", lambda query, dropout: dropout == 0)
    monkeypatch.setattr(attention, "flex_attention_forward", counted)
    monkeypatch.setattr(torch_flex, "_validate_device", lambda *tensors: None)
    with torch.compiler.set_stance("force_eager"):
        yield calls


def logits_and_gradients(pieces, *inputs):
    pieces.zero_grad()
    logits_BTV = pieces.logits(*inputs)
    logits_BTV.square().mean().backward()
    return [logits_BTV.detach(), *(parameter.grad.clone() for parameter in pieces.parameters())]


@pytest.mark.parametrize("shape", ["llama", "mistral", "qwen3", "gpt2", "gemma2"])
def test_flex_attention_gives_the_logits_and_gradients_of_masked_sdpa(shape, monkeypatch, flex_calls):
    model = long_model(shape)
    with monkeypatch.context() as patch:
        patch.setattr(attention, "flex_fits", lambda query, dropout: False)
        pieces = split(model)
        expected = logits_and_gradients(pieces, *long_row())
    assert not flex_calls and model.config._attn_implementation == ("eager" if shape == "gemma2" else CAUSAL)
    pieces = split(model)
    probed = len(flex_calls)
    found = logits_and_gradients(pieces, *long_row())
    assert len(flex_calls) == probed + 2 and model.config._attn_implementation == CAUSAL
    for values, others in zip(found, expected, strict=True):
        torch.testing.assert_close(values, others, rtol=0, atol=1e-5)


@pytest.mark.parametrize("lengths", [[300], [1] * 300, [128, 128, 44], [127, 173]])
@pytest.mark.parametrize("window", [None, 1, 100, 128, 129])
def test_a_block_mask_has_the_blocks_that_the_dense_mask_fills(lengths, window):
    numbers = [number for number, length in enumerate(lengths) for _ in range(length)]
    first_B1T1 = first_seen(torch.tensor([numbers, [0] * LENGTH]))
    if window is not None:
        first_B1T1 = first_B1T1.maximum(torch.arange(LENGTH)[:, None] - window + 1)
    found, dense_B1TT = block_mask(first_B1T1), dense_mask(first_B1T1)
    sees = lambda row, head, query, key: dense_B1TT[row, 0, query, key]  # noqa: E731
    expected = torch_flex.create_block_mask(sees, 2, 1, LENGTH, LENGTH, device="cpu")
    for name in ("kv", "full_kv", "q", "full_q"):
        assert torch.equal(getattr(found, f"{name}_num_blocks"), getattr(expected, f"{name}_num_blocks")), name
        assert torch.equal(getattr(found, f"{name}_indices"), getattr(expected, f"{name}_indices")), name
    assert torch.equal(torch_flex.create_mask(found.mask_mod, 2, 1, LENGTH, LENGTH, device="cpu"), dense_B1TT)


class Made(TorchDispatchMode):
    """A counter of the bytes of each tensor that is made."""

    def __init__(self):
        super().__init__()
        self.bytes = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        made = function(*args, **(kwargs or {}))
        self.bytes += [each.nbytes for each in tree_leaves(made) if isinstance(each, torch.Tensor)]
        return made


def test_what_a_block_mask_takes_grows_as_the_row_does():
    made = {}
    for length in (4096, 8192):
        _, segments_BT = long_row(4, length)
        with Made() as made[length]:
            first_B1T1 = first_seen(segments_BT)
            block_mask(first_B1T1)
    assert max(made[8192].bytes) == 2 * max(made[4096].bytes) == 8 * 4 * 8192  # a whole number for each token
    assert sum(made[8192].bytes) < 3 * sum(made[4096].bytes)
    assert sum(made[8192].bytes) < 4 * 8192 * 8192 / 50  # all together, against the dense mask alone
    with Made() as dense:
        dense_mask(first_B1T1)
    assert max(dense.bytes) == 4 * 8192 * 8192


def test_layers_share_the_mask_of_a_batch(flex_calls):
    pieces = split(long_model("gemma2", num_hidden_layers=4))
    flex_calls.clear()
    with torch.no_grad():
        pieces(*long_row())
        pieces(*long_row())
    masks = [mask for mask, *_ in flex_calls]
    # Every second layer has a sliding window.
    assert masks[0] is masks[2] and masks[1] is masks[3] and masks[4] is masks[6]
    assert len({id(mask) for mask in masks}) == 4


def test_under_autocast_flex_attention_gets_what_sdpa_would(flex_calls):
    pieces = split(long_model("llama"))
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        found = pieces(*long_row())
    assert [dtypes for _, *dtypes in flex_calls] == [[torch.bfloat16] * 2] * 2
    torch.testing.assert_close(found, pieces(*long_row()), rtol=0, atol=0.1)


def test_dropout_and_rows_of_one_block_take_the_dense_mask(flex_calls, monkeypatch):
    pieces = split(long_model("gpt2", attn_pdrop=0.5))
    flex_calls.clear()
    masks = masks_given(monkeypatch, lambda: (pieces.train()(*long_row()), pieces.eval()(*packed_row())))
    assert [mask.shape[-1] for mask, _ in masks] == [LENGTH, LENGTH, 16, 16] and not flex_calls
    pieces(*long_row())
    assert len(flex_calls) == 2


def test_a_model_with_flex_attention_compiles_to_one_graph_for_all_batches(monkeypatch):
    torch._dynamo.reset()
    monkeypatch.setattr(attention, "flex_fits", lambda query, dropout: True)
    pieces = split(long_model("mistral")).requires_grad_(False)
    graphs = torch._dynamo.testing.CompileCounterWithBackend("eager")
    compiled = torch.compile(pieces, fullgraph=True, backend=graphs)
    tokens_BT, segments_BT = long_row()
    with torch.compiler.set_stance("force_eager"):
        expected = [pieces(tokens_BT, segments_BT), pieces(tokens_BT, segments_BT // 2)]
    found = [compiled(tokens_BT, segments_BT), compiled(tokens_BT, segments_BT // 2)]
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-5)
    assert graphs.frame_count == 1


@pytest.mark.parametrize(
    "is_cuda, width, dropout, fits",
    [(True, 64, 0.0, True), (False, 64, 0.0, False), (True, 8, 0, False), (True, 64, 0.1, False)],
)
def test_flex_attention_is_for_a_gpu_without_dropout_and_for_heads_of_sixteen(is_cuda, width, dropout, fits):
    query = SimpleNamespace(is_cuda=is_cuda, shape=(2, 4, 300, width))
    assert attention.flex_fits(query, dropout) == fits


@pytest.mark.gpu
@pytest.mark.parametrize("kernel", attention.KERNELS)
def test_on_a_gpu_each_kernel_is_timed_and_gives_the_logits_of_the_others(kernel, timed):
    model = tiny_model("llama", hidden_size=256, head_dim=64, num_attention_heads=4, num_key_value_heads=2)
    pieces, tokens_BT = split(model.to("cuda")), packed_row()[0].to("cuda")
    seconds = attention.kernel_seconds(
        attention.KERNELS[kernel], attention.KernelShape(2, 4, 2, 256, 64), torch.bfloat16, tokens_BT.device
    )
    with torch.no_grad(), torch.autocast("cuda", torch.bfloat16):
        expected = pieces(tokens_BT)
        attention.kernel_orders[64] = [attention.KERNELS[kernel], SDPBackend.MATH]
        torch.testing.assert_close(pieces(tokens_BT), expected, rtol=0.05, atol=0.05)
    assert 0 < seconds < 1 or seconds == float("inf")


@pytest.mark.gpu
@pytest.mark.parametrize("shape", ["llama", "mistral", "qwen3", "gpt2", "gemma2"])
def test_on_a_gpu_flex_attention_gives_the_logits_and_gradients_of_a_cpu(shape):
    model = long_model(shape, **({"n_embd": 64} if shape == "gpt2" else {"head_dim": 16}))
    expected = logits_and_gradients(split(model), *long_row())
    pieces = split(model.to("cuda"))
    assert model.config._attn_implementation == CAUSAL
    found = logits_and_gradients(pieces, *(each.to("cuda") for each in long_row()))
    for values, others in zip(found, expected, strict=True):
        torch.testing.assert_close(values.cpu(), others, rtol=1e-3, atol=1e-4)
