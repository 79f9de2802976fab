"""One optimizer step: the gradients of its micro-batches, their mean over tokens, the clip, and the update.

Losses are sums over tokens divided by a constant, and the gradient is put right once a step by the number of tokens
that were unmasked: the step is then the mean over all its tokens, however it was cut into micro-batches. Whether loss
and gradient are finite is decided where they lie, and an update that is not to be leaves weights, moments and step
counters as they are, bit by bit. The host reads all numbers of the step in one go when it is over.
"""

from collections.abc import Iterator

import torch

from kdtrain import faults
from kdtrain.cache.reader import CachedBatch
from kdtrain.objective.loss import LossOutput
from kdtrain.training.guards import guarded_step, not_finite
from kdtrain.training.run import Run
from kdtrain.training.schedule import alpha, learning_rate
from kdtrain.training.state import seed_everything
from kdtrain.training.stopping import StopRequest


def take_step(run: Run, batches: Iterator[CachedBatch], stop: StopRequest) -> dict[str, float] | None:
    """Take the next step and return its numbers, means over its tokens; None when a stop was requested in between.

    `skipped` is 1 where nothing was updated, because the loss or a gradient is not finite on one of the ranks, else 0.
    """
    state, number = run.state, run.state.progress.step + 1
    if run.hooks is not None:
        run.hooks.take()  # what a validation left
    rate = _prepare(run, number)
    sums = accumulate(run, batches, stop)
    if sums is None:
        return None
    run.reporter.backward()
    norm = _clip(run, sums.tokens)
    run.reporter.gradients(number)
    temperature = run.step.temperature.value().detach().clone()
    pull = run.step.temperature.log_gradient()
    loss = faults.changed("train.loss", mean_loss(run, sums, temperature), batch_number(run))
    skipped = not_finite(loss, norm, *_uncounted(run))
    guarded_step(state.optimizer, skipped)
    state.optimizer.zero_grad(set_to_none=True)
    faults.point("train.after-step")
    numbers = _numbers(run, sums, loss, norm, temperature, skipped, rate) | _of_formats(run)
    return numbers if pull is None else numbers | {"dL/dlogT": float(pull)}


def accumulate(run: Run, batches: Iterator[CachedBatch], stop: StopRequest) -> LossOutput | None:
    """Add up the gradients of a step; None when a stop was requested in between."""
    sums: LossOutput | None = None
    for batch in batches:
        if sums is None:
            _look_at(run, batch, run.state.progress.step + 1)
        # the scale goes into the normalizer: the engine makes gradients in its forward, and those would lack it
        loss, output = run.step(batch, normalizer=full_tokens(run) / run.scale.value)
        faults.changed("train.loss", loss, batch_number(run)).backward()
        sums = output if sums is None else LossOutput(*(a + b for a, b in zip(sums, output, strict=True)))
        faults.point("train.after-micro-batch")
        if stop:
            return None
    return sums


def _look_at(run: Run, batch: CachedBatch, number: int) -> None:
    """Collect statistics of tensors, and measure what quantisation costs, where step `number` is to do it."""
    if run.collector is not None:

        def run_eagerly() -> None:
            with run.step.eager():
                run.step(batch, normalizer=full_tokens(run))[0].backward()

        if run.collector.collect(number, run.step.present_mode, run_eagerly):
            run.state.optimizer.zero_grad(set_to_none=True)
            seed_everything(run.config.seed, number)
    _probe_gap(run, batch, number)


def _probe_gap(run: Run, batch: CachedBatch, number: int) -> None:
    """Measure what quantisation costs at step `number` on its first micro-batch, where the controller wants to know.

    Forward only, quantised and high, with the step's random numbers and the graphs that it is trained with; nothing is
    kept but the difference of the losses.
    """
    adaptive = run.adaptive
    if adaptive is None:
        return
    adaptive.gap = None
    if not adaptive.controller.wants_gap(number):
        return
    losses = []
    for position in adaptive.positions:
        seed_everything(run.config.seed, number)
        with adaptive.switch.at(position):
            _, sums = run.step(batch, normalizer=full_tokens(run))
        losses.append(mean_loss(run, sums, run.step.temperature.value().detach()))
    seed_everything(run.config.seed, number)
    adaptive.gap = float(losses[0] - losses[1])


def batch_number(run: Run) -> int:
    """The number of the step's batch in the stream of data, from 1: what a fault is tied to, and a rollback skips."""
    return run.state.progress.sequences // run.config.batch_size + 1


def full_tokens(run: Run) -> float:
    """Tokens of a step none of which is masked: the constant that losses are divided by."""
    return float(run.config.batch_size * run.step.seq_len)


def _prepare(run: Run, number: int) -> float:
    """Set random generators, learning rate, temperature and alpha for step `number`; return the rate."""
    seed_everything(run.config.seed, number)
    rate = learning_rate(number, run.total, run.config.optimizer) * run.state.progress.lr_factor
    for group in run.state.optimizer.param_groups:
        group["lr"] = rate * group["peak"]
    run.step.temperature.set_step(number - 1)
    run.step.alpha = alpha(number, run.total, run.config.objective)
    run.step.train()
    return rate


def _clip(run: Run, tokens: torch.Tensor) -> torch.Tensor:
    """Turn the gradient into the mean over the step's unmasked tokens, clip it, and return its norm before clipping.

    What fp16 scaled the loss by is taken out here.
    The temperature's gradient is scaled but neither clipped nor counted: a learnable T must not slow the student.
    """
    gradients = [each.grad for each in run.step.parameters() if each.grad is not None]
    gradients[0].copy_(faults.changed("train.gradient", gradients[0], batch_number(run)))
    factor = full_tokens(run) / (run.scale.value * tokens.clamp(min=1).to(gradients[0].dtype))
    torch._foreach_mul_(gradients, factor)
    return torch.nn.utils.clip_grad_norm_(run.state.student.parameters(), run.config.optimizer.clip or float("inf"))


def _uncounted(run: Run) -> list[torch.Tensor]:
    """The gradients that the norm leaves out."""
    others = [each for each in (run.step.temperature, run.step.hidden_loss) if each is not None]
    return [each.grad for other in others for each in other.parameters() if each.grad is not None]


def mean_loss(run: Run, sums: LossOutput, temperature: torch.Tensor) -> torch.Tensor:
    """The loss of the tokens that `sums` is of, as their mean."""
    weight = run.step.alpha if run.step.has_teacher else 0.0
    loss = (1 - weight) * sums.cross_entropy.double()
    if weight:
        loss = loss + weight * temperature.double() ** 2 * sums.kd.double()
    if run.step.hidden_loss is not None:
        loss = loss + run.config.objective.hidden_weight * sums.hidden.double()
    return loss / sums.tokens.double().clamp(min=1)


def _of_formats(run: Run) -> dict[str, float]:
    """What a step that may be quantised says besides: whether it was, and what that cost where it was measured."""
    if run.step.quantized is None:
        return {}
    numbers = {"quantized": float(run.step.present_mode == run.step.quantized)}
    if run.adaptive is not None and run.adaptive.gap is not None:
        numbers["gap"] = run.adaptive.gap
    return numbers


def _numbers(
    run: Run,
    sums: LossOutput,
    loss: torch.Tensor,
    norm: torch.Tensor,
    temperature: torch.Tensor,
    skipped: torch.Tensor,
    rate: float,
) -> dict[str, float]:
    """The step's numbers as means over its tokens, read from the device in one go; T as the loss saw it."""
    tensors = [loss, sums.cross_entropy, sums.kd, sums.kd_at_one, sums.hidden, sums.tokens, norm, temperature, skipped]
    read = torch.stack([each.double() for each in tensors]).tolist()
    mean, ce, kd, kd_at_1, hidden, tokens, grad_norm, value, not_taken = read
    count = max(tokens, 1.0)
    parts: dict[str, float] = {}
    if run.step.has_teacher and run.step.alpha:
        parts = {"ce": ce / count, "kd": kd / count, "kd_T1": kd_at_1 / count, "T": value}
        if run.config.objective.alpha_schedule != "constant":
            parts["alpha"] = run.step.alpha
    if run.step.hidden_loss is not None:
        parts |= {"ce": ce / count, "hidden": hidden / count}
    return {"loss": mean, **parts, "lr": rate, "grad_norm": grad_norm, "tokens": tokens, "skipped": not_taken}
