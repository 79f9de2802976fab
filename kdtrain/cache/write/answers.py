"""What a shard is filled with: where that which is kept of a teacher's distributions comes from.

Shape suffixes: B sequences, T positions, V vocabulary.
"""

import hashlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor

from kdtrain.cache.format import names as cache_format
from kdtrain.cache.format.codec import encode_sequences
from kdtrain.cache.format.compression import Arrays
from kdtrain.cache.format.manifest import CacheSettings
from kdtrain.cache.write.generated_text import finish_reasons
from kdtrain.data.packed import PackedRow
from kdtrain.errors import log
from kdtrain.objective.batch import Batch
from kdtrain.process import world_size
from kdtrain.tables import duration

Logits = Callable[[Tensor, Tensor | None], Tensor]
"""tokens_BT and, with a document mask, segments_BT -> logits [B, T, V] of the next token."""
ROWS = ("tokens", "loss_mask", "segments")
Encode = Callable[[], Arrays]
"""What is kept of a batch, [B, T, ...], as `codec.encode_sequences` makes it; called in the thread that writes."""


@dataclass(frozen=True)
class ShardRows:
    """The rows of one shard: n sequences of `split`, from number `first` on."""

    name: str
    split: str
    first: int
    tokens: np.ndarray
    loss_mask: np.ndarray
    segments: np.ndarray
    kept: dict[str, np.ndarray]
    """What is kept of the teacher's distributions, [n, T, ...], where the rows bring it; else empty."""

    @classmethod
    def of(cls, split: str, shard: int, first: int, rows: Sequence[PackedRow]) -> "ShardRows":
        """Make the rows of the shard with this number."""
        return cls(
            name=cache_format.shard_name(split, shard),
            split=split,
            first=first,
            kept={name: np.stack([row.kept[name] for row in rows]) for name in rows[0].kept},
            **{name: np.stack([getattr(row, name) for row in rows]) for name in ROWS},
        )

    def __len__(self) -> int:
        return len(self.tokens)

    @property
    def broken(self) -> np.ndarray:
        """Which of the rows have no targets, because the teacher's logits were non-finite: bool [n]."""
        return (self.loss_mask == cache_format.BROKEN).all(1)

    def __getitem__(self, part: slice) -> "ShardRows":
        kept = {name: values[part] for name, values in self.kept.items()}
        rows = {name: getattr(self, name)[part] for name in ROWS}
        return replace(self, first=self.first + part.start, kept=kept, **rows)

    @cached_property
    def digest(self) -> str:
        """SHA-256 over tokens, loss_mask and segments, which differs for a shard of other rows."""
        sha = hashlib.sha256()
        for part, dtype in ((self.tokens, "<u4"), (self.loss_mask, "u1"), (self.segments, "<u4")):
            sha.update(np.ascontiguousarray(part, dtype=dtype).tobytes())
        return sha.hexdigest()

    def log_first(self, settings: CacheSettings, seconds: float | None = None) -> None:
        """Log how long all texts take, by the seconds that these took to write, and that most of them are cut."""
        limits = settings.sequences.values()
        if seconds is not None and None not in limits:
            most = sum(filter(None, limits))
            left = duration(seconds / len(self) * most / world_size())
            log.info("the first %s texts took %s: %s take about %s", len(self), duration(seconds), most, left)
        cut = finish_reasons(self.tokens, self.loss_mask, settings.end_tokens).count("length")
        if 2 * cut > len(self):
            room = "--max-new-tokens or --seq-len gives more room"
            log.warning("%s of the first %s texts were cut before their end; %s", cut, len(self), room)


class ShardAnswers:
    """Fills a shard, one batch after the other; this class fills it with the rows' own arrays (`PackedRow.kept`)."""

    logits: Logits | None = None
    """For a measurement of the fidelity; None where whole distributions are not known."""
    sharded = False
    """True when a forward needs all ranks."""
    writes = False
    """True when the teacher continues the prompts of the rows."""
    examine: Callable[[Batch], dict[str, Any]] | None = None
    """Makes the manifest's `capture` of the held sample."""

    def session(self, shard: ShardRows) -> AbstractContextManager[None]:
        """Return a context around `rows` of all rows of a shard, in order; an error at its end drops the shard."""
        return nullcontext()

    def rows(self, rows: ShardRows) -> tuple[ShardRows, Encode]:
        """Return a batch, with any text that the teacher wrote into it, and the function that encodes its answers."""
        return rows, lambda: rows.kept


class SideStream:
    """One stream on which another thread encodes tensors that the current stream is still computing.

    On the main stream each copy to the host would wait for the teacher's next forward, which is queued there already,
    and that forward would wait for the encoding. It serves one device; on a CPU it does nothing.
    """

    def __init__(self) -> None:
        self._stream: torch.cuda.Stream | None = None

    def ready(self, tensor: Tensor | None) -> torch.cuda.Event | None:
        """Mark where the current stream has computed a tensor; return None if it is not on a GPU."""
        if tensor is None or not tensor.is_cuda:
            return None
        with torch.cuda.device(tensor.device):
            self._stream = self._stream or torch.cuda.Stream(tensor.device)
            event = torch.cuda.Event()
            event.record(torch.cuda.current_stream(tensor.device))
        return event

    @contextmanager
    def after(self, ready: torch.cuda.Event | None) -> Iterator[None]:
        """Run the block on the stream once the tensor is there, and wait at the end until the stream is done.

        So the tensor may be freed after the block, although its memory belongs to another stream.
        """
        if ready is None or self._stream is None:
            yield
            return
        with torch.cuda.stream(self._stream):
            self._stream.wait_event(ready)
            try:
                yield
            finally:
                self._stream.synchronize()


class LogitAnswers(ShardAnswers):
    """Fills a shard by a teacher's forward for each batch; the logits are encoded while the next forward runs.

    sharded: True when a forward needs all ranks.
    """

    logits: Logits

    def __init__(self, logits: Logits, settings: CacheSettings, sharded: bool = False) -> None:
        self.logits, self.sharded, self._settings = logits, sharded, settings
        self._side = SideStream()

    def rows(self, rows: ShardRows) -> tuple[ShardRows, Encode]:
        """Return a batch as `ShardAnswers.rows` does, with the teacher's logits to encode."""
        settings = self._settings
        tokens_BT = torch.from_numpy(rows.tokens[:, :-1].astype(np.int64))
        segments_BT = torch.from_numpy(rows.segments.astype(np.int64)) if settings.document_mask else None
        with torch.no_grad():
            logits_BTV = self.logits(tokens_BT, segments_BT)
        held = [logits_BTV]
        ready = self._side.ready(logits_BTV)
        assert logits_BTV.shape[-1] == settings.vocab_size, "the teacher's vocabulary is not that of the settings"

        def encode() -> Arrays:
            labels_BT = torch.from_numpy(rows.tokens[:, 1:].astype(np.int64))
            offset = settings.grid_offset or Fraction(0)
            place: dict[str, Any] = {"seed": settings.seed, "split": rows.split, "first": rows.first, "offset": offset}
            with self._side.after(ready):  # the logits are free after it
                return encode_sequences(held.pop(), labels_BT, settings.codec, **place)

        return rows, encode
