"""The training loop, meant to be read from top to bottom.

A step is taken (`update`), watched (`recovery`: skipped where it is not finite, gone back behind where the loss
spikes or stays worse than it began; `early`: ended where nothing is gained any more), reported, validated and saved
when that is due. A stop request is honoured after the micro-batch in work: the unfinished step leaves no trace.

Validation: the student against text and teacher, over a split read in order, each rank a part of it.
"""

import math
import time
from collections.abc import Callable
from enum import Enum
from functools import partial

import numpy as np
import torch
from einops import rearrange

from kdtrain import faults
from kdtrain.cache.reader import CachedBatch
from kdtrain.checkpoint import tiers
from kdtrain.errors import RunError
from kdtrain.models.head import OutputHead
from kdtrain.monitor.progress import Bar, Rate, line, log
from kdtrain.objective.metrics import Metrics, measure
from kdtrain.ranks import all_reduce_sum, rank, reported, world_size
from kdtrain.training.data import Source
from kdtrain.training.recovery import decide, roll_back_divergence, rolled_back, skip, warm_up
from kdtrain.training.run import Run
from kdtrain.training.saving import ends_epoch, is_saved, log_published, save, save_if_due
from kdtrain.training.schedule import decay_steps
from kdtrain.training.signals import StopRequest
from kdtrain.training.update import settle, take_step


def validate(
    source: Source,
    hidden: Callable[[CachedBatch], torch.Tensor],
    head: OutputHead,
    *,
    vocab_size: int,
    micro: int,
    batches: int | None,
    read: Callable[[Callable[[], CachedBatch]], CachedBatch | None] = lambda action: action(),
) -> Metrics | None:
    """Sums over the first sequences of `source`, those of all ranks; None when `read` gave none in between.

    Ranks take turns by micro-batches, and all of them take as many, because a sharded student needs every rank.

    Args:
        source: the split.
        hidden: micro-batch -> [B*T, D], the student's backbone.
        head: the student's output head.
        vocab_size: the vocabulary of the data.
        micro: sequences in a forward; the last one is filled up with masked copies, so that its shape is the same.
        batches: at most this many forwards of all ranks together; all of the split when None.
        read: what each batch is read through, by every rank, see `StopRequest.read`.
    """
    total = Metrics()
    count = len(source) if batches is None else min(len(source), batches * micro)
    with torch.no_grad():
        for start in range(rank() * micro, count + rank() * micro, world_size() * micro):
            faults.point("validate.batch")
            numbers = np.minimum(np.arange(start, start + micro), count - 1)
            batch = read(partial(source.read, numbers))
            if batch is None:
                return None
            mask_BT = (
                batch.loss_mask
                & torch.as_tensor(np.arange(start, start + micro) < count, device=batch.loss_mask.device)[:, None]
            )
            total = total + measure(
                hidden(batch),
                head,
                rearrange(batch.tokens[:, 1:], "B T -> (B T)"),
                rearrange(mask_BT, "B T -> (B T)"),
                batch.targets,
                vocab_size=vocab_size,
            )
    if world_size() == 1:
        return total
    return Metrics.from_vector(all_reduce_sum(torch.tensor(total.vector(), dtype=torch.float64)).tolist())


def summary(metrics: Metrics) -> dict[str, float | None]:
    """The means, by the names that logs and tables use; None for what the teacher's targets cannot tell.

    loss, kl, teacher_loss: nats a token; agreement: share of tokens where student and teacher like the same entry
    best; acceptance: sum of min(p, q), the share of draft tokens that speculative decoding would accept.
    """
    return {
        "loss": metrics.mean("cross_entropy"),
        "perplexity": metrics.perplexity(),
        "accuracy": metrics.mean("correct"),
        "ece": metrics.ece(),
        "kl": metrics.mean("kl"),
        "agreement": metrics.mean("agreement"),
        "acceptance": metrics.mean("acceptance"),
        "teacher_loss": metrics.mean("teacher_cross_entropy"),
        "tokens": metrics.tokens,
    }


def calibration(metrics: Metrics) -> list[dict[str, float]]:
    """The reliability diagram: by bin of confidence, its tokens, their mean confidence and their accuracy.

    15 equal bins from 0 to 1, in order; an empty one holds zeros. ECE is the mean gap of the two, weighted by tokens.
    """
    bins = zip(metrics.bin_count, metrics.bin_confidence, metrics.bin_correct, strict=True)
    return [
        {"tokens": count, "confidence": confidence / max(count, 1), "accuracy": correct / max(count, 1)}
        for count, confidence, correct in bins
    ]


def train(run: Run) -> None:
    """Train to the last step, to an early stop, or until a signal; the newest checkpoint holds the last finished step.

    Raises:
        RunError: too many steps in a row are not finite, too many rollbacks, gradients that stay huge, a checkpoint
            cannot be written, or the data cannot be read any more: then the last finished step is saved first.
    """
    state = run.state
    shown = Bar("distill", run.total, state.progress.step, every=math.inf)
    rate = Rate(run.total)
    started = time.monotonic()
    with StopRequest() as stop, shown.bar:
        run.saver.asked_to_stop = lambda: stop.asked > 0
        stop.compiling = run.step.compile_objective
        settle(run)
        if run.published is None or _validation_due(run):
            outcome, loss = _validate(run, stop)
            if outcome is Outcome.DIVERGED:  # of a step whose validation a stop request prevented
                roll_back_divergence(run, loss)
            else:
                if not _validation_due(run):
                    _look_for_plateau(run, shown, rate)
                save_if_due(run, improved=outcome is Outcome.BEST, ends_epoch=ends_epoch(run))
        if run.published is None and not stop:  # what a rollback may go back to, whatever the first steps do
            save(run, tiers.rolling_name(state.progress.step))
        warm_up(run, stop)
        while not (run.finished() or stop):
            for batches in run.feed().steps():
                numbers = take_step(run, batches, stop)
                stop.compiling = False
                if numbers is None:
                    break
                by_clock = numbers.pop("clock") > 0
                if numbers.pop("skipped"):
                    loss, norm = numbers["loss"], numbers["grad_norm"]
                    what, value = ("Gradient norm", norm) if math.isfinite(loss) else ("Loss", loss)
                    recovered = skip(run, numbers) and decide(run, state.progress.step + 1, value, what)
                    if stop or recovered:
                        break
                    continue
                progress = state.progress
                progress.step += 1
                progress.sequences += run.config.batch_size
                progress.tokens += int(numbers["tokens"])
                progress.skips_in_a_row = 0
                progress.loss = numbers["loss"]
                run.scale.update(overflowed=False)
                run.tokens += int(numbers["tokens"])
                before, run.seconds = run.seconds, time.monotonic() - started

                if rolled_back(run, numbers):
                    break
                run.stopping.add(numbers["loss"])
                numbers |= {"loss_avg": run.stopping.average} | rate.add(
                    progress.step, int(numbers["tokens"]), run.seconds
                )
                if before:  # the first step's interval would be that of the compiler
                    numbers["tok/s_last"] = numbers["tokens"] / (run.seconds - before)
                _report(run, shown, numbers)

                outcome, loss = _validate(run, stop) if _validation_due(run) else (None, math.nan)
                if outcome is Outcome.DIVERGED:
                    roll_back_divergence(run, loss)
                    break
                if not _validation_due(run):  # one that a stop request prevented is made by the next start
                    _look_for_plateau(run, shown, rate)
                ended = ends_epoch(run)
                decide(run, progress.step, numbers["loss"])
                save_if_due(run, improved=outcome is Outcome.BEST, ends_epoch=ended, by_clock=by_clock)
                log_published(run)
                if run.finished() or stop:
                    break
        _end(run, stop)
        run.saver.wait()
        log_published(run)
        stop.raise_failed()


def _end(run: Run, stop: StopRequest) -> None:
    """Say why training ended; save what a signal interrupted."""
    progress = run.state.progress
    if stop and (not run.finished() or _validation_due(run)):
        run.stopped_by = stop.name
        run.state.optimizer.zero_grad(set_to_none=True)
        if progress.step > 0 and not is_saved(run):
            save(run, f"interrupted-{progress.step:08d}")
        run.writers.event("stop", progress.step, "info", **{"reason" if stop.failed else "signal": stop.name})
        how = "the same command" if run.config.checkpoint.resume in ("auto", "latest") else "--resume latest"
        log.info("stopped by %s after step %d; %s goes on from there", stop.name, progress.step, how)
    elif progress.stopped is not None:
        run.writers.event("stop", progress.step, reason=progress.stopped)
        log.info("stopped early after step %d: %s", progress.step, progress.stopped)


def _report(run: Run, shown: Bar, numbers: dict[str, float]) -> None:
    number = run.state.progress.step
    checkpoint = 0 if run.published is None else run.published[0]
    epochs = run.state.progress.sequences / len(run.train_source)
    text = run.reporter.finished(number, numbers, checkpoint, epochs)
    shown.update(number, text)
    if number % run.config.monitor.log_freq == 0 or run.finished() or number == 1:
        log.info("step %d/%d %s", number, run.total, text)
        run.bounds.look(run.step.temperature, run.config.objective.temperature_mode, number, run.writers)


def _validation_due(run: Run) -> bool:
    """Whether the last finished step is to be measured and was not, which a stop request may have prevented."""
    progress = run.state.progress
    wanted = progress.step % run.config.monitor.eval_freq == 0 or run.finished()
    return wanted and progress.validated_step != progress.step


class Outcome(Enum):
    """What a validation says of the student."""

    BEST = "the best one so far"
    ORDINARY = "neither"
    DIVERGED = "worse than it may be"


def _validate(run: Run, stop: StopRequest) -> tuple[Outcome | None, float]:
    """Measure the validation split: what that says, None where a stop request prevented it, and the loss in nats.

    Cross-entropy and not the objective: it means the same at every temperature and for every divergence.

    Raises:
        RunError: the loss is non-finite before the first step.
    """
    step, progress = run.step, run.state.progress
    step.eval()
    metrics = validate(
        run.validation_source,
        step.hidden_eager,
        step.student.head,
        vocab_size=step.vocab_size,
        micro=run.micro,
        batches=run.config.monitor.eval_batches * (run.config.micro_batch_given or run.config.batch_size) // run.micro,
        read=stop.read,
    )
    run.spread.reshard()
    if metrics is None:
        return None, math.nan
    numbers = {f"validation/{name}": value for name, value in summary(metrics).items() if value is not None}
    run.writers.metrics(progress.step, numbers)
    log.info("validation at step %d %s", progress.step, line(numbers))
    progress.validated_step = progress.step
    loss = numbers["validation/loss"]
    if progress.step == 0:
        run.reporter.initial(loss)
    if not metrics.tokens:
        return Outcome.ORDINARY, loss
    if not math.isfinite(loss):
        run.writers.warning("validation", progress.step, f"validation at step {progress.step}: loss {loss}")
        if progress.first_loss is None:
            text = f"the validation loss is {loss} before the first step; look at the student's weights"
            raise reported(RunError(text, reason="non-finite"))
        return Outcome.DIVERGED, loss
    run.stopping.validated(loss)
    progress.first_loss = loss if progress.first_loss is None else progress.first_loss
    progress.last_loss, progress.teacher_loss = loss, numbers.get("validation/teacher_loss")
    if run.divergence.validated(loss):
        return Outcome.DIVERGED, loss
    if progress.best_loss is None or loss < progress.best_loss:
        progress.best_loss, progress.best_step = loss, progress.step
        return Outcome.BEST, loss
    return Outcome.ORDINARY, loss


def _look_for_plateau(run: Run, shown: Bar, rate: Rate) -> None:
    """Begin the decay, or end the run, where nothing is gained any more."""
    progress, options = run.state.progress, run.config.optimizer
    reason = run.stopping.plateau(progress.step)
    if reason is None:
        return
    if options.lr_schedule != "wsd" or run.config.stopping.on_plateau == "stop":
        progress.stopped = reason
    elif options.warmup_steps <= progress.step < run.total - decay_steps(run.planned, options):
        progress.decay_from = progress.step
        if run.adaptive is not None:
            run.adaptive.controller.begin_decay(progress.step)
        shown.total = rate.total = run.total
        run.writers.event("decay", progress.step, reason=reason, steps=run.total)
        log.info("a plateau begins the decay, which ends at step %d: %s", run.total, reason)
