"""What a run looks at in itself while it trains: its health, its distributions and what its student writes.

Nothing of it changes the training: no random number is drawn, no gradient touched. Between the steps that are due it
costs the reading of one file of /proc.
"""

import math
from collections.abc import Mapping

import torch
from transformers import PreTrainedTokenizerFast

from kdtrain.config import DistillConfig
from kdtrain.monitor.progress import log, status
from kdtrain.monitor.writers import Writers
from kdtrain.parallel.sharded import joiner
from kdtrain.parallel.world import local, memory_mb
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

    def initial(self, loss: float) -> None:
        """Say whether the first validation, before any step, is what it should be; `loss` in nats a token."""
        sound, text = initial_loss(loss, self.step.vocab_size, self.init)
        if not sound:
            log.warning(text)

    def backward(self) -> None:
        """After a step's last backward, before clipping: name the parameters without a sound gradient, once."""
        if self.looked:
            return
        self.looked = True
        for text in gradients_of(self.step.student).lines():
            log.warning(text)

    def gradients(self, number: int) -> None:
        """Before the optimizer's step, the gradients clipped: show their distributions where they are due."""
        if _due(number, self.config.monitor.histogram_freq):
            named = dict(self.step.student.named_parameters())
            tensors: dict[str, torch.Tensor] = {f"parameters/{name}": local(each) for name, each in named.items()}
            there = {name: each.grad for name, each in named.items() if each.grad is not None}
            tensors |= {f"gradients/{name}": local(each) for name, each in there.items()}
            self.writers.histograms(number, tensors, joiner(list(named.values())))

    def finished(self, number: int, numbers: Mapping[str, float], checkpoint: int, epochs: float) -> str:
        """After step `number`: samples where due, warnings, and the line of the step.

        Args:
            number: the step.
            numbers: what is known of it, by the names of metrics.jsonl.
            checkpoint: the step of the last checkpoint, or where there is none the one that the run began at.
            epochs: passes over the training split until now.
        """
        if self.sampler is not None and _due(number, self.config.monitor.sample_freq):
            self.writers.samples(number, self.sampler.texts())
        held = memory_mb(self.step.device)
        grown, leak = self.memory.add(number, held)
        norm = numbers.get("grad_norm", math.nan)
        by_heart = self.learned.add(numbers.get("kd", math.nan), epochs)
        if by_heart is not None:
            facts = {"epochs": round(epochs, 2), "samples": self.learned.samples, "divergence": self.learned.mean}
            self.writers.event("learned-samples", number, **facts)
        for text in (self.clipped.add(norm), leak, by_heart):
            if text is not None:
                log.warning(text)
        own = {"ckpt": checkpoint - number, "memory_mb": held, "mem_delta": grown, "mode": self.step.present_mode}
        return status({**numbers, **own})


def _due(number: int, every: int) -> bool:
    return every > 0 and number % every == 0
