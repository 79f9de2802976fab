"""Loss spikes: what is a spike on realistic curves and what is not, and a resume that finds the same."""

import json
import math
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kdtrain.training.guards import SpikeDetector

STEPS, SPIKE = 600, 400


def limit(detector):
    return detector.threshold(detector.memory.clean.get("ce", []))


def falling(seed, noise=0.06):
    """Make a loss that falls from 7.6 towards 2.2 as a small language model's does, with noise in proportion."""
    draw = random.Random(seed)
    return [(2.2 + 5.4 * math.exp(-step / 60)) * (1 + noise * draw.gauss(0, 1)) for step in range(1, STEPS + 1)]


def below_zero(seed):
    """Make the loss of a student that memorizes the samples of its targets: from 2.6 through 0 to -0.4."""
    draw = random.Random(seed)
    return [-0.4 + 3 * math.exp(-step / 60) + 0.06 * draw.gauss(0, 1) for step in range(1, STEPS + 1)]


def around_zero(seed):
    draw = random.Random(seed)
    return [0.01 + 0.06 * draw.gauss(0, 1) for _ in range(STEPS)]


def confirmed(detector, losses):
    """Return (step at which a spike was confirmed, the step it began at), or None."""
    for step, loss in enumerate(losses, 1):
        if (begin := detector.update(step, {"ce": loss})) is not None:
            return step, begin
    return None


def with_spike(losses, times, length):
    return [loss * times if SPIKE <= step < SPIKE + length else loss for step, loss in enumerate(losses, 1)]


each_seed = pytest.mark.parametrize("seed", range(8))


@each_seed
def test_a_falling_loss_with_noise_has_no_spike(seed):
    assert confirmed(SpikeDetector(), falling(seed)) is None


@pytest.mark.parametrize("times", [30, 4, 2])
@each_seed
def test_a_sustained_spike_is_confirmed_at_its_third_step_and_its_first_is_named(times, seed):
    losses = with_spike(falling(seed), times, 200)
    assert confirmed(SpikeDetector(), losses) == (SPIKE + 2, SPIKE)


@pytest.mark.parametrize("curve", [below_zero, around_zero])
@each_seed
def test_a_loss_below_or_around_zero_has_no_spike_and_one_of_it_is_confirmed_at_its_third_step(seed, curve):
    losses = curve(seed)
    assert confirmed(SpikeDetector(), losses) is None
    assert curve is around_zero or max(losses[SPIKE - 128 :]) < 0
    spiky = [loss + 2 if step >= SPIKE else loss for step, loss in enumerate(losses, 1)]
    assert confirmed(SpikeDetector(), spiky) == (SPIKE + 2, SPIKE)


@each_seed
def test_a_slow_drift_upwards_is_not_a_spike(seed):
    drifting = [loss * (1 + step / STEPS) for step, loss in enumerate(falling(seed), 1)]
    assert drifting[-1] > 1.5 * min(drifting[200:300])
    assert confirmed(SpikeDetector(), drifting) is None


@pytest.mark.parametrize("length", [1, 2])
def test_outliers_shorter_than_the_patience_are_not_a_spike_and_do_not_hide_the_next_one(length):
    detector, losses = SpikeDetector(), with_spike(falling(0), 30, length)
    assert confirmed(detector, losses) is None
    assert limit(detector) < 4 * 2.2
    assert detector.suspicious_since is None


def test_a_spike_stays_one_however_long_it_lasts():
    detector = SpikeDetector(window=32)
    found = [detector.update(step, {"ce": loss}) for step, loss in enumerate(with_spike(falling(1), 30, 200), 1)]
    assert found[SPIKE + 1 : SPIKE + 199] == [SPIKE] * 198
    assert set(found) == {None, SPIKE}


def test_suspicion_begins_with_the_first_spiky_loss_and_ends_with_a_clean_one():
    detector = SpikeDetector(minimum=2)
    seen = []
    for step, loss in enumerate([1.0, 1.0, 9.0, 9.0, 1.0, 9.0], 1):
        detector.update(step, {"ce": loss})
        seen.append(detector.suspicious_since)
    assert seen == [None, None, 3, 3, None, 6]


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_non_finite_loss_is_neither_clean_nor_spiky(bad):
    detector = SpikeDetector(minimum=2)
    found = [
        detector.update(step, {"ce": loss}) for step, loss in enumerate([1.0, bad, 1.0, 9.0, bad, 9.0, bad, 9.0], 1)
    ]
    assert found == [None] * 7 + [4]
    assert limit(detector) == 1.5


def test_nothing_is_judged_before_there_are_enough_clean_losses():
    detector = SpikeDetector(minimum=20)
    assert confirmed(detector, [1.0] * 19) is None
    assert limit(detector) == math.inf
    detector.update(20, {"ce": 1.0})
    assert limit(detector) == 1.5


def test_losses_that_hardly_vary_do_not_make_a_small_rise_a_spike():
    assert confirmed(SpikeDetector(), [2.0] * 40 + [2.01] * 10) is None
    assert confirmed(SpikeDetector(), [2.0] * 40 + [2.99] * 10) is None
    assert confirmed(SpikeDetector(), [2.0] * 40 + [3.01] * 10) == (43, 41)
    assert confirmed(SpikeDetector(), [0.01] * 40 + [0.1] * 10) is None  # nats, of a student that is its teacher
    assert confirmed(SpikeDetector(), [0.01] * 40 + [0.12] * 10) == (43, 41)


def test_a_part_that_was_not_watched_for_a_while_is_judged_by_its_values_since():
    detector = SpikeDetector()
    for step in range(1, 61):
        parts = {"ce": 4.0} if 20 < step <= 40 else {"ce": 4.0, "kd_T1": 1.0 if step <= 20 else 3.0}
        assert detector.update(step, parts) is None
    assert [detector.update(step, {"ce": 4.0, "kd_T1": 7.0}) for step in (61, 62, 63)] == [None, None, 61]


@pytest.mark.parametrize("part", ["ce", "kd_T1", "hidden"])
def test_each_part_of_the_loss_is_judged_by_its_own_past(part):
    detector = SpikeDetector()
    calm = {"ce": 4.0, "kd_T1": 1.0, "hidden": 0.5}
    found = [detector.update(step, calm | ({part: 2.1 * calm[part]} if step > 40 else {})) for step in range(1, 44)]
    assert found == [None] * 42 + [41]


def test_a_part_that_comes_late_is_judged_once_enough_is_known_of_it():
    detector = SpikeDetector()
    assert all(detector.update(step, {"ce": 4.0}) is None for step in range(1, 41))
    assert all(detector.update(step, {"ce": 4.0, "kd_T1": 1.0}) is None for step in range(41, 61))
    assert [detector.update(step, {"ce": 4.0, "kd_T1": 3.0}) for step in (61, 62, 63)] == [None, None, 61]


def test_steps_without_a_token_have_a_loss_of_zero_and_make_no_later_loss_a_spike():
    assert confirmed(SpikeDetector(), [0.0] * 40 + [1.0, 0.0] * 40) is None


def test_the_patience_is_an_option():
    losses = with_spike(falling(0, noise=0.01), 2.5, 200)
    assert confirmed(SpikeDetector(2), losses) == (SPIKE + 1, SPIKE)


def test_a_patience_of_0_never_finds_anything():
    assert confirmed(SpikeDetector(0), with_spike(falling(0), 1000, 200)) is None


def test_a_reset_forgets_the_spike_and_keeps_the_clean_values():
    detector = SpikeDetector()
    confirmed(detector, with_spike(falling(0), 30, 200))
    threshold = limit(detector)
    detector.reset()
    assert (detector.suspicious_since, limit(detector)) == (None, threshold)


@given(st.lists(st.floats(0, 100), max_size=60), st.integers(0, 60))
def test_a_detector_restored_from_json_finds_the_same_spikes(losses, cut):
    def make():
        return SpikeDetector(patience=2, window=8, minimum=3)

    def feed(detector, part):
        return [(detector.update(step, {"ce": loss}), limit(detector)) for step, loss in part]

    whole, first, second, numbered = make(), make(), make(), list(enumerate(losses))
    found = feed(first, numbered[:cut])
    second.load_state_dict(json.loads(json.dumps(first.state_dict())))
    assert found + feed(second, numbered[cut:]) == feed(whole, numbered)
    assert second.state_dict() == whole.state_dict()
