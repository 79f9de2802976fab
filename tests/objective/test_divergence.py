from pathlib import Path

import pytest
import torch
from objective_reference import HeadPart, problem, reference_kd, sparse

from kdtrain.config.choices import DIVERGENCES, resolve_tail
from kdtrain.errors import UsageError
from kdtrain.objective.divergence import Divergence, forward_kl, jsd, logit_mse, parse, refuse, reverse_kl
from kdtrain.objective.loss import DistillationLoss
from kdtrain.objective.statistics import Events


def dense_events(z, energies, beta):
    """Return all tokens as events at `beta`."""
    return Events(torch.log_softmax(beta * energies, -1), torch.log_softmax(beta * z, -1))


@pytest.mark.parametrize("top_k", [0, 4])
@pytest.mark.parametrize("T", [1.0, 2.0, 4.0])
def test_sampled_targets_estimate_the_full_kl_and_its_gradient_without_bias(top_k, T):
    """The mean of 40,000 estimates is within 5 standard errors, 1 in 1.7 million by chance."""
    n, d, vocab = 1, 5, 11
    p = problem(n=n, d=d, vocab=vocab, peak=1.2)
    logits = p.logits().repeat(40_000, 1)
    energies = p.energies.repeat(40_000, 1)
    labels = torch.zeros(40_000, dtype=torch.int64)
    targets = sparse(energies, labels, top_k, num_samples=6, kept=6).without_absent(vocab)
    beta = torch.tensor(1 / T, dtype=torch.float64)
    leaf = logits.clone().requires_grad_()
    events = sampled_events_by_hand(targets, leaf, beta)
    values = forward_kl(events)
    (gradients,) = torch.autograd.grad(values.sum(), leaf)
    exact = p.logits().requires_grad_()
    truth = reference_kd(exact, p.energies, beta, "dense")
    (slope,) = torch.autograd.grad(truth.sum(), exact)
    assert_within_five_standard_errors(values[:, None], truth)
    assert_within_five_standard_errors(gradients, slope[0])


def sampled_events_by_hand(targets, logits, beta):
    """Apply the rule under test, with statistics that autograd follows back to the logits."""
    from kdtrain.objective.statistics import Statistics

    ids = targets.ids.clamp(max=logits.shape[1] - 1)
    rest = logits.scatter(1, ids[:, : targets.top_k], -1e30)
    statistics = Statistics(
        torch.logsumexp(rest, -1), torch.logsumexp(beta * rest, -1), logits.gather(1, ids), logits[:, 0], targets.top_k
    )
    return targets.events("sampled", statistics, beta)


def assert_within_five_standard_errors(samples, truth):
    error = samples.std(0) / samples.shape[0] ** 0.5
    assert ((samples.mean(0) - truth).abs() <= 5 * error + 1e-9).all()


def test_ghost_is_a_lower_bound_of_the_full_kl():
    p = problem(n=200)
    targets = sparse(p.energies, p.labels, top_k=4)
    one = torch.ones((), dtype=torch.float64)
    ghost = forward_kl(targets.events("ghost", targets.statistics(p.logits(), p.labels, HeadPart()), one))
    full = reference_kd(p.logits(), p.energies, 1.0, "dense")
    assert (ghost <= full + 1e-12).all() and (ghost >= 0).all()


def test_the_tail_of_a_likely_top_k_keeps_its_digits():
    """log(1 - sum q) is off by 40 % at a tail of e^-12 and gone at e^-17; the tail's own sum is not."""
    vocab = 50
    logits = torch.zeros(3, vocab)
    logits[:, 0] = torch.tensor([12.0, 17.0, 40.0])
    p = problem(n=3, vocab=vocab)
    targets = sparse(torch.log_softmax(logits.double(), -1), p.labels, top_k=1, dtype=torch.float32)
    statistics = targets.statistics(logits.clone(), p.labels, HeadPart())
    expected = torch.log_softmax(logits.double(), -1)[:, 1:].logsumexp(-1)
    torch.testing.assert_close((statistics.tail - statistics.lse).double(), expected, rtol=1e-6, atol=4e-6)


@pytest.mark.parametrize(
    "tail,kind,message",
    [
        *((tail, {"top_k": 8, "num_samples": 8}, "throw away the 8 samples") for tail in ("drop", "renormalize")),
        ("renormalize", {"top_k": 0}, "top-k of at least 2"),
        ("renormalize", {"top_k": 1}, "top-k of at least 2"),
        ("ghost", {"top_k": 0}, "top-k of at least 1"),
        ("drop", {"top_k": 0}, "top-k of at least 1"),
        ("sampled", {"top_k": 8}, "needs a cache with samples"),
        ("control-variate", {"top_k": 8}, "needs a cache with samples"),
        ("control-variate", {"top_k": 0, "num_samples": 8}, "top-k of at least 1.* with --top-k and --num-samples"),
        ("control-variate", {"dense": True}, "nothing for dense"),
        ("drop", {"dense": True}, "nothing for dense"),
        ("gost", {"top_k": 8}, "perhaps you meant 'ghost'"),
    ],
)
def test_an_impossible_combination_is_refused_in_one_line(tail, kind, message):
    with pytest.raises(UsageError, match=message) as raised:
        refuse("forward-kl", tail, **kind)
    assert "\n" not in str(raised.value)


SAMPLED, ALL_LOGITS = (
    "cannot be computed from sampled targets; use forward-kl",
    r"use .*tvd, or a dense cache \(cache-teach",
)


@pytest.mark.parametrize(
    "divergence, kind, message",
    [
        *((name, {"top_k": 8, "num_samples": 24}, SAMPLED) for name in DIVERGENCES.builtin if name != "forward-kl"),
        ("logit-mse", {"top_k": 8}, ALL_LOGITS),
        ("foward-kl", {"top_k": 8}, "perhaps you meant 'forward-kl'"),
    ],
)
def test_targets_that_a_divergence_does_not_take_are_refused(divergence, kind, message):
    for tail in ("ghost", "control-variate") if "num_samples" in kind else ("ghost",):
        with pytest.raises(UsageError, match=message):
            refuse(divergence, tail, **kind)


@pytest.mark.parametrize("wrong", [{"divergence": "foward-kl"}, {"divergence": "jsd:2"}, {"tail": "gost"}], ids=str)
def test_a_loss_with_unknown_parts_is_refused(wrong):
    with pytest.raises(UsageError, match=r"--(divergence|tail) "):
        DistillationLoss(**wrong)


def test_a_possible_combination_is_not_refused():
    for kind in ({"top_k": 12}, {"top_k": 0, "num_samples": 50}, {"top_k": 8, "num_samples": 24}, {"dense": True}):
        refuse("forward-kl", "ghost", **kind)
    refuse("forward-kl", "sampled", top_k=0, num_samples=50)
    refuse("logit-mse", "ghost", dense=True)
    assert [resolve_tail("ghost", num_samples=number) for number in (8, 0)] == ["sampled", "ghost"]
    refuse("forward-kl", "control-variate", top_k=8, num_samples=24)
    refuse("forward-kl", "drop", top_k=1)
    refuse("forward-kl", "renormalize", top_k=2)


def test_the_number_of_a_divergence_follows_its_name():
    assert [parse(text) for text in ("jsd:0.3", "skew-kl:.25", "jsd", "skew-kl", "skew-reverse-kl", "forward-kl")] == [
        *(("jsd", 0.3), ("skew-kl", 0.25), ("jsd", 0.5), ("skew-kl", 0.1), ("skew-reverse-kl", 0.1)),
        ("forward-kl", 0.0),
    ]


@pytest.mark.parametrize("number", ["0", "1", "-0.1", "nan", "inf", "x", "", "0.3:0.4"])
def test_a_number_that_is_not_between_0_and_1_is_refused(number):
    with pytest.raises(UsageError, match=f"--divergence jsd:{number}: '{number}' is not a number between 0 and 1"):
        parse(f"jsd:{number}")
    with pytest.raises(UsageError, match="--divergence forward-kl takes no number"):
        parse(f"forward-kl:{number or 0.3}")


def test_jsd_goes_to_forward_and_reverse_kl_at_its_ends():
    p = problem().cast(torch.float64)
    events = dense_events(p.logits().detach(), p.energies, 0.5)
    torch.testing.assert_close(jsd(events, 1e-5) / 1e-5, forward_kl(events), rtol=1e-3, atol=1e-4)
    torch.testing.assert_close(jsd(events, 1 - 1e-5) / 1e-5, reverse_kl(events), rtol=1e-3, atol=1e-4)


def test_logit_mse_is_that_of_centred_logits_and_the_loss_does_not_depend_on_t():
    """T^2 KL goes to half of it as T grows (Hinton et al. 2015, section 2.1)."""
    p = problem().cast(torch.float64)
    z, e = p.logits().detach(), p.energies
    centred = (z - z.mean(-1, keepdim=True)) - (e - e.mean(-1, keepdim=True))
    for T in (1.0, 3.0):
        torch.testing.assert_close(T**2 * logit_mse(dense_events(z, e, 1 / T)), (centred**2).mean(-1))
    torch.testing.assert_close(1e6 * forward_kl(dense_events(z, e, 1e-3)), (centred**2).mean(-1) / 2, rtol=2e-2, atol=0)


def test_logit_mse_ignores_tokens_that_either_side_excludes():
    p = problem().cast(torch.float64)
    z, e = p.logits().detach(), p.energies.clone()
    expected = logit_mse(dense_events(z[:, :20], e[:, :20], 1.0))
    z[:, 20], e[:, 21:] = -1e30, -1e4
    torch.testing.assert_close(logit_mse(dense_events(z, e, 1.0)), expected)


@pytest.mark.parametrize("nats, counts", [(-999.0, True), (-1001.0, False)])
def test_logit_mse_takes_a_token_below_1000_nats_for_an_excluded_one_as_its_documents_say(nats, counts):
    log_p = torch.full((1, 5), -1.6)
    log_q = torch.tensor([[-1.5, -1.6, -1.7, -1.5, nats]], requires_grad=True)
    logit_mse(Events(log_p, log_q)).sum().backward()
    assert bool(log_q.grad[0, 4] != 0) == counts
    assert "-1,000 nats" in logit_mse.__doc__
    assert "below -1,000 nats" in (Path(__file__).parents[2] / "docs/objective.md").read_text().replace("\n", " ")


@pytest.mark.parametrize("of, returned", [(lambda *_: torch.zeros(()), r"\[\]"), (lambda *_: 1.0, "a float")])
def test_a_divergence_that_returns_no_value_a_row_is_refused(monkeypatch, of, returned):
    monkeypatch.setitem(DIVERGENCES.entries, "mine", Divergence(of, frozenset({"sparse", "dense"})))
    for kind in ({"dense": True}, {"top_k": 4}):
        with pytest.raises(UsageError, match=rf"mine returns {returned} for 3 rows of events; it must return \[3\]"):
            refuse("mine", "ghost", **kind)


def test_a_divergence_that_cannot_take_a_few_events_is_left_to_its_first_use(monkeypatch):
    needs_many = Divergence(lambda events, _: events.teacher.topk(100).values.sum(-1), frozenset({"dense"}))
    monkeypatch.setitem(DIVERGENCES.entries, "many", needs_many)
    refuse("many", "ghost", dense=True)
