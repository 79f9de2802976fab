"""The training loop, meant to be read from top to bottom.

A step reads its micro-batches, adds up their gradients, clips, and takes one optimizer step. Losses are sums over
tokens divided by a constant, and the gradient is put right once a step by the number of tokens that were unmasked:
the step is then the mean over all its tokens, however it was cut into micro-batches. Numbers stay tensors until the
step is over. A stop request is honoured after the micro-batch in work: the unfinished step leaves no trace.
"""

import math
import time
from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np
import torch

from kdtrain import faults
from kdtrain.cache.reader import CachedBatch
from kdtrain.checkpoint.store import Store
from kdtrain.config import DistillConfig
from kdtrain.data import order
from kdtrain.errors import RunError
from kdtrain.monitor.progress import Averages, Bar, line, log
from kdtrain.monitor.writers import Writers
from kdtrain.objective.loss import LossOutput
from kdtrain.parallel.world import peak_memory_mb
from kdtrain.training.bounds import BoundWatch
from kdtrain.training.schedule import alpha, learning_rate
from kdtrain.training.source import Feed, Source
from kdtrain.training.state import TrainState, seed_everything
from kdtrain.training.step import DistillStep
from kdtrain.training.stopping import StopRequest
from kdtrain.training.validate import summary, validate

_SHOWN = ("loss", "loss_avg", "kd_T1", "hidden", "T", "dL/dlogT", "lr", "grad_norm", "tok/s", "eta_h")
"""Numbers in a line of the log, in this order, where a run has them; all of them are in metrics.jsonl."""
_SHOWN_LIVE = ("loss", "loss_avg", "T", "tok/s", "eta_h")


@dataclass
class Run:
    """One training run, put together by the stage and carried through by `train`.

    Args:
        config: every option.
        total: optimizer steps in all.
        micro: sequences in a micro-batch.
        identity: what the checkpoint says it belongs to (configuration, cache, student).
        seconds, tokens: spent and trained on by this process; a clock is no part of the state.
    """

    config: DistillConfig
    total: int
    micro: int
    step: DistillStep
    state: TrainState
    store: Store
    writers: Writers
    train_source: Source
    validation_source: Source
    identity: dict[str, object] = field(default_factory=dict)
    stopped_by: str | None = None
    seconds: float = 0.0
    tokens: int = 0
    checkpointed: tuple[int, int | None] | None = None
    bounds: BoundWatch = field(default_factory=BoundWatch)


def train(run: Run) -> None:
    """Train to the last step, or until a signal; the newest checkpoint then holds the last finished step.

    Raises:
        RunError: the loss or the gradient is not finite, or a checkpoint cannot be written.
    """
    config, state, progress = run.config, run.state, run.state.progress
    averages = Averages(run.total)
    feed = Feed(run.train_source, lambda step: _indices(run, step), run.micro)
    shown = Bar("distill", run.total, progress.step, every=math.inf)
    with StopRequest() as stop, shown.bar:
        started = time.monotonic()
        if _validation_due(run):
            _validate(run, stop)
            if progress.step > 0:
                _checkpoint(run)
        for number, batches in feed.steps(progress.step + 1, run.total):
            if stop:
                break
            seed_everything(config.seed, number)
            rate = learning_rate(number, run.total, config.optimizer)
            _set_rate(state.optimizer, rate, config.optimizer.lr)
            run.step.temperature.set_step(number - 1)
            run.step.alpha = alpha(number, run.total, config.objective)
            run.step.train()

            sums = _accumulate(run, batches, stop)
            if sums is None:
                break
            norm = _clip(run, sums.tokens)
            temperature = run.step.temperature.value().detach().clone()
            pull = run.step.temperature.log_gradient()
            state.optimizer.step()
            state.optimizer.zero_grad(set_to_none=True)
            faults.point("train.after-step")

            numbers = _numbers(run, sums, norm, temperature, rate)
            if pull is not None:
                numbers["dL/dlogT"] = float(pull)
            if not (math.isfinite(numbers["loss"]) and math.isfinite(numbers["grad_norm"])):
                raise RunError(_not_finite(run, number, numbers))
            progress.step = number
            progress.sequences += config.batch_size
            progress.tokens += int(numbers["tokens"])
            run.seconds = time.monotonic() - started
            run.tokens += int(numbers["tokens"])
            numbers |= averages.add(number, numbers["loss"], int(numbers["tokens"]), time.monotonic())
            _report(run, shown, number, numbers)

            if _validation_due(run):
                _validate(run, stop)
            if number % config.checkpoint.checkpoint_freq == 0 or number == run.total:
                _checkpoint(run)
    if stop and (progress.step < run.total or _validation_due(run)):
        run.stopped_by = stop.name
        state.optimizer.zero_grad(set_to_none=True)
        if progress.step > 0:
            _checkpoint(run)
        run.writers.event("stop", progress.step, signal=stop.name)
        log.info("stopped by %s after step %d; the same command goes on from there", stop.name, progress.step)


def _indices(run: Run, step: int) -> np.ndarray:
    size = run.config.batch_size
    return order.batch(run.config.seed, (step - 1) * size, size, len(run.train_source))


def _set_rate(optimizer: torch.optim.Optimizer, rate: float, peak: float) -> None:
    for group in optimizer.param_groups:
        group["lr"] = rate * group["peak"]


def _accumulate(run: Run, batches: Iterator[CachedBatch], stop: StopRequest) -> LossOutput | None:
    """Add up the gradients of a step; None when a stop was requested in between."""
    sums: LossOutput | None = None
    for batch in batches:
        loss, output = run.step(batch, normalizer=_full_tokens(run))
        loss.backward()
        sums = output if sums is None else LossOutput(*(a + b for a, b in zip(sums, output, strict=True)))
        faults.point("train.after-micro-batch")
        if stop:
            return None
    return sums


def _full_tokens(run: Run) -> float:
    """Tokens of a step none of which is masked: the constant that losses are divided by."""
    return float(run.config.batch_size * run.step.seq_len)


def _clip(run: Run, tokens: torch.Tensor) -> torch.Tensor:
    """Turn the gradient into the mean over the step's unmasked tokens, clip it, and return its norm before clipping.

    The temperature's gradient is scaled but neither clipped nor counted: a learnable T must not slow the student.
    """
    gradients = [each.grad for each in run.step.parameters() if each.grad is not None]
    torch._foreach_mul_(gradients, _full_tokens(run) / tokens.clamp(min=1).to(gradients[0].dtype))
    return torch.nn.utils.clip_grad_norm_(run.state.student.parameters(), run.config.optimizer.clip or float("inf"))


def _numbers(
    run: Run, sums: LossOutput, norm: torch.Tensor, temperature: torch.Tensor, rate: float
) -> dict[str, float]:
    """The step's numbers as means over its tokens, read from the device in one go; T as the loss saw it."""
    tensors = [sums.cross_entropy, sums.kd, sums.kd_at_one, sums.hidden, sums.tokens, norm, temperature]
    ce, kd, kd_at_1, hidden, tokens, grad_norm, value = torch.stack([each.double().cpu() for each in tensors]).tolist()
    count = max(tokens, 1.0)
    weight, objective = run.step.alpha, run.config.objective
    distils = run.step.has_teacher and weight > 0
    parts: dict[str, float] = {}
    if distils:
        parts = {"ce": ce / count, "kd": kd / count, "kd_T1": kd_at_1 / count, "T": value}
        if objective.alpha_schedule != "constant":
            parts["alpha"] = weight
    loss = ((1 - weight) * ce + weight * value**2 * kd) / count if distils else ce / count
    if run.step.hidden_loss is not None:
        parts |= {"ce": ce / count, "hidden": hidden / count}
        loss += objective.hidden_weight * hidden / count
    return {"loss": loss, **parts, "lr": rate, "grad_norm": grad_norm, "tokens": tokens}


def _not_finite(run: Run, number: int, numbers: dict[str, float]) -> str:
    newest = run.store.newest_valid()[0]
    return (
        f"step {number}: loss {numbers['loss']} with gradient norm {numbers['grad_norm']}; this step is lost, "
        f"the newest checkpoint is {newest or 'none'}; look at the data (kdtrain verify) or lower --lr"
    )


def _report(run: Run, shown: Bar, number: int, numbers: dict[str, float]) -> None:
    run.writers.metrics(number, numbers)
    names = [name for name in _SHOWN if name in numbers]
    shown.update(number, line({name: numbers[name] for name in names if name in _SHOWN_LIVE}))
    if number % run.config.monitor.log_freq == 0 or number == run.total or number == 1:
        memory = {"memory_mb": peak_memory_mb(run.step.device)}
        log.info("step %d/%d %s", number, run.total, line({name: numbers[name] for name in names} | memory))
        run.bounds.look(run.step.temperature, run.config.objective.temperature_mode, number, run.writers)


def _validation_due(run: Run) -> bool:
    """Whether the last finished step is to be measured and was not, which a stop request may have prevented."""
    progress = run.state.progress
    wanted = progress.step % run.config.monitor.eval_freq == 0 or progress.step == run.total
    return wanted and progress.validated_step != progress.step


def _validate(run: Run, stop: StopRequest) -> None:
    """Measure the validation split; the lowest cross-entropy marks the best student.

    Cross-entropy and not the objective: it means the same at every temperature and for every divergence.
    """
    step, progress = run.step, run.state.progress
    step.eval()
    metrics = validate(
        run.validation_source,
        step.hidden_eager,
        step.student.head,
        vocab_size=step.vocab_size,
        micro=run.micro,
        batches=run.config.monitor.eval_batches,
        stop=lambda: bool(stop),
    )
    if metrics is None:
        return
    numbers = {f"validation/{name}": value for name, value in summary(metrics).items() if value is not None}
    run.writers.metrics(progress.step, numbers)
    log.info("validation at step %d %s", progress.step, line(numbers))
    progress.validated_step = progress.step
    loss = numbers["validation/loss"]
    if metrics.tokens and not math.isfinite(loss):
        raise RunError(f"validation at step {progress.step}: loss {loss}; look at the student's weights or lower --lr")
    if progress.step > 0 and (progress.best_loss is None or loss < progress.best_loss):
        progress.best_loss, progress.best_step = loss, progress.step
        _checkpoint(run)


def _checkpoint(run: Run) -> None:
    """Publish the state of the last finished step, once, and mark it if it is the best."""
    step, now = run.state.progress.step, (run.state.progress.step, run.state.progress.validated_step)
    if now == run.checkpointed:
        return
    run.store.save(step, run.state.tensors(), {**run.identity, **run.state.numbers()})
    run.checkpointed = now
    if run.state.progress.best_step == step:
        run.store.link("best", f"step-{step:08d}")
    run.store.prune()
    run.writers.event("checkpoint", step)
