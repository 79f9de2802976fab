"""Alpha by withheld text: the rule, what it is computed from, and the loss at the alphas of a mixture's members."""

import math
from types import SimpleNamespace

import pytest
import torch
from objective_cases import targets_for
from objective_reference import problem
from test_online import teacher_of

from kdtrain.cache.format.manifest import Manifest
from kdtrain.config.commands import DistillConfig
from kdtrain.config.values import configured
from kdtrain.errors import UsageError
from kdtrain.objective.alpha import MeasuredAlpha, of_before
from kdtrain.objective.loss import DistillationLoss, distillation_loss
from kdtrain.objective.measured import MOST, Measured, grouped, summed
from kdtrain.objective.mixed import MixedTargets

KINDS = ["dense", "ghost", "sampled", "sampled-headless", "online"]
NEEDED = {"student": "s", "cache": "c", "out": "o"}


def of_kind(p, kind):
    return teacher_of(p) if kind == "online" else targets_for(p, kind)


def loss_of(p, loss, targets):
    return loss(p.hidden, p.head, p.labels, p.mask, targets, vocab_size=p.vocab_size, normalizer=11.0)


def told(student, teacher, divergence=1.0, posterior=0.4, tokens=8192):
    """Make the numbers of withheld text for a student with these losses, nats a token."""
    sums = [each * tokens for each in (student, teacher)]
    return Measured(tokens, *sums, divergence * tokens, 2.0 * tokens, 1.0 * tokens, posterior)


def batches(student, teacher=3.6, tokens=10):
    """Return the sums of training batches with these losses, nats a token."""
    return torch.tensor([[tokens * student, 0, tokens * teacher, tokens, 0, 0]])


def alpha_of(row, passes=1.0, trained=None):
    """Make an alpha that has seen this row of withheld text, and training batches with these losses before."""
    alpha = MeasuredAlpha()
    alpha.set_step(0, (passes,))
    if trained is not None:
        alpha.update(batches(*trained))
    alpha.observe([row])
    return alpha


@pytest.mark.parametrize(
    "row, passes, trained, expected",
    [
        (told(7.6, 3.6, 4.0), 1, None, 0.9),  # a teacher that knows the text
        (told(3.9, 3.6, 0.3), 1, (3.9, 3.6), 0.9),  # and one whose student is almost as good
        (told(4.6, 3.6, 2.0), 1, (4.6, 3.6), 0.5),
        (told(3.6, 3.6, 1.5), 1, (3.6, 3.6), 0.0),
        (told(2.0, 3.6, 1.5), 1, (2.0, 3.6), 0.0),
        (told(4.6, 3.6, 2.0), 1, (5.3, 3.6), 0.5),  # the average of the batches lags behind
        (told(3.6, 3.6, 1.5), 4, (3.6, 3.6), 0.3),  # labels that were read four times teach little
        (told(3.6, 3.6, 1.5), 1, (0.9, 3.6), 0.3),  # or of which a student knows three of four nats by heart
        (told(4.6, 3.6, 2.0), 1, (4.0, 3.0), 1 - 0.5 * 5 / 6),  # a teacher that knows a sixth of them by heart
        (told(4.6, 3.6, 2.0), 1, (6.0, 5.0), 0.5),  # training text that is harder
        (told(4.6, 3.6, math.nan), 1, (4.6, 3.6), 0.4),  # a divergence that is not known: the posterior alone
    ],
)
def test_alpha_is_what_fresh_labels_confirm_and_the_best_mixture_where_they_are_known_by_heart(
    row, passes, trained, expected
):
    alpha = alpha_of(row, passes, trained)
    assert alpha.value().tolist() == [pytest.approx(expected, abs=1e-6)]


def test_between_measurements_alpha_follows_the_batches_as_far_as_their_labels_are_fresh():
    for passes, expected in (1.0, 0.25 / 1.25), (4.0, 0.25 * 0.8125 / 1.8125 + 0.75 * 0.4):
        alpha = alpha_of(told(4.6, 3.6, 2.0), passes)  # D is above S - T by 1
        alpha.by_forward = False
        for student in (6.5, *[6.0] * 18, 5.5):  # they say where training was then
            alpha.update(batches(student))
        before = alpha.target().item()
        assert before == pytest.approx(0.5 if passes == 1 else 0.425)
        for _ in range(400):  # the averages come down by 0.75
            alpha.update(batches(5.25))
        assert alpha.value().item() == alpha.target().item() == pytest.approx(expected, abs=1e-6)
        alpha.observe([told(4.6, 3.6, 2.0)])  # which is measured then, not what was concluded
        assert alpha.target().item() == pytest.approx(before)


def test_ranks_of_a_loop_that_sums_nothing_between_measurements_have_one_alpha():
    ranks = [alpha_of(told(4.6, 3.6, 2.0)) for _ in range(2)]
    for each, student in zip(ranks, (6.0, 4.0), strict=True):
        for _ in range(30):
            each.update(batches(student, 2.0))
    assert ranks[0].value().item() == ranks[1].value().item() == pytest.approx(0.5)
    for each in ranks:  # their averages are made one first
        each.trained.copy_(sum(one.trained for one in ranks) / 2 if each is ranks[0] else ranks[0].trained)
        each.observe([told(4.6, 3.6, 2.0)])
        each.update(batches(3.0))
    assert ranks[0].value().item() == ranks[1].value().item() > 0.5


def test_of_a_text_drawn_from_the_teacher_alpha_stays_at_its_most_however_near_the_student_is():
    generator = torch.Generator().manual_seed(0)
    teacher_NV = torch.randn(200_000, 8, generator=generator).double().log_softmax(1)
    noise = torch.randn(teacher_NV.shape, generator=generator).double()
    for distance in (2.0, 0.3):
        student_NV = (teacher_NV + distance * noise).log_softmax(1)
        label_N = torch.multinomial(teacher_NV.exp(), 1, generator=generator)
        losses = [-each.gather(1, label_N).squeeze(1) for each in (student_NV, teacher_NV)]
        divergence = (teacher_NV.exp() * (teacher_NV - student_NV)).sum(1)
        row = summed(torch.stack([torch.ones(200_000).double(), *losses, divergence], 1), lambda each: each)
        assert row.differs and alpha_of(row).value().item() > 0.85


@pytest.mark.parametrize("shift", [-1.5, 0.3, 9.0, -9.0])
def test_the_posterior_is_the_best_weight_in_a_mixture_on_one_rank_and_on_two(shift):
    odds = torch.randn(5000, generator=torch.Generator().manual_seed(1)).double() * 3 + shift
    losses, grid = odds[:, None] * torch.tensor([0.0, 1.0, 0.0, 0.0]), torch.linspace(0, MOST, 901).double()
    best = float(grid[torch.log1p(grid[:, None] * odds.expm1()).mean(1).argmax()])
    assert summed(losses, lambda each: each).posterior == pytest.approx(best, abs=1e-3)
    assert summed(losses, lambda each: 2 * each).posterior == pytest.approx(best, abs=1e-3)  # two with the same text
    assert (0.001 < best < MOST - 0.001) == (abs(shift) < 2)


def test_a_step_moves_alpha_by_a_fiftieth_at_most_and_a_cast_does_not_round_it():
    for cast in (lambda each: each, lambda each: each.bfloat16(), lambda each: each.half()):
        alpha = cast(alpha_of(told(7.6, 3.6, 4.0)))
        alpha.observe([told(3.6, 3.6, 1.5)])
        seen = [alpha.update(torch.zeros(1, 6)) or alpha.value().item() for _ in range(60)]
        assert seen == [pytest.approx(max(0.9 - 0.02 * step, 0.0), abs=1e-9) for step in range(1, 61)]


@pytest.mark.parametrize(
    "row",
    [
        told(3.9, 3.6, 0.3, tokens=2000),
        told(3.6, 3.6, 1e-4)._replace(divergence_squares=2.0),
        told(3.6, 3.6, math.nan)._replace(evidence=3.0),
        summed(torch.tensor([[8192.0, math.nan, 2.0, 1.0]]).double(), lambda each: each),
        summed(torch.tensor([[8192.0, math.inf, 2.0, 1.0]]).double(), lambda each: each),
    ],
    ids=[
        "too few tokens",
        "a student that is its teacher",
        "the same across tokenizers",
        "a broken forward",
        "an infinite loss",
    ],
)
def test_what_shows_nothing_keeps_what_was(row):
    assert alpha_of(row).value().tolist() == [0.9]
    alpha = alpha_of(told(4.6, 3.6, 2.0))
    alpha.observe([row])
    alpha.update(torch.zeros(1, 6))
    assert alpha.value().tolist() == [pytest.approx(0.5)]


def test_each_member_has_its_own_passes_and_one_without_a_teacher_has_none():
    alpha = MeasuredAlpha([True, True, False])
    alpha.set_step(0, (1.0, 20.0, 3.0))
    alpha.observe([told(3.6, 3.6, 1.5)] * 3)
    assert alpha.value().tolist() == [0.0, pytest.approx(0.95 * 0.4), 0.0]


def test_alpha_begins_at_zero_beside_a_weak_teacher_until_the_next_measurement():
    alpha = alpha_of(told(7.6, 4.6, 3.5))
    assert alpha.value().item() > 0.8
    alpha.begin_at_zero()
    for row, expected in (None, 0.0), (told(5.6, 4.6, 2.0), 0.02):
        alpha.observe([row] if row else [told(0, 0, tokens=0)])
        alpha.update(torch.zeros(1, 6))
        assert alpha.value().item() == pytest.approx(expected)


def test_the_state_of_an_older_rule_is_what_a_run_resumes_from():
    before = {"alpha.means": torch.tensor([[4.0, 3.0, 2.0], [torch.inf] * 3])}
    alpha = MeasuredAlpha([True, True])
    alpha.load_state_dict({name.removeprefix("alpha."): each for name, each in of_before(before).items()})
    assert alpha.value().tolist() == [0.5, pytest.approx(0.9)] and not alpha.measured
    assert alpha.trained.tolist() == [[4.0, 3.0, 20.0], [0.0] * 3]
    alpha.observe([told(3.0, 3.0, 1.5)] * 2)
    assert alpha.value().tolist() == [0.5, pytest.approx(0.9)] and alpha.target().tolist() == [0.0, 0.0]


def test_across_tokenizers_what_lies_between_two_common_boundaries_is_compared():
    losses = torch.arange(1.0, 13).double()[:, None].expand(12, 3)
    mask, starts = torch.ones(12, dtype=torch.bool), torch.zeros(12, dtype=torch.bool)
    starts[[0, 1, 3, 7, 10]] = True  # two rows of six: tokens 6, 11 and the ends of the rows are in no whole group
    found = grouped(losses, mask, starts, 6)
    assert found[:, :3].tolist() == [[1, 1, 1], [2, 5, 5], [3, 27, 27]] and found[:, 3].isnan().all()
    mask[2] = False
    assert grouped(losses, mask, starts, 6)[:, 0].tolist() == [1, 3]
    assert grouped(losses, mask, None, 6).shape == (11, 4)


@pytest.mark.parametrize("kind", KINDS)
def test_the_loss_is_that_of_a_fixed_alpha_and_knows_the_teachers(kind):
    p = problem().cast(torch.float64)
    targets, loss = of_kind(p, kind), DistillationLoss(alpha="auto")
    loss.alpha.observe([told(3.9, 3.6, 1.2)])
    ours, alpha = loss_of(p, loss.eval(), targets), float(loss.alpha.value())
    fixed = distillation_loss(
        *(p.hidden, p.head, p.labels, p.mask, targets),
        **{"temperature": 1.0, "alpha": alpha, "vocab_size": p.vocab_size, "normalizer": 11.0},
    )
    assert ours.loss.item() == fixed.loss.item() and alpha == pytest.approx(0.25, rel=1e-6)
    expected = -targets.label_logprob[p.mask].double().sum().item()
    assert ours.teacher_ce.item() == fixed.teacher_ce.item() == pytest.approx(expected, rel=1e-6)
    sums = [each.item() for each in (ours.ce, ours.kd, ours.teacher_ce, p.mask.sum())]
    assert ours.members.tolist() == [[*sums, 0, 0]] and fixed.members.shape == (0, 6)


def test_a_loss_in_training_averages_what_it_sees_moves_and_stores_both():
    p = problem().cast(torch.float64)
    loss, targets = DistillationLoss(alpha="auto"), targets_for(p, "ghost")
    loss_of(p, loss.eval(), targets)
    assert not loss.alpha.trained.any()
    seen = loss_of(p, loss.train(), targets).members[0]
    assert loss.alpha.trained.tolist() == [[*((seen[at] / seen[3]).item() for at in (0, 2)), 1.0]]
    loss.alpha.observe([told(4.6, 3.6, 2.0)])
    loss.alpha.observe([told(3.6, 3.6, 2.0)])
    before = loss.alpha.value().item()
    loss_of(p, loss, targets)
    assert loss.alpha.value().item() == pytest.approx(before - 0.02)
    other = DistillationLoss(alpha="auto")
    other.load_state_dict(loss.state_dict())
    assert other.alpha.value().item() == loss.alpha.value().item()
    with pytest.raises(UsageError, match="no targets of a teacher, and --alpha is auto"):
        loss_of(p, loss, None)
    with pytest.raises(UsageError, match="--alpha 'high' is not"):
        DistillationLoss(alpha="high")


def test_each_member_of_a_mixture_has_the_alpha_of_its_own_teacher():
    p = problem().cast(torch.float64)
    size = len(p.labels) // 3
    parts = [slice(0, size), slice(size, 2 * size), slice(2 * size, len(p.labels))]
    kinds = [of_kind(p, "ghost")[parts[0]], of_kind(p, "dense")[parts[1]], None]
    counts = [each.stop - each.start for each in parts]
    mixed = MixedTargets(tuple(zip(counts, kinds, strict=True)), (1, 0, 2))
    loss = DistillationLoss(alpha=MeasuredAlpha([True, True, False]))
    loss.alpha.observe([told(4.0, 3.9, 0.5), told(3.7, 3.6, 0.2), told(0, 0, tokens=0)])
    ours, weights = loss_of(p, loss.eval(), mixed.where(p.mask)), loss.alpha.value().tolist()
    assert weights == [pytest.approx(0.2, rel=1e-5), pytest.approx(0.5, rel=1e-5), 0.0]
    total = 0.0
    for part, targets, member in zip(parts, kinds, (1, 0, 2), strict=True):
        rows = p.hidden[part], p.head, p.labels[part], p.mask[part], targets
        options = {"temperature": 1.0, "vocab_size": p.vocab_size, "normalizer": 11.0}
        alone = distillation_loss(*rows, **options, alpha=weights[member] if targets is not None else 0.0)
        total += alone.loss.item()
        found = [each.item() for each in (alone.ce, alone.kd, alone.teacher_ce, alone.tokens)]
        assert ours.members[member].tolist() == [*found, 0, 0]
    assert ours.loss.item() == pytest.approx(total, rel=1e-12)


def test_across_tokenizers_both_losses_are_of_the_same_bytes():
    alpha = MeasuredAlpha()
    alpha.update(torch.tensor([[400.0, 0, 190, 100, 500, 475]]))  # the teacher's labels are over 95 % of the bytes
    assert alpha.trained.tolist() == [[4.0, pytest.approx(2.0), 1.0]]


def test_alpha_auto_excludes_a_schedule_and_needs_the_label_of_an_import():
    given, alone = {"alpha": "auto", "alpha_schedule": "linear"}, {"alpha_schedule": "linear"}
    with pytest.raises(UsageError, match="--alpha auto has no effect with --alpha-schedule linear"):
        configured(DistillConfig, None, {**NEEDED, **given})
    begun = configured(DistillConfig, None, {**NEEDED, **alone})
    with pytest.raises(UsageError, match="--alpha auto has no effect with --alpha-schedule linear"):
        configured(DistillConfig, begun, {"alpha": "auto"})
    assert configured(DistillConfig, begun, {"alpha": "auto", "alpha_schedule": "constant"}).objective.alpha == "auto"
    found = [configured(DistillConfig, None, {**NEEDED, **each}).objective.alpha for each in ({}, alone)]
    assert found == ["auto", 0.9]
    one, some, word = ({"origin": {"labels_kept": each}} for each in (1.0, 0.7, "all"))
    known, unknown = [{}, one, {"parents": [one]}], [some, {"origin": {"x": 1}}, {"parents": [word]}]
    for fields, expected in [*((each, True) for each in known), *((each, False) for each in unknown)]:
        manifest = SimpleNamespace(**{"origin": None, "parents": None, **fields})
        assert Manifest.knows_labels.fget(manifest) is expected
