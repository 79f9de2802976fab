"""The Triton kernels against the passes that they replace, and what they move and compile to, all without a GPU.

The interpreter is chosen by the environment when Triton is first imported, so it has a process of its own. A GPU, if
there is one, is asked the same.
"""

import multiprocessing
import re
import sys
from concurrent.futures import ProcessPoolExecutor

import kernel_cases
import pytest
import torch

from kdtrain.objective.engine import kernels

pytest.importorskip("triton", reason="Triton is there for Linux only")

SIZES = [5, 1003, 4096, 10_007]
"""Less than a block, one with no round number, exactly one, and several."""
BETAS = [0.5, 1.0, 2.0]
TOLERANCE = {"interpreter": 1e-6, "cuda": 1e-5}
"""Of a gradient: a GPU's exponential is as exact as a product with log2(e) in fp32."""


@pytest.fixture(scope="module")
def interpreter():
    """Return a function that runs a case in a process where Triton interprets."""
    pool = ProcessPoolExecutor(1, multiprocessing.get_context("spawn"), kernel_cases.round_as_a_gpu_does)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRITON_INTERPRET", "1")
        pool.submit(int).result()  # starts the process
    with pool:
        yield lambda case, *given: pool.submit(case, "cpu", *given).result()


@pytest.fixture(params=["interpreter", pytest.param("cuda", marks=pytest.mark.gpu)])
def ask(request):
    if request.param == "interpreter":
        return request.getfixturevalue("interpreter")
    return lambda case, *given: case("cuda", *given)


@pytest.fixture
def tolerance(request):
    return TOLERANCE[request.node.callspec.params["ask"]]


@pytest.mark.parametrize("beta", BETAS)
@pytest.mark.parametrize("size", [*SIZES, 128_256])
def test_one_pass_gives_the_statistics_of_two(ask, size, beta):
    assert [each <= 1e-6 for each in ask(kernel_cases.stats_error, size, beta, True, True)] == [True] * 4


@pytest.mark.parametrize("distils, slopes", [(False, False), (False, True), (True, False)])
def test_unwanted_statistics_are_copies_of_the_mass(ask, distils, slopes):
    assert [each <= 1e-6 for each in ask(kernel_cases.stats_error, 1003, 2.0, distils, slopes)] == [True] * 4


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_logit_that_is_no_number_shows_in_its_row_and_in_no_other(ask, value):
    first, last, without = ask(kernel_cases.masses_with, value)
    assert first != first and last != last and without == 5000


@pytest.mark.parametrize("capped, heated", [(False, False), (False, True), (True, False), (True, True)])
@pytest.mark.parametrize("beta", BETAS)
@pytest.mark.parametrize("size", SIZES)
def test_the_gradient_is_that_of_the_compiled_pass_with_single_logits_set(ask, tolerance, size, beta, capped, heated):
    assert ask(kernel_cases.grad_error, size, 5, beta, capped, heated) <= tolerance


@pytest.mark.parametrize("singles", [0, 1, 128, 300])
def test_a_row_has_any_number_of_single_logits(ask, tolerance, singles):
    assert ask(kernel_cases.grad_error, 10_007, singles, 0.5, False, True) <= tolerance


@pytest.mark.parametrize("kind", [torch.bfloat16, torch.float16])
def test_a_narrow_gradient_is_the_wide_one_rounded_once(ask, kind):
    assert ask(kernel_cases.grad_is_rounded_once, 10_007, kind)


def test_where_the_temperature_is_known_to_be_1_the_gradient_has_the_same_bits(ask):
    assert ask(kernel_cases.grad_at_one_is_the_same, 10_007)


def test_the_gradient_may_overwrite_the_logits(ask):
    assert ask(kernel_cases.grad_in_place_is_the_same, 10_007)


@pytest.mark.parametrize("kind", [torch.bfloat16, torch.float32])
def test_nothing_is_written_beyond_the_vocabulary_or_to_the_logits(ask, kind):
    assert ask(kernel_cases.grad_leaves_alone, 10_007, kind) == (True, True)


@pytest.mark.parametrize("factor", [1.0, 0.37, 2.0**16])
@pytest.mark.parametrize("kind", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("size", [1, 10_007])
def test_a_gradient_is_scaled_in_place(ask, size, kind, factor):
    assert ask(kernel_cases.scaled, size, kind, factor)


def test_a_factor_of_one_moves_nothing_but_itself(interpreter):
    assert interpreter(kernel_cases.bytes_of_scaling, 1.0, 2) == {"read": 2 * 4, "written": 0}
    assert interpreter(kernel_cases.bytes_of_scaling, 0.5, 2) == {"read": 2 * 4 + 40_000, "written": 40_000}


def test_the_pair_moves_10_bytes_a_logit_and_training_in_bf16_18(interpreter):
    found = interpreter(kernel_cases.bytes_of_the_pair, 3, 10_007)
    assert found["statistics"] == {"read": pytest.approx(4, rel=1e-3), "written": pytest.approx(0, abs=2e-3)}
    assert found["gradient"] == {"read": pytest.approx(4, rel=1e-3), "written": pytest.approx(2, rel=1e-3)}
    pair = sum(sum(each.values()) for each in found.values())
    product_writes, products_read = 4, 2 + 2
    assert product_writes + pair + products_read == pytest.approx(18, rel=1e-3)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("rule", ["none", "ghost", "sampled-headless", "control-variate"])
def test_a_loss_by_the_kernels_is_that_by_the_plain_passes(interpreter, rule, dtype):
    assert interpreter(kernel_cases.chosen)
    assert max(interpreter(kernel_cases.loss_errors, rule, dtype)) < (1e-6 if dtype == torch.float32 else 2**-8)


def compiled(monkeypatch, tmp_path, kernel, types, **constants):
    """Compile a kernel to PTX for a Hopper GPU, with pointers and numbers as at a vocabulary of a multiple of 16."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    function = kernels._compiled(kernel)
    names = function.arg_names
    signature = dict(zip(names, [*types, *["constexpr"] * len(constants)], strict=True))
    aligned = {(i,): [["tt.divisibility", 16]] for i, kind in enumerate(types) if kind[0] == "*" or kind == "i32"}
    values = {(names.index(name),): value for name, value in constants.items()}
    source = ASTSource(function, signature, constexprs=values, attrs=aligned)
    return triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": 8}).asm["ptx"]


def memory_accesses(ptx):
    """Find the reads and writes of the GPU's memory and the barriers, in order."""
    return re.findall(r"\b(?:ld\.global|st\.global|atom|red|bar\.sync)[\w.:]*", ptx)


def test_the_statistics_compile_for_a_gpu_to_reads_of_16_bytes(monkeypatch, tmp_path):
    types = ["*fp32", "*fp32", "*fp32", "i32", "i32", "i32"]
    ptx = compiled(monkeypatch, tmp_path, kernels._tail_stats, types, DISTILS=True, SLOPES=True, BLOCK=kernels._BLOCK)
    found = memory_accesses(ptx)
    assert [each for each in found if each.startswith("st.")] == ["st.global.b32"] * 4
    assert {each for each in found if each.startswith("ld.")} == {"ld.global.v4.b32", "ld.global.b32"}
    assert found.count("ld.global.b32") == 1  # beta


@pytest.mark.parametrize("kind, single", [("*bf16", "st.global.b16"), ("*fp32", "st.global.b32")])
def test_the_gradient_compiles_for_a_gpu_and_sets_single_logits_behind_a_barrier(monkeypatch, tmp_path, kind, single):
    types = [*["*fp32"] * 5, "*i64", "*fp32", kind, *["i32"] * 4, "fp32", "fp32"]
    constants = {"DISTILS": True, "CAPPED": True, "BLOCK": kernels._BLOCK}
    each, at_one = (
        compiled(monkeypatch, tmp_path, kernels._tail_grad, types, AT_ONE=known, **constants) for known in (False, True)
    )
    assert at_one.count("ex2.approx") == each.count("ex2.approx") / 2 > 0
    found = memory_accesses(each)
    assert not any(each.startswith(("atom", "red")) for each in found)
    before, behind = found[: found.index("bar.sync")], found[found.index("bar.sync") + 1 :]
    assert {each for each in before if each.startswith("st.")} == {"st.global.v4.b32"}
    assert [each for each in behind if each.startswith("st.")] == [single]


@pytest.mark.parametrize("kind", ["*fp32", "*bf16"])
def test_scaling_compiles_for_a_gpu_and_reads_the_factor_first(monkeypatch, tmp_path, kind):
    ptx = compiled(monkeypatch, tmp_path, kernels._scale_unless_one, [kind, "*fp32", "i32"], BLOCK=kernels._BLOCK)
    found = memory_accesses(ptx)
    assert found[0] == "ld.global.b32"
    assert set(found[1:]) == {"ld.global.v4.b32", "st.global.v4.b32"}


def test_the_kernels_are_offered_to_gpus_alone_and_only_with_triton(monkeypatch):
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    cpu, gpu = torch.device("cpu"), torch.device("cuda")
    assert kernels.available(gpu) and not kernels.available(cpu)
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    assert kernels.available(gpu) and kernels.available(cpu)
    monkeypatch.setitem(sys.modules, "triton", None)
    assert not kernels.available(gpu) and not kernels.available(cpu)
