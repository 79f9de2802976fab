"""Options that set torch or its compiler for a device: what torch is told, and what is refused."""

import pytest
import torch

from kdtrain import cli
from kdtrain.commands import build_run

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
