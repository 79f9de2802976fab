"""Hidden-state losses: values and gradients, masks, and pairs of layers."""

import math

import pytest
import torch

from kdtrain.errors import UsageError
from kdtrain.objective.hidden import HiddenLoss, layer_pairs

MASK_N = torch.tensor([True, False, True, True, False, True])
WIDTHS = [(3, 5), (4, 5)]


def states(dtype=torch.float32, seed=0):
    """Make hidden states of both sides of two pairs of layers, the student's as leaves."""
    g = torch.Generator().manual_seed(seed)
    student = [torch.randn(6, narrow, generator=g).to(dtype).requires_grad_() for narrow, _ in WIDTHS]
    return student, [torch.randn(6, wide, generator=g).to(dtype) for _, wide in WIDTHS]


def by_hand(kind, loss, student, teacher):
    """Compute the same loss in fp64, a token at a time."""
    total = torch.zeros((), dtype=torch.float64)
    for own, other, weight in zip(student, teacher, loss.projections, strict=True):
        for n in MASK_N.nonzero().flatten():
            a, b = weight.double() @ own[n].double(), other[n].double()
            gap = ((a - b) ** 2).mean() if kind == "mse" else 1 - a @ b / (a.norm() * b.norm())
            total = total + gap / len(WIDTHS)
    return total


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", ["mse", "cosine"])
def test_value_and_all_gradients_agree_with_a_sum_over_tokens_in_fp64(kind, dtype):
    loss = HiddenLoss(kind, WIDTHS)
    student, teacher = states(dtype)
    leaves = [*student, *loss.projections]
    ours, exact = loss(student, teacher, MASK_N), by_hand(kind, loss, student, teacher)
    assert ours.dtype == torch.float32
    assert ours.item() == pytest.approx(exact.item(), rel=1e-6)
    for got, want in zip(torch.autograd.grad(ours, leaves), torch.autograd.grad(exact, leaves), strict=True):
        bound = 2**-8 if got.dtype == torch.bfloat16 else 2e-6
        assert (got.double() - want.double()).norm() <= bound * want.double().norm()


@pytest.mark.parametrize("kind", ["mse", "cosine"])
def test_autocast_around_it_rounds_nothing(kind):
    loss, (student, teacher) = HiddenLoss(kind, WIDTHS), states()
    with torch.autocast("cpu", torch.bfloat16):
        inside = loss(student, teacher, MASK_N)
    assert inside.item() == loss(student, teacher, MASK_N).item()


@pytest.mark.parametrize("kind", ["mse", "cosine"])
@pytest.mark.parametrize("junk", [math.nan, math.inf])
def test_masked_tokens_do_not_count_whatever_the_teacher_has_there(kind, junk):
    loss, (student, teacher) = HiddenLoss(kind, WIDTHS), states()
    leaves = [*student, *loss.projections]
    expected = torch.autograd.grad(loss(student, teacher, MASK_N), leaves)
    spoiled = [each.masked_fill(~MASK_N[:, None], junk) for each in teacher]
    found = torch.autograd.grad(loss(student, spoiled, MASK_N), leaves)
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
    assert (found[0][~MASK_N] == 0).all()


@pytest.mark.parametrize("kind", ["mse", "cosine"])
def test_a_fully_masked_micro_batch_keeps_the_graph_connected_with_zero_gradients(kind):
    loss, (student, teacher) = HiddenLoss(kind, WIDTHS), states()
    value = loss(student, teacher, torch.zeros_like(MASK_N))
    assert value.item() == 0
    assert all((g == 0).all() for g in torch.autograd.grad(value, [*student, *loss.projections]))


@pytest.mark.parametrize("kind", ["mse", "cosine"])
def test_a_hidden_state_of_nothing_but_zeros_has_a_finite_gradient(kind):
    loss, (_, teacher) = HiddenLoss(kind, WIDTHS), states()
    student = [torch.zeros(6, narrow, requires_grad=True) for narrow, _ in WIDTHS]
    value = loss(student, teacher, MASK_N)
    assert all(torch.isfinite(g).all() for g in torch.autograd.grad(value, [*student, *loss.projections]))


@pytest.mark.parametrize("kind", ["mse", "cosine"])
def test_equal_layers_of_equal_width_have_no_distance_at_the_start(kind):
    state = torch.randn(6, 4, generator=torch.Generator().manual_seed(0))
    assert abs(HiddenLoss(kind, [(4, 4)])([state], [state], MASK_N).item()) < 1e-6


def test_cosine_does_not_see_the_size_and_mse_does():
    student, teacher = states()
    sizes = {}
    for kind in ("mse", "cosine"):
        loss = HiddenLoss(kind, WIDTHS)
        sizes[kind] = [loss(student, [factor * each for each in teacher], MASK_N).item() for factor in (1, 7)]
    assert sizes["cosine"][0] == pytest.approx(sizes["cosine"][1], rel=1e-5)
    assert sizes["mse"][1] > 5 * sizes["mse"][0]


def test_a_projection_is_orthonormal_fp32_the_same_for_a_seed_and_leaves_the_global_random_state_alone():
    torch.manual_seed(5)
    before = torch.get_rng_state()
    first, same, other = (HiddenLoss("mse", [(3, 8), (8, 3)], seed).projections for seed in (1, 1, 2))
    assert torch.equal(before, torch.get_rng_state())
    for weight, twin, foreign in zip(first, same, other, strict=True):
        assert weight.dtype == torch.float32 and torch.equal(weight, twin) and not torch.equal(weight, foreign)
        small = weight.T @ weight if weight.shape[0] > weight.shape[1] else weight @ weight.T
        torch.testing.assert_close(small, torch.eye(3), atol=1e-6, rtol=0)


@pytest.mark.parametrize(
    "wanted, student, teacher, pairs",
    [
        ("even", 4, 12, [(1, 3), (2, 6), (3, 9), (4, 12)]),
        ("even", 4, 6, [(1, 2), (2, 3), (3, 5), (4, 6)]),
        ("even", 6, 2, [(1, 1), (2, 1), (3, 1), (4, 1), (5, 2), (6, 2)]),
        ("even", 1, 6, [(1, 6)]),
        ("last", 4, 12, [(4, 12)]),
        ("0:0,4:12", 4, 12, [(0, 0), (4, 12)]),
    ],
)
def test_layers_are_paired_over_the_whole_depth_or_as_configured(wanted, student, teacher, pairs):
    assert layer_pairs(wanted, student, teacher) == pairs


@pytest.mark.parametrize("wanted", ["", "3", "1:2:3", "a:b", "1:2,", "-1:2", "5:1", "1:13"])
def test_an_impossible_mapping_is_refused_in_one_line(wanted):
    with pytest.raises(UsageError, match="--hidden-layers") as raised:
        layer_pairs(wanted, 4, 12)
    assert "\n" not in str(raised.value)
