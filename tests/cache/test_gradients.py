"""The fidelity compares the gradients with which the objective trains."""

import pytest
import torch

from kdtrain.cache.build.fidelity import Angles, compare, sparse_gradients
from kdtrain.cache.format.codec import CodecSpec, decode, encode_sequences
from kdtrain.objective.loss import distillation_loss
from kdtrain.objective.targets import SparseTargets

VOCAB, SIZE = 60, 40
LABELS = torch.zeros(SIZE, dtype=torch.int64)


class Logits:
    """An output head that takes logits."""

    weight, bias, scale, softcap = None, None, 1.0, None


def _targets(top_k: int, num_samples: int) -> SparseTargets:
    logits = 2 * torch.randn(1, SIZE, VOCAB, generator=torch.Generator().manual_seed(0))
    spec = CodecSpec(kind="sparse", vocab_size=VOCAB, top_k=top_k, num_samples=num_samples)
    labels = torch.zeros(1, SIZE, dtype=torch.int64)
    targets = decode(encode_sequences(logits, labels, spec, seed=0, split="train", first=0), spec)
    assert isinstance(targets, SparseTargets)
    return targets


def _student() -> torch.Tensor:
    """Near enough to the teacher for a share of the control variate, far enough for its bounds."""
    teacher = 2 * torch.randn(1, SIZE, VOCAB, generator=torch.Generator().manual_seed(0))[0]
    return 0.8 * teacher + 0.7 * torch.randn(SIZE, VOCAB, generator=torch.Generator().manual_seed(1))


def _spread(targets: SparseTargets, z_NV: torch.Tensor, beta: float, rule: str) -> torch.Tensor:
    q_NV = (beta * z_NV).softmax(-1).double()
    found, ids_NK = sparse_gradients(targets, z_NV, LABELS, beta)
    scale_N, extra_NK = found[rule]
    return (scale_N[:, None] * q_NV).scatter_add(1, ids_NK, extra_NK)


@pytest.mark.parametrize("temperature", [1.0, 2.0, 4.0])
@pytest.mark.parametrize(
    "rule, top_k, num_samples",
    [
        ("ghost", 7, 0),
        ("drop", 7, 0),
        ("renormalize", 7, 0),
        ("sampled", 7, 12),
        ("sampled", 0, 12),
        ("control-variate", 7, 12),
    ],
)
def test_gradients_are_those_of_the_objective(rule: str, top_k: int, num_samples: int, temperature: float) -> None:
    targets, z_NV = _targets(top_k, num_samples), _student().requires_grad_()
    mask = torch.ones(SIZE, dtype=torch.bool)
    tail = "ghost" if rule == "sampled" else rule
    settings = {"temperature": temperature, "alpha": 1.0, "tail": tail, "vocab_size": VOCAB, "normalizer": 1.0}
    distillation_loss(z_NV, Logits(), LABELS, mask, targets, **settings).loss.backward()
    found = temperature * _spread(targets, z_NV.detach(), 1 / temperature, rule)
    assert z_NV.grad is not None
    assert (found - z_NV.grad).norm() < 1e-5 * z_NV.grad.norm()


def test_inner_products_of_the_short_form_are_those_of_the_whole_gradients() -> None:
    targets, z_NV = _targets(5, 9), _student()
    q_NV = z_NV.softmax(-1)
    full_NV = q_NV - torch.rand(SIZE, VOCAB, generator=torch.Generator().manual_seed(2)).softmax(-1)
    short, plain = Angles(), Angles()
    for part in (slice(0, 13), slice(13, SIZE)):
        few, ids_NK = sparse_gradients(targets[part], z_NV[part], LABELS[part], 1.0)
        short.add_full(full_NV[part])
        short.add_sparse(few, ids_NK, full_NV[part], q_NV[part])
    plain.add_full(full_NV)
    for rule in short.inner:
        plain.add(rule, full_NV, _spread(targets, z_NV, 1.0, rule))
    for rule, expected in plain.result().items():
        assert short.result()[rule] == pytest.approx(expected, rel=1e-4), rule


def test_an_angle_is_in_degrees_and_a_zero_gradient_has_none() -> None:
    assert compare(1.0, 1.0, 2.0) == pytest.approx((45.0, 2**0.5))
    assert compare(0.0, 1.0, 0.0) == (90.0, 0.0)
    assert compare(1.0 + 1e-15, 1.0, 1.0)[0] == 0.0
