"""A run that is broken off ends with the same bits: where, how, with which options, and after a rollback or not.

The matrix is in tests/torture/resume_matrix.py: here a selection in which every place is met in every way, and a
kill at a random time; `make torture` does all of it, with fifty kills. Each run is the real command, in a process of
its own.
"""

import itertools
import json

import pytest

from tests.torture import resume_matrix as matrix


def test_the_torture_holds_every_pair_of_values_of_two_dimensions():
    pairs = {pair for case in matrix.pairwise() for pair in matrix._pairs(case)}
    assert pairs == {pair for case in matrix._product() for pair in matrix._pairs(case)}
    assert pairs == {pair for case in matrix.every_case() for pair in matrix._pairs(case)}


def test_the_selection_meets_each_place_in_each_way_and_each_of_both_with_each_option():
    cases = matrix.selection()
    assert {(case.where, case.how) for case in cases} == set(itertools.product(matrix.WHERE, matrix.HOW))
    for name in ("accumulation", "rollback", "format"):
        values = {getattr(case, name) for case in matrix._product()}
        for other, places in (("where", matrix.WHERE), ("how", matrix.HOW)):
            met = {(getattr(case, other), getattr(case, name)) for case in cases}
            assert met == set(itertools.product(places, values)), (other, name)
    assert {(case.how, case.temperature) for case in cases} == set(itertools.product(matrix.HOW, matrix.TEMPERATURE))


@pytest.mark.slow
def test_a_run_broken_off_anywhere_in_any_way_ends_with_the_same_bits(server, tmp_path):
    out = tmp_path / "result.json"
    (ended,) = server.run("-m", "tests.torture.run", "--selection", "--kills", 1, "--out", out)
    assert out.exists(), ended.stderr[-2000:]
    result = json.loads(out.read_text())
    assert result["differences"] == []
    assert result["faults_that_did_not_fire"] == 0
    cases = matrix.selection()
    assert (result["cases"], result["faults_fired"]) == (len(cases), sum(len(case.faults()) for case in cases))
    assert result["random_kills"] >= 1
    assert ended.returncode == 0
