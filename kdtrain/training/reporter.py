"""What a run observes about itself while it trains: its health, its histograms and what its student writes.

Nothing here changes the training: no random number of it is drawn, no gradient touched, and nothing survives a restart,
so that what is logged once a process is logged again by the next one. Between the steps that are due it costs the
reading of one file of /proc.

Signs that a run is not well are pure functions of its numbers: each returns a line, or None. A learned temperature on
one of its bounds is no longer learned: the loss wants it further away than it may go. `minimize` ends there by its
nature (docs/temperature.md).

The student writes by continuing a few prompts of the validation split, greedily and by sampling. The sampling draws
from a generator of its own with the same seed each time, so that two samples differ by what the student has learned in
between. There is no cache of keys and values: every kind of model can write, at the price of a whole forward a token.

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
from kdtrain.monitor.progress import status
from kdtrain.monitor.writers import Writers
from kdtrain.parallel.parallelize import peaks, reshard
from kdtrain.precision.modes import autocast
from kdtrain.ranks import memory_mb, resident_mb
from kdtrain.training.data import Source
from kdtrain.training.student import Student

NextLogits = Callable[[torch.Tensor], torch.Tensor]
"""tokens_BT -> logits_BV of the token after the last one."""


@torch.no_grad()
def generate(next_logits: NextLogits, prompts_BT: torch.Tensor, tokens: int, seed: int) -> tuple[torch.Tensor, ...]:
    """Continue each prompt by `tokens` tokens: greedily, and sampled at temperature 1; both int64 [B, tokens].

    Args:
        next_logits: the model.
        prompts_BT: int64, all of one length.
        tokens: how many are added.
        seed: of the samples.
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
    """The share of the last steps whose gradient was clipped; above a tenth the learning rate is too high.

    Args:
        clip: largest norm of a gradient; 0 clips nothing.
        window: steps counted.
    """

    limit = 0.1

    def __init__(self, clip: float, window: int = 100) -> None:
        self.clip = clip
        self.steps: deque[bool] = deque(maxlen=window)
        self.warned = False

    @property
    def share(self) -> float:
        """0 to 1; 0 before the first step."""
        return sum(self.steps) / len(self.steps) if self.steps else 0.0

    def add(self, norm: float) -> str | None:
        """Count a step whose gradient had `norm`; the warning when a full window gets over the limit."""
        self.steps.append(0 < self.clip < norm)
        over = len(self.steps) == self.steps.maxlen and self.share > self.limit
        news, self.warned = over and not self.warned, over
        if not news:
            return None
        return (
            f"the gradient was clipped in {self.share:.0%} of the last {len(self.steps)} steps (above --clip "
            f"{self.clip:g}); more than {self.limit:.0%} says that the steps are too long: lower --lr"
        )


class LearnedSamples:
    """Whether the student has learned the samples in its targets by heart, said once.

    A divergence is at least 0, and so is the mean of its estimates from fresh samples. A cache's samples are the same
    in every epoch: a student that fits them brings the estimate to 0 and below while it moves away from the teacher.

    Args:
        samples: entries drawn for a token; with 0 there is nothing to be learned.
        window: steps in the mean.
    """

    def __init__(self, samples: int, window: int = 50) -> None:
        self.samples = samples
        self.steps: deque[float] = deque(maxlen=window)
        self.warned = False

    @property
    def mean(self) -> float:
        """Of the divergence in the last steps, nats; infinite before there are enough."""
        return math.fsum(self.steps) / len(self.steps) if len(self.steps) == self.steps.maxlen else math.inf

    def add(self, divergence: float, epochs: float) -> str | None:
        """Take the divergence of a step, a mean over its tokens; the warning when the window's mean is 0 or less."""
        if not self.samples or not math.isfinite(divergence):
            return None
        self.steps.append(divergence)
        if self.warned or self.mean > 0:
            return None
        self.warned = True
        return (
            f"the divergence from the teacher is {self.mean:.3f} nats over the last {len(self.steps)} steps, and fresh "
            f"samples give none below 0: after {epochs:.1f} epochs the student has learned the {self.samples} samples "
            "a token by heart; cache more text, or with a larger --top-k or --num-samples, or train fewer steps"
        )


class MemoryGrowth:
    """How much more memory a process holds than after its warm-up; more than half again is said once.

    The reference is taken after `warmup` steps of the process, and again behind the first checkpoint and the first
    validation, whose buffers stay.

    Args:
        first: the first step of this process.
        warmup: steps until the memory is expected to be settled.
        every: numbers of steps between what settles it anew (checkpoints, validations).
    """

    limit = 0.5

    def __init__(self, first: int, warmup: int = 50, every: Iterable[int] = ()) -> None:
        warm = first + warmup - 1
        self.settles = {warm + 1, *(max(warm, -(-first // each) * each) + 1 for each in every)}
        self.reference: float | None = None
        self.warned = False

    def add(self, step: int, held: float) -> tuple[float, str | None]:
        """MiB above the reference (0 before there is one) when `held` MiB are held in `step`, and the warning."""
        if step in self.settles:
            self.reference = held
        if not self.reference:
            return 0.0, None
        grown = held - self.reference
        if self.warned or grown <= self.limit * self.reference:
            return grown, None
        self.warned = True
        return grown, (
            f"the process holds {held:,.0f} MiB, {grown:,.0f} more than after its warm-up; if it goes on growing "
            "something leaks, and the run can be stopped and gone on with"
        )


@dataclass(frozen=True)
class Gradients:
    """The parameters whose gradient is no good, by name."""

    missing: list[str] = field(default_factory=list)
    """Without one: they took no part in the loss."""
    zero: list[str] = field(default_factory=list)
    """All of it 0: they take part, and nothing they do matters."""
    broken: list[str] = field(default_factory=list)
    """Some of it nan or inf."""
    good: int = 0
    """Parameters whose gradient is finite and not all 0."""

    def lines(self) -> list[str]:
        """A line for each kind that there is."""
        kinds = (
            (self.broken, "a gradient that is not finite"),
            (self.missing, "no gradient: nothing they do reaches the loss"),
            (self.zero, "a gradient of nothing but zeros: they will not learn"),
        )
        return [f"{_count(names)} {text} ({_first(names)})" for names, text in kinds if names]


def gradients_of(module: nn.Module) -> Gradients:
    """Look at the gradient of every parameter that wants one; waits for the device once."""
    wanting = {name: each for name, each in module.named_parameters() if each.requires_grad}
    there = {name: each.grad for name, each in wanting.items() if each.grad is not None}
    largest = peaks(list(there.values())).tolist() if there else []
    by_name = dict(zip(there, largest, strict=True))
    return Gradients(
        missing=[name for name in wanting if name not in there],
        zero=[name for name, size in by_name.items() if size == 0],
        broken=[name for name, size in by_name.items() if not math.isfinite(size)],
        good=sum(math.isfinite(size) and size > 0 for size in by_name.values()),
    )


def initial_loss(loss: float, vocab_size: int, init: str) -> tuple[bool, str]:
    """Whether the cross-entropy before the first step is what it should be, and a line that says so.

    Args:
        loss: nats a token.
        vocab_size: V; knowing nothing costs ln V.
        init: where the weights come from, as a spec says it. From scratch they know nothing: the loss is ln V, and up
            to a tenth more where random logits are wide. Pretrained ones are below. Others may be anywhere.
    """
    even = math.log(vocab_size)
    text = f"initial loss {loss:.3f} nats a token, ln V is {even:.3f}"
    if not math.isfinite(loss):
        return False, f"{text}: not finite; look at the weights and the data"
    if init == "scratch" and loss > 1.1 * even:
        return False, f"{text}: fresh weights are worse than knowing nothing; their scale is too large"
    if init == "scratch" and loss < 0.9 * even:
        return (
            False,
            f"{text}: fresh weights know too much; a label is seen before it is to be told, or they are not fresh",
        )
    if init == "pretrained" and loss > even:
        return False, f"{text}: a trained student is worse than knowing nothing; is the tokenizer its own?"
    return True, text


def _count(names: list[str]) -> str:
    return f"{len(names)} parameter{'s have' if len(names) > 1 else ' has'}"


def _first(names: list[str], most: int = 5) -> str:
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")


PROMPTS, PROMPT_TOKENS, NEW_TOKENS = 3, 32, 48


class Sampler:
    """Asks the student to continue the first tokens of the first sequences of `source`.

    Args:
        student: what writes.
        source: the validation split; read once, at the first call.
        tokenizer: what makes text of tokens.
        seed: of the samples.
    """

    def __init__(self, student: Student, source: Source, tokenizer: PreTrainedTokenizerFast, seed: int) -> None:
        self.student, self.source, self.tokenizer, self.seed = student, source, tokenizer, seed
        self.prompts_BT: torch.Tensor | None = None
        self.tokens = 0

    def texts(self) -> list[dict[str, str]]:
        """Prompt, greedy and sampled continuation of each prompt; the student's mode is left as it was."""
        if self.prompts_BT is None:
            numbers = np.arange(min(PROMPTS, len(self.source)))
            tokens_BT = self.source.read(numbers).tokens
            seq_len = tokens_BT.shape[1] - 1
            prompt = max(1, min(PROMPT_TOKENS, seq_len // 2))
            self.prompts_BT, self.tokens = tokens_BT[:, :prompt], max(1, min(NEW_TOKENS, seq_len - prompt))
        training = self.student.training
        self.student.eval()
        try:
            both = generate(self._next_logits, self.prompts_BT, self.tokens, self.seed)
        finally:
            self.student.train(training)
            reshard(self.student.model)
        written = [self.tokenizer.batch_decode(tokens.tolist()) for tokens in (self.prompts_BT, *both)]
        return [dict(zip(("prompt", "greedy", "sampled"), row, strict=True)) for row in zip(*written, strict=True)]

    def _next_logits(self, tokens_BT: torch.Tensor) -> torch.Tensor:
        with self.student.switch.at("high"), autocast(self.student.mode, self.student.device):
            hidden_BTD = self.student.model(tokens_BT)
        return self.student.model.head(hidden_BTD[:, -1])[:, : self.student.vocab_size]


class Reporter:
    """What says how one run is doing.

    Args:
        config: every option.
        student: what is trained.
        writers: where numbers go.
        validation: where prompts come from.
        tokenizer: what makes text of tokens; without one there are no samples.
        init: where the student's weights come from, as its spec says it.
        finished: steps finished before this process.
        samples: entries drawn for a token of the targets.
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
        finished: int,
        samples: int = 0,
    ) -> None:
        self.config, self.student, self.writers, self.init = config, student, writers, init
        self.sampler = None if tokenizer is None else Sampler(student, validation, tokenizer, config.seed)
        self.clipped = ClippedShare(config.optimizer.clip)
        every = (config.checkpoint.checkpoint_freq, config.monitor.eval_freq)
        self.memory = MemoryGrowth(finished + 1, every=every)
        self.learned = LearnedSamples(samples)
        self.looked = False
        self.bound: str | None = None
        self.utilization_known = student.device.type == "cuda"

    def initial(self, loss: float) -> None:
        """Say whether the first validation, before any step, is what it should be; `loss` in nats a token."""
        sound, text = initial_loss(loss, self.student.vocab_size, self.init)
        if not sound:
            self.writers.warning("initial-loss", 0, text)

    def backward(self, number: int) -> None:
        """After a step's last backward, before clipping: name the parameters without a sound gradient, once."""
        if self.looked:
            return
        self.looked = True
        for text in gradients_of(self.student.model).lines():
            self.writers.warning("gradients", number, text)

    def gradients(self, number: int) -> None:
        """Before the optimizer's step, the gradients clipped: show their distributions where they are due."""
        if _due(number, self.config.monitor.histogram_freq):
            tensors: dict[str, torch.Tensor] = {}
            for name, each in self.student.model.named_parameters():
                tensors[f"parameters/{name}"] = each
                if each.grad is not None:
                    tensors[f"gradients/{name}"] = each.grad
            self.writers.histograms(number, tensors)

    def finished(self, number: int, numbers: Mapping[str, float], checkpoint: int, epochs: float) -> str:
        """After step `number`: its numbers written, samples where due, warnings, and the line of the step.

        Args:
            number: the step.
            numbers: what is known of it, by the names of metrics.jsonl.
            checkpoint: the step of the last checkpoint, or where there is none the one that the run began at.
            epochs: passes over the training split until now.
        """
        if self.sampler is not None and _due(number, self.config.monitor.sample_freq):
            self.writers.samples(number, self.sampler.texts())
        norm = numbers.get("grad_norm", math.nan)
        often = self.clipped.add(norm)
        share = {"clipped_share": self.clipped.share} if self.config.optimizer.clip else {}
        self.writers.metrics(number, {**numbers, **share, **self._resources(number)})
        held = memory_mb(self.student.device)
        grown, leak = self.memory.add(number, held)
        if leak is not None:
            self.writers.warning("memory-growth", number, leak)
        by_heart = self.learned.add(numbers.get("kd", math.nan), epochs)
        if by_heart is not None:
            facts = {"epochs": round(epochs, 2), "samples": self.learned.samples, "divergence": self.learned.mean}
            self.writers.warning("learned-samples", number, by_heart, **facts)
        if often is not None:
            self.writers.warning("clipped", number, often)
        own = {"ckpt": checkpoint - number, "memory_mb": held, "mem_delta": grown, "mode": self.student.present_mode}
        return status({**numbers, **own})

    def temperature(self, number: int) -> None:
        """After step `number`: name a bound that a learned T sits on, once until it leaves. Reads the device.

        A resumed run names it once more.
        """
        temperature, mode = self.student.temperature, self.config.objective.temperature_mode
        bound = temperature.at_bound()
        if bound is not None and bound != self.bound:
            value = float(temperature.value().detach())
            text = f"the learned temperature sits on its {bound}, {value:.3f}: --temperature-mode {mode} found nothing"
            facts = {"bound": bound, "temperature": value, "mode": mode}
            self.writers.warning("temperature-bound", number, f"{text} inside the bounds", **facts)
        self.bound = bound

    def _resources(self, number: int) -> dict[str, float]:
        """MiB of memory by kind, and where a line is due how busy the GPU was in the last second, in percent."""
        device, found = self.student.device, {"memory_resident_mb": resident_mb()}
        if device.type == "cuda":
            found["memory_allocated_mb"] = torch.cuda.memory_allocated(device) / 2**20
            found["memory_reserved_mb"] = torch.cuda.memory_reserved(device) / 2**20
        if self.utilization_known and _due(number, self.config.monitor.log_freq):
            try:
                found["gpu_utilization"] = float(torch.cuda.utilization(device))
            except Exception:  # each of NVML's bindings fails in ways of its own where NVML, or the right to it, lacks
                self.utilization_known = False
        return found


def _due(number: int, every: int) -> bool:
    return every > 0 and number % every == 0
