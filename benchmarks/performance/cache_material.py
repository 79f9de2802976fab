"""Teachers and text for cache.py: the shipped teacher, and synthetic ones like it of any vocabulary.

A synthetic teacher takes the probability of each rank, position by position, from the shipped teacher over a real
sequence; ranks beyond that teacher's vocabulary fall on as 1 / rank. So the mass of its 12 most likely entries, its
entropy, and how both vary are the shipped teacher's. Which entry has which rank depends on the context: the `MOVED`
most frequent entries are ranked by log(id + 1) plus noise of the token just read plus noise of the position, all others
by id. The two noises are set, by bisection, such that two figures of the shipped teacher's own text come out again:
`token_repetition`, the share of tokens that occur earlier in the sequence, and `head_repetition`, the mean share of
the 12 entries that two positions after the same token have in common. Tokens are drawn from the teacher's distribution
at each position. Everything is a pure function of seeds. What this gives up: a real text of a large vocabulary repeats
less, so that its ids cost more.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.harness import TEACHER
from benchmarks.harness.models import packed, teacher_logits, token_tensor
from kdtrain.cache.write.fidelity import Teacher
from kdtrain.data.packed import PackedRow

HEAD = 12
MOVED = 4096
"""Entries whose rank depends on the context."""
_SAMPLE = 4096  # tokens that the figures are measured on
Facts = dict[str, float]


@dataclass(frozen=True)
class Material:
    """A teacher and its text."""

    name: str
    vocab_size: int
    seq_len: int
    rows: dict[str, list[Any]]
    teacher: Teacher
    facts: Facts
    """top_12_mass, entropy (nats), token_repetition, head_repetition, on 4,096 tokens."""


def shipped(number: int, length: int) -> Material:
    """Load the teacher of the repository over the standard library, with `number` sequences to train on."""
    parts = {split: packed(TEACHER, split, n, length) for split, n in wanted(number).items()}
    teacher = teacher_logits(TEACHER)
    sample = token_tensor(parts["train"][: max(1, _SAMPLE // length)]).numpy()
    logprobs_NV = torch.cat([teacher(torch.from_numpy(row[None, :-1]), None)[0].log_softmax(-1) for row in sample])
    top = logprobs_NV.topk(HEAD, -1)
    entropy = -(logprobs_NV.exp() * logprobs_NV).sum(-1)
    facts = {"top_12_mass": float(top.values.exp().sum(-1).mean()), "entropy": float(entropy.mean())}
    facts |= _repetition(sample, top.indices.numpy().reshape(len(sample), -1, HEAD))
    return Material(Path(TEACHER).stem, logprobs_NV.shape[1], length, parts, teacher, facts)


def wanted(number: int) -> dict[str, int]:
    """Return the number of sequences by split."""
    return {"train": number, "validation": max(2, number // 16)}


def _repetition(tokens_nT1: np.ndarray, heads_nTK: np.ndarray) -> Facts:
    """Measure how often tokens come again, and top-k entries after the same token."""
    seen = np.mean([len(row) - len(set(row.tolist())) for row in tokens_nT1]) / tokens_nT1.shape[1]
    last: dict[int, set[int]] = {}
    shared = []
    for token, head in zip(tokens_nT1[:, :-1].ravel().tolist(), heads_nTK.reshape(-1, HEAD).tolist(), strict=True):
        if token in last:
            shared.append(len(last[token] & set(head)) / HEAD)
        last[token] = set(head)
    return {"token_repetition": float(seen), "head_repetition": float(np.mean(shared))}


class Synthetic:
    """A teacher over `vocab_size` entries that is like `model`, with the repetition of `model.facts`."""

    def __init__(self, vocab_size: int, model: Material, known: Facts | None = None) -> None:
        self.vocab_size, self.length, self._model = vocab_size, model.seq_len, model
        self._real = [row for part in model.rows.values() for row in part]
        self._moved = min(MOVED, vocab_size)
        if known is not None:
            self.facts, self.of_token, self.of_position = known, known["noise_of_token"], known["noise_of_position"]
            return
        self.of_token, self.of_position = 1.0, 1.0
        shapes, whole = [], []
        for number in range(max(1, _SAMPLE // self.length)):
            shape_TV = self.shape(number)
            p_TV = np.exp(shape_TV)
            whole.append((p_TV[:, :HEAD].sum(1).mean(), -(p_TV * shape_TV).sum(1).mean()))
            shapes.append(shape_TV[:, : self._moved].copy())  # a thousandth of the mass is beyond
        for _ in range(3):
            self._solve("of_token", "token_repetition", shapes)
            self._solve("of_position", "head_repetition", shapes)
        noises = {"noise_of_token": self.of_token, "noise_of_position": self.of_position}
        mass, entropy = np.mean(whole, 0).tolist()
        self.facts = {"top_12_mass": mass, "entropy": entropy, **self._found(shapes), **noises}

    def _solve(self, name: str, fact: str, shapes: list[np.ndarray]) -> None:
        low, high = 0.0, 8.0
        for _ in range(7):
            middle = (low + high) / 2
            setattr(self, name, middle)
            low, high = (low, middle) if self._found(shapes)[fact] < self._model.facts[fact] else (middle, high)

    def _found(self, shapes: list[np.ndarray]) -> Facts:
        made = [self.sequence(number, shape) for number, shape in enumerate(shapes)]
        tokens, heads = (np.stack(each) for each in zip(*made, strict=True))
        return _repetition(tokens, heads)

    def shape(self, number: int) -> np.ndarray:
        """Return fp32 log p [T, V] by rank, from the real sequence `number`."""
        row = self._real[number % len(self._real)]
        known_TV = self._model.teacher(torch.from_numpy(row.tokens[None, :-1].astype(np.int64)), None)[0]
        known_TV = known_TV.log_softmax(-1).sort(-1, descending=True).values
        beyond = torch.arange(known_TV.shape[1], self.vocab_size)
        fallen_TV = known_TV[:, -1:] - (beyond / known_TV.shape[1]).log()
        return torch.cat([known_TV, fallen_TV], 1).log_softmax(-1).numpy()

    def order(self, token: int, number: int, position: int) -> np.ndarray:
        """Return the moved entries, most likely first."""
        chance = [np.random.Generator(np.random.SFC64(seed)) for seed in (token, 7919 * number + position + 2**24)]
        first, second = (each.standard_normal(self._moved, "f4") for each in chance)
        score = np.log(np.arange(1, self._moved + 1, dtype="f4"))
        return np.argsort(score + np.float32(self.of_token) * first + np.float32(self.of_position) * second)

    def sequence(self, number: int, shape_TV: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Draw tokens [T+1] from the teacher; return them with the top 12 entries [T, 12] at each position."""
        chance = np.random.Generator(np.random.SFC64(number)).random(self.length)
        cdf_TM = np.cumsum(np.exp(shape_TV[:, : self._moved]), -1, dtype=np.float64)
        tokens, heads = [number % 1000], []
        for t in range(self.length):
            order, rank = self.order(tokens[-1], number, t), int(np.searchsorted(cdf_TM[t], chance[t]))
            if rank >= self._moved:
                rest = cdf_TM[t, -1] + np.cumsum(np.exp(shape_TV[t, self._moved :]), dtype=np.float64)
                rank = min(rank + int(np.searchsorted(rest, chance[t])), shape_TV.shape[1] - 1)
            tokens.append(int(order[rank]) if rank < self._moved else rank)
            heads.append(order[:HEAD])
        return np.array(tokens, np.int32), np.stack(heads)

    def logits(self, tokens_T: np.ndarray, number: int) -> torch.Tensor:
        """Return the logits [T, V] of the sequence `number`."""
        logits_TV = self.shape(number)
        for t, token in enumerate(tokens_T.tolist()):
            logits_TV[t, self.order(token, number, t)] = logits_TV[t, : self._moved].copy()
        return torch.from_numpy(logits_TV)


def synthetic(vocab_size: int, number: int, model: Material, known: Facts | None = None) -> Material:
    """Make a teacher of another vocabulary like that of `model`, and its text.

    known: its facts, if they were found before.
    """
    made, start = Synthetic(vocab_size, model, known), 0
    parts: dict[str, list[PackedRow]] = {}
    numbers: dict[bytes, int] = {}
    for split, count in wanted(number).items():
        texts = [made.sequence(n, made.shape(n))[0] for n in range(start, start + count)]
        mask, segments = np.ones(made.length, bool), np.zeros(made.length, np.int32)
        parts[split] = [PackedRow(tokens, mask, segments) for tokens in texts]
        numbers |= {row.tokens[:-1].tobytes(): start + i for i, row in enumerate(parts[split])}
        start += count

    def teacher(tokens_BT: torch.Tensor, _: torch.Tensor | None) -> torch.Tensor:
        rows_BT = tokens_BT.numpy().astype(np.int32)
        return torch.stack([made.logits(row, numbers[row.tobytes()]) for row in rows_BT])

    return Material(f"synthetic-{vocab_size}", vocab_size, made.length, parts, teacher, made.facts)
