"""What is done about a step that went wrong: a non-finite one is skipped, a spike and a divergence are rolled back.

A skipped step has changed no weight, no moment and no counter but its own; its data is passed over, and its number is
that of the next try. The first one is looked into: its micro-batches run again, in eager mode, with hooks that name
the first module and tensor that went bad; where the hooks are always on, they tell it of each.

A rollback loads the newest checkpoint from before the spike, leaves out the data since, multiplies the learning rate,
and publishes the outcome, so that a run that dies next goes on behind the rollback and not before it. Dying in the
middle is harmless: later checkpoints are renamed aside first, and a run that goes on from the older one meets the same
spike and comes back here.

What adaptive quantisation decides (`precision.controller`), carried out between two steps.

The switch of the student's layers is set, checkpoints are published and snapshots taken, and a run that fails is taken
back to the newest good state.
"""

import copy
import math
from typing import TYPE_CHECKING

import numpy as np
from einops import rearrange
from safetensors import SafetensorError

from kdtrain import faults
from kdtrain.checkpoint.store import Checkpoint
from kdtrain.errors import RunError
from kdtrain.monitor.progress import log
from kdtrain.precision.controller import Action, Adaptive, Forget, Recover, Save, Say, Snapshot, SwitchTo
from kdtrain.ranks import all_gather_object, on_main, raise_on_all_ranks, rank, reported, world_size
from kdtrain.training.nan_hooks import find_first, write_bundle
from kdtrain.training.signals import StopRequest
from kdtrain.training.state import load_saved, seed_everything, snapshot

if TYPE_CHECKING:
    from kdtrain.training.trainer import Trainer


def skip(trainer: "Trainer", numbers: dict[str, float]) -> bool:
    """Count a step that was not taken and pass over its data; look into the first one.

    False where nothing failed: in fp16 gradients overflow now and then, until the loss scale is small enough.

    Raises:
        RunError: more than `--max-skips` steps in a row were not finite.
    """
    progress, limit = trainer.state.progress, trainer.config.guards.max_skips
    scale = trainer.guards.scale
    if scale.absorbs(math.isfinite(numbers["loss"])):
        progress.sequences += trainer.config.batch_size
        was, warning = scale.value, scale.update(overflowed=True)
        halved = f"gradients overflowed in fp16 at step {progress.step + 1}: loss scale {was:g} -> {scale.value:g}"
        log.info(halved)
        trainer.writers.event("loss-scale", progress.step, value=scale.value, was=was, message=halved)
        if warning is not None:
            trainer.writers.warning("low-loss-scale", progress.step, warning)
        return False
    number, indices = progress.step + 1, trainer.share(progress.sequences)
    where = f"batch {trainer.batch_number} at step {number}"
    progress.skips_in_a_row += 1
    text = f"{where}: loss {numbers['loss']}, gradient norm {numbers['grad_norm']}: not taken"
    trainer.writers.warning("skip", progress.step, text, batch=trainer.batch_number, in_a_row=progress.skips_in_a_row)
    if trainer.hooks is not None or (progress.skips == 0 and trainer.config.guards.nan_hooks == "first"):
        _look_into(trainer, number, indices)
    progress.skips += 1
    progress.sequences += trainer.config.batch_size
    if progress.skips_in_a_row > limit:
        trainer.saver.wait()
        newest = on_main(lambda: trainer.store.newest_valid()[0])
        raise reported(
            RunError(
                f"{progress.skips_in_a_row} steps in a row, the last one {where}, had no finite loss or gradient "
                f"(--max-skips {limit}); the newest checkpoint is {newest or 'none'}; "
                "look at the data (kdtrain verify) or lower --lr",
                reason="non-finite",
            )
        )
    return True


def _look_into(trainer: "Trainer", number: int, indices: np.ndarray) -> None:
    """Name what went bad first, by hooks that were on or by running the micro-batches again; keep what shows it."""
    batches = [trainer.train_source.read(each) for each in rearrange(indices, "(a m) -> a m", m=trainer.micro)]
    if trainer.hooks is not None:
        how, finding = "hooks", trainer.hooks.take()
    else:
        seed_everything(trainer.config.seed, number)
        how, finding = "run again in eager mode with hooks", find_first(trainer.student, batches, trainer.full_tokens)
    trainer.engine.reshard()
    folder = trainer.config.out / f"not-finite-{trainer.batch_number:08d}"
    found = all_gather_object(None if finding is None else [finding.when, str(finding)])
    # what is exchanged carries one rank's NaN to all: where it was seen first is where it comes from
    times = [(*each[0],) if each else (math.inf,) for each in found]
    first = times.index(min(times))
    if rank() == first:
        try:
            write_bundle(folder, trainer.config, indices, batches, finding)
        except (OSError, SafetensorError) as error:
            trainer.writers.warning("bundle", trainer.state.progress.step, f"{folder} could not be written: {error}")
    said = "every tensor they see is finite" if (text := found[first]) is None else str(text[1])
    if world_size() > 1:
        said = f"rank {first}: {said}"
    named = f"batch {trainer.batch_number} at step {number}, {how}: {said}; what shows it is in {folder}"
    trainer.writers.warning("not-finite", trainer.state.progress.step, named, finding=said, bundle=folder.name)


def rolled_back(trainer: "Trainer", numbers: dict[str, float]) -> bool:
    """Look at the numbers of a step that was taken; whether it made the run go back to an earlier state.

    Raises:
        RunError: it would be one more than `--max-rollbacks`; or the gradients stay huge.
    """
    step = trainer.state.progress.step
    cross_entropy = numbers.get("ce", numbers["loss"])  # the loss itself where there is no other part
    parts = {name: numbers[name] for name in ("kd_T1", "hidden") if name in numbers} | {"ce": cross_entropy}
    if (first := trainer.guards.spikes.update(step, parts)) is not None:
        _roll_back(trainer, "spike", f"a loss spike since step {first}, confirmed at step {step}", first, first=first)
        return True
    if trainer.guards.divergence.update(cross_entropy):
        roll_back_divergence(trainer, None)
        return True
    if (reason := trainer.guards.explosion.update(step, numbers["grad_norm"])) is not None:
        raise reported(RunError(reason, reason="gradient-explosion"))
    return False


def roll_back_divergence(trainer: "Trainer", validation: float | None) -> None:
    """Go back to the best state there is. validation: the loss that shows it, nats; None: those of training do.

    Raises:
        RunError: it would be one more than `--max-rollbacks`.
    """
    progress, watch = trainer.state.progress, trainer.guards.divergence
    which = "the last training losses lie" if validation is None else f"the validation loss {validation:.4f} lies"
    limit = f"{watch.limit:.4f}, --divergence-factor {watch.factor:g} times what the run began with"
    what = f"diverged at step {progress.step}: {which} above {limit}"
    _roll_back(trainer, "divergence", what, (progress.best_step or 0) + 1)


def _roll_back(trainer: "Trainer", kind: str, what: str, before: int, **facts: int) -> None:
    """Go back to the newest checkpoint of a step earlier than `before`, because of `what`, an event of this kind.

    Raises:
        RunError: it would be one more than `--max-rollbacks`, or no such checkpoint is left.
    """
    guards, bad = trainer.config.guards, trainer.state.progress
    trainer.writers.warning(kind, bad.step, what, **facts)
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
    with raise_on_all_ranks():
        checkpoint = load_saved(trainer.store.path(name), trainer.state.like)
    go_back(trainer, checkpoint, "rollback", guards.spike_lr_factor, **facts)


def go_back(trainer: "Trainer", to: Checkpoint, word: str, lr_factor: float = 1.0, **facts: int) -> None:
    """Take over an earlier state of this run, leave out the data since, and publish the outcome.

    Args:
        to: a checkpoint, or a copy in memory.
        word: what the outcome is called.
        lr_factor: what the learning rate is multiplied by from now on.
        facts: what else the event says.

    Raises:
        RunError: it would be one more than `--max-rollbacks`.
    """
    bad = trainer.state.progress
    if bad.rollbacks >= trainer.config.guards.max_rollbacks:
        raise reported(
            RunError(
                f"going back to {to.name} would be one more than --max-rollbacks "
                f"{trainer.config.guards.max_rollbacks}; look at the data, or lower --lr and name another --out",
                reason="diverged",
            )
        )
    on_main(lambda: trainer.store.set_aside_after(to.state["progress"]["step"]))
    faults.point("train.rollback")
    trainer.state.load(to.tensors, to.state, memory=word == "rollback")
    progress = trainer.state.progress
    progress.rollbacks = bad.rollbacks + 1
    progress.lr_factor = bad.lr_factor * lr_factor
    progress.skipped_data = [*bad.skipped_data, [progress.sequences, bad.sequences]]
    progress.skips = bad.skips
    progress.stopped = None
    progress.sequences = bad.sequences
    trainer.guards.spikes.reset()
    trainer.guards.divergence.reset()
    trainer.relink_best()
    trainer.writers.rewind(progress.step)
    if trainer.collector is not None:
        trainer.collector.forget_after(progress.step)
    trainer.save(f"{word}_{progress.rollbacks}_iter{progress.step}")
    skipped = progress.skipped_data[-1]
    text = f"went back to {to.name}; sequences {skipped[0]} to {skipped[1]} of the stream are left out, "
    text += f"the learning rate is now {progress.lr_factor:g} of the planned one"
    trainer.writers.warning(word, progress.step, text, skipped=skipped, lr_factor=progress.lr_factor, **facts)


def warm_up(trainer: "Trainer", stop: StopRequest) -> None:
    """Compile the graph of each mode before the first step, so that no switch waits for a compiler."""
    adaptive = trainer.adaptive
    if adaptive is None or not trainer.student.compile_objective:
        return
    batch = trainer.train_source.read(trainer.share(trainer.state.progress.sequences)[: trainer.micro])
    for position in adaptive.positions:
        if stop.agree():
            break
        trainer.student.train()
        # through DDP, as in a step: what is compiled inside it is cut at its buckets
        with adaptive.switch.at(position), trainer.engine.micro_batch(last=trainer.engine.kind != "ddp"):
            trainer.engine(batch, trainer.full_tokens).loss.backward()
    trainer.state.optimizer.zero_grad(set_to_none=True)


def decide(trainer: "Trainer", step: int, loss: float, broken: str | None = None) -> bool:
    """Carry out what follows from step `step`, taken or tried; whether the run went back to an earlier state.

    broken: what was non-finite in a step that was not taken; `loss` is then its value.
    """
    adaptive = trainer.adaptive
    if adaptive is None:
        return False
    went_back = False
    for action in adaptive.controller.observe(step, loss, adaptive.gap, broken):
        went_back = _carry_out(trainer, adaptive, action, step) or went_back
    return went_back


def _carry_out(trainer: "Trainer", adaptive: Adaptive, action: Action, step: int) -> bool:
    if isinstance(action, Say):
        log.info(action.line)
    elif isinstance(action, Save):
        trainer.save(action.name)
    elif isinstance(action, Snapshot):
        _snapshot(trainer, action)
    elif isinstance(action, Forget):
        trainer.state.snapshots.clear()
    elif isinstance(action, SwitchTo):
        adaptive.switch_to(action.mode)
        trainer.writers.event("switch", trainer.state.progress.step, mode=action.mode, tried=step)
    elif isinstance(action, Recover):
        return load_recovery_checkpoint(trainer)
    return False


def _snapshot(trainer: "Trainer", action: Snapshot) -> None:
    """Copy the whole state, onto the device it lies on."""
    kept = trainer.state.snapshots
    while len(kept) >= action.keep:
        kept.popleft()
    tensors = {name: tensor.detach().clone() for name, tensor in trainer.state.own_tensors().items()}
    kept.append(snapshot(tensors, copy.deepcopy(trainer.state.own_numbers())))


def load_recovery_checkpoint(trainer: "Trainer") -> bool:
    """Go back to the newest good state of the recovery buffer, in memory or on disk; False where none is left.

    A state that was gone back to is out of the buffer, so that a run that fails again goes further back.

    Raises:
        RunError: it would be one more than `--max-rollbacks`.
    """
    adaptive = trainer.adaptive
    assert adaptive is not None
    trainer.saver.wait()
    found = _newest_on_disk(trainer, adaptive)
    kept = trainer.state.snapshots
    if kept and (found is None or _step(kept[-1]) >= _step(found)):
        found = kept.pop()
    if found is None:
        text = "[AdaptiveQuantization] no good state is left to go back to"
        trainer.writers.warning("no-recovery", trainer.state.progress.step, text)
        return False
    adaptive.controller.spend(found.name)
    go_back(trainer, found, "recovery")
    return True


def _newest_on_disk(trainer: "Trainer", adaptive: Adaptive) -> Checkpoint | None:
    names = adaptive.controller.recovery_names()
    name = on_main(lambda: next((each for each in names if trainer.store.problem(each) is None), None))
    if name is None:
        return None
    with raise_on_all_ranks():
        return load_saved(trainer.store.path(name), trainer.state.like)


def _step(kept: Checkpoint) -> int:
    return int(kept.state["progress"]["step"])
