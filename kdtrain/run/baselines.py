"""What a run has to beat, known before its first step: a bigram of its text, its teacher, and the runs beside it.

Of a sound teacher no text is so strange that counting pairs predicts it better.
"""

from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from kdtrain.cache.read.reader import CacheReader
from kdtrain.errors import RunError, log
from kdtrain.monitor.writers import Writers
from kdtrain.training.sources.cache import MEASURED, CachedSource, first_rows
from kdtrain.training.sources.source import Source
from kdtrain.training.state import Progress

_NUMBERS = 2**26
"""Numbers that are read from whole distributions for a loss, at most."""


class Baselines(NamedTuple):
    """The losses to compare a student with, nats per token; None where one is unknown."""

    bigram: float | None
    """Of the bigram, on the first validation sequences."""
    teacher: float | None
    """Of the teacher, on some of the training sequences."""
    beside: tuple[str, float] | None
    """The best run on the same data beside this one, and its validation loss."""

    def tell(self, writers: Writers, teacher: float, alpha: float, follows: bool) -> bool:
        """Log them, and warn of a teacher that the bigram beats; return whether it does.

        teacher: its validation loss. alpha: the first one. follows: whether it moves, and begins at 0 beside such one.
        """
        weak = self.bigram is not None and teacher > self.bigram
        train = "" if self.teacher is None else f", {self.teacher:.3f} on train"
        bigram = "" if self.bigram is None else f"; a bigram of the text {self.bigram:.3f}"
        best = "" if self.beside is None else f"; best here {self.beside[0]} {self.beside[1]:.3f}"
        first = 0.0 if weak and follows else alpha
        log.info("teacher %.3f on validation%s; alpha %.2g", teacher, train + bigram + best, first)
        if weak:
            text = f"the teacher's loss on this text, {teacher:.3f}, is above that of a bigram, {self.bigram:.3f}: is "
            text += "it the right teacher, with the tokenizer and the chat template that it was trained with?"
            writers.warning("weak-teacher", 0, text)
        return weak


def baselines(train: Source, validation: Source, beside: tuple[str, float] | None) -> Baselines:
    """Measure the baselines of a run over these splits. beside: see `Baselines`.

    Of a mixture, a text in other tokens or one that is still being answered nothing is measured; what cannot be read is
    unknown.
    """
    own, held = (getattr(each, "reader", None) for each in (train, validation))  # of a source around one, too
    if getattr(train, "growing", None) is None and isinstance(own, CacheReader) and isinstance(held, CacheReader):
        with suppress(RunError, OSError):
            return Baselines(CachedSource(own).bigram_loss(held), label_loss(own), beside)
    return Baselines(None, None, beside)


def label_loss(reader: CacheReader) -> float | None:
    """Return the teacher's cross-entropy on some sequences of a split, nats per token; None if it is unknown."""
    settings, codec = reader.manifest.settings, reader.manifest.codec
    if not (codec.taught and reader.manifest.knows_labels):
        return None
    most = min(MEASURED, _NUMBERS // (settings.vocab_size if codec.kind == "dense" else 1))
    with suppress(RunError, OSError):  # what cannot be read is unknown
        batch = reader.read(first_rows(reader, most))
        assert batch.targets is not None
        counted_N = batch.targets.label_logprob.double()[batch.loss_mask.flatten()]
        return -float(counted_N.mean()) if len(counted_N) else None
    return None


def refuse_no_progress(progress: Progress, out: Path) -> None:
    """Raise a `RunError` if no validation was better than the first one: the best student is the initial one."""
    first, best, step = progress.first_loss, progress.best_loss, progress.best_step
    if first is None or best is None or step is None or step == progress.step:
        return
    what = f"validation loss {first:.4f} before its first step"
    if progress.best_score is not None:
        if progress.first_score is None or progress.best_score > progress.first_score:
            return
        what = f"no score was above the {progress.first_score:.4f} before its first step"
    elif best < first:
        return
    elif progress.last_loss is not None:
        what += f", {progress.last_loss:.4f} at step {progress.validated_step}"
    raise RunError(
        f"the student never got better: {what}; nothing is exported; give another --lr or more --steps, and "
        f"another --out, or export the last student: kdtrain export {out} --checkpoint latest",
        reason="no-progress",
    )


def log_outcome(progress: Progress, writers: Writers, plain: tuple[str, float] | None) -> None:
    """Warn when a student ended worse than it began, or is no better than a student of plain cross-entropy.

    plain: the name and the validation loss of the best of these on the same cache.
    """
    first, last, best = progress.first_loss, progress.last_loss, progress.best_loss
    if first is None or last is None or best is None:
        return
    for name, own in progress.members.items():
        began, ended = own["first_loss"], own["last_loss"]
        if began is not None and ended is not None and ended > began:
            text = f"the student ended worse than it began on {name}: validation loss {began:.4f}, now {ended:.4f}"
            writers.warning("no-gain", progress.step, f"{text}; draw more of it", cache=name)
    if last > first:
        losses = f"validation loss {first:.4f}, at the end {last:.4f}; the export is of step {progress.best_step}"
        text = f"the student ended worse than it began: {losses}, {best:.4f}"
        writers.warning("no-gain", progress.step, text)
    if plain is not None and best >= plain[1]:
        other = f"{plain[1]:.4f}, that of plain cross-entropy on this cache in {plain[0]}"
        text = f"the student's validation loss {best:.4f} is not below {other}"
        writers.warning("no-gain", progress.step, text)
