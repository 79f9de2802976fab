"""Steps that go wrong in a real run: what is skipped, gone back behind or ended, what is said, and the exit code."""

import json
import math

import pytest
import torch
from safetensors.torch import load_file

from kdtrain.data import order

SIZE, SEQUENCES = 6, 40  # `Bench.small` and `Bench.fast`


def start(bench, out, *more, fault=None, steps=9):
    argv = ("distill", "--cache", "cache", "--student", "student.toml", "--out", out, "--steps", steps, *bench.fast)
    flat = ("--lr-schedule", "constant", "--eval-freq", 1000)
    return bench.run(*argv, *flat, *bench.eager, *more, fault=fault)


def state(bench, run):
    return json.loads((bench.newest(run) / "state.json").read_text())["progress"]


def events(bench, run, kind):
    lines = [json.loads(line) for line in (bench.root / run / "events.jsonl").read_text().splitlines()]
    return [line for line in lines if line["event"] == kind]


def assert_sound(bench, run, steps):
    """Each step was reported once, every number and every weight is finite."""
    lines = bench.metrics(run)
    assert [line["step"] for line in lines] == list(range(1, steps + 1))
    assert all(math.isfinite(value) for line in lines for value in line.values())
    assert all(torch.isfinite(tensor).all() for tensor in bench.tensors(run).values())
    assert (bench.root / run / "student/model.safetensors").exists()


def assert_same(bench, run, whole):
    """The newest checkpoints are equal bit by bit, and so are the lines of the steps but for what a clock decides."""
    assert bench.newest(run).name == bench.newest(whole).name
    ours, theirs = bench.tensors(run), bench.tensors(whole)
    assert [name for name in theirs if not torch.equal(ours[name], theirs[name])] == []
    assert state(bench, run) == state(bench, whole)
    clock = ("tok/s", "eta_h")
    lines = [
        [{k: v for k, v in line.items() if k not in clock} for line in bench.metrics(each)] for each in (run, whole)
    ]
    assert lines[0] == lines[1]


def test_a_gradient_that_is_nan_once_is_skipped_and_the_run_ends_well(bench, cached):
    done = start(bench, "nan-once", fault="train.gradient:nan:4").ok()
    assert "batch 4 at step 4" in done.stderr and "not taken" in done.stderr
    assert "every tensor they see is finite" in done.stderr
    assert_sound(bench, "nan-once", 9)
    progress = state(bench, "nan-once")
    assert (progress["step"], progress["skips"], progress["sequences"]) == (9, 1, 10 * SIZE)
    (event,) = events(bench, "nan-once", "skip")
    assert (event["batch"], event["in_a_row"]) == (4, 1)


def test_a_run_that_is_killed_after_a_skipped_step_comes_to_the_same_end(bench, cached):
    saved = ("--checkpoint-freq", 1, "--no-async-save")
    start(bench, "skipped", *saved, fault="train.gradient:nan:1", steps=3).ok()
    fault = "train.gradient:nan:1,train.after-step:kill:3"
    assert start(bench, "skipped-killed", *saved, fault=fault, steps=3).code == -9
    start(bench, "skipped-killed", *saved, steps=3).ok()
    assert_same(bench, "skipped-killed", "skipped")


def test_a_run_that_is_nan_at_every_step_ends_with_exit_1_and_goes_on_when_it_is_not(bench, cached):
    done = start(bench, "nan-always", "--max-skips", 2, "--checkpoint-freq", 2, fault="train.gradient:nan:4-1000")
    assert done.code == 1
    said = done.refusal()
    assert "3 steps in a row" in said and "--max-skips 2" in said and "step-00000002" in said
    assert not (bench.root / "nan-always" / "student").exists()
    start(bench, "nan-always", "--max-skips", 2, "--checkpoint-freq", 2).ok()
    assert_sound(bench, "nan-always", 9)


def teacher_row():
    """The first sequence of a step's data, for which `train.teacher` puts a NaN into the teacher's first row."""
    for step in range(2, 6):
        first = int(order.batch(0, step * SIZE, SIZE, SEQUENCES)[0])
        if first % SIZE != 0 and first >= 8:  # not where a micro-batch of the validation begins
            return step + 1, first
    raise AssertionError("no step begins with a sequence that validation does not")


@pytest.mark.parametrize("hooks, said", [("first", "run again in eager mode with hooks"), ("always", "hooks")])
def test_a_nan_in_one_row_of_the_teacher_is_named_and_kept(bench, cached, hooks, said):
    batch, sequence = teacher_row()
    run = f"row-{hooks}"
    done = start(bench, run, "--nan-hooks", hooks, "--compile", fault=f"train.teacher:nan:{sequence}").ok()
    named = "teacher: logprobs is the first tensor that is not finite (forward of micro-batch 1, 1 of"
    assert f"batch {batch} at step {batch}, {said}: {named}" in done.stderr
    assert ("not compiled: --nan-hooks always" in done.stderr) == (hooks == "always")
    assert_sound(bench, run, 9)
    folder = bench.root / run / f"not-finite-{batch:08d}"
    assert load_file(folder / "batch.safetensors")["sequences"][0] == sequence
    finding = json.loads((folder / "finding.json").read_text())["finding"]
    assert (finding["module"], finding["bad"], finding["place"]) == ("teacher", 1, [0, 0])
    assert events(bench, run, "not-finite")[0]["bundle"] == folder.name


def test_hooks_that_are_off_look_at_nothing(bench, cached):
    _, sequence = teacher_row()
    start(bench, "row-off", "--nan-hooks", "off", fault=f"train.teacher:nan:{sequence}").ok()
    assert not list((bench.root / "row-off").glob("not-finite-*"))
    assert state(bench, "row-off")["skips"] == 1


SPIKE = ("--checkpoint-freq", 4, "--no-early-stopping")
SPIKED = "train.loss:x30:26-28"


@pytest.fixture(scope="module")
def spiked(bench, cached):
    """A run with a loss spike, which nothing else happened to."""
    return start(bench, "spiked", *SPIKE, fault=SPIKED, steps=34).ok()


def test_a_spike_is_gone_back_behind_and_the_run_ends_well(bench, spiked):
    assert "a loss spike since step 26, confirmed at step 28" in spiked.stderr
    assert_sound(bench, "spiked", 34)
    progress = state(bench, "spiked")
    # back to step 24; batches 25 to 28 are left out
    assert (progress["rollbacks"], progress["lr_factor"], progress["sequences"]) == (1, 0.5, (34 + 4) * SIZE)
    assert max(line["loss"] for line in bench.metrics("spiked")) < 3 * bench.metrics("spiked")[0]["loss"]
    rates = {line["step"]: line["lr"] for line in bench.metrics("spiked")}
    assert rates[24] == 2 * rates[25]


@pytest.mark.parametrize(
    "fault, code, again",
    [("train.rollback:kill:1", -9, SPIKED), ("train.rollback:term:1", 0, None), ("train.after-step:kill:31", -9, None)],
    ids=["killed-within", "stopped-within", "killed-after"],
)
def test_a_run_that_dies_in_or_after_a_rollback_comes_to_the_same_end(bench, spiked, fault, code, again):
    run = f"spiked-{fault.replace(':', '-')}"
    assert start(bench, run, *SPIKE, fault=f"{SPIKED},{fault}", steps=34).code == code
    # killed within the rollback, it goes on before the spike and meets it once more
    start(bench, run, *SPIKE, fault=again, steps=34).ok()
    assert_same(bench, run, "spiked")


def test_spikes_without_end_end_the_run_with_exit_1(bench, cached):
    done = start(bench, "spikes", *SPIKE, "--max-rollbacks", 1, fault="train.loss:x30:26-1000", steps=60)
    assert done.code == 1
    assert "after 1 rollbacks (--max-rollbacks)" in done.refusal()
    assert not (bench.root / "spikes" / "student").exists()


@pytest.mark.parametrize(
    "fault",
    [
        "train.after-micro-batch:term:3",
        "train.after-step:term:4",
        "validate.batch:term:3",
        "checkpoint.before-rename:term:1",
        "checkpoint.after-rename:term:1",
        "train.gradient:nan:4,train.after-step:term:4",
    ],
    ids=["micro-batch", "step", "validation", "checkpoint", "published", "skipped-step"],
)
def test_sigterm_at_any_phase_ends_well_and_the_run_comes_to_the_same_end(bench, cached, fault):
    """Where a gradient is spoiled, it is so in the run that is compared with as well."""
    every = ("--checkpoint-freq", 3, "--eval-freq", 2, "--micro-batch-size", 3)
    *spoiled, term = fault.split(",")
    whole = "term-spoiled" if spoiled else "term-whole"
    if not (bench.root / whole).exists():
        start(bench, whole, *every, fault=",".join(spoiled) or None, steps=6).ok()
    run = f"term-{term.replace(':', '-')}-{len(spoiled)}"
    done = start(bench, run, *every, "--json", fault=fault, steps=6)
    assert done.json["stopped_by"] == "SIGTERM" and done.json["step"] < 6
    assert not (bench.root / run / "student").exists()
    # a batch that was skipped and not yet saved is met again
    start(bench, run, *every, fault=",".join(spoiled) or None, steps=6).ok()
    assert_same(bench, run, whole)


def test_a_loss_that_is_flat_stops_the_run_early_with_the_reason_and_a_student(bench, cached):
    flat = ("--lr", 1e-9, "--min-lr", 0, "--early-stopping-patience", 1, "--early-stopping-warmup", 0)
    done = start(bench, "flat", *flat, "--json", steps=300)
    assert done.json["step"] == 100 < 300
    assert "stopped early after step 100: 50-step average of the loss" in done.stderr
    assert (bench.root / "flat/student/model.safetensors").exists()
    assert bench.newest("flat").name == "step-00000100"
    assert "50-step average" in events(bench, "flat", "stop")[0]["reason"]
    assert start(bench, "flat", *flat, "--json", steps=300).json["step"] == 100
    assert start(bench, "flat", *flat, "--no-early-stopping", "--json", steps=102).json["step"] == 102


def test_gradients_that_stay_huge_stop_the_run_early(bench, cached):
    huge = ("--grad-spike-threshold", 1e-6, "--early-stopping-warmup", 2)
    done = start(bench, "huge", *huge, "--json")
    assert done.json["step"] == 5
    assert "gradient norm above 1e-06 at 3 steps in a row" in done.stderr
