"""Adaptive quantisation by the real command: its lines, its folders, and a resume in the middle of a fallback."""

import json
import re
from pathlib import Path

import h5py
import pytest
import torch
from safetensors.torch import load_file

_HOW = ("--steps", 14, "--lr", 1e-5, "--lr-schedule", "constant", "--warmup-steps", 0, "--batch-size", 6, "--alpha", 0)
_RULE = ("--time-resume", "--quant-rule", "loss", "--quant-loss-threshold", 9, "--quant-window-size", 4)
_DWELL = ("--quant-min-dwell", 5)
_QUIET = ("--no-compile", "--log-to", "none", "--spike-patience", 0, "--eval-freq", 14)
_RISING = "train.loss:x2.5:5-8"


def distill(forks, out: str, *more: object, **options):
    return forks.run(
        *("distill", "--cache", "cache", "--student", "student.toml", "--out", out, *_HOW, *_QUIET, *more), **options
    )


def lines(run: Path) -> list[str]:
    """Return the lines of a run's log that adaptive quantisation wrote, without their times."""
    found = [re.sub(r"^\S+ \S+ ", "", line) for line in (run / "train.log").read_text().splitlines()]
    return [line for line in found if line.startswith(("[TimeResume]", "[AdaptiveQuantization]"))]


def test_an_injected_curve_gives_the_lines_and_the_folders_that_are_promised(forks):
    done = distill(
        forks, "adaptive", "--precision", "mxfp4", *_RULE, *_DWELL, "--no-async-save", "--json", fault=_RISING
    )
    loss = {line["step"]: f"{line['loss']:.4f}" for line in forks.metrics("adaptive")}
    assert lines(forks.root / "adaptive") == [
        "[TimeResume] Adaptive quantization training enabled",
        "[AdaptiveQuantization] Checkpoint saved: window_end_1_iter4",
        f"[AdaptiveQuantization] Loss {loss[7]} exceeds threshold 9.0000, switching to bf16",
        "[AdaptiveQuantization] Checkpoint saved: switch_to_bf16_iter7",
        "[AdaptiveQuantization] Checkpoint saved: window_end_2_iter8",
        f"[AdaptiveQuantization] Loss {loss[12]} is stable, switching back to mxfp4",
        "[AdaptiveQuantization] Checkpoint saved: window_end_3_iter12",
        "[AdaptiveQuantization] Checkpoint saved: switch_to_mxfp4_iter12",
    ]
    folders = {path.name for path in (forks.root / "adaptive" / "checkpoints").iterdir() if not path.is_symlink()}
    assert {name for name in folders if not name.startswith("epoch-")} == {
        "switch_to_bf16_iter7", "window_end_2_iter8", "switch_to_mxfp4_iter12", "window_end_3_iter12", "step-00000014",
        "step-00000000",
    }  # fmt: skip
    assert (done.json["switches"], done.json["steps_quantized"]) == (2, 9)
    modes = [line["mode"] for line in events(forks.root / "adaptive") if line["event"] == "switch"]
    assert modes == ["bf16", "mxfp4"]


def test_a_run_killed_in_its_fallback_ends_as_an_uninterrupted_one(forks):
    options = ("--precision", "fp8", *_RULE, *_DWELL, "--quant-snapshot", "disk")
    options += ("--checkpoint-freq", 3, "--no-async-save")
    distill(forks, "whole", *options, fault=_RISING).ok()
    killed = distill(forks, "killed", *options, KDTRAIN_FAULT=f"{_RISING},train.after-step:kill:10")
    assert killed.code < 0
    distill(forks, "killed", *options, KDTRAIN_FAULT=_RISING).ok()
    assert forks.differing("whole", "killed") == []
    assert forks.state("whole")["watchers"] == forks.state("killed")["watchers"]


@pytest.mark.parametrize("more, forward", [((), "fp16"), (("--quant-fallback-scope", "forward"), "bf16")])
def test_the_fallback_follows_its_option(forks, more, forward):
    name = f"fallback-{forward}"
    options = (*_RULE, *_DWELL, "--quant-fallback-strategy", forward, *more)
    distill(forks, name, "--precision", "mxfp8", *options, fault=_RISING).ok()
    assert [line["mode"] for line in events(forks.root / name) if line["event"] == "switch"] == [forward, "mxfp8"]
    assert f"switching to {forward}" in "".join(lines(forks.root / name))
    assert (forks.root / name / "checkpoints" / f"switch_to_{forward}_iter7").is_dir()


@pytest.mark.parametrize("mode", ["fp16", "mxfp8"])  # fp8's resume is the test of a run killed in its fallback
def test_each_mode_trains_and_resumes_bit_by_bit(forks, mode):
    options = ("--precision", mode, "--steps", 6, "--lr", 1e-3)
    distill(forks, f"{mode}-whole", *options).ok()
    distill(forks, f"{mode}-first", *options, "--checkpoint-freq", 2, KDTRAIN_FAULT="train.after-step:kill:4")
    distill(forks, f"{mode}-first", *options, "--checkpoint-freq", 2).ok()
    assert forks.differing(f"{mode}-whole", f"{mode}-first") == []
    exported = load_file(forks.root / f"{mode}-whole" / "student" / "model.safetensors")
    assert all(torch.isfinite(each).all() for each in exported.values())


def test_collected_tensors_are_in_the_run_and_a_resume_neither_loses_nor_doubles_a_row(forks):
    options = ("--precision", "mxfp4", "--steps", 8, "--collect-tensors", "*.mlp.down_proj", "--collect-every", 2)
    distill(forks, "not-collected", *options[:4]).ok()
    distill(forks, "seen", *options, "--checkpoint-freq", 3, KDTRAIN_FAULT="train.after-step:kill:6")
    distill(forks, "seen", *options, "--checkpoint-freq", 3).ok()
    with h5py.File(forks.root / "seen" / "tensors.h5") as file:
        group = file["model.layers.0.mlp.down_proj"]["gradient"]
        assert group["step"][:].tolist() == [2, 4, 6, 8] and set(group["mode"].asstr()[:]) == {"mxfp4"}
        assert (group["error"][:] > 0.05).all()
    assert forks.differing("not-collected", "seen") == []


def test_what_cannot_be_is_refused_in_one_line(forks):
    for options, named in (
        (("--time-resume", "--precision", "bf16"), "--time-resume has nothing to fall back from"),
        (("--quant-window-size", 9), "--quant-window-size has no effect without --time-resume"),
        (("--fp8-recipe", "rowwise", "--precision", "mxfp8"), "--fp8-recipe has no effect on mxfp8"),
        (("--time-resume", "--quant-rule", "gap+schedule"), "--quant-rule schedule needs a decay phase"),
        (("--time-resume", "--quant-rule", "often"), "--quant-rule 'often' is unknown"),
        (
            ("--precision", "fp8", "--fp8-backend", "torchao", "--fp8-recipe", "blockwise"),
            "has no --fp8-recipe blockwise",
        ),
        (("--collect-tensors", "nothing.*"), "matches no linear layer"),
    ):
        refused = distill(forks, "refused", *options)
        assert refused.code == 2 and named in refused.refusal(), refused.stderr


def events(run: Path) -> list[dict]:
    return [json.loads(line) for line in (run / "events.jsonl").read_text().splitlines()]
