"""What a run looks at in itself while it trains: its health, its distributions and what its student writes.

Nothing of it changes the training: no random number is drawn, no gradient touched. Between the steps that are due it
costs the reading of one file of /proc.
"""

import math
from collections.abc import Mapping

import torch
from transformers import PreTrainedTokenizerFast

from kdtrain.config import DistillConfig
from kdtrain.monitor.progress import status
from kdtrain.monitor.writers import Writers
from kdtrain.parallel.sharded import joiner
from kdtrain.parallel.world import local, memory_mb, resident_mb
from kdtrain.training.health import ClippedShare, LearnedSamples, MemoryGrowth, gradients_of, initial_loss
from kdtrain.training.samples import Sampler
from kdtrain.training.source import Source
from kdtrain.training.step import DistillStep


class Reporter:
    """What says how one run is doing.

    Args:
        config: every option.
        step: the student and its forward.
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
        step: DistillStep,
        writers: Writers,
        validation: Source,
        tokenizer: PreTrainedTokenizerFast | None,
        *,
        init: str,
        finished: int,
        samples: int = 0,
    ) -> None:
        self.config, self.step, self.writers, self.init = config, step, writers, init
        self.sampler = None if tokenizer is None else Sampler(step, validation, tokenizer, config.seed)
        self.clipped = ClippedShare(config.optimizer.clip)
        every = (config.checkpoint.checkpoint_freq, config.monitor.eval_freq)
        self.memory = MemoryGrowth(finished + 1, every=every)
        self.learned = LearnedSamples(samples)
        self.looked = False
        self.utilization_known = step.device.type == "cuda"

    def initial(self, loss: float) -> None:
        """Say whether the first validation, before any step, is what it should be; `loss` in nats a token."""
        sound, text = initial_loss(loss, self.step.vocab_size, self.init)
        if not sound:
            self.writers.warning("initial-loss", 0, text)

    def backward(self, number: int) -> None:
        """After a step's last backward, before clipping: name the parameters without a sound gradient, once."""
        if self.looked:
            return
        self.looked = True
        for text in gradients_of(self.step.student).lines():
            self.writers.warning("gradients", number, text)

    def gradients(self, number: int) -> None:
        """Before the optimizer's step, the gradients clipped: show their distributions where they are due."""
        if _due(number, self.config.monitor.histogram_freq):
            named = dict(self.step.student.named_parameters())
            tensors: dict[str, torch.Tensor] = {f"parameters/{name}": local(each) for name, each in named.items()}
            there = {name: each.grad for name, each in named.items() if each.grad is not None}
            tensors |= {f"gradients/{name}": local(each) for name, each in there.items()}
            self.writers.histograms(number, tensors, joiner(list(named.values())))

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
        held = memory_mb(self.step.device)
        grown, leak = self.memory.add(number, held)
        if leak is not None:
            self.writers.warning("memory-growth", number, leak)
        by_heart = self.learned.add(numbers.get("kd", math.nan), epochs)
        if by_heart is not None:
            facts = {"epochs": round(epochs, 2), "samples": self.learned.samples, "divergence": self.learned.mean}
            self.writers.warning("learned-samples", number, by_heart, **facts)
        if often is not None:
            self.writers.warning("clipped", number, often)
        own = {"ckpt": checkpoint - number, "memory_mb": held, "mem_delta": grown, "mode": self.step.present_mode}
        return status({**numbers, **own})

    def _resources(self, number: int) -> dict[str, float]:
        """MiB of memory by kind, and where a line is due how busy the GPU was in the last second, in percent."""
        device, found = self.step.device, {"memory_resident_mb": resident_mb()}
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
