"""Packed documents: mask, positions, and equality of a packed row with its documents one by one."""

import pytest
import torch

from kdtrain.errors import UsageError
from kdtrain.models.attention import CAUSAL_SDPA, document_mask, document_positions
from kdtrain.models.head import split
from kdtrain.testing import SHAPES, tiny_model

# Lengths of the documents of two rows of 16, one of them a document of a single token.
DOCUMENTS = [(5, 1, 10), (12, 3, 1)]


def packed_row():
    tokens_BT = torch.randint(300, (2, 16), generator=torch.Generator().manual_seed(1))
    numbers = [[number for number, length in enumerate(row, start=3) for _ in range(length)] for row in DOCUMENTS]
    return tokens_BT, torch.tensor(numbers)


def test_positions_restart_with_each_document():
    segments_BT = torch.tensor([[4, 4, 4, 5, 6, 6], [0, 0, 0, 0, 0, 0], [2, 1, 2, 2, 1, 1]])
    expected = [[0, 1, 2, 0, 0, 1], [0, 1, 2, 3, 4, 5], [0, 0, 0, 1, 0, 1]]
    assert document_positions(segments_BT).tolist() == expected


def test_a_position_sees_its_document_up_to_itself():
    mask_TT = document_mask(torch.tensor([[7, 7, 8]]))[0, 0]
    assert mask_TT.tolist() == [[True, False, False], [True, True, False], [False, False, True]]


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("shape", sorted(SHAPES.keys() - {"bloom", "falcon_h1"}))
def test_a_packed_row_has_the_logits_of_each_document_alone(shape, attention):
    model = tiny_model(shape).eval()
    model.set_attn_implementation("eager" if shape == "gemma2" else attention)
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
    assert model.config._attn_implementation == CAUSAL_SDPA
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
