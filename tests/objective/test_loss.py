import dataclasses
import math

import pytest
import torch
from objective_reference import PlainHead, dense, problem, reference_loss, sparse

from kdtrain.errors import UsageError
from kdtrain.objective.divergence import DIVERGENCES
from kdtrain.objective.loss import distillation_loss

SAMPLED = ["sampled", "sampled-headless", "control-variate", "control-variate-headless"]
RULES = ["dense", "ghost", "drop", "renormalize", *SAMPLED]
OTHERS = [
    (name, rule)
    for name, entry in DIVERGENCES.items()
    for rule in ("dense", "ghost", "drop", "renormalize")
    if name != "forward-kl" and ("dense" if rule == "dense" else "sparse") in entry.accepts
]


def targets_for(p, rule, dtype=torch.float64):
    if rule == "dense":
        return dense(p.energies, p.labels, dtype)
    if rule in SAMPLED:
        return sparse(p.energies, p.labels, head=0 if "headless" in rule else 3, draws=20, dtype=dtype)
    return sparse(p.energies, p.labels, head=5, dtype=dtype)


def tail_of(rule):
    rule = rule.removesuffix("-headless")
    return rule if rule in ("drop", "renormalize", "control-variate") else "ghost"


def run(p, targets, temperature, rule, alpha=0.7, normalizer=11.0, **more):
    return distillation_loss(
        p.hidden,
        p.head,
        p.labels,
        p.mask,
        targets,
        temperature=temperature,
        alpha=alpha,
        tail=tail_of(rule),
        vocab_size=p.vocab_size,
        normalizer=normalizer,
        **more,
    )


def gradients(loss, p, temperature):
    return torch.autograd.grad(loss, [*p.leaves(), temperature])


def assert_agrees(p64, rule, dtype, T, rtol, alpha=0.7, divergence="forward-kl", **more):
    """Value, sums and all gradients of the engine in `dtype` against the fp64 reference."""
    reference, ours = p64.cast(torch.float64), p64.cast(dtype)
    t_reference = torch.tensor(T, dtype=torch.float64, requires_grad=True)
    t = torch.tensor(T, dtype=dtype, requires_grad=True)
    rule_name, parameter = rule.removesuffix("-headless"), 0.3
    expected, ce, kd = reference_loss(
        reference, t_reference, alpha, rule_name, targets_for(p64, rule), 11.0, divergence, parameter
    )
    more |= {"divergence": divergence, "jsd_beta": parameter, "skew_alpha": parameter}
    out = run(ours, targets_for(p64, rule, dtype), t, rule, alpha, **more)
    for got, want in ((out.loss, expected), (out.cross_entropy, ce), (out.kd, kd)):
        assert abs(got.item() - want.item()) <= rtol * max(1.0, abs(want.item()))
    assert out.tokens.item() == p64.mask.sum().item()
    *got, got_t = gradients(out.loss, ours, t)
    *want, want_t = gradients(expected, reference, t_reference)
    for g, w in zip(got, want, strict=True):
        assert g.dtype == dtype
        assert (g.double() - w).norm() <= rtol * w.norm()
    # In log T, where it is a difference of terms as large as the loss.
    assert T * abs(got_t.item() - want_t.item()) <= rtol * max(abs(expected.item()), T * abs(want_t.item()))


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


@pytest.mark.parametrize("divergence,rule", OTHERS)
def test_the_gradient_in_t_of_every_divergence_agrees_with_finite_differences(divergence, rule):
    p = problem().cast(torch.float64)
    targets = targets_for(p, rule)
    t = torch.tensor(2.6, dtype=torch.float64, requires_grad=True)
    (slope,) = torch.autograd.grad(run(p, targets, t, rule, divergence=divergence).loss, [t])
    above, below = (run(p, targets, t.detach() + h, rule, divergence=divergence).loss.item() for h in (1e-5, -1e-5))
    assert slope.item() == pytest.approx((above - below) / 2e-5, rel=1e-6, abs=1e-9)


@pytest.mark.parametrize("divergence,rule", OTHERS)
def test_every_divergence_is_zero_without_gradient_for_equal_models(divergence, rule):
    p = problem().cast(torch.float64)
    p.energies = torch.log_softmax(p.logits().detach(), -1)
    t = torch.tensor(2.0, dtype=torch.float64, requires_grad=True)
    out = run(p, targets_for(p, rule), t, rule, alpha=1.0, normalizer=1.0, divergence=divergence)
    assert abs(out.kd.item()) < 1e-12 and abs(out.kd_at_one.item()) < 1e-12
    hidden, *_ = gradients(out.loss, p, t)
    if divergence == "tvd":
        assert hidden.abs().max() < 10, "its gradient has a kink there"
    elif rule != "drop" or divergence == "jsd":
        assert hidden.abs().max() < 1e-12


@pytest.mark.parametrize("divergence", [name for name in DIVERGENCES if name != "logit-mse"])
def test_merging_the_tail_into_one_event_loses_and_never_adds(divergence):
    p = problem(n=200).cast(torch.float64)
    whole, merged = (
        run(p, targets_for(p, rule), 2.0, rule, alpha=1.0, divergence=divergence).kd for rule in ("dense", "ghost")
    )
    assert 0 < merged < whole


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
    p.head.weight = None
    assert_agrees(p, rule, torch.float64, 2.0, 1e-11, chunk=5)


@pytest.mark.parametrize("rule", RULES)
def test_the_gradient_in_t_agrees_with_finite_differences_between_knots(rule):
    p = problem().cast(torch.float64)
    targets = targets_for(p, rule)
    t = torch.tensor(2.6, dtype=torch.float64, requires_grad=True)
    (slope,) = torch.autograd.grad(run(p, targets, t, rule).loss, [t])
    step = 1e-5
    above, below = (run(p, targets, torch.tensor(2.6 + s, dtype=torch.float64), rule).loss for s in (step, -step))
    assert slope.item() == pytest.approx((above - below).item() / (2 * step), rel=1e-7)


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


@pytest.mark.parametrize("T", [1.0, 2.0, 4.0])
@pytest.mark.parametrize("rule", RULES)
def test_kd_is_zero_when_student_and_teacher_are_equal(rule, T):
    p = problem().cast(torch.float32)
    p.energies = torch.log_softmax(p.logits().detach().double(), -1)
    t = torch.tensor(T, requires_grad=True)
    out = run(p, targets_for(p, rule, torch.float32), t, rule, alpha=1.0, normalizer=1.0)
    # Rounding of an fp32 log-probability, a token; nothing is clamped, so the sum may be a little below 0.
    assert abs(out.kd.item()) < 2e-6 * p.mask.sum().item()
    assert abs(out.kd_at_one.item()) < 2e-6 * p.mask.sum().item()
    hidden = torch.autograd.grad(out.loss, p.hidden)[0].abs().max().item()
    if rule in ("dense", "ghost", "renormalize") or rule.startswith("control-variate"):
        assert hidden < 1e-5
    elif rule == "drop":
        assert hidden > 1e-2, "drop is zero in value at the teacher, and yet no minimum"


def test_drop_falls_below_zero_when_the_students_tail_starves():
    p = problem().cast(torch.float64)
    p.hidden, p.head = p.energies.clone(), PlainHead(None)
    targets = targets_for(p, "drop")
    outside = torch.ones_like(p.energies).scatter(1, targets.ids, 0.0).bool()
    p.hidden[outside] -= 50.0
    mass = targets.logprobs.exp().sum(-1)[p.mask]
    assert run(p, targets, 1.0, "drop", alpha=1.0).kd.item() == pytest.approx((mass * mass.log()).sum().item())


@pytest.mark.parametrize("rule", RULES)
def test_kd_at_one_is_the_divergence_at_temperature_one(rule):
    p = problem().cast(torch.float64)
    warm, one = (run(p, targets_for(p, rule), T, rule) for T in (4.0, 1.0))
    torch.testing.assert_close(warm.kd_at_one, one.kd)
    torch.testing.assert_close(one.kd_at_one, one.kd)


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("junk", [math.nan, math.inf, -math.inf])
def test_masked_rows_do_not_poison_the_rest(rule, junk):
    p = problem().cast(torch.float64)
    clean = targets_for(p, rule)
    out = run(p, clean, t := torch.tensor(2.0, requires_grad=True), rule)
    expected = [out.loss, *gradients(out.loss, p, t)]

    def spoil(name, x):
        return torch.where(p.mask if x.ndim == 1 else p.mask[:, None], x, 10**9 if name == "ids" else junk)

    p.labels = p.labels.masked_fill(~p.mask, -100)
    out = run(p, clean._map(spoil), t, rule)
    for got, want in zip([out.loss, *gradients(out.loss, p, t)], expected, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize("rule", RULES)
def test_a_fully_masked_micro_batch_keeps_the_graph_connected_with_zero_gradients(rule):
    p = problem(bias=True).cast(torch.float32)
    p.mask = torch.zeros_like(p.mask)
    t = torch.tensor(2.0, requires_grad=True)
    for normalizer in (40.0, 0.0):
        out = run(p, targets_for(p, rule, torch.float32), t, rule, normalizer=normalizer)
        assert out.loss.item() == 0 and out.tokens.item() == 0
        assert all((g == 0).all() for g in gradients(out.loss, p, t))


@pytest.mark.parametrize("rule", RULES)
def test_micro_batches_with_uneven_masks_add_up_to_the_whole(rule):
    p = problem(n=24).cast(torch.float64)
    targets, t = targets_for(p, rule), torch.tensor(2.0, dtype=torch.float64, requires_grad=True)
    count = p.mask.sum()
    out = run(p, targets, t, rule, normalizer=count)
    expected = gradients(out.loss, p, t)
    total, summed = 0.0, [torch.zeros_like(g) for g in expected]
    for part in (slice(0, 3), slice(3, 4), slice(4, 24)):
        piece = distillation_loss(
            p.hidden[part], p.head, p.labels[part], p.mask[part], targets[part], temperature=t, alpha=0.7,
            tail=tail_of(rule), vocab_size=p.vocab_size, normalizer=count.float(),
        )  # fmt: skip
        total += piece.loss.item()
        for s, g in zip(summed, gradients(piece.loss, p, t), strict=True):
            s += g
    assert total == pytest.approx(out.loss.item(), rel=1e-12)
    for s, g in zip(summed, expected, strict=True):
        torch.testing.assert_close(s, g, rtol=1e-11, atol=1e-13)


@pytest.mark.parametrize("alpha,with_targets", [(0.0, True), (0.7, False)])
def test_alpha_zero_or_no_targets_is_plain_cross_entropy(alpha, with_targets):
    p = problem(bias=True, softcap=4.0).cast(torch.float64)
    out = run(p, targets_for(p, "ghost") if with_targets else None, 2.0, "ghost", alpha, p.mask.sum())
    expected = torch.nn.functional.cross_entropy(p.logits()[p.mask], p.labels[p.mask])
    torch.testing.assert_close(out.loss, expected)
    for got, want in zip(
        torch.autograd.grad(out.loss, p.leaves()), torch.autograd.grad(expected, p.leaves()), strict=True
    ):
        torch.testing.assert_close(got, want)
    assert out.kd.item() == 0


@pytest.mark.parametrize("size", [1e4, 1e2])
@pytest.mark.parametrize("divergence,rule", [*(("forward-kl", rule) for rule in RULES), *OTHERS])
def test_extreme_logits_give_finite_gradients(divergence, rule, size):
    p = problem(d=23)
    p.hidden, p.head = size * torch.sign(p.hidden), PlainHead(None)
    p.energies = torch.log_softmax(size * torch.sign(p.energies - p.energies.median()), -1)
    ours = p.cast(torch.float32)
    t = torch.tensor(2.0, requires_grad=True)
    out = run(ours, targets_for(p, rule, torch.float32), t, rule, divergence=divergence)
    assert math.isfinite(out.loss.item())
    assert all(torch.isfinite(g).all() for g in gradients(out.loss, ours, t))


@pytest.mark.parametrize("divergence,rule", [*(("forward-kl", rule) for rule in RULES), *OTHERS])
def test_minus_infinity_where_neither_puts_mass_is_no_nan(divergence, rule):
    p = problem(d=23)
    p.head = PlainHead(None)
    p.hidden[:, 20:], p.energies[:, 20:] = -math.inf, -math.inf
    p.labels = p.labels.clamp(max=19)
    targets = targets_for(p, "dense", torch.float32)
    if rule != "dense":
        targets = targets_for(problem_with(p, p.energies.clamp(min=-1e4)), rule, torch.float32)
    ours = p.cast(torch.float32)
    t = torch.tensor(2.0, requires_grad=True)
    out = run(ours, targets, t, rule, divergence=divergence)
    assert math.isfinite(out.loss.item())
    assert all(torch.isfinite(g).all() for g in gradients(out.loss, ours, t))


def problem_with(p, energies):
    changed = p.cast(torch.float64)
    changed.energies = energies
    return changed


def test_a_vocabulary_of_two_and_a_head_that_leaves_no_tail():
    p = problem(vocab=2)
    targets = sparse(p.energies, p.labels, head=2)
    targets = targets._map(lambda name, x: x.nan_to_num(nan=0.0, neginf=-1e4) if name == "tail" else x)
    ours, exact = p.cast(torch.float64), p.cast(torch.float64)
    t, t_exact = (torch.tensor(2.0, dtype=torch.float64, requires_grad=True) for _ in range(2))
    out = run(ours, targets, t, "ghost")
    expected, _, _ = reference_loss(exact, t_exact, 0.7, "dense", None, 11.0)
    assert out.loss.item() == pytest.approx(expected.item())
    for got, want in zip(gradients(out.loss, ours, t), gradients(expected, exact, t_exact), strict=True):
        torch.testing.assert_close(got, want)


def test_bf16_hidden_states_cost_only_their_own_rounding():
    p = problem(n=64, d=32, vocab=101, size=4.0)
    rounded = p.cast(torch.bfloat16)
    exact = rounded.cast(torch.float64)
    t, t_exact = (
        torch.tensor(2.0, requires_grad=True),
        torch.tensor(2.0, dtype=torch.float64, requires_grad=True),
    )
    out = run(rounded, targets_for(p, "ghost", torch.float32), t, "ghost")
    expected, _, _ = reference_loss(exact, t_exact, 0.7, "ghost", targets_for(p, "ghost"), 11.0)
    assert out.loss.dtype == torch.float32
    assert out.loss.item() == pytest.approx(expected.item(), rel=1e-6)
    got, want = gradients(out.loss, rounded, t), gradients(expected, exact, t_exact)
    for g, w in zip(got, want, strict=True):
        # Only the gradient itself is rounded, to the 8 bits of its dtype.
        assert (g.double() - w).norm() <= 2**-8 * w.norm()
    assert got[0].dtype == torch.bfloat16


def test_autocast_around_the_loss_does_not_round_the_logits():
    p = problem().cast(torch.float32)
    plain = run(p, targets_for(p, "ghost", torch.float32), 2.0, "ghost").loss
    with torch.autocast("cpu", torch.bfloat16):
        assert run(p, targets_for(p, "ghost", torch.float32), 2.0, "ghost").loss.item() == plain.item()


def test_without_gradients_only_values_are_made():
    p = problem().cast(torch.float64)
    expected = run(p, targets_for(p, "ghost"), 2.0, "ghost").loss.item()
    with torch.no_grad():
        loss = run(p, targets_for(p, "ghost"), 2.0, "ghost").loss
    assert loss.item() == expected and not loss.requires_grad


def test_only_the_gradients_asked_for_are_made():
    p = problem().cast(torch.float64)
    p.head.weight.requires_grad_(False)
    run(p, targets_for(p, "ghost"), 2.0, "ghost").loss.backward()
    assert p.hidden.grad is not None and p.head.weight.grad is None


def test_the_incoming_gradient_scales_all_gradients():
    ours = [problem().cast(torch.float64) for _ in range(2)]
    for p, factor in zip(ours, (1.0, 1024.0), strict=True):
        (factor * run(p, targets_for(p, "ghost"), 2.0, "ghost").loss).backward()
    torch.testing.assert_close(1024 * ours[0].hidden.grad, ours[1].hidden.grad)
    torch.testing.assert_close(1024 * ours[0].head.weight.grad, ours[1].head.weight.grad)


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
    assert largest == max(8 * vocab, vocab * d)


@pytest.mark.parametrize("rule", ["ghost", "dense"])
def test_the_loss_works_inside_a_compiled_caller_and_with_compiled_parts(rule):
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


@pytest.mark.parametrize("rule", ["ghost", "drop", "renormalize"])
def test_absent_entries_in_the_head_change_nothing(rule):
    p = problem().cast(torch.float64)
    targets = targets_for(p, rule)
    n, wide = len(targets), {"head": targets.head + 2}
    for name, filler in (("ids", p.vocab_size + 100), ("logprobs", -0.5), ("counts", 0.0)):
        x = getattr(targets, name)
        wide[name] = torch.cat([x, torch.full((n, 2), filler, dtype=x.dtype)], 1)
    t = torch.tensor(2.0, dtype=torch.float64, requires_grad=True)
    out, same = run(p, targets, t, rule), run(p, dataclasses.replace(targets, **wide), t, rule)
    for got, want in zip(gradients(same.loss, p, t), gradients(out.loss, p, t), strict=True):
        torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-13)
    assert same.kd.item() == pytest.approx(out.kd.item(), rel=1e-12)
