"""The trainer: one run from its first step to its last, to be read from top to bottom.

`fit` takes steps (`step`). After each one it checks the numbers (`recovery` skips a non-finite step, and rolls back a
spike or a divergence; `guards.EarlyStopping` ends the run at a plateau), reports them, and validates (`validate`) and
saves (`save`) when due. A stop request takes effect after the current micro-batch: the unfinished step leaves no trace.

The trainer writes a state once: a rolling checkpoint every `--checkpoint-freq` steps, at the last step, and where the
validation loss is lowest; one at the end of each epoch; a special one at a stop, a rollback or a switch; and one after
`--checkpoint-minutes` without any. Where several coincide at a step, one folder has all their names.
"""

import math
import time
from collections.abc import Iterator
from enum import Enum

import numpy as np
from transformers import PreTrainedTokenizerFast

from kdtrain.checkpoint import tiers
from kdtrain.checkpoint.host_copies import HostCopies
from kdtrain.checkpoint.saver import Saver
from kdtrain.checkpoint.store import Store
from kdtrain.config import DistillConfig
from kdtrain.data import order
from kdtrain.errors import RunError
from kdtrain.monitor.progress import Bar, Rate, line, log
from kdtrain.monitor.writers import SilentWriters, Writers
from kdtrain.objective.batch import Batch
from kdtrain.parallel.parallelize import Alone
from kdtrain.precision.collect import Collector
from kdtrain.precision.controller import Adaptive
from kdtrain.ranks import is_main, on_main, rank, reported, world_size
from kdtrain.training import recovery
from kdtrain.training.data import Feed, Source
from kdtrain.training.guards import Guards
from kdtrain.training.nan_hooks import NanHooks
from kdtrain.training.reporter import Reporter
from kdtrain.training.schedule import decay_steps, validation_interval, warmup_steps
from kdtrain.training.signals import StopRequest
from kdtrain.training.state import TrainState, make_optimizer, packed
from kdtrain.training.step import FIRST_STEPS, settle_buckets, take_step
from kdtrain.training.student import Student
from kdtrain.training.validate import summary, validate


class Outcome(Enum):
    """The result of a validation."""

    BEST = "the lowest loss so far"
    ORDINARY = "neither"
    DIVERGED = "above the limit of divergence"


class Trainer:
    """One training run.

    Args:
        config: every option.
        student: the model and its loss.
        train, validation: where sequences come from.
        total_steps: planned optimizer steps; a plateau may end the run earlier (`total`).
        micro: sequences in a micro-batch of one rank.
        seq_len: T, tokens in a sequence.
        has_teacher: whether micro-batches have targets; without them the loss is cross-entropy.
        engine: wraps the student and exchanges gradients; None: the student itself.
        adaptive: decides when the student is quantised; None where the mode does not change.
        collector: collects tensor statistics; None: none.
        identity: what a checkpoint belongs to (options, cache, student).

    `open` creates `writers` and `reporter`, once the first step is known.
    """

    writers: Writers
    reporter: Reporter

    def __init__(
        self,
        config: DistillConfig,
        student: Student,
        train: Source,
        validation: Source,
        *,
        total_steps: int,
        micro: int,
        seq_len: int,
        has_teacher: bool = True,
        engine: Alone | None = None,
        adaptive: Adaptive | None = None,
        collector: Collector | None = None,
        identity: dict[str, object] | None = None,
    ) -> None:
        keep = config.checkpoint
        self.config, self.student, self.engine = config, student, engine or Alone(student, student.model)
        self.train_source, self.validation_source = train, validation
        self.planned, self.micro, self.seq_len, self.has_teacher = total_steps, micro, seq_len, has_teacher
        self.adaptive, self.collector = adaptive, collector
        self.identity = identity or {}
        self.guards = Guards(config.guards, config.stopping, fp16=student.mode == "fp16")
        watchers = vars(self.guards) | ({} if adaptive is None else {"adaptive": adaptive})
        optimizer = make_optimizer(student, config.optimizer, config.objective.temperature_lr)
        self.state = TrainState(student, optimizer, watchers=watchers)
        self.store = Store(
            config.out / "checkpoints",
            keep_rolling=keep.keep_rolling,
            keep_epochs=keep.keep_epochs,
            keep_special=keep.keep_special,
        )
        self.copies = HostCopies()
        self.saver = Saver(self.store, keep.async_save, keep.disk_patience, self.copies)
        self.hooks = NanHooks(student) if config.guards.nan_hooks == "always" else None
        self.stopped_by: str | None = None
        """The signal that ended training, or None."""
        self.published: tuple[int, int | None] | None = None
        """The step and the last validated step of the newest checkpoint."""
        self.halves_until = 0
        """The last step in which an out-of-memory error halves the micro-batch; 0 once it is halved."""
        # the time and tokens of this process are not part of the state
        self.seconds, self.tokens, self.waited = 0.0, 0, 0.0
        self.saved_at = time.monotonic()

    @property
    def total(self) -> int:
        """Optimizer steps of the whole run, as known now: a plateau may begin the decay early."""
        start = self.state.progress.decay_from
        return self.planned if start is None else start + decay_steps(self.planned, self.config.optimizer)

    @property
    def eval_freq(self) -> int:
        """Steps between validations."""
        return validation_interval(self.planned, self.config.monitor.eval_freq)

    @property
    def micros(self) -> int:
        """Micro-batches in a step, on each rank."""
        return self.config.batch_size // (self.micro * world_size())

    @property
    def validation_batches(self) -> int:
        """Largest number of forwards of a validation over all ranks; covers the same text for every `micro`."""
        return (
            self.config.monitor.eval_batches * (self.config.micro_batch_given or self.config.batch_size) // self.micro
        )

    @property
    def full_tokens(self) -> float:
        """Tokens of a step without a mask: the constant divisor of the losses."""
        return float(self.config.batch_size * self.seq_len)

    @property
    def batch_number(self) -> int:
        """The number of the step's batch in the stream of data, from 1; differs from the step after a rollback."""
        return self.state.progress.sequences // self.config.batch_size + 1

    def open(self, tokenizer: PreTrainedTokenizerFast | None, *, init: str, samples: int = 0) -> None:
        """Open the run's logs and metrics, at the current step.

        Args:
            tokenizer: turns tokens into text; without one there are no samples.
            init: where the student's weights come from, as in its spec.
            samples: entries drawn for a token of the targets.
        """
        progress, monitor = self.state.progress, self.config.monitor
        self.halves_until = progress.step + FIRST_STEPS
        if is_main():
            self.writers = Writers(self.config.out, progress.step, progress.validated_step, monitor)
        else:
            self.writers = SilentWriters(monitor)
        self.reporter = Reporter(
            *(self.config, self.student, self.writers, self.validation_source, tokenizer),
            init=init,
            total=self.planned,
            finished=progress.step,
            samples=samples,
            reads_ahead=self.train_source.overlaps,
        )
        if self.collector is not None:
            self.collector.forget_after(progress.step)

    def finished(self) -> bool:
        """Whether the run has no step left: the last one is taken, or the run was stopped early."""
        return self.state.progress.step >= self.total or self.state.progress.stopped is not None

    def sequences(self, cursor: int) -> np.ndarray:
        """The indices of the sequences of the step at `cursor`, for all ranks."""
        return order.batch(self.config.seed, cursor, self.config.batch_size, len(self.train_source))

    def share(self, cursor: int) -> np.ndarray:
        """The indices for this rank: an even part in order, so that a step is the same for any number of ranks."""
        return np.array_split(self.sequences(cursor), world_size())[rank()]

    def feed(self) -> Feed:
        """The micro-batches from the cursor on."""
        cursor, size = self.state.progress.sequences, self.config.batch_size
        return Feed(self.train_source, lambda step: self.share(cursor + step * size), self.micro)

    def fit(self) -> None:
        """Train to the last step, an early stop, or a signal; the newest checkpoint holds the last finished step.

        Raises:
            RunError: too many steps in a row are non-finite, there are too many rollbacks, the gradients stay huge, a
                checkpoint cannot be written, or the data cannot be read (the last finished step is saved first).
        """
        state = self.state
        shown = Bar("distill", self.total, state.progress.step, every=math.inf)
        rate = Rate(self.total)
        started = time.monotonic()
        with StopRequest() as stop, shown.bar:
            self.saver.asked_to_stop = lambda: stop.received > 0
            stop.compiling = self.student.compile_objective
            settle_buckets(self)
            if self.published is None or self._validation_due():
                outcome, loss = self.validate(stop)
                if outcome is Outcome.DIVERGED:  # at a step whose validation a stop request prevented
                    recovery.roll_back_divergence(self, loss)
                else:
                    if not self._validation_due():
                        self._check_plateau(shown, rate)
                    self._save_if_due(improved=outcome is Outcome.BEST, ends_epoch=self._ends_epoch())
            if self.published is None and not stop:  # so that a rollback always finds a checkpoint
                self.save(tiers.rolling_name(state.progress.step))
            recovery.warm_up(self, stop)
            while not (self.finished() or stop):
                for batches in self.feed().steps():
                    numbers = self.step(batches, stop)
                    stop.compiling = False
                    if numbers is None:
                        break
                    by_clock = numbers.pop("clock") > 0
                    if numbers.pop("skipped"):
                        loss, norm = numbers["loss"], numbers["grad_norm"]
                        what, value = ("Gradient norm", norm) if math.isfinite(loss) else ("Loss", loss)
                        if recovery.skip(self, numbers):
                            names, recovered = recovery.decide(self, state.progress.step + 1, value, what)
                            if names:  # a switch of the format, which the next step tries first
                                self.save(*names)
                            elif not recovered:
                                recovered = recovery.roll_back_skips(self, loss)
                            if recovered:
                                break
                        if stop:
                            break
                        continue
                    self.count(numbers)
                    before, self.seconds = self.seconds, time.monotonic() - started
                    progress = state.progress
                    if recovery.roll_back_spike(self, numbers):
                        break
                    self.guards.stopping.add(numbers["loss"])
                    numbers |= {"loss_avg": self.guards.stopping.average} | rate.add(
                        progress.step, int(numbers["tokens"]), self.seconds
                    )
                    if before:  # the first step includes compilation
                        numbers["tok/s_last"] = numbers["tokens"] / (self.seconds - before)
                    self._report(shown, numbers)

                    outcome, loss = self.validate(stop) if self._validation_due() else (None, math.nan)
                    if outcome is Outcome.DIVERGED:
                        recovery.roll_back_divergence(self, loss)
                        break
                    if not self._validation_due():  # a resumed run repeats a validation that a stop request prevented
                        self._check_plateau(shown, rate)
                    ended = self._ends_epoch()
                    names, _ = recovery.decide(self, progress.step, numbers["loss"])
                    improved = outcome is Outcome.BEST
                    self._save_if_due(*names, improved=improved, ends_epoch=ended, by_clock=by_clock)
                    self.log_published()
                    if self.finished() or stop:
                        break
            self._end(stop)
            self.saver.wait()
            self.log_published()
            stop.raise_failed()

    def step(self, batches: Iterator[Batch], stop: StopRequest) -> dict[str, float] | None:
        """Take the next step: see `step.take_step`. The caller counts it with `count`, unless it was skipped."""
        return take_step(self, batches, stop)

    def count(self, numbers: dict[str, float]) -> None:
        """Count a step with these numbers, which `step` returned."""
        progress = self.state.progress
        progress.step += 1
        progress.sequences += self.config.batch_size
        progress.tokens += int(numbers["tokens"])
        progress.skips_in_a_row = 0
        progress.loss = numbers["loss"]
        self.guards.scale.update(overflowed=False)
        self.tokens += int(numbers["tokens"])

    def validate(self, stop: StopRequest) -> tuple[Outcome | None, float]:
        """Validate; return the outcome, None where a stop request prevented it, and the loss in nats.

        The loss is cross-entropy, not the objective: it means the same at every temperature and for every divergence.

        Raises:
            RunError: the loss is non-finite before the first step.
        """
        progress, source, batches = self.state.progress, self.validation_source, self.validation_batches
        metrics = validate(self.student.eval(), source, micro=self.micro, batches=batches, read=stop.read)
        self.engine.reshard()
        if metrics is None:
            return None, math.nan
        numbers = {f"validation/{name}": value for name, value in summary(metrics).items() if value is not None}
        self.writers.metrics(progress.step, numbers)
        log.info("validation at step %d %s", progress.step, line(numbers))
        progress.validated_step = progress.step
        loss = numbers["validation/loss"]
        if progress.step == 0:
            self.reporter.initial(loss)
        if not metrics.tokens:
            return Outcome.ORDINARY, loss
        if not math.isfinite(loss):
            self.writers.warning("validation", progress.step, f"validation at step {progress.step}: loss {loss}")
            if progress.first_loss is None:
                text = f"the validation loss is {loss} before the first step; look at the student's weights"
                raise reported(RunError(text, reason="non-finite"))
            return Outcome.DIVERGED, loss
        self.guards.stopping.validated(loss)
        progress.first_loss = loss if progress.first_loss is None else progress.first_loss
        progress.last_loss, progress.teacher_loss = loss, numbers.get("validation/teacher_loss")
        if self.guards.divergence.validated(loss):
            return Outcome.DIVERGED, loss
        if progress.best_loss is None or loss < progress.best_loss:
            progress.best_loss, progress.best_step = loss, progress.step
            return Outcome.BEST, loss
        return Outcome.ORDINARY, loss

    def _validation_due(self) -> bool:
        """Whether the last finished step needs a validation and has none, for example after a stop request."""
        progress = self.state.progress
        due = progress.step % self.eval_freq == 0 or self.finished()
        return due and progress.validated_step != progress.step

    def _check_plateau(self, shown: Bar, rate: Rate) -> None:
        """Begin the decay, or end the run, at a plateau."""
        progress, options = self.state.progress, self.config.optimizer
        reason = self.guards.stopping.plateau(progress.step)
        if reason is None:
            return
        if options.lr_schedule != "wsd" or self.config.stopping.on_plateau == "stop":
            progress.stopped = reason
        elif warmup_steps(self.planned, options) <= progress.step < self.total - decay_steps(self.planned, options):
            progress.decay_from = progress.step
            if self.adaptive is not None:
                self.adaptive.controller.begin_decay(progress.step)
            shown.total = rate.total = self.total
            self.writers.event("decay", progress.step, reason=reason, steps=self.total)
            log.info("a plateau begins the decay, which ends at step %d: %s", self.total, reason)

    def _report(self, shown: Bar, numbers: dict[str, float]) -> None:
        number = self.state.progress.step
        checkpoint = 0 if self.published is None else self.published[0]
        epochs = self.state.progress.sequences / len(self.train_source)
        text = self.reporter.finished(number, numbers, checkpoint, epochs)
        shown.update(number, text)
        if number % self.config.monitor.log_freq == 0 or self.finished() or number == 1:
            log.info("step %d/%d %s", number, self.total, text)
            self.reporter.temperature(number)

    def _end(self, stop: StopRequest) -> None:
        """Log why training ended; save the state after a signal."""
        progress = self.state.progress
        if stop and (not self.finished() or self._validation_due()):
            self.stopped_by = stop.name
            self.state.optimizer.zero_grad(set_to_none=True)
            if progress.step > 0 and not self.is_saved():
                self.save(f"interrupted-{progress.step:08d}")
            self.writers.event("stop", progress.step, "info", **{"reason" if stop.failed else "signal": stop.name})
            how = "the same command" if self.config.checkpoint.resume in ("auto", "latest") else "--resume latest"
            log.info("stopped by %s after step %d; %s resumes from there", stop.name, progress.step, how)
        elif progress.stopped is not None:
            self.writers.event("stop", progress.step, reason=progress.stopped)
            log.info("stopped early after step %d: %s", progress.step, progress.stopped)

    def save(self, *names: str) -> None:
        """Publish the state of the last finished step as `names`.

        Raises:
            RunError: this checkpoint or the one before it could not be written.
        """
        progress = self.state.progress
        shown = next((name for name in names if tiers.tier(name) == "rolling"), names[0])
        best = progress.best_step == progress.step and not tiers.is_apart(shown)
        self.saver.save(
            names,
            progress.step,
            self.state.own_tensors(),
            {**self.identity, **self.state.numbers()},
            kept=packed(self.state.snapshots),
            rollbacks=progress.rollbacks,
            latest=shown,
            best=shown if best else None,
            protected=self._protected(names) if is_main() else [],
        )
        self.published = (progress.step, progress.validated_step)
        self.saved_at = time.monotonic()
        self.log_published()

    def is_saved(self) -> bool:
        """Whether the newest checkpoint already holds the last finished step and its validation."""
        return self.published == (self.state.progress.step, self.state.progress.validated_step)

    def clock_is_due(self) -> bool:
        """Whether this process has not saved for `--checkpoint-minutes`; rank 0 decides for all."""
        minutes = self.config.checkpoint.checkpoint_minutes
        return minutes > 0 and time.monotonic() - self.saved_at >= 60 * minutes

    def log_published(self) -> None:
        """Write an event for each newly published checkpoint, and a log line for those of adaptive quantisation.

        Runs in the training thread, as all events do, so that they are in order.
        """
        for kind, text in self.saver.warnings():
            self.writers.event(kind, self.state.progress.step, "warning", message=text)
        for each in self.saver.published():
            for name in each.names:
                self.writers.event("checkpoint", each.step, name=name, stood_still=each.stood_still)
                if name.startswith(("window_", "switch_to_")):
                    log.info("[AdaptiveQuantization] Checkpoint saved: %s", name)

    def relink_best(self) -> None:
        """Point `best` at the checkpoint of the best step; if that is gone, forget the best step."""
        progress = self.state.progress

        def relink() -> bool:
            rolling = tiers.rolling_name(progress.best_step or 0)
            # after a kill the step may exist under another name only, such as that of a window
            names = [entry.name for entry in self.store.entries() if entry.step == progress.best_step]
            for name in sorted(names, key=lambda name: name != rolling):
                if self.store.problem(name) is None:
                    self.store.link("best", name)
                    return True
            self.store.remove_link("best")
            return False

        if not on_main(relink):
            progress.best_loss = progress.best_step = None

    def _ends_epoch(self) -> bool:
        """Return whether the last finished step is the first to reach the end of an epoch, and record the epoch.

        Called before anything saves the step, so that a resumed run does not count the same epoch again.
        """
        progress = self.state.progress
        epoch = progress.sequences // len(self.train_source)
        ended, progress.epoch = epoch > progress.epoch, max(epoch, progress.epoch)
        return ended

    def _save_if_due(self, *others: str, improved: bool, ends_epoch: bool, by_clock: bool = False) -> None:
        """Save the last finished step if its number, the end of an epoch, its validation or the clock requires it.

        others: the names that adaptive quantisation asks for. They come first: the memory in the checkpoint names
        those of the recovery buffer, which a run that is killed between two names must find when it goes back.
        """
        progress = self.state.progress
        due = progress.step % self.config.checkpoint.checkpoint_freq == 0 or self.finished()
        names = [*others, *([tiers.rolling_name(progress.step)] if due or improved else [])]
        if ends_epoch:
            names.append(tiers.epoch_name(progress.epoch))
        if by_clock and not names and not self.is_saved():
            names = [tiers.clock_name(progress.step)]
            self.reporter.memory.settles.add(progress.step + 1)  # the buffers of a first save are not a leak
        if names:
            self.save(*names)

    def _protected(self, names: tuple[str, ...]) -> list[str]:
        """The checkpoints that this save must not prune: the recovery buffer, and the newest target of a rollback.

        The target is older than a spike that is not confirmed yet, and not a checkpoint of an interruption, so that an
        interrupted run rolls back as far as an uninterrupted one.
        """
        buffer = [] if self.adaptive is None else self.adaptive.controller.buffer_names()
        first = self.guards.spikes.suspicious_since
        if first is not None:
            self.saver.wait()
        elif any(map(tiers.is_planned, names)):
            return buffer
        targets = [each for each in self.store.entries() if each.valid and tiers.is_planned(each.name)]
        return [each.name for each in targets if first is None or each.step < first][-1:] + buffer
