"""What the study of find-lr makes of its runs."""

import math

import pytest

from benchmarks.science import find_lr


def search(kind, seed, lr):
    return {
        "kind": kind,
        "seed": seed,
        "suggestion": {"lr": lr, "between": [lr / 2, lr * 2]},
        "cost": {"share_of_the_run": 0.6},
    }


def test_a_suggestion_is_held_against_the_best_of_seven_by_the_mean_over_seeds():
    best = find_lr.rates("lora")[3]
    runs = [
        {"kind": "lora", "lr": rate, "seed": seed, "validation_loss": 3 + abs(math.log2(rate / best)) + seed / 10}
        for rate in find_lr.rates("lora")
        for seed in (0, 1)
    ]
    runs[-1]["validation_loss"] = None  # it diverged
    row = find_lr._row("lora", [search("lora", 0, best), search("lora", 1, best / 3)], runs, [])
    assert len(row["grid"]) == 7 and row["best_of_seven"] == best and row["grid"][-1]["loss"] is None
    assert row["ratio_to_the_best"] == pytest.approx([1, 1 / 3]) and row["within_a_factor_of_two"] is False
    assert row["spread_over_seeds"] == pytest.approx(0.1 / math.sqrt(2))
    assert find_lr._row("lora", [search("lora", 0, best * 2)], runs, [])["within_a_factor_of_two"] is True


def test_a_range_test_is_read_where_the_loss_falls_fastest_and_a_tenth_below_its_lowest():
    tried = [1e-6 ** (1 - step / 199) for step in range(200)]
    losses = [8 - 4 / (1 + math.exp(-(step - 100) / 8)) + max(0, step - 160) for step in range(200)]
    read = find_lr.read_range(tried, losses)
    assert tried[95] < read["steepest"] < tried[130]
    assert tried[150] < 10 * read["tenth_of_lowest"] < tried[180]
