"""Text by a teacher: transformers continues the prompts of a batch, and a cache keeps the logits it draws from.

Shorter prompts are padded on the left. A row ends at an end token, which counts like any other of the teacher's, or
where its room ends: no end token is added to a row that was cut.

Which token is drawn depends on (seed, split, row, position) and the logits alone. The logits depend, in their last
bits, on the other rows of the batch: matrix products round by their shapes. So batches are cut at fixed rows, a row
that has ended stays in its batch, and the batch size belongs to the settings of a cache. A capture that was killed then
ends in the same bits. A scoring pass over the same tokens gives the same logits up to rounding, not bit by bit.

Logits are encoded in blocks of `BLOCK` steps, and freed. So at most 2 `BLOCK` B V numbers in fp32 are held, whatever
the length of a row: 10 GB for 256 rows and a vocabulary of 151,936, where those of 2,048 positions would be 319 GB.

What it gives up: each step waits for its token on the host, and a block for its encoding; a batch takes as many steps
as its longest row; the prompt has no distributions, and neither has what lies behind the end, since neither counts.

Shape suffixes: B rows, T positions, V vocabulary, W longest prompt, N positions of a block.
"""

import time
from collections.abc import Callable
from dataclasses import replace
from fractions import Fraction
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import LogitsProcessor, LogitsProcessorList, StoppingCriteriaList

from kdtrain.cache.format.codec import draw_points, encode, uniforms
from kdtrain.cache.format.compression import Arrays
from kdtrain.cache.format.manifest import CacheSettings
from kdtrain.cache.write.answers import Encode, Logits, ShardAnswers, ShardRows
from kdtrain.errors import UsageError
from kdtrain.models.generate import draw
from kdtrain.teaching.teacher import Writing

BLOCK = 32
"""Steps whose logits are held at once."""
NOTHING = -1e5
"""The logit of all entries but one, where there is no distribution: a codec takes them as impossible."""

_APART = 0.1  # of the spread of the logits: bf16 rounds by a fiftieth of it, and a wrong position changes all

Generate = Callable[..., object]
"""`generate` of transformers: prompts [B, W], its options, and `positions`, the largest position of a row."""
Take = Callable[[np.ndarray, np.ndarray, np.ndarray, Tensor], None]
"""Takes rows [N] of a batch, positions [N] in them, the labels [N] there, and the logits [N, V] of these in fp32."""


class _Draws(LogitsProcessor):
    """A processor of logits that leaves each row one drawn token in its scores, and passes the logits on in blocks."""

    def __init__(self, rows: ShardRows, how: Writing, take: Take) -> None:
        self.tokens_BT1 = rows.tokens.copy()
        self.mask_BT = np.zeros(rows.loss_mask.shape, bool)
        self.open_B = np.ones(len(rows), bool)
        self._how = how
        self._take = take
        self._step = 0
        self._first_B = rows.loss_mask.argmax(1)
        self._room_B = rows.loss_mask.sum(1)
        self._held: list[tuple[np.ndarray, np.ndarray, Tensor]] = []
        length = rows.loss_mask.shape[1]
        which = range(rows.first, rows.first + len(rows))
        # fp64, a pure function of seed, split, row and position
        self._chance_BT = np.stack([uniforms("text", how.seed, rows.split, row, length) for row in which]) / 2**32

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        """Draw a token from the scores [B, V] of a step; return 0 at the token drawn, else -inf."""
        place_B = self._first_B + self._step
        inside_B = place_B.clip(max=self._chance_BT.shape[1] - 1)
        chance_B = torch.from_numpy(self._chance_BT[np.arange(len(scores)), inside_B])
        drawn_B = draw(scores, chance_B, self._how.temperature, self._how.top_p)
        tokens_B = drawn_B.cpu().numpy()
        rows = np.flatnonzero(self.open_B)
        if len(rows):
            self.tokens_BT1[rows, place_B[rows] + 1] = tokens_B[rows]
            self.mask_BT[rows, place_B[rows]] = True
            self._held.append((rows, place_B[rows], scores[torch.from_numpy(rows).to(scores.device)]))
        self._step += 1
        self.open_B &= ~np.isin(tokens_B, self._how.end_tokens) & (self._step < self._room_B)
        if self._held and (len(self._held) == BLOCK or not self.open_B.any()):
            rows, places = (np.concatenate([each[part] for each in self._held]) for part in (0, 1))
            logits_NV = torch.cat([each[2] for each in self._held])
            self._held = []
            self._take(rows, places, self.tokens_BT1[rows, places + 1], logits_NV)
        return torch.full_like(scores, -torch.inf).scatter_(1, drawn_B[:, None], 0.0)


def continued(generate: Generate, rows: ShardRows, how: Writing, take: Take) -> ShardRows:
    """Continue prompts; return rows with the text, their `loss_mask` true at its labels. rows: `packing.prompt_rows`.

    take: gets the logits of the steps.
    """
    draws = _Draws(rows, how, take)
    lengths = rows.loss_mask.argmax(1) + 1
    prompts_BW = np.zeros((len(rows), int(lengths.max())), np.int64)
    mask_BW = np.arange(prompts_BW.shape[1]) >= prompts_BW.shape[1] - lengths[:, None]
    for prompt, row, length in zip(prompts_BW, rows.tokens, lengths, strict=True):
        prompt[-length:] = row[:length]
    ended: Any = [lambda input_ids, scores, **_: torch.from_numpy(~draws.open_B).to(input_ids.device)]
    generate(
        torch.from_numpy(prompts_BW),
        attention_mask=torch.from_numpy(mask_BW.astype(np.int64)),
        # A row that has ended stays inside: its own logits are not used, but a position beyond the model's has no
        # embedding, or changes the frequencies of all rows.
        positions=rows.loss_mask.shape[1] - 1,
        max_new_tokens=int(rows.loss_mask.sum(1).max()),
        logits_processor=LogitsProcessorList([draws]),
        stopping_criteria=StoppingCriteriaList(ended),
    )
    return replace(rows, tokens=draws.tokens_BT1, loss_mask=draws.mask_BT)


class WrittenAnswers(ShardAnswers):
    """Text that the teacher writes behind the prompts of a batch, and the logits of the steps that wrote it.

    logits: a forward over whole sequences, which measures the fidelity.
    """

    writes = True

    def __init__(self, generate: Generate, how: Writing, settings: CacheSettings, logits: Logits) -> None:
        self.logits, self._generate, self._how, self._settings = logits, generate, how, settings
        self._first = True

    def rows(self, rows: ShardRows) -> tuple[ShardRows, Encode]:
        """Return rows as `ShardAnswers.rows`; where nothing was written the label is certain."""
        started = time.monotonic()
        kept = _Kept(rows, self._settings)
        found = continued(self._generate, rows, self._how, kept.take)
        kept.take_certain(found)
        if self._first:
            found.log_first(self._settings, time.monotonic() - started)
        self._first = False
        return found, lambda: kept.arrays


class _Kept:
    """The encoded answers of a batch, a block of positions after the other."""

    def __init__(self, rows: ShardRows, settings: CacheSettings) -> None:
        self._spec = settings.codec
        self._shape = rows.loss_mask.shape
        self.arrays: Arrays = {"broken": np.zeros(len(rows), bool)}
        """As `codec.encode_sequences` makes them."""
        offset = settings.grid_offset or Fraction(0)
        number = self._spec.num_samples
        place = [(settings.seed, rows.split, row, self._shape[1]) for row in range(rows.first, rows.first + len(rows))]
        self._points_BTD = np.stack([draw_points(*each, number, offset) for each in place]) if number else None

    def take(self, rows: np.ndarray, places: np.ndarray, labels: np.ndarray, logits_NV: Tensor) -> None:
        """Encode the logits of some positions, as `Take`."""
        self._device = logits_NV.device
        broken_N = ~logits_NV.amax(-1).isfinite()
        self.arrays["broken"][rows[broken_N.cpu().numpy()]] = True
        logits_NV = logits_NV.masked_fill_(broken_N[:, None], 0.0)
        points_ND = None if self._points_BTD is None else self._points_BTD[rows, places]
        found = encode(logits_NV, torch.from_numpy(labels.astype(np.int64)), self._spec, points_ND)
        for name, values in found.items():
            empty = np.zeros((*self._shape, *values.shape[1:]), values.dtype)
            self.arrays.setdefault(name, empty)[rows, places] = values

    def take_certain(self, rows: ShardRows) -> None:
        """Take all positions without a distribution."""
        rest = np.argwhere(~rows.loss_mask)
        for part in (rest[start : start + BLOCK * len(rows)] for start in range(0, len(rest), BLOCK * len(rows))):
            labels = rows.tokens[part[:, 0], part[:, 1] + 1].astype(np.int64)
            logits_NV = torch.full((len(part), self._spec.vocab_size), NOTHING, device=self._device)
            logits_NV.scatter_(1, torch.from_numpy(labels)[:, None].to(self._device), 0.0)
            self.take(part[:, 0], part[:, 1], labels, logits_NV)


def refuse_other_logits(generate: Generate, score: Callable[[Tensor], Tensor], name: str, vocab_size: int) -> None:
    """Raise a UsageError if the steps of a model give other logits than a forward over the same tokens.

    Of padded prompts, and of prompts of one length, which take another way. Not seen: windows longer than these rows.

    score: tokens_BT -> logits [B, T, V].
    """
    if any(_apart(generate, score, lengths, vocab_size) for lengths in ((5, 9), (7, 7))):
        raise UsageError(
            f"{name} gives other logits one token at a time than in one forward; serve it, and give --teacher-server, "
            "or leave --generate out"
        )


def _apart(generate: Generate, score: Callable[[Tensor], Tensor], lengths: tuple[int, ...], vocab_size: int) -> bool:
    tokens = np.random.default_rng(0).integers(vocab_size, size=(len(lengths), max(lengths) + 5)).astype(np.int32)
    mask = np.zeros((len(lengths), tokens.shape[1] - 1), bool)
    for row, length in enumerate(lengths):
        mask[row, length - 1 : length + 3] = True
    probe = ShardRows("", "train", 0, tokens, mask, np.zeros_like(tokens[:, 1:]), {})
    greedy = Writing(temperature=0.0, top_p=1.0, end_tokens=(), seed=0, batch_size=None)
    blocks = list[tuple[np.ndarray, np.ndarray, np.ndarray, Tensor]]()
    found = continued(generate, probe, greedy, lambda *block: blocks.append(block))
    with torch.no_grad():
        scored_BTV = score(torch.from_numpy(found.tokens[:, :-1].astype(np.int64)))
    scored_NV = torch.cat([scored_BTV[rows, places] for rows, places, *_ in blocks])
    stepped_NV = torch.cat([block[3] for block in blocks])
    return not float((stepped_NV - scored_NV).abs().mean()) <= _APART * float(scored_NV.std(-1).mean())
