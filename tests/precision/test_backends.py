"""The fp8 libraries are called as documented, with a stand-in for the one that needs a GPU."""

import contextlib
import sys
import tomllib
import warnings
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
import torch
import torch.nn.functional as F

from kdtrain.precision import backends
from kdtrain.precision.backends import Torchao, TransformerEngine
from kdtrain.precision.emulated import FormatRecipe


class Linear(torch.nn.Linear):
    """A stand-in for TransformerEngine's, which refuses the same inputs."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        assert _calls and len(x) % 8 == 0 and x.shape[-1] % 16 == 0
        _calls[-1] |= {"tokens": len(x), "dtype": x.dtype}
        return F.linear(x.float(), self.weight).to(x.dtype)


_calls: list[dict] = []


def made(in_features, out_features, bias, params_dtype, device):
    return Linear(in_features, out_features, bias=bias, dtype=params_dtype, device=device)


@contextlib.contextmanager
def autocast(enabled, recipe):
    _calls.append({"enabled": enabled, "recipe": recipe})
    yield


@pytest.fixture
def transformer_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    """Install the parts of the module that kdtrain uses."""
    kinds = {
        name: lambda fp8_format, name=name: (name, fp8_format)
        for name in ("Float8CurrentScaling", "Float8BlockScaling")
    }
    recipes = SimpleNamespace(**kinds, Format=SimpleNamespace(E4M3="E4M3", HYBRID="HYBRID"))
    modules = {
        "transformer_engine": ModuleType("transformer_engine"),
        "transformer_engine.pytorch": SimpleNamespace(Linear=made, autocast=autocast),
        "transformer_engine.common": SimpleNamespace(recipe=recipes),
        "transformer_engine.common.recipe": recipes,
    }
    for name, module in modules.items():
        monkeypatch.setitem(sys.modules, name, module)
    _calls.clear()


@pytest.mark.parametrize(
    "recipe, expected, tokens",
    [
        (FormatRecipe("tensorwise", gradient="e5m2"), ("Float8CurrentScaling", "HYBRID"), 32),
        (FormatRecipe("blockwise"), ("Float8BlockScaling", "E4M3"), 128),
    ],
)
def test_transformer_engine_gets_its_recipe_tokens_that_fit_and_the_layers_own_weight(
    transformer_engine, recipe, expected, tokens
):
    layer = torch.nn.Linear(128, 256, bias=False)
    product = TransformerEngine(recipe).product(layer, 128, 256)
    x = torch.randn(17, 128, requires_grad=True)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of an autocast for a GPU that is not there
        y = product(x, layer.weight, torch.bfloat16, False)
    assert _calls == [{"enabled": True, "recipe": expected, "tokens": tokens, "dtype": torch.bfloat16}]
    torch.testing.assert_close(y, layer(x.bfloat16().float()).bfloat16())
    y.float().sum().backward()
    assert layer.weight.grad is not None and x.grad.shape == x.shape


def test_transformer_engine_follows_a_layer_that_is_given_another_parameter(transformer_engine):
    layer = torch.nn.Linear(128, 128, bias=False)
    product = TransformerEngine(FormatRecipe("tensorwise")).product(layer, 128, 128)
    layer.weight = torch.nn.Parameter(2 * layer.weight.detach())
    x = torch.randn(16, 128)
    torch.testing.assert_close(product(x, layer.weight, torch.float32, False), layer(x))


@pytest.mark.parametrize("lacks", ["autocast", "is_fp8_available"])
def test_a_transformer_engine_that_is_too_old_is_named_and_emulation_taken(transformer_engine, monkeypatch, lacks):
    te = sys.modules["transformer_engine.pytorch"]
    monkeypatch.setattr(te, "is_fp8_available", lambda return_reason: (True, ""), raising=False)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    gpu = torch.device("cuda")
    assert backends.why_not_transformer_engine(gpu) is None
    monkeypatch.delattr(te, lacks)
    why = f"this TransformerEngine has no {lacks}; install 2.9 or newer"
    assert backends.capability("fp8", "transformer-engine", gpu).reason == why
    requires = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]
    assert requires["optional-dependencies"]["te"] == ["transformer-engine[pytorch]>=2.9"]


def test_torchaos_scaled_rows_give_fp16_where_that_is_the_high_format():
    found = backends.capability("fp8", "torchao", torch.device("cpu"), FormatRecipe("rowwise"))
    if not found.works:
        pytest.skip(str(found))
    product = Torchao(FormatRecipe("rowwise")).product(torch.nn.Identity(), 64, 32)
    x, weight = torch.randn(32, 64, requires_grad=True), torch.randn(32, 64, requires_grad=True)
    y = product(x, weight, torch.float16, False)
    assert y.dtype == torch.float16 and float((y - x @ weight.T).detach().norm() / y.detach().norm()) < 0.1
    y.float().square().sum().backward()
    assert torch.isfinite(weight.grad).all() and weight.grad.dtype == torch.float32
