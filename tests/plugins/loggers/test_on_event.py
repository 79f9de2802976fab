"""The command of --on-event gets the events that matter, on stdin alone, and never stops or slows the training."""

import json
import shlex
import sys
import time
from pathlib import Path

import pytest

from kdtrain.config.sections import MonitorConfig
from kdtrain.errors import UsageError, log
from kdtrain.monitor.writers import Writers
from kdtrain.plugins.loggers import on_event
from kdtrain.plugins.loggers.on_event import EVENTS, EventCommand


@pytest.fixture
def said(monkeypatch):
    texts = []
    monkeypatch.setattr(log, "warning", texts.append)
    return texts


def python(code: str, *argv: object) -> str:
    return shlex.join([sys.executable, "-c", code, *map(str, argv)])


def writers(folder, command) -> Writers:
    folder.mkdir(exist_ok=True)
    return Writers(folder, 0, None, MonitorConfig(log_to="none"), [EventCommand(command, str(folder))])


def test_the_command_gets_each_event_that_matters_in_order_and_no_other(tmp_path):
    made = writers(tmp_path / "run", shlex.join(["tee", "-a", str(tmp_path / "got")]))
    for kind in ("start", "checkpoint", *sorted(EVENTS)):
        made.event(kind, 3, detail=kind)
    made.warning("clipped", 4, "a warning")
    made.event("save", 5, "error", message="the disk is full")
    made.close()
    made.end_observers(5)
    got = [json.loads(line) for line in (tmp_path / "got").read_text().splitlines()]
    assert [each["event"] for each in got] == [*sorted(EVENTS), "save"]
    logged = [json.loads(line) for line in (tmp_path / "run" / "events.jsonl").read_text().splitlines()]
    logged = {each["event"]: each for each in logged}
    assert got == [{"run": str(tmp_path / "run"), **logged[each["event"]]} for each in got]


def test_the_failure_of_a_run_stays_the_last_event_where_the_command_fails_on_it(tmp_path):
    made = writers(tmp_path, "false")
    made.event("start", 0)
    made.event("failure", 3, "error", reason="oom", message="out of memory")
    before = (tmp_path / "events.jsonl").read_text().splitlines()
    made.end_observers(3)
    after = (tmp_path / "events.jsonl").read_text().splitlines()
    assert [json.loads(line)["event"] for line in after] == ["start", "on-event", "failure"]
    assert [after[0], after[2]] == before


def test_what_an_event_says_never_reaches_a_shell_or_the_command_line(tmp_path):
    code = "import sys; open(sys.argv[1], 'w').write(repr(sys.argv[2:]) + sys.stdin.read())"
    made = writers(tmp_path, python(code, tmp_path / "got", "$HOME", "{event}"))
    evil = f"'; touch {tmp_path}/pwned; $(touch {tmp_path}/pwned) `touch {tmp_path}/pwned`\n--flag"
    made.warning("divergence", 1, evil)
    made.end_observers(1)
    text = (tmp_path / "got").read_text()
    assert text.startswith("['$HOME', '{event}']") and json.loads(text.partition("]")[2])["message"] == evil
    assert not (tmp_path / "pwned").exists()


@pytest.mark.parametrize(
    "command, why",
    [
        ("false", "ended with exit code 1"),
        ("no-such-command --now", "there is no such program"),
        (python("import sys; sys.stdin.close(); raise SystemExit(4)"), "ended with exit code 4"),
    ],
)
def test_a_command_that_fails_is_one_warning(tmp_path, said, command, why):
    made = writers(tmp_path, command)
    for step in range(3):
        made.event("rollback", step, detail="x" * 200_000)  # more than a pipe holds
    made.end_observers(3)
    made.end_observers(3)
    assert len(said) == 1 and why in said[0] and said[0].endswith("the run is not affected, and this is logged once")
    assert command not in said[0] + (tmp_path / "events.jsonl").read_text(), "it may hold a secret"
    kinds = [json.loads(line)["event"] for line in (tmp_path / "events.jsonl").read_text().splitlines()]
    assert kinds == ["rollback"] * 3 + ["on-event"]


def test_a_failure_is_logged_while_the_run_trains(tmp_path, said):
    made = writers(tmp_path, "no-such-command")
    made.metrics(1, {"loss": 1.0})
    assert len(said) == 1


def test_a_command_that_hangs_holds_up_neither_the_training_nor_the_end(tmp_path, said, monkeypatch):
    monkeypatch.setattr(on_event, "LAST_SECONDS", 1.0)
    code = "import os, sys, time; os.fork(); open(sys.argv[1] + str(os.getpid()), 'w').close(); time.sleep(600)"
    made = writers(tmp_path / "run", python(code, tmp_path / "pid-"))
    started = time.monotonic()
    for step in range(on_event.WAITING + 9):
        made.event("skip", step)
    assert time.monotonic() - started < 1
    while len(list(tmp_path.glob("pid-*"))) < 2:
        time.sleep(0.01)
    made.end_observers(9)
    assert time.monotonic() - started < 10
    assert len(said) == 1
    time.sleep(0.1)
    for path in tmp_path.glob("pid-*"):  # one command at a time, and what it started ends with it
        state = Path(f"/proc/{path.name.removeprefix('pid-')}/stat")
        assert not state.exists() or state.read_text().split()[2] == "Z"


def test_a_command_that_takes_too_long_is_ended_and_the_next_event_gets_its_own(tmp_path, monkeypatch):
    monkeypatch.setattr(on_event, "SECONDS", 0.5)
    code = "import sys, time; e = sys.stdin.read(); open(sys.argv[1], 'a').write('x'); time.sleep(60 * ('skip' in e))"
    made = EventCommand(python(code, tmp_path / "got"), "run")
    for kind in ("skip", "stop"):
        made.event({"event": kind, "level": "info"})
    made.close()
    assert (tmp_path / "got").read_text() == "xx"
    assert "took over 0.5 seconds" in made.failure()


@pytest.mark.parametrize("command, why", [("", "is empty"), ("mail 'me", "No closing quotation")])
def test_a_command_line_that_is_none_is_refused(command, why):
    with pytest.raises(UsageError, match=rf"--on-event .*{why}"):
        MonitorConfig(on_event=command)
