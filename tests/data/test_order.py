import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kdtrain.data.order import MixedOrder, batch, permutation


def test_the_order_of_an_epoch_never_changes_between_releases():
    assert permutation(0, 0, 8).tolist() == [1, 2, 4, 3, 0, 5, 6, 7]
    assert permutation(7, 3, 8).tolist() == [6, 5, 2, 0, 1, 3, 4, 7]


@given(st.integers(0, 2**40), st.integers(0, 10**6), st.integers(1, 300))
def test_an_epoch_reads_every_sequence_once(seed: int, epoch: int, n: int):
    assert np.array_equal(np.sort(permutation(seed, epoch, n)), np.arange(n))


def test_seeds_and_epochs_give_different_orders():
    orders = {tuple(permutation(seed, epoch, 50)) for seed in range(5) for epoch in range(5)}
    assert len(orders) == 25


@given(st.integers(0, 50), st.lists(st.integers(0, 40), max_size=8), st.integers(1, 17))
def test_batches_of_any_size_follow_one_another_on_the_same_endless_stream(start: int, sizes: list[int], n: int):
    stop = start + sum(sizes)
    stream = np.concatenate([permutation(3, epoch, n) for epoch in range(stop // n + 1)])[start:stop]
    starts = np.cumsum([start, *sizes])
    batches = [batch(3, int(at), size, n) for at, size in zip(starts, sizes, strict=False)]
    assert np.array_equal(np.concatenate([*batches, []]), stream)


def test_a_batch_is_the_readers_own_and_changing_it_does_not_change_the_order():
    batch(0, 0, 8, 8)[:] = 0
    assert sorted(batch(0, 0, 8, 8)) == list(range(8))
    with pytest.raises(ValueError, match="read-only"):
        permutation(0, 0, 8)[0] = 1


def test_an_empty_data_set_has_no_order():
    with pytest.raises(ValueError, match="0 sequences"):
        permutation(0, 0, 0)


SIZES = st.lists(st.integers(1, 40), min_size=1, max_size=4)


def test_the_order_of_a_mixture_never_changes_between_releases():
    mixture = MixedOrder.weighted([6, 4], [3, 1])
    assert mixture.quotas == (8, 2)
    assert mixture.batch(7, 0, 10).tolist() == [0, 5, 7, 2, 1, 4, 3, 9, 4, 0]


def test_a_mixture_of_one_is_read_in_the_order_of_one():
    assert np.array_equal(MixedOrder.weighted([10]).batch(3, 7, 40), batch(3, 7, 40, 10))


@given(SIZES, st.data())
def test_an_epoch_draws_each_member_in_its_proportion_to_within_one_sequence(sizes: list[int], data: st.DataObject):
    weights = data.draw(st.lists(st.floats(0.5, 8.0), min_size=len(sizes), max_size=len(sizes)))
    total = sum(sizes)
    if min(weights) * total < sum(weights):
        return
    mixture, epoch = MixedOrder.weighted(sizes, weights), data.draw(st.integers(0, 30))
    drawn = np.bincount(mixture.members(mixture.batch(5, epoch * total, total)), minlength=len(sizes))
    assert len(mixture) == total == drawn.sum()
    assert np.all(np.abs(drawn - np.array(weights) / sum(weights) * total) < 1)


@given(st.integers(1, 60), st.integers(1, 60), st.integers(0, 200))
def test_two_members_have_given_their_shares_at_any_place(one: int, other: int, place: int):
    mixture = MixedOrder.weighted([one, other])
    drawn = int((mixture.members(mixture.batch(0, 0, place)) == 0).sum())
    assert abs(drawn - place * one / (one + other)) <= 0.5 + 1e-9


@given(SIZES, st.data())
def test_nothing_of_a_member_is_repeated_before_all_of_it_was_read(sizes: list[int], data: st.DataObject):
    weights = data.draw(st.lists(st.floats(0.5, 8.0), min_size=len(sizes), max_size=len(sizes)))
    if min(weights) * sum(sizes) < sum(weights):
        return
    mixture = MixedOrder.weighted(sizes, weights)
    stream = mixture.batch(1, 0, 6 * len(mixture))
    for member, (first, size) in enumerate(zip(mixture.firsts, sizes, strict=True)):
        own = stream[mixture.members(stream) == member]
        passes = [own[at : at + size] for at in range(0, len(own) - size + 1, size)]
        assert all(np.array_equal(np.sort(each), first + np.arange(size)) for each in passes)


@given(SIZES, st.integers(0, 200), st.lists(st.integers(0, 40), max_size=6))
def test_batches_of_a_mixture_of_any_size_follow_one_another(sizes: list[int], start: int, taken: list[int]):
    mixture, stop = MixedOrder.weighted(sizes), start + sum(taken)
    starts = np.cumsum([start, *taken])
    batches = [mixture.batch(3, int(at), size) for at, size in zip(starts, taken, strict=False)]
    assert np.array_equal(np.concatenate([*batches, []]), mixture.batch(3, 0, stop)[start:])


def test_members_of_one_size_are_read_in_different_orders():
    stream = MixedOrder.weighted([50, 50]).batch(0, 0, 100)
    assert stream[stream < 50].tolist() != (stream[stream >= 50] - 50).tolist()


def test_a_weight_that_gives_no_sequence_is_refused():
    with pytest.raises(ValueError, match=r"weight 0\.001 of member 2 gives it no sequence in an epoch of 20"):
        MixedOrder.weighted([10, 10], [1, 0.001])
    for weights in ([1], [1, 0], [1, float("nan")], [1, float("inf")]):
        with pytest.raises(ValueError, match="2 members need as many weights above 0"):
            MixedOrder.weighted([10, 10], weights)
