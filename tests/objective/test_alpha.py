"""Alpha by the measured gap: the rule, what it is computed from, and the loss at the alphas of a mixture's members."""

from types import SimpleNamespace

import pytest
import torch
from objective_cases import targets_for
from objective_reference import problem
from test_online import teacher_of

from kdtrain.cache.format.manifest import Manifest
from kdtrain.config import ObjectiveConfig
from kdtrain.errors import UsageError
from kdtrain.objective.alpha import STEPS, GapAlpha
from kdtrain.objective.loss import DistillationLoss, distillation_loss
from kdtrain.objective.mixed import MixedTargets

KINDS = ["dense", "ghost", "sampled", "sampled-headless", "online"]


def of_kind(p, kind):
    return teacher_of(p) if kind == "online" else targets_for(p, kind)


def loss_of(p, loss, targets):
    return loss(p.hidden, p.head, p.labels, p.mask, targets, vocab_size=p.vocab_size, normalizer=11.0)


@pytest.mark.parametrize(
    "student, teacher, alpha",
    [(7.6, 3.6, 0.9), (4.6, 3.6, 0.6), (3.8, 3.6, 0.4), (3.6, 3.6, 0.35), (3.2, 3.6, 0.25), (2.0, 3.6, 0.1)],
)
def test_alpha_falls_as_the_student_overtakes_its_teacher(student, teacher, alpha):
    gap = GapAlpha()
    assert gap.weights().tolist() == [0.9]  # nothing is measured yet
    gap.update(torch.tensor([[student * 50, 0.0, teacher * 50, 50.0, 0, 0]]))
    assert gap.weights().tolist() == [pytest.approx(alpha)]


def test_the_averages_move_by_a_share_and_a_member_without_tokens_or_teacher_stays():
    gap = GapAlpha([True, True, False])
    first = torch.tensor([[40.0, 0, 30, 10, 0, 0], [0] * 6, [90, 0, 0, 10, 0, 0]], dtype=torch.float64)
    gap.update(first)
    gap.update(2 * first * torch.tensor([[1.0], [0], [1]]) / torch.tensor([1.0, 1, 1, 2, 1, 1]))
    assert gap.means[0].tolist() == [pytest.approx(4 + 4 / STEPS), pytest.approx(3 + 3 / STEPS)]
    assert gap.means[1:].isinf().all()
    assert gap.weights().tolist()[1:] == [0.9, 0.0]


@pytest.mark.parametrize("kind", KINDS)
def test_the_loss_is_that_of_a_fixed_alpha_and_knows_the_teachers(kind):
    p = problem().cast(torch.float64)
    targets, loss = of_kind(p, kind), DistillationLoss(alpha="auto")
    loss.gap.update(torch.tensor([[3.9, 0.0, 3.6, 1.0, 0, 0]]))
    ours, alpha = loss_of(p, loss.eval(), targets), float(loss.gap.weights())
    fixed = distillation_loss(
        *(p.hidden, p.head, p.labels, p.mask, targets),
        **{"temperature": 1.0, "alpha": alpha, "vocab_size": p.vocab_size, "normalizer": 11.0},
    )
    assert ours.loss.item() == fixed.loss.item() and alpha == pytest.approx(0.425)
    expected = -targets.label_logprob[p.mask].double().sum().item()
    assert ours.teacher_ce.item() == fixed.teacher_ce.item() == pytest.approx(expected, rel=1e-6)
    expected_ce = ours.teacher_ce.item()
    assert ours.members.tolist() == [[ours.ce.item(), ours.kd.item(), expected_ce, p.mask.sum().item(), 0, 0]]
    assert fixed.members.shape == (0, 6)


def test_a_loss_in_training_follows_what_it_sees_and_stores_it():
    p = problem().cast(torch.float64)
    loss, targets = DistillationLoss(alpha="auto"), targets_for(p, "ghost")
    loss_of(p, loss.eval(), targets)
    assert loss.gap.means.isinf().all()
    seen = loss_of(p, loss.train(), targets).members[0]
    assert loss.gap.means.tolist() == [[(seen[0] / seen[3]).item(), (seen[2] / seen[3]).item()]]
    other = DistillationLoss(alpha="auto")
    other.load_state_dict(loss.state_dict())
    assert other.gap.weights().item() == loss.gap.weights().item()
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
    loss = DistillationLoss(alpha="auto", taught=[True, True, False])
    loss.gap.update(torch.tensor([[4.0, 0, 3.9, 1, 0, 0], [3.5, 0, 3.7, 1, 0, 0], [0] * 6]))
    ours, weights = loss_of(p, loss.eval(), mixed.where(p.mask)), loss.gap.weights().tolist()
    assert weights == [pytest.approx(0.375), pytest.approx(0.3), 0.0]
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
    gap = GapAlpha()
    gap.update(torch.tensor([[400.0, 0, 190, 100, 500, 475]]))  # the teacher's labels are over 95 % of the bytes
    assert gap.means.tolist() == [[4.0, pytest.approx(2.0)]]


def test_alpha_auto_excludes_a_schedule_and_needs_the_label_of_an_import():
    with pytest.raises(UsageError, match="--alpha auto has no effect with --alpha-schedule linear"):
        ObjectiveConfig(alpha="auto", alpha_schedule="linear")
    known = [{}, {"origin": {"labels_kept": 1.0}}, {"parents": [{"origin": {"labels_kept": 1}}]}]
    unknown = [
        {"origin": {"labels_kept": 0.7}},
        {"origin": {"x": 1}},
        {"parents": [{"origin": {"labels_kept": "all"}}]},
    ]
    for fields, expected in [*((each, True) for each in known), *((each, False) for each in unknown)]:
        manifest = SimpleNamespace(**{"origin": None, "parents": None, **fields})
        assert Manifest.knows_labels.fget(manifest) is expected
