"""The audit on random distributions: no false alarm, every fault found and named, variances that are exact."""

import dataclasses

import numpy as np
import pytest
import torch
from torch import Tensor

from kdtrain.cache.format.codec import decode, draw_points, encode_sequences
from kdtrain.cache.format.spec import CodecSpec
from kdtrain.cache.tools.self_check import OTHER_ROWS, Look, other_row
from kdtrain.objective.batch import Batch
from kdtrain.objective.targets import SparseTargets
from kdtrain.plugins.audit.diagnose import (
    AHEAD,
    BEHIND,
    INT8,
    MOST,
    OTHER_WEIGHTS,
    RENORMALISED,
    Diagnosis,
    diagnose,
    gains,
)
from kdtrain.plugins.audit.evidence import BINS, Evidence, judge, score, student_tail
from kdtrain.plugins.audit.evidence import _drawn as drawn_at
from kdtrain.plugins.audit.evidence import _features as features
from kdtrain.plugins.audit.evidence import _mean_test as mean_test
from kdtrain.plugins.audit.evidence import _of_grids as of_grids
from kdtrain.plugins.audit.evidence import _of_independent as of_independent

V, T, ROWS = 48, 40, 24
SPECS = {
    "top-k": CodecSpec(kind="sparse", vocab_size=V, top_k=6),
    "both": CodecSpec(kind="sparse", vocab_size=V, top_k=3, num_samples=12),
    "samples": CodecSpec(kind="sparse", vocab_size=V, num_samples=16),
    "dense": CodecSpec(kind="dense", vocab_size=V),
}
each_codec = pytest.mark.parametrize("codec", SPECS)


def draw(seed: int) -> tuple[Tensor, Tensor]:
    """Draw right logits [R, T, V], and tokens [R, T + 1] from them."""
    generator = torch.Generator().manual_seed(seed)
    logits = 2.5 * torch.randn(ROWS, T, V, generator=generator)
    labels = torch.multinomial(logits.softmax(-1).flatten(0, 1), 1, generator=generator).view(ROWS, T)
    return logits, torch.cat([labels[:, :1], labels], 1)


LOGITS, TOKENS = draw(0)
NOISE = 0.02 * torch.randn(3, *LOGITS.shape, generator=torch.Generator().manual_seed(1))


def kept(logits: Tensor, codec: str, seed: int = 0, order: np.ndarray | None = None) -> list:
    """Return the targets of each row in a cache of these logits; row i has those of row `order[i]`."""
    arrays = encode_sequences(logits, TOKENS[:, 1:], SPECS[codec], seed=seed, split="train", first=0)
    del arrays["broken"]
    targets = decode({name: each if order is None else each[order] for name, each in arrays.items()}, SPECS[codec])
    assert targets is not None
    return [targets[row * T : (row + 1) * T] for row in range(ROWS)]


def evidence(logits: Tensor, codec: str, seed: int = 0, order: np.ndarray | None = None) -> list[Evidence]:
    """Score the rows by the right teacher, whose own noise is NOISE[0]."""
    number = SPECS[codec].num_samples
    found = []
    for row, targets in enumerate(kept(logits, codec, seed, order)):
        points = draw_points(seed, "train", row, T, number) if number else None
        own, right = ((LOGITS[row] + noise).log_softmax(-1) for noise in (NOISE[0, row], 0.0))
        found.append(score(targets, TOKENS[row, 1:], own, right, points_TD=points))
    return found


def nucleus(logits: Tensor) -> Tensor:
    ordered = logits.softmax(-1).sort(-1, descending=True)
    cut = torch.zeros_like(logits, dtype=torch.bool)
    cut.scatter_(-1, ordered.indices, ordered.values.cumsum(-1) - ordered.values >= 0.95)
    return logits.masked_fill(cut, -torch.inf)


FAULTS = {
    AHEAD: LOGITS.roll(-1, 1),
    BEHIND: LOGITS.roll(1, 1),
    "temperature 0.9": (LOGITS + NOISE[1]) / 0.9,
    "top-p 0.95": nucleus(LOGITS + NOISE[1]),
    OTHER_WEIGHTS: LOGITS + 20 * NOISE[2],
    OTHER_ROWS: LOGITS,
}


@each_codec
def test_a_capture_with_noise_like_ours_is_no_finding(codec: str) -> None:
    for noise in (NOISE[0], NOISE[1]):  # this machine, and another one
        verdict = judge(evidence(LOGITS + noise, codec))
        assert not verdict.failed, verdict.failed
        assert verdict.rows == ROWS and verdict.positions == ROWS * T and verdict.tests


@each_codec
@pytest.mark.parametrize("fault", FAULTS)
def test_every_fault_is_found_and_named(codec: str, fault: str) -> None:
    order = np.roll(np.arange(ROWS), 5) if fault == OTHER_ROWS else None
    assert judge(evidence(FAULTS[fault], codec, order=order)).failed
    found = diagnosed(FAULTS[fault], codec, order)
    if fault.startswith("temperature"):
        assert float(found.fault.split()[1]) == pytest.approx(0.9, abs=0.02)
    else:
        assert found.fault == fault
    assert (found.share > 0.5) == (fault != OTHER_WEIGHTS)


def diagnosed(logits: Tensor, codec: str, order: np.ndarray | None = None) -> Diagnosis:
    rows, matched = [], []
    for row, targets in enumerate(kept(logits, codec, order=order)):
        own = (LOGITS[row] + NOISE[0, row]).log_softmax(-1)
        int8 = (LOGITS[row] + NOISE[2, row]).log_softmax(-1)
        rows.append(gains(targets, TOKENS[row, 1:], own, {INT8: int8}))
        matched.append(other_row(targets, row, TOKENS[:, 1:], torch.ones(T, dtype=torch.bool)))
    return diagnose(rows, matched)


@pytest.mark.parametrize("codec", ["top-k", "both"])
def test_a_renormalised_top_k_is_named(codec: str) -> None:
    found = diagnosed(renormalised(LOGITS + NOISE[1], SPECS[codec].top_k), codec)
    assert found.fault == RENORMALISED and found.share > MOST


@each_codec
def test_a_teacher_that_knows_nothing_is_other_weights_and_no_temperature(codec: str) -> None:
    for logits in (LOGITS / 50, LOGITS.roll(1, 2) / 2):
        found = diagnosed(logits, codec)
        assert (found.fault, found.share) == (OTHER_WEIGHTS, 0.0)


@pytest.mark.parametrize("codec", ["samples", "both"])
def test_samples_alone_find_a_fault(codec: str) -> None:
    rows = [dataclasses.replace(row, numbers={}) for row in evidence(LOGITS / 0.8, codec)]
    verdict = judge(rows)
    assert {test.name for test in verdict.tests} == {"likelihood", "counts"}
    assert {test.name for test in verdict.failed} == {"likelihood", "counts"}


def test_false_alarms_keep_to_the_level() -> None:
    verdicts = [judge(evidence(LOGITS + NOISE[1], "samples", seed)) for seed in range(40)]
    statistics = np.array([[verdict.tests[i].statistic for i in (0, 1)] for verdict in verdicts])
    df = int(verdicts[0].tests[1].kind[5:-1])
    assert sum(bool(verdict.failed) for verdict in verdicts) <= 2
    # the deviation is that of the grids, and the noise that is allowed on top is small
    assert 0.7 < statistics[:, 0].std() < 1.2
    assert 0.6 * df < statistics[:, 1].mean() < 1.15 * df


def test_three_times_the_noise_is_a_finding() -> None:
    failed = judge(evidence(LOGITS + 3 * NOISE[1], "top-k")).failed
    assert {"label", "entries"} <= {test.name for test in failed}


def test_one_row_of_another_teacher_is_the_worst_row() -> None:
    changed = LOGITS + NOISE[1]
    changed[7] = changed[7] / 0.5
    assert "worst row" in {test.name for test in judge(evidence(changed, "top-k")).failed}


def test_numbers_without_variance_over_rows_have_a_small_t_and_a_fault_among_them_is_found():
    exact, off = mean_test("ids", np.full(20, -4.6)), mean_test("ids", np.full(20, 4.6))
    assert -100 < exact.statistic < 0 and exact.p > 0.99 and off.p < 1e-9


def test_the_covariance_is_that_of_all_grids_and_of_independent_samples() -> None:
    number, logprobs = 8, LOGITS[0, :3].log_softmax(-1)
    share, bins = logprobs.double().exp(), torch.bucketize(logprobs, torch.tensor(BINS).log())
    expected = features(bins, logprobs, share)

    def covariance(points: Tensor) -> Tensor:
        """Compute the covariance of the features over points [n, 3, D]."""
        drawn = torch.stack([drawn_at(share, each) for each in points])
        away = torch.stack(
            [
                features(bins.gather(1, d), logprobs.gather(1, d), torch.full(d.shape, 1 / number).double())
                for d in drawn
            ]
        )
        return torch.einsum("nti,ntj->ij", away - expected, away - expected) / len(points)

    generator = torch.Generator().manual_seed(0)
    first = torch.rand(4000, 3, 1, dtype=torch.float64, generator=generator)
    grids = covariance((first + torch.arange(number)) / number)
    alone = covariance(torch.rand(4000, 3, number, dtype=torch.float64, generator=generator))
    exact = of_independent(bins, logprobs, share, expected, number)
    assert torch.allclose(alone, exact, atol=0.08 * exact.abs().max().item())
    found = of_grids(bins, logprobs, share, expected, number)
    assert torch.allclose(found, grids, atol=0.15 * grids.abs().max().item())
    assert grids[-1, -1] < 0.5 * exact[-1, -1]


def test_students_tail_is_that_of_the_tables() -> None:
    for t, df, p in ((2.015, 5, 0.05), (3.169, 10, 0.005), (-1.0, 1, 0.75), (4.587, 10, 0.0005)):
        assert student_tail(t, df) == pytest.approx(p, rel=2e-3)
    assert student_tail(60, 20) < 1e-18


def batches(logits: Tensor, codec: str, order: np.ndarray | None = None, tokens: Tensor = TOKENS) -> list[Batch]:
    ones = torch.ones(1, T, dtype=torch.bool)
    rows = enumerate(kept(logits, codec, order=order))
    return [Batch(tokens[row : row + 1], ones, torch.zeros(1, T, dtype=torch.int64), each) for row, each in rows]


def looked(batches: list[Batch], drawn_at: float = 1.0) -> tuple[str, ...]:
    found = Look.of(batches, systematic=True, samples=True, vocab_size=V, drawn_at=drawn_at)
    assert found is not None
    return found.findings


@each_codec
def test_a_look_finds_shifts_and_other_rows_without_a_teacher(codec: str) -> None:
    assert looked(batches(LOGITS, codec)) == ()
    assert looked(batches(LOGITS.roll(-1, 1), codec))[0].startswith(
        "shifted by +1: the entries are about the token after the next one; build the cache again"
    )
    assert any(each.startswith(OTHER_ROWS) for each in looked(batches(LOGITS, codec, np.roll(np.arange(ROWS), 5))))


def test_what_is_kept_where_no_label_counts_is_not_the_targets_of_another_row() -> None:
    tokens, logits = TOKENS.clone(), LOGITS.clone()
    tokens[::2, 9:] = 0  # short rows, with filler behind their text
    logits[1::2, :30, 0] = 99.0  # long ones, of which the prompt was not asked about
    found = batches(logits, "samples", tokens=tokens)
    for row, batch in enumerate(found):
        counted = torch.arange(T) < 8 if row % 2 == 0 else torch.arange(T) >= 30
        found[row] = dataclasses.replace(batch, loss_mask=counted[None])
    assert looked(found) == ()


def renormalised(logits: Tensor, number: int) -> Tensor:
    """Keep the logits of the most likely entries alone, whose probabilities then sum to 1."""
    return logits.masked_fill(logits < logits.topk(number).values[..., -1:], -torch.inf)


@pytest.mark.parametrize("codec", ["top-k", "both"])
def test_a_look_finds_a_top_k_that_was_scaled_to_one(codec: str) -> None:
    (line,) = looked(batches(renormalised(LOGITS, SPECS[codec].top_k), codec))
    assert line.startswith("mass") and "of the labels lie outside of them: they were renormalised" in line
    # a teacher that is too sure of itself is no fault
    assert not any(each.startswith("mass") for each in looked(batches(LOGITS / 0.7, codec)))


def test_a_text_that_was_drawn_at_a_high_temperature_may_leave_the_entries_of_its_teacher() -> None:
    sharp = 6 * LOGITS
    found = batches(sharp, "top-k")  # of labels at temperature 1 of `LOGITS`, 6 of `sharp`
    assert any(each.startswith("mass") for each in looked(found))
    assert looked(found, drawn_at=6.0) == ()


def test_a_look_finds_samples_that_are_not_what_the_label_says() -> None:
    found = batches(LOGITS, "samples")
    right = torch.cat([torch.log_softmax(LOGITS / 0.8, -1).gather(-1, TOKENS[:, 1:, None])[..., 0]])
    for row, batch in enumerate(found):
        assert isinstance(batch.targets, SparseTargets)
        found[row] = dataclasses.replace(batch, targets=dataclasses.replace(batch.targets, label_logprob=right[row]))
    assert any(each.startswith("samples") for each in looked(found))
