"""Errors of `kdtrain distill` before training: a locked folder, a full disk, a damaged cache."""

import errno
import json
import math
import os
import re
import shutil
from collections import Counter
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file, save_file

from kdtrain import faults, files
from kdtrain.errors import RunError, UsageError
from kdtrain.monitor.facts import LOCK
from kdtrain.run import build, run
from kdtrain.run.run import Run
from kdtrain.testing import tiny_model, tiny_tokenizer, write_model_folder


@pytest.fixture
def command(workbench):
    """Return the command of a run of one step, without its folder and data."""
    return ("distill", "--student", "student.toml", "--steps", 1, "--warmup-steps", 0, *workbench.plain)


def line(ended):
    """Return the exit code, and the one line on stderr that is not of the log."""
    code, _, stderr = ended
    *before, last = stderr.splitlines()
    assert last.startswith("kdtrain: ") and [each for each in before if not re.match(r"\d\d:\d\d ", each)] == []
    return code, last.removeprefix("kdtrain: ")


def test_a_folder_is_locked_until_all_is_written_and_then_released_and_a_refused_run_leaves_none(
    workbench, command, monkeypatch
):
    held = []
    for name in ("export", "write_result"):
        write = getattr(Run, name)
        watched = lambda run, *rest, write=write: (held.append((run.out / LOCK).exists()), write(run, *rest))[1]  # noqa: E731
        monkeypatch.setattr(Run, name, watched)
    assert workbench.call(*command, "--cache", "cache", "--out", "locked")[0] == 0
    assert held == [True, True] and not (workbench.root / "locked" / LOCK).exists()
    assert line(workbench.call(*command, "--cache", "nowhere", "--out", "a/b"))[0] == 2
    assert not (workbench.root / "a").exists()


def test_latest_begins_a_run_where_there_is_none_and_a_missing_checkpoint_or_a_foreign_folder_is_refused(
    workbench, command
):
    argv, latest = (*command, "--cache", "cache", "--out", "unattended"), ("--resume", "latest")
    for wanted, words in (
        ("best", "no checkpoint 'best'"),
        ("step-00000001", "has no such checkpoint"),
        (f"../{workbench.root.name}x", "has no such checkpoint; there are latest, best"),
    ):
        code, said = line(workbench.call(*argv, "--resume", wanted))
        assert code == 2 and words in said
        assert not (workbench.root / "unattended").exists()
    code, _, stderr = workbench.call(*argv, *latest)
    assert code == 0 and stderr.count("unattended holds no run yet: a new one begins\n") == 1
    shutil.rmtree(workbench.root / "unattended/checkpoints")  # as after a kill before the first
    assert workbench.json(*argv, *latest, "--dry-run")["begins"] == "from the beginning"
    code, _, stderr = workbench.call(*argv, *latest)
    assert code == 0 and "NO VALID CHECKPOINT" in stderr and "holds no run" not in stderr
    assert "resuming from" in workbench.call(*argv, *latest)[2]
    (workbench.root / "thesis").mkdir()
    (workbench.root / "thesis/a.tex").touch()
    code, said = line(workbench.call(*command, "--cache", "cache", "--out", "thesis", *latest))
    assert code == 2 and "holds something that is not a run (a.tex)" in said


@pytest.mark.parametrize("name", ["config.toml", "environment.json"])
def test_a_full_disk_at_the_metadata_is_one_line_and_the_same_command_resumes(workbench, command, monkeypatch, name):
    def full(path):
        if path.name.startswith(f".{name}"):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    out = workbench.root / f"full-{name}"
    argv = (*command, "--cache", "cache", "--out", out.name)
    with monkeypatch.context() as patched:
        patched.setattr(files, "fsync", full)
        code, said = line(workbench.call(*argv))
    assert code == 1
    assert said.startswith(f"cannot write full-{name}/{name}: No space left on device; ")
    assert said.endswith("free some space and run it again")
    assert not list(out.rglob("*.tmp")) and not (out / LOCK).exists()
    out.mkdir(exist_ok=True)
    files.temporary_name(out / name).write_text("")  # as a kill leaves it
    assert workbench.call(*argv)[0] == 0


def test_a_full_disk_at_the_tokens_is_one_line_and_the_same_command_resumes(workbench, command, monkeypatch):
    argv = (*command, "--out", "full-data", *workbench.text, "--num-sequences", 8)
    with monkeypatch.context() as patched:
        patched.setattr(faults, "_faults", {"cache.settings.before-fsync": ("enospc", "1")})
        patched.setattr(faults, "_calls", Counter())
        code, said = line(workbench.call(*argv))
    assert (code, "full-data/data/settings.json: No space left on device" in said) == (1, True)
    data = workbench.root / "full-data" / "data"
    for path in (data / ".building-0", files.temporary_name(data / "settings.json")):  # as a kill leaves them
        path.write_text("")
    assert workbench.call(*argv)[0] == 0


def test_a_truncated_shard_is_reported_at_once_by_every_command_that_opens_the_cache(workbench, command):
    shard = workbench.root / "cache" / "shards" / "train-00000.h5"
    whole = shard.read_bytes()
    os.truncate(shard, 5000)
    teacher = ("cache-teacher", "--teacher", "teacher", "--out", "cache", "--num-sequences", 40, "--top-k", 12)
    commands = [
        (*command, "--cache", "cache", "--out", "of-damaged"),
        ("evaluate", "--student", "teacher", "--cache", "cache"),
        ("inspect", "cache"),
        (*teacher, *workbench.text, "--precision", "fp32"),
    ]
    try:
        ended = [line(workbench.call(*each)) for each in commands]
    finally:
        shard.write_bytes(whole)
    says = f"cache/shards/train-00000.h5: has 5000 bytes instead of {len(whole)}: run kdtrain verify cache --repair, "
    assert ended == [(2, says + "then the same cache-teacher command again")] * 4
    assert not (workbench.root / "of-damaged").exists()


@pytest.mark.parametrize(
    "out, begins, ends",
    [
        ("/proc/nope/r", "/proc/nope/r cannot be made: ", "; name another folder"),
        ("text.txt/r", "text.txt/r cannot be made: ", "; name another folder"),
        ("x" * 300, f"--out '{'x' * 60}...' is longer than a path can be: ", "255 bytes a name, 4,095 in all"),
    ],
    ids=["no-folder", "below-a-file", "too-long"],
)
def test_an_impossible_folder_is_refused_before_any_work(workbench, command, out, begins, ends):
    (workbench.root / "empty").mkdir(exist_ok=True)
    run = (*command, "--cache", "cache", "--out", out)
    commands = [
        run,
        (*run, "--dry-run"),
        ("cache-teacher", "--teacher", "no-such/teacher", "--out", out, "--data", "text.txt"),
        ("export", "empty", "--out", out),
    ]
    for each in commands:
        code, said = line(workbench.call(*each))
        assert (code, said.startswith(begins), said.endswith(ends)) == (2, 1, 1), said


def test_memorized_samples_are_logged_once_with_epochs_and_samples(workbench):
    build = ("cache-teacher", "--teacher", "teacher", "--out", "sampled", "--num-sequences", 8)
    build += ("--top-k", 0, "--num-samples", 2)
    assert workbench.call(*build, *workbench.text, "--precision", "fp32")[0] == 0
    run = ("distill", "--cache", "sampled", "--student", "student.toml", "--out", "by-heart", *workbench.plain)
    code, _, stderr = workbench.call(*run, "--steps", 80, "--lr", 1e-2, "--alpha", 1, "--no-early-stopping")
    assert code == 0
    events = [json.loads(line) for line in Path("by-heart/events.jsonl").read_text().splitlines()]
    (event,) = [each for each in events if each["event"] == "learned-samples"]
    # 8 sequences are one step of an epoch
    assert (event["epochs"], event["samples"]) == (event["step"], 2) and event["divergence"] <= 0
    (said,) = [line for line in stderr.splitlines() if "memorized" in line]
    assert f"after {event['epochs']:.1f} epochs" in said and "the 2 samples per token" in said


def test_loaded_weights_are_not_mistaken_for_fresh_ones(workbench):
    argv = ("distill", "--student", "student.toml", "--cache", "cache", "--warmup-steps", 0, *workbench.plain)
    assert workbench.call(*argv, "--out", "knows", "--steps", 25, "--lr", 2e-2, "--no-early-stopping")[0] == 0
    load = ("--load", "knows/checkpoints/step-00000025", "--override-opt-param-scheduler")
    code, _, said = workbench.call(*argv, *load, "--out", "loaded", "--steps", 2)
    first = float(said.partition("val @0 ")[2].split()[0])
    assert first < 0.9 * math.log(300), "or there is nothing to be said"
    assert code == 0 and "too low for fresh weights" not in said


def test_a_student_with_a_non_finite_loss_fails(workbench):
    shutil.copytree(workbench.root / "teacher", workbench.root / "broken")
    weights = load_file(workbench.root / "broken" / "model.safetensors")
    weights["model.norm.weight"].fill_(torch.nan)
    save_file(weights, workbench.root / "broken" / "model.safetensors", {"format": "pt"})
    code, said = line(workbench.call("evaluate", "--student", "broken", "--cache", "cache"))
    assert (code, said) == (1, "--student broken has a loss of nan; look at its weights")


def test_a_run_that_cannot_export_at_its_end_failed_while_running_and_says_why(workbench, command, monkeypatch):
    def taken(run):
        raise UsageError("another process is exporting to runs/student")

    monkeypatch.setattr(Run, "export", taken)
    code, said = line(workbench.call(*command, "--cache", "cache", "--out", "no-export"))
    result = json.loads((workbench.root / "no-export/result.json").read_text())
    last = json.loads((workbench.root / "no-export/events.jsonl").read_text().splitlines()[-1])
    assert (code, said) == (1, "another process is exporting to runs/student")
    assert (last["event"], last["message"], result["error"]) == ("failure", said, said)
    monkeypatch.undo()
    monkeypatch.chdir(workbench.root)
    assert workbench.call(*command, "--cache", "cache", "--out", "no-export")[0] == 0


def test_a_lost_rank_is_named_in_the_logs_as_on_stderr_even_if_the_log_is_full(tmp_path, monkeypatch):
    told = []
    writers = SimpleNamespace(event=lambda kind, step, level, **more: told.append((kind, level, more["message"])))
    trainer = SimpleNamespace(writers=writers, state=SimpleNamespace(progress=SimpleNamespace(step=3)))
    lost = Run(SimpleNamespace(config=SimpleNamespace(out=tmp_path, json=False)), trainer, {})

    def full(text):
        raise OSError(errno.ENOSPC, "No space left on device", "train.log")

    monkeypatch.setattr(run, "end_log", full)
    monkeypatch.setattr(Run, "result", lambda run, reason, error: {"error": error})
    monkeypatch.setattr(Run, "write_result", lambda run, result: told.append(result["error"]))
    with pytest.raises(RunError, match="rank 0 lost another rank") as ended, lost.recording_failure():
        raise RuntimeError("[pair.cc:553] Connection closed by peer [127.0.0.1]:1")
    assert told == [("failure", "error", str(ended.value)), str(ended.value)]


@pytest.mark.parametrize("length", [("--steps", 1), ("--epochs", 0.2)])
def test_a_run_of_a_version_that_recorded_no_steps_logs_its_new_length_all_the_same(workbench, command, length):
    out = f"earlier{length[0]}"
    argv = (*command[:3], *command[5:], "--cache", "cache", "--out", out)
    assert workbench.call(*argv, *length)[0] == 0
    path = workbench.root / out / "environment.json"
    environment = json.loads(path.read_text())
    steps = environment.pop("steps")
    path.write_text(json.dumps(environment))
    code, _, err = workbench.call(*argv, "--steps", steps + 2)
    assert code == 0 and f"the run now has {steps + 2} steps, not {steps}," in err


def test_an_online_teacher_whose_spec_names_another_format_is_another_teacher(workbench):
    spec = workbench.root / "held.toml"
    argv = ("distill", "--teacher", "held.toml", "--student", "student.toml", *workbench.text, "--out", "held")
    argv += ("--num-sequences", 16, "--eval-batches", 1, *workbench.plain)
    spec.write_text("source = 'teacher'\nweights = 'bf16'\n")
    workbench.json(*argv, "--steps", 1)
    workbench.json(*argv, "--steps", 2)
    spec.write_text("source = 'teacher'\n")
    code, _, err = workbench.call(*argv, "--steps", 3)
    assert code == 2 and "was trained with another teacher" in err.splitlines()[-1]


@pytest.mark.parametrize(
    "own, words", [(True, "has another tokenizer"), (False, "has a vocabulary of 280, the cache one")]
)
def test_a_pretrained_student_of_a_smaller_vocabulary_is_sent_across_tokenizers_before_it_is_built(
    workbench, monkeypatch, own, words
):
    name = f"smaller-{own}"
    write_model_folder(workbench.root / name, tiny_model("llama", 280), tiny_tokenizer(280) if own else None)
    monkeypatch.setattr(build, "load_student", lambda *_, **__: pytest.fail("the student is built"))
    argv = ("distill", "--cache", "cache", "--student", name, "--out", "refused", *workbench.plain)
    code, _, err = workbench.call(*argv)
    assert code == 2 and words in err and "--cross-tokenizer" in err and "set the student's vocab_size" not in err
