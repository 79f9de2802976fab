"""One optimizer step: the gradients of its micro-batches, their mean over tokens, the clip, and the update.

Losses are sums over tokens divided by a constant, and the gradient is put right once a step by the number of tokens
that were unmasked: the step is then the mean over all its tokens, however it was cut into micro-batches. Whether loss
and gradient are finite is decided where they lie, and an update that is not to be leaves weights, moments and step
counters as they are, bit by bit. The host reads all numbers of the step in one go when it is over.

Over several ranks gradients are exchanged with the last micro-batch; sums, and whether somebody was asked to stop,
go in one more exchange behind it, so that every number from there on is that of all ranks, and the same on each.

Out of memory in a forward or a backward, once, in the first steps of a process: half the micro-batch is tried. The step
is the same to rounding, since losses are sums over tokens. One process alone does so: of several, those that had enough
memory would wait in an exchange for the one that had not.
"""

import gc
import signal
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING

import torch

from kdtrain import faults
from kdtrain.cache.reader import CachedBatch
from kdtrain.errors import RunError
from kdtrain.objective.loss import LossOutput
from kdtrain.parallel.parallelize import clip_norm_
from kdtrain.ranks import all_reduce_sum, is_main, local, world_size
from kdtrain.training.guards import guarded_step, not_finite
from kdtrain.training.schedule import alpha, learning_rate
from kdtrain.training.signals import StopRequest
from kdtrain.training.state import seed_everything

if TYPE_CHECKING:
    from kdtrain.training.trainer import Trainer

FIRST_STEPS = 10
"""Steps of a process after which memory that was enough is expected to be enough for good."""


def out_of_memory(error: BaseException) -> bool:
    """Whether an error says that there is no memory; torch has no kind of its own for a CPU's."""
    return isinstance(error, torch.OutOfMemoryError | MemoryError) or "can't allocate memory" in str(error)


def halve_micro_batch(trainer: "Trainer") -> None:
    """After a forward or backward without memory: drop its gradients, and take half as many sequences from now on.

    Raises:
        RunError: it was done before, the first steps are over, the micro-batch is odd, or there are several processes.
    """
    number, micro = trainer.state.progress.step + 1, trainer.micro
    text = f"out of memory in step {number} with micro-batches of {micro} sequences"
    if number > trainer.halves_until or micro % 2 or world_size() > 1:
        raise RunError(f"{text}; lower --micro-batch-size, or add --activation-checkpointing", reason="oom")
    trainer.halves_until, trainer.micro = 0, micro // 2
    trainer.state.optimizer.zero_grad(set_to_none=True)
    gc.collect()
    if trainer.student.device.type == "cuda":
        torch.cuda.empty_cache()
    text += f": continuing with {trainer.micro}, as --micro-batch-size {trainer.micro} does from the start"
    trainer.writers.warning("memory", number - 1, text, micro_batch_size=trainer.micro)


_SIGNALS = (signal.SIGINT, signal.SIGTERM)


def take_step(trainer: "Trainer", batches: Iterator[CachedBatch], stop: StopRequest) -> dict[str, float] | None:
    """Take the next step and return its numbers, means over its tokens; None when a stop was requested in between, or
    where it did not fit into memory and is to be tried again from `trainer.feed`.

    `skipped` is 1 where nothing was updated, because the loss or a gradient is not finite on one of the ranks, else 0.
    """
    state, number = trainer.state, trainer.state.progress.step + 1
    if trainer.hooks is not None:
        trainer.hooks.take()  # what a validation left
    rate = _prepare(trainer, number)
    trainer.waited = 0.0
    own, fits = None, True
    try:
        own = accumulate(trainer, batches, stop)
    except (RuntimeError, MemoryError) as error:
        if not out_of_memory(error):
            raise
        fits = False
    if not fits:  # behind the block, in which the error still holds the tensors
        halve_micro_batch(trainer)
    if own is None:
        return None
    temperature = trainer.student.temperature.value().detach().clone()
    loss, sums, asked, clock = _over_ranks(trainer, own, temperature, stop)
    _add_up(_uncounted(trainer))
    trainer.reporter.backward(number)
    norm = _clip(trainer, sums.tokens)
    trainer.reporter.gradients(number)
    pull = trainer.student.temperature.log_gradient()
    skipped = not_finite(loss, norm, *_uncounted(trainer))
    guarded_step(state.optimizer, skipped)
    state.optimizer.zero_grad(set_to_none=True)
    faults.point("train.after-step")
    numbers = _numbers(trainer, sums, loss, norm, temperature, skipped, asked, clock, rate) | _of_formats(trainer)
    numbers["data_wait_s"] = trainer.waited
    if trainer.guards.scale.enabled:
        numbers["loss_scale"] = trainer.guards.scale.value
    stop.settle(int(numbers.pop("asked")))
    return numbers if pull is None else numbers | {"dL/dlogT": float(pull)}


def settle_buckets(trainer: "Trainer") -> None:
    """One micro-batch through DDP before the first step, whose gradients are dropped.

    DDP orders its buckets by how gradients arrive the first time. They are then summed over ranks in an order of their
    own, which a resumed run would meet one step later than an uninterrupted one.
    """
    if trainer.engine.kind != "ddp":
        return
    batch = trainer.train_source.read(trainer.share(trainer.state.progress.sequences)[: trainer.micro])
    trainer.student.train()
    for _ in range(2):  # buckets are put in order at the beginning of the second forward
        with trainer.engine.micro_batch(last=True):
            trainer.engine(batch, trainer.full_tokens).loss.backward()
    trainer.state.optimizer.zero_grad(set_to_none=True)


def accumulate(trainer: "Trainer", batches: Iterator[CachedBatch], stop: StopRequest) -> LossOutput | None:
    """Add up the gradients of a step, those of all ranks; None when a stop was requested in between."""
    sums: LossOutput | None = None
    for number in range(1, trainer.micros + 1):
        # before its forward: a rank without a batch could not take part in what the others exchange
        batch = stop.read(lambda: _next(trainer, batches))
        if batch is None:
            return None
        if sums is None:
            _look_at(trainer, batch, trainer.state.progress.step + 1)
        last = number == trainer.micros
        with trainer.engine.micro_batch(last):
            # the scale goes into the normalizer: the engine makes gradients in its forward, and those would lack it
            output: LossOutput = trainer.engine(batch, trainer.full_tokens / trainer.guards.scale.value)
            faults.changed("train.loss", output.loss, trainer.batch_number).backward()
        output = LossOutput(*(each.detach() for each in output))
        sums = output if sums is None else LossOutput(*(a + b for a, b in zip(sums, output, strict=True)))
        faults.point("train.after-micro-batch")
        if stop:
            return None
    return sums


def _next(trainer: "Trainer", batches: Iterator[CachedBatch]) -> CachedBatch:
    """The next micro-batch; how long it was waited for is added up."""
    started = time.perf_counter()
    batch = next(batches)
    trainer.waited += time.perf_counter() - started
    return batch


def _over_ranks(
    trainer: "Trainer", own: LossOutput, temperature: torch.Tensor, stop: StopRequest
) -> tuple[torch.Tensor, LossOutput, torch.Tensor, torch.Tensor]:
    """The step's mean loss in fp64, its sums, the signal to stop by (0 for none), and whether the clock of rank 0 asks
    for a checkpoint (1 or 0), over all ranks."""
    named = own._asdict().items()
    parts = {name: faults.changed("train.loss", each, trainer.batch_number) for name, each in named if name != "tokens"}
    own = LossOutput(**parts, tokens=own.tokens)
    total = trainer.student.total(own, temperature)
    clock = total.new_tensor(float(is_main() and trainer.clock_is_due()))
    if world_size() == 1:
        return total / own.tokens.double().clamp(min=1), own, total.new_zeros(()), clock
    asked = [total.new_tensor(float(stop.asked == each)) for each in _SIGNALS]
    vector = all_reduce_sum(torch.stack([total, *(each.double() for each in own), clock, *asked]))
    sums = LossOutput(*vector[1 : 1 + len(own)])
    clock, votes = vector[1 + len(own)], vector[2 + len(own) :]
    signal_number = (votes > 0).double() * votes.new_tensor(_SIGNALS)
    return vector[0] / sums.tokens.clamp(min=1), sums, signal_number.max(), clock


def _add_up(gradients: list[torch.Tensor]) -> None:
    """Sum over ranks the gradients that no wrapper exchanges."""
    if world_size() == 1 or not gradients:
        return
    flat = all_reduce_sum(torch.cat([each.flatten() for each in gradients]))
    for gradient, total in zip(gradients, flat.split([each.numel() for each in gradients]), strict=True):
        gradient.copy_(total.view_as(gradient))


def _look_at(trainer: "Trainer", batch: CachedBatch, number: int) -> None:
    """Collect statistics of tensors, and measure what quantisation costs, where step `number` is to do it."""
    if trainer.collector is not None:

        def run_eagerly() -> None:
            with trainer.student.eager():
                trainer.student(batch, trainer.full_tokens).loss.backward()

        if trainer.collector.collect(number, trainer.student.present_mode, run_eagerly):
            trainer.state.optimizer.zero_grad(set_to_none=True)
            seed_everything(trainer.config.seed, number)
    _probe_gap(trainer, batch, number)


def _probe_gap(trainer: "Trainer", batch: CachedBatch, number: int) -> None:
    """Measure what quantisation costs at step `number` on its first micro-batch, where the controller wants to know.

    Forward only, quantised and high, with the step's random numbers and the graphs that it is trained with; nothing is
    kept but the difference of the losses.
    """
    adaptive = trainer.adaptive
    if adaptive is None:
        return
    adaptive.gap = None
    if not adaptive.controller.wants_gap(number):
        return
    losses = []
    for position in adaptive.positions:
        seed_everything(trainer.config.seed, number)
        with adaptive.switch.at(position):
            sums = trainer.student(batch, trainer.full_tokens)
        total = trainer.student.total(sums, trainer.student.temperature.value().detach())
        both = all_reduce_sum(torch.stack([total, sums.tokens.double()]))
        losses.append(both[0] / both[1].clamp(min=1))
    seed_everything(trainer.config.seed, number)
    adaptive.gap = float(losses[0] - losses[1])


def _prepare(trainer: "Trainer", number: int) -> float:
    """Set random generators, learning rate, temperature and alpha for step `number`; return the rate."""
    seed_everything(trainer.config.seed, number)
    progress = trainer.state.progress
    rate = learning_rate(number, trainer.total, trainer.config.optimizer, progress.decay_from) * progress.lr_factor
    for group in trainer.state.optimizer.param_groups:
        group["lr"] = rate * group["peak"]
    trainer.student.temperature.set_step(number - 1)
    weight = alpha(number, trainer.planned, trainer.config.objective)
    trainer.student.loss.alpha = weight if trainer.has_teacher else 0.0
    trainer.student.train()
    return rate


@torch.no_grad()
def _clip(trainer: "Trainer", tokens: torch.Tensor) -> torch.Tensor:
    """Turn the gradient into the mean over the step's unmasked tokens, clip it, and return its norm before clipping.

    What fp16 scaled the loss by is taken out here.
    The temperature's gradient is scaled but neither clipped nor counted: a learnable T must not slow the student.
    """
    gradients = [local(each.grad) for each in trainer.student.parameters() if each.grad is not None]
    gradients[0].copy_(faults.changed("train.gradient", gradients[0], trainer.batch_number))
    factor = trainer.full_tokens / (trainer.guards.scale.value * tokens.clamp(min=1).to(gradients[0].dtype))
    torch._foreach_mul_(gradients, factor)
    return clip_norm_(list(trainer.student.model.parameters()), trainer.config.optimizer.clip or float("inf"))


def _uncounted(trainer: "Trainer") -> list[torch.Tensor]:
    """The gradients that the norm leaves out."""
    others = [each for each in (trainer.student.temperature, trainer.student.hidden_loss) if each is not None]
    return [each.grad for other in others for each in other.parameters() if each.grad is not None]


def _of_formats(trainer: "Trainer") -> dict[str, float]:
    """What a step that may be quantised says besides: whether it was, and what that cost where it was measured."""
    if trainer.student.quantized is None:
        return {}
    numbers = {"quantized": float(trainer.student.present_mode == trainer.student.quantized)}
    if trainer.adaptive is not None and trainer.adaptive.gap is not None:
        numbers["gap"] = trainer.adaptive.gap
    return numbers


def _numbers(
    trainer: "Trainer",
    sums: LossOutput,
    loss: torch.Tensor,
    norm: torch.Tensor,
    temperature: torch.Tensor,
    skipped: torch.Tensor,
    asked: torch.Tensor,
    clock: torch.Tensor,
    rate: float,
) -> dict[str, float]:
    """The step's numbers as means over its tokens, read from the device in one go; T as the loss saw it."""
    tensors = [loss, sums.ce, sums.kd, sums.kd_at_one, sums.hidden, sums.tokens, norm, temperature]
    read = torch.stack([each.double() for each in (*tensors, skipped, asked, clock)]).tolist()
    mean, ce, kd, kd_at_1, hidden, tokens, grad_norm, value, not_taken, signal_number, by_clock = read
    count = max(tokens, 1.0)
    parts: dict[str, float] = {}
    if trainer.student.loss.alpha:
        parts = {"ce": ce / count, "kd": kd / count, "kd_T1": kd_at_1 / count, "T": value}
        if trainer.config.objective.alpha_schedule != "constant":
            parts["alpha"] = trainer.student.loss.alpha
    if trainer.student.hidden_loss is not None:
        parts |= {"ce": ce / count, "hidden": hidden / count}
    told = {"skipped": not_taken, "asked": signal_number, "clock": by_clock}
    return {"loss": mean, **parts, "lr": rate, "grad_norm": grad_norm, "tokens": tokens, **told}
