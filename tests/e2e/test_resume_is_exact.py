"""A run that is broken off ends with the same bits: where, how, with which options, and after a rollback or not.

The matrix is in benchmarks/resume_matrix.py: here a selection in which every pair of two of its dimensions comes up,
and a few kills at random times; `make torture` does all of it. Each run is the real command, in a process of its own.
"""

import json
import subprocess
import sys
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"


@pytest.fixture(scope="module")
def matrix():
    sys.path.insert(0, str(BENCHMARKS))
    import resume_matrix

    yield resume_matrix
    sys.path.remove(str(BENCHMARKS))


def test_the_selection_holds_every_pair_of_values_of_two_dimensions(matrix):
    pairs = {pair for case in matrix.pairwise() for pair in matrix._pairs(case)}
    assert pairs == {pair for case in matrix.every_case() for pair in matrix._pairs(case)}


@pytest.mark.slow
def test_every_pair_of_ways_to_break_a_run_off_ends_with_the_same_bits(matrix, tmp_path):
    out = tmp_path / "result.json"
    argv = [sys.executable, str(BENCHMARKS / "torture_run.py"), "--pairwise", "--kills", "5", "--out", str(out)]
    ended = subprocess.run(argv, capture_output=True, text=True)
    assert out.exists(), ended.stderr[-2000:]
    result = json.loads(out.read_text())
    assert result["differences"] == []
    assert result["faults_that_did_not_fire"] == 0
    cases = matrix.pairwise()
    assert (result["cases"], result["faults_fired"]) == (len(cases), sum(len(case.faults()) for case in cases))
    assert result["random_kills"] >= 5
    assert ended.returncode == 0
