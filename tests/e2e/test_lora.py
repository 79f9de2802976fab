"""Adapters by the real command: only what is trained is saved, it ends with the same bits, and `peft` takes it."""

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from kdtrain.testing import tiny_model, tiny_tokenizer, write_model_folder

peft = pytest.importorskip("peft")
TOKENS = torch.arange(40, 64)[None]
RUN = (
    *("distill", "--cache", "cache", "--student", "base", "--lora-rank", 4, "--lora-dropout", 0.1, "--steps", 10),
    *("--batch-size", 6, "--warmup-steps", 2, "--checkpoint-freq", 3, "--eval-freq", 5, "--log-to", "none"),
)
FP32 = ("--no-compile", "--precision", "fp32")
FAST = (*FP32, "--lr", 1e-2)
ADAPTIVE = (
    *("--no-compile", "--lr", 1e-2, "--precision", "mxfp4", "--time-resume", "--quant-rule", "loss+gap"),
    *("--quant-loss-threshold", 0.42, "--quant-window-size", 3, "--quant-probe-every", 2, "--quant-min-dwell", 2),
)


def logits(model) -> torch.Tensor:
    with torch.no_grad():
        return model.eval()(TOKENS).logits


@pytest.fixture(scope="module")
def base(bench, cached):
    """Make `base`: a student with weights, of which it has much to learn."""
    write_model_folder(bench.root / "base", tiny_model("llama", 300, seed=4, num_hidden_layers=1), tiny_tokenizer(300))
    return bench


@pytest.fixture(scope="module")
def trained(base):
    """Train `lora`: the run, without an interruption."""
    return base.run(*RUN, *FAST, "--out", "lora", "--json").ok()


def test_a_checkpoint_holds_the_adapters_alone_and_the_rest_does_not_change(base, trained):
    names = {name for name in base.tensors("lora") if name.startswith("student.")}
    assert names and all(".lora_" in name for name in names)
    before, after = (load_file(base.root / each / "model.safetensors") for each in ("base", "lora/student"))
    changed = {name for name in before if not torch.equal(before[name], after[name])}
    assert changed and all(name.endswith("_proj.weight") for name in changed)
    assert trained.json["trained_parameters"] == sum(base.tensors("lora")[name].numel() for name in names)
    assert "LoRA of rank 4" in trained.json["trained"]
    assert f"{trained.json['trained']}" in base.run("inspect", "lora").stdout.replace("\n", " ")


@pytest.mark.parametrize("options", [FAST, ADAPTIVE], ids=["lora", "adaptive"])
def test_a_run_killed_at_several_moments_ends_with_the_same_bits(base, options):
    name = f"killed-{len(options)}"
    base.run(*RUN, *options, "--out", f"{name}-whole").ok()
    for fault in ("train.after-micro-batch:kill:5", "train.after-step:term:2"):
        base.run(*RUN, *options, "--out", name, fault=fault)
    base.run(*RUN, *options, "--out", name).ok()
    assert base.differing(f"{name}-whole", name) == []
    one, other = (base.root / each / "student/model.safetensors" for each in (f"{name}-whole", name))
    assert one.read_bytes() == other.read_bytes()


def test_the_merged_student_equals_what_peft_makes_of_base_and_adapter(base, trained):
    base.run("export", "lora", "--out", "merged").ok()
    base.run("export", "lora", "--adapter", "--out", "adapter").ok()
    loaded = peft.PeftModel.from_pretrained(
        AutoModelForCausalLM.from_pretrained(base.root / "base"), base.root / "adapter"
    )
    merged = AutoModelForCausalLM.from_pretrained(base.root / "merged")
    scale = logits(merged).abs().max()
    assert (logits(merged) - logits(loaded)).abs().max() < 1e-6 * scale
    assert (
        logits(merged) - logits(AutoModelForCausalLM.from_pretrained(base.root / "base"))
    ).abs().max() > 1e-3 * scale
    both = [base.run("evaluate", "--student", each, "--cache", "cache", "--json").json for each in ("lora", "merged")]
    assert both[0]["loss"] == pytest.approx(both[1]["loss"], rel=1e-6)
    assert json.loads((base.root / "adapter/adapter_config.json").read_text())["base_model_name_or_path"] == "base"
    head, page = (base.root / "adapter/README.md").read_text(), base.run("inspect", "adapter").ok().stdout
    assert head.startswith("# adapter\n") and "AutoPeftModelForCausalLM" in head
    assert "lora_rank = 4" in (base.root / "adapter/recipe.toml").read_text()
    assert "base_model_name_or_path" in page and "exported by kdtrain" in page


def test_an_adapter_is_a_beginning(base, trained):
    base.run("export", "lora", "--adapter", "--out", "begin").ok()
    on = [*(each for each in RUN if each not in ("--lora-rank", 4)), "--alpha", 0.1]
    begun = base.run(*on, *FAST, "--load", "begin", "--out", "begun", "--json").ok()
    loss = base.run("evaluate", "--student", "lora", "--cache", "cache", "--json").json["loss"]
    assert begun.json["first_validation_loss"] == pytest.approx(loss, rel=1e-5)
    assert begun.json["trained_parameters"] == trained.json["trained_parameters"]
    in_ranks = base.ok(2, *on, *FAST, "--load", "begin", "--parallel", "fsdp", "--out", "sharded", "--json")
    assert in_ranks.json["first_validation_loss"] == pytest.approx(loss, rel=1e-5)
    refused = base.run(*RUN, *FAST, "--load", "begin", "--lora-alpha", 4, "--out", "other")
    assert refused.code == 2 and "--load begin is LoRA of rank 4 (alpha 32 / rank)" in refused.refusal()


def test_other_adapters_and_another_base_are_refused(base, trained):
    other = base.run(*RUN, *FAST, "--lora-alpha", 16, "--out", "lora")
    assert other.code == 2 and "--lora-alpha (was None, now 16" in other.refusal()
    base.run("export", "lora", "--out", "before").ok()
    path = base.root / "base" / "model.safetensors"
    kept = path.read_bytes()
    tensors = load_file(path)
    tensors["model.norm.weight"][0] += 1e-3
    try:
        save_file(tensors, path, {"format": "pt"})
        changed = base.run(*RUN, *FAST, "--out", "lora")
        assert changed.code == 2 and "beside other weights than those of this student" in changed.refusal()
        refused = base.run("export", "lora", "--out", "after")
        assert refused.code == 2 and "are not those that it was trained with" in refused.refusal()
        path.write_bytes(kept)
        shutil.move(base.root / "base", base.root / "moved")
        gone = base.run("export", "lora", "--out", "after")
        assert gone.code == 2 and "kdtrain export --base" in gone.refusal()
        base.run("export", "lora", "--base", "moved", "--out", "after").ok()
        one, two = (base.root / each / "model.safetensors" for each in ("before", "after"))
        assert one.read_bytes() == two.read_bytes()
    finally:
        if (base.root / "moved").exists():
            shutil.move(base.root / "moved", base.root / "base")
        path.write_bytes(kept)


def test_a_table_in_the_spec_says_the_same_as_the_flags(base, trained):
    (base.root / "table.toml").write_text("name = 'base'\nsource = 'base'\n[lora]\nrank = 4\ndropout = 0.1\n")
    argv = [
        "table.toml" if each == "base" else each
        for each in RUN
        if each not in ("--lora-rank", "--lora-dropout", 4, 0.1)
    ]
    base.run(*argv, *FAST, "--out", "table").ok()
    assert base.differing("lora", "table") == []


def test_the_student_without_its_adapters_teaches_it(base):
    argv = ("distill", "--student", "base", *base.small, "--teacher", "self", "--alpha", 0.5, "--steps", 6, *FP32)
    argv += ("--lr", 1e-2, "--batch-size", 6, "--warmup-steps", 0, "--log-to", "none", "--log-freq", 1)
    base.run(*argv, "--lora-rank", 4, "--out", "self").ok()
    kl = [line["kd"] for line in base.metrics("self")]
    assert abs(kl[0]) < 1e-6 < 1e-5 < kl[-1]
    refused = base.run(*argv, "--out", "none")
    assert refused.code == 2 and "--teacher self is the student without its adapters" in refused.refusal()


@pytest.mark.parametrize(
    "world, more",
    [(2, ()), pytest.param(4, ("--parallel", "fsdp"), marks=pytest.mark.torture)],
    ids=["tp", "tp and fsdp"],
)
def test_adapters_of_tensor_ranks_are_taught_and_exported_as_those_of_one_process(base, world, more):
    argv = ("distill", "--student", "base", *base.small, "--teacher", "self", "--alpha", 0.5, "--steps", 4, *FP32)
    argv += ("--lr", 1e-2, "--batch-size", 6, "--warmup-steps", 0, "--log-to", "none", "--lora-rank", 4)
    alone, cut = f"alone-{world}", f"cut-{world}"
    base.ok(1, *argv, "--out", alone)
    base.ok(world, *argv, "--tensor-parallel", 2, *more, "--out", cut)
    found = {}
    for run in (alone, cut):
        base.run("export", run, "--adapter", "--out", f"{run}-adapter").ok()
        below = AutoModelForCausalLM.from_pretrained(base.root / "base")
        adapted = peft.PeftModel.from_pretrained(below, base.root / f"{run}-adapter")
        merged = AutoModelForCausalLM.from_pretrained(base.root / run / "student")
        found[run] = [logits(each) for each in (adapted, merged)]
    for one, other in zip(*found.values(), strict=True):
        assert (one - other).abs().max() < 1e-5 * one.abs().max()
    assert base.tensors(alone).keys() == base.tensors(cut).keys()


@pytest.mark.parametrize("how, what", [("ddp", ("--freeze-head",)), ("fsdp", ("--lora-dora",))])
def test_ranks_train_the_same_adapters_as_one_process(base, how, what):
    argv = [each for each in RUN if each not in ("--lora-dropout", 0.1)]  # each rank drops others
    argv = [each for each in argv if each not in ("--lora-rank", 4)] if "--freeze-head" in what else argv
    name = f"ranks-{how}-{len(argv)}"
    base.run(*argv, *FAST, *what, "--out", f"{name}-one").ok()
    base.ok(2, *argv, *FAST, *what, "--parallel", how, "--out", name)
    one, two = base.tensors(f"{name}-one"), base.tensors(name)
    assert one.keys() == two.keys()
    for key in one:
        if key.startswith("student."):
            torch.testing.assert_close(two[key], one[key], rtol=1e-3, atol=2e-4)


@pytest.mark.parametrize("how", [pytest.param("ddp", marks=pytest.mark.torture), "fsdp"])
def test_ranks_that_are_stopped_resume_to_the_same_bits(base, how):
    argv = (*RUN, *FAST, "--lora-rslora", "--parallel", how)
    base.ok(2, *argv, "--out", f"whole-{how}")
    base.launch(2, *argv, "--out", f"stopped-{how}", fault="train.after-step:term:5@1")
    base.ok(2, *argv, "--out", f"stopped-{how}")
    assert base.differing(f"whole-{how}", f"stopped-{how}") == []


def test_the_default_rate_and_a_frozen_head_are_spoken_of(base):
    planned = base.run(*RUN, *FP32, "--dry-run", "--out", "dry", "--json").json
    assert planned["student"]["trained_parameters"] < 0.2 * planned["student"]["parameters"]
    assert planned["learning rate"].startswith("0.01 (auto: adapters, ")
    refused = base.run(*RUN, *FAST, "--freeze-head", "--out", "dry")
    assert refused.code == 2 and "--freeze-head has no effect with adapters" in refused.refusal()
    alone = base.run(*[each for each in RUN if each not in ("--lora-rank", 4)], *FAST, "--out", "dry")
    assert alone.code == 2 and "--lora-dropout has no effect without --lora-rank" in alone.refusal()
