"""Failed steps in a real run: skips, rollbacks, ends, log lines, and exit codes.

That a run broken off at any point ends with the same bits, in a rollback too, is in test_resume_is_exact.py.
"""

import json
import math

import pytest
import torch
from safetensors.torch import load_file

from kdtrain.data import order
from kdtrain.training.state import read_saved

SIZE, SEQUENCES = 6, 40  # `Bench.small` and `Bench.fast`


def start(forks, out, *more, fault=None, steps=9):
    argv = ("distill", "--cache", "cache", "--student", "student.toml", "--out", out, "--steps", steps, *forks.fast)
    flat = ("--lr-schedule", "constant", "--eval-freq", 1000)
    return forks.run(*argv, *flat, *forks.eager, *more, fault=fault)


def events(forks, run, kind):
    lines = [json.loads(line) for line in (forks.root / run / "events.jsonl").read_text().splitlines()]
    return [line for line in lines if line["event"] == kind]


def assert_sound(forks, run, steps):
    """Assert that each step was reported once, and every number and every weight is finite."""
    lines = forks.metrics(run)
    assert [line["step"] for line in lines] == list(range(1, steps + 1))
    assert all(math.isfinite(value) for line in lines for value in line.values())
    assert all(torch.isfinite(tensor).all() for tensor in forks.tensors(run).values())
    assert (forks.root / run / "student/model.safetensors").exists()


def assert_last_words(forks, run, done, reason):
    """Assert that why a run failed is its last event, and the last line of its log and of its command."""
    said = result(forks, run)["error"]
    last = json.loads((forks.root / run / "events.jsonl").read_text().splitlines()[-1])
    assert (last["event"], last["level"], last["reason"], last["message"]) == ("failure", "error", reason, said)
    assert (forks.root / run / "train.log").read_text().splitlines()[-1].endswith(f" {' '.join(said.split())}")
    assert done.stderr.splitlines()[-1].endswith(said) and done.stderr.count(said) == 1


def test_a_gradient_that_is_nan_once_is_skipped_and_the_run_ends_well(forks):
    done = start(forks, "nan-once", fault="train.gradient:nan:4").ok()
    assert "batch 4 at step 4" in done.stderr and "skipped" in done.stderr
    assert "every tensor they check is finite" in done.stderr
    assert_sound(forks, "nan-once", 9)
    progress = forks.state("nan-once")["progress"]
    assert (progress["step"], progress["skips"], progress["sequences"]) == (9, 1, 10 * SIZE)
    (event,) = events(forks, "nan-once", "skip")
    assert (event["batch"], event["in_a_row"]) == (4, 1)


def test_a_run_that_is_killed_after_a_skipped_step_comes_to_the_same_end(forks):
    saved = ("--checkpoint-freq", 1, "--no-async-save")
    start(forks, "skipped", *saved, fault="train.gradient:nan:1", steps=3).ok()
    fault = "train.gradient:nan:1,train.after-step:kill:3"
    assert start(forks, "skipped-killed", *saved, fault=fault, steps=3).code == -9
    start(forks, "skipped-killed", *saved, steps=3).ok()
    forks.assert_same("skipped-killed", "skipped")


def test_a_run_that_is_nan_at_every_step_ends_with_exit_1_and_resumes_without_the_fault(forks):
    done = start(forks, "nan-always", "--max-skips", 2, "--checkpoint-freq", 2, fault="train.gradient:nan:4-1000")
    assert done.code == 1
    said = done.refusal()
    assert "3 steps in a row, and as many after a rollback" in said and "--max-skips 2" in said
    assert "the newest checkpoint is rollback_1_iter2" in said
    assert_last_words(forks, "nan-always", done, "non-finite")
    assert not (forks.root / "nan-always" / "student").exists()
    start(forks, "nan-always", "--max-skips", 2, "--checkpoint-freq", 2).ok()
    assert_sound(forks, "nan-always", 9)


def teacher_row():
    """Find a step, and the first sequence of its data, by which `train.teacher` puts a NaN into the first row."""
    for step in range(2, 6):
        first = int(order.batch(0, step * SIZE, SIZE, SEQUENCES)[0])
        if first % SIZE != 0 and first >= 8:  # not where a micro-batch of the validation begins
            return step + 1, first
    raise AssertionError("no step begins with a sequence that validation does not")


@pytest.mark.parametrize(
    "hooks, said", [("first", "run again in eager mode with hooks"), ("always", "hooks"), ("off", None)]
)
def test_a_nan_in_one_row_of_the_teacher_is_named_and_kept(forks, hooks, said):
    batch, sequence = teacher_row()
    run = f"row-{hooks}"
    compiled = ("--compile",) if hooks == "always" else ()  # where that is asked for, nothing is compiled
    done = start(forks, run, "--nan-hooks", hooks, *compiled, fault=f"train.teacher:nan:{sequence}").ok()
    assert_sound(forks, run, 9)
    assert forks.state(run)["progress"]["skips"] == 1
    if said is None:
        assert not list((forks.root / run).glob("non-finite-*"))
        return
    named = "teacher: logprobs is the first non-finite tensor (forward of micro-batch 1, 1 of"
    assert f"batch {batch} at step {batch}, {said}: {named}" in done.stderr
    assert ("not compiled: --nan-hooks always" in done.stderr) == (hooks == "always")
    folder = forks.root / run / f"non-finite-{batch:08d}"
    assert load_file(folder / "batch.safetensors")["sequences"][0] == sequence
    finding = json.loads((folder / "finding.json").read_text())["finding"]
    assert (finding["module"], finding["bad"], finding["place"]) == ("teacher", 1, [0, 0])
    assert events(forks, run, "non-finite")[0]["bundle"] == folder.name


@pytest.mark.parametrize(
    "fault",
    [
        "checkpoint.before-rename:term:1",
        "checkpoint.after-rename:term:1",
        "train.gradient:nan:4,train.after-step:term:4",
    ],
    ids=["checkpoint", "published", "skipped-step"],
)
def test_sigterm_while_saving_or_skipping_ends_well_and_the_run_comes_to_the_same_end(forks, fault):
    """Where a gradient is spoiled, it is so in the run that is compared with as well."""
    every = ("--checkpoint-freq", 3, "--eval-freq", 2, "--micro-batch-size", 3)
    *spoiled, term = fault.split(",")
    whole = "term-spoiled" if spoiled else "term-whole"
    if not (forks.root / whole).exists():
        start(forks, whole, *every, fault=",".join(spoiled) or None, steps=6).ok()
    run = f"term-{term.replace(':', '-')}-{len(spoiled)}"
    done = start(forks, run, *every, "--json", fault=fault, steps=6)
    assert done.json["stopped_by"] == "SIGTERM" and done.json["step"] < 6
    assert not (forks.root / run / "student").exists()
    # a batch that was skipped and not yet saved is met again
    start(forks, run, *every, fault=",".join(spoiled) or None, steps=6).ok()
    forks.assert_same(run, whole)


def test_a_loss_that_is_flat_stops_the_run_early_with_the_reason_and_a_student(forks):
    flat = ("--lr", 1e-9, "--min-lr", 0, "--early-stopping-patience", 1, "--stopping-warmup", 0)
    flat += ("--early-stopping-interval", 10, "--eval-freq", 10)
    done = start(forks, "flat", *flat, "--early-stopping", "--json", steps=60)
    assert (done.json["step"], done.json["stop_reason"]) == (20, "early-stop")
    assert "stopped early after step 20: validation loss" in done.stderr
    assert (forks.root / "flat/student/model.safetensors").exists()
    assert forks.newest("flat").name == "step-00000020"
    assert "validation loss" in events(forks, "flat", "stop")[0]["reason"]
    assert start(forks, "flat", *flat, "--early-stopping", "--json", steps=60).json["step"] == 20
    done = start(forks, "flat", *flat, "--no-early-stopping", "--json", steps=22)
    assert (done.json["step"], done.json["stop_reason"]) == (22, "done")


def test_gradients_that_stay_huge_end_the_run_with_exit_1(forks):
    huge = ("--explosion-threshold", 1e-6, "--stopping-warmup", 2)
    done = start(forks, "huge", *huge)
    assert done.code == 1
    assert "gradient norm above 1e-06 (--explosion-threshold) at 3 steps in a row" in done.refusal()
    assert result(forks, "huge")["stop_reason"] == "gradient-explosion"
    assert not (forks.root / "huge" / "student").exists()
    exploded = forks.root / "huge/checkpoints/exploded-00000005"
    assert str(exploded.relative_to(forks.root)) in done.refusal()
    assert read_saved(exploded)["progress"]["step"] == 5
    shown = forks.run("inspect", "huge", "--json").json
    assert (shown["latest"], shown["best"], shown["checkpoints"][exploded.name]["verdict"]) == (
        *("step-00000004", "step-00000004"),
        "ok",
    )
    again = start(forks, "huge", *huge, "--keep-rolling", 1, "--keep-special", 1)
    assert "resuming from huge/checkpoints/step-00000004" in again.stderr and exploded.is_dir()
    (exploded / "state.json").write_text("{}")
    assert "exploded-00000005: state.json" in forks.run("verify", "huge").stdout


@pytest.mark.parametrize(
    "fault, reason",
    [
        ("checkpoint.before-rename:enospc:2-99", "disk"),
        ("train.after-step:oom:3", "oom"),
        ("train.after-step:raise:3", "error"),
    ],
    ids=["disk", "memory", "bug"],
)
def test_why_a_run_failed_is_its_last_event_and_the_last_line_of_its_log(forks, fault, reason):
    run = f"why-{reason}"
    done = start(forks, run, "--disk-patience", 0, fault=fault)
    assert done.code == 1
    assert_last_words(forks, run, done, reason)


def result(bench, run):
    return json.loads((bench.root / run / "result.json").read_text())


def test_a_rate_far_too_high_ends_with_exit_1_as_diverged_and_exports_nothing(forks):
    high = ("--lr", 10, "--warmup-steps", 0, "--explosion-threshold", 1e30)
    done = start(forks, "high", *high, "--checkpoint-freq", 100, "--json", steps=80)
    assert done.code == 1, done.stderr
    ended = result(forks, "high")
    assert ended == json.loads(done.stdout)
    assert (ended["stop_reason"], ended["rollbacks"], ended["best_step"]) == ("diverged", 3, 0)
    assert ended["error"] in done.refusal()
    shown = forks.run("inspect", "high", "--json").json
    assert shown["ended"]["stop_reason"] == "diverged"
    exported = forks.run("export", "high", "--out", "exported").ok()
    assert "ended with an error (diverged): this is its student of step 0" in exported.stderr
    assert not (forks.root / "high" / "student").exists()


def test_a_run_that_makes_its_student_worse_ends_with_exit_1_and_exports_nothing(forks):
    start(forks, "good", "--lr", 1e-2, steps=60).ok()
    worse = ("--load", "good", "--override-opt-param-scheduler", "--max-loss-ratio", 100)
    worse += ("--lr", 0.3, "--spike-patience", 0, "--json")
    for _ in range(2):  # the same command again trains no step, and the run is no better
        done = start(forks, "worse", *worse, steps=4)
        assert done.code == 1
        ended = result(forks, "worse")
        assert ended["last_validation_loss"] > ended["first_validation_loss"] and ended["step"] == 4
        assert (ended["stop_reason"], ended["best_step"], ended["better_than_start"]) == ("no-progress", 0, False)
        assert "the student never got better" in done.refusal() and "worse --checkpoint latest" in done.refusal()
        assert not (forks.root / "worse/student").exists()
    forks.run("export", "worse", "--out", "worse-last", "--checkpoint", "latest").ok()
    first = load_file(forks.root / "good/student/model.safetensors")
    exported = load_file(forks.root / "worse-last/model.safetensors")
    assert not all(torch.equal(each, exported[name]) for name, each in first.items())


def test_a_distilled_student_is_compared_with_plain_cross_entropy_beside_it(forks):
    start(forks, "pairs/plain", "--alpha", 0, steps=8).ok()
    better = start(forks, "pairs/same", "--lr", 1e-9, "--min-lr", 0, "--json", steps=8)
    assert (better.json["cross_entropy_run"], better.json["better_than_cross_entropy"]) == ("pairs/plain", False)
    assert "is not below" in better.stderr
    assert result(forks, "pairs/plain")["better_than_cross_entropy"] is None
    shorter = start(forks, "pairs/shorter", "--json", steps=4)
    assert shorter.json["better_than_cross_entropy"] is None


def test_a_finished_run_that_starts_again_keeps_its_time_and_tokens(forks):
    start(forks, "twice", steps=4).ok()
    first = result(forks, "twice")
    start(forks, "twice", steps=4).ok()
    assert result(forks, "twice") == first and first["seconds"] > 0
    start(forks, "twice", steps=5).ok()
    assert result(forks, "twice")["step"] == 5


def test_a_decay_that_a_plateau_began_is_put_aside_where_early_stopping_is_switched_off(forks):
    flat = ("--lr", 1e-9, "--min-lr", 0, "--early-stopping-patience", 1, "--stopping-warmup", 0)
    flat += ("--early-stopping-interval", 2, "--eval-freq", 2, "--lr-schedule", "wsd", "--decay-steps", 3)
    begun = start(forks, "plateau", *flat, "--early-stopping", "--json", steps=20).json
    assert (begun["decay_from"], begun["step"], begun["steps"]) == (4, 7, 7)
    done = start(forks, "plateau", *flat, "--no-early-stopping", "--json", steps=20)
    assert (done.json["decay_from"], done.json["step"]) == (None, 20)
    assert "cancels the decay that a plateau began at step 4" in done.stderr


def test_load_takes_a_run_at_its_best_checkpoint_and_a_refused_rate_names_it(forks):
    start(forks, "loadable", steps=6).ok()
    refused = start(forks, "loadable", "--lr", 2e-2, steps=12)
    assert refused.code == 2
    assert "--load loadable --override-opt-param-scheduler to start from its weights" in refused.refusal()
    done = start(forks, "loading", "--load", "loadable", "--override-opt-param-scheduler", "--lr", 2e-2, steps=6).ok()
    best = (forks.root / "loadable/checkpoints/best").resolve().name
    assert f"loadable/checkpoints/{best}; the data starts at" in done.stderr
    assert "with --load" not in start(forks, "loadable", "--seed", 9, steps=12).refusal()


def test_a_run_that_is_extended_logs_what_changes(forks):
    rate = ("--lr-schedule", "cosine", "--warmup-steps", 10, "--eval-freq", 250)
    first = start(forks, "longer", *rate, steps=8).ok()
    assert "warm-up of 4 steps, half of the run, not 10" in first.stderr
    start(forks, "longer", *rate, steps=16).ok()
    log = (forks.root / "longer/train.log").read_text()
    assert "the run now has 16 steps, not 8" in log and "warm-up is 8 steps, and" in log
    lines = {line["step"]: line["lr"] for line in forks.metrics("longer")}
    assert f"the rate goes from {lines[8]:.2e} at step 8 to {lines[9]:.2e} at the next" in log
    validated = [line["step"] for line in forks.lines("longer") if "validation/loss" in line]
    assert validated == [0, 2, 4, 6, 8, 12, 16] and "validates every 4 steps" in log
    start(forks, "longer", *rate, steps=16).ok()
    assert (forks.root / "longer/train.log").read_text().count("the run now has") == 1
