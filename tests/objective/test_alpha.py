"""Alpha by the measured gap: the rule, what it is computed from, and the loss at the alphas of a mixture's members."""

from types import SimpleNamespace

import pytest
import torch
from objective_cases import targets_for
from objective_reference import problem
from test_online import teacher_of

from kdtrain.cache.format.manifest import Manifest
from kdtrain.config import DistillConfig
from kdtrain.config.values import configured
from kdtrain.errors import UsageError
from kdtrain.objective.alpha import STEPS, GapAlpha
from kdtrain.objective.loss import DistillationLoss, distillation_loss
from kdtrain.objective.mixed import MixedTargets

KINDS = ["dense", "ghost", "sampled", "sampled-headless", "online"]
NEEDED = {"student": "s", "cache": "c", "out": "o"}


def of_kind(p, kind):
    return teacher_of(p) if kind == "online" else targets_for(p, kind)


def loss_of(p, loss, targets):
    return loss(p.hidden, p.head, p.labels, p.mask, targets, vocab_size=p.vocab_size, normalizer=11.0)


@pytest.mark.parametrize(
    "student, teacher, divergence, alpha",
    [
        (7.6, 3.6, 4.0, 0.9),  # a teacher that knows the text
        (3.9, 3.6, 0.3, 0.9),  # and one whose student is almost as good
        (4.6, 3.6, 2.0, 0.5),
        (3.6, 3.6, 1.5, 0.0),
        (2.0, 3.6, 1.5, 0.0),
        (3.6, 3.6, 0.0, 0.9),  # the student is the teacher
        (3.7, 3.6, -0.01, 0.9),  # the estimate of a small divergence
        (3.5, 3.6, -0.01, 0.0),
    ],
)
def test_alpha_is_the_share_of_the_divergence_that_the_labels_confirm(student, teacher, divergence, alpha):
    gap = GapAlpha()
    assert gap.weights().tolist() == [0.9]  # nothing is measured yet
    gap.update(torch.tensor([[student * 50, 0.0, divergence * 50, teacher * 50, 50.0, 0, 0]]))
    assert gap.weights().tolist() == [pytest.approx(alpha)]


def test_of_a_text_drawn_from_the_teacher_alpha_stays_at_its_most_however_near_the_student_is():
    generator = torch.Generator().manual_seed(0)
    teacher_NV = torch.randn(200_000, 8, generator=generator).double().log_softmax(1)
    noise = torch.randn(teacher_NV.shape, generator=generator).double()
    for distance in (2.0, 0.3):
        student_NV = (teacher_NV + distance * noise).log_softmax(1)
        label_N = torch.multinomial(teacher_NV.exp(), 1, generator=generator)
        losses = [-each.gather(1, label_N).sum() for each in (student_NV, teacher_NV)]
        divergence = (teacher_NV.exp() * (teacher_NV - student_NV)).sum()
        gap = GapAlpha()
        gap.update(torch.stack([losses[0], divergence, divergence, losses[1], *torch.tensor([2e5, 0.0, 0.0])])[None])
        assert gap.weights().item() > 0.85


def test_the_averages_move_by_a_share_and_a_member_without_tokens_or_teacher_stays():
    gap = GapAlpha([True, True, False])
    first = torch.tensor([[40.0, 0, 5, 30, 10, 0, 0], [0] * 7, [90, 0, 0, 0, 10, 0, 0]], dtype=torch.float64)
    gap.update(first)
    gap.update(2 * first * torch.tensor([[1.0], [0], [1]]) / torch.tensor([1.0, 1, 1, 1, 2, 1, 1]))
    # the second step has as many tokens and twice the sums
    assert gap.means[0].tolist() == [pytest.approx(each + each / STEPS) for each in (4, 3, 0.5)]
    assert gap.means[1:].isinf().all()
    assert gap.weights().tolist()[1:] == [0.9, 0.0]
    before = gap.means.clone()
    gap.update(first * torch.nan)  # a step that training skips
    assert torch.equal(gap.means, before)


def test_at_another_temperature_the_divergence_is_that_at_1_and_another_divergence_has_a_fixed_alpha():
    p = problem().cast(torch.float64)
    output = loss_of(p, DistillationLoss(temperature=2.0).eval(), of_kind(p, "dense"))
    assert output.members[0, 1:3].tolist() == [output.kd.item(), output.kd_at_one.item()]
    assert output.kd.item() != pytest.approx(output.kd_at_one.item(), rel=0.1)
    other = DistillationLoss(divergence="jsd:0.3")
    assert other.gap is None and other.alpha == 0.9


@pytest.mark.parametrize("kind", KINDS)
def test_the_loss_is_that_of_a_fixed_alpha_and_knows_the_teachers(kind):
    p = problem().cast(torch.float64)
    targets, loss = of_kind(p, kind), DistillationLoss(alpha="auto")
    loss.gap.update(torch.tensor([[3.9, 0.0, 1.2, 3.6, 1.0, 0, 0]]))
    ours, alpha = loss_of(p, loss.eval(), targets), float(loss.gap.weights())
    fixed = distillation_loss(
        *(p.hidden, p.head, p.labels, p.mask, targets),
        **{"temperature": 1.0, "alpha": alpha, "vocab_size": p.vocab_size, "normalizer": 11.0},
    )
    assert ours.loss.item() == fixed.loss.item() and alpha == pytest.approx(0.25, rel=1e-6)
    expected = -targets.label_logprob[p.mask].double().sum().item()
    assert ours.teacher_ce.item() == fixed.teacher_ce.item() == pytest.approx(expected, rel=1e-6)
    sums = [each.item() for each in (ours.ce, ours.kd, ours.kd_at_one, ours.teacher_ce, p.mask.sum())]
    assert ours.members.tolist() == [[*sums, 0, 0]] and fixed.members.shape == (0, 7)


def test_a_loss_in_training_follows_what_it_sees_and_stores_it():
    p = problem().cast(torch.float64)
    loss, targets = DistillationLoss(alpha="auto"), targets_for(p, "ghost")
    loss_of(p, loss.eval(), targets)
    assert loss.gap.means.isinf().all()
    seen = loss_of(p, loss.train(), targets).members[0]
    assert loss.gap.means.tolist() == [[(seen[at] / seen[4]).item() for at in (0, 3, 2)]]
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
    loss.gap.update(torch.tensor([[4.0, 0, 0.5, 3.9, 1, 0, 0], [3.7, 0, 0.2, 3.6, 1, 0, 0], [0] * 7]))
    ours, weights = loss_of(p, loss.eval(), mixed.where(p.mask)), loss.gap.weights().tolist()
    assert weights == [pytest.approx(0.2, rel=1e-5), pytest.approx(0.5, rel=1e-5), 0.0]
    total = 0.0
    for part, targets, member in zip(parts, kinds, (1, 0, 2), strict=True):
        rows = p.hidden[part], p.head, p.labels[part], p.mask[part], targets
        options = {"temperature": 1.0, "vocab_size": p.vocab_size, "normalizer": 11.0}
        alone = distillation_loss(*rows, **options, alpha=weights[member] if targets is not None else 0.0)
        total += alone.loss.item()
        found = [each.item() for each in (alone.ce, alone.kd, alone.kd_at_one, alone.teacher_ce, alone.tokens)]
        assert ours.members[member].tolist() == [*found, 0, 0]
    assert ours.loss.item() == pytest.approx(total, rel=1e-12)


def test_across_tokenizers_both_losses_are_of_the_same_bytes():
    gap = GapAlpha()
    gap.update(torch.tensor([[400.0, 0, 150, 190, 100, 500, 475]]))  # the teacher's labels are over 95 % of the bytes
    assert gap.means.tolist() == [[4.0, pytest.approx(2.0), 1.5]]


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
    known = [{}, {"origin": {"labels_kept": 1.0}}, {"parents": [{"origin": {"labels_kept": 1}}]}]
    unknown = [
        {"origin": {"labels_kept": 0.7}},
        {"origin": {"x": 1}},
        {"parents": [{"origin": {"labels_kept": "all"}}]},
    ]
    for fields, expected in [*((each, True) for each in known), *((each, False) for each in unknown)]:
        manifest = SimpleNamespace(**{"origin": None, "parents": None, **fields})
        assert Manifest.knows_labels.fget(manifest) is expected
