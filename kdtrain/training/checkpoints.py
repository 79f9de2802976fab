"""The checkpoints that one run writes and goes back to."""

import time

from kdtrain.checkpoint import tiers
from kdtrain.checkpoint.saver import HostCopies, Saver
from kdtrain.checkpoint.store import Checkpoint, Store
from kdtrain.config.commands import DistillConfig
from kdtrain.errors import log
from kdtrain.ranks import is_main, on_main, raise_on_all_ranks
from kdtrain.training.reporter import Reporter
from kdtrain.training.state import TrainState, load_saved, packed


class Checkpoints:
    """The publisher of a run's checkpoints, which protects what a rollback needs, and logs what is published.

    Args:
        config: every option.
        state: what is saved.
        reporter: where events go.
        identity: what a checkpoint belongs to (options, cache, student).
    """

    def __init__(
        self, config: DistillConfig, state: TrainState, reporter: Reporter, identity: dict[str, object]
    ) -> None:
        keep = config.checkpoint
        self.minutes = keep.checkpoint_minutes
        self.state, self.reporter, self.identity = state, reporter, identity
        kept = tiers.Keep(keep.keep_rolling, keep.keep_epochs, keep.keep_special)
        self.store = Store(config.out / "checkpoints", kept)
        self.copies = HostCopies()
        self.saver = Saver(self.store, keep.async_save, keep.disk_patience, self.copies)
        self.published: tuple[int, int | None] | None = None
        """The step and the last validated step of the newest checkpoint."""
        self.saved_at = time.monotonic()

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
        """Return whether the newest checkpoint already holds the last finished step and its validation."""
        return self.published == (self.state.progress.step, self.state.progress.validated_step)

    def clock_is_due(self) -> bool:
        """Return whether this process has not saved for `--checkpoint-minutes`; rank 0 decides for all."""
        return self.minutes > 0 and time.monotonic() - self.saved_at >= 60 * self.minutes

    def log_published(self) -> None:
        """Write an event for each newly published checkpoint, and a log line for a checkpoint of adaptive quantisation.

        Runs in the training thread, as all events do, so that they are in order.
        """
        for kind, text in self.saver.warnings():
            self.reporter.writers.event(kind, self.state.progress.step, "warning", message=text)
        for each in self.saver.published():
            for name in each.names:
                self.reporter.writers.event("checkpoint", each.step, name=name, stood_still=each.stood_still)
                if name.startswith(("window_", "switch_to_")):
                    log.info("[AdaptiveQuantization] Checkpoint saved: %s", name)

    def load(self, name: str) -> Checkpoint:
        """Load a checkpoint of this run, on every rank."""
        with raise_on_all_ranks():
            return load_saved(self.store.path(name), self.state.like)

    def newest_before(self, step: int) -> str | None:
        """Return the newest undamaged planned checkpoint from before `step`, once all saves are done; on every rank."""
        self.saver.wait()
        return on_main(lambda: self.store.newest_valid(before=step, planned=True)[0])

    def relink_best(self) -> None:
        """Point `best` at the checkpoint of the best step; if that is gone, forget the best step."""
        progress = self.state.progress

        def relink() -> bool:
            rolling = tiers.name_of("rolling", progress.best_step or 0)
            # after a kill the step may exist under another name only, such as that of a window
            names = [entry.name for entry in self.store.entries() if entry.step == progress.best_step]
            for name in sorted(names, key=lambda name: name != rolling):
                if self.store.problem(name) is None:
                    self.store.link("best", name)
                    return True
            self.store.remove_link("best")
            return False

        if not on_main(relink):
            progress.forget_best()

    def _protected(self, names: tuple[str, ...]) -> list[str]:
        """Return the checkpoints that this save must not prune: the recovery buffer, and a rollback's newest target.

        The target is older than a spike that is not confirmed yet, and not a checkpoint of an interruption, so that an
        interrupted run rolls back as far as an uninterrupted one.
        """
        adaptive = self.state.adaptive
        buffer = [] if adaptive is None else adaptive.buffer_names()
        first = self.state.guards.spikes.suspicious_since
        if first is not None:
            self.saver.wait()
        elif any(map(tiers.is_planned, names)):
            return buffer
        targets = [each for each in self.store.entries() if each.valid and tiers.is_planned(each.name)]
        return [each.name for each in targets if first is None or each.step < first][-1:] + buffer
