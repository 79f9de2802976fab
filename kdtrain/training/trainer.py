"""The trainer: one run from its first step to its last, to be read from top to bottom.

`fit` takes one step after another (`step.Stepper`). After each one it checks the numbers (`recovery` skips a non-finite
step, and rolls back a spike or a divergence; `guards.EarlyStopping` ends the run at a plateau), reports them, and
validates (`validate`) and saves (`checkpoints`) when due. A stop request takes effect after the current micro-batch:
the unfinished step leaves no trace.

The trainer writes a state once: a rolling checkpoint every `--checkpoint-freq` steps, at the last step, and where the
validation loss is lowest; one at the end of each epoch; a special one at a stop, a rollback or a switch; and one after
`--checkpoint-minutes` without any. Where several coincide at a step, one folder has all their names.
"""

import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING

import numpy as np
import torch
from transformers import PreTrainedTokenizerFast

from kdtrain.checkpoint import tiers
from kdtrain.config.commands import DistillConfig
from kdtrain.errors import RunError, log
from kdtrain.monitor.progress import log_step, members_line, one_line, validation_line
from kdtrain.monitor.record import RunRecord
from kdtrain.monitor.writers import Writers
from kdtrain.objective.alpha import MeasuredAlpha, too_few
from kdtrain.objective.batch import Batch
from kdtrain.parallel.parallelize import SingleProcess
from kdtrain.ranks import is_main, on_main, reported
from kdtrain.training.checkpoints import Checkpoints
from kdtrain.training.guards import Guards
from kdtrain.training.observers import Observer
from kdtrain.training.optimizers import make_optimizer
from kdtrain.training.recovery import Next, Recovery
from kdtrain.training.reporter import Reporter, sample_texts
from kdtrain.training.schedule import decay_steps, validation_interval, warmup_steps
from kdtrain.training.signals import StopRequest
from kdtrain.training.sources.source import Source
from kdtrain.training.state import TrainState
from kdtrain.training.step import Status, Stepper, StepResult
from kdtrain.training.student import Student
from kdtrain.training.validate import calibration, summary, validate, validate_members
from kdtrain.training.withheld import Withheld

if TYPE_CHECKING:
    from kdtrain.precision.controller import Adaptive


class Trainer:
    """One training run.

    Args:
        config: every option.
        student: the model and its loss.
        train, validation: where sequences come from.
        total_steps, micro, seq_len, wrapper, observers: see `Stepper`; without a wrapper, in one process.
        adaptive: decides when the student is quantised; None where the mode does not change.
        identity: what a checkpoint belongs to (options, cache, student).
    """

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
        wrapper: SingleProcess | None = None,
        adaptive: "Adaptive | None" = None,
        observers: Sequence[Observer] = (),
        identity: dict[str, object] | None = None,
    ) -> None:
        self.config, self.student, self.validation_source = config, student, validation
        guards = Guards(config.guards, config.stopping, fp16=student.mode == "fp16")
        optimizer = make_optimizer(student, config.optimizer, config.objective.temperature_lr)
        self.state = TrainState(
            student, optimizer, guards=guards, adaptive=adaptive, growing=getattr(train, "growing", None)
        )
        term = train.facts.term(config.objective.divergence)
        self.reporter = Reporter(config, student, total_steps, train.overlaps, term)
        self.checkpoints = Checkpoints(config, self.state, self.reporter, identity or {})
        self.saver, self.store = self.checkpoints.saver, self.checkpoints.store
        self.stepper = Stepper(
            config=config,
            state=self.state,
            source=train,
            wrapper=wrapper or SingleProcess(student, student.model),
            reporter=self.reporter,
            copies=self.checkpoints.copies,
            planned=total_steps,
            micro=micro,
            seq_len=seq_len,
            observers=[*observers],
        )
        if isinstance(alpha := student.loss.alpha, MeasuredAlpha):
            self.stepper.withheld = Withheld(alpha, validation, micro, config.batch_size * seq_len)
        self.recovery = Recovery(config, self.state, self.stepper, self.checkpoints, self.reporter)
        self.byte_lengths: np.ndarray | None = None
        self.on_begin: Callable[[float, float, bool], bool] | None = None
        """Called on rank 0 before the first step with the teacher's validation loss, alpha, and whether it is measured;
        returns whether the labels alone are the better start."""
        self.stopped_by: str | None = None
        """The signal that ended training, or None."""
        # the time of this process is not part of the state
        self.started = time.monotonic()
        self.seconds = 0.0
        self.earlier = 0.0, 0.0
        """Seconds and tokens of the steps of earlier processes, as metrics.jsonl has them."""

    @property
    def writers(self) -> Writers:
        """The logs of the run, silent until `open`."""
        return self.reporter.writers

    @property
    def total(self) -> int:
        """Optimizer steps of the whole run, as known now: a plateau may begin the decay early."""
        return self.stepper.total

    @property
    def eval_freq(self) -> int:
        """Steps between validations."""
        return validation_interval(self.stepper.planned, self.config.monitor.eval_freq)

    @property
    def validation_batches(self) -> int:
        """Largest number of forwards of a validation over all ranks; covers the same text for every micro-batch."""
        sequences = self.config.monitor.eval_batches * (self.config.micro_batch_given or self.config.batch_size)
        return sequences // self.stepper.micro

    def open(
        self,
        tokenizer: PreTrainedTokenizerFast | None,
        *,
        init: str,
        byte_lengths: np.ndarray | None = None,
    ) -> None:
        """Open the run's logs and metrics, at the current step.

        Args:
            tokenizer: turns tokens into text; without one there are no samples.
            init: where the student's weights come from, as in its spec.
            byte_lengths: see `validate`.
        """
        progress = self.state.progress
        texts = None
        self.byte_lengths = byte_lengths
        if byte_lengths is not None and isinstance(self.student.loss.alpha, MeasuredAlpha):
            self.student.loss.byte_lengths = torch.from_numpy(byte_lengths).float().to(self.student.device)
        if tokenizer is not None:
            texts = partial(sample_texts, self.student, self.validation_source, tokenizer, self.config.seed)
        samples = self.stepper.source.facts.num_samples
        self.reporter.open(
            progress.step,
            progress.validated_step,
            init=init,
            texts=texts,
            samples=samples,
            observers=self.stepper.observers,
        )
        if is_main() and progress.step:
            with suppress(OSError, ValueError):
                record = RunRecord.read(self.config.out)
                minutes, tokens = (max(record.places(axis).values()) for axis in ("minutes", "tokens"))
                self.earlier = 60 * minutes, tokens
        self.stepper.rewound(progress.step)

    def finished(self) -> bool:
        """Return whether the run has no step left: the last one is taken, or the run was stopped early."""
        return self.state.progress.step >= self.total or self.state.progress.stopped is not None

    def fit(self) -> None:
        """Train to the last step, an early stop, or a signal; the newest checkpoint holds the last finished step.

        Raises:
            RunError: too many steps in a row are non-finite, there are too many rollbacks, the gradients stay huge, a
                checkpoint cannot be written, or the data cannot be read (the last finished step is saved first).
        """
        self.started = time.monotonic()
        with StopRequest() as stop, self.reporter.bar.bar:
            self.saver.asked_to_stop = lambda: stop.received > 0
            stop.compiling = self.student.compile_objective
            self.stepper.settle_buckets()
            if not self.finished():
                self._begin_alpha(stop)
            if not stop and (self.checkpoints.published is None or self._validation_due()):
                self._validate_and_save(stop, None)
            if self.checkpoints.published is None and not stop:  # so that a rollback always finds a checkpoint
                self.checkpoints.save(tiers.name_of("rolling", self.state.progress.step))
            if self.student.compile_objective and not (self.finished() or stop):
                log.info("compiling (20 to 60 s for a new student, about 5 s for one compiled before)...")
                self.reporter.bar.update(self.state.progress.step, "compiling...", self.total)
            self.stepper.warm_up(stop)
            then = Next.STOP if self.finished() or stop else Next.READ_AGAIN
            while then is not Next.STOP:
                for batches in self.stepper.feed():
                    then = self._step(batches, stop)
                    if then is not Next.CONTINUE:
                        break
            self._end(stop)
            self.saver.wait()
            self.checkpoints.log_published()
            stop.raise_failed()

    def _step(self, batches: Iterator[Batch], stop: StopRequest) -> Next:
        """Take the next step, and recover, report, validate and save as its result asks for; STOP after the last."""
        result = self.stepper.take(batches, stop, self.checkpoints.clock_is_due())
        stop.compiling = False
        before = self.seconds
        if result.status is Status.TAKEN:
            self.seconds = time.monotonic() - self.started
        then = self.recovery.after_step(result)
        if then is Next.CONTINUE and result.status is Status.TAKEN:
            self._report(result, before)
            then = self._validate_and_save(stop, result)
        return Next.STOP if self.finished() or stop else then

    def validate(self, stop: StopRequest) -> tuple[bool, bool, float]:
        """Validate; return whether the run has diverged, whether the student is the best, and the loss in nats.

        The loss is NaN where a stop request prevented it. It is cross-entropy, not the objective: it means the same at
        every temperature and for every divergence.

        Raises:
            RunError: the loss is non-finite before the first step, or no token counts.
        """
        progress, guards, source = self.state.progress, self.state.guards, self.validation_source
        size = {
            "micro": self.stepper.micro,
            "batches": self.validation_batches,
            "byte_lengths": self.byte_lengths,
            "layout": self.stepper.layout,
        }
        found = validate_members(self.student.eval(), source, read=stop.read, **size)
        self.stepper.wrapper.reshard()
        marked_by = getattr(self.stepper.source, "score", None)
        score = None if marked_by is None or found is None else stop.read(marked_by)
        if found is None or (marked_by is not None and score is None):
            return False, False, math.nan
        metrics, members = found
        if not metrics.tokens:
            raise reported(
                RunError("no token of the validation sequences counts; use more --eval-batches, or other data")
            )
        numbers = dict[str, float]()
        for whose, own in {"": metrics, **{f"{name}/": each for name, each in members.items()}}.items():
            known = summary(own).items()
            numbers |= {f"validation/{whose}{name}": value for name, value in known if value is not None}
        if score is not None:
            numbers["validation/score"] = score
        bins = [[round(number, 6) for number in each.values()] for each in calibration(metrics)]
        finite = all(math.isfinite(value) for each in bins for value in each)
        self.writers.metrics(progress.step, numbers, {"validation/calibration": bins} if finite else None)
        loss = numbers["validation/loss"]
        before = progress.last_loss
        improved = progress.improved_by(loss, score)
        better = before is not None and progress.best_step is not None and improved
        log.info("%s", validation_line(progress.step, numbers, before, better))
        progress.validated_step = progress.step
        if members:
            log.info("%s", members_line(progress.step, numbers, members))
        if progress.step == 0:
            self._meet_teacher(metrics.teacher_loss())
            self.reporter.initial(loss)
        if not math.isfinite(loss):
            self.writers.warning("validation", progress.step, f"validation at step {progress.step}: loss {loss}")
            if progress.first_loss is None:
                text = f"the validation loss is {loss} before the first step; look at the student's weights"
                raise reported(RunError(text, reason="non-finite"))
            return True, False, loss
        guards.stopping.validated(loss)
        if progress.first_loss is None:
            progress.first_loss = loss
            progress.first_score = score
        progress.last_loss = loss
        progress.teacher_loss = numbers.get("validation/teacher_loss")
        progress.bytes_per_token = metrics.mean("bytes") or None
        for member in (name for name, own in members.items() if own.tokens):
            own_loss, teacher = (numbers.get(f"validation/{member}/{name}") for name in ("loss", "teacher_loss"))
            first = progress.members.get(member, {}).get("first_loss", own_loss)
            progress.members[member] = {"first_loss": first, "last_loss": own_loss, "teacher_loss": teacher}
        self.reporter.validated(progress.step, loss, progress.teacher_loss)
        diverged = guards.divergence.validated(loss)
        is_best = improved and not diverged
        if is_best:
            progress.best_loss = loss
            progress.best_score = score
            progress.best_step = progress.step
        return diverged, is_best, loss

    def loss_by_part(self) -> list[float]:
        """Return the validation loss of parts of the split, nats per token, as `find-lr` compares rates by."""
        source, micro = self.validation_source, self.stepper.micro
        count = min(len(source), self.validation_batches * micro)
        size = max(1, min(micro, count // 16))  # sixteen parts at least, if there are as many sequences
        whole = count if not source.facts.members else len(source)  # whose members stand one behind the other
        starts = [number * whole // (count // size) for number in range(count // size)]
        student = self.student.eval()
        found = [validate(student, source, micro=size, batches=1, part=range(at, at + size)) for at in starts]
        return [each.cross_entropy / each.tokens for each in found if each is not None and each.tokens]

    def _begin_alpha(self, stop: StopRequest) -> None:
        """Measure alpha before the first step, where it follows withheld text; also of a run begun before it did."""
        withheld = self.stepper.withheld
        begun = self.state.progress.step > 0
        if withheld is None or not withheld.choose(stop.read) or (begun and withheld.alpha.measured):
            return
        if begun:
            text = "alpha is %.2g, as the run had it, and follows withheld text from now on"
            log.info(text, withheld.alpha.largest())
        if not self.stepper.weigh(stop):
            return
        if withheld.every:
            again = f", measured again every {withheld.every:,} steps" if withheld.every < self.reporter.total else ""
            log.info("alpha %.2g by withheld text%s", withheld.alpha.largest(), again)
        for name, tokens in withheld.counts.items():
            if line := too_few(tokens, name):
                log.info("%s", line)

    def _meet_teacher(self, loss: float | None) -> None:
        """Log what the run has to beat, and begin with the labels alone beside a teacher that knows less than a bigram.

        loss: the teacher's validation loss, nats per token; None: it is not known.
        """
        if loss is None:
            return
        alpha = self.student.loss.alpha
        first = alpha.largest()
        follows = isinstance(alpha, MeasuredAlpha)
        weak = on_main(lambda: self.on_begin is not None and self.on_begin(loss, first, follows))
        if weak and isinstance(alpha, MeasuredAlpha):
            alpha.begin_at_zero()

    def _validate_and_save(self, stop: StopRequest, result: StepResult | None) -> Next:
        """Validate, decide on the format of the next step, and save, each where it is due.

        result: the step just taken; None before the first step of a process.
        """
        progress = self.state.progress
        improved = False
        if result is None or self._validation_due():
            diverged, improved, loss = self.validate(stop)
            if diverged:
                return self.recovery.after_divergence(loss)
        if not self._validation_due():  # a resumed run repeats a validation that a stop request prevented
            self._check_plateau()
        # before anything saves the step, so that a resumed run does not count the same epoch again
        epoch = progress.sequences // len(self.stepper.source)
        ends_epoch = epoch > progress.epoch
        progress.epoch = max(epoch, progress.epoch)
        # The names that adaptive quantisation asks for come first: the memory in the checkpoint names those of the
        # recovery buffer, which a run that is killed between two names must find when it goes back.
        names = []
        adaptive = self.state.adaptive
        if result is not None and adaptive is not None:
            names = self.recovery.act(progress.step, adaptive.judged(result.metrics))[0]
        if improved or progress.step % self.config.checkpoint.checkpoint_freq == 0 or self.finished():
            names.append(tiers.name_of("rolling", progress.step))
        if ends_epoch:
            names.append(tiers.name_of("epoch", progress.epoch))
        if result is not None and result.save_due and not names and not self.checkpoints.is_saved():
            names = [tiers.name_of("clock", progress.step)]
            self.reporter.saved_by_clock(progress.step)
        if names:
            self.checkpoints.save(*names)
        self.checkpoints.log_published()
        return Next.CONTINUE

    def _validation_due(self) -> bool:
        """Return whether the last finished step needs a validation and has none, for example after a stop request."""
        progress = self.state.progress
        due = progress.step % self.eval_freq == 0 or self.finished()
        return due and progress.validated_step != progress.step

    def _check_plateau(self) -> None:
        """Begin the decay, or end the run, at a plateau."""
        progress, options, planned = self.state.progress, self.config.optimizer, self.stepper.planned
        reason = self.state.guards.stopping.plateau(progress.step)
        if reason is None:
            return
        if options.lr_schedule != "wsd" or self.config.stopping.on_plateau == "stop":
            progress.stopped = reason
        elif warmup_steps(planned, options) <= progress.step < self.total - decay_steps(planned, options):
            progress.decay_from = progress.step
            if self.state.adaptive is not None:
                self.state.adaptive.begin_decay(progress.step)
            self.writers.event("decay", progress.step, reason=reason, steps=self.total)
            log.info("a plateau begins the decay, which ends at step %d: %s", self.total, reason)

    def _report(self, result: StepResult, before: float) -> None:
        """Report a step, which ended `self.seconds` after the start and the one before it `before` seconds after."""
        number, stopping = self.state.progress.step, self.state.guards.stopping
        stopping.add(result.loss)
        rate, bar = self.reporter.rate, self.reporter.bar
        rate.total = self.total
        speed = rate.add(number, result.tokens, self.seconds)
        if before:  # the first step includes compilation
            speed["tok/s_last"] = result.tokens / (self.seconds - before)
        checkpoint = 0 if self.checkpoints.published is None else self.checkpoints.published[0]
        epochs = self.state.progress.sequences / len(self.stepper.source)
        numbers = {**result.metrics, "loss_avg": stopping.average, **speed}
        parts = self.reporter.finished(number, numbers, checkpoint, epochs)
        beside = [parts[name] for name in ("rate", "left") if name in parts]
        below = [text for name, text in parts.items() if name not in ("rate", "left")]
        bar.update(number, " | ".join(beside) or " ", self.total, more=" | ".join(below))
        if number % self.config.monitor.log_freq == 0 or self.finished() or number == 1:
            log_step(one_line(f"step {number}/{self.total}", parts))
            self.reporter.temperature(number)

    def _end(self, stop: StopRequest) -> None:
        """Log why training ended; save the state after a signal."""
        progress = self.state.progress
        if stop and (not self.finished() or self._validation_due()):
            self.stopped_by = stop.name
            self.state.optimizer.zero_grad(set_to_none=True)
            if progress.step > 0 and not self.checkpoints.is_saved():
                self.checkpoints.save(f"interrupted-{progress.step:08d}")
            self.writers.event("stop", progress.step, "info", **{"reason" if stop.failed else "signal": stop.name})
            how = "the same command" if self.config.checkpoint.resume in ("auto", "latest") else "--resume latest"
            log.info("stopped by %s after step %d; %s resumes from there", stop.name, progress.step, how)
        elif progress.stopped is not None:
            self.writers.event("stop", progress.step, reason=progress.stopped)
            log.info("stopped early after step %d: %s", progress.step, progress.stopped)
