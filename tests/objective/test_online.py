import math

import pytest
import torch
from objective_reference import problem

from kdtrain.models.output_head import HeadPart
from kdtrain.objective.logits import chunk_logits
from kdtrain.objective.loss import distillation_loss
from kdtrain.objective.metrics import measure
from kdtrain.objective.targets import DenseTargets, OnlineTargets, Supervision

DIVERGENCES = ["forward-kl", "jsd", "logit-mse"]


def teacher_of(p, width=5, **more):
    g = torch.Generator().manual_seed(7)
    hidden, weight, bias = (
        torch.randn(*shape, generator=g, dtype=torch.float64)
        for shape in ((len(p.labels), width), (p.vocab_size + 3, width), (p.vocab_size + 3,))
    )
    return OnlineTargets(hidden, p.labels, HeadPart(weight, bias, **more), p.vocab_size)


def run(p, targets, divergence="forward-kl", chunk=7, temperature=None):
    t = torch.tensor(2.0, dtype=torch.float64, requires_grad=True) if temperature is None else temperature
    out = distillation_loss(
        p.hidden, p.head, p.labels, p.mask, targets, temperature=t, alpha=0.7, divergence=divergence,
        vocab_size=p.vocab_size, normalizer=11.0, chunk=chunk,
    )  # fmt: skip
    return [out.loss, out.ce, out.kd, out.kd_at_one, *torch.autograd.grad(out.loss, [*p.leaves(), t])]


@pytest.mark.parametrize("divergence", DIVERGENCES)
def test_an_online_teachers_hidden_states_give_the_loss_of_all_its_logits(divergence):
    p = problem(bias=True).cast(torch.float64)
    online = teacher_of(p, scale=0.7, softcap=5.0)
    for got, want in zip(run(p, online, divergence), run(p, online_in_fp64(online), divergence), strict=True):
        torch.testing.assert_close(got, want, rtol=1e-11, atol=1e-13)


def online_in_fp64(online):
    """Make dense targets of an online teacher, not rounded to fp32."""
    logprobs = torch.log_softmax(chunk_logits(online.hidden, online.head, online.width), -1)
    return DenseTargets(logprobs, logprobs.gather(1, online.labels[:, None])[:, 0])


def test_a_teacher_without_a_split_head_gives_its_logits():
    p = problem().cast(torch.float64)
    logits = torch.randn(len(p.labels), p.vocab_size + 3, generator=torch.Generator().manual_seed(1)).double()
    online = OnlineTargets(logits, p.labels, HeadPart(), p.vocab_size)
    for got, want in zip(run(p, online), run(p, online_in_fp64(online)), strict=True):
        torch.testing.assert_close(got, want, rtol=1e-11, atol=1e-13)


@pytest.mark.parametrize("junk", [math.nan, math.inf])
def test_masked_rows_of_an_online_teacher_do_not_poison_the_rest(junk):
    p = problem().cast(torch.float64)
    online = teacher_of(p)
    expected = run(p, online)
    spoilt = OnlineTargets(
        torch.where(p.mask[:, None], online.hidden, junk), p.labels.masked_fill(~p.mask, -100), online.head, 23
    )
    for got, want in zip(run(p, spoilt), expected, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-11, atol=1e-13)
    assert math.isfinite(spoilt.log_partition(0.5, p.mask).sum())


def test_the_numbers_of_single_tokens_and_the_metrics_are_those_of_the_dense_targets():
    p = problem().cast(torch.float32)
    online = teacher_of(p)
    dense = online.resolved()
    torch.testing.assert_close(online.label_logprob, dense.label_logprob)
    beta = torch.tensor(0.5, requires_grad=True)
    for found in (online.log_partition(beta), dense.log_partition(beta)):
        (slope,) = torch.autograd.grad(found.sum(), beta)
        assert slope.item() == pytest.approx(-69.8, rel=1)
    torch.testing.assert_close(online.log_partition(beta), dense.log_partition(beta))
    found, expected = (
        measure(p.hidden, p.head, Supervision(p.labels, p.mask, targets), vocab_size=23, chunk=7)
        for targets in (online, dense)
    )
    assert found.vector() == pytest.approx(expected.vector(), rel=1e-6, nan_ok=True)


def test_no_tensor_as_large_as_all_logits_of_student_or_teacher_is_made():
    p = problem(n=64, d=4, vocab=3000).cast(torch.float32)
    hidden, weight = torch.randn(64, 5), torch.randn(3000, 5)
    online = OnlineTargets(hidden, p.labels, HeadPart(weight), 3000)
    largest = 0

    class Watch(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            nonlocal largest
            result = function(*args, **(kwargs or {}))
            for x in result if isinstance(result, (tuple, list)) else [result]:
                largest = max(largest, x.numel()) if isinstance(x, torch.Tensor) else largest
            return result

    with Watch():
        run(p, online, chunk=8, temperature=torch.tensor(2.0, requires_grad=True))
    assert largest == 8 * 3008  # rows of logits begin at multiples of 64
