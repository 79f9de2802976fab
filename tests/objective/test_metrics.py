import math
from dataclasses import replace

import pytest
import torch
from objective_reference import dense, problem, reference_kd, sparse

from kdtrain.objective import metrics
from kdtrain.objective.engine import matmul
from kdtrain.objective.metrics import BINS, Metrics, measure
from kdtrain.objective.targets import Supervision


def run(p, targets, part=slice(None), **more):
    piece = None if targets is None else targets[part]
    rows = Supervision(p.labels[part], p.mask[part], piece)
    return measure(p.hidden[part], p.head, rows, vocab_size=p.vocab_size, **more)


def exact(p):
    """Compute the true sums, straight from their definitions."""
    log_q, log_p, m = torch.log_softmax(p.logits(), -1), p.energies, p.mask
    rows = torch.arange(len(m))
    return {
        "tokens": m.sum(),
        "cross_entropy": -log_q[rows, p.labels][m].sum(),
        "correct": (log_q.argmax(-1) == p.labels)[m].sum(),
        "kl": reference_kd(p.logits(), log_p, 1.0, "dense")[m].sum(),
        "teacher_cross_entropy": -log_p[rows, p.labels][m].sum(),
        "agreement": (log_q.argmax(-1) == log_p.argmax(-1))[m].sum(),
        "acceptance": torch.minimum(log_p.exp(), log_q.exp()).sum(-1)[m].sum(),
    }


def reference_ece(p):
    confidence, top = torch.softmax(p.logits(), -1)[p.mask].max(-1)
    right = (top == p.labels[p.mask]).double()
    total = 0.0
    for b in range(BINS):
        inside = (confidence >= b / BINS) & ((confidence < (b + 1) / BINS) | (b == BINS - 1))
        if inside.any():
            total += inside.sum() * abs(right[inside].mean() - confidence[inside].mean())
    return (total / p.mask.sum()).item()


@pytest.mark.parametrize("softcap", [None, 3.0])
def test_dense_targets_give_the_exact_metrics(softcap):
    p = problem(n=100, bias=True, padding=4, softcap=softcap, seed=5)
    got = run(p, dense(p.energies, p.labels), chunk=13)
    for name, want in exact(p).items():
        assert getattr(got, name) == pytest.approx(want.item(), rel=1e-10), name
    assert got.ece() == pytest.approx(reference_ece(p), rel=1e-10)
    assert got.perplexity() == pytest.approx(math.exp(got.cross_entropy / got.tokens))
    assert sum(got.bin_count) == got.tokens and sum(got.bin_correct) == got.correct


def test_a_top_k_gives_bounds_and_the_rest_exactly():
    p = problem(n=100)
    truth, got = exact(p), run(p, sparse(p.energies, p.labels, top_k=4))
    for name in ("tokens", "cross_entropy", "correct", "teacher_cross_entropy", "agreement"):
        assert getattr(got, name) == pytest.approx(truth[name].item(), rel=1e-10), name
    assert got.kl < truth["kl"] and got.acceptance > truth["acceptance"]
    ghost = reference_kd(p.logits(), p.energies, 1.0, "ghost", sparse(p.energies, p.labels, top_k=4))
    assert got.kl == pytest.approx(ghost[p.mask].sum().item(), rel=1e-10)


def test_samples_give_an_estimate_of_kl_and_a_top_k_besides_the_rest():
    p = problem(n=100)
    for head in (0, 4):
        targets = sparse(p.energies, p.labels, top_k=head, num_samples=30)
        got = run(p, targets)
        estimate = reference_kd(p.logits(), p.energies, 1.0, "sampled", targets)
        assert got.kl == pytest.approx(estimate[p.mask].sum().item(), rel=1e-9)
        assert (got.agreement is None) == (got.acceptance is None) == (head == 0)
    assert got.agreement == pytest.approx(exact(p)["agreement"].item())


@pytest.mark.parametrize("knots", [(1.0,), (1.0, 0.5)])
def test_samples_alone_give_the_variance_of_their_estimate(knots):
    p = problem(n=40)
    targets = sparse(p.energies, p.labels, top_k=0, num_samples=30, knots=knots)
    assert run(p, targets.map(lambda _, x: x.float() if x.is_floating_point() else x)).kl_variance is not None
    each = torch.log_softmax(p.logits(), -1) - (0 if targets.only_at_one else p.energies)
    samples = [torch.repeat_interleave(*row) for row in zip(targets.ids, targets.counts.long(), strict=True)]
    total = sum(float(each[at, drawn].var()) / 30 for at, drawn in enumerate(samples) if p.mask[at])
    got = run(p, targets)
    assert got.kl_variance == pytest.approx(total, rel=1e-6)
    assert got.divergence_error() == pytest.approx(total**0.5 / int(p.mask.sum()), rel=1e-6)
    for other in (sparse(p.energies, p.labels, top_k=4, num_samples=30), dense(p.energies, p.labels), None):
        assert run(p, other).divergence_error() is None


def test_without_targets_only_the_student_is_measured():
    p = problem(n=50)
    got = run(p, None)
    assert got.cross_entropy == pytest.approx(exact(p)["cross_entropy"].item())
    assert (got.kl, got.agreement, got.acceptance, got.teacher_cross_entropy) == (None,) * 4
    assert got.mean("kl") is None


@pytest.mark.parametrize("kind", ["dense", "sparse", "headless", "none"])
def test_parts_add_up_to_the_whole(kind):
    p = problem(n=90)
    targets = {
        "dense": dense(p.energies, p.labels),
        "sparse": sparse(p.energies, p.labels, top_k=4),
        "headless": sparse(p.energies, p.labels, top_k=0, num_samples=9),
        "none": None,
    }[kind]
    whole = run(p, targets)
    parts = sum((run(p, targets, slice(i, i + 30), chunk=8) for i in range(0, 90, 30)), Metrics())
    assert parts.vector() == pytest.approx(whole.vector(), rel=1e-10, nan_ok=True)
    assert Metrics.from_vector(whole.vector()) == whole


@pytest.mark.parametrize("kind", ["dense", "sparse"])
def test_masked_rows_do_not_count_whatever_they_hold(kind):
    p = problem(n=60)
    targets = dense(p.energies, p.labels) if kind == "dense" else sparse(p.energies, p.labels, top_k=4)
    clean = run(p, targets)
    p.labels = p.labels.masked_fill(~p.mask, -100)
    spoiled = targets.map(
        lambda name, x: torch.where(p.mask if x.ndim == 1 else p.mask[:, None], x, 999 if name == "ids" else math.nan)
    )
    assert run(p, spoiled) == clean
    p.mask = torch.zeros_like(p.mask)
    nothing = run(p, spoiled)
    assert nothing.tokens == 0 and nothing.kl == 0 and math.isnan(nothing.ece())


def test_a_student_equal_to_its_teacher_is_always_accepted():
    p = problem(n=40)
    p.energies = torch.log_softmax(p.logits(), -1)
    for targets in (dense(p.energies, p.labels), sparse(p.energies, p.labels, top_k=4)):
        got = run(p, targets)
        assert got.mean("acceptance") == pytest.approx(1.0)
        assert got.mean("agreement") == 1.0
        assert got.mean("kl") == pytest.approx(0.0, abs=1e-10)
        assert got.teacher_cross_entropy == pytest.approx(got.cross_entropy)


class OnGpu(torch.Tensor):
    """A tensor of the CPU that claims to be on a GPU."""

    is_cuda, device = True, torch.device("cuda")


@pytest.mark.parametrize("kind", [torch.bfloat16, torch.float16, torch.float32])
def test_on_a_gpu_chunks_fit_it_and_the_head_is_cast_once_to_the_dtype_of_the_hidden_states(monkeypatch, kind):
    factors = []

    def product(hidden, weight):
        factors.append((len(hidden), hidden.dtype, weight.dtype, weight.data_ptr()))
        return hidden.as_subclass(torch.Tensor).float() @ weight.float().T

    p = problem(n=100, d=8).cast(torch.float32)
    expected = run(p, None)
    monkeypatch.setattr(matmul, "wide_product", product)
    monkeypatch.setattr(metrics, "chunk_rows", lambda *size: {(23, 8, kind, "cuda"): 64}[size])
    found = run(replace(p, hidden=p.hidden.to(kind).as_subclass(OnGpu)), None)
    assert [each[:3] for each in factors] == [(64, kind, kind), (36, kind, kind)]
    assert factors[0][3] == factors[1][3] and (factors[0][3] == p.head.weight.data_ptr()) == (kind == torch.float32)
    assert found.cross_entropy == pytest.approx(expected.cross_entropy, rel=1e-2)
