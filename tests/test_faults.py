"""Faults: silent unless requested, fired at the requested call or number, and logged."""

import errno
import math
import os
import signal
import subprocess
import sys
import threading

import pytest
import torch

from kdtrain import faults
from tests.cache.fork_kit import answer_of

PROGRAM = """
from kdtrain import faults
for n in range({calls}):
    faults.point("here")
    print(n, flush=True)
"""


def run(fault, calls, log):
    """Run a process that passes the point `here` several times and prints a number after each."""
    environment = {**os.environ, "KDTRAIN_FAULT": fault, "KDTRAIN_FAULT_LOG": str(log)}
    argv = [sys.executable, "-c", PROGRAM.format(calls=calls)]
    return subprocess.run(argv, env=environment, capture_output=True, text=True)


@pytest.mark.parametrize("action, number", [("kill", signal.SIGKILL), ("term", signal.SIGTERM)])
def test_a_signal_comes_at_the_requested_call_and_is_logged_before(tmp_path, action, number):
    done = run(f"here:{action}:3", 5, tmp_path / "log")
    assert done.returncode == -number
    assert done.stdout.split() == ["0", "1"]
    assert (tmp_path / "log").read_text() == "here\n"


@pytest.mark.parametrize("rank, lives", [("0", True), ("1", False)])
def test_a_fault_for_one_rank_does_not_fire_on_others(tmp_path, monkeypatch, rank, lives):
    monkeypatch.setenv("RANK", rank)
    assert (run("here:kill:2@1", 3, tmp_path / "log").returncode == 0) is lives


def test_without_a_number_the_first_call_fires(tmp_path):
    assert run("here:kill", 2, tmp_path / "log").stdout == ""


def test_another_point_and_no_fault_do_nothing(tmp_path):
    for fault in ("elsewhere:kill", ""):
        assert run(fault, 3, tmp_path / "log").returncode == 0
    assert not (tmp_path / "log").exists()


@pytest.fixture
def asked(monkeypatch, tmp_path):
    """Request faults in this process."""

    def ask(text):
        monkeypatch.setenv("KDTRAIN_FAULT", text)
        monkeypatch.setenv("KDTRAIN_FAULT_LOG", str(tmp_path / "log"))
        faults.read()
        return tmp_path / "log"

    yield ask
    monkeypatch.undo()
    faults.read()


def test_a_full_disk_and_an_error_are_raised_once(asked):
    log = asked("a:enospc:2,b:raise")
    faults.point("a")
    with pytest.raises(OSError) as full:
        faults.point("a")
    assert full.value.errno == errno.ENOSPC
    faults.point("a")
    with pytest.raises(RuntimeError, match="fault b"):
        faults.point("b")
    assert log.read_text() == "a\nb\n"


def test_an_unknown_action_is_named(asked):
    asked("a:explode")
    with pytest.raises(ValueError, match="explode"):
        faults.point("a")


def test_a_point_that_counts_bytes_fires_at_the_write_that_brings_the_last_one(asked):
    log = asked("disk:enospc:10")
    faults.point("disk", 4)
    faults.point("disk", 5)
    assert not log.exists()
    with pytest.raises(OSError):
        faults.point("disk", 4)
    faults.point("disk", 100)
    assert log.read_text() == "disk\n"


def values(name, numbers, tensor=None):
    tensor = torch.ones(2, 2) if tensor is None else tensor
    return {number: faults.changed(name, tensor, number).flatten().tolist() for number in numbers}


def test_a_tensor_is_multiplied_at_the_requested_numbers_however_often_they_come(asked):
    log = asked("loss:x30:3-4")
    assert values("loss", [2, 3, 4, 5]) == {2: [1] * 4, 3: [30] * 4, 4: [30] * 4, 5: [1] * 4}
    assert values("loss", [3]) == {3: [30] * 4}
    assert log.read_text() == "loss\n"


def test_the_first_entry_becomes_nan_and_the_given_tensor_does_not_change(asked):
    asked("gradient:nan:7")
    given = torch.ones(3)
    found = faults.changed("gradient", given, 7)
    assert math.isnan(found[0])
    assert (found[1:].tolist(), given.tolist()) == ([1, 1], [1, 1, 1])


def test_gradients_pass_through_a_changed_tensor(asked):
    asked("loss:x30:1,row:nan:1")
    loss, row = torch.tensor(2.0, requires_grad=True), torch.ones(2, requires_grad=True)
    faults.changed("loss", loss, 1).backward()
    faults.changed("row", row, 1).sum().backward()
    assert loss.grad == 30
    assert math.isnan(row.grad[0])
    assert row.grad[1] == 1


def test_a_tensor_is_itself_without_a_fault(asked):
    log = asked("loss:nan:7,here:kill:3")
    tensor = torch.ones(2)
    assert faults.changed("elsewhere", tensor, 7) is tensor
    assert faults.changed("loss", tensor, 8) is tensor
    assert not log.exists()


@pytest.mark.parametrize("rank, fires", [("1", True), ("0", False), (None, False)])
def test_a_changed_tensor_may_be_on_one_rank_only(asked, monkeypatch, rank, fires):
    asked("gradient:nan:7@1")
    if rank is None:
        monkeypatch.delenv("RANK", raising=False)
    else:
        monkeypatch.setenv("RANK", rank)
    assert math.isnan(faults.changed("gradient", torch.ones(1), 7)) is fires


def test_an_action_that_changes_no_tensor_is_named(asked):
    asked("loss:kill:1")
    with pytest.raises(ValueError, match="kill"):
        faults.changed("loss", torch.ones(1), 1)


NUMBERS = torch.ones(100_000)


def add_in_threads() -> list[str]:
    """Add in eight threads that begin at once; return their errors."""
    errors, start = [], threading.Barrier(8)

    def add() -> None:
        start.wait()
        try:
            NUMBERS.add(1)
        except RuntimeError as error:
            errors.append(str(error))

    threads = [threading.Thread(target=add) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return errors


def test_threads_of_a_fork_find_the_pool_of_torch(server):
    """Without the renewal in conftest.py and forks.py some of them find none, in every second fork."""
    torch.set_num_threads(torch.get_num_threads())  # there is a pool
    assert [answer_of(add_in_threads) for _ in range(12)] == [[]] * 12
    code = "from tests.test_faults import add_in_threads; raise SystemExit(len(add_in_threads()))"
    assert [server.run("-c", code)[0].returncode for _ in range(12)] == [0] * 12
