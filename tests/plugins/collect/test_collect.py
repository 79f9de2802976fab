"""Collected numbers are those of the operands, and collecting changes no other step."""

import logging
import os

import h5py
import numpy as np
import pytest
import torch

from kdtrain.errors import UsageError
from kdtrain.models.head import split
from kdtrain.plugins.collect import CollectConfig, collector
from kdtrain.plugins.collect.collector import EXPONENTS, Collector, statistics
from kdtrain.precision.emulated import FormatRecipe
from kdtrain.testing import tiny_model
from kdtrain.training.observers import ObserverRequest, StepView

MXFP4 = FormatRecipe("mx", "e2m1", "e2m1")
KINDS = ("weight", "activation", "gradient")
UP = "model.layers.0.mlp.up_proj"


class Student:
    """What a `StepView` has of a student: its mode, and passes over one batch of tokens."""

    def __init__(self, path, shape="llama", pattern="*.mlp.*", raw=False):
        self.model, self.present_mode = split(tiny_model(shape)), "mxfp4"
        options = CollectConfig(collect_tensors=pattern, collect_every=2, collect_raw=raw)
        request = ObserverRequest(config=None, model=self.model.model, recipe=MXFP4, dtype=torch.bfloat16)
        self.made = Collector(path / "tensors.h5", options, request)

    def run_eagerly(self, batch=None):
        self.model(torch.arange(24).reshape(2, 12)).square().mean().backward()
        self.model.zero_grad(set_to_none=True)

    def take(self, *steps):
        for step in steps:
            for micro in (1, 2):
                self.made.before_forward(StepView(step, self, self.run_eagerly, micro), None)


@pytest.fixture
def warnings(monkeypatch):
    texts = []
    monkeypatch.setattr(logging.getLogger("kdtrain"), "warning", lambda text, *words: texts.append(text % words))
    return texts


@pytest.mark.parametrize("shape, layers", [("llama", 6), ("gpt2", 4)])
def test_matching_layers_get_a_row_at_each_interval_and_a_rewound_run_collects_later_ones_again(
    tmp_path, shape, layers
):
    student = Student(tmp_path, shape)
    student.take(*range(1, 8))
    student.made.rewound(4)
    student.take(8)
    with h5py.File(tmp_path / "tensors.h5") as file:
        assert sorted(file.keys() - {"exponents"}) == sorted(student.made.layers) and len(student.made.layers) == layers
        assert file["exponents"][:].tolist() == list(EXPONENTS)
        for name, layer in student.made.layers.items():
            for kind in KINDS:
                group = file[name][kind]
                assert group["step"][:].tolist() == [2, 4, 8] and group["mode"].asstr()[:].tolist() == ["mxfp4"] * 3
                assert 0.02 < group["error"][0] < 0.3 and group["histogram"].shape == (3, len(EXPONENTS))
                assert group["histogram"][0].sum() > 0 and np.isfinite(group["amax"][:]).all()
            assert file[name]["weight"]["amax"][0] == float(layer.weight.detach().abs().max())
            assert file[name]["weight"]["histogram"][0].sum() == layer.weight.numel()


def test_raw_numbers_are_those_of_the_operands_and_go_with_their_steps(tmp_path, warnings):
    student, seen = Student(tmp_path, raw=True), {}
    layer = student.made.layers[UP]

    def see(kind, tensor):
        seen.setdefault(kind, tensor.detach().flatten(0, 1))  # returns nothing, which would replace the operand

    layer.register_forward_pre_hook(lambda _, inputs: see("activation", inputs[0]))
    layer.register_full_backward_hook(lambda _, __, outputs: see("gradient", outputs[0]))
    student.take(2, 4, 6)
    student.made.rewound(4)
    student.take(8)
    with h5py.File(tmp_path / "tensors.h5") as file:
        for kind, values in (seen | {"weight": layer.weight.detach()}).items():
            raw = file[UP][kind]["raw"]
            assert list(raw) == ["00000002", "00000004", "00000008"] and file[UP][kind]["step"][:].tolist() == [2, 4, 8]
            assert tuple(raw["00000002"].attrs["shape"]) == values.shape
            assert torch.equal(torch.from_numpy(raw["00000002"][:]), values)
    assert warnings == [] and not (tmp_path / "tensors.h5.old-1").exists()


def test_a_large_operand_is_cut_to_whole_rows_from_all_over_it_which_is_logged_once(tmp_path, warnings, monkeypatch):
    monkeypatch.setattr(collector, "RAW_ELEMENTS", 7 * 32)
    student = Student(tmp_path, pattern="*.0.mlp.up_proj", raw=True)
    student.take(2, 4)
    with h5py.File(tmp_path / "tensors.h5") as file:
        raw = file[f"{UP}/weight/raw/00000002"]
        assert list(raw.attrs["shape"]) == [64, 32] and raw.shape == (7, 32)
        rows = student.made.layers[UP].weight.detach()[[0, 9, 18, 27, 36, 45, 54]]
        assert torch.equal(torch.from_numpy(raw[:]), rows)
    (line,) = warnings
    assert "224 raw numbers at most of each operand" in line and "up_proj/weight and 2 more are cut" in line


def test_no_raw_numbers_are_added_to_a_full_file_which_is_logged_once_and_statistics_are(
    tmp_path, warnings, monkeypatch
):
    monkeypatch.setattr(collector, "RAW_BYTES", 200_000)
    Student(tmp_path, pattern="*.0.mlp.up_proj", raw=True).take(*range(2, 21, 2))
    with h5py.File(tmp_path / "tensors.h5") as file:
        group = file[f"{UP}/weight"]
        assert 0 < len(group["raw"]) < 10 and len(group["step"]) == 10
    (line,) = warnings
    assert "on no raw numbers are added, only statistics" in line
    assert (tmp_path / "tensors.h5").stat().st_size < 200_000 + 40_000  # one operand more, and the statistics


def test_what_cannot_be_is_refused(tmp_path):
    with pytest.raises(UsageError, match="--collect-raw has no effect without --collect-tensors"):
        CollectConfig(collect_raw=True)
    with pytest.raises(UsageError, match="matches no linear layer"):
        Student(tmp_path, pattern="nothing")


def test_shares_are_counted_and_histograms_count_every_element_and_without_a_format_errors_are_those_of_the_dtype():
    values = torch.zeros(1, 64)
    values[0, 0], values[0, 1], values[0, 2] = 7.9, 0.1, 1e-30
    found = statistics(values, "weight", MXFP4, torch.bfloat16)
    assert found["saturated"] == pytest.approx(1 / 64) and found["flushed"] == pytest.approx(2 / 64)
    assert found["zeros"] == pytest.approx(61 / 64) and found["amax"] == pytest.approx(7.9)
    histogram = dict(zip(EXPONENTS, found["histogram"].tolist(), strict=True))
    assert histogram[2] == histogram[-4] == histogram[-40] == 1 and sum(histogram.values()) == 3
    values = torch.randn(64, 64, generator=torch.Generator().manual_seed(0))
    assert 1e-4 < statistics(values, "weight", None, torch.bfloat16)["error"] < 3e-3
    assert statistics(values, "weight", None, torch.float32)["error"] == 0
    assert statistics(torch.full((1, 2), 1e6), "weight", None, torch.float16)["saturated"] == 1
    assert statistics(torch.zeros(2, 2), "weight", MXFP4, torch.bfloat16)["error"] == 0


def test_collecting_recompiles_nothing(tmp_path):
    student = Student(tmp_path)
    forward = torch.compile(student.model.forward, dynamic=False, backend="aot_eager")
    tokens = torch.arange(24).reshape(2, 12)
    forward(tokens).square().mean().backward()
    with torch.compiler.set_stance("fail_on_recompile"):
        for step in range(1, 5):
            with torch.compiler.set_stance("default"):
                student.take(step)
            forward(tokens).square().mean().backward()


STEP = f"{UP}/weight/step"
OF_64 = {"maxshape": (None,), "chunks": (64,)}
STRANGE = {
    "external link": ("a", lambda file, name: file.__setitem__(name, h5py.ExternalLink("others.h5", "/rows"))),
    "soft link": ("a", lambda file, name: file.__setitem__(name, h5py.SoftLink("/exponents"))),
    "number": (STEP, lambda file, name: file.create_dataset(name, data=3)),
    "in one piece": (STEP, lambda file, name: file.create_dataset(name, data=np.array([2]))),
    "texts": (STEP, lambda file, name: file.create_dataset(name, data=[b"x"], **OF_64)),
    "6e9 rows": (STEP, lambda file, name: file.create_dataset(name, (6 * 10**9,), "i8", **OF_64)),
    "missing": (STEP, lambda file, name: None),
    "raw as a number": (f"{UP}/weight/raw", lambda file, name: file.create_dataset(name, data=3)),
    "raw elsewhere": (
        f"{UP}/weight/raw/00000001",
        lambda file, name: file.create_dataset(name, (1, 2), "f4", external=[("others.h5", 0, 8)]),
    ),
    "another kind": ("a/b", lambda file, name: file.create_dataset(f"{name}/step", data=3)),
    "not HDF5": 5,
    "a terabyte": 10**12,
}


@pytest.mark.parametrize("strange", STRANGE.values(), ids=STRANGE)
def test_a_file_of_another_layout_is_moved_aside_as_it_is_and_not_copied(tmp_path, strange):
    student = Student(tmp_path, pattern="*.0.mlp.up_proj")
    student.take(2)
    with h5py.File(tmp_path / "others.h5", "w") as file:
        file.create_group("rows").create_dataset("step", data=np.arange(3), maxshape=(None,))
    if isinstance(strange, int):
        os.truncate(tmp_path / "tensors.h5", strange)
    else:
        name, change = strange
        with h5py.File(tmp_path / "tensors.h5", "a") as file:
            file.pop(name, None)
            change(file, name)
    files = (tmp_path / "others.h5", tmp_path / "tensors.h5")
    before = [(path.stat().st_size, path.open("rb").read(2**20)) for path in files]
    student.made.rewound(0)
    student.take(4)
    files = (tmp_path / "others.h5", tmp_path / "tensors.h5.old-1")
    assert before == [(path.stat().st_size, path.open("rb").read(2**20)) for path in files]
    assert not (tmp_path / "tensors.h5.old-2").exists()
    with h5py.File(tmp_path / "tensors.h5") as file:
        assert file[STEP][:].tolist() == [4]
