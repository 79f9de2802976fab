"""What a run has to beat, known before its first step: a bigram of its text, its teacher, and the runs beside it.

The bigram is fitted on the tokens of the training split, with the smoothing of Witten and Bell (1991): of a token that
was seen n times, before t different ones, a share of t / (n + t) goes to the unigrams, of whose N tokens of T kinds a
share of T / (N + T) is even. Of a sound teacher no text is so strange that counting pairs predicts it better.
"""

from typing import NamedTuple

import numpy as np

from kdtrain.cache.read.reader import CacheReader
from kdtrain.monitor.progress import log
from kdtrain.monitor.writers import Writers
from kdtrain.training.sources.source import Source

_MOST = 4_000_000
"""Tokens that the bigram is fitted on, at most."""
_MEASURED = 2**16
"""Tokens that a loss is measured on, at most."""


class Baselines(NamedTuple):
    """Losses, nats a token; None where one is unknown."""

    bigram: float | None
    """Of the bigram, on the first validation sequences."""
    teacher: float | None
    """Of the teacher, on some of the training sequences."""
    beside: tuple[str, float] | None
    """The best run on the same data beside this one, and its validation loss."""

    def tell(self, teacher: float, alpha: float, writers: Writers) -> None:
        """Log them, and warn of a teacher that the bigram beats. teacher: its validation loss. alpha: the first."""
        train = "" if self.teacher is None else f", {self.teacher:.3f} on train"
        bigram = "" if self.bigram is None else f"; a bigram of the text {self.bigram:.3f}"
        best = "" if self.beside is None else f"; best here {self.beside[0]} {self.beside[1]:.3f}"
        log.info("teacher %.3f on validation%s; alpha %.2g", teacher, train + bigram + best, alpha)
        if self.bigram is not None and teacher > self.bigram:
            text = f"the teacher's loss on this text, {teacher:.3f}, is above that of a bigram, {self.bigram:.3f}: is "
            text += "it the right teacher, with the tokenizer and the chat template that it was trained with?"
            writers.warning("weak-teacher", 0, text)


def baselines(train: Source, validation: Source, beside: tuple[str, float] | None) -> Baselines:
    """Those of a run over these splits. beside: see `Baselines`."""
    reader = getattr(train, "reader", None)
    teacher = label_loss(reader) if isinstance(reader, CacheReader) else None
    return Baselines(bigram_loss(train, validation), teacher, beside)


def label_loss(reader: CacheReader) -> float | None:
    """The teacher's cross-entropy on sequences that are spread over a split, nats a token; None: it is not known."""
    if not (reader.manifest.codec.taught and reader.manifest.knows_labels):
        return None
    batch = reader.read(_spread(len(reader), _MEASURED // reader.manifest.settings.seq_len).tolist())
    assert batch.targets is not None
    counted_N = batch.targets.label_logprob.double()[batch.loss_mask.flatten()]
    return -float(counted_N.mean()) if len(counted_N) else None


def bigram_loss(train: Source, validation: Source) -> float | None:
    """The cross-entropy of a bigram of `train` on the first sequences of `validation`, nats a token; None: no token."""
    length = train.facts.seq_len
    tokens, _ = _text(train, _spread(len(train), _MOST // length))
    held, mask = _text(validation, np.arange(min(len(validation), max(1, _MEASURED // length))))
    before, label = held[:, :-1][mask], held[:, 1:][mask]
    if not len(label):
        return None
    size = int(max(tokens.max(), held.max())) + 1
    counts = np.bincount(tokens.ravel(), minlength=size)
    kinds, number = np.count_nonzero(counts), tokens.size
    unigram = (counts + kinds / size) / (number + kinds)
    pairs, seen = np.unique(tokens[:, :-1].astype(np.int64).ravel() * size + tokens[:, 1:].ravel(), return_counts=True)
    firsts = pairs // size
    followed, others = np.bincount(firsts, seen, size), np.bincount(firsts, minlength=size)
    wanted = before.astype(np.int64) * size + label
    at = np.searchsorted(pairs, wanted).clip(max=len(pairs) - 1)
    found = np.where(pairs[at] == wanted, seen[at], 0)
    total = followed[before] + others[before]
    chance = np.where(total > 0, (found + others[before] * unigram[label]) / np.maximum(total, 1), unigram[label])
    return float(-np.log(chance).mean())


def _spread(size: int, most: int) -> np.ndarray:
    return np.unique(np.linspace(0, size - 1, min(size, max(1, most))).astype(np.int64))


def _text(source: Source, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Tokens [n, T + 1] and loss mask [n, T] of sequences; of a source that reads no tokens alone, a few of them."""
    reader = getattr(source, "reader", None)
    if isinstance(reader, CacheReader):
        found = reader.text(rows)
        return found["tokens"], found["loss_mask"].astype(bool)
    batch = source.read(rows[:: max(1, len(rows) * source.facts.seq_len // _MEASURED)])
    return batch.tokens.numpy(), batch.loss_mask.numpy()
