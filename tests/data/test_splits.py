from hypothesis import given
from hypothesis import strategies as st

from kdtrain.data.corpus import SPLITS, assign, by_hash, cut, rank

_WITHHELD = st.sampled_from([("validation", "test"), ("validation",), ("test",)])


def test_the_split_of_a_document_never_changes_between_releases():
    assert [by_hash(rank(key), SPLITS[1:]) for key in ("0", "5", "20")] == list(SPLITS)


def test_a_twentieth_each_is_withheld():
    found = [by_hash(rank(str(n)), ("validation", "test")) for n in range(20000)]
    assert abs(found.count("validation") - 1000) < 150
    assert abs(found.count("test") - 1000) < 150


@given(st.lists(st.sampled_from([n / 9 for n in range(9)]), min_size=3, max_size=200), _WITHHELD)
def test_equal_documents_share_a_split(ranks, withheld):
    found = set(zip(ranks, assign(ranks, withheld), strict=True))
    assert len(found) == len(set(ranks))
    assert "train" in {split for _, split in found} and len({split for _, split in found}) >= min(2, len(found))


@given(st.lists(st.floats(0, 1, exclude_max=True), min_size=3, max_size=200, unique=True), _WITHHELD)
def test_three_documents_or_more_leave_no_split_empty(ranks, withheld):
    assert set(assign(ranks, withheld)) == {"train", *withheld}


@given(st.integers(0, 200), _WITHHELD)
def test_cutting_gives_every_line_to_exactly_one_split(lines, withheld):
    parts = [cut(["x\n"] * lines, withheld, split) for split in ("train", *withheld)]
    assert [line for part in parts for line in part] == list(range(lines))
    if lines >= 3:
        assert all(parts)
