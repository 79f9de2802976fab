"""Which of the usual faults explains a cache that differs from its teacher: each is a distribution to compare it with.

Some faults are functions of the fresh log-probabilities (`variants`): another temperature, a cut at top-p, a top-k that
was scaled to sum to 1, the distributions of the next or the last position. Others need another forward, which the
caller gives: another document mask, rows without their first token, weights rounded to int8. Targets of other rows are
found by the tokens alone.

The misfit of a distribution to a row is the mean over positions of its KL from what the cache keeps: exact for whole
distributions, that of a top-k and its bucket, or cross-entropy to the samples less the entropy that the cache states.
This last one is too noisy to compare small faults by: for samples it is half the squared distance of the label's log p,
but for the two shifts, whose label may be either's. A fault
explains the share gain / (gain + what is left of the misfit); the largest share is the diagnosis, if it is at least
`LEAST` and the gain is 3 standard errors over rows, or the fault explains nearly all. Where none is, the weights are
others: the divergence says how far they are from the teacher's. Below `MOST` the fault is a part at best. Nor is it a
temperature where an end of their grid is the best of them: so it is with other weights.

What it gives up: two faults at once are seen as one of them, or as other weights; int8 stands for one rounding, one
scale a row of each matrix.

Shapes: T positions, V vocabulary, H top-k entries, R rows.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from kdtrain.objective.targets import DenseTargets, SparseTargets
from kdtrain.plugins.audit.evidence import LOWEST

TEMPERATURES = (0.5, 0.6, 0.7, 0.8, 0.85, 0.9, 0.95, 1.05, 1.1, 1.2, 1.35, 1.5, 2.0, 3.0)
TOP_P = (0.8, 0.9, 0.95, 0.99)
LEAST, MOST = 0.35, 0.9
"""The least share of the difference that a fault must explain to be named, and to be the one."""
_ERRORS = 3.0  # standard errors of a gain
_NEARLY_ALL = 0.8
_CUT = 4.0  # nats by which a fault makes an entry less likely, at most
_FURTHEST = 5.0  # nats: a label's log p that is further off counts as this much

AHEAD, BEHIND = "off by one: the targets of the next position", "off by one: the targets of the last position"
OTHER_WEIGHTS = "other weights: an earlier checkpoint, a fine-tuned or another model"
MASK = "another document mask"
LOST, ADDED = "rows without their first token (a lost BOS)", "a token before each row (an added BOS)"
INT8 = "weights rounded to int8"
RENORMALISED = "a top-k renormalised to sum to 1"

Gains = dict[str, tuple[float, float]]
"""By fault, of one row: its misfit, and that of the teacher itself over the same positions."""


@dataclass(frozen=True)
class Diagnosis:
    """The fault that explains the difference best."""

    fault: str
    share: float
    """Of the difference, 0 to 1; 0 for other weights."""
    divergence: float
    """KL from the cache to the teacher, or an estimate of it from samples: nats per token."""
    rows: int


def variants(logprobs_TV: Tensor, top_k: int = 0) -> dict[str, Tensor]:
    """Derive the distributions [T, V] that faults make of fresh ones. top_k: how many entries the cache keeps."""
    found = {f"temperature {t:g}": (logprobs_TV / t).log_softmax(-1) for t in TEMPERATURES}
    ordered = logprobs_TV.sort(-1, descending=True)
    before_TV = ordered.values.exp().cumsum(-1) - ordered.values.exp()
    for p in TOP_P:  # the entry that crosses p is kept
        cut_TV = torch.zeros_like(logprobs_TV, dtype=torch.bool).scatter_(1, ordered.indices, before_TV >= p)
        found[f"top-p {p:g}"] = logprobs_TV.masked_fill(cut_TV, -torch.inf).log_softmax(-1)
    if 0 < top_k < logprobs_TV.shape[1]:
        less_TV = logprobs_TV < ordered.values[:, top_k - 1 : top_k]
        found[RENORMALISED] = logprobs_TV.masked_fill(less_TV, -torch.inf).log_softmax(-1)
    return found


def gains(
    targets: SparseTargets | DenseTargets, labels_T: Tensor, logprobs_TV: Tensor, others: Mapping[str, Tensor]
) -> Gains:
    """Compute the misfits of one row under each fault. others: log p [T, V] of other forwards, by the fault's name."""
    own = misfit(targets, labels_T, logprobs_TV)

    exact = bool(targets.top_k or targets.width)
    softened_TV = logprobs_TV - _CUT

    def compared(logprobs_TV: Tensor, part: slice, by_label: bool) -> tuple[float, float]:
        # an entry at the edge of a cut falls on either side by noise, and must not cost everything
        cut = not by_label and logprobs_TV.isneginf().any()
        theirs = misfit(targets, labels_T, torch.maximum(logprobs_TV, softened_TV) if cut else logprobs_TV)
        return theirs[by_label][part].mean().item(), own[by_label][part].mean().item()

    found = {}
    for name, each in {**variants(logprobs_TV, targets.top_k), **others}.items():
        # a row's first position has no context without its first token
        found[name] = compared(each, slice(1 if name == LOST else 0, None), not exact)
    # whose label the cache's number would be about is not known
    for name, shift, part in ((AHEAD, -1, slice(0, -1)), (BEHIND, 1, slice(1, None))):
        found[name] = compared(logprobs_TV.roll(shift, 0), part, False)
    return found


def misfit(targets: SparseTargets | DenseTargets, labels_T: Tensor, logprobs_TV: Tensor) -> tuple[Tensor, Tensor]:
    """Compute, for each position [T], the KL from what the cache keeps to a distribution, and the label's misfit.

    The KL is in nats; the label's misfit is half the squared distance of its log p.
    """
    logprobs_TV = logprobs_TV.clamp(min=LOWEST)
    label_T = logprobs_TV.gather(1, labels_T[:, None])[:, 0]
    away_T = (label_T - targets.label_logprob.clamp(min=LOWEST)).clamp(-_FURTHEST, _FURTHEST)
    ids_TK, mass_TK = targets.listed()
    if targets.top_k:
        ids_TK, mass_TK = ids_TK[:, : targets.top_k], mass_TK[:, : targets.top_k]
    # an absent entry has an id beyond the vocabulary and no mass
    listed_TK = logprobs_TV.gather(1, ids_TK.where(ids_TK < logprobs_TV.shape[1], 0))
    cross_T = -(mass_TK * listed_TK).sum(-1)
    if targets.top_k or targets.width:
        cross_T += torch.special.xlogy(mass_TK, mass_TK).sum(-1)
        if targets.top_k:
            rest_T = (1 - mass_TK.sum(-1)).clamp(min=1e-6)
            left_T = logprobs_TV.scatter(1, ids_TK, -torch.inf).logsumexp(-1).clamp(min=LOWEST)
            cross_T += rest_T * (rest_T.log() - left_T)
    else:
        assert isinstance(targets, SparseTargets)
        cross_T += targets.tail[:, len(targets.knots) + targets.knots.index(1.0)]
    return cross_T, away_T.square() / 2


def diagnose(rows: Sequence[Gains], matched: Sequence[int | None] = ()) -> Diagnosis:
    """Find the fault that explains the rows best.

    matched: of each row the other row that its targets fit, or None.
    """
    number = len(rows)
    moved = sum(each is not None for each in matched)
    divergence = float(np.mean([row[AHEAD][1] for row in rows]))  # without the label's part
    if moved > len(matched) / 2:
        return Diagnosis("targets of other rows", moved / len(matched), divergence, number)
    shares = {name: _share(np.array([row[name] for row in rows])) for name in rows[0]}
    by_temperature = {t: shares.pop(f"temperature {t:g}") for t in TEMPERATURES}
    best = max(by_temperature, key=lambda each: by_temperature[each])
    if TEMPERATURES[0] < best < TEMPERATURES[-1]:
        shares[f"temperature {_temperature(rows, best):.3g}"] = by_temperature[best]
    # a shift explains all or nothing; in part it only spreads the mass as flatter weights do
    shares |= {name: 0.0 for name in (AHEAD, BEHIND) if shares[name] < MOST}
    fault = max(shares, key=lambda each: shares[each])
    if shares[fault] < LEAST:
        return Diagnosis(OTHER_WEIGHTS, 0.0, divergence, number)
    return Diagnosis(fault, shares[fault], divergence, number)


def _share(misfits_R2: np.ndarray) -> float:
    gain_R = misfits_R2[:, 1] - misfits_R2[:, 0]
    error = gain_R.std(ddof=1) / math.sqrt(len(gain_R)) if len(gain_R) > 1 else 0.0
    gain = float(gain_R.mean())
    share = gain / (gain + max(float(misfits_R2[:, 0].mean()), 0.0)) if gain > 0 else 0.0
    return share if gain > _ERRORS * error or share > _NEARLY_ALL else 0.0


def _temperature(rows: Sequence[Gains], best: float) -> float:
    """Interpolate the best temperature: the minimum of a parabola through it and its neighbours, in log T.

    T = 1 is the teacher itself.
    """
    known = {t: float(np.mean([row[f"temperature {t:g}"][0] for row in rows])) for t in TEMPERATURES}
    known[1.0] = float(np.mean([row[f"temperature {best:g}"][1] for row in rows]))
    order = sorted(known)
    place = order.index(best)
    three = order[place - 1 : place + 2]
    a, b, _ = np.polyfit(np.log(three), [known[t] for t in three], 2)
    return float(np.clip(np.exp(-b / (2 * a)), three[0], three[-1])) if a > 0 else best
