"""What `codec.encode` keeps of a sequence, as the few bits that are stored, and back.

log-probabilities: whole numbers c with log p = 1 - exp(c / 192): steps of 1/192 nats at p = 1 that grow in
proportion to 1 - log p, so that an error never exceeds (1 - log p) / 383. Entries stand in descending
order, and what is stored is the difference to the entry before: small numbers. The log-probability of the
label is stored only where the label is not in the head. Ids: see `dictionary`. Tail, mean and deviation:
see `moments`. Lists and weights are made from a shard's first sequences and stored with it.

Stored arrays have positions last, [n, K, T]: bits of one kind then lie together, which saves a tenth.
Everything is numpy; `unpack` is what a training step waits for.

Shapes: n sequences, T positions, K kept entries, H head, D draws, M numbers of the tail (stored with the
label's as one more), N = n*T.
"""

from collections.abc import Sequence
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
        return unpack([self] * len(tokens_nT1), tokens_nT1, stored)

    def unpack_one(self, tokens_T1: np.ndarray, stored: Arrays, kept: Arrays) -> None:
        """Write what was kept of one sequence into the arrays [T, ...] of `kept`."""
        spec, number = self.spec, len(self.spec.knots)
        ids_KT = self.dictionary.decode(tokens_T1[:-1], stored["ids"])
        logprobs_KT = logprobs_of(np.cumsum(stored["logprobs"], axis=0, dtype=np.uint16))
        numbers_MT = self.predictor.decode(features(logprobs_KT[: spec.head]), stored["tail"][:-1])
        kept["ids"][:], kept["logprobs"][:] = ids_KT.T, logprobs_KT.T
        kept["tail"][:] = numbers_MT[self.predictor.places[: 2 * number]].T
        kept["logit_mean"][:], kept["logit_std"][:] = numbers_MT[2 * number :]
        kept["label_logprob"][:] = logprobs_of(stored["tail"][-1])
        place, position = np.nonzero(ids_KT[: spec.head] == tokens_T1[1:])
        kept["label_logprob"][position] = logprobs_KT[place, position]
        if spec.draws:
            kept["draws"][:, : spec.head], kept["draws"][:, spec.head :] = 0, stored["draws"].T

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


def unpack(codings: Sequence[Coding], tokens_nT1: np.ndarray, stored: Arrays) -> Arrays:
    """What was kept of sequences [n, T, ...], which may come from several shards: one coding each.

    One sequence at a time: what it needs stays in a core's cache, and no large array is made but the result.
    """
    spec, n, length = codings[0].spec, len(tokens_nT1), tokens_nT1.shape[1] - 1
    kept = {name: np.empty((n, length, *shape), dtype) for name, (shape, dtype) in _kept_layout(spec).items()}
    tokens_nT1 = tokens_nT1.astype(np.int64)
    for i, coding in enumerate(codings):
        one = {name: values[i] for name, values in stored.items()}
        coding.unpack_one(tokens_nT1[i], one, {name: values[i] for name, values in kept.items()})
    return kept


def _kept_layout(spec: CodecSpec) -> dict[str, tuple[tuple[int, ...], str]]:
    columns, numbers = (spec.columns,), (2 * len(spec.knots),)
    single: tuple[tuple[int, ...], str] = ((), "f4")
    found = dict.fromkeys(("label_logprob", "logit_mean", "logit_std"), single)
    found |= {"ids": (columns, "i8"), "logprobs": (columns, "f4"), "tail": (numbers, "f4")}
    return found | ({"draws": (columns, "u1")} if spec.draws else {})


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
