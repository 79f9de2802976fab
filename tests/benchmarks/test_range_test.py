"""How a range test of the learning rate is read."""

import math

from benchmarks.science import range_test


def test_a_range_test_is_read_where_the_loss_falls_fastest_and_a_tenth_below_its_lowest():
    tried = [1e-6 ** (1 - step / 199) for step in range(200)]
    losses = [8 - 4 / (1 + math.exp(-(step - 100) / 8)) + max(0, step - 160) for step in range(200)]
    read = range_test.read_range(tried, losses)
    assert tried[95] < read["steepest"] < tried[130]
    assert tried[150] < 10 * read["tenth_of_lowest"] < tried[180]
