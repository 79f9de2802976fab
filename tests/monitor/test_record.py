"""A run as reports and comparisons read it: everything it logged, and nothing it cannot have logged."""

import math

import pytest

from kdtrain.config.sections import MonitorConfig
from kdtrain.monitor import record
from kdtrain.monitor.record import Event, RunRecord
from kdtrain.monitor.writers import Writers


@pytest.fixture
def run(tmp_path):
    writers = Writers(tmp_path, 0, None, MonitorConfig(log_to="none"))
    writers.metrics(0, {"validation/loss": 5.0})
    for step, loss in enumerate((4.0, math.nan, 3.0, 2.0), 1):
        writers.metrics(step, {"loss": loss, "tok/s_last": 100.0 * step})
    writers.metrics(4, {"validation/loss": 2.5})
    writers.event("start", 0)
    writers.warning("skip", 2, "skipped", batch=2)
    writers.close()
    (tmp_path / "config.toml").write_text("[run]\nsteps = 4\n")
    (tmp_path / "environment.json").write_text('{"threads": 2}')
    (tmp_path / "result.json").write_text('{"stop_reason": "done"}')
    return tmp_path


def test_a_record_holds_options_environment_metrics_events_and_result(run):
    found = RunRecord.read(run)
    assert found.options == {"run": {"steps": 4}} and found.environment == {"threads": 2}
    assert [line["step"] for line in found.steps] == [1, 2, 3, 4] and math.isnan(found.steps[1]["loss"])
    assert [(line["step"], line["validation/loss"]) for line in found.validations] == [(0, 5.0), (4, 2.5)]
    start, skip = found.events
    assert (start.event, start.level, start.step) == ("start", "info", 0)
    assert skip.details["message"] == "skipped" and skip.details["batch"] == 2 and skip.level == "warning"
    assert found.result == {"stop_reason": "done"}


def test_the_rate_is_the_median_of_the_later_half(run):
    assert RunRecord.read(run).median_rate() == 350.0
    assert RunRecord.read(run).median_rate("tok/s") is None


def test_a_run_that_has_logged_nothing_yet_is_empty(tmp_path):
    assert RunRecord.read(tmp_path) == RunRecord()


def test_a_line_that_is_no_record_is_left_out(run):
    for name in ("metrics.jsonl", "events.jsonl"):
        with open(run / name, "ab") as file:
            file.write(
                b'{"event": 5, "level": "info", "step": 1}\n[1]\n{"loss": 1}\n\xff\n{"step": "two"}\n{"step": 5, "lo'
            )
    found = RunRecord.read(run)
    assert [line["step"] for line in found.steps] == [1, 2, 3, 4]
    assert [event.event for event in found.events] == ["start", "skip"]
    assert all(isinstance(event, Event) for event in found.events)


@pytest.mark.parametrize("name", ["config.toml", "environment.json", "result.json"])
def test_a_file_that_is_not_what_a_run_writes_is_named(run, name):
    (run / name).write_text("[")
    with pytest.raises(ValueError, match=name):
        RunRecord.read(run)


def test_a_log_that_is_no_file_or_too_large_is_refused(run, monkeypatch):
    monkeypatch.setattr(record, "MOST_BYTES", 10)
    with pytest.raises(ValueError, match=r"metrics\.jsonl: it has more than 10 bytes"):
        RunRecord.read(run)
    (run / "metrics.jsonl").unlink()
    (run / "metrics.jsonl").mkdir()
    with pytest.raises(ValueError, match=r"metrics\.jsonl: it is not a regular file"):
        RunRecord.read(run)
