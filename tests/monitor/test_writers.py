"""metrics.jsonl and events.jsonl: each step once, whatever happened in between."""

import json

import pytest

from kdtrain.monitor.writers import Writers


def lines(folder, name="metrics.jsonl"):
    return [json.loads(text) for text in (folder / name).read_text().splitlines()]


def written(folder, resume_step, validated_step, steps):
    """A process that trains `steps` and validates after the even ones."""
    writers = Writers(folder, resume_step, validated_step, tensorboard=False)
    for step in steps:
        writers.metrics(step, {"loss": float(step)})
        if step % 2 == 0:
            writers.metrics(step, {"validation/loss": float(step)})
    writers.close()


def steps_of(folder):
    return [(line["step"], "validation/loss" in line) for line in lines(folder)]


def test_each_line_is_one_object_with_its_step(tmp_path):
    written(tmp_path, 0, None, [1])
    assert lines(tmp_path) == [{"step": 1, "loss": 1.0}]


def test_a_run_that_goes_on_forgets_what_came_after_its_checkpoint(tmp_path):
    written(tmp_path, 0, None, range(1, 6))
    written(tmp_path, 3, 2, range(4, 7))
    training = [step for step, validation in steps_of(tmp_path) if not validation]
    assert training == [1, 2, 3, 4, 5, 6]
    assert [step for step, validation in steps_of(tmp_path) if validation] == [2, 4, 6]


def test_a_validation_that_the_checkpoint_does_not_remember_is_forgotten(tmp_path):
    written(tmp_path, 0, None, range(1, 5))
    written(tmp_path, 4, 2, [])
    assert steps_of(tmp_path) == [(1, False), (2, False), (2, True), (3, False), (4, False)]


def test_a_run_that_starts_anew_forgets_everything(tmp_path):
    writers = Writers(tmp_path, 0, None, tensorboard=False)
    writers.metrics(0, {"validation/loss": 1.0})
    writers.metrics(1, {"loss": 1.0})
    writers.close()
    written(tmp_path, 0, None, [])
    assert lines(tmp_path) == []


@pytest.mark.parametrize("rest", ['{"step": 3, "lo', "{", "\x00\x00"])
def test_a_line_that_a_kill_cut_short_is_forgotten(tmp_path, rest):
    written(tmp_path, 0, None, [1, 2])
    with open(tmp_path / "metrics.jsonl", "a") as file:
        file.write(rest)
    written(tmp_path, 2, 2, [3])
    assert steps_of(tmp_path) == [(1, False), (2, False), (2, True), (3, False)]


def test_a_number_that_is_not_finite_is_null(tmp_path):
    writers = Writers(tmp_path, 0, None, tensorboard=False)
    writers.metrics(1, {"loss": float("nan"), "grad_norm": float("inf"), "ce": 1.0})
    writers.close()
    assert lines(tmp_path) == [{"step": 1, "loss": None, "grad_norm": None, "ce": 1.0}]


def test_a_line_is_on_the_disk_before_the_run_ends(tmp_path):
    writers = Writers(tmp_path, 0, None, tensorboard=False)
    writers.metrics(1, {"loss": 1.0})
    assert lines(tmp_path) == [{"step": 1, "loss": 1.0}]
    writers.close()


def test_events_are_kept_over_restarts_with_their_time(tmp_path):
    for kind in ("start", "resume"):
        writers = Writers(tmp_path, 0, None, tensorboard=False)
        writers.event(kind, 3, reason="asked")
        writers.close()
    found = lines(tmp_path, "events.jsonl")
    assert [(event["event"], event["step"], event["reason"]) for event in found] == [
        ("start", 3, "asked"),
        ("resume", 3, "asked"),
    ]
    assert found[0]["time"] <= found[1]["time"]


def test_tensorboard_gets_the_same_numbers(tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    writers = Writers(tmp_path, 0, None, tensorboard=True)
    for step in (1, 2):
        writers.metrics(step, {"loss": step / 2, "tok/s": 5.0, "validation/kl": 0.25})
    writers.close()
    events = EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    assert sorted(events.Tags()["scalars"]) == ["train/loss", "train/tok_per_s", "validation/kl"]
    assert [(event.step, event.value) for event in events.Scalars("train/loss")] == [(1, 0.5), (2, 1.0)]
