"""`inspect` and `verify` know the checkpoints of every tier, and give each its verdict."""

import json
import os
from collections import defaultdict
from datetime import datetime

import pytest
import torch

from kdtrain.checkpoint.store import Store
from kdtrain.commands import inspect, verify
from kdtrain.config.commands import InspectConfig, VerifyConfig
from kdtrain.errors import UsageError
from kdtrain.files import Lock
from kdtrain.monitor.facts import LOCK

NAMES = ("step-00000010", "epoch-0001", "interrupted-00000012", "step-00000020")


@pytest.fixture
def run(tmp_path):
    """Make a run with a checkpoint of every tier; nothing but the checkpoints is real."""
    run = tmp_path / "run"
    run.mkdir()
    (run / "config.toml").write_text('[run]\nstudent = "s"\nout = "run"\n')
    store = Store(run / "checkpoints")
    state = {"cache": "c", "options": {}, "student": {"name": "s", "architecture": {}, "attention": "sdpa"}}
    progress = {"step": 12, "loss": 2.5, "best_loss": None, "last_loss": 3.5, "validated_step": 10}
    state |= {"progress": progress, "watchers": {}, "teacher": None}
    for name, step in zip(NAMES, (10, 10, 12, 20), strict=True):
        store.save(name, step, {"student.w": torch.zeros(50_000)}, state)
    store.link("best", "step-00000010")
    return run


def shown(capsys, command, config):
    code = command.main(config)
    return code, json.loads(capsys.readouterr().out)


def test_inspect_lists_every_checkpoint_with_its_numbers_tier_time_size_and_verdict_and_the_sum(run, capsys):
    checkpoints = run / "checkpoints"
    for name in ("step-00000010", "epoch-0001"):
        os.utime(checkpoints / name / "manifest.json", (1e9, 1e9))
    os.truncate(checkpoints / "step-00000020/state.json", 3)
    (checkpoints / "epoch-0001" / "state.json").unlink()
    os.link(checkpoints / "step-00000010" / "state.json", checkpoints / "epoch-0001" / "state.json")
    _, table = shown(capsys, inspect, InspectConfig(path=run, json=True))
    rows = table["checkpoints"]
    assert list(rows) == ["epoch-0001", "step-00000010", "interrupted-00000012", "step-00000020"]
    assert [row["tier"] for row in rows.values()] == ["epoch", "rolling", "special", "rolling"]
    assert [row["step"] for row in rows.values()] == [10, 10, 12, 20]
    assert [row["loss"] for row in rows.values()] == [2.5, 2.5, 2.5, None]
    assert [row["validation_loss"] for row in rows.values()] == [3.5, 3.5, None, None]
    written = datetime.fromtimestamp(1e9).isoformat(" ", "seconds")
    assert (rows["step-00000010"]["written"], rows["epoch-0001"]["written"]) == (written, written)
    assert rows["step-00000020"]["verdict"].startswith("damaged: state.json has 3 bytes instead of")
    assert rows["epoch-0001"]["verdict"] == "ok" and all(row["MiB"] > 0 for row in list(rows.values())[:3])
    assert (table["latest"], table["best"]) == ("step-00000020", "step-00000010") and "set aside (MiB)" not in table
    inodes = {each.stat().st_ino: each.stat().st_size for each in checkpoints.glob("*/*") if each.is_file()}
    assert table["checkpoints in all (MiB)"] == round(sum(inodes.values()) / 2**20, 1) > 0.5
    inspect.main(InspectConfig(path=run))
    printed = capsys.readouterr().out
    rows = defaultdict(list)  # the table is wider than the terminal, and comes in two parts
    for name, *words in (line.split() for line in printed.splitlines() if line):
        rows[name] += words
    assert rows["interrupted-00000012"][:2] == ["2.500", "-"] and rows["step-00000010"][:2] == ["2.500", "3.500"]
    assert rows["step-00000010"][-1] == "best" and "epoch-0001" in rows
    printed = " ".join(printed.split())
    assert "damaged: state.json has 3 bytes" in printed and f"1 damaged: kdtrain verify {run}" in printed


def test_inspect_lists_what_was_set_aside_with_its_size_and_the_sum(run, capsys):
    Store(run / "checkpoints").set_aside_after(11)
    half = bytes(2**19)
    (run.parent / "run.old-1" / "deep").mkdir(parents=True)
    (run.parent / "run.old-1" / "deep" / "log").write_bytes(half)
    (run.parent / "runaway.old-1").write_bytes(half)
    (run / "data.left-2").write_bytes(half)
    (run / "link.left-1").symlink_to("data.left-2")
    _, table = shown(capsys, inspect, InspectConfig(path=run, json=True))
    assert table["set aside (MiB)"] == {
        "../run.old-1": 0.5,
        "data.left-2": 0.5,
        "link.left-1": 0.0,
        "checkpoints/interrupted-00000012.left-1": 0.2,
        "checkpoints/step-00000020.left-1": 0.2,
        "in all": 1.4,
    }
    inspect.main(InspectConfig(path=run))
    assert "step-00000020.left-1" in capsys.readouterr().out


@pytest.mark.parametrize("name", [*NAMES, "best", "latest"])
def test_a_checkpoint_of_any_tier_is_inspected_and_verified_by_its_path(run, capsys, name):
    path = run / "checkpoints" / name
    assert verify.kind_of(path) == "checkpoint"
    assert shown(capsys, verify, VerifyConfig(path=path, json=True))[0] == 0
    _, table = shown(capsys, inspect, InspectConfig(path=path, json=True))
    assert (table["verdict"], table["numbers"]) == ("ok", 50_000)


def test_verify_of_a_run_names_the_damaged_checkpoints(run, capsys):
    for name in ("epoch-0001", "interrupted-00000012"):
        (run / "checkpoints" / name / "manifest.json").unlink()
    code, result = shown(capsys, verify, VerifyConfig(path=run, json=True))
    assert code == 1
    wrong = "manifest.json cannot be read (No such file or directory)"
    assert result["problems"] == [f"epoch-0001: {wrong}", f"interrupted-00000012: {wrong}"]


def test_a_model_folder_or_an_empty_folder_is_not_a_checkpoint(tmp_path):
    for name, file in (("model", "model.safetensors"), ("empty", "notes.txt")):
        (tmp_path / name).mkdir()
        (tmp_path / name / file).write_text("x")
        with pytest.raises(UsageError, match="neither a cache nor a run nor a checkpoint"):
            verify.kind_of(tmp_path / name)


def test_watch_follows_a_run_until_it_ends(run, capsys, monkeypatch):
    (run / "metrics.jsonl").write_text('{"step": 3, "loss": 3.0, "loss_avg": 3.1}\n')
    os.utime(run / "metrics.jsonl", (1e9, 1e9))
    lock = Lock(run / LOCK, "taken")
    monkeypatch.setattr(inspect.time, "sleep", lambda seconds: lock.release())
    assert inspect.main(InspectConfig(path=run, watch=True)) == 0
    first, health, last = capsys.readouterr().out.splitlines()
    assert first.startswith("training: step 3 of ") and "loss 3.1" in first
    assert health.startswith("health: stalled: no step for ") and last.startswith("killed at step 3")


def test_only_a_run_is_watched(run):
    with pytest.raises(UsageError, match="--watch is for runs"):
        inspect.main(InspectConfig(path=run / "checkpoints/step-00000010", watch=True))
