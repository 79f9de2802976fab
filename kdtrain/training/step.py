"""One optimizer step: the gradients of its micro-batches, their mean over tokens, the clip, and the update.

Each micro-batch divides its sum over tokens by the same constant, and the step rescales the gradient once by the number
of unmasked tokens: the result is the mean over all tokens of the step, for any micro-batch size. The device decides
whether loss and gradient are finite, and a skipped update leaves weights, moments and step counters bitwise unchanged.
The host reads all numbers of the step at once, at its end.

On several ranks the gradients are exchanged with the last micro-batch. One more exchange after it carries the sums and
the stop requests; from there on every number is that of all ranks, and the same on each.

If a forward or a backward runs out of memory in the first steps of a process, the micro-batch is halved, once. The step
is the same to rounding, since losses are sums over tokens. Only a single process does so: of several ranks, those with
enough memory would wait in a collective for the one without.
"""

import gc
import signal
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import Enum

import numpy as np
import torch
from einops import rearrange

from kdtrain import faults
from kdtrain.checkpoint.saver import HostCopies
from kdtrain.config.commands import DistillConfig
from kdtrain.errors import RunError
from kdtrain.objective.alpha import MeasuredAlpha
from kdtrain.objective.batch import Batch
from kdtrain.objective.loss import LossOutput
from kdtrain.parallel.layout import RankLayout
from kdtrain.parallel.parallelize import (
    SingleProcess,
    clip_factor,
    clip_norm_,
    exchange,
    sum_over_tensor_ranks,
    total_norm,
)
from kdtrain.ranks import all_reduce_sum, is_main, local, world_size
from kdtrain.training.guards import non_finite
from kdtrain.training.observers import Observer, StepView
from kdtrain.training.optimizers import Optimizer
from kdtrain.training.reporter import Reporter
from kdtrain.training.schedule import learning_rate, run_length
from kdtrain.training.signals import StopRequest
from kdtrain.training.sources.source import Source, feed, order_of, passes_of
from kdtrain.training.state import TrainState, seed_everything
from kdtrain.training.student import Student
from kdtrain.training.withheld import Withheld

FIRST_STEPS = 10
"""Steps of a process after which running out of memory is an error."""

_SIGNALS = (signal.SIGINT, signal.SIGTERM)


def out_of_memory(error: BaseException) -> bool:
    """Return whether an error means that memory ran out; on a CPU torch has no error type for it."""
    return isinstance(error, torch.OutOfMemoryError | MemoryError) or "can't allocate memory" in str(error)


class Status(Enum):
    """The outcome of a step."""

    TAKEN = "taken"
    SKIPPED = "skipped"
    """The loss or a gradient is non-finite on some rank, or no token counts; nothing was updated."""
    INTERRUPTED = "interrupted"
    """By a stop request."""
    OUT_OF_MEMORY = "out of memory"
    """The micro-batch is halved from now on, and the data must be read again."""


@dataclass(frozen=True)
class StepResult:
    """A step, over all ranks; only `status` and `message` count where it was neither taken nor skipped."""

    status: Status
    loss: float = float("nan")
    """Mean over the unmasked tokens, nats."""
    grad_norm: float = float("nan")
    """Before clipping."""
    tokens: int = 0
    """Unmasked tokens."""
    save_due: bool = False
    """Whether rank 0 requests a checkpoint."""
    metrics: dict[str, float] = field(default_factory=dict)
    """Everything that is logged, by the names of metrics.jsonl; means over the tokens."""
    message: str = ""
    """What ran out of memory, and what changes."""


@dataclass(kw_only=True)
class Stepper:
    """Takes optimizer steps for a run, a trial run or a benchmark."""

    config: DistillConfig
    state: TrainState
    source: Source
    """The training split."""
    wrapper: SingleProcess
    """Calls the student and exchanges gradients."""
    reporter: Reporter
    """Looks at the gradients."""
    copies: HostCopies
    """Copies of the state that must be complete before it changes."""
    planned: int
    """Optimizer steps; a plateau may end the run earlier (`total`)."""
    micro: int
    """Sequences in a micro-batch of one rank."""
    seq_len: int
    """T, tokens in a sequence."""
    observers: list[Observer] = field(default_factory=list)
    """Called around the parts of each step, in this order."""
    withheld: Withheld | None = None
    """By which alpha is measured; None where it is not."""

    def __post_init__(self) -> None:
        self.order = order_of(self.source, self.config.seed)
        self.write = getattr(self.source, "write_collective", None)
        """Writes the text of a step on all ranks, where the source does that."""
        self.halves_for = FIRST_STEPS
        """Steps from now on in which running out of memory halves the micro-batch; 0 once it is halved."""
        self.tokens = 0
        """Unmasked tokens that this process trained on."""
        self.written: dict[str, float] = {}
        """What the source logs of the text that it wrote for the step."""
        self.weighed: dict[str, float] = {}
        """What alpha was measured by since the last step that was taken."""
        self.kept: list[Batch] = []
        """The last step's micro-batches, where the source cannot read them again."""

    @property
    def student(self) -> Student:
        """The model and its loss."""
        return self.state.student

    @property
    def layout(self) -> RankLayout:
        """The layout of the ranks, by which each reads its part of the data."""
        return self.wrapper.layout

    @property
    def total(self) -> int:
        """Optimizer steps of the whole run, as known now."""
        return run_length(self.planned, self.config.optimizer, self.state.progress.decay_from)

    @property
    def micros(self) -> int:
        """Micro-batches in a step, on each rank."""
        return self.config.batch_size // (self.micro * self.layout.data_size)

    @property
    def full_tokens(self) -> float:
        """Tokens of a step without a mask: the constant divisor of the losses."""
        return float(self.config.batch_size * self.seq_len)

    @property
    def batch_number(self) -> int:
        """The number of the step's batch in the stream of data, from 1; differs from the step after a rollback."""
        return self.state.progress.sequences // self.config.batch_size + 1

    def sequences(self, cursor: int) -> np.ndarray:
        """Return the indices of the sequences of the step at `cursor`, for all ranks."""
        return self.order.batch(cursor, self.config.batch_size)

    def share(self, cursor: int) -> np.ndarray:
        """Return this rank's indices: an even part in order, so that a step is the same for any number of ranks."""
        return self.order.arranged(self.layout.share(self.sequences(cursor)))

    def seed(self, number: int) -> None:
        """Seed the random generators of this data rank for step `number`."""
        seed_everything(self.config.seed, number, self.layout.data_rank)

    def feed(self) -> Iterator[Iterator[Batch]]:
        """Return the micro-batches from the cursor on."""
        cursor, size = self.state.progress.sequences, self.config.batch_size
        expected = self.total - self.state.progress.step
        return feed(self.source, lambda step: self.share(cursor + step * size), self.micro, expected)

    def batches(self) -> list[Batch]:
        """Return the micro-batches of the step at the cursor: as they were kept, or read again."""
        indices = self.share(self.state.progress.sequences)
        return self.kept or [self.source.read(each) for each in rearrange(indices, "(a m) -> a m", m=self.micro)]

    def take(self, batches: Iterator[Batch], stop: StopRequest, save_due: bool = False) -> StepResult:
        """Take the next step; one that is taken is counted in the state's progress.

        Args:
            batches: its micro-batches.
            stop: interrupts the step between two micro-batches.
            save_due: whether rank 0 requests a checkpoint after it.

        Raises:
            RunError: out of memory, and the micro-batch cannot be halved.
        """
        number = self.state.progress.step + 1
        if self.withheld is not None and self.withheld.due(number) and not self.weigh(stop):
            return StepResult(Status.INTERRUPTED)
        if self.write is not None and stop.read(self._written) is None:
            return StepResult(Status.INTERRUPTED)
        rate = self._prepare(number)
        view = StepView(number, self.student, self._run_eagerly)
        for each in self.observers:
            each.before_step(view)
        own = None
        waited = 0.0
        fits = True
        try:
            own, waited = self._accumulate(batches, stop, view)
        except (RuntimeError, MemoryError) as error:
            if not out_of_memory(error):
                raise
            fits = False
        if not fits:  # after the except block, in which the error still holds the tensors
            return StepResult(Status.OUT_OF_MEMORY, message=self._halve_micro_batch())
        if own is None:
            return StepResult(Status.INTERRUPTED)
        tensors = self._all_reduce(own, stop, save_due)
        compared = tensors.pop("members")
        alpha = self.student.loss.alpha
        if isinstance(alpha, MeasuredAlpha):
            tensors |= self._weights(compared, alpha)
        if world_size() > 1:  # no wrapper exchanges those of temperature and projections
            exchange(self._unclipped(), self.layout.sum)
        # of weights that each tensor rank holds whole, and whose gradient it sees in part
        sum_over_tensor_ranks(self.student.model, self.layout)
        if self.reporter.gradients_checked or tensors["tokens"] > 0:
            self.reporter.backward(number)
        norm, scale = self._clip(tensors["tokens"], self.reporter.shows_gradients(number))
        self.reporter.gradients(number)
        skipped = torch.maximum(non_finite(tensors["loss"], norm, *self._unclipped()), (tensors["tokens"] == 0).float())
        tensors |= {"grad_norm": norm, "skipped": skipped}
        if (slope := self.student.temperature.log_gradient()) is not None:
            tensors["dL/dlogT"] = slope
        self.copies.before_change()
        if scale is not None:
            for gradient in self._unclipped():
                gradient.mul_(scale)  # the optimizer divides all gradients by it, and these are not clipped
        for each in self.observers:
            each.before_optimizer(view)
        self.state.optimizer.guarded_step(skipped, scale)
        self.state.optimizer.zero_grad(set_to_none=True)
        faults.point("train.after-step")
        values = torch.stack([each.double() for each in tensors.values()]).tolist()
        read = dict(zip(tensors, values, strict=True))
        result = self._result(read, rate, waited)
        for each in self.observers:
            each.after_optimizer(view, result.metrics, result.status is Status.SKIPPED)
        stop.settle(int(read["signal"]))
        self.halves_for = max(self.halves_for - 1, 0)
        if result.status is Status.TAKEN:
            progress = self.state.progress
            progress.step += 1
            progress.sequences += self.config.batch_size
            progress.tokens += result.tokens
            progress.skips_in_a_row = 0
            progress.loss = result.loss
            alpha.update(compared)
            self.state.guards.scale.update(overflowed=False)
            self.tokens += result.tokens
            self.weighed = {}
            self.kept.clear()  # only a skipped step is investigated
        return result

    def weigh(self, stop: StopRequest) -> bool:
        """Measure alpha by withheld text, which the next step logs; False where a stop request prevented it."""
        assert self.withheld is not None
        found = self.withheld.measure(self.student, self.layout, stop.read, self.state.progress.step)
        self.wrapper.reshard()
        self.weighed = found or {}
        return found is not None

    def rewound(self, step: int) -> None:
        """Tell the observers that the run continues after `step`."""
        for each in self.observers:
            each.rewound(step)

    def settle_buckets(self) -> None:
        """Run one micro-batch through DDP before the first step, and drop its gradients.

        DDP orders its buckets by the first arrival of the gradients, and sums them in that order from the next step on.
        A resumed run would reach that order one step later than an uninterrupted one.
        """
        if self.wrapper.kind != "ddp":
            return
        batch = self._first_batch()
        self.student.train()
        for _ in range(2):  # DDP orders its buckets at the beginning of the second forward
            with self.wrapper.micro_batch(last=True):
                self.wrapper(batch, self.full_tokens).loss.backward()
        self.state.optimizer.zero_grad(set_to_none=True)

    def warm_up(self, stop: StopRequest) -> None:
        """Compile the graph of each mode before the first step, so that no switch waits for the compiler."""
        adaptive = self.state.adaptive
        if adaptive is None or not self.student.compile_objective:
            return
        batch = self._first_batch()
        for position in adaptive.positions:
            if stop.agree():
                break
            self.student.train()
            # through the wrapper, as in a step: FSDP2 gathers the weights that a graph is compiled for
            with adaptive.switch.at(position), self.wrapper.micro_batch(last=self.wrapper.kind != "ddp"):
                self.wrapper(batch, self.full_tokens).loss.backward()
            # before the next graph: a CUDA graph may overwrite the gradients of another (--compile-mode
            # reduce-overhead)
            self.state.optimizer.zero_grad(set_to_none=True)

    def _written(self) -> bool:
        """Have the text of the step at the cursor written, where its source writes on all ranks; return True."""
        if self.write is not None:
            self.written = self.write(self.sequences(self.state.progress.sequences)) or {}
        return True

    def _first_batch(self) -> Batch:
        """Read the first micro-batch of the step at the cursor, whose text is written."""
        self._written()
        return self.source.read(self.share(self.state.progress.sequences)[: self.micro])

    def _prepare(self, number: int) -> float:
        """Set random generators, learning rate, temperature and alpha for step `number`; return the rate."""
        self.seed(number)
        progress = self.state.progress
        rate = learning_rate(number, self.total, self.config.optimizer, progress.decay_from) * progress.lr_factor
        for group in self.state.optimizer.param_groups:
            group["lr"] = rate * group["peak"]
        self.student.temperature.set_step(number - 1)
        self.student.loss.alpha.set_step(number - 1, passes_of(self.source, progress.sequences))
        self.student.train()
        self.kept.clear()
        return rate

    def _accumulate(
        self, batches: Iterator[Batch], stop: StopRequest, view: StepView
    ) -> tuple[LossOutput | None, float]:
        """Accumulate the gradients of a step on this rank; return its sums, None when interrupted, and the seconds
        that it waited for data."""
        waited = 0.0

        def next_batch() -> Batch:
            nonlocal waited
            started = time.perf_counter()
            batch = next(batches)
            waited += time.perf_counter() - started
            return batch

        sums: LossOutput | None = None
        for number in range(1, self.micros + 1):
            # before the forward: a rank without a batch could not take part in the collectives of the others
            batch = stop.read(next_batch)
            if batch is None:
                return None, waited
            if not self.source.repeatable:
                self.kept.append(batch)
            view.micro_batch = number
            for each in self.observers:
                each.before_forward(view, batch)
            if sums is None:
                self._measure(batch, self.state.progress.step + 1)
            with self.wrapper.micro_batch(last=number == self.micros):
                # the loss scale is part of the normalizer, because the objective computes gradients in its forward
                output: LossOutput = self.wrapper(batch, self.full_tokens / self.state.guards.scale.value)
                for each in self.observers:
                    each.after_forward(view, output)
                for each in self.observers:
                    each.before_backward(view, output)
                faults.changed("train.loss", output.loss, self.batch_number).backward()
            for each in self.observers:
                each.after_backward(view)
            output = LossOutput(*(each.detach() for each in output))
            sums = output if sums is None else LossOutput(*(a + b for a, b in zip(sums, output, strict=True)))
            faults.point("train.after-micro-batch")
            if stop:
                return None, waited
        return sums, waited

    def _run_eagerly(self, batch: Batch) -> None:
        """Run a batch before the first micro-batch of a step, for an observer; leaves no trace."""
        with self.student.eager():
            self.student(batch, self.full_tokens).loss.backward()
        self.state.optimizer.zero_grad(set_to_none=True)
        self.seed(self.state.progress.step + 1)

    def _measure(self, batch: Batch, number: int) -> None:
        """Measure the quantisation gap on the first micro-batch of step `number`, where due.

        It is the difference of the losses of two forwards, quantised and high, with the step's random numbers and
        the compiled graphs of training.
        """
        adaptive = self.state.adaptive
        if adaptive is None:
            return
        adaptive.gap = None
        if not adaptive.wants_gap(number):
            return
        losses = []
        for position in adaptive.positions:
            self.seed(number)
            with adaptive.switch.at(position):
                sums = self.student(batch, self.full_tokens)
            total = self.student.total(sums, self.student.temperature.value().detach())
            loss, tokens = self.layout.sum(torch.stack([total, sums.tokens.double()]))
            losses.append(loss / tokens.clamp(min=1))
        self.seed(number)
        adaptive.gap = float(losses[0] - losses[1])

    def _all_reduce(self, own: LossOutput, stop: StopRequest, save_due: bool) -> dict[str, torch.Tensor]:
        """Return over all ranks: the sums of `own`, the mean loss in fp64, T as the loss used it, the signal of a stop
        request (0: none), and whether rank 0 requests a checkpoint (1 or 0)."""
        temperature = self.student.temperature.value().detach().clone()
        named = own._asdict().items()
        own = LossOutput(
            **{
                name: each if name == "tokens" else faults.changed("train.loss", each, self.batch_number)
                for name, each in named
            }
        )
        total = self.student.total(own, temperature)
        # filled on the device: `new_tensor` would copy from the host, which waits for all work in the queue
        due = total.new_full((), float(is_main() and save_due))
        signal_ = total.new_zeros(())
        if world_size() == 1:
            loss = total / own.tokens.double().clamp(min=1)
        else:
            requests = [total.new_full((), float(stop.received == each)) for each in _SIGNALS]
            compared = own.members.flatten()
            scalars = torch.stack([total, due, *requests, *(each.double() for each in own[:-1])])
            first = 2 + len(_SIGNALS)
            numbers = self.layout.once(torch.cat([scalars, compared]))
            numbers[1:first] = scalars[1:first]  # of a stop request or a checkpoint each rank is asked
            vector, compared = all_reduce_sum(numbers).split([len(scalars), len(compared)])
            due, votes = vector[1], vector[2:first]
            own = LossOutput._make([*vector[first:], compared.view(-1, 6)])
            requested = [(vote > 0).double() * float(each) for vote, each in zip(votes, _SIGNALS, strict=True)]
            loss = vector[0] / own.tokens.clamp(min=1)
            signal_ = torch.stack(requested).max()
        return {**own._asdict(), "loss": loss, "T": temperature, "signal": signal_, "save_due": due}

    def _weights(self, compared_M6: torch.Tensor, measured: MeasuredAlpha) -> dict[str, torch.Tensor]:
        """Return the step's alpha: its mean over tokens with a teacher, and each taught member's alpha in a mixture."""
        alpha_M = measured.value()
        tokens_M = compared_M6[:, 3] * measured.taught
        mean = (alpha_M * tokens_M).sum() / tokens_M.sum().clamp(min=1)
        found = {"alpha": mean if len(alpha_M) > 1 else alpha_M[0]}
        own = zip(self.source.facts.members.items(), alpha_M, strict=False)
        return found | {f"alpha/{name}": alpha for (name, each), alpha in own if each.facts.targets != "none"}

    @torch.no_grad()
    def _clip(self, tokens: torch.Tensor, shown: bool) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Turn the gradient into the mean over the step's unmasked tokens, clip it, and return its norm before.

        Also returns the number by which the optimizer must divide the model's gradients, None where that is done.
        shown: it must be done, because the gradients are looked at before the optimizer's step.

        This also divides by the loss scale of fp16. The temperature's gradient is scaled, but neither clipped nor part
        of the norm: a learnable T must not slow the student.
        """
        gradients = [local(each.grad) for each in self.student.parameters() if each.grad is not None]
        gradients[0].copy_(faults.changed("train.gradient", gradients[0], self.batch_number))
        factor = self.full_tokens / (self.state.guards.scale.value * tokens.clamp(min=1).to(gradients[0].dtype))
        largest = self.config.optimizer.clip or float("inf")
        if not _scales_in_optimizer(self.state.optimizer, gradients[0].device):
            torch._foreach_mul_(gradients, factor)
            return clip_norm_(list(self.student.model.parameters()), largest), None
        clipped = [each.grad for each in self.student.model.parameters() if each.grad is not None]
        norm = total_norm(clipped) * factor
        scale = (factor * clip_factor(norm, largest)).reciprocal()
        for gradient in self._unclipped():
            gradient.mul_(factor)
        if shown:  # the same bits as in the optimizer, which rounds each quotient once too
            torch._foreach_div_([local(each) for each in clipped], scale)
            scale = torch.ones_like(scale)
        return norm, scale

    def _unclipped(self) -> list[torch.Tensor]:
        """Return the gradients that are not part of the norm."""
        others = [each for each in (self.student.temperature, self.student.hidden_loss) if each is not None]
        return [each.grad for other in others for each in other.parameters() if each.grad is not None]

    def _result(self, read: dict[str, float], rate: float, waited: float) -> StepResult:
        """Return the result of a step from the numbers read from the device: sums over its tokens, and means."""
        student = self.student
        adaptive = self.state.adaptive
        count = max(read["tokens"], 1.0)

        def means(*names: str) -> dict[str, float]:
            return {name: read[name] / count for name in names}

        metrics = {"loss": read["loss"]}
        weights = {name: value for name, value in read.items() if name.partition("/")[0] == "alpha"}
        weight = student.loss.alpha.value()
        if weights or weight:
            metrics |= {**means("ce", "kd"), "kd_T1": read["kd_at_one"] / count, "T": read["T"]}
            if self.source.facts.replays:
                metrics |= means("ce_alone")
            if weights:
                metrics |= {**means("teacher_ce"), **weights}
            elif student.loss.alpha.fixed is None:
                metrics["alpha"] = float(weight)
        if student.hidden_loss is not None:
            metrics |= means("ce", "hidden")
        if student.router_weight:
            metrics |= means("ce", "router")
        metrics |= {"lr": rate, "grad_norm": read["grad_norm"], "tokens": read["tokens"]}
        if student.quantized is not None:
            metrics["quantized"] = float(student.present_mode == student.quantized)
            if adaptive is not None and adaptive.gap is not None:
                metrics["gap"] = adaptive.gap
        if "dL/dlogT" in read:
            metrics["dL/dlogT"] = read["dL/dlogT"]
        metrics["data_wait_s"] = waited
        if self.state.guards.scale.enabled:
            metrics["loss_scale"] = self.state.guards.scale.value
        status = Status.SKIPPED if read["skipped"] else Status.TAKEN
        tokens = int(read["tokens"])
        save_due = read["save_due"] > 0
        return StepResult(
            status, read["loss"], read["grad_norm"], tokens, save_due, metrics | self.weighed | self.written
        )

    def _halve_micro_batch(self) -> str:
        """Drop the gradients after an out-of-memory error, and halve the micro-batch from now on; return what changed.

        Raises:
            RunError: it was halved before, the first steps are over, its size is odd, there are several processes, or
                `--compile-mode` allows one micro-batch only.
        """
        text = f"out of memory in step {self.state.progress.step + 1} with micro-batches of {self.micro} sequences"
        if self.config.precision.compile_mode == "reduce-overhead":
            text += (
                "; --compile-mode reduce-overhead cannot split them: leave it out, or add --activation-checkpointing"
            )
            raise RunError(text, reason="oom")
        if not self.halves_for or self.micro % 2 or world_size() > 1:
            raise RunError(f"{text}; lower --micro-batch-size, or add --activation-checkpointing", reason="oom")
        self.halves_for = 0
        self.micro = self.micro // 2
        self.state.optimizer.zero_grad(set_to_none=True)
        self.kept.clear()
        gc.collect()
        if self.student.device.type == "cuda":
            torch.cuda.empty_cache()
        return f"{text}: continuing with {self.micro}, as --micro-batch-size {self.micro} does from the start"


def _scales_in_optimizer(optimizer: Optimizer, device: torch.device) -> bool:
    """Return whether the optimizer scales and clips the gradients as it reads them, and not two passes before it.

    On a GPU: 36 bytes a parameter for norm, clip and update, not 48. A CPU keeps the passes, and its bits.
    """
    return device.type == "cuda" and optimizer.scales
