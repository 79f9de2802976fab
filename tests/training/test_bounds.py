"""A learned temperature that sits on a bound is named once, on the terminal and in events.jsonl."""

import logging

import pytest
import torch
from training_kit import events, trained

RUNNING_AWAY = {"temperature_mode": "minimize", "temperature_lr": 1.0, "lr_schedule": "constant", "log_freq": 1}


def train_and_hear(workshop, caplog, **options):
    """Run 12 steps; return warnings and events about a bound, and the training lines."""
    with caplog.at_level(logging.INFO, "kdtrain"), workshop.run(steps=12, **options) as run:
        run.fit()
    said = [record.getMessage() for record in caplog.records if "is at its" in record.getMessage()]
    return said, events(run, "temperature-bound"), trained(run)


@pytest.mark.parametrize("start, bound", [(0.6, "minimum"), (7.0, "maximum")])
def test_minimize_is_named_once_when_it_sits_on_a_bound(workshop, caplog, start, bound):
    # a teacher that is sure of one token: T^2 KL of a student that knows nothing has its hump at about 1.5
    source = workshop.source(10)
    source.logits = 10.0 * torch.nn.functional.one_hot(source.tokens[:, 1:], source.vocab_size)
    said, bounds, lines = train_and_hear(workshop, caplog, train=source, temperature=start, **RUNNING_AWAY)
    assert len(said) == len(bounds) == 1
    assert f"is at its {bound}" in said[0] and "--temperature-mode minimize" in said[0]
    at = lines[bounds[0]["step"] - 1]["T"]
    assert bounds[0]["bound"] == bound and bounds[0]["mode"] == "minimize"
    assert bounds[0]["temperature"] == pytest.approx({"minimum": 0.5, "maximum": 8.0}[bound], rel=0.1)
    assert at == pytest.approx(bounds[0]["temperature"], rel=0.2)


def test_a_temperature_inside_its_bounds_is_not_named(workshop, caplog):
    said, found, _ = train_and_hear(workshop, caplog, temperature_mode="likelihood", log_freq=1)
    assert said == found == []


@pytest.mark.parametrize("mode", ["adversarial", "likelihood", "minimize"])
def test_the_log_carries_t_its_gradient_and_the_divergence_at_one(workshop, caplog, mode):
    _, _, lines = train_and_hear(workshop, caplog, temperature_mode=mode, log_freq=1)
    shown = [record.getMessage() for record in caplog.records if record.getMessage().startswith("step ")]
    assert len(shown) == len(lines) == 12
    for line, text in zip(lines[2:], shown[2:], strict=True):
        assert {"T", "dL/dlogT", "kd_T1"} <= line.keys()
        assert f"  T {line['T']:.2f}" in text
