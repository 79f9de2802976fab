from dataclasses import dataclass

import pytest
import torch
from objective_reference import dense, problem, sparse

from kdtrain.errors import UsageError
from kdtrain.objective.loss import DistillationLoss
from kdtrain.objective.metrics import measure
from kdtrain.objective.statistics import Entries, Events, Statistics
from kdtrain.objective.targets import FLOOR, Comparison, DenseTargets, SparseTargets, Supervision, Targets, per_token

KNOTS = (1.0, 0.7, 0.45, 0.25)
F64 = torch.float64


def zipf(slope, vocab=2000, n=4):
    """Make Zipf-like log-probabilities [n,V], each row with its own noise, ids shuffled."""
    g = torch.Generator().manual_seed(int(10 * slope))
    energies = -slope * torch.log(torch.arange(1, vocab + 1, dtype=F64)) + 0.3 * torch.randn(
        n, vocab, generator=g, dtype=F64
    )
    return torch.log_softmax(energies[:, torch.randperm(vocab, generator=g)], -1)


def true_log_tail(energies, targets, beta):
    rest = energies.scatter(1, targets.ids[:, : targets.top_k], -torch.inf)
    return torch.logsumexp(beta * rest, -1)


@pytest.mark.parametrize("slope,bound", [(1.0, 1e-3), (1.5, 4e-3), (2.0, 8e-3)])
def test_the_tail_between_knots_is_right_on_zipf_shapes(slope, bound):
    energies = zipf(slope)
    targets = sparse(energies, torch.zeros(4, dtype=torch.int64), top_k=12, knots=KNOTS)
    for T in torch.linspace(1.0, 4.0, 25, dtype=F64):
        error = (targets.log_tail(1 / T) - true_log_tail(energies, targets, 1 / T)).abs().max()
        assert error < bound
        assert (targets.log_partition(1 / T) - torch.logsumexp(energies / T, -1)).abs().max() < bound


def test_the_tail_at_a_knot_is_the_stored_one_with_its_slope():
    energies = zipf(1.5)
    targets = sparse(energies, torch.zeros(4, dtype=torch.int64), top_k=12, knots=KNOTS)
    for i, knot in enumerate(KNOTS):
        beta = torch.tensor(knot, dtype=F64, requires_grad=True)
        value = targets.log_tail(beta)
        torch.testing.assert_close(value, targets.tail[:, i], rtol=1e-13, atol=1e-13)
        (slope,) = torch.autograd.grad(value.sum(), beta)
        assert slope.item() == pytest.approx(targets.tail[:, 4 + i].sum().item(), rel=1e-12)


@pytest.mark.parametrize("knots", [KNOTS, (1.0,)])
def test_the_tail_outside_the_knots_continues_along_its_end_slope(knots):
    energies = zipf(1.5)
    targets = sparse(energies, torch.zeros(4, dtype=torch.int64), top_k=12, knots=knots)
    last = len(knots) - 1
    torch.testing.assert_close(targets.log_tail(1.3), targets.tail[:, 0] + 0.3 * targets.tail[:, last + 1])
    below = targets.tail[:, last] - 0.05 * targets.tail[:, 2 * last + 1]
    torch.testing.assert_close(targets.log_tail(knots[-1] - 0.05), below)


@pytest.mark.parametrize("beta", [0.2, 0.25, 0.33, 0.7, 0.9, 1.0, 1.2])
def test_the_tail_is_differentiable_in_beta(beta):
    targets = sparse(zipf(1.5), torch.zeros(4, dtype=torch.int64), top_k=12, knots=KNOTS)
    point = torch.tensor(beta, dtype=F64, requires_grad=True)
    for function in (targets.log_tail, targets.log_partition, targets.top_logprobs):
        (slope,) = torch.autograd.grad(function(point).sum(), point)
        h = 1e-6
        expected = (function(beta + h).sum() - function(beta - h).sum()) / (2 * h)
        assert slope.item() == pytest.approx(expected.item(), rel=1e-4)


@pytest.mark.parametrize("top_k,num_samples", [(0, 20), (12, 0), (8, 24)])
def test_the_partition_is_one_at_temperature_one(top_k, num_samples):
    targets = sparse(zipf(1.5), torch.zeros(4, dtype=torch.int64), top_k, num_samples, dtype=torch.float32)
    assert targets.log_partition(torch.tensor(1.0)).abs().max() < 1e-6
    assert targets.top_logprobs(1.0).shape == (4, top_k)


def test_an_empty_tail_has_no_mass_and_no_nan():
    p = problem(vocab=2)
    targets = sparse(p.energies, p.labels, top_k=2)
    tail = torch.cat([torch.full((24, 5), FLOOR), torch.zeros(24, 5)], 1).double()
    targets = SparseTargets(**{**vars(targets), "tail": tail})
    beta = torch.tensor(0.5, dtype=F64, requires_grad=True)
    value = targets.log_partition(beta)
    torch.testing.assert_close(value, torch.logsumexp(0.5 * p.energies, -1))
    assert torch.isfinite(torch.autograd.grad(value.sum(), beta)[0])


def test_rows_are_selected_and_moved_together():
    p = problem()
    for targets in (sparse(p.energies, p.labels, 3, 9), dense(p.energies, p.labels)):
        part = targets[4:9]
        assert len(part) == 5 and type(part) is type(targets)
        assert all(len(x) == 5 for x in vars(part).values() if isinstance(x, torch.Tensor))
        assert len(targets.to("cpu")) == 24
        assert targets.to("meta").label_logprob.device.type == "meta"


def test_absent_entries_have_weight_zero():
    p = problem()
    targets = sparse(p.energies, p.labels, top_k=3, num_samples=9)
    absent = targets.ids >= p.vocab_size
    assert absent.any()
    cleaned = targets.without_absent(p.vocab_size)
    assert (cleaned.logprobs[absent] == FLOOR).all() and (cleaned.counts[absent] == 0).all()
    torch.testing.assert_close(cleaned.logprobs[~absent], targets.logprobs[~absent])


def test_targets_of_logits_leave_out_padding_and_hold_the_label():
    logits = torch.randn(5, 12, dtype=torch.bfloat16)
    targets = DenseTargets.from_logits(logits, torch.arange(5), vocab_size=10)
    assert targets.logprobs.shape == (5, 10) and targets.logprobs.dtype == torch.float32
    torch.testing.assert_close(targets.logprobs.exp().sum(-1), torch.ones(5))
    torch.testing.assert_close(targets.label_logprob, targets.logprobs[torch.arange(5), torch.arange(5)])


@pytest.mark.parametrize("rows", [3, 600])
def test_the_dense_partition_is_right_with_its_slope_in_chunks(rows, monkeypatch):
    monkeypatch.setattr("kdtrain.objective.targets._DENSE_CHUNK", 7 * 23)
    p = problem(n=rows)
    p.energies[:, 0] = -torch.inf
    beta = torch.tensor(0.6, dtype=F64, requires_grad=True)
    value = dense(p.energies, p.labels).log_partition(beta)
    exact = torch.logsumexp(beta * p.energies[:, 1:], -1)
    torch.testing.assert_close(value, exact)
    slope, expected = (torch.autograd.grad(x.sum(), beta)[0] for x in (value, exact))
    torch.testing.assert_close(slope, expected)


def test_a_mean_over_no_tokens_is_zero():
    assert per_token(torch.tensor(0.0), 0.0).item() == 0
    assert per_token(torch.tensor(6.0), torch.tensor(4)).item() == 1.5
    assert per_token(torch.tensor(6.0), 0.5).item() == 12


@dataclass(frozen=True)
class LabelTargets(Targets):
    """A kind of a user's own: the teacher's log p of the label, and one event for all other tokens."""

    label_logprob: torch.Tensor
    top_k = num_samples = 0
    width = None
    only_at_one = True
    has_top = False

    def __len__(self):
        return len(self.label_logprob)

    def where(self, keep_N):
        return self.map(lambda _, tensor: tensor.masked_fill(~keep_N, -1.0))

    def log_partition(self, beta, keep_N=None):
        return torch.zeros_like(self.label_logprob)

    def entries(self, labels_N, vocab_size):
        return Entries.of_labels(labels_N)

    def events(self, tail, statistics, beta):
        student_R = beta * statistics.label - statistics.lse_beta(beta)
        sides = [torch.stack([each, torch.log1p(-each.exp())], -1) for each in (self.label_logprob, student_R)]
        return Events(*sides)

    def compare(self, z_RV, labels_R, head):
        entries, tail_R = Entries.of_labels(labels_R).take(z_RV, head), head.log_sum_exp(z_RV)
        events = self.events("", Statistics(tail_R, tail_R, *entries.logits(z_RV.dtype), 0), 1.0)
        return Comparison(events, events, None)


@pytest.mark.parametrize("divergence", ["forward-kl", "reverse-kl", "tvd"])
def test_another_kind_of_targets_is_one_class_which_the_loss_and_the_metrics_take(divergence):
    p = problem(n=20).cast(F64)
    teacher_N = p.energies.gather(1, p.labels[:, None])[:, 0]
    spoiled = LabelTargets(teacher_N.masked_fill(~p.mask, torch.nan))
    arguments = (p.hidden, p.head, p.labels, p.mask, spoiled)
    loss = DistillationLoss(divergence=divergence, alpha=0.7)
    out = loss(*arguments, vocab_size=p.vocab_size, normalizer=11.0)
    student_N = p.logits().log_softmax(-1).gather(1, p.labels[:, None])[:, 0]
    p_N2, q_N2 = (torch.stack([each.exp(), 1 - each.exp()], -1) for each in (teacher_N, student_N))
    kinds = {"forward-kl": p_N2 * (p_N2 / q_N2).log(), "reverse-kl": q_N2 * (q_N2 / p_N2).log()}
    kd_N = kinds.get(divergence, 0.5 * (p_N2 - q_N2).abs()).sum(-1)
    expected = (0.3 * -student_N + 0.7 * kd_N)[p.mask].sum() / 11
    for got, want in zip(*(torch.autograd.grad(each, p.leaves()) for each in (out.loss, expected)), strict=True):
        torch.testing.assert_close(got, want)
    torch.testing.assert_close(out.loss, expected)
    found = measure(*arguments[:2], Supervision(*arguments[2:]), vocab_size=p.vocab_size)
    assert found.agreement is None and found.kl == pytest.approx(kinds["forward-kl"][p.mask].sum().item())
    with pytest.raises(UsageError, match="T = 1 only"):
        DistillationLoss(temperature=2.0)(*arguments, vocab_size=p.vocab_size, normalizer=11.0)
