"""The layers of a teacher are compiled on a GPU; here a CPU passes for one, and the back end generates no code."""

import functools
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import pytest
import torch

from kdtrain import cli
from kdtrain.cache.read.reader import LocalCache
from kdtrain.precision.modes import compiles_teacher
from kdtrain.run import build
from kdtrain.run.recipe import resolve
from kdtrain.teaching import local


@pytest.fixture
def graphs(monkeypatch):
    """Collect the options of each graph that is compiled."""
    found = []

    def backend(graph, inputs, options=None):
        found.append(options)
        return graph.forward

    torch.compiler.reset()
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend=backend))
    monkeypatch.setattr(local, "compiles_teacher", lambda wanted, device, cut: wanted)
    return found


def test_a_teacher_is_compiled_on_a_gpu_unless_it_is_not_wanted():
    cpu, gpu = torch.device("cpu"), torch.device("cuda")
    assert compiles_teacher(True, gpu) and not compiles_teacher(True, cpu) and not compiles_teacher(False, gpu)


def test_a_compiled_teacher_builds_the_same_cache_which_says_so_and_resumes_compiled_only(workbench, graphs):
    build = ("cache-teacher", "--teacher", "teacher", "--out", "compiled", "--num-sequences", 40, "--top-k", 12)
    build += (*workbench.text, "--precision", "fp32")
    workbench.json(*build)
    # one graph for both layers, for each size of a batch: 16 and 8 sequences, and those that measure the fidelity
    assert 2 <= len(graphs) <= 3 and graphs[0] == {"deterministic": True}
    caches = [LocalCache(name) for name in ("cache", "compiled")]
    plain, compiled = (each.manifest.settings.teacher for each in caches)
    assert compiled == {**plain, "compiled": True}
    for split in ("train", "validation"):
        for row, other in zip(*(each[split] for each in caches), strict=True):
            assert all(torch.equal(row[name], other[name]) for name in row)
    code, _, err = workbench.call(*build, "--no-compile")
    assert code == 2 and "teacher.compiled: True there, None here" in err
    graphs.clear()
    workbench.json(*build[:4], "plain", *build[5:], "--no-compile")
    assert not graphs


def test_an_online_teacher_is_compiled_with_its_student_and_answers_the_same(workbench, graphs):
    run = ("distill", "--teacher", "teacher", "--student", "student.toml", *workbench.text, "--precision", "fp32")
    hidden = {}
    for option in ("--compile", "--no-compile"):
        graphs.clear()
        words = [str(word) for word in (*run[1:], option, "--out", f"run{option}", "--batch-size", 8)]
        recipe = resolve(cli.parse("distill", words), torch.device("cpu"), ExitStack(), Path("none"))
        source = build.build(recipe).trainer.stepper.source
        hidden[option] = source.read(np.arange(8)).targets.hidden
        assert len(graphs) == (option == "--compile"), option
    assert torch.equal(*hidden.values())
