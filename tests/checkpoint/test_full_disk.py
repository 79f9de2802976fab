"""A full disk: spare checkpoints are removed, then the save waits; nothing else is lost."""

import os
import subprocess
from contextlib import closing

import pytest
import torch
from checkpoint_kit import SHARD, STATES, assert_equal, flip, tensors

from kdtrain import faults
from kdtrain.checkpoint import saver as saving
from kdtrain.checkpoint.saver import Saver
from kdtrain.checkpoint.store import Store, load
from kdtrain.checkpoint.tiers import Keep
from kdtrain.errors import RunError


@pytest.fixture
def full(monkeypatch):
    """Fill the disk for the next `tries` saves, and shorten a minute."""
    monkeypatch.setattr(saving, "MINUTE", 0.01)

    def plan(tries, point="checkpoint.before-rename"):
        monkeypatch.setenv("KDTRAIN_FAULT", f"{point}:enospc:1-{tries}")
        faults.read()

    yield plan
    monkeypatch.undo()
    faults.read()


def said(saver):
    found = saver.warnings()
    assert {kind for kind, _ in found} <= {"disk-full"}
    return [text for _, text in found]


@pytest.mark.parametrize("asynchronous", [True, False])
@pytest.mark.parametrize("point", ["checkpoint.before-rename", "checkpoint.write", "checkpoint.before-prune"])
def test_on_a_full_disk_the_oldest_checkpoint_is_removed_and_the_save_succeeds(store, full, asynchronous, point):
    full(1, point)
    with closing(Saver(store, asynchronous)) as saver:
        saver.save(["step-00000040"], 40, tensors(4), STATES)
    assert said(saver) == ["the disk is full: removed step-00000010 to make room for checkpoint step-00000040"]
    assert store.names() == ["step-00000020", "step-00000030", "step-00000040"]
    assert_equal(load(store.path("step-00000040")).tensors, tensors(4))


def test_on_a_disk_that_is_really_full_the_oldest_checkpoint_is_removed_and_the_save_succeeds(tmp_path):
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=256k", "tmpfs", tmp_path], capture_output=True).returncode:
        pytest.skip("mounting needs root")
    try:
        store = Store(tmp_path / "checkpoints")
        with closing(Saver(store)) as saver:
            for step in range(10, 50, 10):
                saver.save([f"step-{step:08d}"], step, {"a": torch.zeros(18_000)}, STATES)  # 72 kB
        assert said(saver) == ["the disk is full: removed step-00000010 to make room for checkpoint step-00000040"]
        assert store.names() == ["step-00000020", "step-00000030", "step-00000040"]
        assert all(store.problem(name) is None for name in store.names())
    finally:
        subprocess.run(["umount", tmp_path], check=True)


def test_best_protected_and_newest_stay_on_a_full_disk_and_set_aside_ones_are_removed_first(store, full):
    store.link("best", "step-00000010")
    store.save("step-00000005", 5, tensors(5), STATES)
    store.set_aside_after(20)
    full(1)
    with closing(Saver(store)) as saver:
        saver.save(["step-00000040"], 40, {"a": torch.zeros(500)}, STATES, protected=["step-00000005"])
    assert store.names() == ["step-00000005", "step-00000010", "step-00000020", "step-00000040"]
    assert "removed step-00000030.left-1 to make room" in said(saver)[0]


def test_a_save_waits_for_space_with_a_line_each_minute_and_succeeds_once_there_is_some(store, full):
    full(4)
    with closing(Saver(store, patience=10)) as saver:
        saver.save(["step-00000040"], 40, tensors(4), STATES)
    where = f"step-00000040 waits for space in {store.folder}"
    assert said(saver)[1:] == [f"the disk is full: {where}, minute {minute} of 10" for minute in (1, 2, 3)]
    assert store.newest_valid() == ("step-00000040", [])


def test_after_its_patience_a_save_fails_because_of_the_disk_and_published_checkpoints_stay(store, full):
    full(99)
    saver = Saver(store, patience=2)
    saver.save(["step-00000040"], 40, tensors(4), STATES)
    with pytest.raises(RunError, match="step-00000040 could not be written: No space left") as caught:
        saver.close()
    assert caught.value.reason == "disk"
    assert len(said(saver)) == 3
    assert store.newest_valid() == ("step-00000030", [])
    assert not list(store.folder.glob(".*"))


def test_a_run_that_is_asked_to_stop_does_not_wait_for_space(store, full, monkeypatch):
    monkeypatch.setattr(saving, "MINUTE", 3600.0)
    full(99)
    saver = Saver(store, asynchronous=False, patience=10)
    saver.asked_to_stop = lambda: True
    with pytest.raises(RunError, match="No space left"):
        saver.save(["step-00000040"], 40, tensors(4), STATES)


@pytest.fixture
def left(tmp_path):
    """Set four checkpoints aside, the oldest first, and keep one other."""
    store = Store(tmp_path / "c")
    for step in (1, 2, 3, 4):
        store.save(f"step-{step:08d}", step, tensors(step), STATES)
    store.save("step-00000000", 0, tensors(), STATES)
    store.set_aside_after(0)
    return store


def names(store):
    return sorted(path.name for path in store.aside())


def test_the_newest_set_aside_checkpoints_stay(left):
    assert left.prune() == ["step-00000001.left-1", "step-00000002.left-1"]
    assert names(left) == ["step-00000003.left-1", "step-00000004.left-1"]
    assert left.names() == ["step-00000000"]


def test_what_a_resume_set_aside_goes_on_a_full_disk_only_oldest_first(tmp_path):
    store = Store(tmp_path / "c", Keep(rolling=1))
    for step in (0, 4, 1, 2, 3):
        store.save(f"step-{step:08d}", step, tensors(step), STATES)
    store.set_aside_after(0, word="old")
    store.save("step-00000005", 5, tensors(5), STATES)
    every = [f"step-{step:08d}.old-1" for step in (1, 2, 3, 4)]
    assert (store.prune(), names(store)) == (["step-00000000"], every)
    size = sum(path.stat().st_size for path in (store.folder / every[0]).iterdir())
    assert store.make_room(size + 1) == [every[3], every[0]]


DOUBTS = {
    "a flipped bit": lambda path: flip(path / SHARD),
    "a flipped bit in the manifest": lambda path: flip(path / "manifest.json", place=20),
    "no manifest": lambda path: (path / "manifest.json").unlink(),
    "a file of somebody else": lambda path: (path / "notes.txt").write_text("mine"),
    "a link": lambda path: (path / "more").symlink_to(".."),
}


@pytest.mark.parametrize("doubt", DOUBTS.values(), ids=DOUBTS)
def test_a_checkpoint_that_may_have_changed_is_never_removed(left, doubt):
    path = left.folder / "step-00000001.left-1"
    doubt(path)
    os.utime(path, (0, 0))
    before = {each.name: each.lstat().st_size for each in path.iterdir()}
    assert left.prune() == ["step-00000002.left-1"]
    assert left.make_room(10**9) == ["step-00000003.left-1", "step-00000004.left-1"]
    assert {each.name: each.lstat().st_size for each in path.iterdir()} == before


def test_a_link_set_aside_and_the_target_of_best_stay(left):
    (left.folder / "step-00000009.left-1").symlink_to("step-00000001.left-1")
    left.link("best", "step-00000002.left-1")
    assert set(left.make_room(10**9)) == {f"step-{step:08d}.left-1" for step in (1, 3, 4)}
    assert names(left) == ["step-00000002.left-1", "step-00000009.left-1"]


def test_an_incomplete_checkpoint_whose_other_files_are_unchanged_may_be_removed(left):
    path = left.folder / "step-00000001.left-1"
    (path / SHARD).unlink()
    os.utime(path, (0, 0))
    assert "step-00000001.left-1" in left.prune()
