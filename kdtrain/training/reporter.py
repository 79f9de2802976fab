"""Reports of a run while it trains: metrics, warnings, histograms and text samples.

The reporter does not change the training: it draws none of its random numbers and touches no gradient. Nothing in it
survives a restart, so that a warning given once a process is given again by the next one. A step without histogram or
sample costs the reading of one file of /proc.

A learned temperature at one of its bounds is no longer learned: the loss pushes it further than the bound allows.
`minimize` always ends at a bound (docs/temperature.md).

Shape suffixes: B rows, T tokens so far, D width.
"""

import math
import os
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence

import numpy as np
import torch
from torch import nn
from transformers import PreTrainedTokenizerFast

from kdtrain.config.commands import DistillConfig
from kdtrain.errors import first_sentence, log
from kdtrain.monitor.progress import Bar, StepText, Throughput
from kdtrain.monitor.rules import WINDOW, History, Signs, comparable, findings, free_mib, initial_loss, newest_mib
from kdtrain.monitor.writers import SilentWriters, Writers
from kdtrain.parallel.parallelize import peaks
from kdtrain.ranks import is_main, memory_mb, resident_mb
from kdtrain.training.observers import Observer
from kdtrain.training.schedule import validation_interval, warmup_steps
from kdtrain.training.sources.source import Source
from kdtrain.training.student import Student

_UNSOUND = {
    "non-finite": "a non-finite gradient",
    "without": "no gradient: they do not reach the loss",
    "zero": "a gradient of zeros: they will not learn",
}


def gradients_of(module: nn.Module) -> dict[str, list[str]]:
    """Return the trainable parameters by the kind of their gradient, `sound` or one of `_UNSOUND`.

    It waits for the device once.
    """
    trainable = {name: each for name, each in module.named_parameters() if each.requires_grad}
    gradients = {name: each.grad for name, each in trainable.items() if each.grad is not None}
    largest = peaks(list(gradients.values())).tolist() if gradients else []
    by_name = dict(zip(gradients, largest, strict=True))
    found: dict[str, list[str]] = {kind: [] for kind in ("sound", "without", "zero", "non-finite")}
    for name in trainable:
        size = by_name.get(name)
        if size is None:
            found["without"].append(name)
        elif not math.isfinite(size):
            found["non-finite"].append(name)
        elif size > 0:
            found["sound"].append(name)
        elif not by_name.get(name.replace("lora_A", "lora_B")):  # an adapter's A has none while its B is still zero
            found["zero"].append(name)
    return found


def unsound(module: nn.Module) -> Iterator[str]:
    """Yield one line for each kind of unsound gradient of the trainable parameters."""
    found = gradients_of(module)
    for kind, text in _UNSOUND.items():
        if names := found[kind]:
            have = "parameters have" if len(names) > 1 else "parameter has"
            more = f" and {len(names) - 5} more" if len(names) > 5 else ""
            yield f"{len(names)} {have} {text} ({', '.join(names[:5])}{more})"


_BUSY = 1.75
"""Load a core, over a minute, from which other processes take a run's time: a run alone has about 1."""
PROMPTS, PROMPT_TOKENS, NEW_TOKENS = 3, 32, 48


def sample_texts(
    student: Student, source: Source, tokenizer: PreTrainedTokenizerFast, seed: int
) -> list[dict[str, str]]:
    """Continue the first tokens of the first sequences of `source` with the student, whose mode does not change.

    Returns prompt, greedy and sampled continuation of each. seed: of the sampled tokens.
    """
    from kdtrain.models.generate import generate

    tokens_BT = source.read(np.arange(min(PROMPTS, len(source)))).tokens
    seq_len = tokens_BT.shape[1] - 1
    prompt = max(1, min(PROMPT_TOKENS, seq_len // 2))
    prompts_BT = tokens_BT[:, :prompt]
    count = max(1, min(NEW_TOKENS, seq_len - prompt))
    with student.decoding() as next_logits:
        continuations = [
            torch.stack([*generate(next_logits, prompts_BT, count, temperature, seed)], 1) for temperature in (0.0, 1.0)
        ]
    columns = [tokenizer.batch_decode(tokens.tolist()) for tokens in (prompts_BT, *continuations)]
    return [dict(zip(("prompt", "greedy", "sampled"), row, strict=True)) for row in zip(*columns, strict=True)]


class Reporter:
    """Reports how one run is doing; until `open`, nothing is written.

    Args:
        config: every option.
        student: the module in training.
        total: planned steps of the run.
        reads_ahead: whether the training data is read while the step before computes.
        term: what the teacher's part of the loss is called; by default the divergence.
    """

    def __init__(
        self, config: DistillConfig, student: Student, total: int, reads_ahead: bool = True, term: str | None = None
    ) -> None:
        self.config, self.student, self.total = config, student, total
        self.writers: Writers = SilentWriters(config.monitor)
        self.bar = Bar("distill", total, every=math.inf)
        self.rate = Throughput(total)
        self.init = ""
        self.texts: Callable[[], list[dict[str, str]]] | None = None
        self.reads_ahead = reads_ahead
        self.history = self._history(1, 0)
        self.gradients_checked = False
        self.bound: str | None = None
        self.utilization_known = student.device.type == "cuda"
        objective = config.objective
        router = student.router_weight
        hidden = objective.hidden_weight if student.hidden_loss is not None else None
        learned = any(each.requires_grad for each in student.temperature.parameters())
        self.text = StepText(objective.first_alpha, term or objective.divergence, hidden, learned, router)
        self.watches, self.busy = False, False
        self.wrong: dict[str, str] = {}
        """What is wrong now, by the kind of the warning."""
        self.steps: deque[Mapping[str, float]] = deque(maxlen=4 * WINDOW)
        self.validations: list[tuple[int, float]] = []
        self.teacher_loss: float | None = None

    def _history(self, first: int, samples: int) -> History:
        optimizer, frequency = self.config.optimizer, self.config.checkpoint.checkpoint_freq
        return History(
            first,
            clip=optimizer.clip,
            warmup=warmup_steps(self.total, optimizer),
            samples=samples,
            reads_ahead=self.reads_ahead,
            every=(frequency, validation_interval(self.total, self.config.monitor.eval_freq)),
        )

    def rewind(self, step: int) -> None:
        """Forget the steps after `step`, which a rollback undoes."""
        self.writers.rewind(step)
        self.validations = [each for each in self.validations if each[0] <= step]
        self.steps.clear()
        self.text.window.clear()

    def open(
        self,
        step: int,
        validated_step: int | None,
        *,
        init: str,
        texts: Callable[[], list[dict[str, str]]] | None = None,
        samples: int = 0,
        observers: Sequence[Observer] = (),
    ) -> None:
        """Open the run's logs and metrics; only rank 0 writes any.

        Args:
            step: steps finished before this process.
            validated_step: the last one with a validation.
            init: where the student's weights come from, as in its spec.
            texts: continues prompts, as `sample_texts`; without it there are no samples.
            samples: entries drawn for a token of the targets.
            observers: get the events of the run.
        """
        monitor = self.config.monitor
        if is_main():
            self.writers = Writers(self.config.out, step, validated_step, monitor, observers)
            self.watches = True
        self.history = self._history(step + 1, samples)
        self.init, self.texts = init, texts
        self.bar = Bar("distill", self.total, step, every=math.inf)

    def initial(self, loss: float) -> None:
        """Warn if the validation loss before the first step, nats per token, is implausible."""
        plausible, text = initial_loss(loss, self.student.vocab_size, self.init)
        if not plausible:
            self.writers.warning("initial-loss", 0, text)

    def backward(self, number: int) -> None:
        """Name the parameters without a sound gradient, once: after a step's last backward, before clipping."""
        if self.gradients_checked:
            return
        self.gradients_checked = True
        for text in unsound(self.student.model):
            self.writers.warning("gradients", number, text)

    def shows_gradients(self, number: int) -> bool:
        """Return whether histograms of step `number` are due."""
        return _due(number, self.config.monitor.eval_freq)

    def gradients(self, number: int) -> None:
        """Write histograms where they are due: after clipping, before the optimizer's step."""
        if self.shows_gradients(number):
            tensors: dict[str, torch.Tensor] = {}
            for name, each in self.student.model.named_parameters():
                if name in self.student.model.frozen:
                    continue
                tensors[f"parameters/{name}"] = each
                if each.grad is not None:
                    tensors[f"gradients/{name}"] = each.grad
            self.writers.histograms(number, tensors)

    def validated(self, step: int, loss: float, teacher_loss: float | None) -> None:
        """Take a validation's loss and the teacher's, nats per token."""
        if math.isfinite(loss):
            self.validations.append((step, loss))
        self.teacher_loss = teacher_loss

    def finished(self, number: int, numbers: Mapping[str, float], checkpoint: int, epochs: float) -> dict[str, str]:
        """Write the numbers, samples where due, and warnings of step `number`; return the parts of its line.

        Args:
            number: the step.
            numbers: the step's numbers, by the names of metrics.jsonl.
            checkpoint: the step of the last checkpoint, or the run's first step where there is none.
            epochs: passes over the training split so far.
        """
        if self.texts is not None and _due(number, self.config.monitor.sample_freq):
            self.writers.samples(number, self.texts())
        signs = self.history.add(number, numbers, memory_mb(self.student.device), epochs)
        share = {"clipped_share": signs.clipped_share} if self.config.optimizer.clip else {}
        age = number - checkpoint
        held = {"checkpoint_age": float(age), "memory_growth_mb": signs.grown_mib, **self._resources(number)}
        self.writers.metrics(number, {**numbers, **share, **held})
        for kind, text, fields in self.history.warnings(signs):
            self.writers.warning(kind, number, text, **fields)
        self.steps.append(numbers)
        if self.watches and _due(number, self.config.monitor.log_freq):
            self._check_health(number, numbers, checkpoint)
        parts = self.text.add(numbers)
        parts |= {"mode": self.student.present_mode} if self.config.quantization.time_resume else {}
        parts |= {"health": "! " + ", ".join(self.wrong)} if self.wrong else {}
        return parts | {"checkpoint": f"ckpt -{age}", "memory": f"mem {signs.grown_mib:+.0f} MiB"}

    def _check_health(self, number: int, numbers: Mapping[str, float], checkpoint: int) -> None:
        """Warn of signs of trouble that are new since the line before."""
        load = os.getloadavg()[0]
        cores = os.cpu_count() or 1
        if not self.busy and self.student.device.type == "cpu" and load > _BUSY * cores:
            self.busy = True
            log.info("load %.1f on %d cores: other processes slow this run", load, cores)
        rate = numbers.get("tok/s")
        out = self.config.out
        signs = Signs(
            step=number,
            step_seconds=numbers["tokens"] / rate if rate else None,
            saved_step=checkpoint,
            free_mib=free_mib(out),
            checkpoint_mib=newest_mib(out / "checkpoints"),
            losses=comparable(self.steps),
            validations=self.validations,
            teacher_loss=self.teacher_loss,
        )
        found = findings(signs, each_step=False)
        for kind in found.keys() - self.wrong.keys():
            self.writers.warning(kind, number, found[kind])
        self.wrong = found

    def temperature(self, number: int) -> None:
        """Warn after step `number` when a learned T reaches a bound, once until it leaves. Waits for the device.

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

    def saved_by_clock(self, number: int) -> None:
        """Note a checkpoint of step `number` that only the clock made due: a first save's buffers are no leak."""
        self.history.settle_after(number)

    def _resources(self, number: int) -> dict[str, float]:
        """Return MiB of memory by kind, and with a log line the GPU's utilization in the last second, in percent."""
        device = self.student.device
        resources = {"memory_resident_mb": resident_mb()}
        if device.type == "cuda":
            resources["memory_allocated_mb"] = torch.cuda.memory_allocated(device) / 2**20
            resources["memory_reserved_mb"] = torch.cuda.memory_reserved(device) / 2**20
        if self.utilization_known and _due(number, self.config.monitor.log_freq):
            try:
                resources["gpu_utilization"] = float(torch.cuda.utilization(device))
            except Exception as error:  # NVML's bindings fail in many ways, without NVML or the permission to use it
                self.utilization_known = False
                missing = isinstance(error, ModuleNotFoundError)
                why = (
                    "pip install 'kdtrain[gpu]' adds nvidia-ml-py, which reads it" if missing else first_sentence(error)
                )
                log.info("no gpu_utilization in metrics.jsonl: %s", why)
        return resources


def _due(number: int, every: int) -> bool:
    return every > 0 and number % every == 0
