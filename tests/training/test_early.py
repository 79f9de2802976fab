"""Early stopping: what ends a run early, what does not, and that a resume keeps the patience."""

import json
import math
import random

import pytest

from kdtrain.config import StoppingConfig
from kdtrain.training.early import EarlyStopping


def feed(early, losses, norms=None, first=1):
    """(step, reason) of the stop, or None."""
    for step, loss in enumerate(losses, first):
        reason = early.update(step, loss, 1.0 if norms is None else norms[step - first])
        if reason is not None:
            return step, reason
    return None


def early(**options):
    return EarlyStopping(StoppingConfig(**options))


def flat(steps, seed=0):
    draw = random.Random(seed)
    return [2.0 + 0.005 * draw.gauss(0, 1) for _ in range(steps)]


def test_a_flat_loss_stops_the_run_at_the_fifth_look_after_the_best_one():
    step, reason = feed(early(), flat(1000))
    # the first look after the warm-up is at step 100 and sets the best; the five that follow are no better
    assert step == 350
    assert "50-step average of the loss 2.0" in reason
    assert "not 0.01 better at 5 looks in a row" in reason
    assert "\n" not in reason


def test_a_loss_that_falls_slowly_goes_on():
    # 0.003 a look is less than --early-stopping-min-delta, but within five looks it adds up
    assert feed(early(), [3 - 0.003 * step / 50 for step in range(5000)]) is None


def test_patience_and_least_improvement_are_options():
    assert feed(early(early_stopping_patience=2), flat(1000))[0] == 200
    assert feed(early(early_stopping_warmup=300), flat(1000))[0] == 600
    falling = [3 - 0.2 * step / 50 for step in range(600)]
    assert feed(early(early_stopping_min_delta=0.1), falling) is None
    assert feed(early(early_stopping_min_delta=2.0), falling)[0] == 350


def test_an_improvement_gives_the_patience_back():
    losses = [2.0] * 300 + [1.9] * 700
    assert feed(early(), losses)[0] == 600


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_loss_that_is_not_finite_is_never_an_improvement_and_never_in_the_average(bad):
    watching = early()
    assert feed(watching, [bad] * 100) is None
    assert math.isnan(watching.average)
    assert feed(watching, [2.0] * 50, first=101) is None
    assert watching.average == 2.0
    assert feed(watching, [bad] * 250, first=151)[0] == 400


def test_gradients_above_the_threshold_three_times_in_a_row_stop_the_run():
    step, reason = feed(early(), [2.0] * 200, [1.0] * 100 + [1500.0] * 100)
    assert step == 103
    assert "gradient norm above 1000 at 3 steps in a row, 1500 at step 103" in reason


def test_two_in_a_row_do_not():
    assert feed(early(), [2.0] * 200, [1.0] * 100 + [1500.0, 1500.0, 1.0] * 33 + [1.0]) is None


def test_gradients_that_are_not_finite_never_stop_a_run_since_an_early_stop_is_a_good_end():
    for bad in (math.nan, math.inf):
        assert feed(early(), [2.0] * 200, [bad] * 200) is None


def test_nothing_counts_in_the_warm_up():
    assert feed(early(early_stopping_warmup=50), [2.0] * 52, [1e6] * 52) is None
    assert feed(early(early_stopping_warmup=50), [2.0] * 60, [1e6] * 60)[0] == 53


def test_switched_off_it_never_stops_and_still_knows_the_average():
    watching = early(early_stopping=False)
    assert feed(watching, flat(1000), [1e9] * 1000) is None
    assert watching.average == pytest.approx(2.0, abs=0.005)


def test_the_average_is_that_of_the_last_fifty_losses():
    watching = early()
    feed(watching, range(1, 81))
    assert watching.average == sum(range(31, 81)) / 50


@pytest.mark.parametrize("cut", [30, 120, 349])
def test_what_was_taken_over_through_json_stops_at_the_same_step_with_the_same_words(cut):
    losses = flat(400, seed=3)
    expected = feed(early(), losses)
    first, second = early(), early()
    feed(first, losses[:cut])
    second.load_state_dict(json.loads(json.dumps(first.state_dict())))
    assert second.average == first.average
    assert feed(second, losses[cut:], first=cut + 1) == expected
