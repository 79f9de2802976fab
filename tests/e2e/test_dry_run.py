"""`kdtrain distill --dry-run`: the plan of a run, what it would take, and nothing left of it."""

import os

import pytest


def everything(bench):
    return sorted(str(path.relative_to(bench.root)) for path in bench.root.rglob("*"))


def test_a_dry_run_says_what_would_be_done_and_leaves_nothing(bench, cached):
    before = everything(bench)
    argv = ("--cache", "cache", "--student", "student.toml", "--out", "deep/er/dry", "--steps", 100, "--batch-size", 8)
    done = bench.run(
        *("distill", *argv, "--micro-batch-size", 2, "--dry-run", "--json", *bench.eager),
        *("--checkpoint-freq", 30, "--eval-freq", 40, "--lr-schedule", "wsd"),
    )
    plan = done.json
    assert everything(bench) == before
    assert (plan["run"], plan["begins"], plan["steps"], plan["mode"]) == ("deep/er/dry", "anew", 100, "fp32")
    assert plan["batch"] == "8 x 32 tokens, 4 micro-batches of 2"
    assert plan["sequences"] == {"train": 40, "validation": 8}
    assert (plan["epochs"], plan["tokens"]) == (20.0, 100 * 8 * 32)
    assert plan["checkpoints"] == 4  # 30, 60, 90, 100
    assert plan["validations"] == 4  # 0, 40, 80, 100
    assert "the last 20 steps down to 1e-06" in plan["learning rate"]
    assert len(plan["loss of the two steps"]) == 2
    step, total = plan["seconds"]["a step"], plan["estimated_hours"] * 3600
    assert 99 * step <= total * 1.01 and total < 99 * step + 60
    assert sum(plan["shares of the time"].values()) == pytest.approx(1.0, abs=1e-3)
    assert plan["checkpoint (MiB)"] > 0 and plan["disk free (MiB)"] > plan["disk for checkpoints (MiB)"]


def test_the_estimate_is_that_of_the_run(bench, cached):
    argv = ("--cache", "cache", "--student", "student.toml", "--steps", 6, *bench.eager, *bench.fast, "--json")
    planned = bench.run("distill", *argv, "--out", "planned", "--dry-run").json
    real = bench.run("distill", *argv, "--out", "real").json
    losses = [round(line["loss"], 4) for line in bench.metrics("real")[:2]]
    assert planned["loss of the two steps"] == losses
    assert planned["tokens"] == real["tokens"]


def test_beside_an_earlier_run_it_says_where_the_run_would_go_on(bench, distilled):
    before = {path: path.stat().st_mtime_ns for path in (bench.root / "run").rglob("*")}
    argv = ("--cache", "cache", "--student", "student.toml", "--out", "run", "--steps", 20, "--batch-size", 8)
    plan = bench.run("distill", *argv, *bench.eager, "--dry-run", "--json").json
    assert plan["begins"] == "at step-00000008"
    assert {path: path.stat().st_mtime_ns for path in (bench.root / "run").rglob("*")} == before


def test_what_the_run_would_refuse_the_dry_run_refuses(bench, cached):
    (bench.root / "strange").mkdir()
    (bench.root / "strange/notes.txt").write_text("mine")
    argv = ("--cache", "cache", "--student", "student.toml", *bench.eager, "--dry-run")
    assert "holds something that is no run" in bench.run("distill", *argv, "--out", "strange").refusal()
    assert "is a file" in bench.run("distill", *argv, "--out", "strange/notes.txt").refusal()
    assert os.listdir(bench.root / "strange") == ["notes.txt"]


def test_a_dry_run_that_is_stopped_leaves_nothing(bench, cached):
    before = everything(bench)
    argv = ("--cache", "cache", "--student", "student.toml", "--out", "dry", *bench.eager, "--dry-run")
    done = bench.run("distill", *argv, fault="train.after-step:term")
    assert done.code == 1 and "interrupted; nothing was left behind" in done.refusal()
    assert [name for name in everything(bench) if name != "fired"] == [name for name in before if name != "fired"]
