"""Number formats on any device: emulation equals the CPU's, real products are near, and switching compiles nothing."""

import pytest
import torch

from kdtrain.models.head import split
from kdtrain.precision.backends import FormatChoice, choose, make_recipe
from kdtrain.precision.linear import convert
from kdtrain.precision.modes import Switch
from kdtrain.testing import tiny_model

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
MODES = [
    ("fp8", "emulated", "tensorwise"),
    ("fp8", "emulated", "rowwise"),
    ("fp8", "emulated", "blockwise"),
    ("fp8", "torchao", "tensorwise"),
    ("fp8", "torchao", "rowwise"),
    ("fp8", "transformer-engine", "tensorwise"),
    ("fp8", "transformer-engine", "blockwise"),
    ("mxfp8", "emulated", "tensorwise"),
    ("mxfp4", "emulated", "tensorwise"),
]


def backend_of(mode, name, scaling, device):
    found = choose(mode, name, make_recipe(mode, scaling, None, "max", False), scaling, torch.device(device))
    if not isinstance(found, FormatChoice):
        pytest.skip(found)
    return found.backend


def results(backend, device, dtype):
    """Compute the product and the gradients of its operands, and return them on the CPU."""
    g = torch.Generator().manual_seed(0)
    layer = torch.nn.Linear(256, 384, bias=False)
    with torch.no_grad():
        layer.weight.copy_(torch.randn(384, 256, generator=g))
    x, out = torch.randn(128, 256, generator=g), torch.randn(128, 384, generator=g)
    layer, x = layer.to(device), x.to(device).requires_grad_()
    y = backend.product(layer, 256, 384)(x, layer.weight, dtype, False)
    grads = torch.autograd.grad(y, (x, layer.weight), out.to(device, y.dtype))
    return [each.detach().double().cpu() for each in (y, *grads)]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("mode, name, scaling", MODES)
def test_every_format_multiplies_as_its_emulation_on_a_cpu_does(mode, name, scaling, device):
    backend = backend_of(mode, name, scaling, device)
    expected = results(backend_of(mode, "emulated", scaling, "cpu"), "cpu", torch.bfloat16)
    # a rounding to bf16 apart; real products may sum with fewer digits, and TransformerEngine's scales are its own
    bound = {"emulated": 0.01, "torchao": 0.05}.get(name, 0.1)
    for ours, theirs in zip(results(backend, device, torch.bfloat16), expected, strict=True):
        assert (ours - theirs).norm() / theirs.norm() < bound


@pytest.mark.gpu
@pytest.mark.parametrize("name, scaling", [(name, scaling) for mode, name, scaling in MODES if mode == "fp8"])
def test_switching_a_compiled_student_on_a_gpu_compiles_nothing_again(name, scaling):
    backend = backend_of("fp8", name, scaling, "cuda")
    torch.compiler.reset()
    config = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2}
    student, switch = split(tiny_model("llama", **config).cuda()), Switch()
    done = convert(student.model, switch, backend, head=student.model.get_output_embeddings())
    assert done.quantized
    forward = torch.compile(student.forward, dynamic=False)
    optimizer = torch.optim.AdamW(student.parameters(), fused=True)
    tokens_BT = torch.randint(0, 300, (4, 64), generator=torch.Generator().manual_seed(0)).cuda()

    def step():
        with torch.autocast("cuda", torch.bfloat16):
            hidden_BTD = forward(tokens_BT)
        hidden_BTD.float().square().mean().backward()
        norm = torch.nn.utils.clip_grad_norm_(student.parameters(), 1e9)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return norm

    for position in ("high", "quantized", "high", "quantized"):
        with switch.at(position):
            step()
    with torch.compiler.set_stance("fail_on_recompile"):
        for number in range(6):
            switch.position = "quantized" if number % 2 else "high"
            assert torch.isfinite(step())
