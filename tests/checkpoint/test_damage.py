"""Damage to any file of a checkpoint is named; the next older one is used, and the damaged one stays."""

import json
import os
import shutil
import tempfile
from contextlib import closing, contextmanager
from pathlib import Path

import pytest
import torch
from checkpoint_kit import SHARD, STATES, flip, tensors

from kdtrain.checkpoint import shards
from kdtrain.checkpoint.saver import Saver
from kdtrain.checkpoint.sealed import MANIFEST, STATE, problem, seal
from kdtrain.checkpoint.store import Store
from kdtrain.checkpoint.tiers import Keep
from kdtrain.errors import RunError

SECOND = SHARD.replace("00001.s", "00002.s")
FILES = (SHARD, SECOND, STATE, MANIFEST)


@pytest.fixture
def store(tmp_path, monkeypatch):
    """Save two checkpoints of two shards each, and an epoch's that shares the files of the older one."""
    monkeypatch.setattr(shards, "MAX_BYTES", 80)
    store = Store(tmp_path / "checkpoints")
    for step in (10, 20):
        store.save(f"step-{step:08d}", step, {name: tensors(step)[name] for name in "abc"}, STATES)
    store.copy("step-00000010", "epoch-0001")
    assert {path.name for path in (store.folder / "step-00000020").iterdir()} == set(FILES)
    return store


def replaced_by_a_folder(path):
    path.unlink()
    path.mkdir()


def extended(path):
    path.write_bytes(path.read_bytes() + b" ")


DAMAGES = {
    "truncated": lambda path: os.truncate(path, path.stat().st_size - 1),
    "cut in half": lambda path: os.truncate(path, path.stat().st_size // 2),
    "emptied": lambda path: os.truncate(path, 0),
    "removed": Path.unlink,
    "extended": extended,
    "last bit flipped": flip,
    "a folder": replaced_by_a_folder,
    "zeros": lambda path: path.write_bytes(bytes(path.stat().st_size)),
}


@pytest.mark.parametrize("file", FILES)
@pytest.mark.parametrize("damage", DAMAGES.values(), ids=DAMAGES)
def test_a_damaged_file_is_named_and_the_next_older_checkpoint_is_used(store, file, damage):
    path = store.folder / "step-00000020" / file
    damage(path)
    wrong = store.problem("step-00000020")
    assert wrong is not None and wrong.startswith(file)
    name, damaged = store.newest_valid()
    assert name == "step-00000010"
    assert damaged == [f"checkpoint step-00000020 is damaged and skipped: {wrong}"]
    assert store.choose("latest").name == "step-00000010"
    with pytest.raises(RunError, match=f"step-00000020 is damaged: {file}"):
        store.choose("step-00000020")
    assert Store(store.folder, Keep(rolling=1)).prune() == []
    assert path.parent.is_dir() and store.names() == ["epoch-0001", "step-00000010", "step-00000020"]


@pytest.mark.parametrize("file", FILES)
def test_every_single_bit_of_a_small_file_is_guarded(store, file):
    path = store.folder / "step-00000020" / file
    size = path.stat().st_size
    every = [(place, bit) for place in range(0, size, 1 if file == MANIFEST else 7) for bit in {1, 1 << place % 8}]
    unnoticed = []
    for place, bit in every:
        flip(path, place, bit)
        unnoticed += [] if problem(path.parent) else [(place, bit)]
        flip(path, place, bit)
    assert unnoticed == [] and problem(path.parent) is None


def test_a_second_name_is_damaged_with_the_first_and_both_are_named(store):
    flip(store.folder / "step-00000010" / SHARD)
    shutil.rmtree(store.folder / "step-00000020")
    name, damaged = store.newest_valid()
    assert name is None
    assert ["step-00000010" in damaged[0], "epoch-0001" in damaged[1]] == [True, True]


@contextmanager
def closed(store, *parts, mode=0):
    """Copy a store, close some of its parts, and be a user without other rights to them in the block."""
    with tempfile.TemporaryDirectory() as name:  # the folder of the test is closed to other users
        folder, is_root, nobody = Path(name) / "checkpoints", os.geteuid() == 0, 65534
        shutil.copytree(store.folder, folder, symlinks=True)
        for part in parts:
            os.chmod(folder / part, mode)
        os.chmod(name, 0o755)
        for path in [folder, *folder.rglob("*")] if is_root else []:
            os.chown(path, nobody, nobody, follow_symlinks=False)
        try:
            os.seteuid(nobody if is_root else os.geteuid())
            yield folder
        finally:
            os.seteuid(0 if is_root else os.geteuid())


@pytest.mark.parametrize("file", FILES)
def test_a_file_without_permission_is_named_and_skipped(store, file):
    with closed(store, f"step-00000020/{file}") as folder:
        found, damaged = Store(folder).newest_valid()
    assert found == "step-00000010"
    assert f"{file} cannot be read (Permission denied)" in damaged[0]


def test_a_folder_without_permission_is_named_and_skipped_and_does_not_stop_a_save(store):
    store.copy("step-00000020", "interrupted-00000020")
    with closed(store, "step-00000020", "interrupted-00000020") as folder:
        other = Store(folder, Keep(rolling=1))
        found, damaged = other.newest_valid()
        for step in (30, 40):
            other.save(f"step-{step:08d}", step, {"a": torch.zeros(1)}, STATES)
        assert other.prune() == ["step-00000010", "step-00000030"]
        assert other.set_aside_damaged() == ["step-00000020", "interrupted-00000020"]
    assert found == "step-00000010"
    assert "interrupted-00000020 is damaged" in damaged[0] and "Permission denied" in damaged[1]


@pytest.mark.parametrize("asynchronous", [True, False])
def test_a_read_only_checkpoint_stays_with_one_warning_and_stops_no_save(store, asynchronous):
    shutil.rmtree(store.folder / "epoch-0001")
    with closed(store, "step-00000010", "step-00000020", mode=0o555) as folder:
        other = Store(folder, Keep(rolling=1))
        with closing(Saver(other, asynchronous)) as saver:
            for step in (30, 40, 40, 50):
                saver.save([f"step-{step:08d}"], step, {"a": torch.zeros(1)}, STATES)
            saver.save(["step-00000020"], 60, {"a": torch.zeros(1)}, STATES)  # the name of a read-only one
            saver.save(["step-00000070"], 70, {"a": torch.zeros(1)}, STATES)
            saver.wait()
            warned = saver.warnings()
        assert other.make_room(2**40) == []
        for path in folder.rglob("step-*"):
            os.chmod(path, 0o755)
        assert problem(folder / "step-00000010") is None
        there = sorted(path.name for path in folder.iterdir() if not path.is_symlink())
        assert there == ["step-00000010", "step-00000020.replaced-1.left-1", "step-00000070"]
    places = ("step-00000010", "step-00000020", "step-00000020.replaced-1")
    why = "is no longer needed and cannot be removed: Permission denied; make it writable"
    assert warned == [("prune", f"checkpoint {folder / place} {why}") for place in places]


def test_an_extra_file_beside_the_shards_is_noticed(store):
    folder = store.folder / "step-00000020"
    shutil.copy(folder / SHARD, folder / "shard-00003-00001.safetensors")
    assert store.problem("step-00000020") == "shard-00003-00001.safetensors does not belong to it"


def test_a_manifest_that_was_written_for_other_files_does_not_make_them_a_checkpoint(store):
    folder = store.folder / "step-00000020"
    (folder / MANIFEST).write_text(seal(20, 0, {}))
    assert store.problem("step-00000020") == "manifest.json: it names files that a checkpoint does not have"
    (folder / MANIFEST).write_text(
        json.dumps({"version": 2, "step": 20, "rollbacks": 0, "files": {}, "digest": "0" * 64})
    )
    assert store.problem("step-00000020") == "manifest.json: it does not match its own digest"
    (folder / MANIFEST).write_text("[]")
    assert store.problem("step-00000020") == "manifest.json: Expected object, got array"


def test_damage_does_not_change_which_ones_are_newer(store):
    (store.folder / "step-00000020" / MANIFEST).unlink()
    store.save("step-00000015", 15, {"a": torch.zeros(1)}, STATES)
    assert store.names() == ["epoch-0001", "step-00000010", "step-00000015", "step-00000020"]
    assert store.set_aside_after(15) == ["step-00000020"]
