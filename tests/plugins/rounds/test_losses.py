"""Losses of drawn tokens against all sequences of five tokens, four long, enumerated in fp64."""

import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from kdtrain.cache.format.codec import decode, draw_points, encode
from kdtrain.cache.format.spec import CodecSpec
from kdtrain.config.choices import DIVERGENCES
from kdtrain.config.commands import DistillConfig
from kdtrain.errors import UsageError
from kdtrain.models.output_head import HeadPart
from kdtrain.objective.batch import Batch
from kdtrain.objective.loss import DistillationLoss, distillation_loss
from kdtrain.objective.targets import DenseTargets, SparseTargets
from kdtrain.plugins.rounds import loss as sampled
from kdtrain.plugins.rounds.learning import Learning
from kdtrain.plugins.rounds.source import _baseline
from kdtrain.testing import tiny_model
from kdtrain.training.observers import StepView
from kdtrain.training.student import Student

VOCAB, LENGTH, DRAWS, END = 5, 4, 20_000, 3
NODES = sum(VOCAB**depth for depth in range(LENGTH))
"""Prefixes: a token v behind the prefix n is the prefix VOCAB n + 1 + v."""
TOP, SAMPLES, BOTH = (
    CodecSpec(kind="sparse", vocab_size=VOCAB, top_k=top_k, num_samples=samples)
    for top_k, samples in ((2, 0), (0, 8), (2, 4))
)


def table(seed):
    return torch.randn(NODES, VOCAB, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def moved(z, nats):
    """Make a student that wrote earlier, such that KL(q || q_then) is `nats` on average over the tokens it writes."""
    low, high = 0.0, 8.0
    for _ in range(60 if nats else 0):
        then = z + (low + high) / 2 * table(9)
        kl = (z.softmax(-1) * (z.log_softmax(-1) - then.log_softmax(-1))).sum(-1)
        below = float((reached(then) * kl).sum() / reached(then).sum()) < nats
        low, high = ((low + high) / 2, high) if below else (low, (low + high) / 2)
    return z + low * table(9)


def drawn(then):
    """Draw the prefix, the token and whether the text is open there, of each row of DRAWS sequences."""
    generator, at, rows = torch.Generator().manual_seed(1), torch.zeros(DRAWS, dtype=torch.int64), []
    is_open = torch.ones(DRAWS, dtype=torch.bool)
    for _ in range(LENGTH):
        token = torch.multinomial(then[at].softmax(-1), 1, generator=generator)[:, 0]
        rows.append((at, token, is_open))
        at, is_open = VOCAB * at + 1 + token, is_open & (token != END)
    return map(torch.cat, zip(*rows, strict=True))


def reached(then):
    """Compute the probability of each prefix; none is behind an end."""
    found = torch.ones(NODES, dtype=torch.float64)
    for node in range(1, NODES):
        before, token = divmod(node - 1, VOCAB)
        found[node] = found[before] * then[before].softmax(-1)[token] * (token != END)
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
    nodes, tokens, here = drawn(then)
    targets, baseline_N = targets_of(p, nodes, tokens, then, spec, baseline)
    hidden = z[nodes].clone().requires_grad_()
    options = {"temperature": 1.0, "alpha": 1.0, "divergence": divergence, "vocab_size": VOCAB, "normalizer": 1.0}
    output = distillation_loss(hidden, HeadPart(), tokens, here, replace(targets, baseline=baseline_N), **options)
    (found,) = torch.autograd.grad(output.loss, hidden)
    return nodes, found, output


def exact(z, p, then, reverse):
    """Return the gradient of the sum of KL_t at fixed prefixes."""
    log_q, log_p = z.log_softmax(-1), p.log_softmax(-1)
    q, ratio = log_q.exp(), log_q - log_p
    slope = q * (ratio - (q * ratio).sum(-1, keepdim=True)) if reverse else q - log_p.exp()
    return reached(then)[:, None] * slope


def truncated(z, p, then, spec, baseline):
    """Return what the mean of drawn gradients becomes by weights of at most 2."""
    log_q, log_p = z.log_softmax(-1), p.log_softmax(-1)
    inside = torch.zeros_like(p, dtype=torch.bool).scatter(1, p.topk(spec.top_k).indices, True)
    least = torch.minimum(log_q.exp(), 2 * then.softmax(-1))
    each = torch.where(inside, log_q.exp(), least) * (log_q - log_p - baseline)
    return reached(then)[:, None] * (each - log_q.exp() * each.sum(-1, keepdim=True))


def summed(found):
    """Average the gradient of a sequence in the table."""
    return torch.zeros(NODES, VOCAB, dtype=torch.float64).index_add_(0, found[0], found[1]) / DRAWS


def noise(found):
    """Compute the trace of the covariance of a sequence's gradient."""
    return float((found[1] ** 2).sum() / DRAWS - (summed(found) ** 2).sum())


def apart(found, wanted):
    """Compute how many standard errors the mean is apart, along fixed directions and over all parameters together.

    The directions are the logits of the first token, and 16 in the whole table. With covariance C of a sequence's
    gradient, DRAWS times the squared distance has the mean tr C and the variance 2 tr C^2.
    """
    directions = torch.randn(16, NODES, VOCAB, dtype=torch.float64, generator=torch.Generator().manual_seed(7))
    axes = torch.eye(VOCAB, NODES * VOCAB, dtype=torch.float64).view(VOCAB, NODES, VOCAB)
    far = []
    for way in (*axes, *directions):
        each = (found[1] * way[found[0]]).sum(1).view(LENGTH, DRAWS).sum(0)
        error = float(each.std()) / math.sqrt(DRAWS)
        far.append(abs(float(each.mean() - (way * wanted).sum())) / max(error, 1e-8))  # of an exact one: rounding
    mean = summed(found)
    nodes, rows = found[0].view(LENGTH, DRAWS), found[1].view(LENGTH, DRAWS, VOCAB)
    along = (rows * mean[nodes]).sum((0, 2)) - (mean**2).sum()
    # of C^2 the trace is the mean square of products of two sequences' gradients, less their mean
    product = ((rows * rows.roll(1, 1)).sum(2) * (nodes == nodes.roll(1, 1))).sum(0)
    spread = (2 * ((product - along - along.roll(1) - (mean**2).sum()) ** 2).mean()).sqrt()
    return max(*far, float((DRAWS * ((mean - wanted) ** 2).sum() - noise(found)) / spread))


FORMS = pytest.mark.parametrize(
    "spec, baseline", [(SAMPLES, 0.0), (SAMPLES, 0.7), (TOP, 0.3)], ids=["plain", "baseline", "top-k"]
)
NATS = pytest.mark.parametrize("nats", [0.0, 0.1, 0.5])


@NATS
@FORMS
def test_the_mean_of_drawn_gradients_is_that_of_the_reverse_kl_at_fixed_prefixes(monkeypatch, nats, spec, baseline):
    monkeypatch.setattr(sampled, "LARGEST", math.inf)
    z, p = table(0), table(5)
    then = moved(z, nats)
    found = gradients(z, p, then, "sampled-reverse-kl", spec, baseline)
    assert apart(found, exact(z, p, then, reverse=True)) < 4
    q = z.log_softmax(-1)
    value = float((reached(then) * (q.exp() * (q - p.log_softmax(-1))).sum(-1)).sum())
    assert float(found[2].kd) / DRAWS == pytest.approx(value, rel=0.05)
    if nats:  # unweighted, the tokens of an earlier student point elsewhere
        stale = gradients(z, p, z, "sampled-reverse-kl", spec, baseline)
        assert apart(stale, exact(z, p, then, reverse=True)) > 4


@NATS
@pytest.mark.parametrize("spec", [SAMPLES, BOTH], ids=["samples", "top-k and samples"])
def test_gradients_from_samples_have_the_mean_of_the_forward_kl_for_tokens_of_any_policy(nats, spec):
    z, p = table(0), table(5)
    then = moved(z, nats)
    assert apart(gradients(z, p, then, "forward-kl", spec), exact(z, p, then, reverse=False)) < 4


@pytest.mark.parametrize(
    "nats, plain, beside, with_top_k", [(0.0, 0, 0, 0), (0.1, 0.058, 0.029, 0.035), (0.5, 0.180, 0.101, 0.092)]
)
def test_truncation_turns_the_mean_by_what_the_page_states_and_by_nothing_else(nats, plain, beside, with_top_k):
    z, p = table(0), table(5)
    then, wanted = moved(z, nats), exact(z, p, moved(z, nats), reverse=True)
    for spec, baseline, bias in ((SAMPLES, 0.0, plain), (SAMPLES, 0.7, beside), (TOP, 0.3, with_top_k)):
        mean = truncated(z, p, then, spec, baseline)
        assert apart(gradients(z, p, then, "sampled-reverse-kl", spec, baseline), mean) < 4
        assert float((mean - wanted).norm() / wanted.norm()) == pytest.approx(bias, abs=5e-4)
    page = (Path(__file__).parents[3] / "docs" / "on-policy.md").read_text()
    assert not nats or f"{plain:.0%}".replace("%", " %") in page


def test_the_baseline_of_a_round_leaves_the_mean_and_lowers_the_noise_and_so_does_a_top_k():
    z, p = table(0), table(5)
    nodes, tokens, here = drawn(z)
    targets, _ = targets_of(p, nodes, tokens, z, SAMPLES, 0.0)

    class Round(list):
        def read(self, rows):
            return Batch(tokens, here, tokens, targets)

    baseline = _baseline(Round([0]))
    kinds = ((SAMPLES, 0.0), (SAMPLES, baseline), (TOP, baseline))
    found = [gradients(z, p, z, "sampled-reverse-kl", spec, b) for spec, b in kinds]
    assert all(apart(each, exact(z, p, z, reverse=True)) < 4 for each in found)
    none, own, least = map(noise, found)
    assert none > own > least
    assert all(own < noise(gradients(z, p, z, "sampled-reverse-kl", SAMPLES, baseline + by)) for by in (-0.2, 0.2))


def test_a_student_that_is_its_teacher_has_no_gradient():
    z = table(0)
    nodes, tokens, here = drawn(z)
    targets, _ = targets_of(z, nodes, tokens, z, SAMPLES, 0.0)
    log_p = z.log_softmax(-1)
    whole = DenseTargets(log_p[nodes], log_p[nodes, tokens], targets.policy)
    for divergence in DIVERGENCES.builtin:
        flat = divergence != "tvd"  # which has a kink there: its gradient is of the size of q, its sign is rounding
        hidden = z[nodes].clone().requires_grad_()
        loss = DistillationLoss(divergence=divergence, alpha=0.3)
        output = loss(hidden, HeadPart(), tokens, here, whole, vocab_size=VOCAB, normalizer=1.0)
        (found,) = torch.autograd.grad(output.loss, hidden)
        assert abs(float(output.kd)) < 1e-12 * DRAWS and (found.abs().max() < 1e-12) == flat, divergence
        if "sparse" in DIVERGENCES.get(divergence).accepts:
            _, found, output = gradients(z, z, z, divergence, TOP)
            assert abs(float(output.kd)) / DRAWS < 1e-6 and (found.abs().max() < 1e-6) == flat, divergence
    for spec in (SAMPLES, BOTH):
        assert apart(gradients(z, z, z, "forward-kl", spec), torch.zeros_like(z)) < 4
        assert gradients(z, z, z, "sampled-reverse-kl", spec)[1].abs().max() < 1e-6


@pytest.mark.parametrize("divergence", ["forward-kl", "reverse-kl", "jsd", "sampled-reverse-kl"])
def test_mass_outside_of_what_is_kept_of_the_teacher_is_pulled_back(divergence):
    far, p = torch.full((2, NODES, VOCAB), -3.0, dtype=torch.float64)
    far[:, 4], p[:, 0] = 3.0, 3.0
    mean = summed(gradients(far, p, far, divergence, TOP))
    assert mean[0, 4] > 0.005 and mean[0, 0] < -0.001


def test_nothing_is_learned_behind_an_end():
    z, p = table(0), table(5)
    _, tokens, here = drawn(z)
    rows = gradients(z, p, z, "sampled-reverse-kl", SAMPLES)[1]
    ends = (tokens == END).view(LENGTH, DRAWS)
    behind = (ends.cumsum(0) > ends.int()).flatten()
    assert behind.any() and (rows[behind] == 0).all() and (rows[here & (tokens == END)] != 0).any(1).all()


def test_alpha_is_1_on_what_a_student_wrote_and_padding_changes_no_bit():
    torch.manual_seed(0)
    z, p = table(0), table(5)
    nodes, tokens, _ = drawn(z)
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


@pytest.mark.parametrize("divergence", ["forward-kl", "sampled-reverse-kl"])
def test_other_filler_behind_the_ends_of_texts_changes_no_bit_of_a_step(divergence):
    generator = torch.Generator().manual_seed(0)
    tokens, kept = (torch.randint(300, shape, generator=generator) for shape in ((3, 9), (24, 2)))
    mask = torch.arange(8) < torch.tensor([[5], [3], [8]])
    columns = [kept, *(torch.randn(24, 2, generator=generator) - 4 for _ in range(3))]
    targets = SparseTargets(*columns, *[torch.full((24,), -3.0)] * 3, 2, 0, (1.0,), policy=torch.full((24,), -3.0))
    found = []
    for shift in (0, 1):
        rows = tokens.clone()
        rows[:, 1:][~mask] = tokens[:, 1:][~mask].roll(shift)
        student = Student(tiny_model("llama", 300, seed=1), DistillationLoss(divergence=divergence, alpha=1.0))
        student(Batch(rows, mask, torch.zeros_like(rows[:, 1:]), targets), 16.0).loss.backward()
        found.append([each.grad for each in student.parameters() if each.grad is not None])
    assert found[0] and all(map(torch.equal, *found))


@pytest.mark.parametrize("top_k", [0, 1])
def test_the_logged_weights_are_those_of_the_tokens_that_the_loss_weights_at_every_tenth_step(top_k):
    torch.manual_seed(0)
    student = Student(tiny_model("llama", 300), DistillationLoss(alpha=0.0)).train()
    tokens, weights = torch.randint(300, (2, 5)), torch.tensor([1.0, 0.5, 4.0, 0.5, 1.5, 0.5, 9.0, 7.0])
    policy = student.label_logprobs(tokens).flatten() - weights.log()
    mask = (weights < 9).view(2, 4)
    kept = (tokens[:, 1:] + (weights < 7).view(2, 4).int()).flatten()[:, None]  # the last token is in the top-k
    columns = [kept[:, :top_k], *[torch.zeros(8, top_k)] * 3]
    targets = SparseTargets(*columns, *[torch.zeros(8)] * 3, top_k, 1, (1.0,), policy=policy)
    batch, observer = Batch(tokens, mask, torch.zeros_like(tokens[:, 1:]), targets), Learning(10)
    steps = {}
    for number in 9, 10:
        view = StepView(number, student, lambda _: None)
        observer.before_step(view)
        for _ in range(2):  # micro-batches
            observer.before_forward(view, batch)
        observer.after_optimizer(view, steps.setdefault(number, {}), False)
    found = steps[10]
    assert student.training and steps[9].keys() == {"rollouts/learning_s"} and found["rollouts/learning_s"] > 0
    counted = weights[: 6 if top_k else 8][weights[: 6 if top_k else 8] < 9]
    mean, square = float(counted.mean()), float((counted**2).mean())
    assert found["rollouts/weight"] == pytest.approx(mean, rel=1e-5)
    assert found["rollouts/effective_samples"] == pytest.approx(mean**2 / square, rel=1e-5)
    assert found["rollouts/truncated"] == pytest.approx(float((counted > 2).double().mean()))


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
        ({"on_policy": True, "max_new_tokens": 0}, "--max-new-tokens '0' is neither a number of tokens"),
        ({"on_policy": True, "source": "mine"}, "--source"),
        ({"on_policy": True, "tensor_parallel": 2, "world_size": 2, "dry_run": True}, "use --parallel ddp in place of"),
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


@pytest.mark.parametrize(("given", "lengths"), [(64, (64, 64)), ("64", (64, 64)), ("4:12", (4, 12))])
def test_the_length_of_a_text_is_a_number_or_two(given, lengths):
    from kdtrain.config.values import configured

    options = {"student": "s", "out": "o", "teacher": "t", "data": "d", "on_policy": True, "max_new_tokens": given}
    assert configured(DistillConfig, None, options).plugins["rounds"].lengths == lengths
