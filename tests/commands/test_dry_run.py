"""`kdtrain distill --dry-run`: the plan of a run and its cost, and nothing left on disk."""

import json
from dataclasses import replace

import pytest

from kdtrain import cli, faults
from kdtrain.config.commands import DistillConfig
from kdtrain.config.values import options_of
from kdtrain.run.folder import _TRIES, write_config_to_copy

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
    options = (*STUDENT, *workbench.plain, "--steps", 4, "--alpha", 0.9)
    planned = workbench.json("distill", *options, "--out", "real", "--dry-run")
    real = workbench.json("distill", *options, "--out", "real")
    lines = [json.loads(text) for text in (workbench.root / "real/metrics.jsonl").read_text().splitlines()]
    assert planned["loss of the two steps"] == [round(line["loss"], 4) for line in lines if "loss" in line][:2]
    assert planned["tokens"] == real["tokens"]
    before = workbench.everything()
    later = workbench.json("distill", *options[:-4], "--steps", 20, "--out", "real", "--dry-run")
    assert (planned["begins"], later["begins"]) == ("from the beginning", "at step-00000004")
    assert workbench.everything() == before


@pytest.mark.parametrize(
    "more",
    [
        (*STUDENT, "--early-stopping", "--on-event", "notify", "--keep-rolling", 3, "--micro-batch-size", "auto"),
        ("--student", "student.toml", "--data", "text.txt", "--num-workers", 0, "--betas", 0.8, 0.9),
        (*STUDENT, "--cache", "other \\ '\"", "--cache-weights", "3,1", "--num-workers", 0),
    ],
)
def test_a_file_to_copy_is_the_run_of_its_command_with_each_option_below_its_line_of_help(workbench, tmp_path, more):
    given = [str(word) for word in ("--out", "o", *more)]
    file = tmp_path / "run.toml"
    write_config_to_copy(cli.parse("distill", [*given, "--dry-run", "--write-config", str(file)]))
    assert replace(cli.parse("distill", ["--config", str(file)]), config=None) == cli.parse("distill", given)
    lines = file.read_text().splitlines()
    for name, each in options_of(DistillConfig).items():
        at = [line.removeprefix("# ").startswith(f"{name} = ") for line in lines]
        if each.section in ("run", "objective", "optimizer") and name not in _TRIES:
            assert sum(at) == 1 and lines[at.index(True) - 1].startswith("# "), name
    assert "# epochs = X" in lines and "seed = 0" in lines


def test_the_file_to_copy_is_written_once_at_the_end_of_a_dry_run_alone(workbench, tmp_path):
    run = ("distill", *STUDENT, *workbench.plain, "--steps", 3, "--out", "o", "--write-config", tmp_path / "run.toml")
    code, _, err = workbench.call(*run)
    assert code == 2 and "--write-config has no effect without --dry-run" in err and not list(tmp_path.iterdir())
    code, out, _ = workbench.call(*run, "--dry-run")
    written = (tmp_path / "run.toml").read_bytes()
    assert code == 0 and b"steps = 3\n" in written and "run.toml" in out
    code, _, err = workbench.call(*run, "--dry-run", "--steps", 4)
    assert (code, err.count("\n")) == (2, 1) and "it is there already; name another file" in err
    assert (tmp_path / "run.toml").read_bytes() == written


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
