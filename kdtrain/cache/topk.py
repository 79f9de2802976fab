"""What is kept of a distribution of which only the most likely entries are known.

The rest of the vocabulary is one bucket, spread evenly: that is right at T = 1 and nowhere else, and the
manifest's range says so. With n entries outside the head and log p = e for each, L(beta) = log n + beta e.

Shapes: T positions, H head entries, G knots.
"""

from typing import Any

import numpy as np

from kdtrain.cache.codec import FLOOR, CodecSpec
from kdtrain.errors import UsageError

RANGE: dict[str, Any] = {
    "min": 1.0,
    "max": 1.0,
    "worst_error": 0.0,
    "rule": "log-probabilities from elsewhere: the tail is one bucket, right at T = 1 only",
}
"""The temperature range of a cache made from such log-probabilities."""
_LEAST_MASS = 1e-6


def keep(ids_TH: np.ndarray, logprobs_TH: np.ndarray, label_T: np.ndarray, spec: CodecSpec) -> dict[str, np.ndarray]:
    """The arrays of `codec.encode`, for one sequence: `ids_TH` and `logprobs_TH` are the head, most likely
    first; a position with NaN counts as an even distribution; a label with NaN gets its share of the bucket.

    UsageError: an id beyond the vocabulary.
    """
    if ids_TH.max() >= spec.vocab_size:
        raise UsageError(f"--from-logprobs has the id {ids_TH.max()}, the teacher's vocabulary only {spec.vocab_size}")
    logprobs_TH = np.where(np.isnan(logprobs_TH), -np.log(spec.vocab_size), logprobs_TH).clip(FLOOR, 0)
    rest = spec.vocab_size - spec.head
    mass_T = (1 - np.exp(logprobs_TH).sum(-1)).clip(min=_LEAST_MASS)
    each_T = np.log(mass_T / max(1, rest))
    knots = np.array(spec.knots)
    values_TG = np.log(max(1, rest)) + knots * each_T[:, None] if rest else np.full((len(each_T), len(knots)), FLOOR)
    slopes_TG = np.repeat(each_T[:, None] if rest else np.zeros_like(each_T)[:, None], len(knots), 1)
    mean_T = (logprobs_TH.sum(-1) + rest * each_T) / spec.vocab_size
    square_T = (np.square(logprobs_TH).sum(-1) + rest * np.square(each_T)) / spec.vocab_size
    kept = {
        "logprobs": logprobs_TH,
        "tail": np.concatenate([values_TG, slopes_TG], -1),
        "label_logprob": np.where(np.isnan(label_T), each_T, label_T),
        "logit_mean": mean_T,
        "logit_std": np.sqrt((square_T - np.square(mean_T)).clip(min=0)),
    }
    arrays = {name: values.astype(np.float32) for name, values in kept.items()}
    return {**arrays, "ids": ids_TH.astype(spec.id_dtype)}
