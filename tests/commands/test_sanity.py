"""`kdtrain distill --sanity`: the verdicts that go with students of which it is known how they are."""

import shutil

import pytest

from kdtrain.run import sanity
from kdtrain.run.trial import Trial
from kdtrain.testing import tiny_model, tiny_tokenizer, write_model_folder
from kdtrain.training.state import TrainState

NAMES = [
    *("initial loss", "gradients", "teacher-student correlation", "dead units", "distillation term and T²"),
    *("graph breaks", "loader", "resume", "disk", "overfitting"),
]
FAST = ("--lr", 1e-2)
"""A student of width 32 memorizes at a high rate only."""


@pytest.fixture(autouse=True)
def quick_to_read(monkeypatch):
    """Whether a tiny student is trained in less time than its batch is read in is up to the machine."""
    seconds = sanity.Checks._reading_seconds
    monkeypatch.setattr(sanity.Checks, "_reading_seconds", lambda checks, step: min(0.0, seconds(checks, step)))


def checked(workbench, *options):
    """The checks of a student by name; nothing of it may stay."""
    before = workbench.everything()
    result = workbench.json("distill", "--out", "checked", "--sanity", *workbench.plain, *options)
    assert workbench.everything() == before
    assert result["run"] == "checked"
    assert [each["check"] for each in result["checks"]] == NAMES
    return {each["check"]: each for each in result["checks"]}


def verdicts(checks):
    return {name: each["verdict"] for name, each in checks.items()}


def test_a_sound_fresh_student_passes_every_check(workbench):
    options = ("--cache", "cache", "--student", "student.toml", "--micro-batch-size", 4)
    checks = checked(workbench, *options, *FAST)
    expected = dict.fromkeys(NAMES, "ok") | {"teacher-student correlation": "-", "graph breaks": "-"}
    assert verdicts(checks) == expected
    assert checks["initial loss"]["values"]["ln_vocabulary"] == pytest.approx(5.704, abs=1e-3)
    assert checks["overfitting"]["values"]["share"] > 0.5
    assert abs(checks["teacher-student correlation"]["values"]["correlation"]) < 0.5
    assert checks["graph breaks"]["values"]["breaks"] == []
    assert checks["disk"]["values"]["checkpoint_bytes"] > 0
    assert checks["resume"]["values"]["differ"] == [] and checks["resume"]["values"]["tensors"] > 9
    terms = checks["distillation term and T²"]["values"]
    assert [each["temperature"] for each in terms["at"]] == [1.0, 2.0]
    assert terms["factors_over_T2"] == pytest.approx([1.0, 1.0], rel=1e-5)


def test_the_teacher_itself_is_aligned_with_its_own_cache(workbench, monkeypatch):
    monkeypatch.setattr(sanity, "STEPS", 1)
    alike = checked(workbench, "--cache", "cache", "--student", "teacher")["teacher-student correlation"]
    assert alike["values"]["correlation"] > 0.99
    assert (alike["verdict"], alike["wanted"]) == ("ok", "above 0.9")


def test_the_teachers_own_weights_are_known_in_another_dtype_and_under_another_name(workbench, monkeypatch):
    monkeypatch.setattr(sanity, "STEPS", 1)
    (workbench.root / "half.toml").write_text("source = 'teacher'\ndtype = 'bfloat16'\n")
    cache = ("cache-teacher", "--teacher", "half.toml", "--out", "half", "--num-sequences", 16, "--top-k", 12)
    for precision in ("fp32", "bf16"):
        workbench.json(*cache[:4], f"half-{precision}", *cache[5:], *workbench.text, "--precision", precision)
        found = checked(workbench, "--cache", f"half-{precision}", "--student", "teacher")
        assert found["teacher-student correlation"]["wanted"] == "above 0.9"


def test_a_student_that_only_has_the_teachers_name_is_not_taken_for_it(workbench, monkeypatch):
    monkeypatch.setattr(sanity, "STEPS", 1)
    write_model_folder(workbench.root / "other" / "teacher", tiny_model("llama", 300, seed=5), tiny_tokenizer(300))
    found = checked(workbench, "--cache", "cache", "--student", "other/teacher")
    assert found["teacher-student correlation"]["wanted"] == "above 0.3"


def test_a_student_that_is_called_pretrained_and_is_not_gets_the_verdict_look(workbench):
    wide = tiny_model("llama", 300, seed=9)
    for parameter in wide.parameters():
        parameter.data.mul_(8 if parameter.ndim > 1 else 1)
    wide.model.layers[0].mlp.up_proj.weight.data[:60] = 0.0
    write_model_folder(workbench.root / "untrained", wide, tiny_tokenizer(300))
    try:
        checks = checked(workbench, "--cache", "cache", "--student", "untrained", "--lr", 1e-6, "--min-lr", 0)
    finally:
        shutil.rmtree(workbench.root / "untrained")
    wrong = {name for name, verdict in verdicts(checks).items() if verdict == "look"}
    assert wrong == {"initial loss", "teacher-student correlation", "dead units", "overfitting"}
    assert checks["dead units"]["values"]["dead"] >= 60
    assert "model.layers.0.mlp.down_proj" in checks["dead units"]["found"]


def test_text_is_packed_in_a_temporary_folder_and_only_as_much_as_needed(workbench, monkeypatch):
    asked = []
    assemble = sanity.trial_run
    monkeypatch.setattr(sanity, "trial_run", lambda config: (asked.append(config), assemble(config))[1])
    checks = checked(workbench, "--student", "student.toml", *workbench.text, *FAST)
    assert checks["distillation term and T²"]["verdict"] == checks["teacher-student correlation"]["verdict"] == "-"
    assert checks["overfitting"]["verdict"] == "ok"
    assert asked[0].data.num_sequences == 64


def test_the_time_of_an_online_teacher_is_reported(workbench, monkeypatch):
    monkeypatch.setattr(sanity, "STEPS", 1)
    options = ("--teacher", "teacher", "--student", "student.toml", *workbench.text, "--document-mask")
    checks = checked(workbench, *options)
    assert checks["loader"]["verdict"] == "-" and "computed by the teacher" in checks["loader"]["found"]
    assert checks["distillation term and T²"]["verdict"] == "ok"


def test_a_slow_reader_and_a_full_disk_get_the_verdict_look(workbench, monkeypatch):
    monkeypatch.setattr(sanity, "STEPS", 1)
    monkeypatch.setattr(sanity.Checks, "_reading_seconds", lambda checks, step: 1e6)
    monkeypatch.setattr(Trial, "checkpoints_kept", 10**12)
    monkeypatch.setattr(sanity, "graph_breaks", lambda step, batch: ["model.py:7: a reason"])
    checks = checked(workbench, "--cache", "cache", "--student", "student.toml")
    assert verdicts(checks)["loader"] == verdicts(checks)["disk"] == "look"
    assert "1: model.py:7: a reason" in checks["graph breaks"]["found"]


def test_a_resume_that_loses_a_moment_gets_the_verdict_look(workbench, monkeypatch):
    monkeypatch.setattr(sanity, "STEPS", 1)
    load = TrainState.load

    def forgetful(state, tensors, numbers, **options):
        load(state, tensors, numbers, **options)
        next(iter(state.optimizer.state.values()))["exp_avg_sq"].zero_()

    monkeypatch.setattr(TrainState, "load", forgetful)
    checks = checked(workbench, "--cache", "cache", "--student", "student.toml")
    assert verdicts(checks)["resume"] == "look"
    assert any(name.startswith("student.") for name in checks["resume"]["values"]["differ"])
    assert "tensors differ (" in checks["resume"]["found"]


def test_the_table_has_a_verdict_a_line(workbench, monkeypatch):
    monkeypatch.setattr(sanity, "STEPS", 1)
    monkeypatch.setenv("COLUMNS", "250")
    options = ("--cache", "cache", "--student", "student.toml", "--out", "checked", *workbench.plain)
    code, out, err = workbench.call("distill", *options, "--sanity")
    rows = [[cell.strip() for cell in line.split("│")[1:3]] for line in out.splitlines() if line.startswith("│ ")]
    assert code == 0 and "check 10 of 10" in err
    assert [name for name, _ in rows if name] == NAMES
    assert {verdict for name, verdict in rows if name} == {"ok", "look", "-"}


def test_both_rehearsals_at_once_are_refused(workbench):
    code, _, err = workbench.call(
        *("distill", "--cache", "cache", "--student", "student.toml", "--out", "o", "--sanity", "--dry-run")
    )
    assert code == 2 and "--dry-run and --sanity exclude each other" in err
