"""A student that also follows its teacher's hidden states, by the command: trained, refused, resumed, exported."""

import json

import pytest
import torch
from safetensors.torch import load_file

ONLINE = ("--teacher", "teacher", "--data", "corpus", "--seq-len", 32, "--num-workers", 0, "--num-sequences", 40)
STEPS = 6


def start(bench, out, *more, fault=None):
    argv = ("distill", *ONLINE, "--student", "narrow.toml", "--out", out, "--steps", STEPS, "--checkpoint-freq", 2)
    hidden = ("--hidden-loss", "mse", "--hidden-weight", 2, "--micro-batch-size", 3, "--alpha", 0.9)
    return bench.run(*argv, *bench.eager, *bench.fast, *hidden, "--eval-freq", 3, *more, fault=fault)


@pytest.fixture(scope="module")
def whole(bench):
    """Train `hidden`: a student half as wide as its teacher, with dropout, uninterrupted."""
    bench.student("narrow", "gpt2", n_embd=16, n_layer=1, resid_pdrop=0.1)
    start(bench, "hidden").ok()
    return bench


def test_a_student_approaches_its_teachers_layers_and_the_loss_is_the_documented_sum(whole):
    lines = whole.metrics("hidden")
    assert lines[-1]["hidden"] < 0.9 * lines[0]["hidden"]
    for line in lines:
        objective = 0.1 * line["ce"] + 0.9 * line["T"] ** 2 * line["kd"] + 2 * line["hidden"]
        assert line["loss"] == pytest.approx(objective, rel=1e-6)
    said = (whole.root / "hidden/train.log").read_text()
    assert "hidden-state loss mse of the student's layers to the teacher's: 1 to 2 (16 -> 32)" in said


def test_the_projections_are_in_the_checkpoint_with_their_moments_and_not_in_the_student(whole):
    tensors = whole.tensors("hidden")
    names = {name for name in tensors if "projection" in name}
    optimizer = {f"optimizer.hidden.projections.0.{each}" for each in ("exp_avg", "exp_avg_sq", "step")}
    assert names == {"hidden.projections.0"} | optimizer
    assert tensors["hidden.projections.0"].shape == (32, 16)
    assert tensors["hidden.projections.0"].dtype == torch.float32
    config = json.loads((whole.root / "hidden/student/config.json").read_text())
    assert (config["n_embd"], config["n_layer"]) == (16, 1)
    exported = load_file(whole.root / "hidden/student/model.safetensors")
    assert exported and not [name for name in exported if "projection" in name]


def test_a_killed_run_resumes_bitwise_also_when_it_recomputes_its_activations(whole):
    assert start(whole, "hidden-killed", fault="train.after-micro-batch:kill:8").code == -9
    start(whole, "hidden-killed", "--activation-checkpointing").ok()
    assert whole.differing("hidden-killed", "hidden") == []


def test_a_student_that_is_its_teacher_has_no_distance_and_stays_so(bench):
    argv = ("distill", *ONLINE, "--student", "teacher", "--out", "hidden-same", "--steps", 2, "--hidden-loss", "cosine")
    done = bench.run(*argv, *bench.eager, "--lr", 1e-12, "--min-lr", 0, "--weight-decay", 0)
    assert "the student never got better" in done.refusal()  # which it could not, at this rate
    assert all(abs(line["hidden"]) < 1e-6 for line in bench.metrics("hidden-same"))


@pytest.mark.parametrize(
    "where, options, words",
    [
        (("--cache", "cache"), (), ["--hidden-loss mse", "2 layers of width 32", "a cache holds distributions alone"]),
        (ONLINE, ("--hidden-layers", "3:1"), ["3:1", "student has 0 to 2", "teacher 0 to 2"]),
    ],
    ids=["cache", "no-such-layer"],
)
def test_what_cannot_be_is_refused_in_one_line(bench, cached, where, options, words):
    done = bench.run("distill", *where, "--student", "gpt2.toml", "--out", "new", "--hidden-loss", "mse", *options)
    assert done.code == 2
    assert all(word in done.refusal() for word in words), done.stderr
