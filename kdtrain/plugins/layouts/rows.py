"""From a record of a source to the sequences of a cache: entries checked, aligned, cut and kept.

A row of n tokens has n - 1 labels and becomes whole sequences of T of them, the last one filled up with positions
outside of the loss; so no token is lost, and none sees a text that the teacher did not. Entry i is about token i + 1 +
shift. A position is outside of the loss if the source has no entries for it, or none that are a distribution, if its
mask excludes it, or if its label is the first token of the next document: the teacher's entries are about another one.

Entries that sum to more than 1, which curves fitted to them may do, are scaled to 1, up to `MASS`.

What was read is counted by name. rows; rows_left_out: of fewer than two tokens, or without any position in the loss;
positions: with a label, without those that fill up a sequence (filled_up); of them no_entries: the source has none;
no_distribution: they are NaN, above 0, sum to more than 1, or have an id twice or beyond the vocabulary; too_few: fewer
than the cache keeps; scaled; counted: those in the loss. Over these, kept_mass is the sum of the probability inside of
the K entries, label_loss that of -log p of the label as the cache has it, labels_kept how many labels are among the K.

Shapes: n tokens, m positions with entries, K entries, T positions of a sequence, t positions of a row, V vocabulary.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from kdtrain.cache.format.codec import keep
from kdtrain.cache.format.spec import CodecSpec
from kdtrain.data.packed import PackedRow
from kdtrain.errors import UsageError
from kdtrain.objective.targets import FLOOR
from kdtrain.plugins.layouts.layout import Layout, Record

MASS = 1.25
"""The largest sum of probabilities that is taken for 1. With one exact value and three terms, as DistillKit recommends
for little space, a real teacher's positions are above 1 in 16 of 100, above 1.25 in 1 of 100."""
_STATES = ("no_entries", "no_distribution", "too_few", "", "scaled")
_NONE, _STRANGE, _FEW, _GOOD, _SCALED = range(5)
COUNTS = ("rows", "rows_left_out", "positions", "counted", *filter(None, _STATES), "filled_up")


@dataclass(frozen=True)
class Cutter:
    """A pure maker of sequences from records."""

    layout: Layout
    codec: CodecSpec
    seq_len: int
    shift: int
    document_mask: bool
    pad_id: int = 0

    def sequences(self, record: Record, where: str, tally: dict[str, Any]) -> Iterator[PackedRow]:
        """Yield the sequences of a record, counted into `tally`. UsageError: it does not fit."""
        layout, codec = self.layout, self.codec
        tokens_n = self._tokens(record[layout.tokens], where)
        number = len(tokens_n) - 1
        tally["rows"] += 1
        if number < 1:
            tally["rows_left_out"] += 1
            return
        entries = layout.decode(record, where)
        if len(entries[0]) > len(tokens_n):
            raise UsageError(f"{where}: has {len(tokens_n)} tokens and entries of {len(entries[0])} positions")
        ids_mK, logprobs_mK, states_m = distributions(*entries, codec.vocab_size, codec.top_k)
        # Position t takes the entries t - shift, where there are such.
        place_t = np.arange(number) - self.shift
        inside_t = (place_t >= 0) & (place_t < len(ids_mK))
        place_t = place_t.clip(0, max(0, len(ids_mK) - 1))
        segments_n = record.get(layout.segments or "", np.ones(len(tokens_n), np.int64))
        label_t = (segments_n[1:] > 0) & (segments_n[1:] == segments_n[:-1])
        if layout.mask is not None:
            label_t &= record[layout.mask][1:] != 0
        states_t = np.where(inside_t, states_m[place_t] if len(states_m) else _NONE, _NONE)
        good_t = states_t >= _GOOD
        mask_t = label_t & good_t
        tally["positions"] += number
        for state, name in enumerate(_STATES):
            tally[name] += int((label_t & (states_t == state)).sum())
        if not mask_t.any():
            tally["rows_left_out"] += 1
            return
        fill = -number % self.seq_len
        mask_t, tokens_n = np.pad(mask_t, (0, fill)), np.pad(tokens_n, (0, fill), constant_values=self.pad_id)
        ids_tK = np.tile(np.arange(codec.top_k), (number + fill, 1))
        logprobs_tK = np.full(ids_tK.shape, np.nan)
        good = np.flatnonzero(good_t)
        ids_tK[good], logprobs_tK[good] = ids_mK[place_t[good]], logprobs_mK[place_t[good]]
        own_t = np.where(ids_tK == tokens_n[1:, None], logprobs_tK, -np.inf).max(1)
        own_t[np.isneginf(own_t)] = np.nan
        starts_t = np.zeros(number + fill, np.int32)
        if self.document_mask:
            starts_t[1:number] = segments_n[1:-1] != segments_n[:-2]
        for start in range(0, number, self.seq_len):
            part = slice(start, start + self.seq_len)
            if not (mask_T := mask_t[part]).any():
                continue
            kept = keep(ids_tK[part], logprobs_tK[part], own_t[part], codec)
            tally["filled_up"] += max(0, start + self.seq_len - number)
            tally["counted"] += int(mask_T.sum())
            tally["kept_mass"] += float(np.exp(logprobs_tK[part][mask_T]).sum())
            tally["label_loss"] -= float(kept["label_logprob"][mask_T].sum(dtype=np.float64))
            tally["labels_kept"] += int((~np.isnan(own_t[part][mask_T])).sum())
            segments_T = (starts_t[part].cumsum() - starts_t[start]).astype(np.int32)
            yield PackedRow(tokens_n[start : part.stop + 1].astype(np.int32), mask_T, segments_T, kept)

    def _tokens(self, tokens_n: np.ndarray, where: str) -> np.ndarray:
        """Return the tokens as int64 [n]. UsageError: one is not a token of the vocabulary."""
        if len(tokens_n) and tokens_n.dtype.kind != "i":
            raise UsageError(f"{where}: {self.layout.tokens} does not hold whole numbers")
        vocab_size = self.codec.vocab_size
        if wrong := [each for each in (tokens_n.min(initial=0), tokens_n.max(initial=0)) if not 0 <= each < vocab_size]:
            raise UsageError(
                f"{where}: the token {wrong[0]:.0f} is outside of the vocabulary of {vocab_size:,}; give the teacher's "
                "tokenizer, or its --vocab-size"
            )
        return tokens_n.astype(np.int64)


def distributions(
    ids: np.ndarray, logprobs: np.ndarray, vocab_size: int, top_k: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Select the `top_k` most likely entries of each position, ids and log p [m, K], and classify each position [m]."""
    logprobs = logprobs.astype(np.float64, copy=False)
    none_m = (np.isnan(logprobs) | np.isneginf(logprobs)).all(1)
    few_m = (~np.isneginf(logprobs)).sum(1) < top_k
    if (lacking := top_k - ids.shape[1]) > 0:
        ids = np.pad(ids, ((0, 0), (0, lacking)), constant_values=-1)
        logprobs = np.pad(logprobs, ((0, 0), (0, lacking)), constant_values=-np.inf)
    order = np.argsort(-np.where(np.isnan(logprobs), -np.inf, logprobs), axis=1, kind="stable")
    ids, logprobs = (np.take_along_axis(each, order, 1) for each in (ids, logprobs))
    real = ~np.isneginf(logprobs)
    ascending = np.sort(np.where(real, ids, -1 - np.arange(ids.shape[1])), axis=1)
    strange_m = (ascending[:, 1:] == ascending[:, :-1]).any(1) | (real & ((ids < 0) | (ids >= vocab_size))).any(1)
    with np.errstate(over="ignore", invalid="ignore"):
        mass_m = np.exp(logprobs).sum(1)
        strange_m |= ~(mass_m <= MASS) | (logprobs > 1e-3).any(1)
    scaled_m = ~strange_m & (mass_m > 1)
    logprobs = logprobs - np.log(np.where(scaled_m, mass_m, 1.0))[:, None]
    states_m = np.select([none_m, strange_m, few_m, scaled_m], [_NONE, _STRANGE, _FEW, _SCALED], _GOOD)
    return ids[:, :top_k], logprobs[:, :top_k].clip(min=FLOOR), states_m
