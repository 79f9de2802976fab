"""Signs that a run is not well."""

import math

import pytest
import torch
from torch import nn

from kdtrain.monitor.watchers import ClippedShare, LearnedSamples, MemoryGrowth, initial_loss
from kdtrain.training.reporter import gradients_of


def shares(share, norms, losses=None):
    """What is logged after each step; the loss of each, 3 nats unless given."""
    return [
        share.add(n, norm, loss) for n, (norm, loss) in enumerate(zip(norms, losses or [3.0] * 99, strict=False), 1)
    ]


def test_more_than_a_tenth_of_clipped_steps_is_logged_once_with_the_advice():
    share = ClippedShare(clip=1.0, window=20)
    said = shares(share, [0.5] * 18 + [2.0] * 4)
    assert [number for number, text in enumerate(said) if text] == [20]
    assert "15% of the last 20 steps" in said[20] and "lower --lr" in said[20]
    assert "did not fall (3.0000, then 3.0000)" in said[20]
    assert share.share == 0.2


def test_it_is_logged_again_after_it_has_ceased():
    said = shares(ClippedShare(clip=1.0, window=10), [2.0] * 10 + [0.1] * 10 + [2.0] * 10)
    assert [number for number, text in enumerate(said) if text] == [9, 21]


def test_clipping_is_not_logged_while_the_loss_falls_and_is_once_it_rises():
    falling = [4.0 - 0.01 * step for step in range(30)]
    share = ClippedShare(clip=1.0, window=10)
    assert shares(share, [9.0] * 30, falling) == [None] * 30 and share.share == 1.0
    said = shares(ClippedShare(clip=1.0, window=10), [9.0] * 30, falling[::-1])
    assert [number for number, text in enumerate(said) if text] == [9]


def test_clipping_during_the_warm_up_is_never_logged():
    said = shares(ClippedShare(clip=1.0, warmup=30, window=10), [9.0] * 30 + [0.1] * 10)
    assert said == [None] * 40
    said = shares(ClippedShare(clip=1.0, warmup=30, window=10), [9.0] * 45)
    assert [number for number, text in enumerate(said, 1) if text] == [40]


@pytest.mark.parametrize("clip, norm", [(0.0, 1e9), (1.0, 1.0), (1.0, math.nan)])
def test_a_step_that_is_not_clipped_does_not_count(clip, norm):
    share = ClippedShare(clip=clip, window=5)
    assert shares(share, [norm] * 10) == [None] * 10
    assert share.share == 0.0


def test_a_share_of_less_than_a_window_is_not_logged():
    assert shares(ClippedShare(clip=1.0, window=100), [2.0] * 99) == [None] * 99


def divergences(watch, values):
    return [watch.add(value, epochs=0.5 * number) for number, value in enumerate(values)]


def test_memorized_samples_are_logged_once_with_epochs_and_samples():
    found = divergences(LearnedSamples(6, window=4), [0.3, 0.1, 0.0, -0.1, -0.2, -0.3, 0.5, -9.0])
    assert [bool(text) for text in found] == [False, False, False, False, True, False, False, False]
    assert "-0.050 nats over the last 4 steps" in found[4]
    assert "after 2.0 epochs" in found[4] and "the 6 samples a token" in found[4]


@pytest.mark.parametrize(
    "samples, values",
    [(0, [-1.0] * 20), (6, [0.1, -0.09] * 10), (6, [-1.0] * 3), (6, [math.nan] * 20)],
    ids=["targets without samples", "noise around a divergence above 0", "too few steps", "no divergence"],
)
def test_samples_that_are_not_memorized_are_not_logged(samples, values):
    assert divergences(LearnedSamples(samples, window=4), values) == [None] * len(values)


def held(growth, values, first=1):
    return [growth.add(step, value) for step, value in enumerate(values, first)]


def test_memory_is_measured_from_the_end_of_the_warm_up():
    found = held(MemoryGrowth(1, warmup=3), [10.0, 500.0, 90.0, 100.0, 120.0, 80.0])
    assert [grown for grown, _ in found] == [0, 0, 0, 0, 20, -20]
    assert all(text is None for _, text in found)


def test_memory_that_grows_by_more_than_half_is_logged_once():
    found = held(MemoryGrowth(101, warmup=2), [1.0, 1.0, 100.0, 150.0, 151.0, 400.0], first=101)
    assert [bool(text) for _, text in found] == [False, False, False, False, True, False]
    assert "holds 151 MiB, 51 more than after its warm-up" in found[4][1]


def test_the_first_checkpoint_and_the_first_validation_are_part_of_the_warm_up():
    growth = MemoryGrowth(1, warmup=2, every=(4, 6))
    # after step 4 a checkpoint's buffers are there, after step 6 those of a validation
    found = held(growth, [50.0, 50.0, 50.0, 50.0, 100.0, 100.0, 200.0, 200.0, 290.0, 310.0])
    assert [grown for grown, _ in found] == [0, 0, 0, 0, 0, 0, 0, 0, 90, 110]
    assert [bool(text) for _, text in found] == [False] * 9 + [True]


def test_frequent_checkpoints_do_not_end_the_warm_up_early():
    found = held(MemoryGrowth(1, warmup=4, every=(1,)), [10.0, 10.0, 100.0, 100.0, 100.0])
    assert all(text is None and grown == 0 for grown, text in found)


def test_parameters_without_a_sound_gradient_are_named():
    model = nn.ModuleDict({name: nn.Linear(2, 2, bias=False) for name in ("good", "unused", "dead", "bad", "frozen")})
    model["frozen"].requires_grad_(False)
    for name, value in (("good", 1.0), ("dead", 0.0), ("bad", 1.0)):
        model[name].weight.grad = torch.full((2, 2), value)
    model["bad"].weight.grad[0, 1] = math.nan
    found = gradients_of(model)
    assert (found.good, found.missing, found.zero, found.broken) == (
        1,
        ["unused.weight"],
        ["dead.weight"],
        ["bad.weight"],
    )
    assert [text.split(" (")[1] for text in found.lines()] == ["bad.weight)", "unused.weight)", "dead.weight)"]


def test_a_model_whose_gradients_are_all_sound_gives_no_warning():
    model = nn.Linear(2, 2)
    model(torch.ones(1, 2)).sum().backward()
    assert gradients_of(model).lines() == []
    assert gradients_of(model).good == 2


def test_many_names_are_counted_and_the_first_ones_given():
    model = nn.Sequential(*(nn.Linear(1, 1, bias=False) for _ in range(8)))
    [text] = gradients_of(model).lines()
    assert text.startswith("8 parameters have no gradient") and "4.weight and 3 more" in text


@pytest.mark.parametrize(
    "loss, init, sound",
    [
        (5.7, "scratch", True),  # ln 300 = 5.704
        (6.2, "scratch", True),
        (6.4, "scratch", False),
        (5.0, "scratch", False),
        (5.0, "pretrained", True),
        (5.8, "pretrained", False),
        (6.2, "teacher-layers", True),
        (9.0, "teacher-layers", False),
        (9.0, "loaded", True),
        (math.nan, "teacher-layers", False),
        (math.inf, "scratch", False),
    ],
)
def test_the_initial_loss_is_judged_by_where_the_weights_come_from(loss, init, sound):
    verdict, text = initial_loss(loss, 300, init)
    assert verdict is sound
    assert "ln V is 5.704" in text
    worse = "layers copied without the rest are worse than fresh weights"
    assert (worse in text and "kdtrain prune" in text) is ((loss, init) == (9.0, "teacher-layers"))
