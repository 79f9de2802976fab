"""When a run is saved, under which names, and what the newest checkpoint before a step is.

A state is written once: a rolling checkpoint every `--checkpoint-freq` steps, at the last step, and where validation
was best; one at the end of each epoch; a special one where something happened (a stop, a rollback, a switch); one by
the clock where `--checkpoint-minutes` have passed without any. Where a rolling one and an epoch's fall together, the
second is a further name of the first.
"""

import time

from kdtrain.checkpoint import tiers
from kdtrain.monitor.progress import log
from kdtrain.ranks import is_main, on_main
from kdtrain.training.run import Run


def ends_epoch(run: Run) -> bool:
    """Whether the last finished step was the first to reach the end of an epoch; the state then knows it.

    Asked before anything else saves the step: a run that goes on from there must not take a later one for it.
    """
    progress = run.state.progress
    epoch = progress.sequences // len(run.train_source)
    ended, progress.epoch = epoch > progress.epoch, max(epoch, progress.epoch)
    return ended


def clock_is_due(run: Run) -> bool:
    """Whether this process has not saved for `--checkpoint-minutes`; rank 0's word is what counts."""
    minutes = run.config.checkpoint.checkpoint_minutes
    return minutes > 0 and time.monotonic() - run.saved_at >= 60 * minutes


def save_if_due(run: Run, *, improved: bool, ends_epoch: bool, by_clock: bool = False) -> None:
    """Save the last finished step where its number, its place in the epoch or its validation asks for it.

    by_clock: whether the clock asks for it, which counts where nothing else does.
    """
    progress = run.state.progress
    due = progress.step % run.config.checkpoint.checkpoint_freq == 0 or run.finished()
    names = [tiers.rolling_name(progress.step)] if due or improved else []
    if ends_epoch:
        names.append(tiers.epoch_name(progress.epoch))
    if by_clock and not names and not is_saved(run):
        names = [tiers.clock_name(progress.step)]
        run.reporter.memory.settles.add(progress.step + 1)  # a first save's buffers are not a leak
    if names:
        save(run, *names)


def save(run: Run, *names: str) -> None:
    """Publish the state of the last finished step as `names`.

    Raises:
        RunError: it, or the one before it, could not be written.
    """
    progress = run.state.progress
    best = None if progress.best_step is None else _best(run, names)
    run.saver.save(
        names,
        progress.step,
        run.state.tensors(),
        {**run.identity, **run.state.numbers()},
        rollbacks=progress.rollbacks,
        best=best,
        protected=[*_rollback_target(run, names), *_recovery_buffer(run)] if is_main() else [],
    )
    run.published = (progress.step, progress.validated_step)
    run.saved_at = time.monotonic()
    log_published(run)


def log_published(run: Run) -> None:
    """Write an event for each checkpoint that was published since, and a line for those of adaptive quantisation.

    One that a kill prevented has none.

    In the thread that trains, as all events: those of a run stand in the order in which it learned of them.
    """
    for text in run.saver.warnings():
        run.writers.event("disk-full", run.state.progress.step, "warning", message=text)
    for each in run.saver.published():
        for name in each.names:
            run.writers.event("checkpoint", each.step, name=name, stood_still=each.stood_still)
            if name.startswith(("window_", "switch_to_")):
                log.info("[AdaptiveQuantization] Checkpoint saved: %s", name)


def is_saved(run: Run) -> bool:
    """Whether the newest checkpoint already holds the last finished step and its validation."""
    return run.published == (run.state.progress.step, run.state.progress.validated_step)


def _best(run: Run, names: tuple[str, ...]) -> str | None:
    """The name `best` is to point at: one of `names` where this step is the best one."""
    return names[0] if run.state.progress.best_step == run.state.progress.step else None


def _rollback_target(run: Run, names: tuple[str, ...]) -> list[str]:
    """What must outlive this save: the newest checkpoint a rollback may go back to, if it is not this one.

    That is one from before a spike that is not confirmed yet; and never one that an interruption left, so that a run
    that was interrupted goes back as far as one that was not.
    """
    first = run.spikes.suspicious_since
    if first is not None:
        run.saver.wait()
    elif any(map(tiers.is_planned, names)):
        return []
    found = [each for each in run.store.entries() if each.valid and tiers.is_planned(each.name)]
    return [each.name for each in found if first is None or each.step < first][-1:]


def _recovery_buffer(run: Run) -> list[str]:
    """What adaptive quantisation may go back to; retention removes what once was of these and is not now."""
    return [] if run.adaptive is None else run.adaptive.controller.buffer_names()


def relink_best(run: Run) -> None:
    """Point `best` at the checkpoint the state calls so; where it is not there any more, a validation chooses anew."""
    progress = run.state.progress

    def relink() -> bool:
        rolling = tiers.rolling_name(progress.best_step or 0)
        # a kill may have left the step under another name alone, that of a window say
        others = [entry.name for entry in run.store.entries() if entry.step == progress.best_step]
        for name in sorted(others, key=lambda name: name != rolling):
            if run.store.problem(name) is None:
                run.store.link("best", name)
                return True
        run.store.remove_link("best")
        return False

    if not on_main(relink):
        progress.best_loss = progress.best_step = None
