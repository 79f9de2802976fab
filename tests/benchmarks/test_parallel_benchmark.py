"""What `benchmarks.performance.parallel` has measured is what the plan still estimates, and what the formulas say."""

import json

import pytest

from benchmarks.performance import parallel as benchmark


@pytest.fixture(scope="module")
def record():
    return json.loads(benchmark.RESULT.read_text())


def test_the_plan_is_within_a_fifth_of_the_measured_peak_for_five_runs(record, tmp_path_factory):
    cases = record["memory"]["cases"]
    assert list(cases) == list(benchmark.MEMORY) and len(cases) == 5
    folder = benchmark.Folder(tmp_path_factory.mktemp("cases"))
    for name, case in benchmark.MEMORY.items():
        measured = cases[name]["measured"]
        if measured is None:  # not since the plan changed
            continue
        assert abs(cases[name]["estimated"] / measured - 1) <= benchmark.GOAL
        if case.teacher is not None or case.vocab_size > 2048:
            continue  # what they need takes seconds to make
        now = benchmark.estimate(folder, name.replace(" ", "-"), case).total / 2**20
        # a CPU with bf16 keeps a further copy of the head's weight, and the record is of one
        assert abs(now / measured - 1) <= benchmark.GOAL, (name, now, measured)
        if "fp32" in case.options:
            assert now == pytest.approx(cases[name]["estimated"], abs=0.1)


def test_the_plan_is_within_a_fifth_of_a_ranks_measured_peak_and_within_a_tenth_where_tensor_ranks_cut(
    record, tmp_path
):
    folder = benchmark.Folder(tmp_path)
    assert list(record["memory in ranks"]) == list(benchmark.IN_RANKS)
    for name, each in record["memory in ranks"].items():
        assert benchmark.estimate_in_ranks(folder, name).total / 2**20 == pytest.approx(each["estimated"], abs=0.1)
        goal = 0.1 if "--parallel" not in benchmark.IN_RANKS[name][1] else benchmark.GOAL
        assert each["measured"] is None or abs(each["estimated"] / each["measured"] - 1) <= goal, name


def test_what_was_counted_is_what_the_formulas_say(record):
    rows = record["exchange"]
    assert {(row["how"], row["precision"], row["micro-batches"]) for row in rows} == {
        (how, precision, micros) for how in ("ddp", "fsdp") for precision in ("fp32", "bf16") for micros in (1, 3)
    }
    assert all(row["counted"] == row["formula"] and row["exact"] for row in rows)
    assert all(size < 1000 for row in rows for size in row["numbers that ranks agree on"][1:])
