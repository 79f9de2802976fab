"""Options that set torch or its compiler for a device: what torch is told, and what is refused."""

import os

import pytest
import torch

from kdtrain import cli
from kdtrain.commands import build_run, distill

RUN = ("--cache", "cache", "--student", "student.toml", "--out", "x", "--batch-size", "8", "--precision", "fp32")


@pytest.mark.parametrize("option, mode", [("max-autotune", "max-autotune-no-cudagraphs"), ("reduce-overhead",) * 2])
def test_max_autotune_compiles_without_cuda_graphs(workbench, monkeypatch, option, mode):
    told = []
    monkeypatch.setattr(torch, "compile", lambda model, **options: told.append(options["mode"]) or model)
    monkeypatch.setattr(build_run, "why_not_compile", lambda device: None)
    build_run.build_run(cli.parse("distill", [*RUN, "--compile-mode", option]), resuming=False)
    assert told == [mode]


@pytest.mark.parametrize("planned", [False, True], ids=["asked for", "planned"])
def test_cuda_graphs_are_refused_where_a_step_has_several_micro_batches(workbench, monkeypatch, planned):
    monkeypatch.setattr(build_run, "fitting_micro_batch", lambda config, device, free: 4)
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
    pick, build, found = build_run.pick_device, distill.build_run, []

    def look(name):
        found.append(os.environ.get("CUBLAS_WORKSPACE_CONFIG"))
        return pick(name)

    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG", raising=False)
    monkeypatch.setattr(build_run, "pick_device", look)
    monkeypatch.setattr(distill, "build_run", lambda *run: found.append(settings()) or build(*run))
    before = settings()
    options = ("distill", *RUN[:4], *workbench.plain, "--steps", 1, "--deterministic", "--out")
    assert workbench.call(*options, "repeatable")[0] == 0
    assert found[:2] == [":4096:8", (True, True, False)] and settings() == before == (False, False, True)
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":16:8")
    assert workbench.call(*options, "dry", "--dry-run")[0] == 0
    assert found[-2] == ":16:8"  # of the user
