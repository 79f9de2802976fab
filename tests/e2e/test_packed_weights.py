"""Frozen weights in fewer bits by the real command: adapters beside them, and teachers whose loss is measured."""

import json

import pytest
import torch

from kdtrain.cache.format.manifest import read_manifest
from kdtrain.testing import tiny_model, tiny_tokenizer, write_model_folder

pytest.importorskip("peft")
pytest.importorskip("torchao")
FAST = ("--batch-size", 6, "--log-to", "none", "--no-compile", "--precision", "fp32", "--lr", 1e-2)
RUN = (
    *("distill", "--cache", "cache", "--student", "base", "--lora-rank", 4, "--steps", 8, "--warmup-steps", 2),
    *("--checkpoint-freq", 3, "--eval-freq", 4, *FAST),
)
INT8 = ("--base-weights", "int8")
TEACHER = ("cache-teacher", "--teacher", "teacher", "--top-k", 4)


@pytest.fixture(scope="module")
def base(bench, cached):
    """Make `base`: a student with weights, of which it has much to learn."""
    write_model_folder(bench.root / "base", tiny_model("llama", 300, seed=4, num_hidden_layers=1), tiny_tokenizer(300))
    return bench


@pytest.fixture(scope="module")
def packed(base):
    """Train `int8`: the run, without an interruption."""
    return base.run(*RUN, *INT8, "--out", "int8", "--json").ok()


def test_adapters_beside_int8_weights_are_saved_alone_and_both_losses_are_shown(base, packed):
    names = {name for name in base.tensors("int8") if name.startswith("student.")}
    assert names and all(".lora_" in name for name in names)
    found = packed.json
    assert found["base_weights"] == "int8" and found["best_validation_loss"] < found["first_validation_loss"]
    merged = base.run("evaluate", "--student", "int8/student", "--cache", "cache", "--json").json["loss"]
    assert found["merged_validation_loss"] == pytest.approx(merged, rel=1e-5)
    assert 0 < abs(found["merged_validation_loss"] - found["best_validation_loss"]) < 0.05
    assert base.run("evaluate", "--student", "int8", "--cache", "cache", "--json").json["loss"] == pytest.approx(merged)
    page = " ".join(base.run("inspect", "int8").stdout.split())
    assert "beside int8 weights" in page and " merged " in page
    exported = base.run("export", "int8", "--out", "out", "--json")
    assert exported.json["validation_loss"] == found["best_validation_loss"]
    assert exported.json["merged_validation_loss"] == found["merged_validation_loss"]
    line = f"beside the int8 weights {found['best_validation_loss']:.4f}; merged into the whole ones, another model: "
    assert line + f"{merged:.4f}" in exported.stderr
    other = base.run("export", "int8", "--checkpoint", "step-00000003", "--out", "third")
    assert "measure that with kdtrain evaluate --student third --cache" in other.stderr
    whole = base.run(*RUN, "--out", "whole", "--json").ok()
    assert whole.json["student"] and "merged_validation_loss" not in whole.json
    parameters = [
        json.loads((base.root / each / "environment.json").read_text())["student"] for each in ("int8", "whole")
    ]
    assert parameters[0]["parameters"] == parameters[1]["parameters"]
    assert parameters[0]["trained_parameters"] == parameters[1]["trained_parameters"]


def test_a_run_beside_int8_weights_that_is_killed_ends_with_the_same_bits(base, packed):
    for fault in ("train.after-micro-batch:kill:4", "train.after-step:term:1"):
        base.run(*RUN, *INT8, "--out", "killed", fault=fault)
    other = base.run(*RUN, "--base-weights", "bf16", "--out", "killed")
    assert other.code == 2 and "--base-weights (was int8, now bf16" in other.refusal()
    base.run(*RUN, *INT8, "--out", "killed").ok()
    assert base.differing("int8", "killed") == []


def test_ranks_train_beside_int8_weights_as_one_process_does(base, packed):
    base.ok(2, *RUN, *INT8, "--parallel", "ddp", "--out", "ranks")
    one, two = base.tensors("int8"), base.tensors("ranks")
    assert one.keys() == two.keys()
    for key in one:
        if key.startswith("student."):
            torch.testing.assert_close(two[key], one[key], rtol=1e-3, atol=2e-4)


def test_a_line_of_the_spec_says_the_same_as_the_flag(base, packed):
    (base.root / "narrow.toml").write_text("name = 'base'\nsource = 'base'\nweights = 'int8'\n[lora]\nrank = 4\n")
    rank = RUN.index("--lora-rank")
    argv = ["narrow.toml" if each == "base" else each for each in (*RUN[:rank], *RUN[rank + 2 :])]
    base.run(*argv, "--out", "spec").ok()
    assert base.differing("int8", "spec") == []


@pytest.mark.parametrize(
    "options, message",
    [
        (("--lora-rank", 4, "--base-weights", "nf4"), "--base-weights nf4 needs a CUDA device, and this runs on cpu"),
        (INT8, "--base-weights int8 is for weights that are not trained, and all are; add --lora-rank"),
        (("--lora-rank", 4, *INT8, "--lora-dora"), "--base-weights int8 cannot be used with --lora-dora"),
        (("--lora-rank", 4, *INT8, "--parallel", "fsdp"), "--base-weights int8 cannot be sharded over ranks"),
        (
            ("--lora-rank", 4, *INT8, "--precision", "mxfp8"),
            "--base-weights int8 cannot be used with --precision mxfp8",
        ),
        (("--teacher-weights", "int8"), "--teacher-weights has no effect without --teacher"),
    ],
)
def test_what_packed_weights_cannot_be_combined_with_is_refused_in_one_line(base, options, message):
    argv = ("distill", "--cache", "cache", "--student", "base", "--lr", 1e-2, "--no-compile", "--out", "refused")
    refused = base.run(*argv, *options)
    assert refused.code == 2 and message in refused.refusal()
    assert not (base.root / "refused").exists()


def test_what_packed_weights_cost_a_teacher_is_measured_and_stands_in_its_cache(base):
    found = base.run(*TEACHER, "--out", "narrow", "--teacher-weights", "int8", *base.small, "--json").ok()
    manifest = read_manifest(base.root / "narrow")
    cost = manifest.weights_cost
    assert cost == found.json["weights_cost"] == base.run("inspect", "narrow", "--json").json["weights_cost"]
    assert cost["cost"] == cost["loss"] - cost["whole_loss"] and 0 < abs(cost["cost"]) < 0.1
    assert (cost["sequences"], cost["tokens"]) == (8, 8 * 32)
    assert manifest.settings.teacher["weights"] == "int8"
    whole = base.run(*TEACHER, "--out", "full", *base.small).ok() and read_manifest(base.root / "full")
    assert whole.settings.teacher["weights_digest"] == manifest.settings.teacher["weights_digest"]
    assert whole.weights_cost is None and "weights_cost" not in whole.to_json()
    argv = ("evaluate", "--student", "teacher", "--data", "corpus", "--seq-len", 32, "--num-sequences", 8, "--json")
    assert base.run(*argv).json["loss"] == pytest.approx(cost["whole_loss"], rel=1e-4)
    line = f"int8 weights cost the teacher {cost['cost']:+.4f} nats per token"
    assert line in found.stderr and line in " ".join(base.run("inspect", "narrow").stdout.split())
    assert line in (base.root / "narrow" / "README.md").read_text()
    base.ok(2, *TEACHER, "--out", "ranks-narrow", "--teacher-weights", "int8", *base.small)
    assert read_manifest(base.root / "ranks-narrow").digest == manifest.digest


def test_an_online_teacher_with_packed_weights_says_what_they_cost(base):
    argv = ("distill", "--student", "base", "--teacher", "teacher", *base.data, "--num-sequences", 20, "--steps", 2)
    argv += ("--validation-sequences", 4, "--warmup-steps", 0, *FAST)
    found = base.run(*argv, "--teacher-weights", "bf16", "--out", "online", "--json").ok()
    cost = found.json["teacher_weights"]
    assert cost["weights"] == "bf16" and cost["sequences"] == 4 and abs(cost["cost"]) < 0.05
    assert "bf16 weights cost the teacher" in found.stderr
    assert found.json["teacher_validation_loss"] == pytest.approx(cost["loss"], rel=1e-4)
    refused = base.run(*argv, "--teacher-weights", "int8", "--teacher-parallel", "fsdp", "--out", "none")
    assert refused.code == 2 and "--teacher-weights int8 cannot be sharded" in refused.refusal()
    own = ["self" if each == "teacher" else each for each in argv]
    refused = base.run(*own, "--lora-rank", 4, "--teacher-weights", "int8", "--out", "none")
    assert refused.code == 2 and "take it out of a kind = 'self'" in refused.refusal()


@pytest.mark.parametrize("how", ["ddp", "fsdp"])
def test_a_student_in_ranks_is_its_own_teacher_as_in_one_process(base, how):
    argv = ("distill", "--student", "base", *base.data, "--num-sequences", 20, "--validation-sequences", 4, *FAST)
    argv += ("--teacher", "self", "--alpha", 0.5, "--lora-rank", 4, "--steps", 4, "--warmup-steps", 0, "--log-freq", 1)
    if not (base.root / "self-one").exists():
        base.run(*argv, "--out", "self-one").ok()
    base.ok(2, *argv, "--parallel", how, "--out", f"self-{how}")
    one, two = (base.metrics(each) for each in ("self-one", f"self-{how}"))
    assert abs(two[0]["kd"]) < 1e-6 < 1e-5 < two[-1]["kd"]
    assert [line["kd"] for line in two] == pytest.approx([line["kd"] for line in one], rel=1e-3, abs=1e-6)
    tensors, expected = base.tensors(f"self-{how}"), base.tensors("self-one")
    for key in expected:
        if key.startswith("student."):
            torch.testing.assert_close(tensors[key], expected[key], rtol=1e-3, atol=2e-4)


def test_a_student_beside_packed_weights_is_its_own_teacher(base):
    argv = ("distill", "--student", "base", *base.data, "--num-sequences", 20, "--validation-sequences", 4, *FAST)
    argv += ("--teacher", "self", "--alpha", 0.5, "--lora-rank", 4, "--steps", 3, "--warmup-steps", 0, "--log-freq", 1)
    base.run(*argv, *INT8, "--out", "self-int8").ok()
    kd = [line["kd"] for line in base.metrics("self-int8")]
    assert abs(kd[0]) < 1e-6 < 1e-5 < kd[-1]
