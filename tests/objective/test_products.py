import pytest
import torch

from kdtrain.objective import brgemm, products
from kdtrain.objective.products import Products

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


@pytest.fixture(params=["as it is", "without its kernel", "without bf16", "without a fast product"])
def machine(request, monkeypatch):
    """This machine, and what it would be with less."""
    if request.param != "as it is":
        monkeypatch.setattr(brgemm, "usable", lambda: False)
    if request.param in ("without bf16", "without a fast product"):
        monkeypatch.setattr(products, "_onednn_is_exact", lambda: False)
    if request.param == "without bf16":
        monkeypatch.setattr(products, "_has_bf16", lambda: False)


@pytest.mark.usefixtures("machine")
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("kind,weight_kind", KINDS)
def test_logits_are_never_rounded_below_fp32(kind, weight_kind, device):
    hidden, weight, _ = tensors(kind, weight_kind, device)
    made = Products(hidden, weight)
    logits = made.logits(hidden, torch.empty(96, 300, dtype=made.dtype, device=device))
    rounds = device == "cuda" or torch.cpu._is_amx_tile_supported() or made.packed is not None
    weight = weight.to(kind) if rounds else weight
    assert logits.dtype == torch.promote_types(kind, torch.float32)
    assert relative(logits, hidden.double() @ weight.double().T) < (1e-14 if kind == torch.float64 else 5e-7)


@pytest.mark.usefixtures("machine")
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("kind,weight_kind", KINDS)
def test_gradients_cost_only_the_rounding_of_what_is_multiplied(kind, weight_kind, device):
    hidden, weight, dz = tensors(kind, weight_kind, device)
    made = Products(hidden, weight)
    into_hidden = torch.empty_like(hidden)
    into_weight = torch.full((300, 64), torch.nan, dtype=made.dtype, device=device)
    for first in (True, False):
        made.gradients(dz, hidden, into_hidden, into_weight, first)
    bound = {torch.float64: 1e-14, torch.float32: 1e-6}.get(kind, 2**-8)
    assert relative(into_hidden, dz.double() @ weight.double()) < bound
    assert relative(into_weight, 2 * dz.double().T @ hidden.double()) < max(
        bound, 1e-6 if made.dtype != torch.float64 else 0
    )


def test_the_setting_that_oneDNN_needs_is_put_back_even_after_an_error():
    settings = torch.backends.mkldnn.matmul
    before = settings.fp32_precision
    hidden, weight, _ = tensors(torch.float32, torch.float32, "cpu")
    with pytest.raises(RuntimeError):
        Products(hidden, weight).logits(hidden[:, :-1], torch.empty(96, 300))
    assert settings.fp32_precision == before
    torch.get_float32_matmul_precision()


def test_a_product_that_rounds_its_inputs_is_found_out(monkeypatch):
    monkeypatch.setattr(products, "_has_bf16", lambda: True)
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: False)
    exact = torch.mm
    monkeypatch.setattr(torch, "mm", lambda a, b: exact(a.bfloat16().float(), b.bfloat16().float()))
    assert not products._onednn_is_exact.__wrapped__()


def test_compiled_roundings_and_packings_change_nothing():
    hidden, weight, dz = tensors(torch.bfloat16, torch.bfloat16, "cpu")
    found = []
    for compile in (False, True):
        made = Products(hidden, weight, compile)
        into_hidden, into_weight = torch.empty_like(hidden), torch.zeros(300, 64)
        logits = made.logits(hidden, torch.empty(96, 300))
        made.gradients(dz, hidden, into_hidden, into_weight)
        found.append([logits, into_hidden, into_weight])
    for plain, compiled in zip(*found, strict=True):
        assert torch.equal(plain, compiled)


@pytest.mark.skipif(not brgemm.usable(), reason="this machine has no bf16 kernel with an fp32 result")
def test_the_kernel_gives_the_same_bits_on_any_number_of_threads():
    hidden, weight, _ = tensors(torch.bfloat16, torch.bfloat16, "cpu", vocab=1000)
    threads, found = torch.get_num_threads(), []
    try:
        for number in (1, 3):
            torch.set_num_threads(number)
            found.append(brgemm.PackedWeight(weight).logits(hidden, torch.empty(96, 1000)))
    finally:
        torch.set_num_threads(threads)
    assert torch.equal(*found)
    assert relative(found[0], hidden.double() @ weight.double().T) < 5e-7


def test_a_kernel_that_multiplies_wrong_is_not_used(monkeypatch):
    monkeypatch.setattr(brgemm.PackedWeight, "logits", lambda self, hidden, out: out.zero_())
    assert not brgemm.usable.__wrapped__()


@pytest.mark.skipif(not brgemm.usable(), reason="this machine has no bf16 kernel with an fp32 result")
def test_an_interruption_in_a_product_is_not_swallowed(monkeypatch):
    hidden, weight, _ = tensors(torch.bfloat16, torch.bfloat16, "cpu", vocab=1000)
    packed = brgemm.PackedWeight(weight)

    def interrupted(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(brgemm, "_kernel", lambda: interrupted)
    threads = torch.get_num_threads()
    try:
        for number in (1, 2):
            torch.set_num_threads(number)
            with pytest.raises(KeyboardInterrupt):
                packed.logits(hidden, torch.empty(96, 1000))
    finally:
        torch.set_num_threads(threads)
