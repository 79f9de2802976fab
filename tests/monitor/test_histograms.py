"""Histograms: counts that add up, whatever is in the tensor."""

import math

import pytest
import torch

from kdtrain.monitor.histograms import EDGES, histograms


def one(tensor):
    return histograms({"x": tensor})["x"]


def test_every_finite_number_is_counted_once_in_the_bin_that_holds_it():
    values = torch.tensor([-3.0, -0.01, 0.0, 1e-12, 0.3, 0.3, 5.0])
    found = one(values)
    assert found.num == sum(found.bucket_counts) == 7
    lower = -math.inf
    for limit, count in zip(found.bucket_limits, found.bucket_counts, strict=True):
        assert count == sum(lower < value <= limit for value in values.tolist())
        lower = limit
    assert (found.min, found.max) == (-3.0, 5.0)
    assert found.sum == pytest.approx(values.double().sum().item())
    assert found.sum_squares == pytest.approx(values.double().square().sum().item())


def test_numbers_beyond_the_last_edge_have_a_bin():
    found = one(torch.tensor([-1e30, 1e30]))
    assert found.bucket_counts[0] == found.bucket_counts[-1] == 1 and sum(found.bucket_counts) == 2
    assert found.bucket_limits[-1] >= 1e30


def test_non_finite_numbers_and_tensors_without_a_finite_one_are_left_out():
    found = one(torch.tensor([1.0, math.nan, math.inf, -math.inf, 2.0]))
    assert (found.num, found.min, found.max, found.sum) == (2, 1.0, 2.0, 3.0)
    assert histograms({"empty": torch.empty(0), "broken": torch.full((3,), math.nan)}) == {} == histograms({})


def test_a_tensor_is_counted_the_same_whole_or_in_parts(monkeypatch):
    values = torch.randn(1000, generator=torch.Generator().manual_seed(0))
    whole = one(values)
    monkeypatch.setattr("kdtrain.monitor.histograms._CHUNK", 64)
    parts = one(values.reshape(10, 100))
    assert (parts.bucket_counts, parts.bucket_limits, parts.min, parts.max) == (
        whole.bucket_counts,
        whole.bucket_limits,
        whole.min,
        whole.max,
    )


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_every_float_dtype_is_counted(dtype):
    assert one(torch.ones(3, dtype=dtype)).bucket_counts == [3]


def test_edges_rise_by_half_an_octave():
    assert (EDGES.diff() > 0).all()
    positive = EDGES[EDGES > 0]
    assert torch.allclose(positive[1:] / positive[:-1], torch.tensor(2.0).sqrt())
