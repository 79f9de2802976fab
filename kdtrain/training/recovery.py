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

Adaptive quantisation (`precision.controller`) returns actions. `decide` carries them out between two steps: it switches
the student's layers, takes snapshots, names the checkpoints to publish, and returns a failing run to the newest good
state, or to an ordinary checkpoint where the recovery buffer has none.
"""

import copy
import math
from typing import TYPE_CHECKING

import numpy as np
from einops import rearrange
from safetensors import SafetensorError

from kdtrain import faults
from kdtrain.checkpoint import tiers
from kdtrain.checkpoint.host_copies import host_buffers
from kdtrain.checkpoint.store import Checkpoint
from kdtrain.errors import RunError
from kdtrain.monitor.progress import log
from kdtrain.precision.controller import Adaptive, Forget, Recover, Save, Say, Snapshot, SwitchTo
from kdtrain.ranks import all_gather_object, on_main, raise_on_all_ranks, rank, reported, world_size
from kdtrain.training.nan_hooks import find_first, write_bundle
from kdtrain.training.signals import StopRequest
from kdtrain.training.state import load_saved, seed_everything, snapshot

if TYPE_CHECKING:
    from kdtrain.training.trainer import Trainer


def skip(trainer: "Trainer", numbers: dict[str, float]) -> bool:
    """Count a skipped step, leave out its data, and investigate the first one.

    Returns False for an ordinary overflow in fp16, which only lowers the loss scale.
    """
    progress = trainer.state.progress
    scale = trainer.guards.scale
    if scale.absorbs(math.isfinite(numbers["loss"])):
        progress.sequences += trainer.config.batch_size
        was, warning = scale.value, scale.update(overflowed=True)
        text = f"gradients overflowed in fp16 at step {progress.step + 1}: loss scale {was:g} -> {scale.value:g}"
        log.info(text)
        trainer.writers.event("loss-scale", progress.step, value=scale.value, was=was, message=text)
        if warning is not None:
            trainer.writers.warning("low-loss-scale", progress.step, warning)
        return False
    number, indices = progress.step + 1, trainer.share(progress.sequences)
    where = f"batch {trainer.batch_number} at step {number}"
    progress.skips_in_a_row += 1
    text = f"{where}: loss {numbers['loss']}, gradient norm {numbers['grad_norm']}: skipped"
    trainer.writers.warning("skip", progress.step, text, batch=trainer.batch_number, in_a_row=progress.skips_in_a_row)
    if trainer.hooks is not None or (progress.skips == 0 and trainer.config.guards.nan_hooks == "first"):
        _investigate(trainer, number, indices)
    progress.skips += 1
    progress.sequences += trainer.config.batch_size
    return True


def roll_back_skips(trainer: "Trainer", loss: float) -> bool:
    """After more than `--max-skips` skips in a row, roll back; return whether it did. loss: of the last one, nats.

    Raises:
        RunError: as many steps failed again after the rollback, it would exceed `--max-rollbacks`, or there is no
            checkpoint from before the last update.
    """
    progress, guards = trainer.state.progress, trainer.config.guards
    size, limit = trainer.config.batch_size, guards.max_skips
    # the place in the stream of data where the last rollback ended, and where this row of skips began
    rolled_back = progress.skipped_data[-1][1] if progress.skipped_data else 0
    began = progress.sequences - progress.skips_in_a_row * size
    again = rolled_back > began
    failed = (progress.sequences - rolled_back) // size if again else progress.skips_in_a_row
    if failed <= limit:
        return False
    trainer.saver.wait()
    name = on_main(lambda: trainer.store.newest_valid(before=progress.step, planned=True)[0])
    rows = f"{failed} steps in a row" + (", and as many after a rollback" if again else "")
    what = f"{rows}, the last one batch {trainer.batch_number - 1} at step {progress.step + 1}, had a non-finite loss "
    what += f"or gradient (--max-skips {limit})"
    if not again and name is not None and progress.rollbacks < guards.max_rollbacks:
        trainer.writers.warning("non-finite", progress.step, what)
        restore(trainer, _load(trainer, name), "rollback", guards.spike_lr_factor)
        return True
    if not _weights_work(trainer, loss):
        _set_aside_broken(trainer)
    newest = on_main(lambda: trainer.store.newest_valid()[0])
    raise reported(
        RunError(
            f"{what}, after {progress.rollbacks} rollbacks (--max-rollbacks {guards.max_rollbacks}); the newest "
            f"checkpoint is {newest or 'none'}; look at the data (kdtrain verify), or give a lower --lr and another "
            "--out",
            reason="non-finite",
        )
    )


def _load(trainer: "Trainer", name: str) -> Checkpoint:
    with raise_on_all_ranks():
        return load_saved(trainer.store.path(name), trainer.state.like)


def _weights_work(trainer: "Trainer", loss: float) -> bool:
    """Whether the present weights gave a finite validation loss and a training batch a non-finite one: its data then
    is at fault. Where a loss is finite and its gradient is not, the weights may be."""
    progress = trainer.state.progress
    validated = progress.validated_step == progress.step and progress.last_loss is not None
    return validated and not math.isfinite(loss)


def _set_aside_broken(trainer: "Trainer") -> None:
    """Set aside the checkpoints of the present weights, from which no step could be taken, where earlier ones exist.

    The next start would resume from them. Weights to which the run was rolled back have been trained from before.
    """
    progress, store = trainer.state.progress, trainer.store

    def set_aside() -> None:
        names = [f"{kind}_{progress.rollbacks}_iter{progress.step}" for kind in ("rollback", "recovery")]
        rolled_back = any(store.path(name).is_dir() for name in names)
        if not rolled_back and store.newest_valid(before=progress.step)[0]:
            store.set_aside_after(progress.step - 1)

    on_main(set_aside)
    trainer.relink_best()


def _investigate(trainer: "Trainer", number: int, indices: np.ndarray) -> None:
    """Log the first non-finite tensor, found by active hooks or by running the step again; write what reproduces it."""
    batches = [trainer.train_source.read(each) for each in rearrange(indices, "(a m) -> a m", m=trainer.micro)]
    if trainer.hooks is not None:
        how, finding = "hooks", trainer.hooks.take()
    else:
        seed_everything(trainer.config.seed, number)
        how, finding = "run again in eager mode with hooks", find_first(trainer.student, batches, trainer.full_tokens)
    trainer.engine.reshard()
    folder = trainer.config.out / f"non-finite-{trainer.batch_number:08d}"
    findings = all_gather_object(None if finding is None else [finding.when, str(finding)])
    # collectives carry one rank's NaN to all: the rank that saw it first is the one it comes from
    times = [(*each[0],) if each else (math.inf,) for each in findings]
    first = times.index(min(times))
    if rank() == first:
        try:
            write_bundle(folder, trainer.config, indices, batches, finding)
        except (OSError, SafetensorError) as error:
            trainer.writers.warning("bundle", trainer.state.progress.step, f"{folder} could not be written: {error}")
    shown = "every tensor they check is finite" if (found := findings[first]) is None else str(found[1])
    if world_size() > 1:
        shown = f"rank {first}: {shown}"
    text = f"batch {trainer.batch_number} at step {number}, {how}: {shown}; what reproduces it is in {folder}"
    trainer.writers.warning("non-finite", trainer.state.progress.step, text, finding=shown, bundle=folder.name)


def roll_back_spike(trainer: "Trainer", numbers: dict[str, float]) -> bool:
    """Check the numbers of a counted step, and roll back a spike or a divergence; return whether it did.

    Raises:
        RunError: the rollback would exceed `--max-rollbacks`; or the gradients stay huge.
    """
    step = trainer.state.progress.step
    cross_entropy = numbers.get("ce", numbers["loss"])  # without other parts the loss is the cross-entropy
    parts = {name: numbers[name] for name in ("kd_T1", "hidden") if name in numbers} | {"ce": cross_entropy}
    if (first := trainer.guards.spikes.update(step, parts)) is not None:
        _roll_back(trainer, "spike", f"a loss spike since step {first}, confirmed at step {step}", first, first=first)
        return True
    if trainer.guards.divergence.update(cross_entropy):
        roll_back_divergence(trainer, None)
        return True
    if (reason := trainer.guards.explosion.update(step, numbers["grad_norm"])) is not None:
        raise reported(RunError(f"{reason}{_save_exploded(trainer)}", reason="gradient-explosion"))
    return False


def _save_exploded(trainer: "Trainer") -> str:
    """Save the present state to be looked at; return where it is as the end of a line, or nothing if that fails."""
    name = tiers.exploded_name(trainer.state.progress.step)
    try:
        trainer.save(name)
        trainer.saver.wait()
    except RunError as error:
        log.warning("%s", error)
        return ""
    trainer.log_published()
    return f"; the weights are in {trainer.store.path(name)}, from which nothing resumes by itself"


def roll_back_divergence(trainer: "Trainer", validation: float | None) -> None:
    """Roll back to the best state. validation: the diverged loss, nats; None: the training losses diverged.

    Raises:
        RunError: the rollback would exceed `--max-rollbacks`.
    """
    progress, watch = trainer.state.progress, trainer.guards.divergence
    which = "the last training losses are" if validation is None else f"the validation loss {validation:.4f} is"
    limit = f"{watch.limit:.4f}, --max-loss-ratio {watch.factor:g} times the initial loss"
    what = f"diverged at step {progress.step}: {which} above {limit}"
    _roll_back(trainer, "divergence", what, (progress.best_step or 0) + 1)


def _roll_back(trainer: "Trainer", kind: str, what: str, before: int, **fields: int) -> None:
    """Roll back to the newest checkpoint from before step `before`, because of `what`, an event of this kind.

    Raises:
        RunError: the rollback would exceed `--max-rollbacks`, or no such checkpoint is left.
    """
    guards, bad = trainer.config.guards, trainer.state.progress
    trainer.writers.warning(kind, bad.step, what, **fields)
    trainer.saver.wait()
    name = on_main(lambda: trainer.store.newest_valid(before=before, planned=True)[0])
    if name is None or bad.rollbacks >= guards.max_rollbacks:
        raise reported(
            RunError(
                f"{what}, after {bad.rollbacks} rollbacks (--max-rollbacks {guards.max_rollbacks}); the newest "
                f"checkpoint from before it is {name or 'none'}; look at the data, or give a lower --lr and "
                "another --out",
                reason="diverged",
            )
        )
    restore(trainer, _load(trainer, name), "rollback", guards.spike_lr_factor, **fields)


def restore(trainer: "Trainer", to: Checkpoint, kind: str, lr_factor: float = 1.0, **fields: int) -> None:
    """Restore an earlier state of this run, leave out the data since then, and publish the result.

    Args:
        to: a checkpoint, or a snapshot in memory.
        kind: `rollback` or `recovery`: the name of the event and of the published checkpoint.
        lr_factor: a factor of the learning rate from now on.
        fields: further fields of the event.

    Raises:
        RunError: it would exceed `--max-rollbacks`.
    """
    bad = trainer.state.progress
    if bad.rollbacks >= trainer.config.guards.max_rollbacks:
        if bad.best_step != bad.step:
            _set_aside_broken(trainer)
        raise reported(
            RunError(
                f"rolling back to {to.name} would exceed --max-rollbacks {trainer.config.guards.max_rollbacks}; "
                "look at the data, or lower --lr and name another --out",
                reason="diverged",
            )
        )
    on_main(lambda: trainer.store.set_aside_after(to.state["progress"]["step"]))
    faults.point("train.rollback")
    trainer.copies.wait()  # a snapshot may still be on its way
    trainer.state.load(to.tensors, to.state, memory=kind == "rollback")
    progress = trainer.state.progress
    progress.rollbacks = bad.rollbacks + 1
    progress.lr_factor = bad.lr_factor * lr_factor
    progress.skipped_data = [*bad.skipped_data, [progress.sequences, bad.sequences]]
    progress.skips, progress.skips_in_a_row = bad.skips, bad.skips_in_a_row
    progress.stopped = None
    progress.sequences = bad.sequences
    trainer.guards.spikes.reset()
    trainer.guards.divergence.reset()
    trainer.relink_best()
    trainer.writers.rewind(progress.step)
    if trainer.collector is not None:
        trainer.collector.forget_after(progress.step)
    trainer.save(f"{kind}_{progress.rollbacks}_iter{progress.step}")
    skipped = progress.skipped_data[-1]
    text = f"rolled back to {to.name}; sequences {skipped[0]} to {skipped[1]} of the stream are left out, "
    text += f"the learning rate is now {progress.lr_factor:g} of the planned one"
    trainer.writers.warning(kind, progress.step, text, skipped=skipped, lr_factor=progress.lr_factor, **fields)


def warm_up(trainer: "Trainer", stop: StopRequest) -> None:
    """Compile the graph of each mode before the first step, so that no switch waits for the compiler."""
    adaptive = trainer.adaptive
    if adaptive is None or not trainer.student.compile_objective:
        return
    batch = trainer.train_source.read(trainer.share(trainer.state.progress.sequences)[: trainer.micro])
    for position in adaptive.positions:
        if stop.agree():
            break
        trainer.student.train()
        # through the wrapper, as in a step: FSDP2 gathers the weights that a graph is compiled for
        with adaptive.switch.at(position), trainer.engine.micro_batch(last=trainer.engine.kind != "ddp"):
            trainer.engine(batch, trainer.full_tokens).loss.backward()
        # before the next graph: a CUDA graph may overwrite the gradients of another (--compile-mode reduce-overhead)
        trainer.state.optimizer.zero_grad(set_to_none=True)


def decide(trainer: "Trainer", step: int, loss: float, broken: str | None = None) -> tuple[list[str], bool]:
    """Carry out the controller's actions after step `step`, taken or skipped.

    Returns the names under which the present state is to be saved, and whether the run was rolled back.

    broken: what was non-finite in a skipped step; `loss` is then its value.
    """
    adaptive = trainer.adaptive
    names: list[str] = []
    recovered = False
    for action in () if adaptive is None else adaptive.controller.observe(step, loss, adaptive.gap, broken):
        assert adaptive is not None
        if isinstance(action, Say):
            log.info(action.line)
        elif isinstance(action, Save):
            names.append(action.name)
        elif isinstance(action, Snapshot):
            snapshots = trainer.state.snapshots
            while len(snapshots) >= action.keep:
                snapshots.popleft()
            tensors = trainer.state.own_tensors()
            try:
                tensors = trainer.copies.copy(tensors, host_buffers(tensors))
            except MemoryError as error:
                raise RunError(f"no snapshot after step {step}: {error}; use --quant-snapshot disk") from None
            snapshots.append(snapshot(tensors, copy.deepcopy(trainer.state.own_numbers())))
        elif isinstance(action, Forget):
            trainer.state.snapshots.clear()
        elif isinstance(action, SwitchTo):
            adaptive.switch_to(action.mode)
            trainer.writers.event("switch", trainer.state.progress.step, mode=action.mode, tried=step)
        elif isinstance(action, Recover):
            recovered = load_recovery_checkpoint(trainer, adaptive) or recovered
    return names, recovered


def load_recovery_checkpoint(trainer: "Trainer", adaptive: Adaptive) -> bool:
    """Restore the newest good state of the recovery buffer, in memory or on disk; False where nothing can be restored.

    The restored state leaves the buffer, so that a run that fails again returns to an older one. Where none is left,
    the newest ordinary checkpoint from before the last update takes its place, at a lower rate, as in a rollback.

    Raises:
        RunError: it would exceed `--max-rollbacks`.
    """
    trainer.saver.wait()
    controller, progress = adaptive.controller, trainer.state.progress
    names = controller.recovery_names()
    name = on_main(lambda: next((each for each in names if trainer.store.problem(each) is None), None))
    good = None if name is None else _load(trainer, name)
    snapshots = trainer.state.snapshots
    while snapshots and not controller.evaluated(snapshots[-1].state["progress"]["step"]):
        snapshots.pop()
    if snapshots and (good is None or snapshots[-1].state["progress"]["step"] >= good.state["progress"]["step"]):
        good = snapshots.pop()
    factor = 1.0
    if good is None:
        name = on_main(lambda: trainer.store.newest_valid(before=progress.step, planned=True)[0])
        if name is None:
            text = "[AdaptiveQuantization] no good state is left to restore"
            trainer.writers.warning("no-recovery", progress.step, text)
            return False
        good, factor = _load(trainer, name), trainer.config.guards.spike_lr_factor
    controller.spend(good.name)
    restore(trainer, good, "recovery", factor)
    return True
