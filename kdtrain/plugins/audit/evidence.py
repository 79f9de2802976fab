"""Does a cache hold what its teacher predicts? Tests of some rows against fresh log-probabilities; pure functions.

`score` compares one row with two fresh forwards of the teacher: one in the number format that the cache was made in,
`p`, and one in fp32, the reference. `judge` adds up rows and tests, all at one family-wise level (Bonferroni):

likelihood   of samples: z of sum_t (mean over the samples of log p - E_p log p). Which point of the grid comes first is
             the only chance in systematic samples: their variance is that over `PHASES` evenly spaced grids, computed
             from p, position by position (positions are independent given p). Independent samples have Var_p / D.
counts       of samples, added up over positions by bins of p: chi-square as a Wald statistic, with the covariance of
             the same grids.
label, entries, tail, slopes, moments, ids, draws
             of numbers that p decides: the mean square of their distance from the reference, as a ratio to what is
             allowed: the error of the codec's steps, and `noise` times the mean square of p's own distance. A capture
             on another machine rounds otherwise, but errs about the reference as much as this one. Student's t of the
             logarithm of the ratio over rows, one-sided: positions of a row are correlated, rows are not. `ids` counts
             entries that the reference's top-k lacks, `draws` samples that are not those of the grid of this seed,
             split, row and position, where that is known.
worst row    the largest of these logarithms for the label, in spreads from their median (robust: the median distance
             from it), by Student's t times the number of rows: a fault of few rows hides in a mean.

The numeric noise of p enters likelihood and counts as a covariance: by row, and once for its sum over all rows.

What it gives up: weights that change p by less than the number format does are taken for noise; entries of the
tail that no sample hits are seen only through sums.

Shapes: T positions of a row that count, V vocabulary, H top-k entries, D samples, M phases, F bins and the likelihood.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from einops import rearrange
from torch import Tensor

from kdtrain.cache.format.spec import FINENESS
from kdtrain.cache.format.spec import steps as tail_steps
from kdtrain.objective.targets import DenseTargets, SparseTargets

LEVEL = 0.01
"""The chance that any of the tests fails for a right cache."""
NOISE = 1.5
"""Allowed mean square of numeric noise, as a multiple of this machine's: attention by other kernels has 1.2."""
NOISE_UNKNOWN = 4.0
"""The same where the cache does not say in which number format its teacher ran."""
PHASES = 16
BINS = (1e-6, 1e-5, 1e-4, 1e-3, 1e-2, 0.03, 0.1, 0.3, 0.6, 0.9)
"""Edges of the bins of p."""
LOWEST = -50.0
"""Log-probabilities below count as this one, nats."""
_FLOOR = 1e-3  # nats: noise that is always allowed, so that two forwards in fp32 may differ
_FLOOR_SHARE = 2e-3  # of entries or samples
_DENSE_ENTRIES = 50
_CELLS = 2**22  # logits whose samples are compared at once
_LEAST_SPREAD = 0.4  # of the logarithm of a row's ratio; bf16 has 0.3 at 128 positions
_LEAST_VARIANCE = 5.0  # samples squared, of a bin of counts: below, its sum is far from normal


@dataclass
class Evidence:
    """The evidence of one row about its cache."""

    positions: int
    samples: int = 0
    """D; 0 without samples."""
    deviation: np.ndarray | None = None
    """[F] observed minus expected, summed over positions: share of the samples by bin, and mean log p."""
    covariance: np.ndarray | None = None
    """[F, F] of `deviation`, by the way samples are drawn."""
    shift: np.ndarray | None = None
    """[F] the same sum of differences between the two forwards."""
    numbers: dict[str, tuple[float, float, float]] = field(default_factory=dict)
    """By name: mean square of the cache's distance from the reference, that of p's, and what the codec's steps add."""


@dataclass(frozen=True)
class Test:
    """A statistical test of the family."""

    name: str
    statistic: float
    kind: str
    """z, chi2(df) or t(df)."""
    p: float
    figure: float
    """z: mean excess of log p, nats; chi2: statistic / df; t: root of the ratio to what is allowed."""


@dataclass(frozen=True)
class Verdict:
    """The family of tests over some rows."""

    rows: int
    positions: int
    tests: tuple[Test, ...]
    level: float = LEVEL

    @property
    def failed(self) -> tuple[Test, ...]:
        """The tests whose p lies below level / number of tests, the least likely first."""
        each = self.level / max(1, len(self.tests))
        return tuple(sorted((test for test in self.tests if test.p < each), key=lambda test: test.p))


def score(
    targets: SparseTargets | DenseTargets,
    labels_T: Tensor,
    logprobs_TV: Tensor,
    reference_TV: Tensor,
    *,
    whole_tail: bool = True,
    independent: bool = False,
    points_TD: np.ndarray | None = None,
) -> Evidence:
    """Compare the targets of one row with two fresh forwards, log p [T, V] in fp32.

    whole_tail: the numbers of the tail, and of labels that lie there, are of whole distributions. independent: samples
    were drawn one by one. points_TD: where systematic ones lie in the cumulative distribution of the tail
    (`draw_points`).
    """
    forwards = logprobs_TV, reference_TV = logprobs_TV.clamp(min=LOWEST), reference_TV.clamp(min=LOWEST)
    found = Evidence(positions=len(labels_T))
    ids_TH = targets.ids[:, : targets.top_k] if isinstance(targets, SparseTargets) else None
    known_T = torch.ones_like(labels_T, dtype=torch.bool)
    if ids_TH is not None and not whole_tail:  # another label has its share of a bucket
        known_T = (ids_TH == labels_T[:, None]).any(-1) | (ids_TH.shape[1] == 0)
    for name, values, steps, (own, exact) in _numbers(targets, labels_T, forwards, whole_tail):
        part = known_T if name == "label" else slice(None)
        away = (values.clamp(min=LOWEST) - exact)[part].square()
        if len(away):
            allowed = steps.expand_as(values)[part].square().mean().item() / 12 + _FLOOR**2
            found.numbers[name] = away.mean().item(), (own - exact)[part].square().mean().item(), allowed
    if ids_TH is not None and ids_TH.shape[1]:
        ours, right = (each.topk(ids_TH.shape[1]).indices for each in forwards)
        found.numbers["ids"] = _missing(ids_TH, right), _missing(ours, right), _FLOOR_SHARE
    if isinstance(targets, SparseTargets) and targets.num_samples:
        _score_samples(found, targets, logprobs_TV, reference_TV, independent, points_TD)
    return found


def _missing(ids_TH: Tensor, right_TH: Tensor) -> float:
    return 1 - (ids_TH[:, :, None] == right_TH[:, None]).any(-1).float().mean().item()


def _numbers(
    targets: SparseTargets | DenseTargets, labels_T: Tensor, forwards: Sequence[Tensor], whole_tail: bool
) -> Iterator[tuple[str, Tensor, Tensor, list[Tensor]]]:
    """Yield the numbers of a cache that p decides: name, stored values, the steps of storage, fresh values.

    The fresh values are computed from log-probabilities for the entries that the cache holds; the last of `forwards` is
    the reference.
    """
    if isinstance(targets, DenseTargets):
        ids_TK = forwards[-1].topk(min(_DENSE_ENTRIES, forwards[-1].shape[1])).indices
        entries_TK = targets.logprobs.gather(1, ids_TK).float()
    else:
        ids_TK, entries_TK = targets.ids[:, : targets.top_k], targets.logprobs[:, : targets.top_k]
    for name, values, places in (
        ("label", targets.label_logprob[:, None], labels_T[:, None]),
        ("entries", entries_TK, ids_TK),
    ):
        if values.shape[1]:
            size = values.clamp(min=LOWEST)
            fp16 = torch.exp2((-size).clamp(min=2.0**-14).log2().floor() - 10)  # its spacing
            spacing = fp16 if isinstance(targets, DenseTargets) else (1 - size) / FINENESS
            yield name, values, spacing, [each.gather(1, places) for each in forwards]
    if isinstance(targets, DenseTargets):
        return
    knots = len(targets.knots)
    one = targets.knots.index(1.0)
    tails = [_tail(each, ids_TK, targets.knots) for each in forwards]
    step_M = torch.from_numpy(tail_steps(targets.knots))
    if targets.top_k:
        at = slice(0, knots) if whole_tail else slice(one, one + 1)
        fresh = [each[0][:, at].clamp(min=LOWEST) for each in tails]
        yield "tail", targets.tail[:, at], step_M[0], fresh
    if whole_tail:
        yield "slopes", targets.tail[:, knots:], step_M[knots], [slopes_TG for _, slopes_TG in tails]
        moments = [torch.stack(torch.std_mean(each, -1, correction=0)[::-1], -1) for each in forwards]
        own = torch.stack([targets.logit_mean, targets.logit_std], -1)
        yield "moments", own, step_M[-1], moments


def _tail(logprobs_TV: Tensor, ids_TH: Tensor, knots: Sequence[float]) -> tuple[Tensor, Tensor]:
    """Compute the log-partition [T, knots] of the entries outside of `ids_TH`, and its slope."""
    tail_TV = logprobs_TV.scatter(1, ids_TH, -torch.inf)
    values = []
    slopes = []
    for beta in knots:
        values.append((beta * tail_TV).logsumexp(-1))
        slopes.append(((beta * tail_TV - values[-1][:, None]).exp() * logprobs_TV).sum(-1))
    return torch.stack(values, -1), torch.stack(slopes, -1)


# Samples.


def _score_samples(
    found: Evidence,
    targets: SparseTargets,
    logprobs_TV: Tensor,
    reference_TV: Tensor,
    independent: bool,
    points_TD: np.ndarray | None,
) -> None:
    """Add what the samples say, a few positions at a time: the sums of fp64 are as large as the logits."""
    number = targets.num_samples
    width = len(BINS) + 2
    sums = [np.zeros(width), np.zeros(width), np.zeros((width, width))]
    theirs = 0.0
    ours = 0.0
    positions = 0
    step = max(1, _CELLS // logprobs_TV.shape[1])
    for start in range(0, len(targets), step):
        part = slice(start, start + step)
        some_T = targets.counts[part, targets.top_k :].sum(-1) > 0  # an empty tail has none
        own_TV, exact_TV = logprobs_TV[part][some_T], reference_TV[part][some_T]
        ids_TH, drawn_TK = targets.ids[part][some_T].tensor_split([targets.top_k], 1)
        counts_TK = targets.counts[part, targets.top_k :][some_T].double() / number
        share_TV, right_TV = _share(own_TV, ids_TH), _share(exact_TV, ids_TH)
        bins_TV = torch.bucketize(own_TV, torch.tensor(BINS, device=own_TV.device).log())
        expected_TF = _features(bins_TV, own_TV, share_TV)
        there_TK = drawn_TK.where(counts_TK > 0, 0)
        observed_TF = _features(bins_TV.gather(1, there_TK), own_TV.gather(1, there_TK), counts_TK)
        shift_TF = _features(bins_TV, own_TV, right_TV) - expected_TF
        covariance = (_of_independent if independent else _of_grids)(bins_TV, own_TV, share_TV, expected_TF, number)
        for total, each in zip(sums, ((observed_TF - expected_TF).sum(0), shift_TF.sum(0), covariance), strict=True):
            total += each.cpu().numpy()
        if points_TD is not None:
            points = torch.from_numpy(points_TD[part]).to(own_TV.device)[some_T]
            ours_TD, right_TD = (_drawn(each, points) for each in (share_TV, right_TV))
            kept_TK = (right_TD[:, None] == there_TK[:, :, None]).sum(-1) / number
            theirs += (1 - torch.minimum(kept_TK, counts_TK).sum(-1)).sum().item()
            ours += _moved(ours_TD, right_TD)
            positions += len(points)
    found.samples = number
    found.deviation, found.shift, found.covariance = sums
    if positions:
        found.numbers["draws"] = max(theirs, 0.0) / positions, ours / positions, _FLOOR_SHARE


def _share(logprobs_TV: Tensor, ids_TH: Tensor) -> Tensor:
    """Compute the fp64 shares of the tail, 0 in the top-k; FLOOR entries have none."""
    weights_TV = logprobs_TV.double().exp().scatter_(1, ids_TH, 0.0)
    return weights_TV / weights_TV.sum(-1, keepdim=True).clamp(min=1e-300)


def _features(bins_TK: Tensor, logprobs_TK: Tensor, share_TK: Tensor) -> Tensor:
    """Compute the features [T, F] of a distribution or of samples: shares by bin, and mean log p."""
    by_bin = share_TK.new_zeros(len(share_TK), len(BINS) + 1).scatter_add_(1, bins_TK, share_TK)
    return torch.cat([by_bin, (share_TK * logprobs_TK).sum(-1, keepdim=True)], -1)


def _drawn(share_TV: Tensor, points_TD: Tensor) -> Tensor:
    """Look up the entries at points of the cumulative distribution."""
    cdf_TV = share_TV.cumsum(-1)
    points_TD = points_TD.expand(len(share_TV), -1) * cdf_TV[:, -1:]
    return torch.searchsorted(cdf_TV, points_TD, right=True).clamp_(max=share_TV.shape[1] - 1)


def _of_grids(bins_TV: Tensor, logprobs_TV: Tensor, share_TV: Tensor, expected_TF: Tensor, number: int) -> Tensor:
    """Compute the covariance [F, F] of systematic samples, over `PHASES` grids a position."""
    points = (torch.arange(number * PHASES, dtype=torch.float64, device=share_TV.device) + 0.5) / (number * PHASES)
    drawn_TDM = rearrange(_drawn(share_TV, points), "t (d m) -> (t m) d", m=PHASES)
    rows = torch.arange(len(share_TV), device=share_TV.device).repeat_interleave(PHASES)[:, None]
    each = share_TV.new_full(drawn_TDM.shape, 1 / number)
    away = _features(bins_TV[rows, drawn_TDM], logprobs_TV[rows, drawn_TDM], each) - expected_TF[rows[:, 0]]
    return away.T @ away / PHASES


def _of_independent(bins_TV: Tensor, logprobs_TV: Tensor, share_TV: Tensor, expected_TF: Tensor, number: int) -> Tensor:
    """Compute the covariance [F, F] of independent samples."""
    last, width = len(BINS) + 1, len(BINS) + 2
    second = share_TV.new_zeros(width, width)
    second.diagonal()[:last] = expected_TF[:, :last].sum(0)
    by_bin = share_TV.new_zeros(last).scatter_add_(0, bins_TV.flatten(), (share_TV * logprobs_TV).flatten())
    second[last, :last] = second[:last, last] = by_bin
    second[last, last] = (share_TV * logprobs_TV.double().square()).sum()
    return (second - expected_TF.T @ expected_TF) / number


def _moved(drawn_TD: Tensor, other_TD: Tensor) -> float:
    """Compute the share of samples that the other forward does not draw, summed over positions."""
    drawn_TD = drawn_TD.sort(-1).values
    nth_TD = torch.arange(drawn_TD.shape[1], device=drawn_TD.device) - torch.searchsorted(drawn_TD, drawn_TD)
    there_TD = (other_TD[:, None] == drawn_TD[:, :, None]).sum(-1)
    return (there_TD <= nth_TD).float().mean(-1).sum().item()


# The verdict.


def judge(rows: Sequence[Evidence], *, noise: float = NOISE, level: float = LEVEL) -> Verdict:
    """Test some rows. noise: how many times this machine's mean square of numeric noise is allowed."""
    tests = []
    sampled = [row for row in rows if row.deviation is not None]
    if sampled:
        away, covariance = (sum(getattr(row, name) for row in sampled) for name in ("deviation", "covariance"))
        shifts = [row.shift for row in sampled if row.shift is not None]
        covariance = covariance + noise * sum(np.outer(each, each) for each in [*shifts, sum(shifts)])
        positions = sum(row.positions for row in sampled)
        z = away[-1] / math.sqrt(max(covariance[-1, -1], 1e-30))
        tests.append(Test("likelihood", z, "z", math.erfc(abs(z) / math.sqrt(2)), away[-1] / positions))
        tests.append(_chi_square(away[:-1], covariance[:-1, :-1], sampled[0].samples))
    for name in dict.fromkeys(name for row in rows for name in row.numbers):
        known = [row.numbers[name] for row in rows if name in row.numbers]
        if len(known) > 1:
            found, own, steps = np.array(known).T
            logs = np.log(np.maximum(found, 0.01 * steps) / (noise * own + steps))  # over what is allowed
            tests.append(_mean_test(name, logs))
            tests += [_worst_test(logs)] if name == "label" else []
    return Verdict(len(rows), sum(row.positions for row in rows), tuple(tests), level)


def _chi_square(away: np.ndarray, covariance: np.ndarray, number: int) -> Test:
    """Compute the Wald statistic of shares by bin.

    A bin of too small a variance joins the next of more likely entries.
    """
    groups, open_group = [], []
    for index in range(len(away)):
        open_group.append(index)
        if covariance[np.ix_(open_group, open_group)].sum() * number**2 >= _LEAST_VARIANCE:
            groups.append(open_group)
            open_group = []
    if open_group and groups:
        groups[-1] += open_group
    sums = np.zeros((len(groups), len(away)))
    for row, group in enumerate(groups):
        sums[row, group] = 1
    away, covariance = sums @ away, sums @ covariance @ sums.T
    values, vectors = np.linalg.eigh(covariance) if len(groups) else (np.zeros(0), np.zeros((0, 0)))
    kept = values > 1e-6 * max(values.max(initial=0.0), 1e-30)  # shares sum to 1: one direction has no variance
    statistic = float(((vectors.T @ away)[kept] ** 2 / values[kept]).sum())
    df = int(kept.sum())
    p = (
        torch.special.gammaincc(torch.tensor(df / 2), torch.tensor(statistic / 2, dtype=torch.float64)).item()
        if df
        else 1.0
    )
    return Test("counts", statistic, f"chi2({df})", p, statistic / max(df, 1))


def _mean_test(name: str, logs_R: np.ndarray) -> Test:
    df = len(logs_R) - 1
    spread = logs_R.std(ddof=1) / math.sqrt(len(logs_R))
    least = 1e-9 if logs_R.mean() > 0 else _LEAST_SPREAD / math.sqrt(len(logs_R))  # without variance t shows nothing
    t = float(logs_R.mean() / max(spread, least))
    return Test(name, t, f"t({df})", student_tail(t, df), float(np.exp(logs_R.mean() / 2)))


def _worst_test(logs_R: np.ndarray) -> Test:
    number = len(logs_R)
    centre = max(float(np.median(logs_R)), 0.0)
    spread = max(1.4826 * float(np.median(np.abs(logs_R - np.median(logs_R)))), _LEAST_SPREAD)
    t = (float(logs_R.max()) - centre) / spread
    p = min(1.0, number * student_tail(t, number - 1))
    return Test("worst row", t, f"t({number - 1})", p, float(np.exp(logs_R.max() / 2)))


def worst_first(rows: Sequence[Evidence]) -> list[int]:
    """Sort the indices of rows by the distance of the label from the reference, the furthest first."""
    return sorted(range(len(rows)), key=lambda place: -rows[place].numbers.get("label", (0.0,))[0])


def student_tail(t: float, df: int) -> float:
    """Compute P(T > t) of Student's t: the integral of cos^(df-1) over angles, with t = sqrt(df) tan(angle)."""
    low = math.atan(abs(t) / math.sqrt(df))
    # towards the right angle the tail is a power: points of a logarithmic grid of the angle that is left
    left = np.geomspace(1e-30, math.pi / 2, 20_001)
    weight = np.sin(left) ** (df - 1)
    parts = (weight[1:] + weight[:-1]) / 2 * np.diff(left)
    upper = np.interp(math.log(max(math.pi / 2 - low, 1e-30)), np.log(left[1:]), parts.cumsum())
    tail = float(upper / parts.sum() / 2)
    return tail if t >= 0 else 1 - tail
