"""Checkpoints are published whole, a damaged one is named and passed over, and pruning never removes what is needed."""

import errno
import json
import os
import resource
import shutil
import signal

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kdtrain import faults
from kdtrain.checkpoint.store import MANIFEST, STATE, TENSORS, Store, load, problem
from kdtrain.errors import RunError, UsageError

STATES = {"progress": {"step": 1, "best_loss": None}}


def tensors(seed=0):
    generator = torch.Generator().manual_seed(seed)
    weights = torch.randn(5, 3, generator=generator)
    return {
        "a": weights,
        "b": weights.t(),
        "c": torch.tensor(2.5),
        "d": torch.arange(4).bfloat16(),
        "e": torch.empty(0, 2),
    }


@pytest.fixture
def store(tmp_path):
    """Three checkpoints, at steps 10, 20 and 30."""
    store = Store(tmp_path / "checkpoints")
    for step in (10, 20, 30):
        store.save(step, tensors(step), STATES)
    return store


def damage(path, place=-1, bit=1):
    content = bytearray(path.read_bytes())
    content[place] ^= bit
    path.write_bytes(content)


def test_what_is_loaded_is_what_was_saved(store):
    checkpoint = load(store.folder / "step-00000020")
    assert checkpoint.name == "step-00000020"
    assert checkpoint.state == STATES
    assert checkpoint.tensors.keys() == tensors().keys()
    for name, tensor in tensors(20).items():
        assert torch.equal(checkpoint.tensors[name], tensor)
        assert checkpoint.tensors[name].dtype == tensor.dtype


def test_the_newest_is_latest_and_no_hidden_file_is_left(store):
    assert store.names() == ["step-00000010", "step-00000020", "step-00000030"]
    assert os.readlink(store.folder / "latest") == "step-00000030"
    assert sorted(path.name for path in store.folder.iterdir()) == ["latest", *store.names()]


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=40)
@given(file=st.sampled_from([TENSORS, STATE]), place=st.floats(0, 1, exclude_max=True), bit=st.integers(0, 7))
def test_any_flipped_bit_is_noticed(store, file, place, bit):
    path = store.folder / "step-00000030" / file
    number = int(place * path.stat().st_size)
    damage(path, number, 1 << bit)
    assert problem(path.parent) == f"{file} does not match its SHA-256"
    damage(path, number, 1 << bit)
    assert problem(path.parent) is None


def spoil_manifest(folder):
    (folder / MANIFEST).write_text("{")


def spoil_shape(folder):
    (folder / MANIFEST).write_text(json.dumps({"files": {TENSORS: 3}}))


DAMAGES = {
    "missing tensors": (lambda folder: (folder / TENSORS).unlink(), "tensors.safetensors is missing"),
    "missing state": (lambda folder: (folder / STATE).unlink(), "state.json is missing"),
    "missing manifest": (lambda folder: (folder / MANIFEST).unlink(), "manifest.json cannot be read"),
    "truncated": (lambda folder: os.truncate(folder / TENSORS, 100), "100 bytes instead of"),
    "truncated manifest": (spoil_manifest, "manifest.json cannot be read"),
    "foreign manifest": (spoil_shape, "manifest.json cannot be read"),
    "manifest of nothing": (lambda folder: (folder / MANIFEST).write_text('{"files": {}}'), "manifest.json"),
    "flipped bit": (lambda folder: damage(folder / STATE), "state.json does not match"),
}


@pytest.mark.parametrize("spoil, words", DAMAGES.values(), ids=DAMAGES)
def test_a_damaged_checkpoint_is_named_and_passed_over(store, spoil, words):
    spoil(store.folder / "step-00000030")
    assert words in str(store.problem("step-00000030"))
    name, damaged = store.newest_valid()
    assert name == "step-00000020"
    assert len(damaged) == 1
    assert "step-00000030" in damaged[0] and words in damaged[0]
    assert store.choose("latest").name == "step-00000020"


def test_a_damaged_one_that_is_asked_for_by_name_is_an_error(store):
    damage(store.folder / "step-00000030" / TENSORS)
    for wanted in ("step-00000030", str(store.folder / "step-00000030")):
        with pytest.raises(RunError, match="step-00000030 is damaged"):
            store.choose(wanted)


def test_when_every_one_is_damaged_each_is_named(store):
    for name in store.names():
        damage(store.folder / name / STATE)
    with pytest.raises(RunError) as caught:
        store.choose("latest")
    assert all(name in str(caught.value) for name in store.names())


def test_a_checkpoint_is_chosen_by_link_by_name_and_by_path(store):
    store.link("best", "step-00000010")
    assert store.choose("best").name == "step-00000010"
    assert store.choose("step-00000020").name == "step-00000020"
    assert store.choose(str(store.folder / "step-00000020")).name == "step-00000020"


def test_one_that_is_not_there_is_refused_with_those_that_are(store):
    with pytest.raises(UsageError) as caught:
        store.choose("best")
    assert "step-00000010" in str(caught.value) and "latest" in str(caught.value)
    with pytest.raises(UsageError, match="holds no checkpoint"):
        Store(store.folder / "nowhere").choose("latest")


def test_a_link_is_replaced(store):
    store.link("best", "step-00000010")
    store.link("best", "step-00000020")
    assert os.readlink(store.folder / "best") == "step-00000020"


def test_a_checkpoint_saved_again_replaces_the_one_of_its_step(store):
    store.save(20, tensors(99), STATES)
    assert store.problem("step-00000020") is None
    assert torch.equal(load(store.folder / "step-00000020").tensors["a"], tensors(99)["a"])


def test_pruning_keeps_the_newest_and_the_best(store):
    store.link("best", "step-00000010")
    store.keep_rolling = 1
    store.prune()
    assert store.names() == ["step-00000010", "step-00000030"]


def test_pruning_does_not_count_broken_ones(store):
    os.truncate(store.folder / "step-00000030" / TENSORS, 5)
    (store.folder / "step-00000020" / STATE).unlink()
    store.keep_rolling = 1
    store.prune()
    assert "step-00000010" in store.names()


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=20)
@given(
    count=st.integers(1, 6),
    keep=st.integers(1, 4),
    broken=st.sets(st.integers(1, 6)),
    best=st.none() | st.integers(1, 6),
)
def test_pruning_leaves_the_newest_valid_one_and_the_best(tmp_path, count, keep, broken, best):
    folder = tmp_path / "pruned"
    shutil.rmtree(folder, ignore_errors=True)
    store = Store(folder, keep_rolling=keep)
    for step in range(1, count + 1):
        store.save(step, {"a": torch.zeros(1)}, STATES)
    for step in broken & set(range(1, count + 1)):
        (folder / f"step-{step:08d}" / STATE).unlink()
    if best is not None and best <= count:
        store.link("best", f"step-{best:08d}")
    before = store.newest_valid()[0]
    store.prune()
    assert store.newest_valid()[0] == before
    assert best is None or best > count or (folder / "best").exists()
    assert len([name for name in store.names() if store.problem(name) is None]) <= keep + 1


def test_an_error_before_publishing_leaves_everything_as_it_was(store, monkeypatch):
    def full(name):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(faults, "point", full)
    before = sorted(store.folder.rglob("*"))
    with pytest.raises(RunError, match="step-00000040 could not be written: No space left on device"):
        store.save(40, tensors(), STATES)
    assert sorted(store.folder.rglob("*")) == before
    assert store.newest_valid() == ("step-00000030", [])


@pytest.mark.parametrize("limit", [200, 40_000])
def test_a_disk_that_is_really_full_is_an_error_that_names_the_checkpoint(store, limit):
    # Beyond the limit the kernel refuses to write, as on a full disk: the state, or already the tensors.
    before = sorted(store.folder.rglob("*"))
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, hard))
    try:
        with pytest.raises(RunError, match="step-00000040 could not be written"):
            store.save(40, {"a": torch.zeros(100)}, {"text": "x" * 50_000})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        signal.signal(signal.SIGXFSZ, handler)
    assert sorted(store.folder.rglob("*")) == before


def test_what_a_kill_left_half_written_is_no_checkpoint_and_is_cleared_away(store):
    hidden = store.folder / ".step-00000040.tmp"
    hidden.mkdir()
    (hidden / TENSORS).write_bytes(b"half")
    assert store.newest_valid() == ("step-00000030", [])
    store.save(40, tensors(), STATES)
    assert not hidden.exists()
    assert store.newest_valid() == ("step-00000040", [])


def test_nothing_in_a_checkpoint_is_pickled(store):
    for path in store.folder.rglob("*"):
        assert path.is_dir() or path.suffix in (".json", ".safetensors")
