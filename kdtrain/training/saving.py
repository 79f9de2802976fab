"""When a run is saved, under which names, and what the newest checkpoint before a step is.

A state is written once: a rolling checkpoint every `--checkpoint-freq` steps, at the last step, and where validation
was best; one at the end of each epoch; a special one where something happened (a stop, a rollback, a switch). Where
a rolling one and an epoch's fall together, the second is a further name of the first.
"""

from kdtrain.checkpoint import tiers
from kdtrain.training.run import Run


def save_if_due(run: Run, *, improved: bool, before: int) -> None:
    """Save the last finished step where its number, its place in the epoch or its validation ask for it.

    Args:
        improved: whether its validation was the best so far.
        before: the cursor before it.
    """
    progress = run.state.progress
    due = progress.step % run.config.checkpoint.checkpoint_freq == 0 or run.finished()
    names = [tiers.rolling_name(progress.step)] if due or improved else []
    epoch = progress.sequences // len(run.train_source)
    if epoch > before // len(run.train_source):
        names.append(tiers.epoch_name(epoch))
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
        protected=_rollback_target(run),
    )
    run.published = (progress.step, progress.validated_step)
    for name in names:
        run.writers.event("checkpoint", progress.step, name=name)


def is_saved(run: Run) -> bool:
    """Whether the newest checkpoint already holds the last finished step and its validation."""
    return run.published == (run.state.progress.step, run.state.progress.validated_step)


def _best(run: Run, names: tuple[str, ...]) -> str | None:
    """The name `best` is to point at: one of `names` where this step is the best one."""
    return names[0] if run.state.progress.best_step == run.state.progress.step else None


def _rollback_target(run: Run) -> list[str]:
    """What must outlive a spike that is not confirmed yet: the newest checkpoint from before it."""
    first = run.spikes.suspicious_since
    if first is None:
        return []
    run.saver.wait()
    name, _ = run.store.newest_valid(before=first)
    return [] if name is None else [name]


def relink_best(run: Run) -> None:
    """Point `best` at the checkpoint the state calls so, where it is whole."""
    name = tiers.rolling_name(run.state.progress.best_step or 0)
    if run.store.problem(name) is None:
        run.store.link("best", name)
