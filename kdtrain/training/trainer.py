"""The trainer: one run from its first step to its last, meant to be read from top to bottom.

`fit` takes steps (`step`), each of which is watched (`recovery`: skipped where it is non-finite, rolled back where the
loss spikes or stays worse than it began; `guards.EarlyStopping`: ended where nothing is gained any more), reported,
validated (`validate`) and saved (`save`) when that is due. A stop request is honoured after the micro-batch in work:
the unfinished step leaves no trace.

A state is written once: a rolling checkpoint every `--checkpoint-freq` steps, at the last step, and where validation
was best; one at the end of each epoch; a special one where something happened (a stop, a rollback, a switch); one by
the clock where `--checkpoint-minutes` have passed without any. Where a rolling one and an epoch's fall together, the
second is a further name of the first.
"""

import math
import time
from collections.abc import Iterator
from enum import Enum

import numpy as np
from transformers import PreTrainedTokenizerFast

from kdtrain.cache.reader import CachedBatch
from kdtrain.checkpoint import tiers
from kdtrain.checkpoint.saver import Saver
from kdtrain.checkpoint.store import Store
from kdtrain.config import DistillConfig
from kdtrain.data import order
from kdtrain.errors import RunError
from kdtrain.monitor.progress import Bar, Rate, line, log
from kdtrain.monitor.writers import SilentWriters, Writers
from kdtrain.parallel.parallelize import Alone
from kdtrain.precision.collect import Collector
from kdtrain.precision.controller import Adaptive
from kdtrain.ranks import is_main, on_main, rank, reported, world_size
from kdtrain.training import recovery
from kdtrain.training.data import Feed, Source
from kdtrain.training.guards import Guards
from kdtrain.training.nan_hooks import NanHooks
from kdtrain.training.reporter import Reporter
from kdtrain.training.schedule import decay_steps
from kdtrain.training.signals import StopRequest
from kdtrain.training.state import TrainState, make_optimizer
from kdtrain.training.step import FIRST_STEPS, settle_buckets, take_step
from kdtrain.training.student import Student
from kdtrain.training.validate import summary, validate


class Outcome(Enum):
    """What a validation says of the student."""

    BEST = "the best one so far"
    ORDINARY = "neither"
    DIVERGED = "worse than it may be"


class Trainer:
    """One training run.

    Args:
        config: every option.
        student: what is trained, and its loss.
        train, validation: where sequences come from.
        total_steps: optimizer steps in all, as planned; a plateau may end the run before (`total`).
        micro: sequences in a micro-batch of one rank.
        seq_len: T, tokens in a sequence.
        has_teacher: whether micro-batches carry targets; without them it is plain cross-entropy.
        engine: what the student is called through, and when gradients are exchanged; the student itself when None.
        adaptive: when the student is quantised; None where that does not change.
        collector: of statistics of tensors, where they are asked for.
        identity: what a checkpoint says it belongs to (configuration, cache, student).

    `writers` and `reporter` are opened by `open`, once the step to begin at is known.
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
            keep_aside=keep.keep_aside,
        )
        self.saver = Saver(self.store, keep.async_save, keep.disk_patience)
        self.hooks = NanHooks(student) if config.guards.nan_hooks == "always" else None
        self.stopped_by: str | None = None
        """The signal that ended training, if one did."""
        self.published: tuple[int, int | None] | None = None
        """The step, and the step that was validated, of the newest checkpoint."""
        self.halves_until = 0
        """The last step in which a micro-batch without memory is halved, which is done once."""
        # what this process spent; a clock is no part of the state
        self.seconds, self.tokens, self.waited = 0.0, 0, 0.0
        self.saved_at = time.monotonic()

    @property
    def total(self) -> int:
        """Optimizer steps in all, as is known now."""
        begun = self.state.progress.decay_from
        return self.planned if begun is None else begun + decay_steps(self.planned, self.config.optimizer)

    @property
    def micros(self) -> int:
        """Micro-batches in a step, on each rank."""
        return self.config.batch_size // (self.micro * world_size())

    @property
    def validation_batches(self) -> int:
        """Forwards of a validation over all ranks, at most; the same text whatever a step's memory made of `micro`."""
        return (
            self.config.monitor.eval_batches * (self.config.micro_batch_given or self.config.batch_size) // self.micro
        )

    @property
    def full_tokens(self) -> float:
        """Tokens of a step none of which is masked: the constant that losses are divided by."""
        return float(self.config.batch_size * self.seq_len)

    @property
    def batch_number(self) -> int:
        """The number of the step's batch in the stream of data, from 1: what a fault is tied to, a rollback skips."""
        return self.state.progress.sequences // self.config.batch_size + 1

    def open(self, tokenizer: PreTrainedTokenizerFast | None, *, init: str, samples: int = 0) -> None:
        """Open what the run writes, from the step that it has reached on.

        Args:
            tokenizer: what makes text of tokens; without one there are no samples.
            init: where the student's weights come from, as its spec says it.
            samples: entries drawn for a token of the targets.
        """
        at, monitor = self.state.progress, self.config.monitor
        self.halves_until = at.step + FIRST_STEPS
        written = Writers(self.config.out, at.step, at.validated_step, monitor) if is_main() else SilentWriters(monitor)
        self.writers = written
        self.reporter = Reporter(
            *(self.config, self.student, written, self.validation_source, tokenizer),
            init=init,
            finished=at.step,
            samples=samples,
        )
        if self.collector is not None:
            self.collector.forget_after(at.step)

    def finished(self) -> bool:
        """Whether there is no step left to take: the last one is taken, or the run was stopped early."""
        return self.state.progress.step >= self.total or self.state.progress.stopped is not None

    def sequences(self, cursor: int) -> np.ndarray:
        """The numbers of the sequences of the step that begins at `cursor`, those of all ranks."""
        return order.batch(self.config.seed, cursor, self.config.batch_size, len(self.train_source))

    def share(self, cursor: int) -> np.ndarray:
        """Those that this rank trains on: an even part in order, so that a step is the same for any number of ranks."""
        return np.array_split(self.sequences(cursor), world_size())[rank()]

    def feed(self) -> Feed:
        """The data from the cursor on."""
        cursor, size = self.state.progress.sequences, self.config.batch_size
        return Feed(self.train_source, lambda step: self.share(cursor + step * size), self.micro)

    def fit(self) -> None:
        """Train to the last step, an early stop, or a signal; the newest checkpoint holds the last finished step.

        Raises:
            RunError: too many steps in a row are non-finite, too many rollbacks, gradients that stay huge, a checkpoint
                cannot be written, or the data cannot be read any more: then the last finished step is saved first.
        """
        state = self.state
        shown = Bar("distill", self.total, state.progress.step, every=math.inf)
        rate = Rate(self.total)
        started = time.monotonic()
        with StopRequest() as stop, shown.bar:
            self.saver.asked_to_stop = lambda: stop.asked > 0
            stop.compiling = self.student.compile_objective
            settle_buckets(self)
            if self.published is None or self._validation_due():
                outcome, loss = self.validate(stop)
                if outcome is Outcome.DIVERGED:  # of a step whose validation a stop request prevented
                    recovery.roll_back_divergence(self, loss)
                else:
                    if not self._validation_due():
                        self._look_for_plateau(shown, rate)
                    self._save_if_due(improved=outcome is Outcome.BEST, ends_epoch=self._ends_epoch())
            if self.published is None and not stop:  # what a rollback may go back to, whatever the first steps do
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
                        failed = recovery.skip(self, numbers)
                        recovered = failed and recovery.decide(self, state.progress.step + 1, value, what)
                        if stop or recovered:
                            break
                        continue
                    self.count(numbers)
                    before, self.seconds = self.seconds, time.monotonic() - started
                    progress = state.progress
                    if recovery.rolled_back(self, numbers):
                        break
                    self.guards.stopping.add(numbers["loss"])
                    numbers |= {"loss_avg": self.guards.stopping.average} | rate.add(
                        progress.step, int(numbers["tokens"]), self.seconds
                    )
                    if before:  # the first step's interval would be that of the compiler
                        numbers["tok/s_last"] = numbers["tokens"] / (self.seconds - before)
                    self._report(shown, numbers)

                    outcome, loss = self.validate(stop) if self._validation_due() else (None, math.nan)
                    if outcome is Outcome.DIVERGED:
                        recovery.roll_back_divergence(self, loss)
                        break
                    if not self._validation_due():  # one that a stop request prevented is made by the next start
                        self._look_for_plateau(shown, rate)
                    ended = self._ends_epoch()
                    recovery.decide(self, progress.step, numbers["loss"])
                    self._save_if_due(improved=outcome is Outcome.BEST, ends_epoch=ended, by_clock=by_clock)
                    self.log_published()
                    if self.finished() or stop:
                        break
            self._end(stop)
            self.saver.wait()
            self.log_published()
            stop.raise_failed()

    def step(self, batches: Iterator[CachedBatch], stop: StopRequest) -> dict[str, float] | None:
        """Take the next step: see `step.take_step`. It is counted by `count`, where it was taken."""
        return take_step(self, batches, stop)

    def count(self, numbers: dict[str, float]) -> None:
        """Count a step that was taken: `numbers` are what `step` returned."""
        progress = self.state.progress
        progress.step += 1
        progress.sequences += self.config.batch_size
        progress.tokens += int(numbers["tokens"])
        progress.skips_in_a_row = 0
        progress.loss = numbers["loss"]
        self.guards.scale.update(overflowed=False)
        self.tokens += int(numbers["tokens"])

    def validate(self, stop: StopRequest) -> tuple[Outcome | None, float]:
        """Measure the validation split: what that says, None where a stop request prevented it, and the loss in nats.

        Cross-entropy and not the objective: it means the same at every temperature and for every divergence.

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
        """Whether the last finished step is to be measured and was not, which a stop request may have prevented."""
        progress = self.state.progress
        wanted = progress.step % self.config.monitor.eval_freq == 0 or self.finished()
        return wanted and progress.validated_step != progress.step

    def _look_for_plateau(self, shown: Bar, rate: Rate) -> None:
        """Begin the decay, or end the run, where nothing is gained any more."""
        progress, options = self.state.progress, self.config.optimizer
        reason = self.guards.stopping.plateau(progress.step)
        if reason is None:
            return
        if options.lr_schedule != "wsd" or self.config.stopping.on_plateau == "stop":
            progress.stopped = reason
        elif options.warmup_steps <= progress.step < self.total - decay_steps(self.planned, options):
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
        """Log why training ended; save what a signal interrupted."""
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
            RunError: it, or the one before it, could not be written.
        """
        progress = self.state.progress
        best = None
        if progress.best_step is not None:  # the name that `best` is to point at, where this step is the best one
            best = names[0] if progress.best_step == progress.step else None
        self.saver.save(
            names,
            progress.step,
            self.state.tensors(),
            {**self.identity, **self.state.numbers()},
            rollbacks=progress.rollbacks,
            best=best,
            protected=self._protected(names) if is_main() else [],
        )
        self.published = (progress.step, progress.validated_step)
        self.saved_at = time.monotonic()
        self.log_published()

    def is_saved(self) -> bool:
        """Whether the newest checkpoint already holds the last finished step and its validation."""
        return self.published == (self.state.progress.step, self.state.progress.validated_step)

    def clock_is_due(self) -> bool:
        """Whether this process has not saved for `--checkpoint-minutes`; rank 0's word is what counts."""
        minutes = self.config.checkpoint.checkpoint_minutes
        return minutes > 0 and time.monotonic() - self.saved_at >= 60 * minutes

    def log_published(self) -> None:
        """Write an event for each checkpoint that was published since, and a line for those of adaptive quantisation.

        In the thread that trains, as all events: those of a run stand in the order in which it learned of them.
        """
        for text in self.saver.warnings():
            self.writers.event("disk-full", self.state.progress.step, "warning", message=text)
        for each in self.saver.published():
            for name in each.names:
                self.writers.event("checkpoint", each.step, name=name, stood_still=each.stood_still)
                if name.startswith(("window_", "switch_to_")):
                    log.info("[AdaptiveQuantization] Checkpoint saved: %s", name)

    def relink_best(self) -> None:
        """Point `best` at the checkpoint the state calls so; where it is gone, a validation chooses anew."""
        progress = self.state.progress

        def relink() -> bool:
            rolling = tiers.rolling_name(progress.best_step or 0)
            # a kill may have left the step under another name alone, that of a window say
            others = [entry.name for entry in self.store.entries() if entry.step == progress.best_step]
            for name in sorted(others, key=lambda name: name != rolling):
                if self.store.problem(name) is None:
                    self.store.link("best", name)
                    return True
            self.store.remove_link("best")
            return False

        if not on_main(relink):
            progress.best_loss = progress.best_step = None

    def _ends_epoch(self) -> bool:
        """Whether the last finished step was the first to reach the end of an epoch; the state then knows it.

        Asked before anything else saves the step: a run that resumes from there must not take a later one for it.
        """
        progress = self.state.progress
        epoch = progress.sequences // len(self.train_source)
        ended, progress.epoch = epoch > progress.epoch, max(epoch, progress.epoch)
        return ended

    def _save_if_due(self, *, improved: bool, ends_epoch: bool, by_clock: bool = False) -> None:
        """Save the last finished step where its number, its place in the epoch or its validation asks for it.

        by_clock: whether the clock asks for it, which counts where nothing else does.
        """
        progress = self.state.progress
        due = progress.step % self.config.checkpoint.checkpoint_freq == 0 or self.finished()
        names = [tiers.rolling_name(progress.step)] if due or improved else []
        if ends_epoch:
            names.append(tiers.epoch_name(progress.epoch))
        if by_clock and not names and not self.is_saved():
            names = [tiers.clock_name(progress.step)]
            self.reporter.memory.settles.add(progress.step + 1)  # a first save's buffers are not a leak
        if names:
            self.save(*names)

    def _protected(self, names: tuple[str, ...]) -> list[str]:
        """What must outlive this save: the recovery buffer, and the newest checkpoint a rollback may go back to.

        That is one from before a spike that is not confirmed yet; and never one that an interruption left, so that a
        run that was interrupted goes back as far as one that was not.
        """
        buffer = [] if self.adaptive is None else self.adaptive.controller.buffer_names()
        first = self.guards.spikes.suspicious_since
        if first is not None:
            self.saver.wait()
        elif any(map(tiers.is_planned, names)):
            return buffer
        found = [each for each in self.store.entries() if each.valid and tiers.is_planned(each.name)]
        return [each.name for each in found if first is None or each.step < first][-1:] + buffer
