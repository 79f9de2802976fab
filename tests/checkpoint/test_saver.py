"""Saving in the background gives the same bits as saving in place, and loses no error."""

import errno
import os
import signal
import subprocess
import sys
import threading
from contextlib import closing

import pytest
import torch
from checkpoint_kit import STATES, assert_equal, in_child, tensors

from kdtrain import faults
from kdtrain.checkpoint.saver import Saver
from kdtrain.checkpoint.sealed import problem
from kdtrain.checkpoint.store import Store, load
from kdtrain.checkpoint.tiers import Keep
from kdtrain.errors import RunError


@pytest.fixture
def saver(store):
    saver = Saver(store)
    yield saver
    saver.close()


@pytest.fixture
def held(monkeypatch):
    """Hold every save at its first byte until the event is set."""
    release = threading.Event()
    before = faults.point

    def point(name, amount=1):
        if name == "checkpoint.write":
            assert release.wait(300)
        before(name, amount)

    monkeypatch.setattr(faults, "point", point)
    return release


def files(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_an_asynchronous_save_equals_a_synchronous_one_although_everything_changes_at_once(tmp_path, held):
    own, state = tensors(7), {"progress": {"step": 40}, "list": [1, [2]]}
    saver = Saver(Store(tmp_path / "a"))
    assert 0 < saver.save(["step-00000040"], 40, own, state) < 5
    for tensor in own.values():
        tensor.zero_()
    state["list"][1].append(3)
    state["progress"]["step"] = 41
    assert saver.store.names() == []
    held.set()
    saver.close()

    in_place = Saver(Store(tmp_path / "b"), asynchronous=False)
    in_place.save(["step-00000040"], 40, tensors(7), {"progress": {"step": 40}, "list": [1, [2]]})
    assert in_place.store.names() == ["step-00000040"]
    assert files(tmp_path / "a" / "step-00000040") == files(tmp_path / "b" / "step-00000040")


def test_the_buffers_are_reused_and_follow_changes_of_shape_and_dtype(saver):
    saver.save(["step-00000040"], 40, tensors(1), STATES)
    first = {name: buffer.data_ptr() for name, buffer in saver._buffers.items()}
    saver.save(["step-00000050"], 50, tensors(2), STATES)
    assert {name: buffer.data_ptr() for name, buffer in saver._buffers.items()} == first
    other = {"a": torch.ones(7), "c": torch.tensor(1)}
    saver.save(["step-00000060"], 60, other, STATES)
    saver.close()
    for step, saved in ((40, tensors(1)), (50, tensors(2)), (60, other)):
        assert_equal(load(saver.store.folder / f"step-{step:08d}").tensors, saved)
    assert saver._buffers == {}


def test_copying_takes_one_thread_and_gives_the_others_back(saver, monkeypatch):
    threads, copied = torch.get_num_threads(), []
    copy_ = torch.Tensor.copy_
    monkeypatch.setattr(torch.Tensor, "copy_", lambda *a, **k: copied.append(torch.get_num_threads()) or copy_(*a, **k))
    torch.set_num_threads(3)
    try:
        saver.save(["step-00000040"], 40, tensors(), STATES)
        assert torch.get_num_threads() == 3 and set(copied) == {1}
    finally:
        torch.set_num_threads(threads)


def test_a_save_waits_for_the_one_in_flight(saver, held):
    saver.save(["step-00000040"], 40, tensors(), STATES)
    threading.Timer(0.3, held.set).start()
    assert saver.save(["step-00000050"], 50, tensors(), STATES) > 0
    assert held.is_set()
    assert saver.store.problem("step-00000040") is None


def test_one_state_has_all_requested_names_and_the_links_and_retention_follow(tmp_path):
    saver = Saver(Store(tmp_path, Keep(rolling=1, epoch=1)))
    for step in (1, 2, 3, 4):
        names = [f"step-{step:08d}", f"epoch-{step:04d}"]
        best = names[0] if step == 2 else None
        saver.save(names, step, tensors(step), STATES, rollbacks=step, best=best, protected=["epoch-0001"])
    saver.close()
    store = saver.store
    assert store.names() == ["epoch-0001", "step-00000002", "epoch-0004", "step-00000004"]
    assert (store.linked("best"), store.linked("latest")) == ("step-00000002", "step-00000004")
    assert [problem(store.folder / name) for name in store.names()] == [None] * 4
    assert_equal(load(store.folder / "epoch-0004").tensors, tensors(4))


BROKEN = OSError(errno.EIO, os.strerror(errno.EIO))


@pytest.mark.parametrize("surfaces", ["save", "wait", "close"])
def test_an_error_surfaces_at_the_next_call_whichever_it_is_and_only_once(store, broken, surfaces):
    broken("checkpoint.write", BROKEN)
    saver = Saver(store)
    saver.save(["step-00000040"], 40, tensors(), STATES)
    call = {"save": lambda: saver.save(["step-00000050"], 50, tensors(), STATES)}
    with pytest.raises(RunError, match="step-00000040 could not be written: Input/output error, at header in"):
        call.get(surfaces, getattr(saver, surfaces))()
    assert store.newest_valid() == ("step-00000030", [])
    saver.save(["step-00000050"], 50, tensors(5), STATES)
    saver.close()
    assert store.newest_valid() == ("step-00000050", [])


@pytest.mark.parametrize("asynchronous", [True, False])
@pytest.mark.parametrize(
    "point, error, words",
    [
        ("before-prune", BROKEN, "checkpoints: Input/output error; published checkpoints are intact"),
        ("before-rename", KeyError("x"), "failed: KeyError: 'x'"),
        ("write", MemoryError("none left"), "failed: MemoryError: none left"),
    ],
)
def test_any_error_is_one_line_that_names_the_place(store, broken, asynchronous, point, error, words):
    broken(f"checkpoint.{point}", error)
    with pytest.raises(RunError) as caught, closing(Saver(store, asynchronous)) as saver:
        saver.save(["step-00000040"], 40, tensors(), STATES)
    assert words in str(caught.value) and "\n" not in str(caught.value)
    assert {"step-00000010", "step-00000020", "step-00000030"} <= set(store.names())


def train(folder):
    """Save five times; the third save replaces the second, and is the best."""
    saver = Saver(Store(folder, Keep(rolling=2, epoch=1)))
    weights = {"a": torch.zeros(100)}
    for step in (10, 20, 20, 30, 40):
        weights["a"] += 1
        names = [f"step-{step:08d}", *([f"epoch-{step:04d}"] if step % 20 == 0 else [])]
        saver.save(names, step, weights, {"step": step}, best="step-00000020" if step == 20 else None)
        weights["a"] *= 2
    saver.close()


VALUES = {10: [1.0], 20: [3.0, 7.0], 30: [15.0], 40: [31.0]}
POINTS = {
    "write": range(1, 5001, 311),
    "before-manifest": range(1, 20),
    "before-rename": range(1, 20),
    "between-renames": range(1, 20),
    "after-rename": range(1, 20),
    "before-link": range(1, 20),
    "before-prune": range(1, 20),
    "pruning": range(1, 20),
}


@pytest.mark.parametrize("point", POINTS)
def test_a_kill_at_any_point_in_the_background_leaves_a_whole_checkpoint_and_the_best(tmp_path, point):
    steps = []
    for number in POINTS[point]:
        folder, log = tmp_path / f"{number}", tmp_path / f"{number}.log"
        ended = in_child(lambda to=folder: train(to), f"checkpoint.{point}:kill:{number}", log)
        if ended == 0:
            break
        assert ended == -signal.SIGKILL and log.read_text() == f"checkpoint.{point}\n"
        store = Store(folder, Keep(rolling=2, epoch=1))
        newest, damaged = store.newest_valid()
        assert damaged == [] and [store.problem(name) for name in store.names()] == [None] * len(store.names())
        steps.append(0 if newest is None else load(store.path(newest)).state["step"])
        if newest is not None:
            assert load(store.path(newest)).tensors["a"][0].item() in VALUES[steps[-1]]
        if steps[-1] > 20:
            assert load(store.choose("best")).state["step"] == 20
        store.save("step-00000050", 50, tensors(), STATES)
        assert not [*folder.glob(".*"), *folder.glob("*.replaced")]
        assert [store.problem(name) for name in store.names()] == [None] * len(store.names())
    assert ended == 0 or point == "write"
    assert len(steps) >= 2 and steps == sorted(steps)
    assert steps[-1] >= (20 if point == "between-renames" else 30)


def test_without_memory_for_the_copy_the_error_names_the_option_to_use(saver, monkeypatch):
    def none(*args, **kwargs):
        raise RuntimeError("DefaultCPUAllocator: can't allocate memory")

    monkeypatch.setattr(torch, "empty_like", none)
    with pytest.raises(RunError, match=r"step-00000040 was not started: no memory for .* KiB; use --no-async"):
        saver.save(["step-00000040"], 40, tensors(), STATES)


PROGRAM = """
import sys
from pathlib import Path
import torch
from kdtrain.checkpoint.saver import Saver
from kdtrain.checkpoint.store import Store
saver = Saver(Store(Path(sys.argv[1])))
for step in (10, 20):
    saver.save([f"step-{step:08d}"], step, {"a": torch.zeros(4096)}, {"step": step})
"""


def test_a_process_that_ends_without_waiting_has_written_its_last_checkpoint(tmp_path):
    folder = tmp_path / "checkpoints"
    subprocess.run([sys.executable, "-c", PROGRAM, str(folder)], check=True)
    assert Store(folder).newest_valid() == ("step-00000020", [])
