"""The codecs against the dense teacher in fp64; grids of samples that add up; a top-k from elsewhere."""

from dataclasses import replace
from fractions import Fraction

import numpy as np
import pytest
import torch

from kdtrain.cache.format.codec import decode, draw_points, encode, encode_sequences, keep
from kdtrain.cache.format.compression import Coding
from kdtrain.cache.format.manifest import CacheSettings
from kdtrain.cache.format.spec import ABSENT, KNOTS, CodecSpec
from kdtrain.errors import UsageError
from kdtrain.objective.targets import DenseTargets, SparseTargets
from tests.cache.test_coding import unpacked


def _logits(rows: int, vocab_size: int, scale: float = 3.0) -> torch.Tensor:
    return scale * torch.randn(rows, vocab_size, generator=torch.Generator().manual_seed(5))


def _targets(logits: torch.Tensor, spec: CodecSpec, seed: int = 0) -> SparseTargets | DenseTargets:
    labels = torch.arange(len(logits)) % logits.shape[1]
    arrays = encode_sequences(logits[None], labels[None], spec, seed=seed, split="train", first=0)
    found = decode(arrays, spec)
    assert found is not None
    return found


def test_top_k_entries_are_the_most_likely_ones_in_order() -> None:
    logits = _logits(50, 300)
    targets = _targets(logits, CodecSpec(kind="sparse", vocab_size=300, top_k=12))
    assert isinstance(targets, SparseTargets)
    expected = logits.double().log_softmax(-1).topk(12)
    assert torch.equal(targets.ids, expected.indices)
    assert torch.allclose(targets.logprobs.double(), expected.values, rtol=6e-4, atol=1e-6)
    labels = logits.double().log_softmax(-1).gather(1, (torch.arange(50) % 300)[:, None])[:, 0]
    assert torch.allclose(targets.label_logprob.double(), labels, rtol=6e-4)


@pytest.mark.parametrize("top_k", [0, 1, 12])
@pytest.mark.parametrize("vocab_size", [40, 5000])
def test_the_stored_tail_is_the_dense_tail(top_k: int, vocab_size: int) -> None:
    spec = CodecSpec(kind="sparse", vocab_size=vocab_size, top_k=top_k, num_samples=0 if top_k else 3)
    logits = _logits(20, vocab_size)
    targets = _targets(logits, spec)
    assert isinstance(targets, SparseTargets)
    energy = logits.double().log_softmax(-1)
    tail = energy.scatter(1, energy.topk(top_k).indices, -torch.inf)
    for g, beta in enumerate(spec.knots):
        weights = (beta * tail).softmax(-1)
        slope = (weights * energy).sum(-1)
        assert torch.allclose(targets.tail[:, g].double(), (beta * tail).logsumexp(-1), rtol=6e-4, atol=1e-3)
        assert torch.allclose(targets.tail[:, len(spec.knots) + g].double(), slope, rtol=6e-4, atol=1e-3)
    assert targets.log_partition(1.0).abs().max() < 5e-3


def test_mean_and_deviation_are_those_of_the_log_probabilities() -> None:
    logits = _logits(20, 500)
    targets = _targets(logits, CodecSpec(kind="sparse", vocab_size=500, top_k=2))
    assert isinstance(targets, SparseTargets)
    energy = logits.double().log_softmax(-1)
    assert torch.allclose(targets.logit_mean.double(), energy.mean(-1), rtol=1e-3)
    assert torch.allclose(targets.logit_std.double(), energy.std(-1, correction=0), rtol=1e-3)


@pytest.mark.parametrize("top_k", [0, 3])
def test_samples_are_unbiased_and_outside_the_top_k(top_k: int) -> None:
    """100,000 tokens of one distribution, 8 samples each: every frequency within 5 standard errors.

    Each count is 8 times the probability, rounded down or up: independent samples would be right as often, but not so
    near in every token.
    """
    logits = _logits(1, 12, scale=1.0).expand(100_000, 12)
    spec = CodecSpec(kind="sparse", vocab_size=12, top_k=top_k, num_samples=8)
    arrays = encode(logits, torch.zeros(len(logits), dtype=torch.int64), spec, draw_points(0, "train", 0, 100_000, 8))
    ids, counts = arrays["ids"][:, top_k:], arrays["counts"][:, top_k:].astype(np.int64)
    assert (arrays["counts"][:, :top_k] == 0).all()
    assert (counts.sum(1) == 8).all()
    assert ((ids == 65_535) == (counts == 0)).all()
    total = np.bincount(ids[counts > 0], weights=counts[counts > 0], minlength=12)
    p = logits[0].double().softmax(-1)
    p[logits[0].topk(top_k).indices] = 0
    expected = (p / p.sum()).numpy()
    share = 8 * expected % 1
    error = np.sqrt(share * (1 - share) / 100_000) / 8
    assert (np.abs(total / 800_000 - expected) <= 5 * error + 1e-7).all()
    assert (total[expected == 0] == 0).all()
    drawn = np.zeros((100_000, 13), np.int64)
    np.put_along_axis(drawn, np.where(counts > 0, ids, 12).astype(np.int64), counts, 1)
    assert (np.abs(drawn[:, :12] - 8 * expected) < 1 + 1e-6).all()


def test_an_impossible_entry_is_never_sampled() -> None:
    logits = torch.full((200, 50), -torch.inf)
    logits[:, [3, 20, 21, 40]] = torch.tensor([5.0, 0.0, -1.0, -80.0])
    spec = CodecSpec(kind="sparse", vocab_size=50, top_k=1, num_samples=20)
    edges = np.random.RandomState(0).choice([0.0, 0.5, np.nextafter(1, 0)], (200, 20))
    arrays = encode(logits, torch.full((200,), 3), spec, edges)
    drawn = arrays["ids"][:, 1:][arrays["counts"][:, 1:] > 0]
    assert set(np.unique(drawn)) <= {20, 21, 40}
    assert np.isfinite(arrays["tail"]).all()
    assert np.isfinite(arrays["logit_mean"]).all()
    assert np.isfinite(arrays["logit_std"]).all()


def test_a_teacher_that_is_certain_leaves_nothing_to_sample() -> None:
    logits = torch.full((2, 50), -torch.inf)
    logits[:, 7] = 0.0
    spec = CodecSpec(kind="sparse", vocab_size=50, top_k=1, num_samples=4)
    arrays = encode(logits, torch.tensor([7, 8]), spec, np.zeros((2, 4)))
    targets = decode({k: v[None] for k, v in arrays.items()}, spec)
    assert isinstance(targets, SparseTargets)
    assert (targets.ids[:, 1:] == ABSENT).all()
    assert (targets.counts == 0).all()
    assert targets.log_partition(0.5).abs().max() == 0
    assert torch.isfinite(targets.label_logprob).all()


def test_a_top_k_of_the_whole_vocabulary_has_an_empty_tail() -> None:
    targets = _targets(_logits(5, 16), CodecSpec(kind="sparse", vocab_size=16, top_k=16))
    assert isinstance(targets, SparseTargets)
    assert (targets.tail[:, : len(KNOTS)] == -1e4).all()
    assert (targets.tail[:, len(KNOTS) :] == 0).all()


def test_a_sequence_gets_the_same_samples_in_any_batch() -> None:
    spec = CodecSpec(kind="sparse", vocab_size=64, top_k=2, num_samples=6)
    logits, labels = _logits(60, 64).reshape(3, 20, 64), torch.zeros(3, 20, dtype=torch.int64)
    together = encode_sequences(logits, labels, spec, seed=1, split="train", first=10)
    alone = encode_sequences(logits[2:], labels[2:], spec, seed=1, split="train", first=12)
    other = encode_sequences(logits[2:], labels[2:], spec, seed=1, split="validation", first=12)
    assert all(np.array_equal(together[name][2:], alone[name], equal_nan=True) for name in alone)
    assert not np.array_equal(alone["ids"], other["ids"])


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("kind", [{"kind": "sparse", "top_k": 2, "num_samples": 2}, {"kind": "dense"}])
def test_a_non_finite_logit_marks_its_sequence_and_no_other(bad: float, kind: dict) -> None:
    logits = _logits(12, 20).reshape(3, 4, 20)
    sound = logits.clone()
    logits[1, 2, slice(None) if bad == -torch.inf else 5] = bad
    spec = CodecSpec(vocab_size=20, **kind)
    options = {"seed": 0, "split": "train", "first": 30}
    labels = torch.zeros(3, 4, dtype=torch.int64)
    found = encode_sequences(logits, labels, spec, **options)
    expected = encode_sequences(sound, labels, spec, **options)
    assert found.pop("broken").tolist() == [False, True, False]
    for name, values in found.items():
        assert np.array_equal(values[[0, 2]], expected[name][[0, 2]], equal_nan=True)
        assert np.isfinite(np.nan_to_num(values, nan=0.0, posinf=np.inf)).all()
    assert np.isfinite(found["label_logprob"]).all()


@pytest.mark.parametrize("vocab_size, dtype", [(65_535, np.uint16), (65_536, np.uint32), (151_936, np.uint32)])
def test_the_largest_id_never_means_absent(vocab_size: int, dtype: type) -> None:
    spec = CodecSpec(kind="sparse", vocab_size=vocab_size, top_k=1, num_samples=2)
    logits = torch.zeros(1, vocab_size)
    logits[0, -1] = 20.0
    arrays = encode(logits, torch.tensor([vocab_size - 1]), spec, np.array([[0.0, 0.999999999]]))
    assert arrays["ids"].dtype == dtype
    targets = decode({name: values[None] for name, values in arrays.items()}, spec)
    assert isinstance(targets, SparseTargets)
    assert targets.ids.tolist() == [[vocab_size - 1, 0, vocab_size - 2]]


@pytest.mark.parametrize(
    "options, word",
    [
        ({"kind": "other"}, "codec 'other'"),
        ({"kind": "sparse"}, "--top-k 0"),
        ({"kind": "sparse", "top_k": 65}, "--top-k 65"),
        ({"kind": "sparse", "num_samples": 256}, "--num-samples 256"),
        ({"kind": "dense", "top_k": 3}, "codec 'dense'"),
        ({"kind": "sparse", "top_k": 3, "knots": (1.0,)}, "must be 2 to 64"),
        ({"kind": "sparse", "num_samples": 3, "knots": (2.0,)}, "must be 1 to 64"),
        ({"kind": "sparse", "top_k": 3, "knots": (1.5, 0.5)}, "knots"),
        ({"kind": "sparse", "top_k": 3, "knots": (0.5, 1.0)}, "knots"),
    ],
)
def test_an_impossible_codec_is_refused(options: dict, word: str) -> None:
    with pytest.raises(ValueError, match=word):
        CodecSpec(vocab_size=64, **options)


@pytest.mark.parametrize("top_k", [1, 4, 12])
def test_log_z_is_right_over_all_of_two_thirds_to_four_with_the_default_knots(top_k: int) -> None:
    logits = _logits(256, 512, 2.0)
    logits[:, 0] += torch.linspace(0, 14, 256)  # from flat to all but certain
    targets = _targets(logits, CodecSpec(kind="sparse", vocab_size=512, top_k=top_k, num_samples=8))
    assert isinstance(targets, SparseTargets)
    energies = logits.double().log_softmax(-1)
    for temperature in torch.linspace(2 / 3, 4, 40).tolist():
        error = targets.log_partition(1 / temperature) - torch.logsumexp(energies / temperature, -1)
        assert error.abs().max() < 2e-2, f"T = {temperature:.2f}"


@pytest.mark.parametrize("number", [1, 7, 25, 50, 127])
def test_a_grid_and_its_refinement_are_the_doubles_of_a_grid_of_twice_as_many(number: int) -> None:
    place = (3, "train", 7, 512)
    halfway = Fraction(1, 2 * number)
    both = np.concatenate([draw_points(*place, number), draw_points(*place, number, halfway)], -1)
    assert np.array_equal(np.sort(both), np.sort(draw_points(*place, 2 * number)))
    assert both.min() >= 0 and both.max() < 1


def test_a_grid_is_uniform_and_of_its_seed_split_and_sequence_alone() -> None:
    points = draw_points(0, "train", 0, 40_000, 5)
    assert np.abs(np.diff(np.sort(points)) - 0.2).max() < 1e-12
    assert abs(points.mean() - 0.5) < 2e-3
    others = [
        draw_points(1, "train", 0, 99, 5),
        draw_points(0, "validation", 0, 99, 5),
        draw_points(0, "train", 1, 99, 5),
    ]
    assert all((other != points[:99]).all() for other in others)


def test_the_name_of_a_grid_says_its_offset() -> None:
    settings = CacheSettings(codec=CodecSpec(kind="tokens", vocab_size=4), seq_len=1, tokenizer_size=4)
    assert [settings.on_grid(Fraction(each, 100)).sampling for each in (0, 2)] == ["grid", "grid+1/50"]
    assert [settings.on_grid(Fraction(each, 50)).grid_offset for each in (0, 1)] == [0, Fraction(1, 50)]
    for other in (None, "systematic", "mixture", "grid+1/0", "grid+3/2", "grid+1/9999999", "grid+-1/2"):
        assert replace(settings, sampling=other).grid_offset is None


def test_sequences_of_counts_are_stored_again_as_they_were(codecs: dict[str, CodecSpec]) -> None:
    spec = codecs["num_samples"]
    tokens = np.random.RandomState(0).randint(0, 64, (40, 17))
    logits = 3 * torch.randn(40, 16, 64, generator=torch.Generator().manual_seed(1))
    labels = torch.from_numpy(tokens[:, 1:])
    kept = encode_sequences(logits, labels, spec, seed=0, split="train", first=0)
    coding = Coding.fit(tokens, kept, spec)
    stored = coding.pack(tokens, kept)
    read = unpacked(coding, tokens, stored)
    again = Coding.fit(tokens, read, spec)
    assert np.array_equal(again.predictor.weights, coding.predictor.weights)
    moved = Coding.fit(tokens[:5], {name: values[:5] for name, values in read.items()}, spec)  # to another shard
    for other in (again, Coding(spec, again.dictionary, moved.predictor)):
        back = unpacked(other, tokens, other.pack(tokens, read))
        third = coding.pack(tokens, back)
        assert all(np.array_equal(third[name], stored[name]) for name in stored)


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
