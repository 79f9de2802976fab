"""Checks of the numbers in a shard, for caches from any origin: masks and lists when a shard is opened, and sequences
when they are first read, as they are stored and as they unpack. `hdf5.check_structure` has checked the file before.

What it gives up: it does not see numbers that are possible and wrong, so a stranger's cache may still teach anything.
"""

import math

import numpy as np

from kdtrain.cache.format.compression import LOWEST, Arrays, Coding
from kdtrain.cache.format.names import BROKEN
from kdtrain.cache.format.spec import CodecSpec
from kdtrain.objective.targets import FLOOR

MASS = 1.05
"""The largest sum of probabilities that is 1: codes err by (1 - log p) / 383, and the tail by half a step of 0.008."""
_ROUNDED = 1e-3  # nats by which rounding may lift a log-probability above 0
_LARGEST, _LEAST = 1e30, -2e4  # bounds of a prediction for the tail, and of a number of the tail


def check_lists(coding: Coding) -> None:
    """Raise ValueError if a list has an impossible id, or the weights cannot predict."""
    lists, weights, size = coding.dictionary, coding.predictor.weights, coding.spec.vocab_size
    if lists.context_row.max() >= len(lists.candidates) or lists.common.max() >= size:
        raise ValueError("its dictionary has an entry that is out of range")
    if ((lists.candidates >= size) & (lists.candidates != lists.absent)).any():
        raise ValueError("its dictionary has an entry that is out of range")
    if not np.isfinite(weights).all() or np.triu(weights[:, weights.shape[1] - len(weights) :]).any():
        raise ValueError("its dictionary has weights that predict nothing")
    with np.errstate(all="ignore"):
        largest = coding.predictor.largest
    if not largest < _LARGEST:
        raise ValueError("its dictionary has weights that predict nothing finite")


def check_flags(loss_mask_nT: np.ndarray, segments_nT: np.ndarray) -> None:
    """Raise ValueError if a mask or a segment has a value that the format does not have."""
    if loss_mask_nT.max() > BROKEN:
        raise ValueError(f"its loss_mask has the value {loss_mask_nT.max()}")
    if segments_nT.max() >= segments_nT.shape[1]:
        raise ValueError(f"its segments have the number {segments_nT.max()} in {segments_nT.shape[1]} positions")


def check_tokens(tokens_nT1: np.ndarray, spec: CodecSpec) -> None:
    """Raise ValueError if a token is not an entry of the vocabulary."""
    if (largest := tokens_nT1.max()) >= spec.vocab_size:
        raise ValueError(f"the token {largest} is outside of the vocabulary of {spec.vocab_size}")


def check_stored(arrays: Arrays, spec: CodecSpec) -> None:
    """Raise ValueError if sequences [n, ...], as they are stored, have impossible numbers."""
    check_tokens(arrays["tokens"], spec)
    if spec.written and not (arrays[spec.POLICY].min() >= FLOOR and arrays[spec.POLICY].max() <= _ROUNDED):
        raise ValueError("the student's log-probability of a label is not between -10,000 and 0")
    if spec.coded:
        numbers_nRT = arrays["numbers"]
        entries = spec.columns
        wide = np.uint32 if entries < 2**16 else np.uint64  # sums do not wrap around
        if numbers_nRT[:, -1].max() == np.iinfo(np.uint16).max:
            raise ValueError("it lacks targets")
        entry_codes_nKT = numbers_nRT[:, : 0 if spec.counts_only else entries]
        if max(numbers_nRT[:, -1].max(), entry_codes_nKT.sum(1, wide).max()) > LOWEST:
            raise ValueError("a log-probability is not between -10,000 and 0")
        counts = numbers_nRT[:, entries : entries + spec.num_samples]
        if spec.counts_only:
            _check_counts(numbers_nRT[:, :entries], spec.num_samples)
        elif counts.size and counts.sum(1, wide).max() > spec.num_samples:
            raise ValueError(f"more than {spec.num_samples} samples were drawn for a token")
    elif spec.taught:
        if np.isnan(arrays["label_logprob"]).any():
            raise ValueError("it lacks targets")
        if not (_are_logprobs(arrays["label_logprob"]) and _are_logprobs(arrays["logprobs"])):
            raise ValueError("a log-probability is not between -10,000 and 0")


def _check_counts(below_nDT: np.ndarray, number: int) -> None:
    """Raise ValueError if counts, stored as differences to the one before, are below 0 or not `number` a token."""
    count_nT = below_nDT[:, 0].astype(np.int32)
    total_nT = count_nT.copy()
    for k in range(1, below_nDT.shape[1]):
        count_nT -= below_nDT[:, k]
        total_nT += count_nT
    # counts only fall, so that the last is the least; 255 numbers of 16 bits leave no sum here beyond 32
    if count_nT.min() < 0:
        raise ValueError("an entry was drawn less than 0 times")
    if (total_nT != number).any():
        raise ValueError(f"not {number} samples were drawn for a token")


def _are_logprobs(values: np.ndarray) -> bool:
    """Return True if all fp16 `values` lie between `FLOOR` and 0, up to rounding. Compares integers, which is fast."""
    # As integers, fp16 above 0 ascends, with NaN after infinity; below 0, with the sign bit set, it descends.
    most, least = np.array([1e-3, FLOOR], np.float16).view(np.int16), np.float16(FLOOR).view(np.uint16)
    return bool(values.view(np.int16).max() <= most[0] and values.view(np.uint16).max() <= least)


def check_values(kept: Arrays, spec: CodecSpec) -> None:
    """Raise ValueError if unpacked sparse sequences, arrays [n, T, ...], are not distributions."""
    ids = kept["ids"]
    top_k = spec.top_k
    one = spec.knots.index(1.0)
    if top_k and ids[..., :top_k].max() >= spec.vocab_size:
        raise ValueError("one of the top-k entries is absent")
    with np.errstate(over="ignore"):
        tail_nT = np.exp(kept["tail"][..., one])
    top_nT = _mass(kept["logprobs"][..., :top_k]) if top_k else np.zeros_like(tail_nT)
    drawn_nT = np.zeros_like(tail_nT)
    if spec.num_samples:
        absent = ids[..., top_k:] == spec.absent
        if (absent != (kept["counts"][..., top_k:] == 0)).any():
            raise ValueError("a sample has no count, or a count no sample")
        if not spec.counts_only:  # which holds no log p of them
            drawn_nT = _mass(np.where(absent, FLOOR, kept["logprobs"][..., top_k:]))
    if not (top_nT + np.maximum(drawn_nT, tail_nT)).max() <= MASS:
        raise ValueError("the probabilities of a token sum to more than 1")
    number = len(spec.knots)
    most = math.log(spec.vocab_size) + 0.1
    for name, found, low, high in (
        ("log-partition", kept["tail"][..., :number], _LEAST, most),
        ("slope", kept["tail"][..., number:], _LEAST, 0.1),
        ("mean", kept["logit_mean"], _LEAST, 0.1),
        ("deviation", kept["logit_std"], -0.1, -_LEAST),
    ):
        if not (found.min() >= low and found.max() <= high):
            raise ValueError(f"the {name} of a tail is out of range")


def _mass(logprobs_nTK: np.ndarray) -> np.ndarray:
    """Return [n, T], the sum of the probabilities of each token."""
    # One column at a time: a temporary as large as all columns takes longer, here and in the next `unpack`.
    mass_nT = np.exp(logprobs_nTK[..., 0])
    for k in range(1, logprobs_nTK.shape[-1]):
        mass_nT += np.exp(logprobs_nTK[..., k])
    return mass_nT
