"""Collected numbers are those of the operands, and collecting changes no other step."""

import logging
import os

import h5py
import numpy as np
import pytest
import torch

from kdtrain.config import PrecisionConfig
from kdtrain.errors import UsageError
from kdtrain.models.head import split
from kdtrain.precision import collect
from kdtrain.precision.collect import EXPONENTS, Collector, statistics
from kdtrain.precision.emulated import Recipe
from kdtrain.testing import tiny_model

MXFP4 = Recipe("mx", "e2m1", "e2m1")


def collector(tmp_path, shape="llama", pattern="*.mlp.*", every=2, recipe=MXFP4, **options):
    student = split(tiny_model(shape))
    made = Collector(tmp_path / "tensors.h5", student.model, pattern, every, recipe, torch.bfloat16, **options)
    return student, made


def eager_pass(student):
    def run() -> None:
        student(torch.arange(24).reshape(2, 12)).square().mean().backward()
        student.zero_grad(set_to_none=True)

    return run


@pytest.mark.parametrize("shape, layers", [("llama", 6), ("gpt2", 4)])
def test_matching_layers_get_a_row_at_each_interval(tmp_path, shape, layers):
    student, made = collector(tmp_path, shape)
    for step in range(1, 6):
        made.collect(step, "mxfp4", eager_pass(student))
    with h5py.File(tmp_path / "tensors.h5") as file:
        assert (
            sorted(name for name in file if name != "exponents") == sorted(made.layers) and len(made.layers) == layers
        )
        for name in made.layers:
            for kind in ("weight", "activation", "gradient"):
                group = file[name][kind]
                assert group["step"][:].tolist() == [2, 4] and group["mode"].asstr()[:].tolist() == ["mxfp4"] * 2
                assert 0.02 < group["error"][0] < 0.3 and group["histogram"].shape == (2, len(EXPONENTS))
                size = group["histogram"][0].sum()
                assert size > 0 and np.isfinite(group["amax"][:]).all()
        name = next(iter(made.layers))
        weight = made.layers[name].weight.detach()
        assert file[name]["weight"]["amax"][0] == float(weight.abs().max())
        assert file[name]["weight"]["histogram"][0].sum() == weight.numel()
        assert file["exponents"][:].tolist() == list(EXPONENTS)


def test_a_resumed_run_drops_the_rows_that_it_will_collect_again(tmp_path):
    student, made = collector(tmp_path)
    for step in (2, 4, 6):
        made.collect(step, "bf16", eager_pass(student))
    made.forget_after(4)
    made.collect(8, "bf16", eager_pass(student))
    with h5py.File(tmp_path / "tensors.h5") as file:
        assert file[next(iter(made.layers))]["gradient"]["step"][:].tolist() == [2, 4, 8]


@pytest.fixture
def said(monkeypatch):
    texts = []
    monkeypatch.setattr(logging.getLogger("kdtrain"), "warning", lambda text, *words: texts.append(text % words))
    return texts


def test_raw_numbers_are_those_of_the_operands_and_go_with_their_steps(tmp_path, said):
    student, made = collector(tmp_path, raw=True)
    seen = {}
    name = "model.layers.0.mlp.up_proj"
    layer = made.layers[name]

    def see(kind, tensor):
        seen.setdefault(kind, tensor.detach().flatten(0, 1))  # returns nothing, which would replace the operand

    layer.register_forward_pre_hook(lambda _, inputs: see("activation", inputs[0]))
    layer.register_full_backward_hook(lambda _, __, outputs: see("gradient", outputs[0]))
    for step in (2, 4, 6):
        made.collect(step, "bf16", eager_pass(student))
    with h5py.File(tmp_path / "tensors.h5") as file:
        for kind, values in (seen | {"weight": layer.weight.detach()}).items():
            raw = file[name][kind]["raw"]
            assert list(raw) == ["00000002", "00000004", "00000006"] and list(raw["00000002"].attrs["shape"]) == [
                *values.shape
            ]
            assert torch.equal(torch.from_numpy(raw["00000002"][:]), values)
    made.forget_after(4)
    made.collect(8, "bf16", eager_pass(student))
    with h5py.File(tmp_path / "tensors.h5") as file:
        for kind in ("weight", "activation", "gradient"):
            assert list(file[name][kind]["raw"]) == ["00000002", "00000004", "00000008"]
            assert file[name][kind]["step"][:].tolist() == [2, 4, 8]
    assert said == [] and not (tmp_path / "tensors.h5.old-1").exists()


def test_a_large_operand_is_cut_to_whole_rows_from_all_over_it_which_is_logged_once(tmp_path, said, monkeypatch):
    monkeypatch.setattr(collect, "RAW_ELEMENTS", 7 * 32)
    student, made = collector(tmp_path, pattern="*.0.mlp.up_proj", raw=True)
    for step in (2, 4):
        made.collect(step, "bf16", eager_pass(student))
    (layer,) = made.layers.values()
    with h5py.File(tmp_path / "tensors.h5") as file:
        raw = file["model.layers.0.mlp.up_proj/weight/raw/00000002"]
        assert list(raw.attrs["shape"]) == [64, 32] and raw.shape == (7, 32)
        assert torch.equal(torch.from_numpy(raw[:]), layer.weight.detach()[[0, 9, 18, 27, 36, 45, 54]])
    (line,) = said
    assert "224 raw numbers at most of each operand" in line and "up_proj/weight and 2 more are cut" in line


def test_no_raw_numbers_are_added_to_a_file_that_is_full_which_is_logged_once_and_statistics_go_on(
    tmp_path, said, monkeypatch
):
    monkeypatch.setattr(collect, "RAW_BYTES", 200_000)
    student, made = collector(tmp_path, pattern="*.0.mlp.up_proj", raw=True)
    for step in range(2, 21, 2):
        made.collect(step, "bf16", eager_pass(student))
    with h5py.File(tmp_path / "tensors.h5") as file:
        group = file["model.layers.0.mlp.up_proj/weight"]
        assert 0 < len(group["raw"]) < 10 and len(group["step"]) == 10
    (line,) = said
    assert "on no raw numbers are added, only statistics" in line
    assert (tmp_path / "tensors.h5").stat().st_size < 200_000 + 40_000  # one operand more, and the statistics


def test_raw_numbers_without_layers_are_refused():
    with pytest.raises(UsageError, match="--collect-raw has no effect without --collect-tensors"):
        PrecisionConfig(collect_raw=True)


def test_a_pattern_that_matches_nothing_is_refused(tmp_path):
    with pytest.raises(UsageError, match="matches no linear layer"):
        collector(tmp_path, pattern="nothing")


def test_shares_are_counted_and_histograms_count_every_element():
    values = torch.zeros(1, 64)
    values[0, 0], values[0, 1], values[0, 2] = 7.9, 0.1, 1e-30
    found = statistics(values, "weight", MXFP4, torch.bfloat16)
    assert found["saturated"] == pytest.approx(1 / 64) and found["flushed"] == pytest.approx(2 / 64)
    assert found["zeros"] == pytest.approx(61 / 64) and found["amax"] == pytest.approx(7.9)
    histogram = dict(zip(EXPONENTS, found["histogram"].tolist(), strict=True))
    assert histogram[2] == histogram[-4] == histogram[-40] == 1 and sum(histogram.values()) == 3


def test_a_run_without_a_quantised_format_is_measured_in_its_own():
    values = torch.randn(64, 64, generator=torch.Generator().manual_seed(0))
    assert 1e-4 < statistics(values, "weight", None, torch.bfloat16)["error"] < 3e-3
    assert statistics(values, "weight", None, torch.float32)["error"] == 0
    assert statistics(torch.full((1, 2), 1e6), "weight", None, torch.float16)["saturated"] == 1
    assert statistics(torch.zeros(2, 2), "weight", MXFP4, torch.bfloat16)["error"] == 0


def test_collecting_recompiles_nothing_and_leaves_no_gradient(tmp_path):
    student, made = collector(tmp_path, every=2)
    forward = torch.compile(student.forward, dynamic=False, backend="aot_eager")
    tokens = torch.arange(24).reshape(2, 12)
    forward(tokens).square().mean().backward()
    student.zero_grad(set_to_none=True)
    with torch.compiler.set_stance("fail_on_recompile"):
        for step in range(1, 5):
            with torch.compiler.set_stance("default"):
                made.collect(step, "fp32", eager_pass(student))
            assert all(each.grad is None for each in student.parameters())
            forward(tokens).square().mean().backward()
            student.zero_grad(set_to_none=True)


def put(name, make):
    """What makes another object of one in the file."""

    def change(file):
        if name in file:
            del file[name]
        make(file, name)

    return change


STEP = "model.layers.0.mlp.up_proj/weight/step"
STRANGE = {
    "external link": put("a", lambda file, name: file.__setitem__(name, h5py.ExternalLink("others.h5", "/rows"))),
    "soft link": put("a", lambda file, name: file.__setitem__(name, h5py.SoftLink("/exponents"))),
    "number": put(STEP, lambda file, name: file.create_dataset(name, data=3)),
    "in one piece": put(STEP, lambda file, name: file.create_dataset(name, data=np.array([2]))),
    "texts": put(STEP, lambda file, name: file.create_dataset(name, data=[b"x"], maxshape=(None,), chunks=(64,))),
    "6e9 rows": put(
        STEP, lambda file, name: file.create_dataset(name, (6 * 10**9,), "i8", chunks=(64,), maxshape=(None,))
    ),
    "missing": put(STEP, lambda file, name: None),
    "raw as a number": put(
        "model.layers.0.mlp.up_proj/weight/raw", lambda file, name: file.create_dataset(name, data=3)
    ),
    "raw elsewhere": put(
        "model.layers.0.mlp.up_proj/weight/raw/00000001",
        lambda file, name: file.create_dataset(name, (1, 2), "f4", external=[("others.h5", 0, 8)]),
    ),
    "another kind": put("a/b", lambda file, name: file.create_dataset(f"{name}/step", data=3)),
}


@pytest.mark.parametrize("how", STRANGE)
def test_a_file_of_another_layout_is_moved_aside_as_it_is(tmp_path, how):
    student, made = collector(tmp_path)
    made.collect(2, "bf16", eager_pass(student))
    with h5py.File(tmp_path / "others.h5", "w") as file:
        file.create_group("rows").create_dataset("step", data=np.arange(3), maxshape=(None,))
    with h5py.File(tmp_path / "tensors.h5", "a") as file:
        STRANGE[how](file)
    before = [(tmp_path / name).read_bytes() for name in ("others.h5", "tensors.h5")]
    made.forget_after(0)
    made.collect(4, "bf16", eager_pass(student))
    assert before == [(tmp_path / name).read_bytes() for name in ("others.h5", "tensors.h5.old-1")]
    assert not (tmp_path / "tensors.h5.old-2").exists()
    with h5py.File(tmp_path / "tensors.h5") as file:
        assert file[STEP][:].tolist() == [4]


@pytest.mark.parametrize("size", [10**12, 5])
def test_a_file_that_is_not_hdf5_or_has_a_terabyte_is_moved_aside_and_not_copied(tmp_path, size):
    _, made = collector(tmp_path)
    (tmp_path / "tensors.h5").touch()
    os.truncate(tmp_path / "tensors.h5", size)
    made.forget_after(0)
    assert (tmp_path / "tensors.h5.old-1").stat().st_size == size
