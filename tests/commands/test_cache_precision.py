"""The number format of `cache-teacher`: what the machine is fast in, and that of a cache which was begun elsewhere."""

import logging

import pytest

from kdtrain import faults
from kdtrain.cache.format.manifest import read_manifest
from kdtrain.precision import modes

ON = {True: "bf16", False: "fp32"}
"""What auto is, by whether the machine has bf16."""


@pytest.fixture
def build(workbench, tmp_path, monkeypatch):
    """Build a cache in a folder of that name on a machine with or without bf16; returns exit code and stderr."""

    size = ("--num-sequences", 4, "--validation-sequences", 2, "--sequences-per-shard", 2, "--num-samples", 4)
    text = (*workbench.text[:4], *size)

    def build(name, *more, has_bf16, fault="", text=text):
        monkeypatch.setattr(modes, "has_bf16", lambda device: has_bf16)
        monkeypatch.setenv("KDTRAIN_FAULT", fault)
        monkeypatch.setenv("KDTRAIN_FAULT_LOG", str(tmp_path / "faults"))
        faults.read()
        code, _, err = workbench.call("cache-teacher", "--teacher", "teacher", *text, "--out", tmp_path / name, *more)
        return code, err

    yield build
    monkeypatch.setenv("KDTRAIN_FAULT", "")
    faults.read()


@pytest.mark.parametrize("has_bf16", [True, False])
def test_the_default_is_bf16_where_the_machine_has_it_and_fp32_elsewhere(build, tmp_path, has_bf16):
    assert build("cache", has_bf16=has_bf16)[0] == 0
    assert read_manifest(tmp_path / "cache").settings.teacher["precision"] == ON[has_bf16]


def test_a_cache_that_was_begun_in_bf16_is_finished_in_bf16_on_a_machine_without_it(build, tmp_path):
    assert build("moved", has_bf16=True, fault="cache.shard.before-rename:enospc:2")[0] == 1
    assert (tmp_path / "faults").read_text() == "cache.shard.before-rename\n"
    code, err = build("moved", has_bf16=False)
    assert code == 0
    assert "the teacher runs in bf16, as this cache was begun" in err
    assert "bf16 products are emulated on this CPU" in err
    assert build("whole", "--precision", "bf16", has_bf16=True)[0] == 0
    moved, whole = read_manifest(tmp_path / "moved"), read_manifest(tmp_path / "whole")
    assert moved.settings.teacher["precision"] == "bf16"
    assert moved.digest == whole.digest

    code, err = build("moved", has_bf16=False)  # finished
    assert (code, "as this cache was begun" in err) == (0, True)


def test_refinement_takes_the_precision_of_its_cache(build, tmp_path):
    assert build("five", has_bf16=True)[0] == 0
    assert build("more", text=("--refine", tmp_path / "five"), has_bf16=False)[0] == 0
    assert read_manifest(tmp_path / "more").settings.teacher["precision"] == "bf16"


@pytest.mark.parametrize("name, has_bf16, slow", [("bf16", False, True), ("bf16", True, False), ("auto", False, False)])
def test_a_format_that_is_emulated_is_named(monkeypatch, caplog, name, has_bf16, slow):
    monkeypatch.setattr(modes, "has_bf16", lambda device: has_bf16)
    with caplog.at_level(logging.WARNING, logger="kdtrain"):
        modes.pick_mode(name, modes.torch.device("cpu"))
    assert ("bf16 products are emulated on this CPU" in caplog.text) == slow
