"""The engine's promises besides the numbers: chunks, memory, dtypes, graphs, and only requested gradients."""

import functools
from dataclasses import replace

import pytest
import torch
from objective_cases import RULES, gradients, run, targets_for
from objective_reference import dense, problem

from kdtrain.errors import UsageError
from kdtrain.objective.engine import matmul


@pytest.mark.parametrize("rule", RULES)
def test_the_result_does_not_depend_on_the_chunk_size(rule):
    results = []
    for chunk in (1, 7, 24, 1000):
        p = problem().cast(torch.float64)
        t = torch.tensor(2.0, dtype=torch.float64, requires_grad=True)
        out = run(p, targets_for(p, rule), t, rule, chunk=chunk)
        results.append([out.loss, out.kd_at_one, *gradients(out.loss, p, t)])
    for other in results[1:]:
        for a, b in zip(results[0], other, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-13)


def test_autocast_around_the_loss_does_not_round_the_logits():
    p = problem().cast(torch.float32)
    plain = run(p, targets_for(p, "ghost", torch.float32), 2.0, "ghost").loss
    with torch.autocast("cpu", torch.bfloat16):
        assert run(p, targets_for(p, "ghost", torch.float32), 2.0, "ghost").loss.item() == plain.item()


def test_without_gradients_only_values_are_computed():
    p = problem().cast(torch.float64)
    expected = run(p, targets_for(p, "ghost"), 2.0, "ghost").loss.item()
    with torch.no_grad():
        loss = run(p, targets_for(p, "ghost"), 2.0, "ghost").loss
    assert loss.item() == expected and not loss.requires_grad


def test_only_requested_gradients_are_computed():
    p = problem().cast(torch.float64)
    p.head.weight.requires_grad_(False)
    run(p, targets_for(p, "ghost"), 2.0, "ghost").loss.backward()
    assert p.hidden.grad is not None and p.head.weight.grad is None


def test_a_second_backward_is_refused():
    loss = run(p := problem().cast(torch.float64), targets_for(p, "ghost"), 2.0, "ghost").loss
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="the fused loss can be differentiated once; compute it again"):
        loss.backward()


def test_no_tensor_as_large_as_all_logits_is_made():
    n, d, vocab = 64, 4, 3000
    p = problem(n=n, d=d, vocab=vocab).cast(torch.float32)
    targets = targets_for(p, "ghost", torch.float32)
    largest = 0

    class Watch(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            nonlocal largest
            result = function(*args, **(kwargs or {}))
            for x in result if isinstance(result, (tuple, list)) else [result]:
                largest = max(largest, x.numel()) if isinstance(x, torch.Tensor) else largest
            return result

    with Watch():
        run(p, targets, 2.0, "ghost", chunk=8).loss.backward()
    assert largest == max(8 * 3008, vocab * d)  # rows of logits begin at multiples of 64


@pytest.mark.parametrize("rule", ["ghost", "dense"])
def test_the_gradient_of_a_bias_is_summed_before_it_is_rounded(rule):
    p = problem(n=512, d=8, vocab=64, bias=True)
    p.hidden, p.head = p.hidden.bfloat16(), replace(p.head, weight=p.head.weight.bfloat16())
    found = []
    for dtype in (torch.float64, torch.float32):
        ours = p.cast(dtype)
        if dtype == torch.float32:
            ours.hidden = ours.hidden.detach().bfloat16().requires_grad_()
        run(ours, targets_for(p, rule, dtype), 1.5, rule).loss.backward()
        found.append(ours.head.bias.grad.double())
    assert (found[1] - found[0]).norm() < 1e-5 * found[0].norm()


@pytest.mark.parametrize("rule", ["ghost", "dense"])
def test_the_loss_works_inside_a_compiled_caller_and_with_compiled_parts(monkeypatch, rule):
    if rule == "dense":  # one kind with generated code is enough
        monkeypatch.setattr(matmul, "_compiled", functools.cache(functools.partial(torch.compile, backend="aot_eager")))
    p = problem(n=16, d=4, vocab=11)
    targets = targets_for(p, rule, torch.float32)
    results = []
    for mode in ("plain", "parts", "caller"):
        ours, t = p.cast(torch.float32), torch.tensor(2.0, requires_grad=True)

        def call(ours=ours, t=t, mode=mode):
            return run(ours, targets, t, rule, compile=mode == "parts").loss * 2.0

        # A back end that compiles nothing is enough to show the seam between graph and engine.
        loss = (torch.compile(call, backend="aot_eager") if mode == "caller" else call)()
        results.append([loss, *gradients(loss, ours, t)])
    for other in results[1:]:
        for a, b in zip(results[0], other, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)


def test_dense_targets_of_another_vocabulary_are_refused():
    p = problem(vocab=23).cast(torch.float32)
    targets = dense(p.energies[:, :20], p.labels.clamp(max=19), torch.float32)
    with pytest.raises(UsageError, match="20 columns"):
        run(p, targets, 2.0, "dense")
