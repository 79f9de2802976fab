"""`kdtrain distill --sanity`: the verdicts that go with students of which it is known how they are."""

import math
import re
import shutil

import pytest
import torch

from kdtrain.objective.batch import Batch
from kdtrain.run import trial
from kdtrain.run.trial import entropy_floor
from kdtrain.testing import tiny_model, tiny_tokenizer, write_model_folder
from kdtrain.training.state import TrainState

NAMES = ["initial loss", "gradients", "loader", "resume", "overfitting"]
CACHED = ("--cache", "cache", "--student", "student.toml")
FAST = ("--lr", 1e-2)
"""A student of width 32 memorizes at a high rate only."""


@pytest.fixture(autouse=True)
def quick_to_read(monkeypatch):
    """Fix whether reading takes longer than training: for a tiny student it depends on the machine."""
    seconds = trial._reading_seconds
    monkeypatch.setattr(trial, "_reading_seconds", lambda trainer, step: min(0.0, seconds(trainer, step)))


def checked(workbench, *options):
    """Run the checks of a student, and return them by name; assert that they leave no file."""
    before = workbench.everything()
    result = workbench.json("distill", "--out", "checked", "--sanity", *workbench.plain, *options)
    assert workbench.everything() == before
    assert result["run"] == "checked"
    assert [each["check"] for each in result["checks"]] == NAMES
    return {each["check"]: each for each in result["checks"]}


def verdicts(checks):
    return {name: each["verdict"] for name, each in checks.items()}


def test_a_sound_fresh_student_passes_every_check(workbench):
    checks = checked(workbench, *CACHED, "--micro-batch-size", 4, *FAST)
    assert verdicts(checks) == dict.fromkeys(NAMES, "ok")
    assert checks["initial loss"]["values"]["ln_vocabulary"] == pytest.approx(5.704, abs=1e-3)
    memorized = checks["overfitting"]["values"]
    assert memorized["share"] > 0.5 and memorized["floor"] <= memorized["lowest"] < memorized["first"]
    assert checks["resume"]["values"]["differ"] == [] and checks["resume"]["values"]["tensors"] > 9


def test_a_student_that_is_called_pretrained_and_is_not_gets_the_verdict_look(workbench):
    wide = tiny_model("llama", 300, seed=9)
    for parameter in wide.parameters():
        parameter.data.mul_(8 if parameter.ndim > 1 else 1)
    write_model_folder(workbench.root / "untrained", wide, tiny_tokenizer(300))
    try:
        checks = checked(workbench, "--cache", "cache", "--student", "untrained", "--lr", 1e-6, "--min-lr", 0)
    finally:
        shutil.rmtree(workbench.root / "untrained")
    wrong = {name for name, verdict in verdicts(checks).items() if verdict == "look"}
    assert wrong == {"initial loss", "overfitting"}


def test_text_is_packed_in_a_temporary_folder_and_only_as_much_as_needed(workbench, monkeypatch):
    asked = []
    assemble = trial.trial_run
    monkeypatch.setattr(trial, "trial_run", lambda config: (asked.append(config), assemble(config))[1])
    checks = checked(workbench, "--student", "student.toml", *workbench.text, *FAST)
    assert checks["overfitting"]["verdict"] == "ok"
    assert asked[0].data.num_sequences == 64


def test_the_time_of_an_online_teacher_is_reported(workbench, monkeypatch):
    monkeypatch.setattr(trial, "STEPS", 1)
    options = ("--teacher", "teacher", "--student", "student.toml", *workbench.text, "--document-mask")
    checks = checked(workbench, *options)
    assert checks["loader"]["verdict"] == "-" and "computed by the teacher" in checks["loader"]["found"]


def test_a_slow_reader_and_a_resume_that_loses_a_moment_get_the_verdict_look(workbench, monkeypatch):
    monkeypatch.setattr(trial, "STEPS", 1)
    monkeypatch.setattr(trial, "_reading_seconds", lambda trainer, step: 1e6)
    monkeypatch.setenv("COLUMNS", "250")
    load = TrainState.load

    def forgetful(state, tensors, numbers, **options):
        load(state, tensors, numbers, **options)
        next(iter(state.optimizer.state.values()))["exp_avg_sq"].zero_()

    monkeypatch.setattr(TrainState, "load", forgetful)
    code, out, err = workbench.call("distill", *CACHED, "--out", "checked", *workbench.plain, "--sanity")
    rows = [re.split("  +", line)[:3] for line in out.splitlines() if re.match("[a-z ]+  +(ok|look|-) ", line)]
    assert code == 0 and "check 5 of 5" in err
    table = {name: (verdict, found) for name, verdict, found in rows}
    assert list(table) == NAMES
    assert {name for name, (verdict, _) in table.items() if verdict == "look"} >= {"loader", "resume"}
    assert "tensors differ (student." in table["resume"][1]


def test_both_trials_at_once_are_refused(workbench):
    code, _, err = workbench.call("distill", *CACHED, "--out", "o", "--sanity", "--dry-run")
    assert code == 2 and "--dry-run and --sanity exclude each other" in err


# after 1 comes 2, 2, 3: the entropy of (2/3, 1/3) for three of nine tokens; after that everything is known
THIRDS = -(2 * math.log(2 / 3) + math.log(1 / 3)) / 9


@pytest.mark.parametrize(
    "rows, mask, segments, by_document, floor",
    [
        pytest.param([[1, 2, 3, 2, 3], [2, 2, 3, 3, 2]], None, None, False, 0.0, id="different from the first on"),
        pytest.param([[1, 2, 5, 6], [1, 2, 5, 6], [1, 3, 5, 6]], None, None, False, THIRDS, id="two continuations"),
        pytest.param([[1, 2, 5], [1, 3, 5]], [[0, 1], [0, 1]], None, False, 0.0, id="masked where they part"),
        pytest.param([[1, 2, 5], [1, 3, 5]], [[0, 0], [0, 0]], None, False, 0.0, id="all masked"),
        pytest.param([[9, 1, 2, 1, 3]], None, [[0, 1, 1, 2]], False, 0.0, id="two documents that see each other"),
        # both documents begin with 1, one continues with 2 and one with 3; the other two tokens are known
        pytest.param([[9, 1, 2, 1, 3]], None, [[0, 1, 1, 2]], True, 2 * math.log(2) / 4, id="two documents apart"),
    ],
)
def test_the_floor_is_the_entropy_of_what_follows_equal_beginnings(rows, mask, segments, by_document, floor):
    tokens = torch.tensor(rows)
    shape = (len(rows), tokens.shape[1] - 1)
    mask = torch.ones(shape, dtype=torch.bool) if mask is None else torch.tensor(mask, dtype=torch.bool)
    segments = torch.zeros(shape, dtype=torch.int64) if segments is None else torch.tensor(segments)
    cut = [Batch(*(each[part] for each in (tokens, mask, segments)), None) for part in (slice(0, 2), slice(2, None))]
    assert entropy_floor(cut, by_document) == pytest.approx(floor)
