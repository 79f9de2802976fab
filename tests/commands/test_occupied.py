"""One launch at a time in the folder of a run: the lock, its handover to a restart, and its release by a kill."""

import os
import signal
import threading
import time

import pytest

from kdtrain import files
from kdtrain.config.commands import DistillConfig
from kdtrain.config.sections import CheckpointConfig
from kdtrain.errors import UsageError
from kdtrain.monitor.facts import LOCK
from kdtrain.run import folder as module
from kdtrain.run.folder import run_lock, write_description


@pytest.fixture
def config(tmp_path):
    """Configure a run that has started."""
    out = tmp_path / "run"
    out.mkdir()
    config = DistillConfig(student="org/student", out=out, cache=tmp_path / "c")
    write_description(config, {})
    return config


@pytest.fixture
def anew(config):
    """Configure the same run, to be moved aside and started from the beginning."""
    checkpoint = CheckpointConfig(resume="never", overwrite=True)
    return DistillConfig(student="org/student", out=config.out, cache=config.cache, checkpoint=checkpoint)


def test_one_launch_at_a_time(config):
    with run_lock(config) as goes_on:
        assert goes_on
        with pytest.raises(UsageError, match=r"^another process is training in .*run; wait for it"), run_lock(config):
            pass
    with run_lock(config):
        assert (config.out / LOCK).exists()
    assert not (config.out / LOCK).exists()


def test_a_run_is_not_moved_away_under_the_process_that_trains_in_it(config, anew):
    with run_lock(config), pytest.raises(UsageError, match="another process is training"), run_lock(anew):
        pass
    assert (config.out / "config.toml").exists() and not config.out.with_name("run.old-1").exists()


def test_a_launch_that_moves_a_run_aside_locks_the_new_folder(config, anew):
    with run_lock(anew) as goes_on:
        assert not goes_on
        write_description(config, {})
        for each in (config, anew):
            with pytest.raises(UsageError, match="another process is training"), run_lock(each):
                pass
    aside = config.out.with_name("run.old-1")
    assert {path.name for path in aside.iterdir()} == {"config.toml", "environment.json", LOCK}
    assert {path.name for path in config.out.iterdir()} == {"config.toml", "environment.json"}


def test_a_killed_process_releases_its_lock(config):
    child = os.fork()
    if child == 0:
        try:
            with run_lock(config):
                os.kill(os.getpid(), signal.SIGKILL)
        finally:
            os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL
    assert (config.out / LOCK).exists()
    with run_lock(config) as goes_on:
        assert goes_on


def test_a_folder_made_for_a_refused_launch_is_removed(tmp_path):
    config = DistillConfig(student="org/student", out=tmp_path / "a" / "b", cache=tmp_path / "c")
    with run_lock(config) as goes_on:
        assert (config.out / LOCK).exists() and not goes_on
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("identity", ["run-a", "none"])
def test_a_restart_by_torchrun_waits_for_its_earlier_attempt_and_other_launches_do_not(config, monkeypatch, identity):
    monkeypatch.setattr(module, "HANDOVER", 300.0)
    monkeypatch.setattr(files, "_POLL", 0.01)
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", identity)
    monkeypatch.setenv("MASTER_ADDR", "node-1")
    before = run_lock(config)
    before.__enter__()
    threading.Timer(0.2, lambda: before.__exit__(None, None, None)).start()
    with run_lock(config) as goes_on:
        assert goes_on
        monkeypatch.setenv("TORCHELASTIC_RUN_ID", "run-b")
        began = time.monotonic()
        with pytest.raises(UsageError, match="another process is training"), run_lock(config):
            pass
        assert time.monotonic() - began < 60, "it waits"
        monkeypatch.setenv("TORCHELASTIC_RUN_ID", identity)
        monkeypatch.setattr(module, "HANDOVER", 0.05)
        with pytest.raises(UsageError, match="another process is training"), run_lock(config):
            pass
