"""The low-precision formats that a machine supports, and what a run gets instead of others."""

import subprocess
import sys

import pytest
import torch

from kdtrain.errors import UsageError
from kdtrain.precision import backends
from kdtrain.precision.backends import Capability, capabilities, capability, choose, make_recipe
from kdtrain.precision.linear import Emulated

CPU = torch.device("cpu")


def recipe(mode: str = "fp8", scaling: str = "tensorwise", form: str | None = None, stochastic: bool = False):
    return make_recipe(mode, scaling, form, "max", stochastic)


@pytest.fixture
def real_torchao(monkeypatch: pytest.MonkeyPatch) -> None:
    def pretended(mode: str, backend: str, device: torch.device, recipe: object) -> Capability:
        return Capability(mode, backend, True, backend == "torchao", None)

    monkeypatch.setattr(backends, "capability", pretended)


def test_a_cpu_emulates_everything_and_reports_why_nothing_is_real():
    table = {(each.mode, each.backend): each for each in capabilities(CPU)}
    assert set(table) == {
        *(("fp8", backend) for backend in ("torchao", "transformer-engine", "emulated")),
        ("mxfp8", "emulated"),
        ("mxfp4", "emulated"),
    }
    assert not any(each.real for each in table.values()) and all(each.reason for each in table.values())
    assert str(table["fp8", "torchao"]) == "emulated: no CPU instruction multiplies fp8"
    assert str(table["fp8", "transformer-engine"]) == "no: TransformerEngine runs on CUDA devices only"
    assert not capability("mxfp4", "torchao", CPU).works


def test_a_failing_library_is_a_reason_and_not_an_error(monkeypatch):
    class Broken:
        def find_spec(self, name, path=None, target=None):
            if name.startswith("transformer_engine"):
                raise RuntimeError("no core\nfound")

    monkeypatch.setattr(sys, "meta_path", [Broken(), *sys.meta_path])
    assert backends.why_not_transformer_engine(torch.device("cuda")) == (
        "transformer_engine cannot be imported: RuntimeError: no core found"
    )


def test_importing_torchao_prints_nothing():
    asked = "import torch; from kdtrain.precision.backends import capabilities; capabilities(torch.device('cpu'))"
    done = subprocess.run([sys.executable, "-c", asked], capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_without_torchao_fp8_is_emulated_and_the_reason_is_logged(monkeypatch):
    class Without:
        def find_spec(self, name, path=None, target=None):
            if name.split(".")[0] == "torchao":
                raise ModuleNotFoundError("No module named 'torchao'")

    for name in [each for each in sys.modules if each.split(".")[0] == "torchao"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setattr(sys, "meta_path", [Without(), *sys.meta_path])
    why = "torchao cannot be imported: ModuleNotFoundError: No module named 'torchao'"
    assert backends.why_not_torchao(torch.device("cuda")) == why
    assert choose("fp8", "auto", recipe(), "tensorwise", CPU).line.startswith("fp8, emulated (")
    assert choose("fp8", "torchao", recipe(), "tensorwise", CPU).startswith("torchao: torchao cannot be imported")


def test_auto_emulates_where_nothing_is_real_and_a_named_back_end_is_taken_although_it_is_not_faster():
    choice = choose("fp8", "auto", recipe(), "tensorwise", CPU)
    assert (choice.name, choice.real) == ("emulated", False) and isinstance(choice.backend, Emulated)
    assert choice.line.startswith("fp8, emulated (torchao: no CPU instruction multiplies fp8")
    choice = choose("fp8", "torchao", recipe(), "tensorwise", CPU)
    assert (choice.name, choice.line) == ("torchao", "fp8 by torchao, not faster here")
    missing = "transformer-engine: TransformerEngine runs on CUDA devices only"
    assert choose("fp8", "transformer-engine", recipe(), "tensorwise", CPU) == missing


def test_auto_takes_a_real_back_end_that_supports_the_recipe(real_torchao):
    choice = choose("fp8", "auto", recipe(), "tensorwise", CPU)
    assert (choice.name, choice.real, choice.line) == ("torchao", True, "fp8 by torchao, real")
    for mode, options in (("fp8", {"scaling": "blockwise"}), ("fp8", {"form": "e5m2"}), ("mxfp8", {})):
        scaling = options.get("scaling", "tensorwise")
        assert choose(mode, "auto", recipe(mode, **options), scaling, CPU).name == "emulated"


@pytest.mark.parametrize(
    "backend, mode, options, named",
    [
        ("torchao", "fp8", {"scaling": "blockwise"}, "--fp8-recipe blockwise"),
        ("transformer-engine", "fp8", {"scaling": "rowwise"}, "--fp8-recipe rowwise"),
        ("transformer-engine", "fp8", {"form": "e5m2"}, "--fp8-format hybrid"),
        ("torchao", "mxfp4", {}, "emulated everywhere"),
        ("torchao", "fp8", {"stochastic": True}, "stochastically"),
    ],
)
def test_an_unsupported_recipe_is_refused_with_what_to_do(backend, mode, options, named):
    scaling = options.get("scaling", "tensorwise")
    with pytest.raises(UsageError, match=named):
        choose(mode, backend, recipe(mode, **options), scaling, CPU)


@pytest.mark.parametrize(
    "mode, scaling, form, expected",
    [
        ("fp8", "tensorwise", None, ("tensorwise", "e4m3", "e5m2")),
        ("fp8", "rowwise", None, ("rowwise", "e4m3", "e4m3")),
        ("fp8", "blockwise", None, ("blockwise", "e4m3", "e4m3")),
        ("fp8", "tensorwise", "e5m2", ("tensorwise", "e5m2", "e5m2")),
        ("mxfp8", "tensorwise", None, ("mx", "e4m3", "e4m3")),
        ("mxfp8", "tensorwise", "hybrid", ("mx", "e4m3", "e5m2")),
        ("mxfp4", "tensorwise", None, ("mx", "e2m1", "e2m1")),
    ],
)
def test_a_mode_its_scaling_and_its_format_make_a_recipe(mode, scaling, form, expected):
    made = recipe(mode, scaling, form)
    assert (made.scaling, made.forward, made.gradient) == expected


@pytest.mark.gpu
@pytest.mark.parametrize("backend", ["torchao", "transformer-engine"])
def test_real_fp8_is_near_bf16_on_a_gpu_that_has_it(backend):
    device = torch.device("cuda")
    found = capability("fp8", backend, device)
    if not found.works:
        pytest.skip(str(found))
    torch.manual_seed(0)
    layer = torch.nn.Linear(256, 512, bias=False, device=device)
    x = torch.randn(64, 256, device=device, requires_grad=True)
    product = backends.BACKENDS.get(backend).make(recipe()).product(layer, 256, 512)
    results = []
    for y in (product(x, layer.weight, torch.bfloat16, False), x.bfloat16() @ layer.weight.bfloat16().T):
        results.append([y, *torch.autograd.grad(y.float().square().sum(), (x, layer.weight))])
    for quantized, high in zip(*results, strict=True):
        assert 1e-3 < float((quantized - high).float().norm() / high.float().norm()) < 0.1
