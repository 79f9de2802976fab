"""Checkpoints are published whole, a damaged one is named and skipped, and pruning never removes a needed one."""

import errno
import json
import os
import resource
import shutil
import signal

import pytest
import torch
from checkpoint_kit import SHARD, STATES, assert_equal, flip, tensors

from kdtrain.checkpoint.sealed import MANIFEST, STATE
from kdtrain.checkpoint.store import Store, load
from kdtrain.checkpoint.tiers import Keep
from kdtrain.errors import RunError, UsageError
from kdtrain.files import temporary_name


def save(store, step, name=None, rollbacks=0):
    store.save(name or f"step-{step:08d}", step, {"a": torch.full((2,), float(step))}, STATES, rollbacks)


def test_the_newest_is_latest_and_no_hidden_file_is_left(store):
    assert store.names() == ["step-00000010", "step-00000020", "step-00000030"]
    assert os.readlink(store.folder / "latest") == "step-00000030"
    assert sorted(path.name for path in store.folder.iterdir()) == ["latest", *store.names()]
    assert all(path.is_dir() or path.suffix in (".json", ".safetensors") for path in store.folder.rglob("*"))


def test_the_newest_follows_from_step_and_rollbacks_and_not_from_the_name(store):
    save(store, 25, "rollback_1_iter25", rollbacks=1)
    save(store, 25, "zzz")
    save(store, 30, "epoch-0001")
    expected = ["step-00000010", "step-00000020", "zzz", "rollback_1_iter25", "epoch-0001", "step-00000030"]
    assert store.names() == expected
    assert store.newest_valid(before=30) == ("rollback_1_iter25", [])
    assert store.newest_valid(before=10) == (None, [])


def test_when_every_one_is_damaged_each_is_named(store):
    for name in store.names():
        flip(store.folder / name / STATE)
    with pytest.raises(RunError) as caught:
        store.choose("latest")
    assert all(name in str(caught.value) for name in store.names())


def test_a_checkpoint_is_chosen_by_link_by_name_and_by_path(store):
    for name in ("step-00000020", "step-00000010"):  # a link is replaced
        store.link("best", name)
        assert store.choose("best").name == store.linked("best") == os.readlink(store.folder / "best") == name
    assert store.choose("step-00000020").name == "step-00000020"
    assert store.choose(str(store.folder / "step-00000020")).name == "step-00000020"
    store.copy("step-00000020", "mine")
    assert store.choose("mine").name == "mine"


def test_a_missing_checkpoint_is_refused_with_the_names_of_those_that_exist(store):
    with pytest.raises(UsageError) as caught:
        store.choose("best")
    assert "step-00000010" in str(caught.value) and "latest" in str(caught.value)
    with pytest.raises(UsageError, match="holds no checkpoint"):
        Store(store.folder / "nowhere").choose("latest")


def test_a_second_name_is_whole_and_costs_no_space(store):
    store.copy("step-00000020", "epoch-0001")
    assert store.problem("epoch-0001") is None
    assert_equal(load(store.folder / "epoch-0001").tensors, tensors(20))
    files = [store.folder / name / SHARD for name in ("step-00000020", "epoch-0001")]
    assert files[0].stat().st_ino == files[1].stat().st_ino
    shutil.rmtree(files[0].parent)
    assert store.problem("epoch-0001") is None
    assert os.readlink(store.folder / "latest") == "step-00000030"


def test_on_a_disk_without_hard_links_a_second_name_is_a_copy(store, monkeypatch):
    def refused(source, to):
        raise OSError(errno.EPERM, os.strerror(errno.EPERM))

    monkeypatch.setattr(os, "link", refused)
    store.copy("step-00000020", "epoch-0001")
    assert store.problem("epoch-0001") is None


def test_pruning_keeps_the_newest_of_each_tier_the_best_and_the_protected(tmp_path):
    store = Store(tmp_path, Keep(rolling=2, epoch=1, special=1))
    for step in range(1, 8):
        save(store, step)
        save(store, step, f"epoch-{step:04d}")
    save(store, 3, "interrupted-00000003")
    save(store, 4, "rollback_1_iter4")
    store.link("best", "step-00000001")
    store.link("latest", "step-00000007")
    assert "step-00000002" in store.prune(["step-00000003"])
    expected = ["step-00000001", "step-00000003", "rollback_1_iter4", "step-00000006", "epoch-0007", "step-00000007"]
    assert store.names() == expected
    assert store.prune(["step-00000003"]) == []


def test_pruning_does_not_count_broken_ones_not_even_those_of_the_right_size(tmp_path):
    store = Store(tmp_path, Keep(rolling=1))
    for step in (10, 20, 30, 40):
        save(store, step)
    os.truncate(tmp_path / "step-00000040" / SHARD, 5)
    flip(tmp_path / "step-00000030" / SHARD)
    assert Store(tmp_path, Keep(rolling=1)).prune() == ["step-00000010"]
    assert store.newest_valid()[0] == "step-00000020"


def test_checkpoints_later_than_a_rollback_are_set_aside_and_the_links_follow(store):
    store.link("best", "step-00000020")
    save(store, 15, "window_1_iter15")
    assert store.set_aside_after(15) == ["step-00000020", "step-00000030"]
    assert store.names() == ["step-00000010", "window_1_iter15"]
    assert store.choose("best").name == "step-00000020.left-1"
    assert store.choose("latest").name == "window_1_iter15" == os.readlink(store.folder / "latest")
    save(store, 20)
    assert store.set_aside_after(15) == ["step-00000020"]
    assert (store.folder / "step-00000020.left-2").is_dir()
    assert os.readlink(store.folder / "latest") == "window_1_iter15"


def test_checkpoints_of_the_same_step_after_more_rollbacks_are_set_aside_as_well(store):
    save(store, 20, "rollback_1_iter20", rollbacks=1)
    assert store.set_aside_after(20, 0) == ["rollback_1_iter20", "step-00000030"]
    assert store.names() == ["step-00000010", "step-00000020"]


def test_a_damaged_checkpoint_is_kept_when_its_step_is_saved_again(store):
    flip(store.folder / "step-00000030" / SHARD)
    save(store, 30)
    assert store.problem("step-00000030") is None
    assert (store.folder / "step-00000030.damaged-1" / SHARD).exists()


def test_a_checkpoint_of_an_interruption_is_not_planned(store):
    save(store, 35, "interrupted-00000035")
    assert store.newest_valid(before=40)[0] == "interrupted-00000035"
    assert store.newest_valid(before=40, planned=True)[0] == "step-00000030"


def test_damaged_ones_are_renamed_and_nothing_is_deleted(store):
    store.link("best", "step-00000030")
    files = len([path for path in store.folder.rglob("*") if path.is_file() and not path.is_symlink()])
    for name in ("step-00000020", "step-00000030"):
        flip(store.folder / name / SHARD)
    assert store.set_aside_damaged() == ["step-00000020", "step-00000030"]
    assert store.names() == ["step-00000010"]
    left = [path for path in store.folder.rglob("*") if path.is_file() and not path.parent.is_symlink()]
    assert len(left) == files == 9
    assert os.readlink(store.folder / "latest") == "step-00000010"
    assert not (store.folder / "best").is_symlink()
    assert store.set_aside_damaged() == []


POINTS = ("write", "before-manifest", "before-rename", "between-renames", "after-rename")


@pytest.mark.parametrize("name", POINTS)
@pytest.mark.parametrize("step", [30, 40])
def test_an_error_anywhere_leaves_a_whole_checkpoint_under_every_name(store, broken, name, step):
    if (name, step) == ("between-renames", 40):
        return  # there is nothing to be replaced
    broken(f"checkpoint.{name}", OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)))
    with pytest.raises(RunError, match=f"step-000000{step} could not be written: No space left on device"):
        store.save(f"step-{step:08d}", step, tensors(step), STATES)
    assert [store.problem(each) for each in store.names()] == [None] * len(store.names())
    assert {"step-00000010", "step-00000020", "step-00000030"} <= set(store.names())
    assert not list(store.folder.glob(".*"))
    assert_equal(load(store.path("step-00000030")).tensors, tensors(30))


@pytest.mark.parametrize("limit, entry", [(100, "header in shard"), (1000, "a in shard"), (40_000, "at state.json")])
def test_a_disk_that_is_really_full_is_an_error_that_names_the_checkpoint_and_the_entry(store, limit, entry):
    # Beyond the limit the kernel refuses to write, as on a full disk: the header, the tensors, or only the state.
    before = sorted(store.folder.rglob("*"))
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, hard))
    try:
        with pytest.raises(RunError, match="step-00000040 could not be written") as caught:
            store.save("step-00000040", 40, {"a": torch.zeros(3000)}, {"text": "x" * 50_000})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        signal.signal(signal.SIGXFSZ, handler)
    assert entry in str(caught.value) and "\n" not in str(caught.value)
    assert sorted(store.folder.rglob("*")) == before


def test_a_checkpoint_half_written_at_a_kill_is_not_a_checkpoint_and_is_removed(store):
    for name in ("step-00000040", "epoch-0001"):
        hidden = temporary_name(store.folder / name)
        hidden.mkdir()
        (hidden / SHARD).write_bytes(b"half")
    foreign = store.folder / ".step-00000040.0123456789ab.tmp"
    foreign.mkdir()
    assert store.newest_valid() == ("step-00000030", [])
    save(store, 50)
    assert list(store.folder.glob(".*")) == [foreign]
    assert store.newest_valid() == ("step-00000050", [])


def test_a_kill_between_the_two_renames_loses_neither_the_checkpoint_nor_the_link_to_it(store):
    store.link("best", "step-00000030")
    os.rename(store.folder / "step-00000030", store.folder / "step-00000030.replaced-1")
    assert store.names() == ["step-00000010", "step-00000020", "step-00000030"]
    assert store.newest_valid() == ("step-00000030", [])
    assert_equal(load(store.choose("best")).tensors, tensors(30))
    save(store, 40)
    assert store.choose("best").name == "step-00000030"
    assert store.prune() == []


def test_a_folder_that_only_has_the_name_of_a_replaced_checkpoint_stays(store):
    (store.folder / "notes.replaced-1").write_text("mine")
    (store.folder / "x").write_text("mine")
    (store.folder / "x.replaced-1").write_text("mine too")
    (store.folder / "step-00000077.replaced-1").mkdir()
    (store.folder / "step-00000077.replaced-1" / "state.json").write_text("{}")
    (store.folder / "step-00000088.replaced-1").symlink_to("step-00000010")
    before = sorted(store.folder.rglob("*"))
    save(store, 40)
    assert set(before) < set(store.folder.rglob("*"))


def test_a_pipe_in_a_replaced_checkpoint_does_not_block(store):
    os.mkfifo(store.folder / "step-00000030" / "pipe")
    (store.folder / "step-00000030" / "link").symlink_to("nowhere")
    os.rename(store.folder / "step-00000030", store.folder / "step-00000030.replaced-1")
    signal.alarm(20)  # which ends a test that waits
    save(store, 40)
    signal.alarm(0)
    assert_equal(load(store.folder / "step-00000030").tensors, tensors(30))


def test_a_checkpoint_of_another_format_is_refused_by_its_version(store):
    folder = store.folder / "step-00000030"
    (folder / MANIFEST).write_text(json.dumps({"version": 1, "files": {}}))
    assert store.problem("step-00000030") == (
        "manifest.json: its format is version 1, and this kdtrain reads version 2"
    )
