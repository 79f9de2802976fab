"""The products of an output head, on this processor and on simulated others.

What the code asks of a processor is answered for it, and the product that only some have is stood in for by a slow one
that rounds alike: so every branch is tested on every machine, and none of it depends on the one at hand.
"""

import contextlib
from unittest import mock

import pytest
import torch

from kdtrain.models.output_head import HeadPart
from kdtrain.objective import logits
from kdtrain.objective.engine import matmul
from kdtrain.objective.engine.matmul import Products
from kdtrain.objective.loss import distillation_loss

MACHINES = {
    "AVX2": {"bf16": False, "amx": False},
    "AVX512": {"bf16": True, "amx": False},
    "AMX": {"bf16": True, "amx": True},
}
"""What oneDNN and PyTorch report about a processor."""
DEVICES = [
    "cpu",
    pytest.param("cuda", marks=[pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")]),
]
KINDS = [
    (torch.float64, torch.float64),
    (torch.float32, torch.float32),
    (torch.bfloat16, torch.bfloat16),
    (torch.bfloat16, torch.float32),
    (torch.float16, torch.float32),
]


def tensors(kind, weight_kind, device, rows=96, width=64, vocab=300):
    g = torch.Generator().manual_seed(0)
    hidden, weight = torch.randn(rows, width, generator=g), torch.randn(vocab, width, generator=g)
    dz = torch.softmax(torch.randn(rows, vocab, generator=g), -1) - torch.eye(rows, vocab)
    return (
        hidden.to(device, kind),
        weight.to(device, weight_kind),
        dz.to(device, torch.promote_types(kind, torch.float32)),
    )


def relative(got, want):
    return ((got.double() - want).norm() / want.norm()).item()


def play(monkeypatch, bf16, amx):
    """Answer for a processor, and multiply as it does."""
    monkeypatch.setattr(matmul, "_has_bf16", lambda: bf16)
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: amx)
    monkeypatch.setattr(matmul, "_onednn_is_exact", matmul._onednn_is_exact.__wrapped__)
    may_round, exact = [False], torch.mm

    @contextlib.contextmanager
    def onednn(wanted):
        may_round.append(wanted)
        yield
        may_round.pop()

    def mm(a, b, **rest):
        if amx and may_round[-1] and a.dtype == torch.float32:
            a, b = a.bfloat16().float(), b.bfloat16().float()
        return exact(a, b, **rest)

    monkeypatch.setattr(matmul, "_onednn", onednn)
    monkeypatch.setattr(torch, "mm", mm)


@pytest.fixture(params=["as it is", *MACHINES])
def machine(request, monkeypatch):
    """Name this machine, or simulate another."""
    if request.param in MACHINES:
        play(monkeypatch, **MACHINES[request.param])
    return request.param


def weights_multiplied(kind, weight, device, machine):
    """Return the weights that a product may use: the exact one, or one rounded to the dtype of the hidden states."""
    if device == "cuda":
        return [weight.to(kind)]
    if kind != torch.bfloat16:
        return [weight]
    if machine not in MACHINES:
        return [weight, weight.to(kind)]
    return [weight.to(kind) if MACHINES[machine]["amx"] else weight]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("kind,weight_kind", KINDS)
def test_logits_are_never_rounded_below_fp32(kind, weight_kind, device, machine):
    hidden, weight, _ = tensors(kind, weight_kind, device)
    made = Products(hidden, weight)
    logits = made.logits(hidden, torch.empty(96, 300, dtype=made.dtype, device=device))
    assert logits.dtype == torch.promote_types(kind, torch.float32)
    wanted = [hidden.double() @ each.double().T for each in weights_multiplied(kind, weight, device, machine)]
    assert min(relative(logits, each) for each in wanted) < (1e-14 if kind == torch.float64 else 5e-7)


@pytest.mark.parametrize("name", MACHINES)
def test_oneDNN_multiplies_bf16_where_it_knows_it_and_fp32_where_it_rounds_nothing(name, monkeypatch):
    play(monkeypatch, **MACHINES[name])
    hidden, weight, _ = tensors(torch.bfloat16, torch.bfloat16, "cpu")
    assert Products(hidden, weight).onednn == (name != "AVX2")
    assert Products(hidden.float(), weight).onednn == (name == "AVX512")


@pytest.mark.usefixtures("machine")
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("kind,weight_kind", KINDS)
def test_gradients_err_only_by_the_rounding_of_the_factors(kind, weight_kind, device):
    hidden, weight, dz = tensors(kind, weight_kind, device)
    made = Products(hidden, weight)
    into_hidden = torch.empty_like(hidden)
    into_weight = torch.full((300, 64), torch.nan, dtype=made.dtype, device=device)
    for first in (True, False):
        made.gradients(dz.to(made.gradient_dtype), hidden, into_hidden, into_weight, first)
    bound = {torch.float64: 1e-14, torch.float32: 1e-6}.get(kind, 2**-8)
    assert relative(into_hidden, dz.double() @ weight.double()) < bound
    assert relative(into_weight, 2 * dz.double().T @ hidden.double()) < max(
        bound, 1e-6 if made.dtype != torch.float64 else 0
    )


@pytest.mark.usefixtures("machine")
@pytest.mark.parametrize("device", DEVICES)
def test_a_part_of_a_hidden_gradient_that_ranks_add_up_is_not_rounded_before(device):
    hidden, weight, dz = tensors(torch.bfloat16, torch.bfloat16, device)
    made, into = Products(hidden, weight), torch.empty(96, 64, device=device)
    dz = dz.to(made.gradient_dtype)
    made.gradients(dz.bfloat16().to(dz.dtype), hidden, into, None)
    assert relative(into, dz.bfloat16().double() @ weight.double()) < 1e-6


def test_the_setting_for_oneDNN_is_restored_even_after_an_error():
    settings = torch.backends.mkldnn.matmul
    before = settings.fp32_precision
    hidden, weight, _ = tensors(torch.float32, torch.float32, "cpu")
    with pytest.raises(RuntimeError):
        Products(hidden, weight).logits(hidden[:, :-1], torch.empty(96, 300))
    assert settings.fp32_precision == before
    torch.get_float32_matmul_precision()


def test_a_product_that_rounds_its_inputs_is_detected(monkeypatch):
    monkeypatch.setattr(matmul, "_has_bf16", lambda: True)
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: False)
    exact = torch.mm
    monkeypatch.setattr(torch, "mm", lambda a, b: exact(a.bfloat16().float(), b.bfloat16().float()))
    assert not matmul._onednn_is_exact.__wrapped__()


def test_compiled_roundings_change_nothing():
    hidden, weight, dz = tensors(torch.bfloat16, torch.bfloat16, "cpu")
    found = []
    for compile in (False, True):
        made = Products(hidden, weight, compile)
        into_hidden, into_weight = torch.empty_like(hidden), torch.zeros(300, 64)
        logits = made.logits(hidden, torch.empty(96, 300))
        made.gradients(dz.to(made.gradient_dtype), hidden, into_hidden, into_weight)
        found.append([logits, into_hidden, into_weight])
    for plain, compiled in zip(*found, strict=True):
        assert torch.equal(plain, compiled)


@pytest.mark.parametrize("rows", [70, 64, 20], ids=["a part of four chunks left", "four chunks twice", "fewer"])
def test_chunks_that_share_a_product_of_dweight_give_the_gradients_of_chunks_alone(monkeypatch, rows):
    """As on a GPU; there one product for four chunks reads and writes the fp32 dWeight a quarter as often."""
    play(monkeypatch, **MACHINES["AVX512"])
    g = torch.Generator().manual_seed(0)
    hidden, weight = torch.randn(rows, 16, generator=g).bfloat16(), torch.randn(300, 16, generator=g)
    labels, mask = torch.randint(0, 290, (rows,), generator=g), torch.rand(rows, generator=g) < 0.8
    products, into_weight = [], Products._into_weight

    def counted(self, dz_RB, *rest):
        products.append(len(dz_RB))
        into_weight(self, dz_RB, *rest)

    monkeypatch.setattr(Products, "_into_weight", counted)

    def gradients(chunks):
        monkeypatch.setitem(logits.WEIGHT_CHUNKS, "cpu", chunks)
        products.clear()
        h, w = hidden.clone().requires_grad_(), weight.clone().requires_grad_()
        head = HeadPart(w)
        options = {"temperature": 1.0, "alpha": 0.0, "vocab_size": 290, "normalizer": 10.0, "chunk": 8}
        distillation_loss(h, head, labels, mask, None, **options).loss.backward()
        return h.grad, w.grad, list(products)

    alone_h, alone_w, each = gradients(1)
    shared_h, shared_w, four = gradients(4)
    assert each == [8] * (rows // 8) + [rows % 8] * (rows % 8 > 0)
    assert four == [32] * (rows // 32) + [rows % 32] * (rows % 32 > 0)
    assert torch.equal(alone_h, shared_h)
    assert relative(shared_w, alone_w.double()) < 1e-2 and not shared_w[290:].any()


def test_the_probe_of_a_product_allocates_on_the_device_of_the_product():
    """Memory on another one would be a context there, and no answer where that one is full."""
    meta = torch.device("meta")
    asked = []
    noting = mock.patch.object(matmul, "_add_product", lambda *all: asked.append({each.device for each in all}))
    with noting, pytest.raises(RuntimeError):  # a device without numbers has no answer
        matmul._adds_in_place(torch.bfloat16, meta)
    assert asked == [{meta}]
