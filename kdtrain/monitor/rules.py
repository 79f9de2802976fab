"""Is a run well? A table of rules over what it has logged, each with the knob to turn.

A run tests them while it trains: some at each step over the steps of its process (`History`), the others with each line
of a step (`training.reporter`). `kdtrain inspect RUN`, with `--watch` again and again, tests them from outside over
metrics.jsonl, where a run that no longer logs anything is noticed too. Every rule is a pure function of `Signs`, and
its action is a warning; what skips a step, rolls back or stops is of `training.guards`, whose state is in checkpoints.
"""

import math
import os
import shutil
import statistics
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

from kdtrain.monitor.record import Line, RunRecord, as_finite
from kdtrain.tables import duration, number, size

WINDOW = 50
"""Steps over which losses, divergences and waiting for data are averaged."""
CLIPPED = 100
"""Steps of which the share with a clipped gradient counts."""
_FIRST, _WARM = 10, 50
"""First steps of a process without a limit for waiting (files are opened, graphs compiled), and until memory is stable.
"""
_PATIENCE = 4
"""Validations without a better one before a run counts as one without progress."""
_STALLED, _SLOWER = 300.0, 20.0
"""A run stalls when a step takes so many seconds, and so many times the median."""
_VALIDATES = 1800.0
"""Seconds that a validation may take while none was timed; later ones may take twice the longest."""
_MOVED = 0.01
"""The share of the way from its first loss to the teacher's that a run goes in `_PATIENCE` validations at least."""
_AT_RISK = 3600.0
"""Seconds of training that a crash may cost before there is a warning."""
_DATA_WAIT, _CLIPPED_SHARE, _GROWTH = 0.1, 0.1, 0.5
"""Limits: the share of the steps' time that waits for data, that of clipped steps, and the growth of memory."""


@dataclass(frozen=True, kw_only=True)
class Logged:
    """The numbers that a step logged."""

    numbers: Mapping[str, float] = field(default_factory=dict)
    """All of it, by the names of metrics.jsonl, for rules of plugins."""


@dataclass(frozen=True, kw_only=True)
class Signs(Logged):
    """The signs that the rules look at; None and empty where unknown."""

    step: int
    """The last finished step."""
    idle: float | None = None
    """Seconds since it ended."""
    step_seconds: float | None = None
    """The median of the last steps."""
    validates: bool = False
    """Whether a validation is due after the last step, and not logged yet."""
    validation_seconds: float | None = None
    """The longest of the validations so far, with the step after it."""
    saved_step: int | None = None
    """The step of the newest checkpoint."""
    free_mib: float | None = None
    """Of the disk that holds the run."""
    checkpoint_mib: float | None = None
    """Size of the newest checkpoint."""
    data_wait: float | None = None
    """The share of the last steps' time that went by waiting for data; None with an online teacher, which computes
    while the step waits."""
    clip: float = 0.0
    """The largest norm of a gradient."""
    clipped_share: float = 0.0
    """Of the last `CLIPPED` steps."""
    clipped_losses: Sequence[float] = ()
    """Those of these that are `comparable`, nats, if all lie after the warm-up."""
    divergence: float | None = None
    """Mean divergence of the last steps, nats, where targets have samples."""
    samples: int = 0
    """Entries drawn for a token of the targets."""
    epochs: float = 0.0
    """Passes over the training split so far."""
    held_mib: float = 0.0
    """Memory of the process."""
    grown_mib: float = 0.0
    """What it holds more than after its warm-up."""
    losses: Sequence[float] = ()
    """Those of the last steps that are `comparable`, nats per token: the objective changes with alpha and T."""
    validations: Sequence[tuple[int, float]] = ()
    """Step and loss, nats per token, where it was finite."""
    teacher_loss: float | None = None
    """The teacher's validation loss, nats per token."""

    @classmethod
    def of(cls, folder: Path, record: RunRecord, now: float) -> "Signs":
        """Read the signs of the run in `folder`; `now` in seconds since 1970."""
        steps = record.steps[-WINDOW * 4 :]
        validations = record.validations
        last = record.last_step
        newest = record.newest
        timed = [(time, each) for each in steps[-WINDOW:] if (time := _seconds(each)) is not None]
        total = math.fsum(time for time, _ in timed)
        validated = {int(each["step"]) for each in validations}
        paused = [_seconds(each) for each in steps if int(each["step"]) - 1 in validated]
        saved = [each.step for each in record.events if each.event == "checkpoint"]
        optimizer = record.options.get("optimizer", {})
        warmup, clip = optimizer.get("warmup_steps"), optimizer.get("clip")
        warm = isinstance(warmup, int) and len(steps) > CLIPPED + warmup
        held = as_finite(newest.get("memory_reserved_mb" if "memory_reserved_mb" in newest else "memory_resident_mb"))
        waits = record.options.get("run", {}).get("teacher") is None and len(timed) >= WINDOW // 2
        waited = math.fsum(as_finite(each.get("data_wait_s")) or 0.0 for _, each in timed)
        losses = [(int(each["step"]), as_finite(each.get("validation/loss"))) for each in validations]
        taught = (as_finite(each.get("validation/teacher_loss")) for each in validations[::-1])
        return cls(
            step=last,
            idle=max(now - (folder / "metrics.jsonl").stat().st_mtime, 0.0) if record.metrics else None,
            step_seconds=statistics.median(time for time, _ in timed) if timed else None,
            validates=last not in validated and _validation_due(last, record),
            validation_seconds=max((each for each in paused if each is not None), default=None),
            saved_step=saved[-1] if saved else None,
            free_mib=free_mib(folder),
            checkpoint_mib=newest_mib(folder / "checkpoints"),
            data_wait=waited / total if waits and total else None,
            clip=clip if isinstance(clip, int | float) else 0.0,
            clipped_share=as_finite(newest.get("clipped_share")) or 0.0,
            clipped_losses=comparable(steps[-CLIPPED:]) if warm else [],
            held_mib=held or 0.0,
            grown_mib=as_finite(newest.get("memory_growth_mb")) or 0.0,
            losses=comparable(steps),
            validations=[(step, loss) for step, loss in losses if loss is not None],
            teacher_loss=next(filter(None, taught), None),
            numbers={name: each for name, value in newest.items() if (each := as_finite(value)) is not None},
        )


def comparable(steps: Sequence[Mapping[str, float]]) -> list[float]:
    """Return the losses by which these steps can be compared, nats per token; NaN where one is unknown.

    Cross-entropy, which means the same at every T. Where alpha moves it must rise as alpha does, over text that is
    known by heart: then (1 - alpha) CE + alpha KD, of each step at the newest alpha.
    """
    weight = steps[-1].get("alpha") if steps else None
    if weight is None:
        return [each.get("ce", each.get("loss", math.nan)) for each in steps]
    return [(1 - weight) * each.get("ce", math.nan) + weight * each.get("kd_T1", math.nan) for each in steps]


Test = Callable[[Signs], str | None]
"""Returns what is wrong, or None."""


@dataclass(frozen=True)
class Rule:
    """A decorator that makes a function of `Signs` a rule, whose kind is the function's name."""

    knob: str
    each_step: bool = False
    """A run tests it at each step, else with each line of a step."""
    once: bool = False
    """A process warns once; else again after it has been over."""
    fields: Sequence[str] = ()
    """The signs that the warning's event has too."""

    def __call__(self, test: Test) -> Test:
        RULES[test.__name__.replace("_", "-")] = (self, test)
        return test


RULES: dict[str, tuple[Rule, Test]] = {}
"""By the kind of the warning."""


@Rule("look at the process, the GPU and the disk; Ctrl-C stops it, and the same command resumes")
def stalled(signs: Signs) -> str | None:
    """Warn if there is no step for much longer than a step, or the validation after it, takes."""
    limit = max(_STALLED, _SLOWER * (signs.step_seconds or 0.0))
    if signs.validates:
        limit = max(limit, _VALIDATES if signs.validation_seconds is None else 2 * signs.validation_seconds)
    if signs.idle is None or signs.idle < limit:
        return None
    usual = "" if signs.step_seconds is None else f" (a step takes {number(round(signs.step_seconds, 2))} s)"
    return f"no step for {duration(signs.idle)}{usual}"


@Rule("lower --checkpoint-minutes or --checkpoint-freq")
def no_checkpoint(signs: Signs) -> str | None:
    """Warn if a crash would lose much training."""
    if signs.step_seconds is None or signs.saved_step is None:
        return None
    steps = signs.step - signs.saved_step
    lost = steps * signs.step_seconds
    return None if lost < _AT_RISK else f"no checkpoint for {steps:,} steps: a crash now loses {duration(lost)}"


@Rule("make room, or lower --keep-rolling")
def disk_low(signs: Signs) -> str | None:
    """Warn if there is no room for two more checkpoints: one is written beside the existing ones."""
    if signs.free_mib is None or not signs.checkpoint_mib or signs.free_mib >= 2 * signs.checkpoint_mib:
        return None
    return f"{size(signs.free_mib)} of disk are left, and a checkpoint takes {size(signs.checkpoint_mib)}"


@Rule("lower --lr, cache more text, or end at a plateau: --early-stopping")
def plateau(signs: Signs) -> str | None:
    """Warn if the validation loss no longer falls while it is above the teacher's."""
    if len(signs.validations) <= _PATIENCE:
        return None
    step, best = min(signs.validations, key=lambda each: each[1])
    behind = sum(each > step for each, _ in signs.validations)
    if behind < _PATIENCE or (signs.teacher_loss is not None and best <= signs.teacher_loss):
        return None
    teacher = "" if signs.teacher_loss is None else f" (teacher {signs.teacher_loss:.3f})"
    return f"the last {behind} validations are not below {best:.3f} of step {step:,}{teacher}"


@Rule("raise --lr, or give it fewer --warmup-steps")
def flat(signs: Signs) -> str | None:
    """Warn if the validation loss stays where it began, far above the teacher's."""
    if len(signs.validations) <= _PATIENCE or signs.teacher_loss is None:
        return None
    (_, first), *_, (last, _) = signs.validations
    best = min(loss for _, loss in signs.validations)
    teacher = signs.teacher_loss
    if not 0 < first - best < _MOVED * (first - teacher):  # never below the first: a plateau
        return None
    return f"validation began at {first:.3f} and is at {best:.3f} after step {last:,} (teacher {teacher:.3f})"


@Rule("lower --lr, or give it more --warmup-steps")
def diverging(signs: Signs) -> str | None:
    """Warn if the training loss rises by more than its own noise, half a window after half a window."""
    half = WINDOW // 2
    finite = [each for each in signs.losses if math.isfinite(each)]
    means = [math.fsum(finite[end - half : end]) / half for end in range(len(finite), half - 1, -half)][::-1]
    if len(means) < 4 or not all(before < after for before, after in pairwise(means[-4:])):
        return None
    noise = statistics.stdev(finite[-4 * half :]) / math.sqrt(half)
    if means[-1] - means[-4] <= max(6 * noise, 0.1 * abs(means[-4])):
        return None
    return f"the loss of training rises: {means[-4]:.3f}, then {means[-1]:.3f}, {3 * half} steps later"


@Rule("if it keeps growing there is a memory leak; you can stop and resume the run", each_step=True, once=True)
def memory_growth(signs: Signs) -> str | None:
    """Warn if memory has grown by more than half since the warm-up."""
    if signs.grown_mib <= _GROWTH * (signs.held_mib - signs.grown_mib):
        return None
    return f"the process holds {size(signs.held_mib)}, {size(signs.grown_mib)} more than after its warm-up"


@Rule(
    "cache more text, use a larger --top-k or --num-samples, or train fewer steps",
    each_step=True,
    once=True,
    fields=("epochs", "samples", "divergence"),
)
def learned_samples(signs: Signs) -> str | None:
    """Warn if the student has memorized the samples.

    A divergence is at least 0, and so is the mean of its estimates from fresh samples. A cache's samples are the same
    in every epoch: a student that fits them brings the estimate to 0 and below while it moves away from the teacher.
    """
    if signs.divergence is None or signs.divergence > 0:
        return None
    return (
        f"the divergence from the teacher is {signs.divergence:.3f} nats over the last {WINDOW} steps, and fresh "
        f"samples give none below 0: after {signs.epochs:.1f} epochs the student has memorized the {signs.samples} "
        "samples per token"
    )


@Rule("lower --lr", each_step=True)
def clipped(signs: Signs) -> str | None:
    """Warn if gradients are clipped while the loss does not fall.

    Clipping alone is no fault, it shortens a step: fresh small students learn best at a rate at which most steps are
    clipped (docs/quality.md).
    """
    losses = signs.clipped_losses
    half = CLIPPED // 2
    if len(losses) < CLIPPED or signs.clipped_share <= _CLIPPED_SHARE:
        return None
    earlier, later = math.fsum(losses[:half]) / half, math.fsum(losses[half:]) / half
    if later < earlier:
        return None
    return (
        f"the gradient was clipped in {signs.clipped_share:.0%} of the last {CLIPPED} steps (above --clip "
        f"{signs.clip:g}), and their loss did not fall ({earlier:.4f}, then {later:.4f}): the steps may be too long"
    )


@Rule(
    "put the cache on a faster disk of this machine, or leave the process a core for reading (--sanity times it); "
    "with --teacher-server it waits for the server, which --server-concurrency asks for more at once",
    each_step=True,
    once=True,
)
def data_wait(signs: Signs) -> str | None:
    """Warn if steps wait for their data."""
    if signs.data_wait is None or signs.data_wait <= _DATA_WAIT:
        return None
    return f"training waited for its data in {signs.data_wait:.0%} of the time of the last {WINDOW} steps"


def findings(signs: Signs, each_step: bool | None = None) -> dict[str, str]:
    """Return the problems by kind, with the knob to turn, by all rules or by the rules with this `each_step`."""
    tested = {kind: (rule, test(signs)) for kind, (rule, test) in RULES.items() if each_step in (None, rule.each_step)}
    return {kind: f"{text}; {rule.knob}" for kind, (rule, text) in tested.items() if text is not None}


class History:
    """The steps of a process of a run, its signs at each step, and the warnings so far.

    Nothing in it survives a restart.

    Args:
        first: the first step of this process.
        clip: largest norm of a gradient; 0 clips nothing.
        warmup: first steps of the run, whose clipping is no fault.
        samples: entries drawn for a token of the targets.
        reads_ahead: whether data is read while the step before computes.
        every: intervals, in steps, of the events whose buffers stay (checkpoints, validations).
    """

    def __init__(
        self,
        first: int = 1,
        *,
        clip: float = 0.0,
        warmup: int = 0,
        samples: int = 0,
        reads_ahead: bool = True,
        every: Iterable[int] = (),
    ) -> None:
        self.clip, self.warmup, self.samples = clip, warmup, samples
        self.clipped: deque[bool] = deque(maxlen=CLIPPED)
        self.clipped_steps: deque[Mapping[str, float]] = deque(maxlen=CLIPPED)
        self.divergences: deque[float] = deque(maxlen=WINDOW)
        self.waits: deque[tuple[float, float]] = deque(maxlen=WINDOW)
        self.unlimited: float = _FIRST if reads_ahead else math.inf
        warm = first + _WARM - 1
        self.settles = {warm + 1, *(max(warm, -(-first // each) * each) + 1 for each in every)}
        """Steps after which memory is measured that later steps are compared with."""
        self.reference: float | None = None
        self.warned: set[str] = set()

    def settle_after(self, step: int) -> None:
        """Measure the reference of memory again after the step that follows `step`."""
        self.settles.add(step + 1)

    def add(self, step: int, numbers: Mapping[str, float], held_mib: float, epochs: float = 0.0) -> Signs:
        """Add the numbers of a step, by the names of metrics.jsonl; return the signs after it."""
        self.clipped.append(0 < self.clip < numbers.get("grad_norm", math.nan))
        if step > self.warmup:
            self.clipped_steps.append(numbers)
        if self.samples and math.isfinite(divergence := numbers.get("kd", math.nan)):
            self.divergences.append(divergence)
        if "tok/s_last" in numbers and self.unlimited > 0:
            self.unlimited -= 1
        elif rate := numbers.get("tok/s_last"):
            self.waits.append((numbers["data_wait_s"], numbers["tokens"] / rate))
        if step in self.settles:
            self.reference = held_mib
        total = math.fsum(seconds for _, seconds in self.waits)
        full = len(self.waits) == WINDOW and total > 0
        return Signs(
            step=step,
            data_wait=math.fsum(waited for waited, _ in self.waits) / total if full else None,
            clip=self.clip,
            clipped_share=sum(self.clipped) / len(self.clipped),
            clipped_losses=comparable(self.clipped_steps),
            divergence=math.fsum(self.divergences) / WINDOW if len(self.divergences) == WINDOW else None,
            samples=self.samples,
            epochs=round(epochs, 2),
            held_mib=held_mib,
            grown_mib=held_mib - self.reference if self.reference else 0.0,
            numbers=numbers,
        )

    def warnings(self, signs: Signs) -> Iterator[tuple[str, str, dict[str, Any]]]:
        """Yield kind, text and other fields of each new problem found by the rules that are tested at each step."""
        found = findings(signs, each_step=True)
        for kind, text in found.items():
            if kind not in self.warned:
                yield kind, text, {name: getattr(signs, name) for name in RULES[kind][0].fields}
        self.warned = {*found, *(kind for kind in self.warned if RULES[kind][0].once)}


def free_mib(folder: Path) -> float | None:
    """Return the MiB that are free on the disk of a folder; None where the system does not report it."""
    try:
        return shutil.disk_usage(folder).free / 2**20
    except OSError:
        return None


def newest_mib(checkpoints: Path) -> float | None:
    """Return the MiB of the folder that the link `latest` points to."""
    try:
        with os.scandir(checkpoints / "latest") as files:
            return sum(each.stat().st_size for each in files if each.is_file()) / 2**20
    except OSError:
        return None


def _seconds(line: Line) -> float | None:
    """Return the duration of a step, with the work since the step before; None where it is not known."""
    rate, tokens = as_finite(line.get("tok/s_last")), as_finite(line.get("tokens"))
    return tokens / rate if rate and tokens else None


def _validation_due(step: int, record: RunRecord) -> bool:
    """Return True if a run validates after a step, by the rule of `training.schedule.validation_interval`."""
    total, every = record.environment.get("steps"), record.options.get("monitor", {}).get("eval_freq")
    if type(total) is not int or type(every) is not int or every < 1:
        return False
    return step == total or step % (every if total >= every else max(total // 4, 1)) == 0


def initial_loss(loss: float, vocab_size: int, init: str) -> tuple[bool, str]:
    """Return whether the cross-entropy before the first step is plausible, and a line that explains it.

    Args:
        loss: nats per token.
        vocab_size: V; a uniform prediction costs ln V.
        init: where the weights come from, as in a spec. Weights from scratch predict nothing: the loss is ln V, and up
            to a tenth more where random logits are wide; copied layers should not be worse. Pretrained weights are
            below. Others may be anywhere.
    """
    uniform = math.log(vocab_size)
    text = f"initial loss {loss:.3f} nats per token, ln V is {uniform:.3f}"
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
