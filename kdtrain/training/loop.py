"""The training loop, meant to be read from top to bottom.

A step is taken (`update`), watched (`recovery`: skipped where it is not finite, gone back behind where the loss
spikes; `early`: ended where nothing is gained any more), reported, validated and saved when that is due. A stop
request is honoured after the micro-batch in work: the unfinished step leaves no trace.
"""

import math
import time

from kdtrain.errors import RunError
from kdtrain.monitor.progress import Bar, Rate, line, log
from kdtrain.parallel.world import of_all
from kdtrain.training.recovery import roll_back, skip
from kdtrain.training.run import Run
from kdtrain.training.saving import ends_epoch, is_saved, save, save_if_due, tell_published
from kdtrain.training.stopping import StopRequest
from kdtrain.training.switching import decide, warm_up
from kdtrain.training.update import settle, take_step
from kdtrain.training.validate import summary, validate


def train(run: Run) -> None:
    """Train to the last step, to an early stop, or until a signal; the newest checkpoint holds the last finished step.

    Raises:
        RunError: too many steps in a row are not finite, too many spikes, a checkpoint cannot be written, or the data
            cannot be read any more: then the last finished step is saved first.
    """
    state = run.state
    shown = Bar("distill", run.total, state.progress.step, every=math.inf)
    rate = Rate(run.total)
    started, first = time.monotonic(), state.progress.step
    with StopRequest() as stop, shown.bar:
        stop.compiling = run.step.compile_objective
        settle(run)
        if _validation_due(run):
            improved = _validate(run, stop)
            if state.progress.step > 0:
                save_if_due(run, improved=improved, ends_epoch=ends_epoch(run))
        warm_up(run, stop)
        while not (run.finished() or stop):
            for batches in run.feed().steps():
                numbers = take_step(run, batches, stop)
                stop.compiling = False
                if numbers is None:
                    break
                if numbers.pop("skipped"):
                    loss, norm = numbers["loss"], numbers["grad_norm"]
                    what, value = ("Gradient norm", norm) if math.isfinite(loss) else ("Loss", loss)
                    went_back = skip(run, numbers) and decide(run, state.progress.step + 1, value, what)
                    if stop or went_back:
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
                run.seconds = time.monotonic() - started

                first_of_spike = run.spikes.update(progress.step, numbers["loss"])
                if first_of_spike is not None and roll_back(run, first_of_spike):
                    break
                progress.stopped = run.stopping.update(progress.step, numbers["loss"], numbers["grad_norm"])
                numbers |= {"loss_avg": run.stopping.average} | rate.add(
                    progress.step, int(numbers["tokens"]), run.seconds
                )
                _report(run, shown, numbers, first)

                improved = _validation_due(run) and _validate(run, stop)
                ended = ends_epoch(run)
                decide(run, progress.step, numbers["loss"])
                save_if_due(run, improved=improved, ends_epoch=ended)
                tell_published(run)
                if run.finished() or stop:
                    break
        _end(run, stop)
        run.saver.wait()
        tell_published(run)
        stop.raise_failed()


def _end(run: Run, stop: StopRequest) -> None:
    """Say why training ended; save what a signal interrupted."""
    progress = run.state.progress
    if stop and (not run.finished() or _validation_due(run)):
        run.stopped_by = stop.name
        run.state.optimizer.zero_grad(set_to_none=True)
        if progress.step > 0 and not is_saved(run):
            save(run, f"interrupted-{progress.step:08d}")
        run.writers.event("stop", progress.step, **{"reason" if stop.failed else "signal": stop.name})
        how = "the same command" if run.config.checkpoint.resume in ("auto", "latest") else "--resume latest"
        log.info("stopped by %s after step %d; %s goes on from there", stop.name, progress.step, how)
    elif progress.stopped is not None:
        run.writers.event("stop", progress.step, reason=progress.stopped)
        log.info("stopped early after step %d: %s", progress.step, progress.stopped)


def _report(run: Run, shown: Bar, numbers: dict[str, float], first: int) -> None:
    """Write and show the last finished step; `first` is the one that this process began at."""
    number = run.state.progress.step
    run.writers.metrics(number, numbers)
    checkpoint = first if run.published is None else run.published[0]
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


def _validate(run: Run, stop: StopRequest) -> bool:
    """Measure the validation split; whether the student is the best so far.

    Cross-entropy and not the objective: it means the same at every temperature and for every divergence. A loss that
    is no number is said, and is never the best.
    """
    step, progress = run.step, run.state.progress
    step.eval()
    metrics = validate(
        run.validation_source,
        step.hidden_eager,
        step.student.head,
        vocab_size=step.vocab_size,
        micro=run.micro,
        batches=run.config.monitor.eval_batches * (run.config.micro_batch_size or run.config.batch_size) // run.micro,
        read=stop.read,
    )
    run.spread.reshard()
    if metrics is None:
        return False
    numbers = {f"validation/{name}": value for name, value in summary(metrics).items() if value is not None}
    run.writers.metrics(progress.step, numbers)
    log.info("validation at step %d %s", progress.step, line(numbers))
    progress.validated_step = progress.step
    loss = numbers["validation/loss"]
    if progress.step == 0:
        run.reporter.initial(loss)
    if not math.isfinite(loss):
        text = f"validation at step {progress.step}: loss {loss}"
        if metrics.tokens and (progress.step == 0 or (run.finished() and progress.best_step is None)):
            raise of_all(RunError(f"{text}, and none before was finite; look at the student's weights or lower --lr"))
        log.warning("%s; this student will not be the best", text)
        return False
    if progress.step > 0 and (progress.best_loss is None or loss < progress.best_loss):
        progress.best_loss, progress.best_step = loss, progress.step
        return True
    return False
