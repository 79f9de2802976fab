import itertools
import time

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kdtrain.data.bytes import ByteTokenizer, SpecialTokens
from kdtrain.data.spelling import Spelling
from kdtrain.tokenizers.boundaries import MOST, common_boundaries
from kdtrain.tokenizers.cells import Cells, conflicts, merge, prefix_cells
from tests.token_kinds import train


def by_sets(sizes_N, sizes_M, counts_N):
    """The definitions, token by token."""
    starts_N, starts_M = ([sum(sizes[:n]) for n in range(len(sizes))] for sizes in (sizes_N, sizes_M))
    begins = {start: n for n, start in enumerate(starts_N) if sizes_N[n]}
    total = sum(sizes_N)
    byte_counts = [counts_N[n] for n, size in enumerate(sizes_N) for _ in range(size)]
    source = [begins.get(start, -1) if size else -1 for start, size in zip(starts_M, sizes_M, strict=True)]
    by_byte = [(n, offset) for n, size in enumerate(sizes_N) for offset in range(size)]
    holders = [by_byte[start] if size else (-1, 0) for start, size in zip(starts_M, sizes_M, strict=True)]
    counts = [bool(size) and all(byte_counts[a : a + size]) for a, size in zip(starts_M, sizes_M, strict=True)]
    length, others = [0] * len(sizes_M), [0] * len(sizes_M)
    first = [m for m, found in enumerate(source) if found >= 0]
    for m, after in itertools.pairwise([*first, len(sizes_M)]):
        stop = source[after] if after < len(sizes_M) else len(sizes_N)
        while not sizes_M[after - 1]:
            after -= 1
        while not sizes_N[stop - 1]:
            stop -= 1
        mine, theirs = range(m, after), range(source[m], stop)
        usable = all(sizes_M[n] and counts[n] for n in mine) and all(sizes_N[n] and counts_N[n] for n in theirs)
        if usable and len(mine) <= MOST and len(theirs) <= MOST:
            length[after - 1], others[after - 1] = len(mine), len(theirs)
    assert total == sum(sizes_M)
    return [n for n, _ in holders], [offset for _, offset in holders], length, others, counts


@given(st.lists(st.tuples(st.integers(0, 4), st.booleans()), max_size=40), st.randoms(use_true_random=False))
def test_boundaries_and_chunks_are_those_of_the_definition(tokens, chance):
    sizes_N, counts_N = [size for size, _ in tokens], [counts for _, counts in tokens]
    left, sizes_M = sum(sizes_N), []
    while left:
        sizes_M.append(chance.randint(0, min(5, left)))
        left -= sizes_M[-1]
    found = common_boundaries(np.array(sizes_N, int), np.array(sizes_M, int), np.array(counts_N, bool))
    expected = by_sets(sizes_N, sizes_M, counts_N)
    for got, want in zip((found.source, found.offset, found.length, found.others, found.counts), expected, strict=True):
        assert got.tolist() == want


def test_streams_of_different_bytes_are_refused():
    with pytest.raises(ValueError, match="bytes"):
        common_boundaries(np.array([1, 2]), np.array([2]), np.ones(2, bool))


def test_a_million_tokens_take_less_than_a_second_of_one_core():
    random = np.random.RandomState(0)
    sizes_N = random.randint(1, 8, 500_000)
    sizes_M = np.diff(np.unique(np.append(random.randint(1, sizes_N.sum(), 600_000), [0, sizes_N.sum()])))
    start = time.process_time()
    found = common_boundaries(sizes_N, sizes_M, np.ones(len(sizes_N), bool))
    assert time.process_time() - start < (len(sizes_N) + len(sizes_M)) / 1e6
    assert (found.source >= 0).all() and (found.offset == 0).mean() > 0.1


def both(one, other):
    teacher, student = ByteTokenizer(train(*one)), ByteTokenizer(train(*other))
    events = SpecialTokens.match(teacher, student).lookup(len(teacher.bytes))
    firsts = Spelling.of(teacher.bytes, student.bytes, student.cut).firsts()
    return teacher, student, prefix_cells(teacher.bytes, student.bytes, firsts, events)


def test_cells_of_equal_tokenizers_are_the_tokens():
    assert both(("llama3",), ("llama3",))[2].identity


@pytest.mark.parametrize("other", [("gpt2", 600), ("gemma", 700), ("qwen", 420)])
def test_every_token_of_text_is_in_the_cell_of_the_bytes_it_begins_with(other):
    teacher, student, cells = both(("llama3", 600), other)
    for token in range(len(student.bytes)):
        if student.bytes[token]:
            mates = np.flatnonzero(cells.of_student == cells.of_student[token])
            assert len({student.bytes[each][:1] for each in mates}) == 1
    for token in range(len(teacher.bytes)):
        whole = teacher.bytes[token]
        mates = np.flatnonzero(cells.of_student == cells.of_teacher[token])
        if whole:
            start = min((student.bytes[each] for each in mates), key=len)
            assert whole.startswith(start) and cells.of_teacher[token] >= 0
    eos = teacher.tokenizer.eos_token_id, student.tokenizer.eos_token_id
    assert cells.of_teacher[eos[0]] == cells.of_student[eos[1]] < cells.count
    assert (cells.of_student == cells.of_student[eos[1]]).sum() == 1
    assert sorted(set(cells.of_student.tolist()) - {cells.count}) == list(range(cells.count))


def test_cells_that_conflict_in_the_text_are_merged_and_rare_conflicts_are_not():
    cells = Cells(np.array([0, 1, 2]), np.array([0, 1, 2, 3]), 3)
    teacher, student = (
        np.array([0] * 20 + [1] * 20 + [2] * 20),
        np.array([0] * 20 + [1] * 15 + [0] * 5 + [2] * 19 + [0]),
    )
    pairs, number = conflicts(cells, teacher, student)
    assert pairs.tolist() == [[0, 1], [0, 2]] and number.tolist() == [5, 1]
    merged = merge(cells, teacher, student)
    assert merged.of_teacher.tolist() == [0, 0, 1] and merged.of_student.tolist() == [0, 0, 1, 2] and merged.count == 2
