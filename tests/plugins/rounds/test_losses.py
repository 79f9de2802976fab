"""Losses of drawn tokens against all sequences of five tokens, four long, enumerated in fp64."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch

from kdtrain.cache.format.codec import decode, draw_points, encode
from kdtrain.cache.format.spec import CodecSpec
from kdtrain.config.commands import DistillConfig
from kdtrain.errors import UsageError
from kdtrain.models.output_head import HeadPart
from kdtrain.objective.loss import DistillationLoss, distillation_loss
from kdtrain.plugins.rounds import loss as sampled
from kdtrain.testing import tiny_model
from kdtrain.training.student import Student

VOCAB, LENGTH, DRAWS = 5, 4, 20_000
NODES = sum(VOCAB**depth for depth in range(LENGTH))
"""Prefixes: a token v behind the prefix n is the prefix VOCAB n + 1 + v."""
TOP, SAMPLES = (
    CodecSpec(kind="sparse", vocab_size=VOCAB, top_k=2),
    CodecSpec(kind="sparse", vocab_size=VOCAB, num_samples=8),
)


def table(seed):
    return torch.randn(NODES, VOCAB, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def moved(z, nats):
    """Make a table whose distributions are flatter than those of z, such that KL(q || q_then) is `nats` on average."""
    low, high = 0.0, 1.0
    for _ in range(60):
        there = (low + high) / 2 * z
        kl = (z.softmax(-1) * (z.log_softmax(-1) - there.log_softmax(-1))).sum(-1).mean()
        low, high = ((low + high) / 2, high) if kl > nats else (low, (low + high) / 2)
    return z if nats == 0 else high * z


def drawn(then):
    """Draw the prefix and the token of each row of DRAWS sequences."""
    generator, at, nodes, tokens = torch.Generator().manual_seed(1), torch.zeros(DRAWS, dtype=torch.int64), [], []
    for _ in range(LENGTH):
        token = torch.multinomial(then[at].softmax(-1), 1, generator=generator)[:, 0]
        nodes.append(at)
        tokens.append(token)
        at = VOCAB * at + 1 + token
    return torch.cat(nodes), torch.cat(tokens)


def reached(then):
    """Compute the probability of each prefix."""
    found = torch.ones(NODES, dtype=torch.float64)
    for node in range(1, NODES):
        before, token = divmod(node - 1, VOCAB)
        found[node] = found[before] * then[before].softmax(-1)[token]
    return found


def targets_of(p, nodes, tokens, then, spec, baseline):
    points = None
    if spec.num_samples:
        points = np.concatenate([draw_points(3, "train", row, len(nodes) // 4, spec.num_samples) for row in range(4)])
    arrays = {name: values[:, None] for name, values in encode(p[nodes], tokens, spec, points).items()}
    policy = then.log_softmax(-1)[nodes, tokens]
    found = decode(arrays | {"policy_logprob": policy.numpy()[:, None]}, CodecSpec(**{**vars(spec), "written": True}))
    return found.map(lambda name, each: each if name == "ids" else each.double()), torch.full_like(policy, baseline)


def gradients(z, p, then, divergence, spec, baseline=0.0):
    """Return the prefix of each row, its gradient in the logits there, and the output."""
    nodes, tokens = drawn(then)
    targets, baseline_N = targets_of(p, nodes, tokens, then, spec, baseline)
    hidden = z[nodes].clone().requires_grad_()
    output = distillation_loss(
        hidden,
        HeadPart(),
        tokens,
        torch.ones_like(tokens, dtype=torch.bool),
        replace(targets, baseline=baseline_N),
        temperature=1.0,
        alpha=1.0,
        divergence=divergence,
        vocab_size=VOCAB,
        normalizer=1.0,
    )
    (found,) = torch.autograd.grad(output.loss, hidden)
    return nodes, found, output


def exact(z, p, then, reverse):
    log_q, log_p = z.log_softmax(-1), p.log_softmax(-1)
    q, ratio = log_q.exp(), log_q - log_p
    slope = q * (ratio - (q * ratio).sum(-1, keepdim=True)) if reverse else q - log_p.exp()
    return reached(then)[:, None] * slope


def summed(found):
    """Average the gradient of a sequence in the table."""
    return torch.zeros(NODES, VOCAB, dtype=torch.float64).index_add_(0, found[0], found[1]) / DRAWS


def noise(found):
    """Compute the trace of the covariance of a sequence's gradient."""
    return float((found[1] ** 2).sum() / DRAWS - (summed(found) ** 2).sum())


def apart(found, wanted):
    """Compute the largest distance in standard errors, along directions in the table."""
    directions = torch.randn(16, NODES, VOCAB, dtype=torch.float64, generator=torch.Generator().manual_seed(7))
    directions[0], directions[0, 0, 0] = 0.0, 1.0
    each = torch.stack([(found[1] * way[found[0]]).sum(1).view(LENGTH, DRAWS).sum(0) for way in directions])
    error = each.std(1) / math.sqrt(DRAWS)
    return float(((each.mean(1) - (directions * wanted).sum((1, 2))).abs() / error).max())


@pytest.mark.parametrize("nats", [0.0, 0.1, 0.5])
@pytest.mark.parametrize(
    "spec, baseline", [(SAMPLES, 0.0), (SAMPLES, 0.7), (TOP, 0.3)], ids=["plain", "baseline", "top-k"]
)
def test_the_mean_of_drawn_gradients_is_that_of_the_reverse_kl_at_fixed_prefixes(monkeypatch, nats, spec, baseline):
    monkeypatch.setattr(sampled, "LARGEST", math.inf)
    z, p = 2 * table(0), table(5)
    then = moved(z, nats)
    found = gradients(z, p, then, "sampled-reverse-kl", spec, baseline)
    assert apart(found, exact(z, p, then, reverse=True)) < 4
    q = z.log_softmax(-1)
    value = float((reached(then) * (q.exp() * (q - p.log_softmax(-1))).sum(-1)).sum())
    assert float(found[2].kd) / DRAWS == pytest.approx(value, rel=0.05)
    if nats:  # unweighted, the tokens of an earlier student point elsewhere
        stale = gradients(z, p, z, "sampled-reverse-kl", spec, baseline)
        assert apart(stale, exact(z, p, then, reverse=True)) > 4


def test_gradients_from_samples_have_the_mean_of_the_forward_kl_for_tokens_of_any_policy():
    z, p = 2 * table(0), table(5)
    for nats in (0.0, 0.5):
        then = moved(z, nats)
        assert apart(gradients(z, p, then, "forward-kl", SAMPLES), exact(z, p, then, reverse=False)) < 4


def test_truncation_biases_little_near_the_student_that_wrote():
    z, p = 2 * table(0), table(5)
    bias = {}
    for nats in (0.1, 0.5):
        then = moved(z, nats)
        wanted = exact(z, p, then, reverse=True)
        bias[nats] = float(
            (summed(gradients(z, p, then, "sampled-reverse-kl", SAMPLES)) - wanted).norm() / wanted.norm()
        )
    assert bias[0.1] < 0.1 < bias[0.5]


def test_a_baseline_and_a_top_k_lower_the_noise():
    z, p = 2 * table(0), table(5)
    nodes, tokens = drawn(z)
    own, theirs = (each.log_softmax(-1)[nodes, tokens] for each in (z, p))
    weight = (1 - own.exp()) ** 2
    baseline = float((weight * (own - theirs)).sum() / weight.sum())
    kinds = ((SAMPLES, 0.0), (SAMPLES, baseline), (TOP, baseline))
    found = [noise(gradients(z, p, z, "sampled-reverse-kl", spec, b)) for spec, b in kinds]
    assert found[0] > found[1] > found[2]


def test_a_student_that_is_its_teacher_has_no_gradient_and_mass_outside_of_the_top_k_is_pulled_back():
    z = table(0)
    for spec in (SAMPLES, TOP):
        found = gradients(z, z, z, "sampled-reverse-kl", spec)
        output = found[2]
        assert summed(found).abs().max() < 1e-6 and abs(float(output.kd)) / DRAWS < 1e-5
    far, p = torch.full_like(z, -3.0), torch.full_like(z, -3.0)
    far[:, 4], p[:, 0] = 3.0, 3.0
    mean = summed(gradients(far, p, far, "sampled-reverse-kl", TOP))
    assert mean[0, 4] > 0.01 > mean[0, 0]


def test_alpha_is_1_on_what_a_student_wrote_and_padding_changes_no_bit():
    torch.manual_seed(0)
    z, p = 2 * table(0), table(5)
    nodes, tokens = drawn(z)
    nodes, tokens = nodes[:8], tokens[:8]
    targets, _ = targets_of(p, nodes, tokens, z, SAMPLES, 0.0)
    mask = torch.tensor([True] * 6 + [False] * 2)
    found = []
    for padding in (targets, targets.map(lambda _, each: torch.cat([each[:6], each[6:].flip(0)]))):
        hidden = z[nodes].float().requires_grad_()
        loss = DistillationLoss(alpha=0.25)
        output = loss(hidden, HeadPart(), tokens, mask, padding, vocab_size=VOCAB, normalizer=6.0)
        output.loss.backward()
        found.append(hidden.grad)
        torch.testing.assert_close(output.loss.double(), output.kd.double() / 6)
        assert output.kd_written == output.kd and output.ce_written == output.ce
        student = Student(tiny_model(), loss)
        torch.testing.assert_close(student.total(output, torch.ones(())) / 6, output.loss.double())
    assert torch.equal(*found)


@pytest.mark.parametrize(
    "given, text",
    [
        ({"divergence": "k1"}, "its mean gradient is 0"),
        ({"divergence": "k3"}, "its mean gradient is that of the forward KL"),
        ({"divergence": "sampled-reverse-kl"}, "add --on-policy or --rollouts"),
        (
            {"divergence": "sampled-reverse-kl", "on_policy": True, "gen_top_p": 0.9},
            "draws of the student only at --gen-top-p 1",
        ),
        (
            {"divergence": "sampled-reverse-kl", "on_policy": True, "gen_temperature": 0.7},
            "only at --gen-temperature 1",
        ),
        ({"divergence": "sampled-reverse-kl", "on_policy": True, "dense": True}, "with --dense use reverse-kl"),
        ({"on_policy": True, "teacher": None}, "needs a --teacher"),
        ({"on_policy": True, "data": None}, "needs --data"),
        ({"on_policy": True, "rollout_share": 0.5}, "mixes with --cache"),
        ({"on_policy": True, "max_new_tokens": "9:"}, "neither a number of tokens nor FIRST:LAST"),
        ({"on_policy": True, "source": "mine"}, "--source"),
        ({"top_k": 8, "data": None, "cache": "c", "teacher": None}, "--top-k has no effect without --on-policy"),
        (
            {"round_rows": 8, "data": None, "cache": "c", "teacher": None},
            "--round-rows has no effect without --on-policy",
        ),
    ],
)
def test_what_cannot_be_is_refused_by_name(given, text):
    from kdtrain.config.values import configured

    options = {"student": "s", "out": "o", "teacher": "t", "data": "d"} | given
    with pytest.raises(UsageError, match=text):
        configured(DistillConfig, None, {name: each for name, each in options.items() if each is not None})
