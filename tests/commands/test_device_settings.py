"""Options that set torch or its compiler for a device: what torch is told, and what is refused."""

import json
import os
from contextlib import ExitStack
from pathlib import Path

import pytest
import torch

from kdtrain import cli
from kdtrain.commands import distill
from kdtrain.precision import modes
from kdtrain.run import build, recipe, trial
from kdtrain.run.build_cache import TextData
from kdtrain.training.sources.plan import CachedData

RUN = ("--cache", "cache", "--student", "student.toml", "--out", "x", "--batch-size", "8", "--precision", "fp32")


def built(*options):
    """Build the run of these options, without starting it."""
    config = cli.parse("distill", [*RUN, *options])
    return build.build(recipe.resolve(config, torch.device("cpu"), ExitStack(), config.out))


@pytest.mark.parametrize("option, mode", [("max-autotune", "max-autotune-no-cudagraphs"), ("reduce-overhead",) * 2])
def test_max_autotune_compiles_without_cuda_graphs(workbench, monkeypatch, option, mode):
    told = []
    monkeypatch.setattr(torch, "compile", lambda model, **options: told.append(options["mode"]) or model)
    monkeypatch.setattr(recipe, "why_not_compile", lambda device: None)
    built("--compile-mode", option)
    assert told == [mode]


def test_a_run_times_the_kernels_of_attention_in_its_own_shape_and_logs_the_choice(workbench, monkeypatch, caplog):
    asked = []
    caplog.set_level("INFO")
    monkeypatch.setattr(build, "choose_kernel", lambda config, *shape: asked.append(shape) or "attention by cuDNN")
    run = built("--precision", "bf16")
    assert asked == [(8, run.recipe.facts.seq_len, torch.bfloat16, torch.device("cpu"))]
    assert "attention by cuDNN" in caplog.messages


@pytest.mark.parametrize("planned", [False, True], ids=["asked for", "planned"])
def test_cuda_graphs_are_refused_where_a_step_has_several_micro_batches(workbench, monkeypatch, planned):
    monkeypatch.setattr(recipe, "fitting_micro_batch", lambda config, share, job, free: 4)
    size = "auto" if planned else 4
    before = workbench.everything()
    code, _, err = workbench.call("distill", *RUN, "--compile-mode", "reduce-overhead", "--micro-batch-size", size)
    *_, line = err.splitlines()
    assert code == 2 and line.startswith("kdtrain: --compile-mode reduce-overhead replays CUDA graphs")
    assert "the 2 micro-batches of a step" in line and line.endswith("or --micro-batch-size 8")
    assert workbench.everything() == before


def settings():
    return (
        torch.are_deterministic_algorithms_enabled(),
        torch._inductor.config.deterministic,
        torch.utils.deterministic.fill_uninitialized_memory,
    )


def test_deterministic_sets_cublas_before_a_device_is_looked_for_and_torch_for_the_run_alone(workbench, monkeypatch):
    pick, resolve, found = recipe.pick_device, distill.resolve, []

    def look(name):
        found.append(os.environ.get("CUBLAS_WORKSPACE_CONFIG"))
        return pick(name)

    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG", raising=False)
    monkeypatch.setattr(recipe, "pick_device", look)
    monkeypatch.setattr(distill, "resolve", lambda *run, **how: found.append(settings()) or resolve(*run, **how))
    before = settings()
    options = ("distill", *RUN[:4], *workbench.plain, "--steps", 1, "--deterministic", "--out")
    assert workbench.call(*options, "repeatable")[0] == 0
    assert found[:2] == [":4096:8", (True, True, False)] and settings() == before == (False, False, True)
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":16:8")
    assert workbench.call(*options, "dry", "--dry-run")[0] == 0
    assert found[-1] == ":16:8"  # of the user


def test_tf32_is_set_for_the_run_alone_and_recorded(workbench, monkeypatch):
    monkeypatch.setattr(recipe, "why_not_tf32", lambda device: None)
    make, found = distill.build, []
    monkeypatch.setattr(distill, "build", lambda run: found.append(torch.get_float32_matmul_precision()) or make(run))
    before = torch.get_float32_matmul_precision()
    for more, out in (("--tf32", "rounded"), ("--no-tf32", "exact")):
        options = ("distill", *RUN[:4], *workbench.plain, "--steps", 1, more, "--out", out)
        assert workbench.call(*options)[0] == 0
        recorded = json.loads((workbench.root / out / "environment.json").read_text())["tf32"]
        assert recorded is (out == "rounded") and torch.get_float32_matmul_precision() == before
    assert found == ["high", "highest"]


def test_tf32_is_refused_by_one_line_where_it_cannot_work(workbench, monkeypatch):
    for more in ((), ("--dry-run",)):
        options = ("distill", *RUN[:4], *workbench.plain, "--device", "cpu", "--out", "no-tf32", "--tf32", *more)
        code, _, err = workbench.call(*options)
        said = "kdtrain: --tf32 cannot be used on cpu: only a GPU multiplies in TF32; leave it out"
        assert (code, err.splitlines()) == (2, [said])
    assert not (workbench.root / "no-tf32").exists()
    gpu = torch.device("cuda")
    for capability, why in (((7, 5), "compute capability 7.5, and TF32 needs 8.0 (Ampere)"), ((8, 0), None)):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device, of=capability: of)
        assert modes.why_not_tf32(gpu) == why


def resolved(*options):
    """Resolve the recipe of a run in bf16."""
    config = cli.parse("distill", [*RUN, "--precision", "bf16", *options])
    return recipe.resolve(config, torch.device("cpu"), ExitStack(), config.out)


def test_a_new_run_takes_the_faster_attention_and_a_resumed_one_that_of_its_checkpoint(workbench, monkeypatch):
    planned, plan = [], recipe.job_of
    monkeypatch.setattr(recipe, "why_not_compile", lambda device: None)
    monkeypatch.setattr(recipe, "job_of", lambda *known: planned.append(known[3].attention) or plan(*known))

    def attention(*options):
        found = resolved(*options).student.attention
        assert planned[-1] == found  # memory is planned with it
        return found

    assert (attention(), attention("--no-compile")) == ("eager", "sdpa")
    text = ("--data", "text.txt", "--student", "student.toml", "--precision", "bf16", "--out", "z", "--batch-size", "8")
    for more, expected in ((), "eager"), (("--document-mask",), "sdpa"), (("--seq-len", "257"), "sdpa"):
        config = cli.parse("distill", [*text, "--seq-len", "32", "--num-workers", "0", *more])
        sources = CachedData(config, ["cache"]).sources
        monkeypatch.setattr(TextData, "prepare", lambda *_: (sources, sources["validation"]))  # noqa: B023
        assert recipe.resolve(config, torch.device("cpu"), ExitStack(), config.out).student.attention == expected
    begun = ("distill", *RUN, "--precision", "bf16", "--steps", "2")
    assert workbench.call(*begun, "--no-compile", "--log-to", "none")[0] == 0
    assert attention() == "sdpa" and attention("--resume", "never", "--overwrite") == "eager"
    (step,) = Path("x/checkpoints").glob("step-*2")
    assert attention("--out", "y", "--resume", str(step)) == "sdpa" and attention("--out", "y") == "eager"
    monkeypatch.setattr(trial, "build", lambda known: pytest.exit(known.student.attention))
    with pytest.raises(pytest.exit.Exception, match="sdpa"), trial.trial_run(cli.parse("distill", [*begun[1:]])):
        pass
    for damaged in Path("x/checkpoints").glob("*-*/state.json"):
        damaged.write_text(damaged.read_text().replace('"sdpa"', '"unknown"'))
    assert attention() == "eager"


def test_weights_are_loaded_from_a_run_with_another_attention(workbench):
    pinned = 'name = "student"\nattention = "eager"\n' + (workbench.root / "student.toml").read_text()
    (workbench.root / "eager.toml").write_text(pinned)
    options = ("distill", "--cache", "cache", *workbench.plain, "--steps", 2)
    assert workbench.call(*options, "--student", "student.toml", "--out", "plain")[0] == 0
    code, _, err = workbench.call(*options, "--student", "eager.toml", "--out", "plain", "--steps", 3)
    assert code == 2 and "--student (was student.toml, now eager.toml)" in err
    load = ("--load", "plain", "--override-opt-param-scheduler")
    assert workbench.call(*options, "--student", "eager.toml", "--out", "other", *load)[0] == 0


def test_a_cache_names_the_attention_of_its_teacher(workbench):
    assert json.loads(Path("cache/manifest.json").read_text())["teacher"]["attention"] == "sdpa"
