"""Text by a teacher: it continues the prompts of a batch, and the logits it draws from are what a cache keeps.

A batch is continued with the keys and values of what it has read (`past_key_values`), one token of every row a step.
Shorter prompts are padded on the left, and the mask and the positions say so; prompts of one length, as text gives
them, need neither. A row ends at an end token, which counts like any other of the teacher's, or where its room ends:
no end token is added to a row that was cut.

Which token is drawn depends on (seed, split, row, position) and the logits alone. The logits depend, in their last
bits, on the other rows of the batch: matrix products round by their shapes. So batches are cut at fixed rows, a row
that has ended stays in its batch, and the batch size belongs to the settings of a cache. A capture that was killed then
ends in the same bits. A scoring pass over the same tokens gives the same logits up to rounding, not bit by bit.

What it gives up: each step waits for its token on the host; a batch takes as many steps as its longest row; the prompt
has no distributions, and neither has what lies behind the end, since neither counts in a loss.

Shape suffixes: B rows, T positions, V vocabulary, W longest prompt.
"""

import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from kdtrain.cache.build.answers import Encode, LogitAnswers, Logits
from kdtrain.cache.build.generated_text import finish_reasons
from kdtrain.cache.build.shard_writer import ShardRows
from kdtrain.cache.format.codec import uniforms
from kdtrain.cache.format.manifest import CacheSettings, end_tokens
from kdtrain.errors import UsageError
from kdtrain.monitor.progress import log
from kdtrain.ranks import world_size
from kdtrain.tables import duration

Step = Callable[..., tuple[Tensor, Any]]
"""tokens_BT, past, attention_mask and position_ids -> logits [B, V] of the next token in fp32, and the new past."""
NOTHING = -1e5
"""The logit of all entries but one, where there is no distribution: a codec takes them as impossible."""

_APART = 0.1  # of the spread of the logits: bf16 rounds by a fiftieth of it, and a wrong position changes all


@dataclass(frozen=True, kw_only=True)
class Writing:
    """How a teacher continues prompts."""

    temperature: float
    """Divides the logits; 0 takes the most likely token."""
    top_p: float
    end_tokens: tuple[int, ...]
    """Each ends a row."""
    seed: int
    batch_size: int | None
    """Rows that are continued together; None: that does not decide the bits."""

    def to_json(self) -> Mapping[str, Any]:
        """A plain record, for a cache's settings."""
        return {**asdict(self), "end_tokens": list(self.end_tokens)}


def continued(step: Step, rows: ShardRows, how: Writing, vocab_size: int) -> tuple[ShardRows, Tensor]:
    """Rows with what was written, their `loss_mask` true at the labels written, and logits [B, T, V] in fp32.

    rows: prompts, see `prompts.prompt_rows`. The logits are those of the steps; elsewhere the label is certain.
    """
    tokens_BT1 = torch.from_numpy(rows.tokens.astype(np.int64))
    first_B, room_B = rows.loss_mask.argmax(1), rows.loss_mask.sum(1)
    length, which = rows.loss_mask.shape[1], range(rows.first, rows.first + len(rows))
    numbers = [uniforms("text", how.seed, rows.split, row, length) for row in which]
    chance_BT = torch.from_numpy(np.stack(numbers) / 2**32)  # fp64, a pure function of seed, split, row and position
    inputs, mask_BW = _left_padded(tokens_BT1, first_B + 1)
    seen = {} if mask_BW is None else {"attention_mask": mask_BW, "position_ids": _positions(mask_BW)}
    mask_BT = np.zeros(rows.loss_mask.shape, bool)
    logits_BTV, past = None, None
    at = torch.from_numpy(first_B)
    every, open_B = torch.arange(len(at)), torch.ones(len(at), dtype=torch.bool)
    ends = torch.tensor(how.end_tokens, dtype=torch.int64)
    for count in range(int(room_B.max())):
        logits_BV, past = step(inputs, past, **seen)
        if logits_BTV is None:  # nothing but each label
            logits_BTV = logits_BV.new_full((len(at), tokens_BT1.shape[1] - 1, vocab_size), NOTHING)
            logits_BTV.scatter_(2, tokens_BT1[:, 1:, None].to(logits_BV.device), 0.0)
        open_B = open_B & (count < torch.from_numpy(room_B))
        chosen, here = every[open_B], (at + count)[open_B]
        logits_BTV[chosen.to(logits_BV.device), here.to(logits_BV.device)] = logits_BV[open_B.to(logits_BV.device)]
        place = (at + count).clamp(max=chance_BT.shape[1] - 1)
        drawn_B = draw(logits_BV, chance_BT[every, place], how.temperature, how.top_p).cpu()
        tokens_BT1[chosen, here + 1] = drawn_B[open_B]
        mask_BT[chosen.numpy(), here.numpy()] = True
        open_B = open_B & ~torch.isin(drawn_B, ends)
        if not open_B.any():
            break
        inputs = drawn_B[:, None]
        if mask_BW is not None:
            mask_BW = torch.cat([mask_BW, mask_BW.new_ones(len(at), 1)], 1)
            # A row that has ended stays inside: its own logits are not used, but a position beyond the model's has no
            # embedding, or changes the frequencies of all rows.
            inside = _positions(mask_BW)[:, -1:].clamp(max=rows.loss_mask.shape[-1] - 1)
            seen = {"attention_mask": mask_BW, "position_ids": inside}
    assert logits_BTV is not None, "a prompt leaves room for a token"
    return replace(rows, tokens=tokens_BT1.numpy().astype(rows.tokens.dtype), loss_mask=mask_BT), logits_BTV


class WrittenAnswers(LogitAnswers):
    """Text that the teacher writes behind the prompts of a batch, and the logits of the steps that wrote it.

    logits: a forward over whole sequences, which measures the fidelity.
    """

    writes = True

    def __init__(self, step: Step, how: Writing, settings: CacheSettings, logits: Logits) -> None:
        super().__init__(logits, settings)
        self._step, self._how, self._first = step, how, True

    def rows(self, rows: ShardRows) -> tuple[ShardRows, Encode]:
        """As `ShardAnswers.rows`."""
        started = time.monotonic()
        found, logits_BTV = continued(self._step, rows, self._how, self._settings.vocab_size)
        if self._first:
            log_first_texts(found, self._settings, time.monotonic() - started)
        self._first = False
        return self.encoded(found, logits_BTV)


def log_first_texts(rows: ShardRows, settings: CacheSettings, seconds: float | None = None) -> None:
    """Log how long all texts take, by the seconds that the first ones took, and that most of them are cut."""
    limits = settings.sequences.values()
    if seconds is not None and None not in limits:
        most = sum(filter(None, limits))
        left = duration(seconds / len(rows) * most / world_size())
        log.info("the first %s texts took %s: %s take about %s", len(rows), duration(seconds), most, left)
    cut = finish_reasons(rows.tokens, rows.loss_mask, end_tokens(settings)).count("length")
    if 2 * cut > len(rows):
        room = "--max-new-tokens or --seq-len gives more room"
        log.warning("%s of the first %s texts were cut before their end; %s", cut, len(rows), room)


def refuse_other_logits(step: Step, score: Callable[[Tensor], Tensor], name: str, vocab_size: int) -> None:
    """UsageError: the steps of a model give other logits than a forward over the same tokens.

    Of padded prompts, and of prompts of one length, which take another way. Not seen: windows longer than these rows.

    score: tokens_BT -> logits [B, T, V].
    """
    if any(_apart(step, score, lengths, vocab_size) for lengths in ((5, 9), (7, 7))):
        raise UsageError(
            f"{name} gives other logits one token at a time than in one forward; serve it, and give --teacher-server, "
            "or leave --generate out"
        )


def _apart(step: Step, score: Callable[[Tensor], Tensor], lengths: tuple[int, ...], vocab_size: int) -> bool:
    tokens = np.random.default_rng(0).integers(vocab_size, size=(len(lengths), max(lengths) + 5)).astype(np.int32)
    mask = np.zeros((len(lengths), tokens.shape[1] - 1), bool)
    for row, length in enumerate(lengths):
        mask[row, length - 1 : length + 3] = True
    probe = ShardRows("", "train", 0, tokens, mask, np.zeros_like(tokens[:, 1:]), {})
    greedy = Writing(temperature=0.0, top_p=1.0, end_tokens=(), seed=0, batch_size=None)
    found, logits_BTV = continued(step, probe, greedy, vocab_size)
    with torch.no_grad():
        scored_BTV = score(torch.from_numpy(found.tokens[:, :-1].astype(np.int64)))
    stepped_NV, scored_NV = (each[torch.from_numpy(mask).to(each.device)] for each in (logits_BTV, scored_BTV))
    return not float((stepped_NV - scored_NV).abs().mean()) <= _APART * float(scored_NV.std(-1).mean())


def draw(logits_BV: Tensor, chance_B: Tensor, temperature: float, top_p: float) -> Tensor:
    """Inverse-CDF samples [B] at chances in [0, 1), of the most likely entries that have `top_p` together.

    A row without a distribution gives any id.
    """
    if temperature == 0:
        return logits_BV.argmax(-1)
    # the largest is 0, so that no temperature overflows
    scaled_BV = (logits_BV - logits_BV.amax(-1, keepdim=True)).double() / max(temperature, 1e-100)
    weights_BV, ids_BV = scaled_BV.exp().nan_to_num(), None
    if top_p < 1:
        weights_BV, ids_BV = torch.sort(weights_BV, dim=-1, descending=True, stable=True)
        before_BV = weights_BV.cumsum(-1) - weights_BV
        weights_BV = weights_BV.where(before_BV < top_p * weights_BV.sum(-1, keepdim=True), 0.0)
    cdf_BV = weights_BV.cumsum(-1)
    point_B1 = chance_B.to(cdf_BV.device)[:, None] * cdf_BV[:, -1:]
    last_B1 = weights_BV.shape[1] - 1 - (weights_BV.flip(-1) > 0).int().argmax(-1, keepdim=True)
    found_B1 = torch.searchsorted(cdf_BV, point_B1, right=True).minimum(last_B1)
    return (found_B1 if ids_BV is None else ids_BV.gather(1, found_B1))[:, 0]


def _left_padded(tokens_BT: Tensor, lengths_B: np.ndarray) -> tuple[Tensor, Tensor | None]:
    """The prompts [B, W], each at the end of its row, and which of them are tokens; None: all."""
    widest = int(lengths_B.max())
    if (lengths_B == widest).all():
        return tokens_BT[:, :widest], None
    prompts_BW = torch.zeros(len(lengths_B), widest, dtype=torch.int64)
    mask_BW = torch.zeros_like(prompts_BW)
    for b, length in enumerate(lengths_B.tolist()):
        prompts_BW[b, widest - length :] = tokens_BT[b, :length]
        mask_BW[b, widest - length :] = 1
    return prompts_BW, mask_BW


def _positions(mask_BW: Tensor) -> Tensor:
    return (mask_BW.cumsum(-1) - 1).clamp(min=0)
