"""Recovery: skips and rollbacks after a failed step, and the actions of adaptive quantisation.

A non-finite step is skipped. It changes no weight, no moment and no counter but that of skips; its data is left out,
and the next step has the same number. The first skip is investigated: its micro-batches run again, in eager mode, with
hooks that name the first non-finite module and tensor. With `--nan-hooks always` every skip is. More than `--max-skips`
skips in a row may mean that the last update broke the weights, which nothing shows before the next step: the run is
rolled back once to the newest checkpoint from before that update, and ends if no step succeeds from there either.

A spike or a divergence is rolled back. A rollback loads the newest checkpoint from before the spike, leaves out the
data since then, multiplies the learning rate, and publishes the result, so that a run that dies next resumes after the
rollback. Dying in the middle is harmless: later checkpoints are set aside first, and a run that resumes from the older
one meets the same spike and rolls back again.

Adaptive quantisation (`precision.controller`) returns actions. `act` carries them out between two steps: it switches
the student's layers, takes snapshots, names the checkpoints to publish, and returns a failing run to the newest good
state, or to an ordinary checkpoint where the recovery buffer has none.
"""

import copy
import math
from enum import Enum
from typing import TYPE_CHECKING

from safetensors import SafetensorError

from kdtrain import faults
from kdtrain.checkpoint import tiers
from kdtrain.checkpoint.saver import host_buffers
from kdtrain.checkpoint.store import Checkpoint
from kdtrain.config.commands import DistillConfig
from kdtrain.errors import RunError, log
from kdtrain.ranks import all_gather_object, on_main, rank, reported, world_size
from kdtrain.training.checkpoints import Checkpoints
from kdtrain.training.reporter import Reporter
from kdtrain.training.state import TrainState, snapshot
from kdtrain.training.step import Status, Stepper, StepResult

if TYPE_CHECKING:
    from kdtrain.precision.controller import Adaptive
    from kdtrain.training.nan_hooks import NanHooks


class Next(Enum):
    """The next action of a run."""

    CONTINUE = "continue"
    READ_AGAIN = "read again"
    """From the state's cursor."""
    STOP = "stop"


class Recovery:
    """Decides what follows a step and a validation, and takes a failing run back to an earlier state.

    Args:
        config: every option.
        state: what is restored.
        stepper: takes the steps.
        checkpoints: where the run goes back to.
        reporter: where events go.
    """

    def __init__(
        self, config: DistillConfig, state: TrainState, stepper: Stepper, checkpoints: Checkpoints, reporter: Reporter
    ) -> None:
        self.config, self.state, self.stepper = config, state, stepper
        self.checkpoints, self.reporter = checkpoints, reporter
        self.empty = 0  # steps in a row of which no token counts
        self.hooks: NanHooks | None = None
        if config.guards.nan_hooks == "always":
            from kdtrain.training import nan_hooks

            self.hooks = nan_hooks.NanHooks(stepper.student)
            stepper.observers.append(self.hooks)

    def after_step(self, result: StepResult) -> Next:
        """Recover from a step that was not taken, or whose numbers show a spike or a divergence.

        Raises:
            RunError: the run cannot recover, see `_skip_or_roll_back` and `_roll_back`; or the gradients stay huge.
        """
        if result.status is Status.INTERRUPTED:
            return Next.STOP
        if result.status is Status.OUT_OF_MEMORY:
            micro = self.stepper.micro
            self.reporter.writers.warning("memory", self.state.progress.step, result.message, micro_batch_size=micro)
            return Next.READ_AGAIN
        self.empty = 0 if result.tokens else self.empty + 1
        if self.empty:
            return self._skip_empty()
        if result.status is Status.SKIPPED:
            back = not self._absorbed_by_scale(result) and self._skip_or_roll_back(result)
        else:
            back = self._roll_back_spike(result)
        return Next.READ_AGAIN if back else Next.CONTINUE

    def after_divergence(self, validation: float | None) -> Next:
        """Roll back to the best state. validation: the diverged loss, nats; None: the training losses diverged.

        Raises:
            RunError: the rollback would exceed `--max-rollbacks`.
        """
        progress, watch = self.state.progress, self.state.guards.divergence
        which = "the last training losses are" if validation is None else f"the validation loss {validation:.4f} is"
        limit = f"{watch.limit:.4f}, --max-loss-ratio {watch.factor:g} times the initial loss"
        what = f"diverged at step {progress.step}: {which} above {limit}"
        self._roll_back("divergence", what, (progress.best_step or 0) + 1)
        return Next.READ_AGAIN

    def act(self, step: int, loss: float, broken: str | None = None) -> tuple[list[str], bool]:
        """Carry out the controller's actions after step `step`, taken or skipped.

        Returns the names under which the present state is to be saved, and whether the run was rolled back, which
        happens after a skipped step only.

        broken: what was non-finite in a skipped step; `loss` is then its value.
        """
        adaptive = self.state.adaptive
        names = list[str]()
        recovered = False
        if adaptive is None:
            return names, recovered
        from kdtrain.precision import controller as actions

        for action in adaptive.observe(step, loss, adaptive.gap, broken):
            if isinstance(action, actions.LogLine):
                log.info(action.line)
            elif isinstance(action, actions.Save):
                names.append(action.name)
            elif isinstance(action, actions.Snapshot):
                self._take_snapshot(step, action.keep)
            elif isinstance(action, actions.DropSnapshots):
                self.state.snapshots.clear()
            elif isinstance(action, actions.SwitchTo):
                adaptive.switch_to(action.mode)
                self.reporter.writers.event("switch", self.state.progress.step, mode=action.mode, tried=step)
            elif isinstance(action, actions.Recover):
                recovered = self._restore_good_state(adaptive) or recovered
        return names, recovered

    def restore(self, to: Checkpoint, kind: str, lr_factor: float = 1.0, **fields: int) -> None:
        """Restore an earlier state of this run, leave out the data since then, and publish the result.

        Args:
            to: a checkpoint, or a snapshot in memory.
            kind: `rollback` or `recovery`: the name of the event and of the published checkpoint.
            lr_factor: a factor of the learning rate from now on.
            fields: further fields of the event.

        Raises:
            RunError: it would exceed `--max-rollbacks`.
        """
        bad, guards, checkpoints = self.state.progress, self.state.guards, self.checkpoints
        if bad.rollbacks >= self.config.guards.max_rollbacks:
            if bad.best_step != bad.step:
                self._set_aside_broken()
            raise reported(
                RunError(
                    f"rolling back to {to.name} would exceed --max-rollbacks {self.config.guards.max_rollbacks}; "
                    "look at the data, or lower --lr and name another --out",
                    reason="diverged",
                )
            )
        on_main(lambda: checkpoints.store.set_aside_after(to.state["progress"]["step"]))
        faults.point("train.rollback")
        checkpoints.copies.wait()  # a snapshot may still be on its way
        self.state.load(to.tensors, to.state, memory=kind == "rollback")
        progress = self.state.progress
        progress.rollbacks = bad.rollbacks + 1
        progress.lr_factor = bad.lr_factor * lr_factor
        progress.skipped_data = [*bad.skipped_data, [progress.sequences, bad.sequences]]
        progress.skips, progress.skips_in_a_row = bad.skips, bad.skips_in_a_row
        progress.stopped = None
        progress.sequences = bad.sequences
        guards.spikes.reset()
        guards.divergence.reset()
        checkpoints.relink_best()
        self.reporter.rewind(progress.step)
        self.stepper.rewound(progress.step)
        checkpoints.save(f"{kind}_{progress.rollbacks}_iter{progress.step}")
        skipped = progress.skipped_data[-1]
        text = f"rolled back to {to.name}; sequences {skipped[0]} to {skipped[1]} of the stream are left out, "
        text += f"the learning rate is now {progress.lr_factor:g} of the planned one"
        details = {"skipped": skipped, "lr_factor": progress.lr_factor, **fields}
        self.reporter.writers.warning(kind, progress.step, text, **details)

    def _skip_empty(self) -> Next:
        """Leave out data of which no token counts. RunError: so have all for an epoch."""
        progress = self.state.progress
        batch = self.stepper.batch_number
        left_out = self.empty * self.config.batch_size
        text = f"batch {batch} at step {progress.step + 1}: no token counts: skipped"
        self.reporter.writers.event("skip", progress.step, batch=batch, message=text)
        progress.sequences += self.config.batch_size
        if left_out >= len(self.stepper.source):
            raise reported(RunError(f"no token of {left_out} sequences in a row counts; take other data"))
        return Next.CONTINUE

    def _absorbed_by_scale(self, result: StepResult) -> bool:
        """Lower the loss scale of fp16 after an ordinary overflow; False where the step failed for another reason."""
        progress, scale = self.state.progress, self.state.guards.scale
        if not scale.absorbs(math.isfinite(result.loss)):
            return False
        progress.sequences += self.config.batch_size
        was = scale.value
        warning = scale.update(overflowed=True)
        text = f"gradients overflowed in fp16 at step {progress.step + 1}: loss scale {was:g} -> {scale.value:g}"
        log.info(text)
        self.reporter.writers.event("loss-scale", progress.step, value=scale.value, was=was, message=text)
        if warning is not None:
            self.reporter.writers.warning("low-loss-scale", progress.step, warning)
        return True

    def _skip_or_roll_back(self, result: StepResult) -> bool:
        """Count a non-finite step, leave out its data, and investigate the first one; roll back where the controller or
        `--max-skips` asks for it, and return whether that happened."""
        progress = self.state.progress
        batch = self.stepper.batch_number
        finite = math.isfinite(result.loss)
        progress.skips_in_a_row += 1
        text = (
            f"batch {batch} at step {progress.step + 1}: loss {result.loss}, gradient norm {result.grad_norm}: skipped"
        )
        self.reporter.writers.warning("skip", progress.step, text, batch=batch, in_a_row=progress.skips_in_a_row)
        if self.hooks is not None or (progress.skips == 0 and self.config.guards.nan_hooks == "first"):
            self._investigate(batch, progress.step + 1)
        progress.skips += 1
        progress.sequences += self.config.batch_size
        what, value = ("Gradient norm", result.grad_norm) if finite else ("Loss", result.loss)
        names, recovered = self.act(progress.step + 1, value, what)
        if names:  # a switch of the format, which the next step tries first
            self.checkpoints.save(*names)
            return recovered
        return recovered or self._roll_back_skips(result.loss)

    def _investigate(self, batch: int, number: int) -> None:
        """Log the first non-finite tensor, found by active hooks or by running the step again; write what reproduces
        it."""
        from kdtrain.training.nan_hooks import find_first, write_bundle

        stepper, config, writers = self.stepper, self.config, self.reporter.writers
        batches = stepper.batches()
        indices = stepper.share(self.state.progress.sequences)
        if self.hooks is not None:
            how = "hooks"
            finding = self.hooks.take()
        else:
            stepper.seed(number)
            how = "run again in eager mode with hooks"
            finding = find_first(stepper.student, batches, stepper.full_tokens)
        stepper.wrapper.reshard()
        folder = config.out / f"non-finite-{batch:08d}"
        findings = all_gather_object(None if finding is None else [finding.when, str(finding)])
        # collectives carry one rank's NaN to all: the rank that saw it first is the one it comes from
        times = [(*each[0],) if each else (math.inf,) for each in findings]
        first = times.index(min(times))
        if rank() == first:
            try:
                write_bundle(folder, config, indices, batches, finding)
            except (OSError, SafetensorError) as error:
                writers.warning("bundle", self.state.progress.step, f"{folder} could not be written: {error}")
        shown = "every tensor they check is finite" if (found := findings[first]) is None else str(found[1])
        if world_size() > 1:
            shown = f"rank {first}: {shown}"
        text = f"batch {batch} at step {number}, {how}: {shown}; what reproduces it is in {folder}"
        writers.warning("non-finite", self.state.progress.step, text, finding=shown, bundle=folder.name)

    def _roll_back_skips(self, loss: float) -> bool:
        """Roll back after more than `--max-skips` skips in a row; return whether it did. loss: of the last one, nats.

        Raises:
            RunError: as many steps failed again after the rollback, it would exceed `--max-rollbacks`, or there is no
                checkpoint from before the last update.
        """
        progress, guards = self.state.progress, self.config.guards
        size = self.config.batch_size
        limit = guards.max_skips
        # the place in the stream of data where the last rollback ended, and where this row of skips began
        rolled_back = progress.skipped_data[-1][1] if progress.skipped_data else 0
        began = progress.sequences - progress.skips_in_a_row * size
        again = rolled_back > began
        failed = (progress.sequences - rolled_back) // size if again else progress.skips_in_a_row
        if failed <= limit:
            return False
        name = self.checkpoints.newest_before(progress.step)
        rows = f"{failed} steps in a row" + (", and as many after a rollback" if again else "")
        what = f"{rows}, the last one batch {self.stepper.batch_number - 1} at step {progress.step + 1}, had a "
        what += f"non-finite loss or gradient (--max-skips {limit})"
        if not again and name is not None and progress.rollbacks < guards.max_rollbacks:
            self.reporter.writers.warning("non-finite", progress.step, what)
            self.restore(self.checkpoints.load(name), "rollback", guards.spike_lr_factor)
            return True
        validated = progress.validated_step == progress.step and progress.last_loss is not None
        # these weights work where they gave a finite validation loss and a training batch a non-finite one: its data
        # is at fault; where a loss is finite and its gradient is not, the weights may be
        if not validated or math.isfinite(loss):
            self._set_aside_broken()
        newest = on_main(lambda: self.checkpoints.store.newest_valid()[0])
        raise reported(
            RunError(
                f"{what}, after {progress.rollbacks} rollbacks (--max-rollbacks {guards.max_rollbacks}); the newest "
                f"checkpoint is {newest or 'none'}; look at the data (kdtrain verify), or give a lower --lr and "
                "another --out",
                reason="non-finite",
            )
        )

    def _set_aside_broken(self) -> None:
        """Set aside the checkpoints of the present weights, which allowed no step, if there are earlier checkpoints.

        The next start would resume from them. Weights to which the run was rolled back have been trained from before.
        """
        progress, store = self.state.progress, self.checkpoints.store

        def set_aside() -> None:
            names = [f"{kind}_{progress.rollbacks}_iter{progress.step}" for kind in ("rollback", "recovery")]
            rolled_back = any(store.path(name).is_dir() for name in names)
            if not rolled_back and store.newest_valid(before=progress.step)[0]:
                store.set_aside_after(progress.step - 1)

        on_main(set_aside)
        self.checkpoints.relink_best()

    def _roll_back_spike(self, result: StepResult) -> bool:
        """Check the numbers of a step that was taken, and roll back a spike or a divergence; return whether it did."""
        step = self.state.progress.step
        guards = self.state.guards
        metrics = result.metrics
        cross_entropy = metrics.get("ce", result.loss)  # without other parts the loss is the cross-entropy
        parts = {name: metrics[name] for name in ("kd_T1", "hidden") if name in metrics} | {"ce": cross_entropy}
        if (first := guards.spikes.update(step, parts, metrics.get("alpha"))) is not None:
            self._roll_back("spike", f"a loss spike since step {first}, confirmed at step {step}", first, first=first)
            return True
        if guards.divergence.update(cross_entropy):
            self.after_divergence(None)
            return True
        if (reason := guards.explosion.update(step, result.grad_norm)) is not None:
            raise reported(RunError(f"{reason}{self._save_exploded(step)}", reason="gradient-explosion"))
        return False

    def _save_exploded(self, step: int) -> str:
        """Save the present state to be looked at; return where it is as the end of a line, or nothing if that fails."""
        name = tiers.name_of("exploded", step)
        try:
            self.checkpoints.save(name)
            self.checkpoints.saver.wait()
        except RunError as error:
            log.warning("%s", error)
            return ""
        self.checkpoints.log_published()
        return f"; the weights are in {self.checkpoints.store.path(name)}, from which nothing resumes by itself"

    def _roll_back(self, kind: str, what: str, before: int, **fields: int) -> None:
        """Roll back to the newest checkpoint from before step `before`, because of `what`, an event of this kind.

        Raises:
            RunError: the rollback would exceed `--max-rollbacks`, or no such checkpoint is left.
        """
        guards, bad = self.config.guards, self.state.progress
        self.reporter.writers.warning(kind, bad.step, what, **fields)
        name = self.checkpoints.newest_before(before)
        if name is None or bad.rollbacks >= guards.max_rollbacks:
            raise reported(
                RunError(
                    f"{what}, after {bad.rollbacks} rollbacks (--max-rollbacks {guards.max_rollbacks}); the newest "
                    f"checkpoint from before it is {name or 'none'}; look at the data, or give a lower --lr and "
                    "another --out",
                    reason="diverged",
                )
            )
        self.restore(self.checkpoints.load(name), "rollback", guards.spike_lr_factor, **fields)

    def _take_snapshot(self, step: int, keep: int) -> None:
        """Copy the state to memory; at most `keep` copies stay."""
        snapshots = self.state.snapshots
        tensors = self.state.own_tensors()
        while len(snapshots) >= keep:
            snapshots.popleft()
        try:
            tensors = self.checkpoints.copies.copy(tensors, host_buffers(tensors))
        except MemoryError as error:
            raise RunError(f"no snapshot after step {step}: {error}; use --quant-snapshot disk") from None
        snapshots.append(snapshot(tensors, copy.deepcopy(self.state.own_numbers())))

    def _restore_good_state(self, adaptive: "Adaptive") -> bool:
        """Restore the newest good state of the recovery buffer, in memory or on disk; False where there is none at all.

        The restored state leaves the buffer, so that a run that fails again returns to an older one. Where none is
        left, the newest ordinary checkpoint from before the last update takes its place, at a lower rate, as in a
        rollback.

        Raises:
            RunError: it would exceed `--max-rollbacks`.
        """
        checkpoints = self.checkpoints
        progress = self.state.progress
        checkpoints.saver.wait()
        names = adaptive.recovery_names()
        snapshots = self.state.snapshots
        name = on_main(lambda: next((each for each in names if checkpoints.store.problem(each) is None), None))
        good = None if name is None else checkpoints.load(name)
        while snapshots and not adaptive.evaluated(snapshots[-1].state["progress"]["step"]):
            snapshots.pop()
        if snapshots and (good is None or snapshots[-1].state["progress"]["step"] >= good.state["progress"]["step"]):
            good = snapshots.pop()
        factor = 1.0
        if good is None:
            name = checkpoints.newest_before(progress.step)
            if name is None:
                text = "[AdaptiveQuantization] no good state is left to restore"
                self.reporter.writers.warning("no-recovery", progress.step, text)
                return False
            good = checkpoints.load(name)
            factor = self.config.guards.spike_lr_factor
        adaptive.spend(good.name)
        self.restore(good, "recovery", factor)
        return True
