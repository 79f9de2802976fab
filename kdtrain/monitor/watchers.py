"""Warnings from the numbers of a run: each watcher takes a step's numbers and returns a line of text, or None.

They are pure but for their own windows. Nothing in them survives a restart, so that a warning given once a process is
given again by the next one.
"""

import math
from collections import deque
from collections.abc import Iterable


class ClippedShare:
    """The share of recent steps whose gradient was clipped; warns above a tenth if the loss does not fall meanwhile.

    Clipping alone is no fault, it shortens a step: fresh small students learn best at a rate at which most steps are
    clipped (docs/quality.md).

    Args:
        clip: largest norm of a gradient; 0 clips nothing.
        warmup: first steps of the run, which never count for the warning.
        window: how many steps count.
    """

    limit = 0.1

    def __init__(self, clip: float, warmup: int = 0, window: int = 100) -> None:
        self.clip, self.warmup, self.window = clip, warmup, window
        self.steps: deque[bool] = deque(maxlen=window)
        self.losses: deque[float] = deque(maxlen=window)
        """Cross-entropies of the steps of the window that lie after the warm-up, nats."""
        self.warned = False

    @property
    def share(self) -> float:
        """0 to 1; 0 before the first step."""
        return sum(self.steps) / len(self.steps) if self.steps else 0.0

    def add(self, step: int, norm: float, loss: float) -> str | None:
        """Count a step with this gradient norm and cross-entropy; return the warning when a full window deserves it."""
        self.steps.append(0 < self.clip < norm)
        if step > self.warmup:
            self.losses.append(loss)
        if len(self.losses) < self.window or self.share <= self.limit:
            self.warned = False
            return None
        losses, half = list(self.losses), self.window // 2
        earlier, later = math.fsum(losses[:half]) / half, math.fsum(losses[half:]) / (self.window - half)
        is_new, self.warned = not self.warned and not later < earlier, not later < earlier
        if not is_new:
            return None
        return (
            f"the gradient was clipped in {self.share:.0%} of the last {self.window} steps (above --clip "
            f"{self.clip:g}), and their loss did not fall ({earlier:.4f}, then {later:.4f}): the steps may be too "
            "long; lower --lr"
        )


class LearnedSamples:
    """Warns once when the student has memorized the samples in its targets.

    A divergence is at least 0, and so is the mean of its estimates from fresh samples. A cache's samples are the same
    in every epoch: a student that fits them brings the estimate to 0 and below while it moves away from the teacher.

    Args:
        samples: entries drawn for a token; 0 disables the check.
        window: steps in the mean.
    """

    def __init__(self, samples: int, window: int = 50) -> None:
        self.samples = samples
        self.steps: deque[float] = deque(maxlen=window)
        self.warned = False

    @property
    def mean(self) -> float:
        """Mean divergence of the window, nats; infinite until the window is full."""
        return math.fsum(self.steps) / len(self.steps) if len(self.steps) == self.steps.maxlen else math.inf

    def add(self, divergence: float, epochs: float) -> str | None:
        """Take the divergence of a step, a mean over its tokens; return the warning when the mean is 0 or less."""
        if not self.samples or not math.isfinite(divergence):
            return None
        self.steps.append(divergence)
        if self.warned or self.mean > 0:
            return None
        self.warned = True
        return (
            f"the divergence from the teacher is {self.mean:.3f} nats over the last {len(self.steps)} steps, and fresh "
            f"samples give none below 0: after {epochs:.1f} epochs the student has memorized the {self.samples} "
            "samples a token; cache more text, use a larger --top-k or --num-samples, or train fewer steps"
        )


class DataWait:
    """Warns once when more than a tenth of the steps' time goes by waiting for their data.

    An online teacher computes while the step waits, so that it has no limit.

    Args:
        reads_ahead: whether data is read while the step before computes.
        window: how many steps count.
        first: steps of a process that do not count: files are opened, and graphs compiled.
    """

    limit = 0.1

    def __init__(self, reads_ahead: bool, window: int = 50, first: int = 10) -> None:
        self.reads_ahead, self.left = reads_ahead, first
        self.steps: deque[tuple[float, float]] = deque(maxlen=window)
        self.warned = False

    def add(self, waited: float, seconds: float) -> str | None:
        """Take the seconds that a step `waited`, and those it took; return the warning when a full window exceeds."""
        if not self.reads_ahead or self.left > 0:
            self.left -= 1
            return None
        self.steps.append((waited, seconds))
        total = math.fsum(seconds for _, seconds in self.steps)
        share = math.fsum(waited for waited, _ in self.steps) / total if total > 0 else 0.0
        if self.warned or len(self.steps) < (self.steps.maxlen or 0) or share <= self.limit:
            return None
        self.warned = True
        return (
            f"training waited for its data in {share:.0%} of the time of the last {len(self.steps)} steps; put the "
            "cache on a faster disk of this machine, or leave the process a core for reading (--sanity times it); with "
            "--teacher-server it waits for the server, which --server-concurrency asks for more at once"
        )


class MemoryGrowth:
    """How much the memory of a process has grown since its warm-up; warns once when it grows by more than half.

    The reference is measured after `warmup` steps of the process, and again after the first checkpoint and the first
    validation, whose buffers stay.

    Args:
        first: the first step of this process.
        warmup: steps until memory is expected to be stable.
        every: intervals, in steps, of the events whose buffers stay (checkpoints, validations).
    """

    limit = 0.5

    def __init__(self, first: int, warmup: int = 50, every: Iterable[int] = ()) -> None:
        warm = first + warmup - 1
        self.settles = {warm + 1, *(max(warm, -(-first // each) * each) + 1 for each in every)}
        self.reference: float | None = None
        self.warned = False

    def settle_after(self, step: int) -> None:
        """Measure the reference again after the step that follows `step`."""
        self.settles.add(step + 1)

    def add(self, step: int, held: float) -> tuple[float, str | None]:
        """Take the `held` MiB of a step; return the growth in MiB (0 without a reference), and the warning or None."""
        if step in self.settles:
            self.reference = held
        if not self.reference:
            return 0.0, None
        grown = held - self.reference
        if self.warned or grown <= self.limit * self.reference:
            return grown, None
        self.warned = True
        return grown, (
            f"the process holds {held:,.0f} MiB, {grown:,.0f} more than after its warm-up; if it keeps growing "
            "there is a memory leak; you can stop and resume the run"
        )


def initial_loss(loss: float, vocab_size: int, init: str) -> tuple[bool, str]:
    """Return whether the cross-entropy before the first step is plausible, and a line that explains it.

    Args:
        loss: nats a token.
        vocab_size: V; a uniform prediction costs ln V.
        init: where the weights come from, as in a spec. Weights from scratch predict nothing: the loss is ln V, and up
            to a tenth more where random logits are wide; copied layers should not be worse. Pretrained weights are
            below. Others may be anywhere.
    """
    uniform = math.log(vocab_size)
    text = f"initial loss {loss:.3f} nats a token, ln V is {uniform:.3f}"
    if not math.isfinite(loss):
        return False, f"{text}: non-finite; look at the weights and the data"
    if init == "scratch" and loss > 1.1 * uniform:
        return False, f"{text}: fresh weights are worse than a uniform prediction; their scale is too large"
    if init == "scratch" and loss < 0.9 * uniform:
        return False, f"{text}: too low for fresh weights; the student sees its labels, or the weights are not fresh"
    if init == "teacher-layers" and loss > 1.1 * uniform:
        worse = "layers copied without the rest are worse than fresh weights, because those around them do not fit"
        return False, f"{text}: {worse}; kdtrain prune makes a better start of the same teacher"
    if init == "pretrained" and loss > uniform:
        return False, f"{text}: a trained student is worse than a uniform prediction; is the tokenizer its own?"
    return True, text
