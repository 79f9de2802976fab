"""What `codec.encode` keeps of a sequence, as the few bits that are stored, and back.

log-probabilities: whole numbers c with log p = 1 - exp(c / 192): steps of 1/192 nats at p = 1 that grow in
proportion to 1 - log p, so that an error never exceeds (1 - log p) / 383. Entries stand in descending
order, and what is stored is the difference to the entry before: small numbers. The log-probability of the
label is stored only where the label is not in the head. Ids: see `dictionary`. Tail, mean and deviation:
see `moments`. Lists and weights are made from a shard's first sequences and stored with it.

Stored arrays have positions last, [n, K, T]: bits of one kind then lie together, which saves a tenth.
Everything is numpy and works on whole batches; `unpack` is what a training step waits for.

Shapes: n sequences, T positions, K kept entries, H head, D draws, M numbers of the tail (stored with the
label's as one more), N = n*T.
"""

from dataclasses import dataclass
from typing import Self

import numpy as np
from einops import rearrange

from kdtrain.cache.codec import FLOOR, CodecSpec
from kdtrain.cache.dictionary import Dictionary
from kdtrain.cache.moments import Predictor, features, order

FIT_ENTRIES = 2**22
"""Kept entries of a shard that its lists and weights are made from."""
FINENESS = 192
"""Codes of log p a unit of log(1 - log p)."""
_LOWEST = round(FINENESS * np.log1p(-FLOOR))  # the code of what cannot be
_LOGPROBS = -np.expm1(np.arange(_LOWEST + 1) / FINENESS)
_LOGPROBS[-1] = FLOOR
_LOGPROBS = np.append(_LOGPROBS, np.full(2**16 - len(_LOGPROBS), np.nan)).astype(np.float32)
Arrays = dict[str, np.ndarray]


def fit_sequences(spec: CodecSpec, seq_len: int) -> int:
    """How many of a shard's first sequences its lists and weights are made from."""
    return max(1, FIT_ENTRIES // (spec.columns * seq_len))


def logprob_codes(logprobs: np.ndarray) -> np.ndarray:
    """int64 codes of log-probabilities; NaN counts as what cannot be."""
    energy = -np.nan_to_num(np.asarray(logprobs, np.float64), nan=FLOOR, posinf=0.0, neginf=FLOOR)
    return np.round(FINENESS * np.log1p(energy.clip(0, -FLOOR))).astype(np.int64)


def logprobs_of(codes: np.ndarray) -> np.ndarray:
    """fp32 log-probabilities of uint16 codes; NaN for codes beyond the lowest."""
    return np.take(_LOGPROBS, codes)


@dataclass(frozen=True)
class Coding:
    """How the sequences of one shard are stored: the codec, its lists and its weights."""

    spec: CodecSpec
    dictionary: Dictionary
    predictor: Predictor

    @classmethod
    def fit(cls, tokens_nT1: np.ndarray, kept: Arrays, spec: CodecSpec) -> Self:
        """Lists and weights for sequences [n, T + 1] and what is kept of them ([n, T, ...], `codec.encode`)."""
        context_N = tokens_nT1[:, :-1].reshape(-1)
        ids_NK = rearrange(kept["ids"], "n t k -> (n t) k")
        dictionary = Dictionary.fit(context_N, ids_NK, spec.vocab_size, spec.absent)
        codes_nKT = _entry_codes(kept["logprobs"])
        predictor = Predictor.fit(_features(codes_nKT, spec), _numbers(kept, spec), spec.knots)
        return cls(spec, dictionary, predictor)

    def pack(self, tokens_nT1: np.ndarray, kept: Arrays) -> Arrays:
        """The stored arrays [n, ..., T] of what is kept [n, T, ...]."""
        spec, length = self.spec, kept["ids"].shape[1]
        ids_NK = rearrange(kept["ids"], "n t k -> (n t) k")
        id_codes = self.dictionary.encode(tokens_nT1[:, :-1].reshape(-1), ids_NK)
        entry_codes_nKT = _entry_codes(kept["logprobs"])
        moment_codes = self.predictor.encode(_features(entry_codes_nKT, spec), _numbers(kept, spec))
        in_head_nT = (kept["ids"][..., : spec.head] == tokens_nT1[:, 1:, None]).any(-1)
        label_nT = np.where(in_head_nT, 0, logprob_codes(kept["label_logprob"])).astype(np.uint16)
        tail_nMT = rearrange(moment_codes, "m (n t) -> n m t", t=length)
        stored = {
            "ids": rearrange(id_codes, "(n t) k -> n k t", t=length).astype(spec.code_dtype),
            "logprobs": np.diff(entry_codes_nKT, axis=1, prepend=0).astype(np.uint16),
            "tail": np.concatenate([tail_nMT, label_nT[:, None]], 1),
        }
        if spec.draws:
            stored["draws"] = rearrange(kept["draws"][..., spec.head :], "n t d -> n d t")
        return stored

    def unpack(self, tokens_nT1: np.ndarray, stored: Arrays) -> Arrays:
        """What was kept, as the reader sees it; the inverse of `pack` up to its stated errors."""
        return unpack([(self, len(tokens_nT1))], tokens_nT1, stored)

    def to_arrays(self) -> Arrays:
        """The data sets of the group `dictionary` of a shard."""
        lists = self.dictionary
        return {
            "context_row": lists.context_row,
            "candidates": lists.candidates,
            "common": lists.common,
            "tail_weights": self.predictor.weights,
        }

    @classmethod
    def from_arrays(cls, arrays: Arrays, spec: CodecSpec) -> Self:
        """The inverse of `to_arrays`. KeyError: one is missing."""
        lists = Dictionary(arrays["context_row"], arrays["candidates"], arrays["common"], spec.absent)
        return cls(spec, lists, Predictor(arrays["tail_weights"], spec.knots))


def unpack(parts: list[tuple[Coding, int]], tokens_nT1: np.ndarray, stored: Arrays) -> Arrays:
    """What was kept of sequences [n, T, ...] that come from several shards: the first so many from the first
    part's, and so on. A batch is unpacked as one as far as that goes: that is what makes reading fast."""
    spec, length = parts[0][0].spec, tokens_nT1.shape[1] - 1
    logprobs_nKT = logprobs_of(np.cumsum(stored["logprobs"], axis=1, dtype=np.uint16))
    features_FN = features(rearrange(logprobs_nKT[:, : spec.head], "n h t -> h (n t)"))
    moments_MN = rearrange(stored["tail"][:, :-1], "n m t -> m (n t)")
    ids, numbers, start = [], [], 0
    for coding, number in parts:
        rows, places = slice(start, start + number), slice(start * length, (start + number) * length)
        ids.append(coding.dictionary.decode(tokens_nT1[rows, :-1], stored["ids"][rows]))
        numbers.append(coding.predictor.decode(features_FN[:, places], moments_MN[:, places]))
        start += number
    ids_nKT = np.concatenate(ids)
    numbers_MN = np.concatenate(numbers, 1)[np.argsort(order(spec.knots))]
    numbers_nTM = rearrange(numbers_MN, "m (n t) -> n t m", t=length)
    kept = {
        "ids": rearrange(ids_nKT, "n k t -> n t k"),
        "logprobs": rearrange(logprobs_nKT, "n k t -> n t k"),
        "tail": numbers_nTM[..., :-2],
        "logit_mean": numbers_nTM[..., -2],
        "logit_std": numbers_nTM[..., -1],
        "label_logprob": _labels(tokens_nT1, ids_nKT[:, : spec.head], logprobs_nKT, stored["tail"][:, -1]),
    }
    if spec.draws:
        counts_nTD = rearrange(stored["draws"], "n d t -> n t d")
        kept["draws"] = np.pad(counts_nTD, ((0, 0), (0, 0), (spec.head, 0)))
    return kept


def _labels(tokens_nT1: np.ndarray, ids_nHT: np.ndarray, logprobs_nKT: np.ndarray, codes_nT: np.ndarray) -> np.ndarray:
    label_nT = logprobs_of(codes_nT)
    n, k, t = np.nonzero(ids_nHT == tokens_nT1[:, None, 1:])
    label_nT[n, t] = logprobs_nKT[n, k, t]
    return label_nT


def _entry_codes(logprobs_nTK: np.ndarray) -> np.ndarray:
    """Codes [n, K, T], never falling along K: an absent entry (NaN) repeats the one before."""
    absent_nTK = np.isnan(logprobs_nTK)
    codes_nTK = np.where(absent_nTK, 0, logprob_codes(logprobs_nTK))
    return rearrange(np.maximum.accumulate(codes_nTK, axis=-1), "n t k -> n k t")


def _features(codes_nKT: np.ndarray, spec: CodecSpec) -> np.ndarray:
    return features(rearrange(logprobs_of(codes_nKT[:, : spec.head]), "n h t -> h (n t)"))


def _numbers(kept: Arrays, spec: CodecSpec) -> np.ndarray:
    """[M, N] fp32 in the order they are stored in."""
    parts = [kept["tail"], kept["logit_mean"][..., None], kept["logit_std"][..., None]]
    numbers_nTM = np.concatenate([part.astype(np.float32) for part in parts], -1)
    return rearrange(numbers_nTM[..., order(spec.knots)], "n t m -> m (n t)")
