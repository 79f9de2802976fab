"""Divergence: a student that stays worse than it began is detected, and nothing else is."""

import json
import math
import random

import pytest

from kdtrain.training.guards import DivergenceWatch


def seen_at(watch, losses, first=1):
    """Return the step of the first training loss that the watch finds, or None."""
    return next((step for step, loss in enumerate(losses, first) if watch.update(loss)), None)


def begun(loss=4.0, factor=1.2):
    watch = DivergenceWatch(factor)
    assert not watch.validated(loss)
    return watch


def test_a_loss_that_doubles_in_the_first_steps_is_seen_within_twenty():
    for good in range(15):
        found = seen_at(begun(), [4.0] * (good + 1) + [8.0] * 40)
        assert found is not None and found <= good + 1 + 20


def test_a_loss_that_falls_with_noise_never_shows_it():
    draw = random.Random(0)
    assert seen_at(begun(7.6), [(2 + 5.6 * math.exp(-step / 90)) * draw.gauss(1, 0.1) for step in range(900)]) is None


def test_a_few_bad_batches_show_nothing():
    assert seen_at(begun(), ([4.0] * 12 + [400.0] * 4) * 20) is None


def test_a_slow_rise_above_the_beginning_is_seen_however_slow():
    rising = [3.0 + 0.002 * step for step in range(2000)]
    found = seen_at(begun(4.0), rising)
    assert found is not None and 4.8 < rising[found - 1] < 4.85


def test_training_text_that_is_harder_than_the_validation_text_is_not_a_divergence():
    assert seen_at(begun(2.0), [3.0] * 200) is None


def test_the_level_is_the_first_validation_by_the_factor_and_a_tenth_of_a_nat_at_least():
    assert begun(4.0).limit == pytest.approx(4.8)
    assert begun(4.0, factor=2.0).limit == 8.0
    assert begun(0.1).limit == pytest.approx(0.2)
    assert DivergenceWatch(1.2).limit == math.inf


def test_a_validation_above_the_level_shows_it_at_once_and_a_non_finite_one_too():
    watch = begun(4.0)
    assert [watch.validated(loss) for loss in (4.7, 4.9, 3.0, math.nan, math.inf)] == [False, True, False, True, True]


def test_a_step_without_a_token_and_a_non_finite_loss_say_nothing():
    watch = begun()
    assert seen_at(watch, [0.0, math.nan, math.inf] * 20) is None
    assert watch.state_dict()["losses"] == [] and watch.state_dict()["first"] is None


def test_after_a_rollback_it_needs_new_losses_and_keeps_its_level():
    watch = begun()
    assert seen_at(watch, [9.0] + [40.0] * 20) is not None
    watch.reset()
    assert watch.limit == pytest.approx(10.8)
    assert seen_at(watch, [40.0] * 9) is None
    assert watch.update(40.0)


@pytest.mark.parametrize("cut", [0, 5, 30])
def test_a_watch_restored_from_json_finds_the_same_step(cut):
    losses = [4.0 + 0.05 * step for step in range(60)]
    expected = seen_at(begun(), losses)
    first, second = begun(), DivergenceWatch(1.2)
    assert seen_at(first, losses[:cut]) in (None, expected)
    if cut < expected:
        second.load_state_dict(json.loads(json.dumps(first.state_dict())))
        assert seen_at(second, losses[cut:], cut + 1) == expected


@pytest.mark.parametrize("bad", [{"validation": math.nan}, {"losses": [math.inf]}, {"first": "4"}, {"losses": None}])
def test_a_memory_that_no_run_writes_is_refused(bad):
    with pytest.raises(ValueError):
        DivergenceWatch(1.2).load_state_dict(begun().state_dict() | bad)
