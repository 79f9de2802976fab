"""`kdtrain distill --dry-run`: the plan of a run and its cost, and nothing left on disk."""

import json

import pytest

from kdtrain import faults

STUDENT = ("--cache", "cache", "--student", "student.toml")


def test_a_dry_run_prints_the_plan_and_leaves_nothing(workbench):
    before = workbench.everything()
    plan = workbench.json(
        *("distill", *STUDENT, "--out", "deep/er/dry", "--steps", 100, "--micro-batch-size", 2, "--dry-run"),
        *(*workbench.plain, "--checkpoint-freq", 30, "--eval-freq", 40, "--lr-schedule", "wsd"),
    )
    assert workbench.everything() == before
    assert (plan["run"], plan["begins"], plan["steps"], plan["mode"]) == (
        "deep/er/dry",
        "from the beginning",
        100,
        "fp32",
    )
    assert plan["batch"] == "8 x 32 tokens, 4 micro-batches of 2"
    assert plan["sequences"] == {"train": 40, "validation": 8}
    assert (plan["epochs"], plan["tokens"]) == (20.0, 100 * 8 * 32)
    assert plan["checkpoints"] == 21  # at step 0, and every 5 steps an epoch ends; all others are among these
    assert plan["validations"] == 4  # 0, 40, 80, 100
    assert "the last 20 steps down to 1e-06" in plan["learning rate"]
    parts = {"first step": 1, "a step": 99, "a validation": 4, "training paused for it": 21}
    total = sum(number * plan["seconds"][part] for part, number in parts.items())
    assert plan["estimated_hours"] * 3600 == pytest.approx(total, abs=0.3)  # what rounding takes
    assert sum(plan["shares of the time"].values()) == pytest.approx(1.0, abs=1e-3)
    assert plan["checkpoint (MiB)"] > 0 and plan["disk free (MiB)"] > plan["disk for checkpoints (MiB)"]


def test_its_two_steps_are_those_of_the_run_and_for_a_run_it_names_where_that_resumes(workbench):
    options = (*STUDENT, *workbench.plain, "--steps", 4)
    planned = workbench.json("distill", *options, "--out", "real", "--dry-run")
    real = workbench.json("distill", *options, "--out", "real")
    lines = [json.loads(text) for text in (workbench.root / "real/metrics.jsonl").read_text().splitlines()]
    assert planned["loss of the two steps"] == [round(line["loss"], 4) for line in lines if "loss" in line][:2]
    assert planned["tokens"] == real["tokens"]
    before = workbench.everything()
    later = workbench.json("distill", *STUDENT, *workbench.plain, "--steps", 20, "--out", "real", "--dry-run")
    assert (planned["begins"], later["begins"]) == ("from the beginning", "at step-00000004")
    assert workbench.everything() == before


def test_other_options_than_those_of_the_run_in_the_folder_are_refused_as_the_run_refuses_them(workbench):
    options = (*STUDENT, *workbench.plain, "--steps", 1, "--out", "begun")
    workbench.json("distill", *options)
    before = workbench.everything()
    for more in ((), ("--dry-run",)):
        code, _, err = workbench.call("distill", *options, "--lr", 0.5, *more)
        assert code == 2 and "holds a run with other options: --lr (was 0.002, now 0.5)" in err
    assert workbench.everything() == before


def test_a_dry_run_refuses_what_the_run_refuses(workbench):
    (workbench.root / "strange").mkdir()
    (workbench.root / "strange/notes.txt").write_text("mine")
    options = (*STUDENT, *workbench.plain, "--dry-run")
    for out, said in (("strange", "something that is not a run"), ("strange/notes.txt", "is a file")):
        code, _, err = workbench.call("distill", *options, "--out", out)
        assert code == 2 and said in err
    assert [path.name for path in (workbench.root / "strange").iterdir()] == ["notes.txt"]


@pytest.mark.parametrize(
    "fault, exit_code, said",
    [
        ("train.after-step:term", 0, "interrupted; the trial run is removed"),
        ("train.gradient:nan:2", 1, "step 2: loss"),
    ],
)
def test_a_dry_run_that_is_stopped_or_fails_leaves_nothing(workbench, tmp_path, monkeypatch, fault, exit_code, said):
    before = workbench.everything()
    monkeypatch.setenv("KDTRAIN_FAULT", fault)
    monkeypatch.setenv("KDTRAIN_FAULT_LOG", str(tmp_path / "fired"))
    faults.read()
    try:
        code, _, err = workbench.call("distill", *STUDENT, *workbench.plain, "--out", "dry", "--dry-run")
    finally:
        monkeypatch.delenv("KDTRAIN_FAULT")
        faults.read()
    assert (tmp_path / "fired").read_text() == fault.split(":")[0] + "\n"
    assert code == exit_code and said in err and "Traceback" not in err
    assert workbench.everything() == before
