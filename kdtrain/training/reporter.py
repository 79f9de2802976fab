"""Reports of a run while it trains: metrics, warnings, histograms and text samples.

The reporter does not change the training: it draws none of its random numbers and touches no gradient. Nothing in it
survives a restart, so that a warning given once a process is given again by the next one. A step without histogram or
sample costs the reading of one file of /proc.

Each warning is a pure function of the run's numbers, which returns a line or None. A learned temperature at one of its
bounds is no longer learned: the loss pushes it further than the bound allows. `minimize` always ends at a bound
(docs/temperature.md).

The student continues a few prompts of the validation split, greedily and by sampling. Sampling uses its own generator
with the same seed each time, so that two samples differ by what the student learned in between. There is no KV cache:
this works with every kind of model, at the price of a whole forward a token.

Shape suffixes: B rows, T tokens so far, V vocabulary.
"""

import math
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import nn
from transformers import PreTrainedTokenizerFast

from kdtrain.config import DistillConfig
from kdtrain.models.hub import one_line
from kdtrain.monitor.progress import log, status
from kdtrain.monitor.writers import Writers
from kdtrain.parallel.parallelize import peaks, reshard
from kdtrain.precision.modes import autocast
from kdtrain.ranks import memory_mb, resident_mb
from kdtrain.training.schedule import validation_interval, warmup_steps
from kdtrain.training.sources.source import Source
from kdtrain.training.student import Student

NextLogits = Callable[[torch.Tensor], torch.Tensor]
"""tokens_BT -> logits_BV of the next token."""


@torch.no_grad()
def generate(next_logits: NextLogits, prompts_BT: torch.Tensor, tokens: int, seed: int) -> tuple[torch.Tensor, ...]:
    """Continue each prompt by `tokens` tokens: greedily, and sampled at temperature 1; both int64 [B, tokens].

    Args:
        next_logits: the model.
        prompts_BT: int64, all of the same length.
        tokens: how many tokens to add.
        seed: of the sampled tokens.
    """
    generator = torch.Generator(prompts_BT.device).manual_seed(seed)
    rows, start = prompts_BT.shape
    written = torch.cat([prompts_BT, prompts_BT])
    for _ in range(tokens):
        logits = next_logits(written).float()
        best = logits[:rows].argmax(-1, keepdim=True)
        drawn = torch.multinomial(torch.softmax(logits[rows:], -1), 1, generator=generator)
        written = torch.cat([written, torch.cat([best, drawn])], dim=1)
    return written[:rows, start:], written[rows:, start:]


class ClippedShare:
    """The share of recent steps whose gradient was clipped; warns above a tenth if the loss does not fall meanwhile.

    Clipping alone is no fault, it shortens a step: fresh small students learn best at a rate at which most steps are
    clipped (docs/quality.md).

    Args:
        clip: largest norm of a gradient; 0 clips nothing.
        warmup: first steps of the run, which never count for the warning.
        window: how many steps count.
    """

    limit = 0.1

    def __init__(self, clip: float, warmup: int = 0, window: int = 100) -> None:
        self.clip, self.warmup, self.window = clip, warmup, window
        self.steps: deque[bool] = deque(maxlen=window)
        self.losses: deque[float] = deque(maxlen=window)
        """Cross-entropies of the steps of the window that lie after the warm-up, nats."""
        self.warned = False

    @property
    def share(self) -> float:
        """0 to 1; 0 before the first step."""
        return sum(self.steps) / len(self.steps) if self.steps else 0.0

    def add(self, step: int, norm: float, loss: float) -> str | None:
        """Count a step with this gradient norm and cross-entropy; return the warning when a full window deserves it."""
        self.steps.append(0 < self.clip < norm)
        if step > self.warmup:
            self.losses.append(loss)
        if len(self.losses) < self.window or self.share <= self.limit:
            self.warned = False
            return None
        losses, half = list(self.losses), self.window // 2
        earlier, later = math.fsum(losses[:half]) / half, math.fsum(losses[half:]) / (self.window - half)
        is_new, self.warned = not self.warned and not later < earlier, not later < earlier
        if not is_new:
            return None
        return (
            f"the gradient was clipped in {self.share:.0%} of the last {self.window} steps (above --clip "
            f"{self.clip:g}), and their loss did not fall ({earlier:.4f}, then {later:.4f}): the steps may be too "
            "long; lower --lr"
        )


class LearnedSamples:
    """Warns once when the student has memorized the samples in its targets.

    A divergence is at least 0, and so is the mean of its estimates from fresh samples. A cache's samples are the same
    in every epoch: a student that fits them brings the estimate to 0 and below while it moves away from the teacher.

    Args:
        samples: entries drawn for a token; 0 disables the check.
        window: steps in the mean.
    """

    def __init__(self, samples: int, window: int = 50) -> None:
        self.samples = samples
        self.steps: deque[float] = deque(maxlen=window)
        self.warned = False

    @property
    def mean(self) -> float:
        """Mean divergence of the window, nats; infinite until the window is full."""
        return math.fsum(self.steps) / len(self.steps) if len(self.steps) == self.steps.maxlen else math.inf

    def add(self, divergence: float, epochs: float) -> str | None:
        """Take the divergence of a step, a mean over its tokens; return the warning when the mean is 0 or less."""
        if not self.samples or not math.isfinite(divergence):
            return None
        self.steps.append(divergence)
        if self.warned or self.mean > 0:
            return None
        self.warned = True
        return (
            f"the divergence from the teacher is {self.mean:.3f} nats over the last {len(self.steps)} steps, and fresh "
            f"samples give none below 0: after {epochs:.1f} epochs the student has memorized the {self.samples} "
            "samples a token; cache more text, use a larger --top-k or --num-samples, or train fewer steps"
        )


class DataWait:
    """Warns once when more than a tenth of the steps' time goes by waiting for their data.

    An online teacher computes while the step waits, so that it has no limit.

    Args:
        reads_ahead: whether data is read while the step before computes.
        window: how many steps count.
        first: steps of a process that do not count: files are opened, and graphs compiled.
    """

    limit = 0.1

    def __init__(self, reads_ahead: bool, window: int = 50, first: int = 10) -> None:
        self.reads_ahead, self.left = reads_ahead, first
        self.steps: deque[tuple[float, float]] = deque(maxlen=window)
        self.warned = False

    def add(self, waited: float, seconds: float) -> str | None:
        """Take the seconds that a step `waited`, and those it took; return the warning when a full window exceeds."""
        if not self.reads_ahead or self.left > 0:
            self.left -= 1
            return None
        self.steps.append((waited, seconds))
        total = math.fsum(seconds for _, seconds in self.steps)
        share = math.fsum(waited for waited, _ in self.steps) / total if total > 0 else 0.0
        if self.warned or len(self.steps) < (self.steps.maxlen or 0) or share <= self.limit:
            return None
        self.warned = True
        return (
            f"training waited for its data in {share:.0%} of the time of the last {len(self.steps)} steps; put the "
            "cache on a faster disk of this machine, or leave the process a core for reading (--sanity times it)"
        )


class MemoryGrowth:
    """How much the memory of a process has grown since its warm-up; warns once when it grows by more than half.

    The reference is measured after `warmup` steps of the process, and again after the first checkpoint and the first
    validation, whose buffers stay.

    Args:
        first: the first step of this process.
        warmup: steps until memory is expected to be stable.
        every: intervals, in steps, of the events whose buffers stay (checkpoints, validations).
    """

    limit = 0.5

    def __init__(self, first: int, warmup: int = 50, every: Iterable[int] = ()) -> None:
        warm = first + warmup - 1
        self.settles = {warm + 1, *(max(warm, -(-first // each) * each) + 1 for each in every)}
        self.reference: float | None = None
        self.warned = False

    def add(self, step: int, held: float) -> tuple[float, str | None]:
        """Take the `held` MiB of a step; return the growth in MiB (0 without a reference), and the warning or None."""
        if step in self.settles:
            self.reference = held
        if not self.reference:
            return 0.0, None
        grown = held - self.reference
        if self.warned or grown <= self.limit * self.reference:
            return grown, None
        self.warned = True
        return grown, (
            f"the process holds {held:,.0f} MiB, {grown:,.0f} more than after its warm-up; if it keeps growing "
            "there is a memory leak; you can stop and resume the run"
        )


@dataclass(frozen=True)
class Gradients:
    """The parameters of a module by the state of their gradient."""

    missing: list[str] = field(default_factory=list)
    """Without a gradient: they take no part in the loss."""
    zero: list[str] = field(default_factory=list)
    """With a gradient of zeros: they take part, and do not change the loss."""
    broken: list[str] = field(default_factory=list)
    """With a non-finite gradient."""
    good: int = 0
    """How many have a finite gradient that is not all 0."""

    def lines(self) -> list[str]:
        """Return one line for each kind of unsound gradient."""
        kinds = (
            (self.broken, "a non-finite gradient"),
            (self.missing, "no gradient: they do not reach the loss"),
            (self.zero, "a gradient of zeros: they will not learn"),
        )
        return [
            f"{len(names)} parameter{'s have' if len(names) > 1 else ' has'} {text} "
            f"({', '.join(names[:5])}{f' and {len(names) - 5} more' if len(names) > 5 else ''})"
            for names, text in kinds
            if names
        ]


def gradients_of(module: nn.Module) -> Gradients:
    """Classify the gradient of every trainable parameter; waits for the device once."""
    trainable = {name: each for name, each in module.named_parameters() if each.requires_grad}
    gradients = {name: each.grad for name, each in trainable.items() if each.grad is not None}
    largest = peaks(list(gradients.values())).tolist() if gradients else []
    by_name = dict(zip(gradients, largest, strict=True))
    return Gradients(
        missing=[name for name in trainable if name not in gradients],
        zero=[name for name, size in by_name.items() if size == 0],
        broken=[name for name, size in by_name.items() if not math.isfinite(size)],
        good=sum(math.isfinite(size) and size > 0 for size in by_name.values()),
    )


def initial_loss(loss: float, vocab_size: int, init: str) -> tuple[bool, str]:
    """Return whether the cross-entropy before the first step is plausible, and a line that explains it.

    Args:
        loss: nats a token.
        vocab_size: V; a uniform prediction costs ln V.
        init: where the weights come from, as in a spec. Weights from scratch predict nothing: the loss is ln V, and up
            to a tenth more where random logits are wide. Pretrained weights are below. Others may be anywhere.
    """
    uniform = math.log(vocab_size)
    text = f"initial loss {loss:.3f} nats a token, ln V is {uniform:.3f}"
    if not math.isfinite(loss):
        return False, f"{text}: non-finite; look at the weights and the data"
    if init == "scratch" and loss > 1.1 * uniform:
        return False, f"{text}: fresh weights are worse than a uniform prediction; their scale is too large"
    if init == "scratch" and loss < 0.9 * uniform:
        return False, f"{text}: too low for fresh weights; the student sees its labels, or the weights are not fresh"
    if init == "pretrained" and loss > uniform:
        return False, f"{text}: a trained student is worse than a uniform prediction; is the tokenizer its own?"
    return True, text


PROMPTS, PROMPT_TOKENS, NEW_TOKENS = 3, 32, 48


class Sampler:
    """Continues the first tokens of the first sequences of `source` with the student.

    Args:
        student: the model.
        source: the validation split; read once, at the first call.
        tokenizer: turns tokens into text.
        seed: of the sampled tokens.
    """

    def __init__(self, student: Student, source: Source, tokenizer: PreTrainedTokenizerFast, seed: int) -> None:
        self.student, self.source, self.tokenizer, self.seed = student, source, tokenizer, seed
        self.prompts_BT: torch.Tensor | None = None
        self.tokens = 0

    def texts(self) -> list[dict[str, str]]:
        """Return prompt, greedy and sampled continuation of each prompt; the student's mode does not change."""
        if self.prompts_BT is None:
            tokens_BT = self.source.read(np.arange(min(PROMPTS, len(self.source)))).tokens
            seq_len = tokens_BT.shape[1] - 1
            prompt = max(1, min(PROMPT_TOKENS, seq_len // 2))
            self.prompts_BT, self.tokens = tokens_BT[:, :prompt], max(1, min(NEW_TOKENS, seq_len - prompt))
        training = self.student.training
        self.student.eval()

        def next_logits(tokens_BT: torch.Tensor) -> torch.Tensor:
            with self.student.switch.at("high"), autocast(self.student.mode, self.student.device):
                hidden_BTD = self.student.model(tokens_BT)
            return self.student.model.head(hidden_BTD[:, -1])[:, : self.student.vocab_size]

        try:
            with self.student.eager():  # each length would compile a graph of its own
                continuations = generate(next_logits, self.prompts_BT, self.tokens, self.seed)
        finally:
            self.student.train(training)
            reshard(self.student.model)
        columns = [self.tokenizer.batch_decode(tokens.tolist()) for tokens in (self.prompts_BT, *continuations)]
        return [dict(zip(("prompt", "greedy", "sampled"), row, strict=True)) for row in zip(*columns, strict=True)]


class Reporter:
    """Reports how one run is doing.

    Args:
        config: every option.
        student: the module in training.
        writers: where numbers go.
        validation: where prompts come from.
        tokenizer: turns tokens into text; without one there are no samples.
        init: where the student's weights come from, as in its spec.
        total: planned steps of the run.
        finished: steps finished before this process.
        samples: entries drawn for a token of the targets.
        reads_ahead: whether the training data is read while the step before computes.
    """

    def __init__(
        self,
        config: DistillConfig,
        student: Student,
        writers: Writers,
        validation: Source,
        tokenizer: PreTrainedTokenizerFast | None,
        *,
        init: str,
        total: int,
        finished: int,
        samples: int = 0,
        reads_ahead: bool = True,
    ) -> None:
        self.config, self.student, self.writers, self.init = config, student, writers, init
        self.sampler = None if tokenizer is None else Sampler(student, validation, tokenizer, config.seed)
        self.clipped = ClippedShare(config.optimizer.clip, warmup_steps(total, config.optimizer))
        every = (config.checkpoint.checkpoint_freq, validation_interval(total, config.monitor.eval_freq))
        self.memory = MemoryGrowth(finished + 1, every=every)
        self.learned = LearnedSamples(samples)
        self.data_wait = DataWait(reads_ahead)
        self.gradients_checked = False
        self.bound: str | None = None
        self.utilization_known = student.device.type == "cuda"

    def initial(self, loss: float) -> None:
        """Warn if the validation loss before the first step, nats a token, is implausible."""
        plausible, text = initial_loss(loss, self.student.vocab_size, self.init)
        if not plausible:
            self.writers.warning("initial-loss", 0, text)

    def backward(self, number: int) -> None:
        """After a step's last backward, before clipping: name the parameters without a sound gradient, once."""
        if self.gradients_checked:
            return
        self.gradients_checked = True
        for text in gradients_of(self.student.model).lines():
            self.writers.warning("gradients", number, text)

    def shows_gradients(self, number: int) -> bool:
        """Whether histograms of step `number` are due."""
        return _due(number, self.config.monitor.histogram_freq)

    def gradients(self, number: int) -> None:
        """After clipping, before the optimizer's step: write histograms where they are due."""
        if self.shows_gradients(number):
            tensors: dict[str, torch.Tensor] = {}
            for name, each in self.student.model.named_parameters():
                tensors[f"parameters/{name}"] = each
                if each.grad is not None:
                    tensors[f"gradients/{name}"] = each.grad
            self.writers.histograms(number, tensors)

    def finished(self, number: int, numbers: Mapping[str, float], checkpoint: int, epochs: float) -> str:
        """After step `number`: write its numbers, samples where due, and warnings; return the step's log line.

        Args:
            number: the step.
            numbers: the step's numbers, by the names of metrics.jsonl.
            checkpoint: the step of the last checkpoint, or the run's first step where there is none.
            epochs: passes over the training split so far.
        """
        if self.sampler is not None and _due(number, self.config.monitor.sample_freq):
            self.writers.samples(number, self.sampler.texts())
        cross_entropy = numbers.get("ce", numbers.get("loss", math.nan))
        clipped = self.clipped.add(number, numbers.get("grad_norm", math.nan), cross_entropy)
        share = {"clipped_share": self.clipped.share} if self.config.optimizer.clip else {}
        self.writers.metrics(number, {**numbers, **share, **self._resources(number)})
        held = memory_mb(self.student.device)
        grown, leak = self.memory.add(number, held)
        if leak is not None:
            self.writers.warning("memory-growth", number, leak)
        memorized = self.learned.add(numbers.get("kd", math.nan), epochs)
        if memorized is not None:
            fields = {"epochs": round(epochs, 2), "samples": self.learned.samples, "divergence": self.learned.mean}
            self.writers.warning("learned-samples", number, memorized, **fields)
        if clipped is not None:
            self.writers.warning("clipped", number, clipped)
        if "tok/s_last" in numbers:
            seconds = numbers["tokens"] / numbers["tok/s_last"] if numbers["tok/s_last"] else 0.0
            slow = self.data_wait.add(numbers["data_wait_s"], seconds)
            if slow is not None:
                self.writers.warning("data-wait", number, slow)
        own = {"ckpt": checkpoint - number, "memory_mb": held, "mem_delta": grown, "mode": self.student.present_mode}
        return status({**numbers, **own})

    def temperature(self, number: int) -> None:
        """After step `number`: warn when a learned T reaches a bound, once until it leaves. Waits for the device.

        A resumed run warns once more.
        """
        temperature, mode = self.student.temperature, self.config.objective.temperature_mode
        bound = temperature.at_bound()
        if bound is not None and bound != self.bound:
            value = float(temperature.value().detach())
            text = f"the learned temperature is at its {bound}, {value:.3f}: --temperature-mode {mode} found no optimum"
            fields = {"bound": bound, "temperature": value, "mode": mode}
            self.writers.warning("temperature-bound", number, f"{text} inside the bounds", **fields)
        self.bound = bound

    def _resources(self, number: int) -> dict[str, float]:
        """MiB of memory by kind, and with a log line the GPU's utilization in the last second, in percent."""
        device, resources = self.student.device, {"memory_resident_mb": resident_mb()}
        if device.type == "cuda":
            resources["memory_allocated_mb"] = torch.cuda.memory_allocated(device) / 2**20
            resources["memory_reserved_mb"] = torch.cuda.memory_reserved(device) / 2**20
        if self.utilization_known and _due(number, self.config.monitor.log_freq):
            try:
                resources["gpu_utilization"] = float(torch.cuda.utilization(device))
            except Exception as error:  # NVML's bindings fail in many ways, without NVML or the permission to use it
                self.utilization_known = False
                missing = isinstance(error, ModuleNotFoundError)
                why = "pip install 'kdtrain[gpu]' brings nvidia-ml-py, which reads it" if missing else one_line(error)
                log.info("no gpu_utilization in metrics.jsonl: %s", why)
        return resources


def _due(number: int, every: int) -> bool:
    return every > 0 and number % every == 0
