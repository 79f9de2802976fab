"""A returned buffer is reused, by one tensor at a time."""

import pytest
import torch

from kdtrain.models.output_head import HeadPart
from kdtrain.objective.engine import matmul
from kdtrain.objective.loss import distillation_loss


@pytest.fixture(autouse=True)
def nothing_idle():
    matmul.release_buffers()
    yield
    matmul.release_buffers()


def test_the_memory_of_other_devices_is_not_reused():
    tensor = matmul.take_buffer("mine", 3, 1 << 20, dtype=torch.float32, device="meta")
    matmul.return_buffer("mine", tensor)
    assert matmul._idle == {}


def test_a_returned_buffer_is_reused_for_any_shape_and_dtype_that_it_is_large_enough_for():
    first = matmul.take_buffer("mine", 4, 100, dtype=torch.float32)
    where = first.data_ptr()
    matmul.return_buffer("mine", first)
    again = matmul.take_buffer("mine", 2, 100, dtype=torch.float64)
    assert again.data_ptr() == where and again.shape == (2, 100) and again.is_contiguous()
    matmul.return_buffer("mine", again)
    assert matmul.take_buffer("mine", 8, 100, dtype=torch.float32).data_ptr() != where
    assert matmul._idle == {"mine": []}  # the small one is freed


def test_a_buffer_in_use_is_not_given_to_another():
    first = matmul.take_buffer("mine", 100, dtype=torch.float32)
    second = matmul.take_buffer("mine", 200, dtype=torch.float32)
    assert first.data_ptr() != second.data_ptr()
    matmul.return_buffer("mine", second)
    matmul.return_buffer("mine", first)
    assert matmul.take_buffer("other", 100, dtype=torch.float32).data_ptr() not in (first.data_ptr(), second.data_ptr())
    assert matmul.take_buffer("mine", 100, dtype=torch.float32).data_ptr() == first.data_ptr()
    assert matmul.take_buffer("mine", 100, dtype=torch.float32).data_ptr() == second.data_ptr()


@pytest.mark.parametrize("kind", [torch.float32, torch.bfloat16])
def test_two_losses_with_later_backwards_do_not_share_memory(kind):
    g = torch.Generator().manual_seed(0)
    weight = torch.randn(300, 16, generator=g).to(kind).requires_grad_()
    hiddens = [torch.randn(40, 16, generator=g).to(kind).requires_grad_() for _ in range(2)]

    def loss(hidden):
        labels, mask = torch.arange(40), torch.ones(40, dtype=torch.bool)
        head = HeadPart(weight)
        return distillation_loss(
            *(hidden, head, labels, mask, None), temperature=1.0, alpha=0.0, vocab_size=300, normalizer=40.0
        ).loss

    alone = []
    for hidden in hiddens:
        alone.append(torch.autograd.grad(loss(hidden), [weight, hidden]))
    first, second = loss(hiddens[0]), loss(hiddens[1])
    together = [torch.autograd.grad(first, [weight, hiddens[0]]), torch.autograd.grad(second, [weight, hiddens[1]])]
    for ours, theirs in zip(together, alone, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))
