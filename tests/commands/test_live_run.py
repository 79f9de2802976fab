"""A run is read while it trains: a checkpoint that it removes meanwhile is not damage, and the next one is taken."""

import shutil

import pytest

from kdtrain.checkpoint import sealed, shards
from kdtrain.checkpoint.store import Store

FIRST, LAST = "step-00000002", "step-00000004"


@pytest.fixture
def live(workbench, tmp_path):
    """Copy a run to `run`, with checkpoints of step 2, the best, and of step 4; each test has its own copy."""
    root = workbench.root
    if not (root / "made-run").exists():
        argv = ("distill", "--cache", "cache", "--student", "student.toml", "--out", "made-run", "--steps", 4)
        workbench.json(*argv, "--checkpoint-freq", 2, *workbench.plain)
    shutil.rmtree(root / "run", ignore_errors=True)
    shutil.copytree(root / "made-run", root / "run", symlinks=True)
    Store(root / "run/checkpoints").link("best", FIRST)
    return workbench


@pytest.fixture(params=["manifest.json", "state.json", "shard-00001-00001.safetensors", "loaded"])
def pruned(request, live, monkeypatch):
    """Make step 4 the best and prune step 2, just before a file of it is read for the first time."""
    checkpoints = live.root / "run/checkpoints"

    def prune(path):
        if (checkpoints / FIRST).exists() and path.parent.name == FIRST:
            Store(checkpoints).link("best", LAST)
            shutil.rmtree(checkpoints / FIRST)

    def before(name, function):
        def read(path, *more):
            if path.name == name:
                prune(path)
            return function(path, *more)

        return read

    if request.param == "loaded":
        read = shards.read
        monkeypatch.setattr(shards, "read", lambda path, *more: (prune(path / "x"), read(path, *more))[1])
    else:
        for reader in ("read_text", "file_digest"):
            monkeypatch.setattr(sealed, reader, before(request.param, getattr(sealed, reader)))
    return request.param


def gone(workbench):
    return not (workbench.root / "run/checkpoints" / FIRST).exists()


def test_inspect_lists_the_checkpoints_that_are_left(live, pruned):
    rows = live.json("inspect", "run")["checkpoints"]
    assert {row["verdict"] for row in rows.values()} == {"ok"} and LAST in rows
    assert gone(live) is (FIRST not in rows) and gone(live) is (pruned != "loaded")


def test_verify_finds_no_damage(live, pruned):
    found = live.json("verify", "run")
    assert (found["ok"], found["problems"]) == (True, []) and gone(live) is (pruned != "loaded")


def test_export_takes_the_new_best(live, pruned, tmp_path):
    found = live.json("export", "run", "--out", tmp_path / "out")
    assert (found["checkpoint"], found["step"]) == (LAST, 4) and gone(live)


def test_evaluate_takes_the_new_best(live, pruned):
    assert live.json("evaluate", "--student", "run", "--cache", "cache")["sequences"] == 8 and gone(live)


@pytest.mark.parametrize("pruned", ["state.json", "loaded"], indirect=True)
def test_a_link_is_followed_again_and_a_name_that_is_gone_is_refused_in_one_line(live, pruned):
    assert live.json("inspect", "run/checkpoints/best")["step"] == 4 and gone(live)
    shutil.copytree(live.root / "made-run/checkpoints" / FIRST, live.root / "run/checkpoints" / FIRST)
    code, _, err = live.call("inspect", f"run/checkpoints/{FIRST}")
    assert (code, gone(live)) == (2, True)
    assert err == (
        f"kdtrain: run/checkpoints/{FIRST} was removed while it was read, by the run that is training; "
        "name a newer checkpoint\n"
    )
