"""What `codec.encode` keeps of a sequence, as the few bits that are stored, and back.

log-probabilities: whole numbers c with log p = 1 - exp(c / 192): steps of 1/192 nats at p = 1 that grow in
proportion to 1 - log p, so that an error never exceeds (1 - log p) / 383. Entries stand in descending
order, and what is stored is the difference to the entry before: small numbers. The log-probability of the
label is stored only where the label is not in the head. Ids: see `dictionary`. Tail, mean and deviation:
see `moments`. Lists and weights are made from a shard's first sequences and stored with it.

Stored arrays have positions last, [n, rows, T]: bits of one kind then lie together, which saves a tenth. All
but the ids stand in one of them (`numbers`), because each one that is read costs as much as 4 KiB of it.
Everything is numpy; `unpack` is what a training step waits for: it makes columns, [K, n, T], which targets
are then views of, because turning them would cost a fifth of its time.

Shapes: n sequences, T positions, K kept entries, H head, D draws, M numbers of the tail, N = n*T.
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
LOWEST = round(FINENESS * np.log1p(-FLOOR))
"""The code of what cannot be."""
_LOGPROBS = -np.expm1(np.arange(LOWEST + 1) / FINENESS)
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
        parts_nRT = [
            np.diff(entry_codes_nKT, axis=1, prepend=0),
            rearrange(kept["draws"][..., spec.head :], "n t d -> n d t") if spec.draws else entry_codes_nKT[:, :0],
            rearrange(moment_codes, "m (n t) -> n m t", t=length),
            label_nT[:, None],
        ]
        return {
            "ids": rearrange(id_codes, "(n t) k -> n k t", t=length).astype(spec.code_dtype),
            "numbers": np.concatenate(parts_nRT, 1).astype(np.uint16),
        }

    def unpack(self, tokens_nT1: np.ndarray, stored: Arrays) -> Arrays:
        """What was kept [n, T, ...], as the reader sees it; the inverse of `pack` up to its stated errors."""
        return unpack([(self, tokens, {k: v[i] for k, v in stored.items()}) for i, tokens in enumerate(tokens_nT1)])

    def unpack_one(self, tokens_T1: np.ndarray, ids_KT: np.ndarray, numbers_RT: np.ndarray, columns: Arrays) -> None:
        """Write what was kept of one sequence into `columns`, each [.., T], see `empty`.

        ids_KT and numbers_RT are its stored arrays. IndexError: a code that the dictionary does not have.
        """
        spec, entries = self.spec, self.spec.columns
        ids_KT = self.dictionary.decode(tokens_T1[:-1], ids_KT)
        codes_KT = numbers_RT[:entries].copy()
        for k in range(1, entries):  # np.cumsum along rows takes three times as long
            np.add(codes_KT[k - 1], codes_KT[k], out=codes_KT[k])
        logprobs_KT = logprobs_of(codes_KT)
        known_FT = features(logprobs_KT[: spec.head])
        columns["ids"][:], columns["logprobs"][:] = ids_KT, logprobs_KT
        columns["tail"][:] = self.predictor.decode(known_FT, numbers_RT[entries + spec.draws : -1])
        # The code of a label in the head is 0, which reads as 0.
        known_HT = np.multiply(ids_KT[: spec.head] == tokens_T1[1:], logprobs_KT[: spec.head])
        columns["label_logprob"][:] = logprobs_of(numbers_RT[-1]) + np.add.reduce(known_HT)
        if spec.draws:
            columns["draws"][: spec.head], columns["draws"][spec.head :] = 0, numbers_RT[entries : entries + spec.draws]

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


def unpack(sequences: Sequence[tuple[Coding, np.ndarray, Arrays]]) -> Arrays:
    """What was kept of sequences, which may come from several shards: arrays [n, T, ...], views of columns.

    Each sequence is its coding, its tokens [T + 1] and its stored arrays.
    One at a time: what it needs stays in a core's cache, and no large array is made but the result.
    """
    spec, length = sequences[0][0].spec, len(sequences[0][1]) - 1
    shapes = {"ids": (spec.columns, "i8"), "logprobs": (spec.columns, "f4"), "tail": (2 * len(spec.knots) + 2, "f4")}
    shapes |= {"label_logprob": (1, "f4")} | ({"draws": (spec.columns, "u1")} if spec.draws else {})
    columns = {name: np.empty((rows, len(sequences), length), dtype) for name, (rows, dtype) in shapes.items()}
    for i, (coding, tokens_T1, stored) in enumerate(sequences):
        coding.unpack_one(tokens_T1, stored["ids"], stored["numbers"], {k: v[:, i] for k, v in columns.items()})
    kept = {name: rearrange(values, "k n t -> n t k") for name, values in columns.items()}
    numbers = kept.pop("tail")
    kept |= {"tail": numbers[..., :-2], "logit_mean": numbers[..., -2], "logit_std": numbers[..., -1]}
    return {**kept, "label_logprob": kept["label_logprob"][..., 0]}


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
