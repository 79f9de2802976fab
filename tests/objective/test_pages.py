"""Memory in large pages is ordinary memory, and only what lies in it is asked for."""

import pytest
import torch

from kdtrain.objective import pages


@pytest.fixture
def asked(monkeypatch):
    """The ranges that were asked for in large pages, as first and last address."""
    ranges = []
    monkeypatch.setattr(pages, "_madvise", lambda: lambda first, size, _: ranges.append((first, first + size)))
    return ranges


def test_whole_large_pages_inside_of_the_memory_are_asked_for(asked):
    tensor = pages.empty(3, 1 << 20, dtype=torch.float32)
    assert tensor.shape == (3, 1 << 20) and tensor.dtype == torch.float32 and tensor.is_contiguous()
    [(first, last)] = asked
    assert first % (2 << 20) == last % (2 << 20) == 0
    assert tensor.data_ptr() <= first < last <= tensor.data_ptr() + tensor.nbytes
    assert last - first >= tensor.nbytes - (4 << 20)


def test_what_is_smaller_than_a_large_page_asks_for_none(asked):
    pages.empty(1000, dtype=torch.float32)
    pages.empty(0, dtype=torch.float32)
    assert asked == []


def test_the_memory_of_other_devices_is_left_alone(asked):
    pages.empty(3, 1 << 20, dtype=torch.float32, device="meta")
    assert asked == []


def test_where_no_advice_is_taken_there_is_memory_all_the_same(monkeypatch):
    monkeypatch.setattr(pages.sys, "platform", "darwin")
    assert pages._madvise.__wrapped__() is None
    monkeypatch.setattr(pages, "_madvise", lambda: None)
    assert pages.empty(3, 1 << 20, dtype=torch.float32).fill_(1.0).sum() == 3 << 20
