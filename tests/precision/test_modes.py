"""The number format of a forward, and the requirements of a compiled one."""

import shutil

import pytest
import torch

from kdtrain.config.sections import PrecisionConfig, QuantizationConfig
from kdtrain.precision import modes
from kdtrain.precision.backends import policy
from kdtrain.precision.formats import formats_of
from kdtrain.precision.modes import autocast, has_bf16, pick_mode, why_not_compile

CPU = torch.device("cpu")


@pytest.mark.parametrize("has, auto", [(True, "bf16"), (False, "fp32")])
def test_auto_is_bf16_where_the_device_has_bf16_products(monkeypatch, has, auto):
    monkeypatch.setattr(modes, "has_bf16", lambda device: has)
    assert pick_mode("auto", CPU) == auto
    assert pick_mode("fp32", CPU) == "fp32"
    assert pick_mode("bf16", CPU) == "bf16"


def test_auto_on_a_gpu_without_bf16_trains_in_fp16_and_runs_teachers_in_fp32(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation: False)
    old = torch.device("cuda")
    assert formats_of(PrecisionConfig(), QuantizationConfig(), old).high == "fp16"
    assert pick_mode("auto", old) == "fp32"
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation: True)
    assert formats_of(PrecisionConfig(), QuantizationConfig(), old).high == "bf16"


@pytest.mark.parametrize("flags, onednn, has", [
    ("fma avx2", False, False),
    ("avx2 avx512_vnni", True, False),
    ("avx512_vnni avx512_bf16", True, True),
    ("avx512_bf16 amx_bf16 amx_tile", True, True),
    ("amx_bf16 amx_tile", True, True),
    ("avx512_bf16", False, False),
])  # fmt: skip
def test_a_cpu_has_bf16_where_its_flags_and_onednn_say_so(monkeypatch, tmp_path, flags, onednn, has):
    (tmp_path / "cpuinfo").write_text(f"flags : {flags}\n")
    monkeypatch.setattr(modes, "Path", lambda _: tmp_path / "cpuinfo")
    monkeypatch.setattr(torch.backends.mkldnn, "is_available", lambda: True)
    monkeypatch.setattr(torch.ops.mkldnn, "_is_mkldnn_bf16_supported", lambda: onednn)
    assert has_bf16(CPU) == has
    monkeypatch.setattr(torch.backends.mkldnn, "is_available", lambda: False)
    assert not has_bf16(CPU)


def test_bf16_rounds_products_and_not_weights():
    layer = torch.nn.Linear(4, 4)
    with autocast("bf16", CPU):
        assert layer(torch.ones(2, 4)).dtype == torch.bfloat16
    assert layer.weight.dtype == torch.float32
    with autocast("fp32", CPU):
        assert layer(torch.ones(2, 4)).dtype == torch.float32


def test_a_missing_requirement_of_a_compiled_run_is_named(monkeypatch):
    monkeypatch.setattr(shutil, "which", lambda name: None)
    assert "C++ compiler" in str(why_not_compile(CPU))
    monkeypatch.undo()
    monkeypatch.setattr(shutil, "which", lambda name: shutil.os.path.join("/", "bin", "false"))
    assert "cannot build" in str(why_not_compile(CPU))
    monkeypatch.undo()
    monkeypatch.setattr(modes.sysconfig, "get_paths", lambda: {"include": "nowhere"})
    assert why_not_compile(CPU) is not None


@pytest.mark.parametrize("schedule, rules, decay_start", [
    ("wsd", ("schedule", "gap"), 80), ("cosine", ("schedule", "gap"), 80), ("constant", ("gap",), None),
])  # fmt: skip
def test_adaptive_quantisation_falls_back_for_the_decay_unless_configured_otherwise(schedule, rules, decay_start):
    found = policy(QuantizationConfig(time_resume=True), "mxfp4", schedule, 80)
    assert (found.rules, found.decay_start) == (rules, decay_start)
    assert policy(QuantizationConfig(time_resume=True, quant_rule="loss"), "mxfp4", schedule, 80).rules == ("loss",)


def test_a_gpu_brings_its_own_compiler():
    assert why_not_compile(torch.device("cuda")) is None
