"""The house keeps the size that bounds.toml allows it."""

import importlib.util
from pathlib import Path

import pytest

_SPEC = importlib.util.spec_from_file_location("house_counts", Path(__file__).parent / "counts.py")
assert _SPEC and _SPEC.loader
house = importlib.util.module_from_spec(_SPEC)
_SPEC.loader.exec_module(house)


@pytest.fixture(scope="module")
def counted() -> dict[str, int]:
    return house.counts()


@pytest.mark.parametrize("name", house.BOUNDS["house"])
def test_a_count_of_the_house_is_within_its_bound(counted, name):
    assert counted[name] <= house.BOUNDS["house"][name], "raise bounds.toml only by what a plan allows"


def test_every_count_has_a_bound_and_no_goal_lies_above_one(counted):
    assert counted.keys() == house.BOUNDS["house"].keys()
    assert {name for name, goal in house.BOUNDS["goal"].items() if goal > house.BOUNDS["house"][name]} == set()


@pytest.mark.parametrize("kind", house.BOUNDS["each"])
def test_no_class_and_no_function_is_larger_than_its_bound_but_those_that_are_named(kind):
    assert house.large(kind).keys() == set(house.BOUNDS["larger"][kind])


def test_no_two_classes_share_a_name_but_those_that_are_named():
    assert house.shared_names().keys() == set(house.BOUNDS["larger"]["names"])
