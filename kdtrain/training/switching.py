"""What adaptive quantisation decides (`precision.controller`), carried out between two steps.

The switch of the student's layers is set, checkpoints are published and snapshots taken, and a run that fails is taken
back to the newest good state.
"""

import copy

from kdtrain.checkpoint.store import Checkpoint
from kdtrain.monitor.progress import log
from kdtrain.parallel.world import on_main, together
from kdtrain.precision.policy import Action, Forget, Recover, Save, Say, Snapshot, SwitchTo
from kdtrain.training.adaptive import Adaptive
from kdtrain.training.recovery import go_back
from kdtrain.training.run import Run
from kdtrain.training.saving import save
from kdtrain.training.snapshots import snapshot
from kdtrain.training.state import load_saved
from kdtrain.training.stopping import StopRequest
from kdtrain.training.update import full_tokens


def warm_up(run: Run, stop: StopRequest) -> None:
    """Compile the graph of each mode before the first step, so that no switch waits for a compiler."""
    adaptive = run.adaptive
    if adaptive is None or not run.step.compile_objective:
        return
    batch = run.train_source.read(run.share(run.state.progress.sequences)[: run.micro])
    for position in adaptive.positions:
        if stop.agree():
            break
        run.step.train()
        # through DDP, as in a step: what is compiled inside it is cut at its buckets
        with adaptive.switch.at(position), run.spread.micro_batch(last=run.spread.kind != "ddp"):
            run.spread(batch, normalizer=full_tokens(run))[0].backward()
    run.state.optimizer.zero_grad(set_to_none=True)


def decide(run: Run, step: int, loss: float, broken: str | None = None) -> bool:
    """Carry out what follows from step `step`, taken or tried; whether the run went back to an earlier state.

    broken: what was non-finite in a step that was not taken; `loss` is then its value.
    """
    adaptive = run.adaptive
    if adaptive is None:
        return False
    went_back = False
    for action in adaptive.controller.observe(step, loss, adaptive.gap, broken):
        went_back = _carry_out(run, adaptive, action, step) or went_back
    return went_back


def _carry_out(run: Run, adaptive: Adaptive, action: Action, step: int) -> bool:
    if isinstance(action, Say):
        log.info(action.line)
    elif isinstance(action, Save):
        save(run, action.name)
    elif isinstance(action, Snapshot):
        _snapshot(run, action)
    elif isinstance(action, Forget):
        run.state.snapshots.clear()
    elif isinstance(action, SwitchTo):
        adaptive.switch_to(action.mode)
        run.writers.event("switch", run.state.progress.step, mode=action.mode, tried=step)
    elif isinstance(action, Recover):
        return load_recovery_checkpoint(run)
    return False


def _snapshot(run: Run, action: Snapshot) -> None:
    """Copy the whole state, onto the device it lies on."""
    kept = run.state.snapshots
    while len(kept) >= action.keep:
        kept.popleft()
    tensors = {name: tensor.detach().clone() for name, tensor in run.state.own_tensors().items()}
    kept.append(snapshot(tensors, copy.deepcopy(run.state.own_numbers())))


def load_recovery_checkpoint(run: Run) -> bool:
    """Go back to the newest good state of the recovery buffer, in memory or on disk; False where none is left.

    A state that was gone back to is out of the buffer, so that a run that fails again goes further back.

    Raises:
        RunError: it would be one more than `--max-rollbacks`.
    """
    adaptive = run.adaptive
    assert adaptive is not None
    run.saver.wait()
    found = _newest_on_disk(run, adaptive)
    kept = run.state.snapshots
    if kept and (found is None or _step(kept[-1]) >= _step(found)):
        found = kept.pop()
    if found is None:
        text = "[AdaptiveQuantization] no good state is left to go back to"
        run.writers.warning("no-recovery", run.state.progress.step, text)
        return False
    adaptive.controller.spend(found.name)
    go_back(run, found, "recovery")
    return True


def _newest_on_disk(run: Run, adaptive: Adaptive) -> Checkpoint | None:
    names = adaptive.controller.recovery_names()
    name = on_main(lambda: next((each for each in names if run.store.problem(each) is None), None))
    if name is None:
        return None
    with together():
        return load_saved(run.store.path(name), run.state.like)


def _step(kept: Checkpoint) -> int:
    return int(kept.state["progress"]["step"])
