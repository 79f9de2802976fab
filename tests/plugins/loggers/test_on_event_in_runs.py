"""--on-event on the real command: delivered to the end, not written into the run, never taken from a run."""

import json
import os
import shlex

import pytest

from kdtrain import faults

OPTIONS = ("--cache", "cache", "--student", "student.toml")


@pytest.fixture
def failing(monkeypatch):
    """Set faults for the commands called in this process."""

    def ask(text):
        monkeypatch.setenv("KDTRAIN_FAULT", text)
        faults.read()

    yield ask
    monkeypatch.delenv("KDTRAIN_FAULT", raising=False)
    faults.read()


def test_the_command_gets_a_skip_and_the_stop_at_the_end_and_stays_out_of_the_run(workbench, tmp_path, failing):
    got, run = tmp_path / "got", tmp_path / "run"
    argv = ("distill", *OPTIONS, "--out", run, *workbench.plain, "--steps", 5, "--eval-freq", 100)
    failing("train.gradient:nan:2,train.after-step:term:4")
    command = shlex.join(["tee", "-a", str(got)])
    result = workbench.json(*argv, "--on-event", command)
    assert result["stop_reason"] == "signal"
    events = [json.loads(line) for line in got.read_text().splitlines()]
    assert [(each["event"], each["step"]) for each in events] == [("skip", 1), ("stop", 3)]
    assert all(each["run"] == str(run) for each in events)
    texts = [path.read_bytes() for path in run.rglob("*") if path.is_file()]
    assert len(texts) > 9 and not any(b"tee -a" in text for text in texts)
    failing("")
    assert workbench.json(*argv, "--on-event", "true")["stop_reason"] == "done"  # another command is no other run


def test_a_command_in_the_config_of_a_run_is_never_run(workbench, tmp_path, failing, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("cache", "teacher", "student.toml"):
        os.symlink(workbench.root / name, name)
    argv = ("distill", *OPTIONS, "--out", "run", *workbench.plain, "--eval-freq", 100)
    workbench.json(*argv, "--steps", 2)
    config = tmp_path / "run" / "config.toml"
    planted = config.read_text().replace("[monitor]\n", '[monitor]\non_event = "touch pwned"\n')
    assert planted != config.read_text()
    config.write_text(planted)

    code, _, said = workbench.call("distill", "--config", "run/config.toml", "--out", "other")
    assert code == 2 and "on_event runs a command, and this file lies with" in said and "/run/" in said
    os.symlink("run/config.toml", "mine.toml")
    assert workbench.call("distill", "--config", "mine.toml", "--out", "other")[0] == 2
    failing("train.gradient:nan:3")
    assert workbench.json(*argv, "--steps", 4)["skipped_steps"] == 1
    for command in (
        ("evaluate", "--student", "run", "--cache", "cache", "--precision", "fp32"),
        ("export", "run", "--out", "exported"),
        ("inspect", "run"),
        ("verify", "run"),
    ):
        config.write_text(planted)
        workbench.json(*command)
    assert not (tmp_path / "pwned").exists()


def test_a_config_of_the_users_own_may_name_a_command(tmp_path, monkeypatch):
    from kdtrain import cli

    (tmp_path / "config.toml").write_text('[monitor]\non_event = "mail -s run me"\n')
    argv = ["--student", "s", "--out", "o", "--cache", "c", "--config", str(tmp_path / "config.toml")]
    assert cli.parse("distill", argv).monitor.on_event == "mail -s run me"
