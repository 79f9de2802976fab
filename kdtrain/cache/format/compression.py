"""Compressing what `codec.encode` keeps of a sequence into the few bits that are stored, and back.

Stored arrays have positions last, [n, rows, T]: bits of one kind then lie together, which saves a tenth. Everything but
the ids is in one array (`numbers`), because reading another array costs as much as 4 KiB of data. All of it is numpy.
A training step waits for `unpack`: it makes columns, [K, n, T], and targets are views of these, because transposing
them would cost a fifth of its time. Lists and weights are fitted to a shard's first sequences and stored in the shard,
so that it can be read alone.

Log-probabilities are whole numbers c with log p = 1 - exp(c / 192): steps of 1/192 nats at p = 1 that grow in
proportion to 1 - log p, so that an error never exceeds (1 - log p) / 383. Entries stand in descending order, and what
is stored is the difference to the entry before: a small number. The log-probability of the label is stored only where
the label is not in the top-k.

Ids are stored as their places in lists. Which entries are likely depends most on the token just read. A shard therefore
holds, for each frequent token, the entries most often kept after it (`candidates`), and one list of all entries by how
often they are kept (`common`). An id is stored as its place in the first list that has it, so that most codes are small
and compress well:

    code 0                       absent
    code 1 .. C                  candidates[context_row[token just read], code - 1]
    code C+1 .. C+U              common[code - C - 1]
    code above C+U               the id itself, plus C + U + 1

Entries of which only counts are kept stand by count, the largest first, and by code where counts are equal. Stored is
how much each count is below the one before (the first: the count), and each code less the one before where the counts
are equal. They read back with log (count / D) for log p, moved by one number a token, so that the mean over the samples
is the slope of the tail, E[log p]: a divergence from them is then as large as with log p.

A pair of token and entry is listed when it occurs `MIN_COUNT` times: listing it costs about two bytes and saves about
one byte an occurrence.

The tail is 2G + 2 numbers per token: L(beta) and dL/dbeta at G knots, mean and standard deviation of log p. They are
nearly functions of each other and of the top-k. A linear predictor gives each from a few features of the stored top-k
and from the numbers before it as the reader will see them, and only the distance to the prediction is stored, in whole
steps: errors do not add up, and each number is right to half its step. The weights come from least squares over the
shard's first tokens. The reader solves a triangular linear system for each token, by two matrix products for all.
Where only counts are kept, weights are whole steps, so that every number is a multiple of its step: such a sequence is
stored again as it was, whatever the shard it moves to, which `merge` needs. It costs 0.1 % more bytes.

    L: steps of 0.008 nats; slopes: 0.04 nats; mean and deviation: 0.05 nats

What it gives up: an id cannot be read without its shard's lists. A tail with L(1) below -200, which weighs nothing at
any T up to 16, becomes an empty one, and a distance beyond 32,766 steps is cut there (263 nats for L).

Shapes: n sequences, T positions, N = n*T tokens, V vocabulary, K kept entries, H top-k entries, D samples, G knots,
M = 2G + 2 numbers of the tail, F features, R rows of candidates, C of them a row, U common entries.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Self

import numpy as np
from einops import rearrange

from kdtrain.cache.format.spec import FINENESS, WIDTH, CodecSpec, steps
from kdtrain.objective.targets import FLOOR

NOTHING = -200.0
"""A tail with L(1) below it counts as empty."""
MARK = 2**16 - 1
"""The code of an empty tail, in place of its first number's."""
_LARGEST = 32_766
_LARGEST_FEATURE = 50.0
_RIDGE = 1e-6
_GRAIN = 4096  # weights are multiples of 1/4096: rounding in the sums they are fitted from does not show


def order(knots: tuple[float, ...]) -> list[int]:
    """Return the indices of the numbers (L at the knots, slopes, mean, deviation) in stored order.

    L(1) first, then L at the lowest knot, then the others upwards; slopes likewise; mean; deviation.
    """
    one = knots.index(1.0)
    last = len(knots) - 1
    number = len(knots)
    values = list(dict.fromkeys([one, last, *range(last, -1, -1)]))
    return [*values, *(number + g for g in values), 2 * number, 2 * number + 1]


def features(top_logprobs_HN: np.ndarray) -> np.ndarray:
    """Return [F, N] fp32 of the top-k as stored: 1, and for H > 0 log p of its first, middle and last entry, their
    mean, the top-k's mass, and log(1 - mass), at least log 1e-3."""
    top_k, number = top_logprobs_HN.shape
    found_FN = np.ones((7 if top_k else 1, number), np.float32)
    if not top_k:
        return found_FN
    mass_N = np.add.reduce(np.exp(top_logprobs_HN), out=found_FN[5])
    np.log(np.maximum(1 - mass_N, np.float32(1e-3)), out=found_FN[6])
    # An impossible entry (log p = FLOOR) would drown the others.
    seen_HN = np.maximum(top_logprobs_HN, np.float32(-_LARGEST_FEATURE))
    found_FN[1], found_FN[2], found_FN[3] = seen_HN[0], seen_HN[top_k // 2], seen_HN[-1]
    np.divide(np.add.reduce(seen_HN), np.float32(top_k), out=found_FN[4])
    return found_FN


@dataclass(frozen=True)
class Predictor:
    """Weights [M, F + M] fp32: row i predicts number i from the features and the numbers before it."""

    weights: np.ndarray
    knots: tuple[float, ...]

    @classmethod
    def fit(cls, features_FN: np.ndarray, numbers_MN: np.ndarray, knots: tuple[float, ...]) -> Predictor:
        """Fit the weights by least squares over tokens with a tail; `numbers_MN` is in the order of `order`."""
        if len(knots) == 1:
            return cls(_whole_weights(numbers_MN, knots), knots)
        there_N = numbers_MN[0] > NOTHING
        known_N = np.concatenate([features_FN, numbers_MN])[:, there_N].astype(np.float64)
        width = len(features_FN)
        count = max(1, int(there_N.sum()))
        gram = known_N @ known_N.T / count
        weights = np.zeros((len(numbers_MN), len(known_N)), np.float32)
        for i in range(len(numbers_MN)):
            size = width + i
            solution = np.linalg.solve(gram[:size, :size] + _RIDGE * np.eye(size), gram[:size, width + i])
            weights[i, :size] = np.round(solution * _GRAIN) / _GRAIN
        return cls(weights, knots)

    def encode(self, features_FN: np.ndarray, numbers_MN: np.ndarray) -> np.ndarray:
        """Return codes [M, N] uint16: the distances in steps, 0, -1, 1, -2, 2 ... as 0, 1, 2, 3, 4 ..."""
        empty_N = ~(numbers_MN[0] > NOTHING)
        number, width = len(numbers_MN), len(features_FN)
        known_N = np.concatenate([features_FN, np.zeros_like(numbers_MN)]).astype(np.float32)
        codes_MN = np.zeros(numbers_MN.shape, np.uint16)
        for i, step in enumerate(steps(self.knots)):
            predicted_N = self.weights[i, : width + i] @ known_N[: width + i]
            distance_N = np.round((numbers_MN[i] - predicted_N) / step).clip(-_LARGEST, _LARGEST)
            if i < number - 2:
                distance_N[empty_N] = 0
            known_N[width + i] = predicted_N + step * distance_N
            codes_MN[i] = np.where(distance_N < 0, -2 * distance_N - 1, 2 * distance_N)
        codes_MN[0, empty_N] = MARK
        return codes_MN

    @cached_property
    def _solved(self) -> np.ndarray:
        """[M, F + M] fp32: times (features, distances in steps) it is L at the knots, slopes, mean and deviation."""
        width = self.weights.shape[1] - len(self.weights)
        weights = self.weights.astype(np.float64)
        inverse = np.linalg.inv(np.eye(len(weights)) - weights[:, width:])
        solved = np.hstack([inverse @ weights[:, :width], inverse * steps(self.knots)])
        return np.ascontiguousarray(solved[np.argsort(order(self.knots))], np.float32)

    @property
    def largest(self) -> float:
        """A bound on every number, whatever codes are stored; non-finite where the weights are too large for fp32."""
        width = self.weights.shape[1] - len(self.weights)
        bounds = [_LARGEST_FEATURE] * width + [_LARGEST + 2] * len(self.weights)
        return float((np.abs(self._solved).astype(np.float64) @ bounds).max())

    def decode(self, features_FN: np.ndarray, codes_MN: np.ndarray) -> np.ndarray:
        """Return L at the knots, slopes, mean and deviation [M, N] fp32, in this order."""
        empty_N = codes_MN[0] == MARK
        known_N = np.empty((self._solved.shape[1], codes_MN.shape[1]), np.float32)
        known_N[: len(features_FN)] = features_FN
        known_N[len(features_FN) :] = (codes_MN >> 1).view(np.int16) ^ -(codes_MN & 1).view(np.int16)
        if not empty_N.any():
            return self._solved @ known_N
        number = len(self.knots)
        known_N[len(features_FN), empty_N] = 0
        numbers_MN = self._solved @ known_N
        numbers_MN[:number, empty_N] = FLOOR
        numbers_MN[number : 2 * number, empty_N] = 0
        return numbers_MN


def _whole_weights(numbers_MN: np.ndarray, knots: tuple[float, ...]) -> np.ndarray:
    """Return weights [M, 1 + M] that map multiples of the steps to such multiples: a constant, and one earlier number,
    as it is or negated, where that makes the distances shorter. All sums are of whole numbers, hence the same on any
    machine."""
    step_M = steps(knots)
    counts_MN = _in_steps(numbers_MN, knots)
    weights = np.zeros((len(counts_MN), 1 + len(counts_MN)), np.float32)
    for i, wanted_N in enumerate(counts_MN):
        found = []
        for sign, j in [(0, 0), *((sign, j) for j in range(i) for sign in (-1, 1))]:
            rest_N = wanted_N - sign * counts_MN[j]
            middle = np.partition(rest_N, len(rest_N) // 2)[len(rest_N) // 2]
            found.append((int(np.abs(rest_N - middle).sum()), sign, j, middle))
        _, sign, j, middle = min(found, key=lambda each: each[0])
        weights[i, 0] = middle * step_M[i]
        weights[i, 1 + j] += sign * step_M[i] / step_M[j]
    return weights


def _in_steps(numbers_MN: np.ndarray, knots: tuple[float, ...]) -> np.ndarray:
    """Return int64 [M, N]: each number in steps, rounded to the nearest."""
    return np.round(numbers_MN / steps(knots).astype(np.float64)[:, None]).astype(np.int64)


MIN_COUNT = 3
"""How often a pair of token and entry occurs before it is worth listing."""


@dataclass(frozen=True)
class Dictionary:
    """The lists of ids of one shard. `absent` is the id of an absent entry, before and after coding."""

    context_row: np.ndarray
    """[V] unsigned: the row of candidates for a token just read; row 0 is empty."""
    candidates: np.ndarray
    """[R, C] ids, most frequent first; `absent` where a row has fewer."""
    common: np.ndarray
    """[U] ids, most frequent first."""
    absent: int
    _lists: np.ndarray = field(init=False, repr=False)

    def __post_init__(self) -> None:
        # `decode` looks ids up in all lists end to end; `candidates` and `common` become views of that one array.
        rows = np.pad(self.candidates, ((0, 0), (1, 0)), constant_values=self.absent)
        lists = np.concatenate([rows.ravel(), self.common])
        object.__setattr__(self, "_lists", lists)
        object.__setattr__(self, "candidates", lists[: rows.size].reshape(rows.shape)[:, 1:])
        object.__setattr__(self, "common", lists[rows.size :])

    @classmethod
    def fit(cls, context_N: np.ndarray, ids_NK: np.ndarray, vocab_size: int, absent: int) -> Dictionary:
        """Make the lists for N tokens. context_N: the token just read; ids_NK: the entries kept after it."""
        dtype = np.min_scalar_type(absent)
        here_NK = ids_NK != absent
        ids = ids_NK[here_NK].astype(np.int64)
        counts_V = np.bincount(ids, minlength=vocab_size)
        by_count_V = np.argsort(-counts_V, kind="stable")
        common = by_count_V[: max(1, np.count_nonzero(counts_V))].astype(dtype)
        contexts = np.broadcast_to(context_N[:, None], ids_NK.shape)[here_NK].astype(np.int64)
        pairs, counts = np.unique(contexts * vocab_size + ids, return_counts=True)
        often = counts >= MIN_COUNT
        rows, candidates = _ranked(pairs[often], counts[often], vocab_size, absent)
        context_row = np.zeros(vocab_size, np.min_scalar_type(max(1, len(rows))))
        context_row[rows] = np.arange(1, len(rows) + 1)
        return cls(context_row, candidates.astype(dtype), common, absent)

    @property
    def literal_base(self) -> int:
        """The code of the id 0, spelled out."""
        return WIDTH + 1 + len(self.common)

    @cached_property
    def _pairs(self) -> tuple[np.ndarray, np.ndarray]:
        """Listed pairs, row * V + id, ascending, and the code of each."""
        rows, places = np.nonzero(self.candidates != self.absent)
        pairs = rows * len(self.context_row) + self.candidates[rows, places].astype(np.int64)
        order = np.argsort(pairs)
        return pairs[order], places[order] + 1

    @cached_property
    def _plain(self) -> np.ndarray:
        """[V] the code of an id that is not a candidate."""
        codes_V = self.literal_base + np.arange(len(self.context_row))
        codes_V[self.common] = WIDTH + 1 + np.arange(len(self.common))
        return codes_V

    def encode(self, context_N: np.ndarray, ids_NK: np.ndarray) -> np.ndarray:
        """Return the codes [N, K] int64 of `ids_NK`."""
        here_NK = ids_NK != self.absent
        ids_NK = np.where(here_NK, ids_NK, 0).astype(np.int64)
        codes_NK = self._plain[ids_NK]
        pairs, places = self._pairs
        if len(pairs):
            wanted_NK = self.context_row[context_N].astype(np.int64)[:, None] * len(self.context_row) + ids_NK
            found_NK = np.searchsorted(pairs, wanted_NK).clip(max=len(pairs) - 1)
            codes_NK = np.where(pairs[found_NK] == wanted_NK, places[found_NK], codes_NK)
        return np.where(here_NK, codes_NK, 0)

    def decode(self, context_T: np.ndarray, codes_KT: np.ndarray) -> np.ndarray:
        """Return the ids [K, T] of one sequence, in the lists' dtype. IndexError: a code is not in the dictionary."""
        beyond = np.int32(len(self._lists) - self.literal_base)
        start_T = np.take(self.context_row, context_T).astype(np.int32) * (WIDTH + 1)
        place_KT = np.where(codes_KT <= WIDTH, start_T, beyond)
        place_KT = np.add(place_KT, codes_KT, dtype=np.intp, casting="unsafe")
        literal_KT = codes_KT >= self.literal_base
        if not literal_KT.any():
            return np.take(self._lists, place_KT)
        spelled_KT = codes_KT.astype(np.int64) - self.literal_base
        if spelled_KT.max() >= len(self.context_row):
            raise IndexError(f"the id {spelled_KT.max()} is outside the vocabulary")
        place_KT[literal_KT] = 0
        return np.where(literal_KT, spelled_KT.astype(self._lists.dtype), np.take(self._lists, place_KT))


def _ranked(pairs: np.ndarray, counts: np.ndarray, vocab_size: int, absent: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the contexts that have candidates, ascending, and their candidates [1 + contexts, C], row 0 empty."""
    contexts, ids = np.divmod(pairs, vocab_size)
    order = np.lexsort((ids, -counts, contexts))
    contexts, ids = contexts[order], ids[order]
    rows, first, number = np.unique(contexts, return_index=True, return_counts=True)
    place = np.arange(len(ids)) - np.repeat(first, number)
    candidates = np.full((1 + len(rows), WIDTH), absent, np.int64)
    kept = place < WIDTH
    candidates[np.repeat(np.arange(1, len(rows) + 1), number)[kept], place[kept]] = ids[kept]
    return rows, candidates


FIT_ENTRIES = 2**22
"""Kept entries of a shard that its lists and weights are fitted to."""
LOWEST = round(FINENESS * np.log1p(-FLOOR))
"""The code of an impossible entry."""
_LOGPROBS = -np.expm1(np.arange(LOWEST + 1) / FINENESS)
_LOGPROBS[-1] = FLOOR
_LOGPROBS = np.append(_LOGPROBS, np.full(2**16 - len(_LOGPROBS), np.nan)).astype(np.float32)
Arrays = dict[str, np.ndarray]


def logprob_codes(logprobs: np.ndarray) -> np.ndarray:
    """Return the int64 codes of log-probabilities; NaN counts as impossible."""
    energy = -np.nan_to_num(np.asarray(logprobs, np.float64), nan=FLOOR, posinf=0.0, neginf=FLOOR)
    return np.round(FINENESS * np.log1p(energy.clip(0, -FLOOR))).astype(np.int64)


def logprobs_of(codes: np.ndarray) -> np.ndarray:
    """Return the fp32 log-probabilities of uint16 codes; NaN for codes beyond the lowest."""
    return np.take(_LOGPROBS, codes)


@dataclass(frozen=True)
class Coding:
    """The coding of one shard's sequences: the codec, its lists and its weights."""

    spec: CodecSpec
    dictionary: Dictionary
    predictor: Predictor

    @classmethod
    def fit(cls, tokens_nT1: np.ndarray, kept: Arrays, spec: CodecSpec) -> Self:
        """Fit the lists and weights to sequences [n, T + 1] and their encoded arrays ([n, T, ...], `codec.encode`)."""
        context_N = tokens_nT1[:, :-1].reshape(-1)
        ids_NK = rearrange(kept["ids"], "n t k -> (n t) k")
        dictionary = Dictionary.fit(context_N, ids_NK, spec.vocab_size, spec.absent)
        predictor = Predictor.fit(_features(_entry_codes(kept, spec), spec), _numbers(kept, spec), spec.knots)
        return cls(spec, dictionary, predictor)

    def pack(self, tokens_nT1: np.ndarray, kept: Arrays) -> Arrays:
        """Return the stored arrays [n, ..., T] of the encoded arrays [n, T, ...]."""
        spec = self.spec
        length = kept["ids"].shape[1]
        ids_NK = rearrange(kept["ids"], "n t k -> (n t) k")
        id_codes = self.dictionary.encode(tokens_nT1[:, :-1].reshape(-1), ids_NK)
        codes_nKT = rearrange(id_codes, "(n t) k -> n k t", t=length)
        entry_codes_nKT = _entry_codes(kept, spec)
        moment_codes = self.predictor.encode(_features(entry_codes_nKT, spec), _numbers(kept, spec))
        in_top_nT = (kept["ids"][..., : spec.top_k] == tokens_nT1[:, 1:, None]).any(-1)
        label_nT = np.where(in_top_nT, 0, logprob_codes(kept["label_logprob"])).astype(np.uint16)
        if spec.counts_only:
            codes_nKT, below_nKT = _by_count(codes_nKT, rearrange(kept["counts"], "n t k -> n k t"))
            entry_parts = [below_nKT]
        else:
            entry_parts = [np.diff(entry_codes_nKT, axis=1, prepend=0)]
        if spec.num_samples and not spec.counts_only:
            entry_parts.append(rearrange(kept["counts"][..., spec.top_k :], "n t d -> n d t"))
        parts_nRT = [*entry_parts, rearrange(moment_codes, "m (n t) -> n m t", t=length), label_nT[:, None]]
        return {
            "ids": codes_nKT.astype(spec.code_dtype),
            "numbers": np.concatenate(parts_nRT, 1).astype(np.uint16),
        }

    def unpack_one(self, tokens_T1: np.ndarray, ids_KT: np.ndarray, numbers_RT: np.ndarray, columns: Arrays) -> None:
        """Write the encoded arrays of one sequence into `columns`, each [..., T], as `unpack` allocates them.

        ids_KT and numbers_RT are its stored arrays. IndexError: a code that the dictionary does not have.
        """
        spec, entries = self.spec, self.spec.columns
        if spec.counts_only:
            ids_KT, counts_KT = _counted(ids_KT, numbers_RT[:entries])
            logprobs_KT = np.take(self._shares, counts_KT)
            plain_T = np.einsum("kt,kt->t", counts_KT, logprobs_KT, dtype=np.float32) / spec.num_samples
        else:
            codes_KT = numbers_RT[:entries].copy()
            for k in range(1, entries):  # np.cumsum along rows takes three times as long
                np.add(codes_KT[k - 1], codes_KT[k], out=codes_KT[k])
            logprobs_KT = logprobs_of(codes_KT)
            counts_KT = numbers_RT[entries : entries + spec.num_samples]
        ids_KT = self.dictionary.decode(tokens_T1[:-1], ids_KT)
        known_FT = features(logprobs_KT[: spec.top_k])
        columns["ids"][:], columns["logprobs"][:] = ids_KT, logprobs_KT
        columns["tail"][:] = self.predictor.decode(known_FT, numbers_RT[spec.entry_rows : -1])
        if spec.counts_only:
            columns["logprobs"] += columns["tail"][1] - plain_T
        # The code of a label in the top-k is 0, which reads as 0.
        known_HT = np.multiply(ids_KT[: spec.top_k] == tokens_T1[1:], logprobs_KT[: spec.top_k])
        columns["label_logprob"][:] = logprobs_of(numbers_RT[-1]) + np.add.reduce(known_HT)
        if spec.num_samples:
            columns["counts"][: spec.top_k] = 0
            columns["counts"][spec.top_k :] = counts_KT

    @cached_property
    def _shares(self) -> np.ndarray:
        """[256] fp32: log (count / D) of each count, FLOOR for the count 0."""
        counts = np.arange(256, dtype=np.float32)
        return np.log(counts / np.float32(self.spec.num_samples), where=counts > 0, out=np.full_like(counts, FLOOR))

    def to_arrays(self) -> Arrays:
        """Return the data sets of the group `dictionary` of a shard."""
        lists = {name: getattr(self.dictionary, name) for name in ("context_row", "candidates", "common")}
        return {**lists, "tail_weights": self.predictor.weights}

    @classmethod
    def from_arrays(cls, arrays: Arrays, spec: CodecSpec) -> Self:
        """Make a coding from the data sets that `to_arrays` returns. KeyError: one is missing."""
        lists = Dictionary(arrays["context_row"], arrays["candidates"], arrays["common"], spec.absent)
        return cls(spec, lists, Predictor(arrays["tail_weights"], spec.knots))


def unpack(sequences: Sequence[tuple[Coding, np.ndarray, np.ndarray, np.ndarray]]) -> Arrays:
    """Return the encoded arrays [n, T, ...] of sequences, which may come from several shards; views of columns.

    It is the inverse of `Coding.pack` up to its stated errors.

    Each sequence is its coding, its tokens [T + 1] and its stored ids and numbers. They are unpacked one at a time:
    the working set stays in a core's cache, and the result is the only large array.
    """
    spec = sequences[0][0].spec
    length = len(sequences[0][1]) - 1
    shapes = {"ids": (spec.columns, "i8"), "logprobs": (spec.columns, "f4"), "tail": (2 * len(spec.knots) + 2, "f4")}
    shapes |= {"label_logprob": (1, "f4")} | ({"counts": (spec.columns, "u1")} if spec.num_samples else {})
    columns = {name: np.empty((rows, len(sequences), length), dtype) for name, (rows, dtype) in shapes.items()}
    for i, (coding, tokens_T1, ids_KT, numbers_RT) in enumerate(sequences):
        coding.unpack_one(tokens_T1, ids_KT, numbers_RT, {k: v[:, i] for k, v in columns.items()})
    kept = {name: rearrange(values, "k n t -> n t k") for name, values in columns.items()}
    numbers = kept.pop("tail")
    kept |= {"tail": numbers[..., :-2], "logit_mean": numbers[..., -2], "logit_std": numbers[..., -1]}
    return {**kept, "label_logprob": kept["label_logprob"][..., 0]}


def _by_count(codes_nKT: np.ndarray, counts_nKT: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Sort the entries by count and code, as they are stored; return codes and counts, each as differences, int64.

    One sort of numbers that hold both, along rows of memory, takes a third of a `lexsort`'s time.
    """
    keys_nTK = (255 - rearrange(counts_nKT, "n k t -> n t k").astype(np.int64)) << 32
    keys_nKT = rearrange(np.sort(keys_nTK | rearrange(codes_nKT, "n k t -> n t k")), "n t k -> n k t")
    codes_nKT = keys_nKT & 0xFFFFFFFF
    counts_nKT = 255 - (keys_nKT >> 32)
    below_nKT = np.diff(counts_nKT, axis=1, prepend=0)
    steps_nKT = np.diff(codes_nKT, axis=1, prepend=0)
    below_nKT[:, 1:] *= -1
    steps_nKT[:, :1], here = codes_nKT[:, :1], below_nKT != 0
    return np.where(here, codes_nKT, steps_nKT), below_nKT


def _counted(ids_KT: np.ndarray, below_KT: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the codes (int32 or int64) and counts of one sequence, both [K, T]: the inverse of `_by_count`."""
    # a sum of at most 255 codes of 16 bits fits into 32
    codes_KT = ids_KT.astype(np.int32 if ids_KT.dtype == np.uint16 else np.int64)
    counts_KT = below_KT.copy()
    equal_KT = below_KT == 0
    before_T = np.empty_like(codes_KT[0])
    for k in range(1, len(codes_KT)):
        np.subtract(counts_KT[k - 1], below_KT[k], out=counts_KT[k])
        np.multiply(codes_KT[k - 1], equal_KT[k], out=before_T)
        np.add(codes_KT[k], before_T, out=codes_KT[k])
    return codes_KT, counts_KT


def _entry_codes(kept: Arrays, spec: CodecSpec) -> np.ndarray:
    """Return codes [n, K, T], ascending along K: an absent entry (NaN) repeats the one before; counts alone: K = 0."""
    if spec.counts_only:
        return np.zeros((len(kept["ids"]), 0, kept["ids"].shape[1]), np.int64)
    logprobs_nTK = kept["logprobs"]
    absent_nTK = np.isnan(logprobs_nTK)
    codes_nTK = np.where(absent_nTK, 0, logprob_codes(logprobs_nTK))
    return rearrange(np.maximum.accumulate(codes_nTK, axis=-1), "n t k -> n k t")


def _features(codes_nKT: np.ndarray, spec: CodecSpec) -> np.ndarray:
    return features(rearrange(logprobs_of(codes_nKT[:, : spec.top_k]), "n h t -> h (n t)"))


def _numbers(kept: Arrays, spec: CodecSpec) -> np.ndarray:
    """Return [M, N] fp32: the numbers of the tail, in stored order."""
    parts = [kept["tail"], kept["logit_mean"][..., None], kept["logit_std"][..., None]]
    numbers_nTM = np.concatenate([part.astype(np.float32) for part in parts], -1)
    numbers_MN = rearrange(numbers_nTM[..., order(spec.knots)], "n t m -> m (n t)")
    if not spec.counts_only:
        return numbers_MN
    return (_in_steps(numbers_MN, spec.knots) * steps(spec.knots)[:, None]).astype(np.float32)
