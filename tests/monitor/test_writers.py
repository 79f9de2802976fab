"""metrics.jsonl and events.jsonl: each step once, whatever happened in between."""

import json
import os
import signal

import pytest
import torch

from kdtrain.config.sections import MonitorConfig
from kdtrain.errors import UsageError, log, warn_early
from kdtrain.monitor.progress import setup_logging
from kdtrain.monitor.writers import Writers

PLAIN = MonitorConfig(log_to="none")


def lines(folder, name="metrics.jsonl"):
    return [json.loads(text) for text in (folder / name).read_text().splitlines()]


def written(folder, resume_step, validated_step, steps):
    """Train `steps` in a process that validates after the even ones."""
    writers = Writers(folder, resume_step, validated_step, PLAIN)
    for step in steps:
        writers.metrics(step, {"loss": float(step)})
        if step % 2 == 0:
            writers.metrics(step, {"validation/loss": float(step)})
    writers.close()


def steps_of(folder):
    return [(line["step"], "validation/loss" in line) for line in lines(folder)]


def test_a_step_is_one_object_on_the_disk_at_once_with_null_for_what_is_not_finite(tmp_path):
    writers = Writers(tmp_path, 0, None, PLAIN)
    writers.metrics(1, {"loss": float("nan"), "grad_norm": float("inf"), "ce": 1.0})
    assert lines(tmp_path) == [{"step": 1, "loss": None, "grad_norm": None, "ce": 1.0}]
    writers.close()


@pytest.mark.parametrize(
    "resumed, validated, again, training, validations",
    [
        (3, 2, range(4, 7), [1, 2, 3, 4, 5, 6], [2, 0, 4, 6]),
        (4, 2, [], [1, 2, 3, 4], [2, 0]),  # the checkpoint of step 4 came before its validation
        (0, None, [], [], []),
    ],
)
def test_a_run_that_starts_again_removes_the_lines_after_its_checkpoint(
    tmp_path, resumed, validated, again, training, validations
):
    written(tmp_path, 0, None, range(1, 6))
    with open(tmp_path / "metrics.jsonl", "a") as file:
        file.write('{"step": 0, "validation/loss": 9.0}\n')
    written(tmp_path, resumed, validated, again)
    assert [step for step, validation in steps_of(tmp_path) if not validation] == training
    assert [step for step, validation in steps_of(tmp_path) if validation] == validations


@pytest.mark.parametrize("rest", ['{"step": 3, "lo', "{", "\x00\x00"])
def test_a_line_cut_short_by_a_kill_is_removed(tmp_path, rest):
    written(tmp_path, 0, None, [1, 2])
    with open(tmp_path / "metrics.jsonl", "a") as file:
        file.write(rest)
    written(tmp_path, 2, 2, [3])
    assert steps_of(tmp_path) == [(1, False), (2, False), (2, True), (3, False)]


@pytest.fixture
def warnings(monkeypatch):
    texts = []
    monkeypatch.setattr(log, "warning", texts.append)
    return texts


@pytest.mark.parametrize("name", ["metrics.jsonl", "samples.jsonl", "events.jsonl"])
def test_unreadable_lines_are_removed_counted_and_logged_once_and_no_other_is_lost(tmp_path, warnings, name):
    whole = [json.dumps({"step": step, "event": "x"}).encode() for step in range(1, 7)]
    spoiled = [
        whole[0],
        b'{"st\xffep": 2}',
        whole[2][:9],
        b"7",
        b'{"event": "x"}',
        b"[" * 10**5,
        *whole[3:],
        b'{"step": 6, "ev',
    ]
    (tmp_path / name).write_bytes(b"\n".join(spoiled))
    writers = Writers(tmp_path, 9, 9, PLAIN)
    writers.event("resume", 9)
    writers.close()
    assert [line["step"] for line in lines(tmp_path, name)][:5] == [1, 4, 5, 6] + [9] * (name == "events.jsonl")
    assert warnings == [f"{tmp_path / name}: removed 6 lines that cannot be read, first line 2"]


@pytest.mark.parametrize("name", ["metrics.jsonl", "samples.jsonl", "events.jsonl"])
def test_a_log_of_a_terabyte_or_that_is_no_file_is_refused_and_not_read(tmp_path, name):
    with open(tmp_path / name, "wb") as file:
        file.truncate(10**12)
    signal.alarm(20)  # which ends a test that reads it
    with pytest.raises(UsageError, match=f"{name}: it has more than 1,073,741,824 bytes; move it away"):
        Writers(tmp_path, 0, None, PLAIN)
    assert (tmp_path / name).stat().st_size == 10**12
    (tmp_path / name).unlink()
    os.mkfifo(tmp_path / name)
    with pytest.raises(UsageError, match=f"{name}: it is not a regular file; move it away"):
        Writers(tmp_path, 0, None, PLAIN)
    signal.alarm(0)


def test_events_stay_over_restarts_with_their_time(tmp_path):
    for kind in ("start", "resume"):
        writers = Writers(tmp_path, 0, None, PLAIN)
        writers.event(kind, 3, reason="asked")
        writers.close()
    found = lines(tmp_path, "events.jsonl")
    assert [(event["event"], event["step"], event["reason"]) for event in found] == [
        ("start", 3, "asked"),
        ("resume", 3, "asked"),
    ]
    assert found[0]["time"] <= found[1]["time"]


def test_nothing_is_counted_without_a_logger(tmp_path, monkeypatch):
    monkeypatch.setattr("kdtrain.monitor.histograms.histograms", lambda tensors: pytest.fail("counted"))
    writers = Writers(tmp_path, 0, None, PLAIN)
    writers.histograms(1, dict(torch.nn.Linear(1, 1).named_parameters()))
    writers.close()


def test_a_warning_is_logged_and_an_event_of_its_kind_with_a_level(tmp_path, warnings):
    warn_early("mismatch", "another tokenizer")
    writers = Writers(tmp_path, 3, 3, PLAIN)
    writers.warning("clipped", 4, "too often: 20%", share=0.2)
    writers.event("switch", 5, mode="bf16")
    writers.close()
    writers.warning("export", 5, "not ours")
    found = [
        {name: value for name, value in each.items() if name != "time"} for each in lines(tmp_path, "events.jsonl")
    ]
    assert found == [
        {"event": "mismatch", "level": "warning", "step": 3, "message": "another tokenizer"},
        {"event": "clipped", "level": "warning", "step": 4, "message": "too often: 20%", "share": 0.2},
        {"event": "switch", "level": "info", "step": 5, "mode": "bf16"},
        {"event": "export", "level": "warning", "step": 5, "message": "not ours"},
    ]
    assert warnings == ["another tokenizer", "too often: 20%", "not ours"]


def test_a_warning_of_an_earlier_command_is_not_an_event_of_this_run(tmp_path, warnings):
    warn_early("mismatch", "another run's")
    setup_logging()
    Writers(tmp_path, 0, None, PLAIN).close()
    assert not (tmp_path / "events.jsonl").exists()
