"""From a record of a source to the sequences of a cache: entries checked, aligned, cut and kept.

A row of n tokens has n - 1 labels and becomes whole sequences of T of them, the last one filled up with positions
outside of the loss; so no token is lost, and none sees a text that the teacher did not. Entry i is about token i + 1 +
shift. A position is outside of the loss if the source has no entries for it, or none that are a distribution, if its
mask excludes it, or if its label is the first token of the next document: the teacher's entries are about another one.

Entries that sum to more than 1, which curves fitted to them may do, are scaled to 1, up to `MASS`.

Shapes: n tokens, m positions with entries, K entries, T positions of a sequence, V vocabulary.
"""

from collections.abc import Iterator
from dataclasses import dataclass, fields

import numpy as np

from kdtrain.cache.format.codec import CodecSpec, keep
from kdtrain.data.packed import PackedRow
from kdtrain.errors import UsageError
from kdtrain.objective.targets import FLOOR
from kdtrain.plugins.layouts.layout import Columns, Entries, Layout, Record

MASS = 1.25
"""The largest sum of probabilities that is taken for 1. With one exact value and three terms, as DistillKit recommends
for little space, a real teacher's positions are above 1 in 16 of 100, above 1.25 in 1 of 100."""


@dataclass
class Tally:
    """What was read and what of it counts."""

    rows: int = 0
    rows_left_out: int = 0
    """Rows left out: fewer than two tokens, or without any position in the loss."""
    positions: int = 0
    """Positions with a label, without those that fill up a sequence."""
    filled_up: int = 0
    """Positions that fill up a sequence."""
    no_entries: int = 0
    """Positions for which the source has no entries."""
    no_distribution: int = 0
    """Positions whose entries are no distribution: NaN, log p above 0, an id twice or beyond the vocabulary."""
    too_few: int = 0
    """Positions with fewer entries than the cache keeps."""
    scaled: int = 0
    """Positions whose entries summed to more than 1, and were scaled."""
    counted: int = 0
    """Positions in the loss."""
    kept_mass: float = 0.0
    """Sum over them of the probability inside of the K entries."""
    label_loss: float = 0.0
    """Sum over them of -log p of the label, in nats, as the cache has it."""
    labels_kept: int = 0
    """How many of their labels are among the K entries."""

    def add(self, other: "Tally") -> None:
        """Add another one."""
        for each in fields(self):
            setattr(self, each.name, getattr(self, each.name) + getattr(other, each.name))


@dataclass(frozen=True)
class Cutter:
    """Makes sequences of records; pure."""

    layout: Layout
    codec: CodecSpec
    seq_len: int
    shift: int
    document_mask: bool
    pad_id: int = 0

    def sequences(self, record: Record, where: str, tally: Tally) -> Iterator[PackedRow]:
        """The sequences of a record, counted into `tally`. UsageError: it does not fit."""
        columns = self.layout.columns
        tokens_n = tokens_of(record, columns, self.codec.vocab_size, where)
        number, tally.rows = len(tokens_n) - 1, tally.rows + 1
        if number < 1:
            tally.rows_left_out += 1
            return
        entries = self.layout.decode(record, where)
        if len(entries.ids) > len(tokens_n):
            raise UsageError(f"{where}: has {len(tokens_n)} tokens and entries of {len(entries.ids)} positions")
        ids_mK, logprobs_mK, states_m = distributions(entries, self.codec.vocab_size, self.codec.top_k)
        # Position t takes the entries t - shift, where there are such.
        place_t = np.arange(number) - self.shift
        inside_t = (place_t >= 0) & (place_t < len(ids_mK))
        place_t = place_t.clip(0, max(0, len(ids_mK) - 1))
        segments_n = segments_of(record, columns)
        label_t = (segments_n[1:] > 0) & (segments_n[1:] == segments_n[:-1])
        if columns.mask is not None:
            label_t &= record[columns.mask][1:] != 0
        states_t = np.where(inside_t, states_m[place_t] if len(states_m) else _NONE, _NONE)
        good_t = states_t >= _GOOD
        mask_t = label_t & good_t
        tally.positions += number
        tally.no_entries += int((label_t & (states_t == _NONE)).sum())
        tally.no_distribution += int((label_t & (states_t == _STRANGE)).sum())
        tally.too_few += int((label_t & (states_t == _FEW)).sum())
        tally.scaled += int((mask_t & (states_t == _SCALED)).sum())
        if not mask_t.any():
            tally.rows_left_out += 1
            return
        even_K = np.arange(self.codec.top_k)
        ids_tK = np.where(good_t[:, None], ids_mK[place_t], even_K)
        logprobs_tK = np.where(good_t[:, None], logprobs_mK[place_t], np.nan)
        for start in range(0, number, self.seq_len):
            part = slice(start, start + self.seq_len)
            if mask_t[part].any():
                yield self._sequence(
                    tokens_n[start : start + self.seq_len + 1], segments_n[part], mask_t[part], ids_tK[part],
                    logprobs_tK[part], tally,
                )  # fmt: skip

    def _sequence(
        self,
        tokens: np.ndarray,
        segments: np.ndarray,
        mask: np.ndarray,
        ids_tK: np.ndarray,
        logprobs_tK: np.ndarray,
        tally: Tally,
    ) -> PackedRow:
        fill = self.seq_len - len(mask)
        tally.filled_up += fill
        tokens = np.pad(tokens, (0, fill), constant_values=self.pad_id)
        own = np.where(ids_tK == tokens[1 : len(mask) + 1, None], logprobs_tK, -np.inf).max(1)
        label_t = np.where(np.isneginf(own), np.nan, own)
        mask, label_t = np.pad(mask, (0, fill)), np.pad(label_t, (0, fill), constant_values=np.nan)
        ids_tK = np.concatenate([ids_tK, np.tile(np.arange(self.codec.top_k), (fill, 1))])
        logprobs_tK = np.pad(logprobs_tK, ((0, fill), (0, 0)), constant_values=np.nan)
        kept = keep(ids_tK, logprobs_tK, label_t, self.codec)
        tally.counted += int(mask.sum())
        tally.kept_mass += float(np.exp(logprobs_tK[mask]).sum())
        tally.label_loss -= float(kept["label_logprob"][mask].sum(dtype=np.float64))
        tally.labels_kept += int((~np.isnan(label_t[mask])).sum())
        starts = np.pad(segments[1:] != segments[:-1], (1, fill)) if self.document_mask else np.zeros(self.seq_len, int)
        return PackedRow(tokens.astype(np.int32), mask, np.cumsum(starts).astype(np.int32), kept)


_NONE, _STRANGE, _FEW, _GOOD, _SCALED = range(5)


def tokens_of(record: Record, columns: Columns, vocab_size: int, where: str) -> np.ndarray:
    """int64 [n]. UsageError: one is not a token of the vocabulary."""
    tokens_n: np.ndarray = record[columns.tokens]
    if len(tokens_n) and tokens_n.dtype.kind != "i":
        raise UsageError(f"{where}: {columns.tokens} does not hold whole numbers")
    if len(tokens_n) and not 0 <= tokens_n.min() <= tokens_n.max() < vocab_size:
        wrong = tokens_n.min() if tokens_n.min() < 0 else tokens_n.max()
        raise UsageError(
            f"{where}: the token {wrong} is outside of the vocabulary of {vocab_size:,}; give the teacher's tokenizer, "
            "or its --vocab-size"
        )
    return tokens_n.astype(np.int64)


def segments_of(record: Record, columns: Columns) -> np.ndarray:
    """[n] the number of each token's document, from 1; 0: padding."""
    if columns.segments is None or columns.segments not in record:
        return np.ones(len(record[columns.tokens]), np.int64)
    found: np.ndarray = record[columns.segments]
    return found


def distributions(entries: Entries, vocab_size: int, top_k: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The `top_k` most likely entries of each position, ids and log p [m, K], and what each position is [m]."""
    ids, logprobs = entries.ids, entries.logprobs.astype(np.float64, copy=False)
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
