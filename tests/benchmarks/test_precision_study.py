"""The record of the precision study: its table is what its runs say."""

import json
import statistics

import pytest

from benchmarks import figures
from benchmarks.harness import RESULTS
from kdtrain.precision.controller import Policy, PrecisionController

RECORD = json.loads((RESULTS / "precision.json").read_text())


def test_the_default_wins_back_half_of_what_mxfp4_loses_and_quantises_three_steps_in_four():
    runs = RECORD["runs"]
    loss = {(run["kind"], run["seed"]): run["validation_loss"] for run in runs}
    found = [run for run in runs if run["kind"] == "mxfp4 default"]
    assert found
    for run in found:
        high = loss["bf16", run["seed"]]
        assert run["validation_loss"] - high <= 0.5 * (loss["mxfp4", run["seed"]] - high)
        assert run["quantized_share"] >= 0.75


def test_no_gap_of_the_record_passes_the_threshold_that_follows_from_its_noise():
    for run in RECORD["runs"]:
        gaps = dict(map(tuple, run["gaps"]))
        controller = PrecisionController(Policy(quantized="mxfp4", rules=("gap",), window=RECORD["settings"]["window"]))
        for step, loss in enumerate(run["loss"], 1):
            controller.observe(step, loss, gaps.get(step))
        assert controller.switches == 0


def test_the_table_compares_each_kind_with_bf16_of_its_own_seed():
    assert {row["seeds"] for row in RECORD["table"].values()} == {3} and RECORD["table"]["bf16"]["above_bf16"] == 0
    loss = {(run["kind"], run["seed"]): run["validation_loss"] for run in RECORD["runs"]}
    for kind, row in RECORD["table"].items():
        above = [loss[kind, seed] - loss["bf16", seed] for seed in range(3)]
        assert row["above_bf16"] == pytest.approx(statistics.mean(above), abs=1e-9)
    assert figures.bands([1, 1, 0, 1]) == [(0.5, 2.5), (3.5, 4.5)]
