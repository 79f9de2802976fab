import math

import pytest
import torch
from objective_reference import HeadPart, dense, problem, sparse

from kdtrain.errors import UsageError
from kdtrain.objective.loss import DistillationLoss, distillation_loss
from kdtrain.objective.temperature import LikelihoodTemperature, build_temperature

STARTS = (0.7, 1.0, 2.0, 3.9)


def build(mode, start=2.0, **more):
    return build_temperature(mode, start=start, minimum=0.67, maximum=4.0, **more)


def calibrated_labels(true_temperature, n=4000, vocab=20, seed=0):
    """Make energies of a teacher, and labels drawn from it at `true_temperature`."""
    g = torch.Generator().manual_seed(seed)
    energies = torch.log_softmax(3.0 * torch.randn(n, vocab, generator=g), -1)
    labels = torch.multinomial(torch.softmax(energies / true_temperature, -1), 1, generator=g).squeeze(1)
    return energies, labels


def learn(temperature, loss, steps=200, lr=0.1):
    optimizer = torch.optim.Adam(temperature.parameters(), lr=lr)
    for step in range(steps):
        temperature.set_step(step)
        optimizer.zero_grad()
        loss(temperature).backward()
        optimizer.step()
    return temperature.value().item()


def kd_problem(n=60, vocab=20):
    """Make a Zipf-like teacher and a student that errs most where the teacher is sure: T^2 KL has its hump at 1.3."""
    g = torch.Generator().manual_seed(0)
    rank = torch.arange(1, vocab + 1, dtype=torch.float64)
    energies = torch.log_softmax(-2.0 * torch.log(rank) + 0.3 * torch.randn(n, vocab, generator=g), -1)
    hidden = (energies + torch.randn(n, vocab, generator=g) * torch.exp(energies / 2)).float()
    p = problem(n=n, vocab=vocab)
    targets = dense(energies, p.labels, torch.float32)

    def loss(temperature):
        return distillation_loss(
            hidden, HeadPart(None), p.labels, p.mask, targets, temperature=temperature.value(), alpha=1.0,
            vocab_size=vocab, normalizer=p.mask.sum(),
        ).loss  # fmt: skip

    return loss


def peak_of(loss):
    grid = torch.linspace(math.log(0.67), math.log(4.0), 200).exp()
    values = torch.stack([loss(build("fixed", T.item())) for T in grid])
    return grid[values.argmax()].item()


def test_fixed_is_fixed_and_has_nothing_to_learn():
    temperature = build("fixed", 2.5)
    temperature.set_step(100)
    assert temperature.value().item() == 2.5 and temperature.value().dtype == torch.float32
    assert not list(temperature.parameters()) and not temperature.state_dict()
    assert temperature.auxiliary_loss(None, torch.ones(3).bool(), 3) is None
    assert temperature.at_bound() is None and temperature.log_gradient() is None


@pytest.mark.parametrize("mode, quarter", [("schedule", 3.25), ("cosine", 2.5 + 1.5 * math.cos(math.pi / 4))])
def test_a_schedule_is_a_pure_function_of_the_step(mode, quarter):
    temperature = build(mode, 4.0, end=1.0, total_steps=100)
    for step, expected in ((1000, 1.0), (0, 4.0), (25, quarter), (50, 2.5), (100, 1.0)):
        temperature.set_step(step)
        assert temperature.value().item() == pytest.approx(expected)


@pytest.mark.parametrize("bounds", [(1.0, 1.0), (2.0, 1.0), (0.0, 1.0)])
def test_a_learned_temperature_needs_room(bounds):
    with pytest.raises(UsageError, match=r"a temperature cannot be learned between .* build the cache with --top-k"):
        LikelihoodTemperature(start=1.0, bounds=bounds)


@pytest.mark.parametrize(
    "temperature", [2.0, LikelihoodTemperature(start=1.5, bounds=(1.0, 4.0))], ids=["2", "learned"]
)
def test_counts_of_samples_are_refused_at_another_temperature_than_1(temperature):
    p = problem()
    targets = sparse(p.energies, p.labels, top_k=0, num_samples=9, knots=(1.0,))
    arguments = (p.hidden, p.head, p.labels, p.mask, targets)
    with pytest.raises(UsageError, match="samples without a top-k are right at T = 1 only"):
        DistillationLoss(temperature=temperature)(*arguments, vocab_size=p.vocab_size, normalizer=1.0)
    assert DistillationLoss()(*arguments, vocab_size=p.vocab_size, normalizer=1.0).loss.isfinite()


@pytest.mark.parametrize("mode", ["likelihood", "adversarial", "minimize"])
def test_a_learned_temperature_is_one_fp32_parameter_inside_its_bounds(mode):
    temperature = build(mode, 2.0)
    assert [(k, v.dtype, v.shape) for k, v in temperature.state_dict().items()] == [
        ("theta", torch.float32, torch.Size([]))
    ]
    assert temperature.value().item() == pytest.approx(2.0, rel=1e-6)
    for start in (0.01, 0.67, 4.0, 100.0):
        assert 0.67 < build(mode, start).value().item() < 4.0
        assert build(mode, start).at_bound() is None
    for theta in (-1e4, 1e4):
        temperature.theta.data.fill_(theta)
        assert 0.67 * (1 - 1e-6) <= temperature.value().item() <= 4.0 * (1 + 1e-6)


@pytest.mark.parametrize("start", STARTS)
@pytest.mark.parametrize("true", [1.0, 1.8])
@pytest.mark.parametrize("kind", ["dense", "sparse"])
def test_likelihood_finds_the_teachers_calibration_from_any_start(kind, true, start):
    energies, labels = calibrated_labels(true)
    if kind == "dense":
        targets = dense(energies, labels)
    else:
        targets = sparse(energies.double(), labels, top_k=8, dtype=torch.float32)
    mask = torch.rand(len(labels), generator=torch.Generator().manual_seed(2)) > 0.1
    temperature = build("likelihood", start)
    final = learn(temperature, lambda t: t.auxiliary_loss(targets, mask, mask.sum()), steps=80)
    # 3,600 labels fix the temperature to about 2 %.
    assert final == pytest.approx(true, rel=0.08)
    assert not temperature.value().requires_grad


@pytest.mark.parametrize("kind", ["dense", "sparse"])
def test_the_likelihood_loss_is_the_teachers_cross_entropy_over_unmasked_rows(kind):
    p = problem()
    targets = dense(p.energies, p.labels) if kind == "dense" else sparse(p.energies, p.labels, top_k=5)
    spoiled = targets.map(
        lambda name, x: x if name == "ids" else torch.where(p.mask if x.ndim == 1 else p.mask[:, None], x, torch.nan)
    )
    temperature = build("likelihood", 2.0)
    loss = temperature.auxiliary_loss(spoiled, p.mask, p.mask.sum())
    expected = torch.nn.functional.cross_entropy(p.energies[p.mask] / 2.0, p.labels[p.mask])
    assert loss.item() == pytest.approx(expected.item(), rel=1e-6)
    loss.backward()
    h = 1e-4
    above, below = (
        torch.nn.functional.cross_entropy(p.energies[p.mask] / (2.0 * math.exp(s)), p.labels[p.mask]) for s in (h, -h)
    )
    assert temperature.log_gradient().item() == pytest.approx((above - below).item() / (2 * h), rel=1e-4)
    nothing = temperature.auxiliary_loss(spoiled, torch.zeros_like(p.mask), 7.0)
    assert nothing.item() == 0 and nothing.requires_grad


@pytest.mark.parametrize("start", STARTS)
def test_adversarial_climbs_to_the_hump_inside_the_bounds(start):
    loss = kd_problem()
    top = peak_of(loss)
    assert 1.0 < top < 2.0
    temperature = build("adversarial", start, total_steps=200)
    assert learn(temperature, loss) == pytest.approx(top, rel=0.05)
    assert temperature.at_bound() is None


def test_the_reversal_grows_from_nothing_to_full_strength():
    temperature = build("adversarial", 2.0, total_steps=1000)
    gradients = []
    for step in (0, 50, 100, 900):
        temperature.set_step(step)
        (g,) = torch.autograd.grad(temperature.value(), temperature.theta)
        gradients.append(g.item())
    plain = torch.autograd.grad(temperature.temperature(), temperature.theta)[0].item()
    assert gradients == pytest.approx([0.0, -0.5 * plain, -plain, -plain], abs=1e-6)
    assert build("adversarial", 2.0, total_steps=1000, ramp_steps=0).strength() == 1.0


def test_minimize_is_bistable_and_reports_when_it_is_on_a_bound():
    loss = kd_problem()
    ends = {}
    for start in (0.7, 3.9):
        temperature = build("minimize", start)
        assert temperature.at_bound() is None
        learn(temperature, loss, steps=300, lr=0.2)
        ends[start] = temperature.at_bound()
    assert ends == {0.7: "minimum", 3.9: "maximum"}


@pytest.mark.parametrize(
    "settings,message",
    [
        ({"mode": "learn"}, "--temperature-mode learn is unknown"),
        ({"mode": "fixed", "start": 0.0}, "above 0"),
        ({"mode": "fixed", "start": math.nan}, "above 0"),
        ({"mode": "minimize", "minimum": 2.0, "maximum": 2.0}, "cannot be learned between"),
        ({"mode": "likelihood", "minimum": 0.0}, "cannot be learned between"),
    ],
)
def test_impossible_temperatures_are_refused(settings, message):
    with pytest.raises(UsageError, match=message):
        build_temperature(**{"start": 2.0, "minimum": 0.67, "maximum": 4.0, **settings})
