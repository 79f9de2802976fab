"""Fault points: silent unless asked for, fired once at the call that was asked for, and written down."""

import errno
import os
import signal
import subprocess
import sys

import pytest

from kdtrain import faults

PROGRAM = """
from kdtrain import faults
for n in range({calls}):
    faults.point("here")
    print(n, flush=True)
"""


def run(fault, calls, log):
    """A process that passes the point `here` so often and prints a number after each time."""
    environment = {**os.environ, "KDTRAIN_FAULT": fault, "KDTRAIN_FAULT_LOG": str(log)}
    argv = [sys.executable, "-c", PROGRAM.format(calls=calls)]
    return subprocess.run(argv, env=environment, capture_output=True, text=True)


@pytest.mark.parametrize("action, number", [("kill", signal.SIGKILL), ("term", signal.SIGTERM)])
def test_a_signal_comes_at_the_call_that_was_asked_for_and_is_written_down_before(tmp_path, action, number):
    done = run(f"here:{action}:3", 5, tmp_path / "log")
    assert done.returncode == -number
    assert done.stdout.split() == ["0", "1"]
    assert (tmp_path / "log").read_text() == "here\n"


def test_without_a_number_the_first_call_is_meant(tmp_path):
    assert run("here:kill", 2, tmp_path / "log").stdout == ""


def test_another_point_and_no_fault_do_nothing(tmp_path):
    for fault in ("elsewhere:kill", ""):
        assert run(fault, 3, tmp_path / "log").returncode == 0
    assert not (tmp_path / "log").exists()


@pytest.fixture
def asked(monkeypatch, tmp_path):
    """Ask for faults in this process."""

    def ask(text):
        monkeypatch.setenv("KDTRAIN_FAULT", text)
        monkeypatch.setenv("KDTRAIN_FAULT_LOG", str(tmp_path / "log"))
        monkeypatch.setattr(faults, "_faults", faults._wanted())
        monkeypatch.setattr(faults, "_calls", type(faults._calls)())
        return tmp_path / "log"

    return ask


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


def test_a_point_that_passes_amounts_fires_where_their_sum_reaches_the_number(asked):
    asked("disk:enospc:10")
    faults.point("disk", 4)
    faults.point("disk", 5)
    with pytest.raises(OSError):
        faults.point("disk", 100)
    faults.point("disk", 1)
