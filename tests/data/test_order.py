import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kdtrain.data.order import batch, permutation


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
