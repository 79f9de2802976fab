"""Linear layers that switch: nothing of the model but its products changes, and no graph is compiled twice."""

from types import SimpleNamespace

import pytest
import torch

from kdtrain.config.sections import LoraConfig
from kdtrain.models.adapters import adapter_parts, restrict
from kdtrain.models.head import split
from kdtrain.precision.backends import Torchao, capability
from kdtrain.precision.emulated import FormatRecipe
from kdtrain.precision.linear import Emulated, convert
from kdtrain.precision.modes import Switch
from kdtrain.testing import tiny_model

FP8 = FormatRecipe("tensorwise", gradient="e5m2")
MXFP8, MXFP4 = FormatRecipe("mx"), FormatRecipe("mx", "e2m1", "e2m1")
BACKENDS = {
    "emulated fp8": Emulated(FP8),
    "torchao fp8": Torchao(FP8),
    "torchao rowwise": Torchao(FormatRecipe("rowwise")),
    "mxfp8": Emulated(MXFP8),
    "mxfp4": Emulated(MXFP4),
}
if not capability("fp8", "torchao", torch.device("cpu"), FormatRecipe("rowwise")).works:
    del BACKENDS["torchao rowwise"]  # torch 2.11 multiplies with scaled rows on a GPU only; a run there is told so
POSITIONS = ("high", "quantized", "high-forward")


def switchable(shape: str = "llama", backend=BACKENDS["mxfp4"], layers: int = 2, **options):
    model = tiny_model(shape, **({"n_layer": layers} if shape == "gpt2" else {"num_hidden_layers": layers}))
    student, switch = split(model), Switch()
    done = convert(model, switch, backend, head=model.get_output_embeddings(), **options)
    return student, switch, done


def tokens(batch: int = 3, time: int = 20) -> torch.Tensor:
    return torch.randint(0, 300, (batch, time), generator=torch.Generator().manual_seed(5))


def gradients(student, forward=None, dtype: torch.dtype | None = torch.bfloat16) -> dict[str, torch.Tensor]:
    student.zero_grad(set_to_none=True)
    with torch.autocast("cpu", dtype, enabled=dtype is not None):
        hidden = (forward or student)(tokens())
    hidden.float().square().mean().backward()
    return {name: each.grad.clone() for name, each in student.named_parameters() if each.grad is not None}


def far(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> float:
    """Compute the relative distance of all gradients."""
    difference = sum(float((one[name] - other[name]).square().sum()) for name in one)
    return (difference / sum(float(each.square().sum()) for each in other.values())) ** 0.5


@pytest.mark.parametrize("shape", ["llama", "gpt2"])
def test_converting_touches_no_parameter_no_name_and_no_module(shape):
    model = tiny_model(shape)
    before = [(name, id(module)) for name, module in model.named_modules()]
    parameters, keys = [id(each) for each in model.parameters()], list(model.state_dict())
    convert(model, Switch(), BACKENDS["mxfp4"], head=model.get_output_embeddings())
    assert [(name, id(module)) for name, module in model.named_modules()] == before
    assert ([id(each) for each in model.parameters()], list(model.state_dict())) == (parameters, keys)


@pytest.mark.parametrize("shape", ["llama", "gpt2", "qwen3"])
def test_the_high_position_is_the_unconverted_model_bit_by_bit(shape):
    plain = gradients(split(tiny_model(shape)))
    student, _, done = switchable(shape)
    now = gradients(student)
    assert done.quantized and all(torch.equal(now[name], plain[name]) for name in plain)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("shape", ["llama", "gpt2"])
def test_each_back_end_gives_the_gradients_of_bf16_to_the_precision_of_its_format(shape, backend):
    student, switch, done = switchable(shape, BACKENDS[backend])

    def weights() -> dict[str, torch.Tensor]:
        found = gradients(student)
        return {name: found[f"model.{name}.weight"] for name in done.quantized}

    high = weights()
    least, most = (0.1, 0.5) if backend == "mxfp4" else (0.02, 0.15)
    for position in ("quantized", "high-forward"):
        with switch.at(position):
            assert least < far(weights(), high) < most
    assert switch.position == "high"


def test_forward_only_leaves_the_forward_high_and_the_backward_quantised():
    student, switch, _ = switchable()
    with torch.autocast("cpu", torch.bfloat16):
        high = student(tokens())
        with switch.at("high-forward"):
            assert torch.equal(student(tokens()), high)
        with switch.at("quantized"):
            assert not torch.equal(student(tokens()), high)


@pytest.mark.parametrize("position", ["high", "high-forward"])
@pytest.mark.parametrize("fallback", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("backend", BACKENDS)
def test_every_mode_keeps_its_gradients_under_either_fallback_in_either_scope(backend, fallback, position):
    student, switch, done = switchable(backend=BACKENDS[backend])
    exact = gradients(split(tiny_model()), dtype=None)
    most = 0.5 if backend == "mxfp4" else 0.15
    for each in ("quantized", position):
        with switch.at(each):
            found = gradients(student, dtype=fallback)
        assert done.quantized and far(found, exact) < most  # a NaN is not below anything


def test_emulated_and_torchaos_fp8_agree_to_rounding():
    x, weight = torch.randn(64, 48, requires_grad=True), torch.randn(32, 48, requires_grad=True)
    results = []
    for product in (Torchao(FP8).product(torch.nn.Identity(), 48, 32), BACKENDS["emulated fp8"]):
        y = product(x, weight, torch.float32, False)
        results.append([y, *torch.autograd.grad(y.square().sum(), (x, weight))])
    for ours, theirs in zip(results[1], results[0], strict=True):
        assert float((ours - theirs).detach().norm() / theirs.detach().norm()) < 2e-3


def test_all_three_products_are_quantised_along_the_axis_they_sum_over():
    x, weight = torch.randn(40, 64, requires_grad=True), torch.randn(33, 64, requires_grad=True)
    with torch.no_grad():
        x[:, 5], weight[7] = x[:, 5] * 100, weight[7] * 100
    y = Emulated(MXFP4)(x, weight, torch.float32, False)
    dx, dw = torch.autograd.grad(y.square().sum(), (x, weight))
    from kdtrain.precision.emulated import ELEMENTS, quantize_mx

    def q(values, axis):
        return quantize_mx(values.detach(), ELEMENTS["e2m1"], axis)

    gradient = 2 * y.detach()
    torch.testing.assert_close(y, q(x, 1) @ q(weight, 1).T)
    torch.testing.assert_close(dx, q(gradient, 1) @ q(weight, 0))
    torch.testing.assert_close(dw, q(gradient, 0).T @ q(x, 0))


def test_the_output_head_stays_high_and_so_do_the_ends_on_request():
    student, _, done = switchable("qwen3", skip_first=1)
    assert all(".layers.1." in name for name in done.quantized) and len(done.quantized) == 7
    assert set(done.left.values()) == {"at the ends"} and len(done.left) == 7
    assert type(student.model.lm_head) is torch.nn.Linear
    assert str(done) == "7 linear layers quantised, 7 left high (at the ends)"
    assert switchable("qwen3", skip_first=1, skip_last=1)[2].quantized == []


def test_shapes_that_do_not_fit_stay_high_and_are_counted():
    model = tiny_model("llama", intermediate_size=72)
    done = convert(model, Switch(), BACKENDS["torchao fp8"], head=model.get_output_embeddings())
    assert len(done.quantized) == 8 and len(done.left) == 6
    assert str(done) == "8 linear layers quantised, 6 left high (its sizes are not multiples of 16)"


def test_a_token_count_that_is_not_a_multiple_of_a_tile_trains():
    for backend in BACKENDS.values():
        product = backend.product(torch.nn.Identity(), 48, 32)
        x, weight = torch.randn(17, 48, requires_grad=True), torch.randn(32, 48, requires_grad=True)
        product(x, weight, torch.bfloat16, False).float().square().sum().backward()
        assert torch.isfinite(weight.grad).all() and weight.grad.shape == weight.shape


def test_stochastic_gradients_follow_the_seed():
    recipe = FormatRecipe("mx", "e2m1", "e2m1", stochastic=True)
    student, switch, _ = switchable(backend=Emulated(recipe))
    found = []
    with switch.at("quantized"):
        for seed in (1, 1, 2):
            torch.manual_seed(seed)
            found.append(gradients(student))
    assert far(found[0], found[1]) == 0 < far(found[0], found[2])


@pytest.mark.parametrize("backend", BACKENDS)
def test_no_switch_recompiles_anything_or_touches_parameters_or_moments(backend):
    torch.compiler.reset()
    whole = BACKENDS[backend]
    last = SimpleNamespace(product=whole.product, refuses=lambda inputs, *_: None if inputs == 64 else "not this one")
    student, switch, done = switchable("llama", last, layers=1)
    assert done.quantized == ["model.layers.0.mlp.down_proj"]  # each further one takes seconds to trace
    # inductor's results are compared in tests/training/test_compiled_modes.py
    forward = torch.compile(student.forward, dynamic=False, fullgraph=True, backend="aot_eager")
    optimizer = torch.optim.AdamW(student.parameters(), fused=True)
    gradients(student, forward, dtype=None)
    optimizer.step()
    for position in POSITIONS:
        with switch.at(position):
            gradients(student, forward, dtype=None)
    with torch.compiler.set_stance("fail_on_recompile"):
        for number in range(9):
            before = state_of(student, optimizer)
            switch.position = POSITIONS[number % len(POSITIONS)]
            after = state_of(student, optimizer)
            assert before.keys() == after.keys() and all(torch.equal(before[key], after[key]) for key in before)
            compiled = gradients(student, forward, dtype=None)
            assert far(compiled, gradients(student, dtype=None)) < 0.01
            optimizer.step()


def state_of(student, optimizer) -> dict[str, torch.Tensor]:
    state = {name: each.detach().clone() for name, each in student.state_dict().items()}
    for name, parameter in student.named_parameters():
        state |= {f"{name}.{key}": value.clone() for key, value in optimizer.state[parameter].items()}
    return state


@pytest.mark.parametrize("name", BACKENDS)
def test_a_constant_weight_that_is_quantised_once_gives_the_same_bits_in_one_graph(name):
    layer, x, g = torch.nn.Linear(64, 48, bias=False).requires_grad_(False), torch.randn(32, 64), torch.randn(32, 48)
    product = BACKENDS[name].product(layer, 64, 48)
    torch.compiler.reset()
    held = product.of_constant(layer.weight)
    forward = torch.compile(
        lambda x_ND: held(x_ND, layer.weight, torch.float32, False), backend="eager", fullgraph=True
    )
    forward(x.clone().requires_grad_()).sum().backward()
    for dtype in (torch.float32, torch.bfloat16):
        for high_forward in (False, True):
            found = []
            for each in (product, product.of_constant(layer.weight)):
                inputs = x.clone().requires_grad_()
                result = each(inputs, layer.weight, dtype, high_forward)
                result.float().backward(g)
                found.append((result, inputs.grad))
            assert all(torch.equal(one, other) for one, other in zip(*found, strict=True))


def test_adapters_stay_high_and_frozen_weights_are_quantised_once():
    pytest.importorskip("peft")
    student, switch = split(tiny_model("llama")), Switch("quantized")
    restrict(student, LoraConfig(lora_rank=4), freeze_head=False, seed=0)
    stays = {"head": student.model.get_output_embeddings(), "adapters": adapter_parts(student.model)}
    done = convert(student.model, switch, Emulated(MXFP8), **stays, hold=True)
    assert all(name.endswith(".base_layer") for name in done.quantized)
    assert {*done.left.values()} == {"an adapter"} and all(".lora_" in name for name in done.left)
    layers = [student.model.get_submodule(name) for name in done.quantized]
    assert all(layer.product.held is not None for layer in layers)
    held = gradients(student)
    for layer in layers:
        layer.product = Emulated(MXFP8)
    assert all(torch.equal(each, held[name]) for name, each in gradients(student).items())
