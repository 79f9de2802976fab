"""Adding the samples of caches of the same rows: counts, label and tail of the sum, position by position.

A cache of samples alone holds counts c with the mean D p. Counts of caches of one teacher whose grids interleave are
those of one finer grid, and their sum is what one capture would have drawn, bit by bit. Counts of several teachers,
each with a weight w (by default its share of all samples), make samples of the mixture sum w p: the share of an entry
is sum w c / D. Where the weights are the shares of the samples, these are whole counts; else `resampled` draws whole
ones. The label has log sum w p, exactly; the other numbers are weighted means. That of E[log p] makes the reported KL
the mean of the members' KLs, which is above the KL to the mixture by the members' Jensen-Shannon divergence.

Shapes: N tokens, D samples of one cache, K samples of all.
"""

from collections.abc import Sequence
from fractions import Fraction

import numpy as np

from kdtrain.cache.tools.merge_plan import total_shares, whole_shares
from kdtrain.objective.targets import SparseTargets


def add(
    parts: Sequence[SparseTargets], weights: Sequence[Fraction], place_N: np.ndarray, absent: int
) -> dict[str, np.ndarray]:
    """What is kept of N tokens (see `codec.encode`) from the targets of several caches of them.

    weights: one a cache, summing to 1. place_N: int64 in [0, 2**32), where each token's samples are drawn, see
    `resampled`. absent: the id of an absent entry.
    """
    numbers = [part.num_samples for part in parts]
    shares = whole_shares(weights, numbers)
    drawn = [part.counts.numpy().astype(np.int64) * share for part, share in zip(parts, shares, strict=True)]
    ids_NK, drawn_NK = _united([part.ids.numpy() for part in parts], drawn)
    counts_NK = resampled(drawn_NK, total_shares(shares, numbers), sum(numbers), place_N)
    wide = [float(weight) for weight in weights]
    label_N = np.zeros(len(ids_NK))
    means = {"tail": 0.0, "logit_mean": 0.0, "logit_std": 0.0}  # type: dict[str, np.ndarray | float]
    for part, weight in zip(parts, wide, strict=True):
        label_N += weight * np.exp(part.label_logprob.numpy().astype(np.float64))
        for name in means:
            means[name] = means[name] + weight * getattr(part, name).numpy().astype(np.float64)
    with np.errstate(divide="ignore"):
        label_N = np.log(label_N)
    return {
        "ids": np.where(counts_NK > 0, ids_NK, absent),
        "counts": counts_NK.astype(np.uint8),
        "label_logprob": label_N,
        **means,  # type: ignore[dict-item]
    }


def _united(ids: Sequence[np.ndarray], drawn: Sequence[np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
    """Distinct ids [N, K] in ascending order, and what was drawn of each; zeros in the columns left over."""
    ids_NK, drawn_NK = np.concatenate(ids, -1), np.concatenate(drawn, -1)
    order_NK = np.argsort(ids_NK, axis=-1, kind="stable")
    ids_NK, drawn_NK = np.take_along_axis(ids_NK, order_NK, -1), np.take_along_axis(drawn_NK, order_NK, -1)
    new_NK = np.diff(ids_NK, axis=-1, prepend=-1) != 0
    group_NK = np.cumsum(new_NK, axis=-1) - 1 + np.arange(len(ids_NK))[:, None] * ids_NK.shape[1]
    found, total = np.zeros(ids_NK.size, np.int64), np.zeros(ids_NK.size, np.int64)
    found[group_NK.ravel()] = ids_NK.ravel()
    np.add.at(total, group_NK.ravel(), drawn_NK.ravel())
    return found.reshape(ids_NK.shape), total.reshape(ids_NK.shape)


def resampled(drawn_NK: np.ndarray, total: int, number: int, place_N: np.ndarray) -> np.ndarray:
    """Counts [N, K] that sum to `number`, systematic samples of the shares drawn_NK / total, which sum to 1.

    The count of a share s is number * s, rounded down or up, with this mean; s that are whole multiples of 1 / number
    keep their counts. The variance of count / number is f (1 - f) / number^2, f the fraction of number * s.
    """
    whole_NK, rest_NK = np.divmod(np.cumsum(drawn_NK, axis=-1) * number, total)
    until_NK = whole_NK + (rest_NK / total > place_N[:, None] / 2**32)
    return np.diff(until_NK, axis=-1, prepend=0)
