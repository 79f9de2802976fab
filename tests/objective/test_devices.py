"""On any device the objective equals that of a CPU: value and gradients, products, and the size of chunks."""

from dataclasses import replace

import pytest
import torch
from objective_cases import RULES, run, targets_for
from objective_reference import problem

from kdtrain.models.output_head import HeadPart
from kdtrain.objective.engine import matmul
from kdtrain.objective.engine.matmul import Products, wide_product
from kdtrain.objective.logits import chunk_logits, chunk_rows
from kdtrain.objective.targets import OnlineTargets, scalar

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
SHAPE = {"n": 96, "d": 64, "vocab": 300}


def on(p, device):
    head = replace(p.head, weight=p.head.weight.detach().to(device).requires_grad_())
    hidden = p.hidden.detach().to(device).requires_grad_()
    return replace(p, hidden=hidden, head=head, labels=p.labels.to(device), mask=p.mask.to(device))


def outcome(p, targets, device, rule, compile=False):
    """Compute loss, sums and gradients (of T too), and return them on the CPU in fp64."""
    p = on(p, device)
    t = torch.tensor(2.0, device=device, requires_grad=True)
    out = run(p, targets.to(device), t, rule, chunk=40, compile=compile)
    found = [out.loss, out.ce, out.kd, *torch.autograd.grad(out.loss, [p.hidden, p.head.weight, t])]
    return [each.detach().double().cpu() for each in found]


def assert_near(found, expected, bound, device="cpu"):
    # the gradient of T, the last, adds up terms near 1 of both signs, with dense targets to .03; in a GPU's order of
    # summation fp32 leaves 6e-7 of them
    floors = [1e-3] * (len(found) - 1) + [0.1 if device == "cuda" else 1e-3]
    for ours, theirs, floor in zip(found, expected, floors, strict=True):
        assert (ours - theirs).norm() <= bound * theirs.norm().clamp(min=floor)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("kind, bound", [(torch.float32, 1e-5), (torch.bfloat16, 2e-2)])
@pytest.mark.parametrize("rule", RULES)
def test_value_and_gradients_are_those_of_fp64_on_a_cpu(rule, kind, bound, device):
    p64 = problem(**SHAPE).cast(kind).cast(torch.float64)
    expected = outcome(p64, targets_for(p64, rule), "cpu", rule)
    found = outcome(p64.cast(kind), targets_for(p64, rule, torch.float32), device, rule)
    assert_near(found, expected, bound, device)


@pytest.mark.gpu
@pytest.mark.parametrize("rule", ["dense", "ghost", "sampled"])
def test_compiled_on_a_gpu_they_are_the_same(rule):
    p64 = problem(**SHAPE)
    expected = outcome(p64, targets_for(p64, rule), "cpu", rule)
    found = outcome(p64.cast(torch.float32), targets_for(p64, rule, torch.float32), "cuda", rule, compile=True)
    assert_near(found, expected, 1e-5, "cuda")


@pytest.mark.gpu
@pytest.mark.parametrize("rule", ["dense", "ghost", "sampled", "control-variate"])
@pytest.mark.parametrize("temperature", [2.0, torch.tensor(2.0)])
def test_forward_and_backward_never_wait_for_a_gpu(rule, temperature):
    p = on(problem(**SHAPE).cast(torch.bfloat16), "cuda")
    targets = targets_for(problem(**SHAPE), rule, torch.float32).to("cuda")
    temperature = temperature.cuda() if torch.is_tensor(temperature) else temperature
    run(p, targets, temperature, rule).loss.backward()  # the first time knots are copied and products tried
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        run(p, targets, temperature, rule).loss.backward()
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("device", DEVICES)
def test_a_number_filled_in_equals_one_that_is_copied(device):
    for value in (1 / 3, 8192.0, torch.tensor(1 / 3), 7):
        for dtype in (None, torch.float64, torch.float32):
            expected = torch.as_tensor(value, dtype=dtype)
            found = scalar(value, torch.device(device), dtype)
            assert found.device.type == device and torch.equal(found.cpu(), expected) and found.dtype == expected.dtype


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("kind", [torch.bfloat16, torch.float16, torch.float32])
def test_products_of_a_teachers_head_are_never_rounded_below_fp32(kind, device):
    g = torch.Generator().manual_seed(0)
    hidden, weight = (torch.randn(n, 64, generator=g).to(device, kind) for n in (96, 300))
    exact = hidden.double() @ weight.double().T
    head = HeadPart(weight=weight)
    online = OnlineTargets(hidden, torch.zeros(96, dtype=torch.int64, device=device), head, 300)
    for found in (wide_product(hidden, weight), chunk_logits(hidden, head, 300)):
        assert found.dtype == torch.float32 and ((found.double() - exact).norm() / exact.norm()) < 5e-7
    assert torch.allclose(online.resolved().logprobs.double(), exact.log_softmax(-1), atol=1e-4)


@pytest.mark.gpu
@pytest.mark.parametrize("adds", [True, False])
def test_the_weights_gradient_adds_up_in_fp32_in_place_or_in_strips(adds, monkeypatch):
    if adds and not matmul._adds_in_place(torch.bfloat16, torch.device("cuda")):
        pytest.skip("this torch adds no product to an fp32 matrix")
    monkeypatch.setattr(matmul, "_adds_in_place", lambda kind, device: adds)
    monkeypatch.setattr(matmul, "_STRIP", 128)
    g = torch.Generator().manual_seed(0)
    hidden, weight, dz = (torch.randn(n, m, generator=g).cuda() for n, m in ((96, 64), (300, 64), (96, 300)))
    made = Products(hidden.bfloat16(), weight)
    total = torch.ones(300, 64, device="cuda")
    for _ in range(3):
        made.gradients(dz.bfloat16(), hidden.bfloat16(), None, total)
    expected = 1 + 3 * dz.bfloat16().double().T @ hidden.bfloat16().double()
    assert ((total.double() - expected).norm() / expected.norm()) < 1e-6


def test_a_chunk_is_larger_on_a_gpu_and_does_not_depend_on_the_number_of_rows():
    assert chunk_rows(128_256, 4096, torch.bfloat16) == 256
    assert chunk_rows(128_256, 4096, torch.bfloat16, "cuda") == 2048
    assert chunk_rows(262_144, 4096, torch.bfloat16, "cuda") == 1024
    assert chunk_rows(2048, 256, torch.bfloat16, "cuda") == chunk_rows(2048, 256, torch.bfloat16) == 2048
    assert chunk_rows(128_256, 4096, torch.float64, "cuda") == 1024
