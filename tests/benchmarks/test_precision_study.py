"""The precision study: kdtrain takes its commands, its table is what the runs say, and its picture is drawn."""

import json

import pytest

from benchmarks import figures
from benchmarks.science import precision
from kdtrain import cli
from kdtrain.precision.controller import Policy, PrecisionController


def run(kind: str, seed: int, loss: float, quantized: list[int]) -> dict:
    return {
        "kind": kind, "seed": seed, "validation_loss": loss, "quantized_share": sum(quantized) / len(quantized),
        "switches": 1, "loss": [loss] * len(quantized), "quantized": quantized,
    }  # fmt: skip


def test_every_command_of_the_study_is_one_that_kdtrain_takes():
    settings = precision.Settings()
    common = ["--cache", "c", "--out", "o", *precision.distill_words(settings)]
    for kind in (*precision.FIXED, *precision.ADAPTIVE):
        config = cli.parse("distill", [*common, *precision.words(settings, kind, 0), "--load", "base"])
        assert config.precision.precision == kind.split()[0] and config.quantization.time_resume == (" " in kind)
    assert cli.parse("distill", [*common, *precision.base_words(settings)]).steps == settings.base_steps
    assert cli.parse("cache-teacher", ["--out", "c", *precision.cache_words(settings)]).codec.top_k == 16


def test_the_default_wins_back_half_of_what_mxfp4_loses_and_quantises_three_steps_in_four():
    runs = json.loads(precision.RESULT.read_text())["runs"]
    loss = {(run["kind"], run["seed"]): run["validation_loss"] for run in runs}
    found = [run for run in runs if run["kind"] == "mxfp4 default"]
    assert found
    for run in found:
        high = loss["bf16", run["seed"]]
        assert run["validation_loss"] - high <= 0.5 * (loss["mxfp4", run["seed"]] - high)
        assert run["quantized_share"] >= 0.75


def test_no_gap_of_the_record_passes_the_threshold_that_follows_from_its_noise():
    record = json.loads(precision.RESULT.read_text())
    for run in record["runs"]:
        gaps = dict(map(tuple, run["gaps"]))
        controller = PrecisionController(Policy(quantized="mxfp4", rules=("gap",), window=record["settings"]["window"]))
        for step, loss in enumerate(run["loss"], 1):
            controller.observe(step, loss, gaps.get(step))
        assert controller.switches == 0


def test_the_table_compares_each_kind_with_bf16_of_its_own_seed_and_the_picture_is_drawn(tmp_path):
    kinds = (*precision.FIXED, *precision.ADAPTIVE)
    runs = [run(kind, seed, 3.0 + seed + 0.1 * (kind != "bf16"), [1, 1, 0, 1]) for kind in kinds for seed in (0, 1)]
    table = precision.table(runs)
    assert table["bf16"]["above_bf16"] == 0
    assert table["mxfp4 gap"]["above_bf16"] == pytest.approx(0.1)
    assert table["mxfp4 gap"]["quantized_share"] == 0.75 and table["mxfp4 gap"]["above_bf16_sd"] < 1e-9
    assert figures.bands([1, 1, 0, 1]) == [(0.5, 2.5), (3.5, 4.5)]
    (picture,) = figures.draw_precision({"table": table, "runs": runs}, tmp_path)
    assert picture.stat().st_size > 10_000
