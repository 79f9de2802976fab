"""Log-probabilities of an inference server become a cache that is right at T = 1."""

import numpy as np
import pytest
import torch

from kdtrain.cache.format.codec import CodecSpec, decode, keep
from kdtrain.errors import UsageError
from kdtrain.objective.targets import SparseTargets


def _kept(vocab_size: int, top_k: int) -> tuple[torch.Tensor, SparseTargets, np.ndarray]:
    energy = (2 * torch.randn(30, vocab_size, generator=torch.Generator().manual_seed(0))).double().log_softmax(-1)
    top = energy.topk(top_k)
    labels = np.where(np.arange(30) % 2, np.nan, top.values[:, 0].numpy())
    spec = CodecSpec(kind="sparse", vocab_size=vocab_size, top_k=top_k)
    arrays = keep(top.indices.numpy(), top.values.numpy(), labels, spec)
    targets = decode({name: values[None] for name, values in arrays.items()}, spec)
    assert isinstance(targets, SparseTargets)
    return energy, targets, labels


def test_top_k_tail_and_label_are_right_at_temperature_one() -> None:
    energy, targets, labels = _kept(100, 7)
    assert torch.allclose(targets.logprobs.double(), energy.topk(7).values, atol=1e-6)
    rest = 1 - energy.topk(7).values.exp().sum(-1)
    assert torch.allclose(targets.log_tail(1.0).exp().double(), rest, rtol=1e-5)
    assert targets.log_partition(1.0).abs().max() < 1e-5
    known = ~np.isnan(labels)
    assert np.allclose(targets.label_logprob.numpy()[known], labels[known], rtol=1e-6)
    share = (rest / 93).log()[torch.from_numpy(~known)]
    assert torch.allclose(targets.label_logprob[torch.from_numpy(~known)].double(), share, atol=1e-5)


def test_the_whole_vocabulary_leaves_no_tail_and_nan_is_an_even_distribution() -> None:
    _, targets, _ = _kept(9, 9)
    assert (targets.tail[:, : len(targets.knots)] == -1e4).all()
    spec = CodecSpec(kind="sparse", vocab_size=100, top_k=3)
    arrays = keep(np.arange(3)[None], np.full((1, 3), np.nan), np.array([np.nan]), spec)
    assert np.allclose(arrays["logprobs"], -np.log(100))
    assert np.allclose(arrays["logit_std"], 0, atol=1e-3)


def test_an_id_outside_the_vocabulary_is_refused() -> None:
    spec = CodecSpec(kind="sparse", vocab_size=50, top_k=2)
    with pytest.raises(UsageError, match="id 50, the teacher's vocabulary only 50"):
        keep(np.array([[1, 50]]), np.log([[0.5, 0.2]]), np.array([0.0]), spec)
