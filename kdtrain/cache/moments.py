"""The numbers of the tail in few bits: each is stored as its distance from a prediction.

A token's tail is 2G + 2 numbers: L(beta) and dL/dbeta at G knots, mean and standard deviation of log p.
They are nearly functions of each other and of the head. Each is predicted, linearly, from a few features of
the stored head and from the numbers before it as the reader will see them, and only the distance is stored,
in whole steps: so no error adds up, and each number is right to half its step. The weights come from least
squares over the shard's first tokens and stand in the shard.

    L: steps of 0.008 nats; slopes: 0.04 nats; mean and deviation: 0.05 nats

The reader has a triangular linear system for each token, which two matrix products solve for all of them.
What it gives up: a tail with L(1) below -200, which weighs nothing at any T up to 16, becomes an empty one,
and a distance beyond 32,766 steps is cut there (263 nats for L).

Shapes: N tokens, H head, G knots, M = 2G + 2 numbers, F features.
"""

from dataclasses import dataclass
from functools import cached_property

import numpy as np

STEP_VALUE, STEP_SLOPE, STEP_SPREAD = 0.008, 0.04, 0.05
"""Steps of L, of dL/dbeta, and of mean and deviation, nats."""
NOTHING = -200.0
"""L(1) below which a tail counts as empty."""
EMPTY_TAIL = -1e4
"""L of an empty tail; its slopes are 0."""
MARK = 2**16 - 1
"""The code, in place of the first number's, of an empty tail."""
_LARGEST = 32_766
_LARGEST_FEATURE = 50.0
_RIDGE = 1e-6
_GRAIN = 4096  # weights are multiples of 1/4096: rounding in the sums that made them does not show


def order(knots: tuple[float, ...]) -> list[int]:
    """Where the numbers (L at the knots, slopes, mean, deviation) stand, in the order they are stored in.

    L(1) first, then L at the lowest knot, then the others upwards; slopes likewise; mean; deviation.
    """
    one, last, number = knots.index(1.0), len(knots) - 1, len(knots)
    values = list(dict.fromkeys([one, last, *range(last, -1, -1)]))
    return [*values, *(number + g for g in values), 2 * number, 2 * number + 1]


def steps(knots: tuple[float, ...]) -> np.ndarray:
    """[M] the step of each number, in the order they are stored in."""
    number = len(knots)
    return np.array([STEP_VALUE] * number + [STEP_SLOPE] * number + [STEP_SPREAD] * 2, np.float32)


def features(head_logprobs_HN: np.ndarray) -> np.ndarray:
    """[F, N] fp32 of the head as stored: 1, and for H > 0 log p of its first, middle and last entry, their
    mean, the head's mass, and log(1 - mass), at least log 1e-3."""
    head, number = head_logprobs_HN.shape
    found_FN = np.ones((7 if head else 1, number), np.float32)
    if not head:
        return found_FN
    mass_N = np.add.reduce(np.exp(head_logprobs_HN), out=found_FN[5])
    np.log(np.maximum(1 - mass_N, np.float32(1e-3)), out=found_FN[6])
    # An entry that cannot be would drown the others.
    seen_HN = np.maximum(head_logprobs_HN, np.float32(-_LARGEST_FEATURE))
    found_FN[1], found_FN[2], found_FN[3] = seen_HN[0], seen_HN[head // 2], seen_HN[-1]
    np.divide(np.add.reduce(seen_HN), np.float32(head), out=found_FN[4])
    return found_FN


@dataclass(frozen=True)
class Predictor:
    """Weights [M, F + M] fp32: row i predicts number i from the features and the numbers before it."""

    weights: np.ndarray
    knots: tuple[float, ...]

    @classmethod
    def fit(cls, features_FN: np.ndarray, numbers_MN: np.ndarray, knots: tuple[float, ...]) -> "Predictor":
        """Least squares over tokens whose tail is not empty; `numbers_MN` as `order` has them."""
        there_N = numbers_MN[0] > NOTHING
        known_N = np.concatenate([features_FN, numbers_MN])[:, there_N].astype(np.float64)
        width, count = len(features_FN), max(1, int(there_N.sum()))
        gram = known_N @ known_N.T / count
        weights = np.zeros((len(numbers_MN), len(known_N)), np.float32)
        for i in range(len(numbers_MN)):
            size = width + i
            solution = np.linalg.solve(gram[:size, :size] + _RIDGE * np.eye(size), gram[:size, width + i])
            weights[i, :size] = np.round(solution * _GRAIN) / _GRAIN
        return cls(weights, knots)

    def encode(self, features_FN: np.ndarray, numbers_MN: np.ndarray) -> np.ndarray:
        """Codes [M, N] uint16: distances in steps, 0, -1, 1, -2, 2 ... as 0, 1, 2, 3, 4 ..."""
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
        """[M, F + M] fp32: L at the knots, slopes, mean and deviation are this times (features, distances in steps)."""
        width = self.weights.shape[1] - len(self.weights)
        weights = self.weights.astype(np.float64)
        inverse = np.linalg.inv(np.eye(len(weights)) - weights[:, width:])
        solved = np.hstack([inverse @ weights[:, :width], inverse * steps(self.knots)])
        return np.ascontiguousarray(solved[np.argsort(order(self.knots))], np.float32)

    @property
    def largest(self) -> float:
        """The size that no number exceeds, whatever is stored; not finite where the weights are too large for fp32."""
        width = self.weights.shape[1] - len(self.weights)
        bounds = [_LARGEST_FEATURE] * width + [_LARGEST + 2] * len(self.weights)
        return float((np.abs(self._solved).astype(np.float64) @ bounds).max())

    def decode(self, features_FN: np.ndarray, codes_MN: np.ndarray) -> np.ndarray:
        """L at the knots, slopes, mean and deviation [M, N] fp32, in this order."""
        empty_N = codes_MN[0] == MARK
        known_N = np.empty((self._solved.shape[1], codes_MN.shape[1]), np.float32)
        known_N[: len(features_FN)] = features_FN
        known_N[len(features_FN) :] = (codes_MN >> 1).view(np.int16) ^ -(codes_MN & 1).view(np.int16)
        if not empty_N.any():
            return self._solved @ known_N
        number = len(self.knots)
        known_N[len(features_FN), empty_N] = 0
        numbers_MN = self._solved @ known_N
        numbers_MN[:number, empty_N] = EMPTY_TAIL
        numbers_MN[number : 2 * number, empty_N] = 0
        return numbers_MN
