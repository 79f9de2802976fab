"""The loss is right: value and all gradients against an independent fp64 reference, and finite differences."""

import dataclasses

import pytest
import torch
from objective_cases import EVERY, OTHERS, RULES, assert_agrees, gradients, run, targets_for, with_number
from objective_reference import dense, problem, reference_loss, sparse

from kdtrain.models.output_head import HeadPart
from kdtrain.objective.loss import distillation_loss
from kdtrain.objective.targets import OnlineTargets
from kdtrain.objective.temperature import build_temperature


@pytest.mark.parametrize("T", [1.0, 2.0, 4.0, 1 / 1.5])
@pytest.mark.parametrize("rule", RULES)
def test_value_and_all_gradients_agree_with_an_fp64_reference(rule, T):
    assert_agrees(problem(bias=True), rule, torch.float64, T, 1e-11)
    assert_agrees(problem(bias=True), rule, torch.float32, T, 1e-6)


@pytest.mark.parametrize("T", [1.0, 4.0])
@pytest.mark.parametrize("rule", RULES[1:])
def test_the_gradient_in_t_keeps_its_digits_in_fp32(rule, T):
    """It is 2 T KD minus dKD/dbeta, which agree in two digits and more at T = 4."""
    p64 = problem(n=100, d=32, vocab=2000, seed=1)
    found = []
    for dtype in (torch.float64, torch.float32):
        p, t = p64.cast(dtype), torch.tensor(T, dtype=dtype, requires_grad=True)
        found += gradients(run(p, targets_for(p64, rule, dtype), t, rule).loss, p, t)[-1:]
    assert found[1].item() == pytest.approx(found[0].item(), rel=5e-6)


@pytest.mark.parametrize("T", [1.0, 2.0, 4.0])
@pytest.mark.parametrize("divergence,rule", OTHERS)
def test_every_divergence_agrees_with_an_fp64_reference_in_value_and_all_gradients(divergence, rule, T):
    assert_agrees(problem(bias=True, softcap=4.0), rule, torch.float64, T, 1e-10, divergence=divergence, chunk=7)
    assert_agrees(problem(bias=True), rule, torch.float32, T, 1e-6, divergence=divergence)


@pytest.mark.parametrize("divergence,rule", EVERY)
def test_the_gradient_in_t_agrees_with_finite_differences_between_knots(divergence, rule):
    p = problem().cast(torch.float64)
    targets = targets_for(p, rule)
    t = torch.tensor(2.6, dtype=torch.float64, requires_grad=True)
    (slope,) = torch.autograd.grad(run(p, targets, t, rule, divergence=divergence).loss, [t])
    above, below = (run(p, targets, t.detach() + h, rule, divergence=divergence).loss.item() for h in (1e-5, -1e-5))
    bound = {"rel": 1e-7} if divergence == "forward-kl" else {"rel": 1e-6, "abs": 1e-9}
    assert slope.item() == pytest.approx((above - below) / 2e-5, **bound)


@pytest.mark.parametrize("rule", RULES)
def test_scale_softcap_bias_and_padded_vocabulary_agree_with_the_reference(rule):
    p = problem(bias=True, scale=0.6, softcap=2.5, padding=5, seed=3)
    assert_agrees(p, rule, torch.float64, 2.0, 1e-11, chunk=7)
    ours = p.cast(torch.float64)
    t = torch.tensor(2.0, requires_grad=True)
    _, weight, bias, _ = gradients(run(ours, targets_for(p, rule), t, rule).loss, ours, t)
    assert (weight[p.vocab_size :] == 0).all()
    assert (bias[p.vocab_size :] == 0).all()


@pytest.mark.parametrize("rule", RULES)
def test_a_head_without_a_weight_takes_logits(rule):
    p = problem(d=23, scale=0.8, softcap=3.0)
    p.head = dataclasses.replace(p.head, weight=None)
    assert_agrees(p, rule, torch.float64, 2.0, 1e-11, chunk=5)


def test_a_vocabulary_of_two_and_a_top_k_that_leaves_no_tail():
    p = problem(vocab=2)
    targets = sparse(p.energies, p.labels, top_k=2)
    targets = targets.map(lambda name, x: x.nan_to_num(nan=0.0, neginf=-1e4) if name == "tail" else x)
    ours, exact = p.cast(torch.float64), p.cast(torch.float64)
    t, t_exact = (torch.tensor(2.0, dtype=torch.float64, requires_grad=True) for _ in range(2))
    out = run(ours, targets, t, "ghost")
    expected, _, _ = reference_loss(exact, t_exact, 0.7, "dense", None, 11.0)
    assert out.loss.item() == pytest.approx(expected.item())
    for got, want in zip(gradients(out.loss, ours, t), gradients(expected, exact, t_exact), strict=True):
        torch.testing.assert_close(got, want)


def test_fp16_hidden_gradients_are_scaled_before_they_are_rounded():
    p = problem().cast(torch.float16)
    out = run(p, targets_for(p, "ghost", torch.float32), 2.0, "ghost", normalizer=1e7)
    (65536.0 * out.loss).backward()
    exact = p.cast(torch.float64)
    expected, _, _ = reference_loss(
        exact, torch.tensor(2.0, dtype=torch.float64), 0.7, "ghost", targets_for(p, "ghost"), 1e7
    )
    (65536.0 * expected).backward()
    assert (p.hidden.grad.double() - exact.hidden.grad).norm() <= 2**-8 * exact.hidden.grad.norm()


def modes_reference(mode, theta, p):
    """Compute from theta, in fp64, the T that the loss differentiates in, and the mode's own term of the loss."""
    low, high = 2 / 3, 4.0
    T = low * (high / low) ** torch.sigmoid(theta)
    if mode == "likelihood":
        nll = torch.nn.functional.cross_entropy(p.energies[p.mask] / T, p.labels[p.mask], reduction="sum")
        return T.detach(), nll / 11.0
    # The reversal grows along a cosine: half of it in the middle of the ramp.
    factor = {"minimize": 1.0, "adversarial": -0.5}[mode]
    return T.detach() + factor * (T - T.detach()), 0.0


@pytest.mark.parametrize("mode", ["fixed", "schedule", "adversarial", "likelihood", "minimize"])
@pytest.mark.parametrize("divergence,rule", EVERY)
def test_every_temperature_mode_gives_each_parameter_its_gradient(divergence, rule, mode):
    """Value and the gradients of hidden, weight, bias and theta in fp32 against fp64, all modes at T = 2."""
    p64 = problem(bias=True)
    ours, exact = p64.cast(torch.float32), p64.cast(torch.float64)
    temperature = build_temperature(mode, start=2.0, minimum=2 / 3, maximum=4.0, end=2.0, total_steps=40, ramp_steps=4)
    temperature.set_step(2)
    parameters = list(temperature.parameters())
    assert len(parameters) == (mode not in ("fixed", "schedule"))
    targets = targets_for(p64, rule, torch.float32)
    loss = run(ours, targets, temperature.value(), rule, divergence=with_number(divergence, 0.3)).loss
    extra = temperature.auxiliary_loss(targets, p64.mask, 11.0)
    loss = loss if extra is None else loss + extra

    theta = [each.detach().double().requires_grad_() for each in parameters]
    T, added = modes_reference(mode, theta[0], p64) if theta else (torch.tensor(2.0, dtype=torch.float64), 0.0)
    expected, *_ = reference_loss(
        exact, T, 0.7, rule.removesuffix("-headless"), targets_for(p64, rule), 11.0, divergence, 0.3
    )
    expected = expected + added
    assert loss.item() == pytest.approx(expected.item(), rel=1e-6)
    asked = torch.autograd.grad(loss, [*ours.leaves(), *parameters])
    wanted = torch.autograd.grad(expected, [*exact.leaves(), *theta])
    for got, want in zip(asked[:3], wanted[:3], strict=True):
        assert (got.double() - want).norm() <= 1e-6 * want.norm()
    for got, want in zip(asked[3:], wanted[3:], strict=True):
        # a difference of terms as large as the loss
        assert abs(got.item() - want.item()) <= 1e-6 * max(abs(expected.item()), abs(want.item()))
        assert divergence == "logit-mse" or want.abs() > 1e-4


@pytest.mark.parametrize("weight_dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("divergence,rule", EVERY)
def test_bf16_costs_no_divergence_more_than_the_rounding_of_the_inputs_and_of_the_gradients(
    divergence, rule, weight_dtype
):
    """Hidden states in bf16, the head's weight in bf16 or, as in training, an fp32 master of any value."""
    p = problem(n=64, d=32, vocab=101, bias=True)
    ours = p.cast(torch.bfloat16)
    if weight_dtype == torch.float32:
        ours.head = p.cast(torch.float32).head
    exact = ours.cast(torch.float64)
    t, t_exact = torch.tensor(2.0, requires_grad=True), torch.tensor(2.0, dtype=torch.float64, requires_grad=True)
    more = {"divergence": with_number(divergence, 0.3)}
    out = run(ours, targets_for(p, rule, torch.float32), t, rule, **more)
    expected, *_ = reference_loss(
        exact, t_exact, 0.7, rule.removesuffix("-headless"), targets_for(p, rule), 11.0, divergence, 0.3
    )
    # An fp32 weight may be rounded to bf16 for the products, to 8 bits, and with it the logits.
    inputs = 1e-6 if weight_dtype == torch.bfloat16 else 2**-8
    assert out.loss.dtype == torch.float32
    assert out.loss.item() == pytest.approx(expected.item(), rel=inputs)
    *got, got_t = gradients(out.loss, ours, t)
    *want, want_t = gradients(expected, exact, t_exact)
    assert got[0].dtype == torch.bfloat16
    for g, w in zip(got, want, strict=True):
        assert (g.double() - w).norm() <= (2**-8 + inputs) * w.norm()
    assert abs(got_t.item() - want_t.item()) <= 2 * inputs * max(abs(expected.item()), abs(want_t.item()))


@pytest.mark.parametrize("size", [0.1, 0.001])
@pytest.mark.parametrize("divergence", ["forward-kl", "reverse-kl", "jsd"])
@pytest.mark.parametrize("online", [False, True])
def test_near_its_teacher_whole_rows_have_the_slope_in_the_temperature_of_fp64(online, divergence, size):
    """Of numbers in fp32, it is a small difference of their sums."""
    g = torch.Generator().manual_seed(0)
    z = 3 * torch.randn(64, 1000, generator=g)
    energies = torch.log_softmax(z + size * torch.randn(64, 1000, generator=g), -1)
    labels, mask = torch.zeros(64, dtype=torch.int64), torch.ones(64, dtype=torch.bool)
    slopes = []
    for dtype in (torch.float32, torch.float64):
        given = energies.to(dtype)
        targets = OnlineTargets(given, labels, HeadPart(), 1000) if online else dense(given, labels, dtype)
        T = torch.tensor(2.0, dtype=dtype, requires_grad=True)
        options = {"temperature": T, "alpha": 1.0, "divergence": divergence, "vocab_size": 1000, "normalizer": 64.0}
        loss = distillation_loss(z.to(dtype), HeadPart(), labels, mask, targets, **options).loss
        slopes.append(torch.autograd.grad(loss, T)[0].item())
    assert slopes[0] == pytest.approx(slopes[1], rel=1e-6)
