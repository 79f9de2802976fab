"""The search for a rate, over losses that are made up: which run is next, when it ends, and what it suggests."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kdtrain.plugins.find_lr import FindLrConfig
from kdtrain.plugins.find_lr.search import FIRST, LONGER, REACH, RUNGS, Trained, next_run, suggest


def bowl(at, depth=0.1):
    """Return the loss of a rate as a function whose best rate is `at`; it falls with steps."""
    return lambda rate, rung: 4.0 - 0.5 * rung + depth * (rate - at) ** 2


def searched(loss, parts=lambda rate, rung: (), losses=None):
    """Search to the end; return the losses and the runs in order.

    losses: of a search that was cut short.
    """
    losses, order = losses if losses is not None else {}, []
    while (found := next_run(losses)) is not None:
        rate, rung = found
        assert len(losses.get(rate, [])) == rung, "a rung follows the one before"
        losses.setdefault(rate, []).append(Trained(loss(rate, rung), parts(rate, rung)))
        order.append(found)
    return losses, order


def steps(order):
    """Count the steps of all runs, in steps of the first rung."""
    return sum(LONGER**rung for _, rung in order)


def test_five_rates_begin_three_go_on_and_the_best_reaches_the_end_with_its_neighbours():
    losses, order = searched(bowl(0.2))
    assert [rate for rate, rung in order if rung == 0] == list(FIRST)
    assert {rate for rate, rung in order if rung == 1} == {-1, 0, 1}
    assert steps(order) == 14 and max(map(len, losses.values())) == RUNGS


def test_a_best_rate_at_the_edge_brings_the_next_one_beyond_it_and_the_search_is_bounded():
    losses, _ = searched(bowl(3.9))
    assert max(losses) == 5 and suggest(losses).best == 4
    losses, _ = searched(bowl(-40.0))
    found = suggest(losses)
    assert min(losses) == -REACH and found.best == -REACH and found.edge


def test_a_rate_that_was_left_behind_catches_up_where_the_best_of_a_longer_rung_is_its_neighbour():
    losses, order = searched(lambda rate, rung: abs(rate - (1.4 if rung == 0 else -1.2)))
    assert suggest(losses).best == -1 and {-2, -1, 0} <= {rate for rate, rung in order if rung == 1}


def test_a_rate_that_diverges_has_an_infinite_loss_and_never_goes_on():
    losses, order = searched(lambda rate, rung: math.inf if rate > 0 else bowl(0.0)(rate, rung))
    assert [rate for rate, rung in order if rung > 0 and rate > 0] == []
    assert suggest(losses).best == 0 and suggest(losses).behind[1][0] == math.inf
    assert suggest(losses).how == "best"


def test_where_every_rate_diverges_lower_ones_are_tried_and_there_is_no_suggestion():
    losses, order = searched(lambda rate, rung: math.inf)
    assert min(losses) == -REACH and max(losses) == max(FIRST)
    assert {rung for _, rung in order} == {0} and suggest(losses) is None


@given(st.floats(-5, 5), st.floats(0.01, 3.0))
def test_the_suggestion_is_within_a_factor_of_two_of_the_best_rate_wherever_that_is(at, depth):
    losses, order = searched(bowl(at, depth))
    assert abs(suggest(losses).at - at) <= 0.5 + 1e-9
    assert steps(order) <= 14 + 4 * 6


@given(st.randoms(use_true_random=False), st.integers(34, 10**6))
def test_a_search_costs_at_most_160_percent_of_the_run_whatever_the_losses_are(tmp_path_factory, random, whole):
    _, order = searched(lambda rate, rung: random.random())
    first = FindLrConfig(cache=("c",), student="s", out=tmp_path_factory.getbasetemp() / "lr").first_steps(whole)
    assert first * steps(order) <= 1.6 * whole


@given(st.floats(-4, 4), st.integers(0, 12))
def test_a_search_that_was_cut_short_does_what_is_left_and_nothing_again(at, cut):
    whole, order = searched(bowl(at))
    partly: dict = {}
    for rate, rung in order[:cut]:
        partly.setdefault(rate, []).append(whole[rate][rung])
    again, rest = searched(bowl(at), losses=partly)
    assert (again, rest) == (whole, order[cut:])


def test_a_parabola_places_the_minimum_between_rates():
    losses, _ = searched(bowl(0.3))
    found = suggest(losses)
    assert (found.best, found.how) == (0, "parabola") and found.at == pytest.approx(0.3)


@pytest.mark.parametrize("noise, alike", [(0.001, False), (0.5, True)])
def test_a_neighbour_that_the_validation_text_does_not_tell_apart_widens_the_range(noise, alike):
    def parts(rate, rung):
        return [bowl(0.0)(rate, rung) + noise * rate * (-1) ** part for part in range(16)]

    losses, _ = searched(bowl(0.0), parts)
    found = suggest(losses)
    assert (found.low, found.high) == ((-1, 1) if alike else (-0.5, 0.5))
    nats, error = found.behind[1]
    assert nats == pytest.approx(0.1) and error == pytest.approx(noise / 4, rel=0.05)
