"""`kdtrain distill --sanity`: the verdicts that go with students of which it is known how they are."""

import shutil

import pytest

from kdtrain.testing import tiny_model, tiny_tokenizer, write_model_folder

NAMES = [
    *("initial loss", "gradients", "teacher-student correlation", "dead units", "distillation term and T²"),
    *("graph breaks", "loader", "disk", "overfitting"),
]


def sanity(bench, *options):
    """The checks of a student by name; nothing of it may stay."""
    before = sorted(bench.root.rglob("*"))
    done = bench.run("distill", "--out", "checked", "--sanity", "--batch-size", 8, *bench.eager, *options, "--json")
    result = done.json
    assert sorted(bench.root.rglob("*")) == before
    assert result["run"] == "checked"
    assert [each["check"] for each in result["checks"]] == NAMES
    return {each["check"]: each for each in result["checks"]}


def verdicts(checks):
    return {name: each["verdict"] for name, each in checks.items()}


def test_a_sound_fresh_student_is_well_in_all_that_can_be_said_of_it(bench, cached):
    checks = sanity(bench, "--cache", "cache", "--student", "student.toml", "--micro-batch-size", 4)
    expected = dict.fromkeys(NAMES, "ok") | {"teacher-student correlation": "-", "graph breaks": "-"}
    assert verdicts(checks) == expected
    assert checks["initial loss"]["values"]["ln_vocabulary"] == pytest.approx(5.704, abs=1e-3)
    assert checks["overfitting"]["values"]["share"] > 0.5
    assert abs(checks["teacher-student correlation"]["values"]["correlation"]) < 0.5
    assert checks["graph breaks"]["values"]["breaks"] == []
    assert checks["disk"]["values"]["checkpoint_bytes"] > 0
    assert [each["temperature"] for each in checks["distillation term and T²"]["values"]["at"]] == [2.0, 4.0]


def test_the_teacher_itself_is_aligned_with_what_it_said(bench, cached):
    checks = sanity(bench, "--cache", "cache", "--student", "teacher")
    assert checks["teacher-student correlation"]["values"]["correlation"] > 0.99
    assert checks["teacher-student correlation"]["verdict"] == "ok"
    assert checks["teacher-student correlation"]["wanted"] == "above 0.9"


def test_a_student_that_says_to_be_trained_and_is_not_is_to_be_looked_at(bench, cached):
    wide = tiny_model("llama", 300, seed=9)
    for parameter in wide.parameters():
        parameter.data.mul_(8 if parameter.ndim > 1 else 1)
    wide.model.layers[0].mlp.up_proj.weight.data[:60] = 0.0
    write_model_folder(bench.root / "untrained", wide, tiny_tokenizer(300))
    try:
        checks = sanity(bench, "--cache", "cache", "--student", "untrained", "--lr", 1e-6, "--min-lr", 0)
    finally:
        shutil.rmtree(bench.root / "untrained")
    wrong = {name for name, verdict in verdicts(checks).items() if verdict == "look"}
    assert wrong == {"initial loss", "teacher-student correlation", "dead units", "overfitting"}
    assert checks["dead units"]["values"]["dead"] >= 60
    assert "model.layers.0.mlp.down_proj" in checks["dead units"]["found"]


def test_text_alone_is_packed_aside_and_no_more_of_it_than_is_needed(bench):
    checks = sanity(bench, "--student", "student.toml", *bench.data)
    assert checks["distillation term and T²"]["verdict"] == checks["teacher-student correlation"]["verdict"] == "-"
    assert checks["overfitting"]["verdict"] == "ok"


def test_an_online_teacher_is_asked_and_its_share_is_told(bench):
    checks = sanity(bench, "--teacher", "teacher", "--student", "gpt2.toml", *bench.data, "--document-mask")
    assert checks["loader"]["verdict"] == "-" and "asked of the teacher" in checks["loader"]["found"]
    assert checks["distillation term and T²"]["verdict"] == "ok"


def test_the_table_has_a_verdict_a_line(bench, cached):
    argv = ("--cache", "cache", "--student", "student.toml", "--out", "checked", *bench.eager)
    done = bench.run("distill", *argv, "--sanity", COLUMNS="200").ok()
    rows = [line.split("│")[1:3] for line in done.stdout.splitlines() if line.startswith("│ ")]
    assert {name.strip(): verdict.strip() for name, verdict in rows} == dict.fromkeys(NAMES, "ok") | {
        "teacher-student correlation": "-",
        "graph breaks": "-",
    }


def test_both_rehearsals_at_once_are_refused(bench):
    line = bench.run("distill", "--cache", "c", "--student", "s", "--out", "o", "--sanity", "--dry-run").refusal()
    assert "--dry-run and --sanity exclude each other" in line
