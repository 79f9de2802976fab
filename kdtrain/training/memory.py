"""Out of memory in a forward or a backward: once, in the first steps of a process, half the micro-batch is tried.

The step is the same to rounding, since losses are sums over tokens. One process alone does so: of several, those that
had enough memory would wait in an exchange for the one that had not.
"""

import gc

import torch

from kdtrain.errors import RunError
from kdtrain.parallel.world import world_size
from kdtrain.training.run import Run

FIRST_STEPS = 10
"""Steps of a process after which memory that was enough is expected to be enough for good."""


def out_of_memory(error: BaseException) -> bool:
    """Whether an error says that there is no memory; torch has no kind of its own for a CPU's."""
    return isinstance(error, torch.OutOfMemoryError | MemoryError) or "can't allocate memory" in str(error)


def halve_micro_batch(run: Run) -> None:
    """After a forward or backward without memory: drop its gradients, and take half as many sequences from now on.

    Raises:
        RunError: it was done before, the first steps are over, the micro-batch is odd, or there are several processes.
    """
    number, micro = run.state.progress.step + 1, run.micro
    text = f"out of memory in step {number} with micro-batches of {micro} sequences"
    if number > run.halves_until or micro % 2 or world_size() > 1:
        raise RunError(f"{text}; lower --micro-batch-size, or add --activation-checkpointing", reason="oom")
    run.halves_until, run.micro = 0, micro // 2
    run.state.optimizer.zero_grad(set_to_none=True)
    gc.collect()
    if run.step.device.type == "cuda":
        torch.cuda.empty_cache()
    text += f": continuing with {run.micro}, as --micro-batch-size {run.micro} does from the start"
    run.writers.warning("memory", number - 1, text, micro_batch_size=run.micro)
