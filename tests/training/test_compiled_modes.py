"""Compiled, each quantised mode trains, switches without a recompilation, and resumes in either mode, bit by bit."""

import contextlib
import functools
from types import SimpleNamespace

import pytest
import torch
from torch._dynamo.backends.debugging import aot_eager

from kdtrain.checkpoint.store import load
from kdtrain.objective.engine import matmul
from kdtrain.precision.backends import Torchao
from kdtrain.precision.controller import Adaptive, Policy, SwitchTo
from kdtrain.precision.emulated import FormatRecipe
from kdtrain.precision.linear import Emulated, convert

pytestmark = pytest.mark.slow

FP8 = FormatRecipe("tensorwise", gradient="e5m2")
BACKENDS = {"fp8 by torchao": Torchao(FP8), "mxfp4": Emulated(FormatRecipe("mx", "e2m1", "e2m1"))}
"""One of each kind; what the emulated formats differ in is compared without a compiler."""
STEPS, STOPPED_IN_FALLBACK, STOPPED_QUANTISED = 15, 3, 5
MODEL = {"num_hidden_layers": 1, "intermediate_size": 48}
CALM = {"lr": 1e-3, "lr_schedule": "constant", "spike_patience": 0, "checkpoint_freq": 1, "keep_rolling": 50}


class EachSecond(Adaptive):
    """A controller that switches after each second step, whatever the loss is, and reports after each one where to."""

    def observe(self, step: int, loss: float, gap: float | None = None, broken: str | None = None) -> list:
        self._memory.switches += step % 2 == 0
        self._memory.is_quantized = step // 2 % 2 == 0
        return [SwitchTo(self.mode)]


def compiled(run, backend) -> None:
    """Make a run of the workshop compiled, in bf16, and adaptive."""
    step, model = run.student, run.student.model.model
    takes = SimpleNamespace(
        product=backend.product, refuses=lambda inputs, *_: None if inputs == 48 else "not this one"
    )
    converted = convert(model, step.switch, takes, head=model.get_output_embeddings())
    assert converted.quantized == ["model.layers.0.mlp.down_proj"]  # each further one takes seconds to compile
    step.quantized, step.mode, step.compile_objective = "fp8", "bf16", True
    step.backbone = torch.compile(step._backbone, dynamic=False, fullgraph=True)
    run.state.adaptive = EachSecond(Policy(quantized=step.quantized), step.switch, "high")


def go(workshop, name: str, backend, steps: int = STEPS, begin_at: int | None = None) -> dict[str, torch.Tensor]:
    """Train; after the first step nothing may be compiled, and no switch may touch weights or moments."""
    with workshop.run(name, steps=steps, model=MODEL, **CALM) as run, contextlib.ExitStack() as stance:
        compiled(run, backend)
        if begin_at is not None:
            found = load(workshop.folder / "whole" / "checkpoints" / f"step-{begin_at:08d}")
            run.state.load(found.tensors, found.state)
        switch_to = run.state.adaptive.switch_to

        def watched(mode: str) -> None:
            if run.state.progress.step == (begin_at or 0) + 1:
                stance.enter_context(torch.compiler.set_stance("fail_on_recompile"))
            before = {key: each.clone() for key, each in run.state.tensors().items()}
            switch_to(mode)
            after = run.state.tensors()
            assert before.keys() == after.keys() and all(torch.equal(before[key], after[key]) for key in before)

        run.state.adaptive.switch_to = watched
        run.fit()
        assert run.state.adaptive.switches >= (6 if steps == STEPS else 0)
        return load(run.store.path(f"step-{steps:08d}")).tensors


def traced(graph, inputs, **_):
    """Run a graph of the compiler without generating code."""
    return aot_eager(graph, inputs)


@pytest.mark.parametrize("name", BACKENDS)
def test_a_compiled_run_switches_seven_times_and_resumes_in_either_mode_bit_by_bit(workshop, monkeypatch, name):
    torch.compiler.reset()
    # the objective's own code is compared in tests/objective; only which of its graphs there are matters here
    objective = functools.cache(functools.partial(torch.compile, backend=traced, dynamic=False))
    monkeypatch.setattr(matmul, "_compiled", objective)
    if name == "fp8 by torchao":  # a GPU generates other code for it than a CPU: the graph is run as it is traced
        monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend=traced))
    whole = go(workshop, "whole", BACKENDS[name])
    for number in (STOPPED_IN_FALLBACK, STOPPED_QUANTISED)[name == "mxfp4" :]:
        again = go(workshop, f"from-{number}", BACKENDS[name], begin_at=number)
        assert again.keys() == whole.keys() and all(torch.equal(again[key], whole[key]) for key in whole)
