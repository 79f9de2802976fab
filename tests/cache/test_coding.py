"""Stored numbers are the kept ones, to the stated errors, in few bytes."""

import numpy as np
import pytest
import torch
from einops import rearrange

from kdtrain.cache.format.codec import decode, encode_sequences
from kdtrain.cache.format.compression import (
    MARK,
    WIDTH,
    Arrays,
    Coding,
    Dictionary,
    Predictor,
    logprob_codes,
    logprobs_of,
    order,
    unpack,
)
from kdtrain.cache.format.spec import FINE_KNOTS, STEP_SLOPE, STEP_VALUE, CodecSpec, steps
from kdtrain.objective.targets import FLOOR, SparseTargets

TEMPERATURES = np.geomspace(1, 4, 25)


def _zipf(rows: int, vocab_size: int, slope: float, peak: float = 0.0) -> torch.Tensor:
    """Make Zipf-shaped logits in an order of their own, the most likely entry raised by `peak` nats."""
    generator = torch.Generator().manual_seed(3)
    rank = torch.rand(rows, vocab_size, generator=generator).argsort(-1)
    noise = 0.3 * torch.randn(rows, vocab_size, generator=generator)
    return -slope * (1.0 + rank).log() + noise + peak * (rank == 0)


def _kept(logits: torch.Tensor, spec: CodecSpec) -> tuple[np.ndarray, Arrays]:
    tokens = np.random.RandomState(0).randint(0, spec.vocab_size, (1, len(logits) + 1))
    labels = torch.from_numpy(tokens[:, 1:]).long()
    kept = encode_sequences(logits[None], labels, spec, seed=0, split="train", first=0)
    del kept["broken"]
    return tokens, kept


def _through(tokens: np.ndarray, kept: Arrays, spec: CodecSpec) -> Arrays:
    """Pack and unpack the arrays, with lists and weights that went through their own arrays."""
    coding = Coding.fit(tokens, kept, spec)
    stored = coding.pack(tokens, kept)
    assert all(values.dtype.kind == "u" for values in stored.values())
    return unpacked(Coding.from_arrays(coding.to_arrays(), spec), tokens, stored)


def unpacked(coding: Coding, tokens: np.ndarray, stored: Arrays) -> Arrays:
    """Return what a reader gets of the sequences that `coding` packed."""
    return unpack([(coding, *each) for each in zip(tokens, stored["ids"], stored["numbers"], strict=True)])


@pytest.mark.parametrize("logprob", [0.0, -1e-4, -0.1, -0.7, -2.3, -9.0, -40.0, -900.0, FLOOR])
def test_a_log_probability_errs_by_at_most_its_stated_bound(logprob: float) -> None:
    around = np.linspace(logprob - 0.02, min(0.0, logprob + 0.02), 500)
    found = logprobs_of(logprob_codes(around).astype(np.uint16))
    expected = np.maximum(around, FLOOR)
    assert (np.abs(found - expected) <= (1 - expected) / 383).all()


def test_impossible_stays_impossible_and_certain_stays_certain() -> None:
    codes = logprob_codes(np.array([FLOOR, -np.inf, np.nan, 0.0, 1e-7]))
    assert logprobs_of(codes.astype(np.uint16)).tolist() == [FLOOR, FLOOR, FLOOR, 0.0, 0.0]
    assert np.isnan(logprobs_of(np.uint16(2**16 - 1)))


@pytest.mark.parametrize("vocab_size", [50, 3000, 70_000])
def test_every_id_comes_back_listed_or_not(vocab_size: int) -> None:
    random = np.random.RandomState(1)
    absent = int(np.iinfo(CodecSpec(kind="sparse", vocab_size=vocab_size, top_k=1).id_dtype).max)
    seen, unseen = (random.zipf(1.5, (2, 3000, 5)) - 1) % vocab_size
    context = random.randint(0, 20, 3000)
    seen[::7, 3:] = absent
    lists = Dictionary.fit(context, seen, vocab_size, absent)
    for ids in (seen, unseen, random.randint(0, vocab_size, (3000, 5))):
        codes = lists.encode(context, ids)
        assert ((codes == 0) == (ids == absent)).all()
        assert np.array_equal(lists.decode(context, codes.T).T, ids)
    with pytest.raises(IndexError):
        lists.decode(context[:1], np.array([[lists.literal_base + vocab_size]]))
    assert (lists.encode(context, seen) <= WIDTH).mean() > 0.6


def test_an_empty_tail_stays_empty_and_the_others_are_right_to_half_a_step() -> None:
    knots = (1.5, 1.0, 0.25)
    random = np.random.RandomState(2)
    numbers = random.randn(8, 400).astype(np.float32).cumsum(0)
    numbers[0, ::10] = FLOOR
    features = np.stack([np.ones(400), random.randn(400)]).astype(np.float32)
    predictor = Predictor.fit(features, numbers, knots)
    codes = predictor.encode(features, numbers)
    assert ((codes[0] == MARK) == (numbers[0] == FLOOR)).all()
    found = predictor.decode(features, codes)[order(knots)]
    full = numbers[0] > FLOOR
    assert (np.abs(found - numbers)[:, full] <= 0.501 * steps(knots)[:, None]).all()
    assert (found[:3, ~full] == FLOOR).all()
    assert (found[3:6, ~full] == 0).all()
    assert order(knots) == [1, 2, 0, 4, 5, 3, 6, 7]


def test_half_a_step_is_stored_as_the_even_one() -> None:
    halves_N, knots = np.array([0.5, -0.5, 1.5, -1.5, 2.5, -2.5]), (1.0, 0.5)
    numbers = (halves_N * steps(knots)[:, None]).astype(np.float32)
    assert (numbers / steps(knots)[:, None] == halves_N).all()
    predictor = Predictor(np.zeros((len(numbers), 1 + len(numbers)), np.float32), knots)
    assert (predictor.encode(np.ones((1, 6), np.float32), numbers) == [0, 0, 4, 3, 4, 3]).all()


@pytest.mark.parametrize("top_k", [8, 12, 50])
@pytest.mark.parametrize("slope, peak", [(1.0, 0.0), (1.3, 2.0), (1.6, 0.0), (2.0, 4.0)])
def test_masses_and_weights_are_exact_to_a_hundredth_of_a_nat(top_k: int, slope: float, peak: float) -> None:
    """log of top-k mass, tail mass and Z at every T in [1, 4] against the dense teacher in fp64."""
    spec = CodecSpec(kind="sparse", vocab_size=2048, top_k=top_k)
    logits = _zipf(256, 2048, slope, peak)
    tokens, kept = _kept(logits, spec)
    targets = decode(_through(tokens, kept, spec), spec)
    assert isinstance(targets, SparseTargets)
    energy = logits.double().log_softmax(-1)
    top = energy.topk(top_k)
    tail = energy.scatter(1, top.indices, -torch.inf)
    for temperature in TEMPERATURES:
        beta = 1 / temperature
        whole = (beta * energy).logsumexp(-1)
        partition = targets.log_partition(beta).double()
        assert (partition - whole).abs().max() < 1e-2, temperature
        for found, expected in (
            (targets.top_logprobs(beta).logsumexp(-1), (beta * top.values).logsumexp(-1) - whole),
            (targets.log_tail(beta) - partition, (beta * tail).logsumexp(-1) - whole),
        ):
            assert (found - expected).abs().max() < 1e-2, temperature


def _drawn(kept: Arrays) -> np.ndarray:
    """List the samples of each token, in ascending order."""
    ids_NK, counts_NK = (rearrange(kept[name], "n t k -> (n t) k").astype(np.int64) for name in ("ids", "counts"))
    return np.stack([np.sort(np.repeat(*row)) for row in zip(ids_NK, counts_NK, strict=True)])


@pytest.mark.parametrize(
    "options", [{"top_k": 3}, {"num_samples": 9, "knots": FINE_KNOTS}, {"top_k": 5, "num_samples": 20}, {"top_k": 40}]
)
def test_extreme_teachers_survive_the_coding(options: dict) -> None:
    """Certain, flat and noisy teachers, and some that rule most entries out, in one shard."""
    spec = CodecSpec(kind="sparse", vocab_size=40, **options)
    logits = torch.randn(60, 40, generator=torch.Generator().manual_seed(0))
    logits[10:20] *= 1000.0
    logits[20:30, 4:] = -torch.inf
    logits[30:40, 1:] = -torch.inf
    logits[40:50] = 0.0
    tokens, kept = _kept(logits, spec)
    found = _through(tokens, kept, spec)
    assert np.array_equal(found["ids"], kept["ids"])
    here = found["ids"] != spec.absent
    error = np.abs(found["logprobs"] - kept["logprobs"])[here]
    assert (error <= (1 - kept["logprobs"][here]) / 383).all()
    if spec.num_samples:
        assert np.array_equal(found["counts"], kept["counts"])
    targets = decode(found, spec)
    assert isinstance(targets, SparseTargets)
    for temperature in (1.0, 2.0, 4.0):
        expected = (logits.double().log_softmax(-1).clamp(min=FLOOR) / temperature).logsumexp(-1)
        found_partition = targets.log_partition(1 / temperature)
        assert torch.isfinite(found_partition).all()
        calm = torch.arange(60) // 10 != 1
        assert (found_partition - expected)[calm].abs().max() < 0.03


@pytest.mark.parametrize("rows, vocab_size, number", [(60, 40, 9), (300, 3000, 50), (40, 3000, 255), (50, 70_000, 20)])
def test_counts_of_samples_come_back_with_the_mean_of_log_p(rows: int, vocab_size: int, number: int) -> None:
    spec = CodecSpec(kind="sparse", vocab_size=vocab_size, num_samples=number)
    logits = _zipf(rows, vocab_size, 1.2)
    logits[10:20] *= 1000.0
    logits[20:30, 4:] = -torch.inf
    logits[30:35, 1:] = -torch.inf
    logits[35:38] = 0.0
    tokens, kept = _kept(logits, spec)
    found = _through(tokens, kept, spec)
    assert np.array_equal(_drawn(found), _drawn(kept))
    assert _drawn(found).shape == (rows, number)
    targets = decode(found, spec)
    assert isinstance(targets, SparseTargets)
    mean = (targets.drawn_weights(1.0) * targets.logprobs).sum(-1)
    energy = logits.double().log_softmax(-1).clamp(min=FLOOR)
    assert ((mean - (energy.exp() * energy).sum(-1)).abs() <= 0.5 * STEP_SLOPE + 1e-3).all()
    assert (targets.log_partition(1.0).abs() <= 0.5 * STEP_VALUE + 1e-6).all()


@pytest.mark.parametrize("top_k", [0, 2])
def test_sampled_weights_are_unbiased_at_every_temperature_served(top_k: int) -> None:
    """200,000 tokens of one distribution, 8 samples each: the mean of w_k = (c_k / n) p_k^(beta - 1) P / Z(beta),
    over its entries, within 5 standard errors plus the stated error of the stored numbers."""
    number, size, spec = 200_000, 40, CodecSpec(kind="sparse", vocab_size=40, top_k=top_k, num_samples=8)
    energy = _zipf(1, size, 1.2).log_softmax(-1)
    tokens, kept = _kept(energy.expand(number, size), spec)
    targets = decode(_through(tokens, kept, spec), spec)
    assert isinstance(targets, SparseTargets)
    for beta in (1.0, 0.5, 0.25) if top_k else (1.0,):
        place = targets.ids[:, top_k:].clamp(max=size)
        zeros = torch.zeros(number, size + 1, dtype=torch.float64)
        estimate = zeros.scatter(1, place, targets.drawn_weights(beta).double())[:, :size]
        expected = (beta * energy.double()).softmax(-1)[0]
        expected[energy[0].topk(top_k).indices] = 0
        error = 5 * estimate.std(0) / number**0.5 + 0.02 * expected
        assert ((estimate.mean(0) - expected).abs() <= error).all(), beta
