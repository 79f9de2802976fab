"""Caches of samples add up: grids that interleave, stored exactly."""

from fractions import Fraction

import numpy as np
import pytest
import torch

from kdtrain.cache.format.codec import CodecSpec, draw_points, encode_sequences, grid_name, grid_offset
from kdtrain.cache.format.compression import Coding


@pytest.mark.parametrize("number", [1, 7, 25, 50, 127])
def test_a_grid_and_its_refinement_are_the_doubles_of_a_grid_of_twice_as_many(number: int) -> None:
    place = (3, "train", 7, 512)
    halfway = Fraction(1, 2 * number)
    both = np.concatenate([draw_points(*place, number), draw_points(*place, number, halfway)], -1)
    assert np.array_equal(np.sort(both), np.sort(draw_points(*place, 2 * number)))
    assert both.min() >= 0 and both.max() < 1


def test_a_grid_is_uniform_and_of_its_seed_split_and_sequence_alone() -> None:
    points = draw_points(0, "train", 0, 40_000, 5)
    assert np.abs(np.diff(np.sort(points)) - 0.2).max() < 1e-12
    assert abs(points.mean() - 0.5) < 2e-3
    others = [
        draw_points(1, "train", 0, 99, 5),
        draw_points(0, "validation", 0, 99, 5),
        draw_points(0, "train", 1, 99, 5),
    ]
    assert all((other != points[:99]).all() for other in others)


def test_the_name_of_a_grid_says_its_offset() -> None:
    assert [grid_name(Fraction(0)), grid_name(Fraction(2, 100))] == ["grid", "grid+1/50"]
    assert grid_offset("grid+1/50") == Fraction(1, 50) and grid_offset("grid") == 0
    for other in (None, "systematic", "mixture", "grid+1/0", "grid+3/2", "grid+1/9999999", "grid+-1/2"):
        assert grid_offset(other) is None


def test_sequences_of_counts_are_stored_again_as_they_were(codecs: dict[str, CodecSpec]) -> None:
    spec = codecs["num_samples"]
    tokens = np.random.RandomState(0).randint(0, 64, (40, 17))
    logits = 3 * torch.randn(40, 16, 64, generator=torch.Generator().manual_seed(1))
    labels = torch.from_numpy(tokens[:, 1:])
    kept = encode_sequences(logits, labels, spec, seed=0, split="train", first=0)
    coding = Coding.fit(tokens, kept, spec)
    stored = coding.pack(tokens, kept)
    read = coding.unpack(tokens, stored)
    again = Coding.fit(tokens, read, spec)
    assert np.array_equal(again.predictor.weights, coding.predictor.weights)
    moved = Coding.fit(tokens[:5], {name: values[:5] for name, values in read.items()}, spec)  # to another shard
    for other in (again, Coding(spec, again.dictionary, moved.predictor)):
        back = other.unpack(tokens, other.pack(tokens, read))
        third = coding.pack(tokens, back)
        assert all(np.array_equal(third[name], stored[name]) for name in stored)
