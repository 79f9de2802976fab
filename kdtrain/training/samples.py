"""The student asked to write: prompts from the validation split, continued now and then while it trains."""

import numpy as np
import torch
from transformers import PreTrainedTokenizerFast

from kdtrain.monitor.samples import generate
from kdtrain.parallel.wrap import reshard
from kdtrain.precision.modes import autocast
from kdtrain.training.source import Source
from kdtrain.training.step import DistillStep

PROMPTS, PROMPT_TOKENS, NEW_TOKENS = 3, 32, 48


class Sampler:
    """Asks the student of `step` to go on with the first tokens of the first sequences of `source`.

    Args:
        step: the student and how its forward runs.
        source: the validation split; read once, at the first call.
        tokenizer: what makes text of tokens.
        seed: of the draws.
    """

    def __init__(self, step: DistillStep, source: Source, tokenizer: PreTrainedTokenizerFast, seed: int) -> None:
        self.step, self.source, self.tokenizer, self.seed = step, source, tokenizer, seed
        self.prompt = max(1, min(PROMPT_TOKENS, step.seq_len // 2))
        self.tokens = max(1, min(NEW_TOKENS, step.seq_len - self.prompt))
        self.prompts_BT: torch.Tensor | None = None

    def texts(self) -> list[dict[str, str]]:
        """Prompt, greedy and sampled continuation of each prompt; the student's mode is left as it was."""
        if self.prompts_BT is None:
            numbers = np.arange(min(PROMPTS, len(self.source)))
            self.prompts_BT = self.source.read(numbers).tokens[:, : self.prompt]
        training = self.step.training
        self.step.eval()
        try:
            both = generate(self._next_logits, self.prompts_BT, self.tokens, self.seed)
        finally:
            self.step.train(training)
            reshard(self.step.student)
        written = [self.tokenizer.batch_decode(tokens.tolist()) for tokens in (self.prompts_BT, *both)]
        return [dict(zip(("prompt", "greedy", "sampled"), row, strict=True)) for row in zip(*written, strict=True)]

    def _next_logits(self, tokens_BT: torch.Tensor) -> torch.Tensor:
        with self.step.switch.at("high"), autocast(self.step.mode, self.step.device):
            hidden_BTD = self.step.student(tokens_BT)
        return self.step.student.head(hidden_BTD[:, -1])[:, : self.step.vocab_size]
