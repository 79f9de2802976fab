"""Early stopping: what is a plateau and what is not, its consequences, and a resume that keeps the patience."""

import json
import math
import random

import pytest
from training_kit import ending, trained

from kdtrain.config.sections import StoppingConfig
from kdtrain.training.guards import EarlyStopping
from kdtrain.training.state import load_saved


def early(**options):
    return EarlyStopping(StoppingConfig(**{"early_stopping": True, "early_stopping_interval": 50, **options}))


def feed(watching, validations, first=1, every=50):
    """Feed a validation every `every` steps, of the losses in turn; return (step, reason) of the plateau, or None."""
    for number, loss in enumerate(validations, first):
        watching.validated(loss)
        if (reason := watching.plateau(number * every)) is not None:
            return number * every, reason
    return None


def flat(looks, seed=0):
    draw = random.Random(seed)
    return [2.0 + 0.003 * draw.random() for _ in range(looks)]


def test_a_flat_validation_loss_is_a_plateau_at_the_fifth_look_after_the_best_one():
    step, reason = feed(early(), flat(20))
    # the first comparison after the warm-up is at step 100 and sets the best; the next five are not better
    assert step == 350
    assert reason.startswith("validation loss 2.00")
    assert "at step 350, not 0.01 below 2.00" in reason and reason.endswith("in 5 comparisons in a row")


def test_a_loss_that_falls_slowly_goes_on():
    # 0.003 a look is less than --early-stopping-min-delta, but within five looks it adds up
    assert feed(early(), [3 - 0.003 * look for look in range(100)]) is None


def test_patience_interval_warm_up_and_least_improvement_are_options():
    assert feed(early(early_stopping_patience=2), flat(20))[0] == 200
    assert feed(early(stopping_warmup=300), flat(20))[0] == 600
    assert feed(early(early_stopping_interval=100), flat(20))[0] == 600
    falling = [3 - 0.2 * look for look in range(12)]
    assert feed(early(early_stopping_min_delta=0.1), falling) is None
    assert feed(early(early_stopping_min_delta=2.0), falling)[0] == 350


def test_an_improvement_gives_the_patience_back():
    assert feed(early(), [2.0] * 6 + [1.9] * 14)[0] == 600


def test_a_look_without_a_validation_since_the_last_one_does_not_count():
    watching = early(early_stopping_patience=1)
    watching.validated(2.0)
    assert [watching.plateau(step) for step in (100, 150, 200, 250)] == [None] * 4
    watching.validated(2.0)
    assert watching.plateau(300) is not None


def test_without_a_validation_split_the_average_training_loss_counts():
    watching = early()
    found = []
    for step in range(1, 401):
        watching.add(2.0)
        found.append(watching.plateau(step))
    assert next(step for step, reason in enumerate(found, 1) if reason) == 350
    assert found[349].startswith("50-step average of the training loss 2.0000 at step 350")


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_non_finite_loss_is_never_an_improvement_and_never_in_the_average(bad):
    watching = early()
    for _ in range(100):
        watching.add(bad)
    assert math.isnan(watching.average)
    watching.add(2.0)
    assert watching.average == 2.0
    assert feed(watching, [2.0, 2.0] + [bad] * 10)[0] == 350


def test_switched_off_as_it_is_by_default_it_finds_nothing_and_still_knows_the_average():
    watching = EarlyStopping(StoppingConfig(early_stopping_interval=50))
    for loss in range(1, 81):
        watching.add(loss)
    assert feed(watching, flat(100)) is None
    assert watching.average == sum(range(31, 81)) / 50


@pytest.mark.parametrize("cut", [1, 3, 6])
def test_a_stopper_restored_from_json_finds_the_same_plateau_with_the_same_words(cut):
    losses = flat(20, seed=3)
    expected = feed(early(), losses)
    first, second = early(), early()
    for loss in range(30):
        first.add(loss)
    assert feed(first, losses[:cut]) is None
    second.load_state_dict(json.loads(json.dumps(first.state_dict())))
    assert second.average == first.average
    assert feed(second, losses[cut:], first=cut + 1) == expected


FLAT = {"lr": 1e-9, "min_lr": 0.0, "early_stopping": True, "early_stopping_interval": 2, "eval_freq": 2}
FLAT |= {"stopping_warmup": 0, "early_stopping_patience": 2, "checkpoint_freq": 100}


@pytest.mark.parametrize("schedule", ["constant", "cosine", "wsd"])
def test_a_plateau_stops_the_run_where_no_decay_is_left_to_begin(workshop, schedule):
    with workshop.run(steps=40, lr_schedule=schedule, on_plateau="stop", **FLAT) as run:
        run.fit()
    assert run.state.progress.step == 6
    assert "validation loss" in run.state.progress.stopped


def test_a_plateau_in_the_stable_phase_begins_the_decay_and_the_run_ends_with_it(workshop):
    with workshop.run(steps=40, lr_schedule="wsd", decay_steps=8, decay_shape="linear", **FLAT) as run:
        run.fit()
    progress, rates = run.state.progress, {line["step"]: line["lr"] for line in trained(run)}
    assert (progress.decay_from, progress.step, progress.stopped) == (6, 14, None)
    assert [rates[step] for step in range(5, 15)] == pytest.approx(
        [1e-9, 1e-9, *(1e-9 * (1 - done / 8) for done in range(1, 9))]
    )


def test_a_run_that_is_resumed_in_a_decay_that_a_plateau_began_ends_with_the_same_weights(workshop):
    options = {"steps": 40, "lr_schedule": "wsd", "decay_steps": 8, **FLAT, "lr": 1e-4, "early_stopping_min_delta": 9.0}
    with workshop.run("whole", **options | {"checkpoint_freq": 9}) as whole:
        whole.fit()
        saved = load_saved(whole.store.path("step-00000009"))
    with workshop.run("again", **options) as again:
        again.state.load(saved.tensors, saved.state)
        assert again.total == whole.total == 14
        again.fit()
    ends = [run.student.model.state_dict() for run in (whole, again)]
    assert again.state.progress.step == 14
    assert all(each.equal(ends[1][name]) for name, each in ends[0].items())


def test_a_plateau_whose_validation_was_interrupted_begins_the_decay_at_the_same_step(workshop):
    options = {"steps": 40, "lr_schedule": "wsd", "decay_steps": 8, "alpha": 0.9, **FLAT}
    with workshop.run("whole", **options) as whole:
        whole.fit()
    with workshop.run("cut", validation=ending(workshop, 5, 4), **options) as cut:
        cut.fit()  # the fourth read is the first of the validation of step 4; each takes two
        assert (cut.stopped_by, cut.state.progress.step, cut.state.progress.validated_step) == ("SIGTERM", 4, 2)
        cut.stopped_by = None
        cut.fit()
    assert cut.stopped_by is None
    assert [(run.state.progress.decay_from, run.state.progress.step) for run in (whole, cut)] == [(6, 14)] * 2
    ends = [run.student.model.state_dict() for run in (whole, cut)]
    assert all(each.equal(ends[1][name]) for name, each in ends[0].items())
