"""One optimizer step: the gradients of its micro-batches, their mean over tokens, the clip, and the update.

Each micro-batch divides its sum over tokens by the same constant, and the step rescales the gradient once by the number
of unmasked tokens: the result is the mean over all tokens of the step, for any micro-batch size. The device decides
whether loss and gradient are finite, and a skipped update leaves weights, moments and step counters bitwise unchanged.
The host reads all numbers of the step at once, at its end.

On several ranks the gradients are exchanged with the last micro-batch. One more exchange after it carries the sums and
the stop requests; from there on every number is that of all ranks, and the same on each.

If a forward or a backward runs out of memory in the first steps of a process, the trainer halves the micro-batch, once.
The step is the same to rounding, since losses are sums over tokens. Only a single process does so: of several ranks,
those with enough memory would wait in a collective for the one without.
"""

import gc
import signal
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING

import torch

from kdtrain import faults
from kdtrain.errors import RunError
from kdtrain.objective.batch import Batch
from kdtrain.objective.loss import LossOutput
from kdtrain.parallel.parallelize import clip_factor, clip_norm_, total_norm
from kdtrain.ranks import all_reduce_sum, is_main, local, world_size
from kdtrain.training.guards import guarded_step, non_finite
from kdtrain.training.schedule import alpha, learning_rate
from kdtrain.training.signals import StopRequest
from kdtrain.training.state import seed_everything

if TYPE_CHECKING:
    from kdtrain.training.trainer import Trainer

FIRST_STEPS = 10
"""Steps of a process after which running out of memory is an error."""


def out_of_memory(error: BaseException) -> bool:
    """Whether an error means that memory ran out; on a CPU torch has no error type for it."""
    return isinstance(error, torch.OutOfMemoryError | MemoryError) or "can't allocate memory" in str(error)


def halve_micro_batch(trainer: "Trainer") -> None:
    """After an out-of-memory error: drop the gradients and halve the micro-batch from now on.

    Raises:
        RunError: it was halved before, the first steps are over, its size is odd, there are several processes, or
            `--compile-mode` allows one micro-batch only.
    """
    number, micro = trainer.state.progress.step + 1, trainer.micro
    text = f"out of memory in step {number} with micro-batches of {micro} sequences"
    if trainer.config.precision.compile_mode == "reduce-overhead":
        text += "; --compile-mode reduce-overhead cannot split them: leave it out, or add --activation-checkpointing"
        raise RunError(text, reason="oom")
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


def take_step(trainer: "Trainer", batches: Iterator[Batch], stop: StopRequest) -> dict[str, float] | None:
    """Take the next step and return its numbers, means over its tokens.

    None when a stop request interrupted it, or when it ran out of memory and must be repeated from `trainer.feed`.
    `skipped` is 1 where the loss or a gradient is non-finite on any rank and nothing was updated, else 0.
    """
    state, number = trainer.state, trainer.state.progress.step + 1
    if trainer.hooks is not None:
        trainer.hooks.take()  # drop the findings of a validation
    rate = _prepare(trainer, number)
    trainer.waited = 0.0
    own, fits = None, True
    try:
        own = accumulate(trainer, batches, stop)
    except (RuntimeError, MemoryError) as error:
        if not out_of_memory(error):
            raise
        fits = False
    if not fits:  # after the except block, in which the error still holds the tensors
        halve_micro_batch(trainer)
    if own is None:
        return None
    temperature = trainer.student.temperature.value().detach().clone()
    loss, sums, stop_signal, clock = _all_reduce(trainer, own, temperature, stop)
    _all_reduce_gradients(_unclipped(trainer))
    trainer.reporter.backward(number)
    norm, scale = _clip(trainer, sums.tokens, trainer.reporter.shows_gradients(number))
    trainer.reporter.gradients(number)
    temperature_gradient = trainer.student.temperature.log_gradient()
    skipped = non_finite(loss, norm, *_unclipped(trainer))
    trainer.copies.before_change()
    if scale is not None:
        for gradient in _unclipped(trainer):
            gradient.mul_(scale)  # the optimizer divides all gradients by it, and these are not clipped
    guarded_step(state.optimizer, skipped, scale)
    state.optimizer.zero_grad(set_to_none=True)
    faults.point("train.after-step")
    numbers = _numbers(trainer, sums, loss, norm, temperature, temperature_gradient, skipped, stop_signal, clock, rate)
    numbers["data_wait_s"] = trainer.waited
    if trainer.guards.scale.enabled:
        numbers["loss_scale"] = trainer.guards.scale.value
    stop.settle(int(numbers.pop("stop_signal")))
    return numbers


def settle_buckets(trainer: "Trainer") -> None:
    """Run one micro-batch through DDP before the first step, and drop its gradients.

    DDP orders its buckets by the first arrival of the gradients, and sums them in that order from the next step on. A
    resumed run would reach that order one step later than an uninterrupted one.
    """
    if trainer.engine.kind != "ddp":
        return
    batch = trainer.train_source.read(trainer.share(trainer.state.progress.sequences)[: trainer.micro])
    trainer.student.train()
    for _ in range(2):  # DDP orders its buckets at the beginning of the second forward
        with trainer.engine.micro_batch(last=True):
            trainer.engine(batch, trainer.full_tokens).loss.backward()
    trainer.state.optimizer.zero_grad(set_to_none=True)


def accumulate(trainer: "Trainer", batches: Iterator[Batch], stop: StopRequest) -> LossOutput | None:
    """Accumulate the gradients of a step, over all ranks; None when a stop request interrupts it."""

    def next_batch() -> Batch:
        started = time.perf_counter()
        batch = next(batches)
        trainer.waited += time.perf_counter() - started
        return batch

    sums: LossOutput | None = None
    for number in range(1, trainer.micros + 1):
        # before the forward: a rank without a batch could not take part in the collectives of the others
        batch = stop.read(next_batch)
        if batch is None:
            return None
        if sums is None:
            _measure(trainer, batch, trainer.state.progress.step + 1)
        last = number == trainer.micros
        with trainer.engine.micro_batch(last):
            # the loss scale is part of the normalizer, because the engine computes gradients in its forward
            output: LossOutput = trainer.engine(batch, trainer.full_tokens / trainer.guards.scale.value)
            faults.changed("train.loss", output.loss, trainer.batch_number).backward()
        output = LossOutput(*(each.detach() for each in output))
        sums = output if sums is None else LossOutput(*(a + b for a, b in zip(sums, output, strict=True)))
        faults.point("train.after-micro-batch")
        if stop:
            return None
    return sums


def _all_reduce(
    trainer: "Trainer", own: LossOutput, temperature: torch.Tensor, stop: StopRequest
) -> tuple[torch.Tensor, LossOutput, torch.Tensor, torch.Tensor]:
    """Return over all ranks the mean loss in fp64, the sums, the signal of a stop request (0: none), and whether a
    checkpoint is due by the clock of rank 0 (1 or 0)."""
    named = own._asdict().items()
    parts = {name: faults.changed("train.loss", each, trainer.batch_number) for name, each in named if name != "tokens"}
    own = LossOutput(**parts, tokens=own.tokens)
    total = trainer.student.total(own, temperature)
    # filled on the device: `new_tensor` would copy from the host, which waits for all work in the queue
    clock = total.new_full((), float(is_main() and trainer.clock_is_due()))
    if world_size() == 1:
        return total / own.tokens.double().clamp(min=1), own, total.new_zeros(()), clock
    requests = [total.new_full((), float(stop.received == each)) for each in _SIGNALS]
    vector = all_reduce_sum(torch.stack([total, *(each.double() for each in own), clock, *requests]))
    sums = LossOutput(*vector[1 : 1 + len(own)])
    clock, votes = vector[1 + len(own)], vector[2 + len(own) :]
    numbers = [(vote > 0).double() * float(each) for vote, each in zip(votes, _SIGNALS, strict=True)]
    return vector[0] / sums.tokens.clamp(min=1), sums, torch.stack(numbers).max(), clock


def _all_reduce_gradients(gradients: list[torch.Tensor]) -> None:
    """Sum over ranks the gradients that no wrapper exchanges."""
    if world_size() == 1 or not gradients:
        return
    flat = all_reduce_sum(torch.cat([each.flatten() for each in gradients]))
    for gradient, total in zip(gradients, flat.split([each.numel() for each in gradients]), strict=True):
        gradient.copy_(total.view_as(gradient))


def _measure(trainer: "Trainer", batch: Batch, number: int) -> None:
    """Collect tensor statistics and the quantisation gap on the first micro-batch of step `number`, where due.

    The gap is the difference of the losses of two forwards, quantised and high, with the step's random numbers and the
    compiled graphs of training.
    """
    if trainer.collector is not None:

        def run_eagerly() -> None:
            with trainer.student.eager():
                trainer.student(batch, trainer.full_tokens).loss.backward()

        if trainer.collector.collect(number, trainer.student.present_mode, run_eagerly):
            trainer.state.optimizer.zero_grad(set_to_none=True)
            seed_everything(trainer.config.seed, number)
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
        loss, tokens = all_reduce_sum(torch.stack([total, sums.tokens.double()]))
        losses.append(loss / tokens.clamp(min=1))
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


def _scales_in_optimizer(device: torch.device) -> bool:
    """Whether fused AdamW scales and clips the gradients as it reads them, and not two passes before it.

    On a GPU: 36 bytes a parameter for norm, clip and update, not 48. A CPU keeps the passes, and its bits.
    """
    return device.type == "cuda"


@torch.no_grad()
def _clip(trainer: "Trainer", tokens: torch.Tensor, shown: bool) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Turn the gradient into the mean over the step's unmasked tokens, clip it, and return its norm before clipping.

    Also returns the number by which the optimizer must divide the model's gradients, None where that is done.
    shown: it must be done, because the gradients are looked at before the optimizer's step.

    This also divides by the loss scale of fp16. The temperature's gradient is scaled, but neither clipped nor part of
    the norm: a learnable T must not slow the student.
    """
    gradients = [local(each.grad) for each in trainer.student.parameters() if each.grad is not None]
    gradients[0].copy_(faults.changed("train.gradient", gradients[0], trainer.batch_number))
    factor = trainer.full_tokens / (trainer.guards.scale.value * tokens.clamp(min=1).to(gradients[0].dtype))
    largest = trainer.config.optimizer.clip or float("inf")
    if not _scales_in_optimizer(gradients[0].device):
        torch._foreach_mul_(gradients, factor)
        return clip_norm_(list(trainer.student.model.parameters()), largest), None
    clipped = [each.grad for each in trainer.student.model.parameters() if each.grad is not None]
    norm = total_norm(clipped) * factor
    scale = (factor * clip_factor(norm, largest)).reciprocal()
    for gradient in _unclipped(trainer):
        gradient.mul_(factor)
    if shown:  # the same bits as in the optimizer, which rounds each quotient once too
        torch._foreach_div_([local(each) for each in clipped], scale)
        scale = torch.ones_like(scale)
    return norm, scale


def _unclipped(trainer: "Trainer") -> list[torch.Tensor]:
    """The gradients that are not part of the norm."""
    others = [each for each in (trainer.student.temperature, trainer.student.hidden_loss) if each is not None]
    return [each.grad for other in others for each in other.parameters() if each.grad is not None]


def _numbers(
    trainer: "Trainer",
    sums: LossOutput,
    loss: torch.Tensor,
    norm: torch.Tensor,
    temperature: torch.Tensor,
    temperature_gradient: torch.Tensor | None,
    skipped: torch.Tensor,
    stop_signal: torch.Tensor,
    clock: torch.Tensor,
    rate: float,
) -> dict[str, float]:
    """The step's numbers as means over its tokens, read from the device at once; T as the loss used it."""
    tensors = [loss, sums.ce, sums.kd, sums.kd_at_one, sums.hidden, sums.tokens, norm, temperature]
    tensors += [skipped, stop_signal, clock] + ([] if temperature_gradient is None else [temperature_gradient])
    read = torch.stack([each.double() for each in tensors]).tolist()
    mean, ce, kd, kd_at_1, hidden, tokens, grad_norm, value, was_skipped, signal_number, by_clock, *slopes = read
    count = max(tokens, 1.0)
    parts: dict[str, float] = {}
    if trainer.student.loss.alpha:
        parts = {"ce": ce / count, "kd": kd / count, "kd_T1": kd_at_1 / count, "T": value}
        if trainer.config.objective.alpha_schedule != "constant":
            parts["alpha"] = trainer.student.loss.alpha
    if trainer.student.hidden_loss is not None:
        parts |= {"ce": ce / count, "hidden": hidden / count}
    flags = {"skipped": was_skipped, "stop_signal": signal_number, "clock": by_clock}
    numbers = {"loss": mean, **parts, "lr": rate, "grad_norm": grad_norm, "tokens": tokens, **flags}
    if trainer.student.quantized is not None:
        numbers["quantized"] = float(trainer.student.present_mode == trainer.student.quantized)
        if trainer.adaptive is not None and trainer.adaptive.gap is not None:
            numbers["gap"] = trainer.adaptive.gap
    if slopes:
        numbers["dL/dlogT"] = slopes[0]
    return numbers
