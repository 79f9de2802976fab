"""Continues prompts with a model, greedily and by sampling.

Sampling uses its own generator with the same seed each time, so that two samples of a run differ by what the student
learned in between. There is no KV cache: this works with every kind of model, at the price of a whole forward a token.

Shape suffixes: B rows, T tokens so far, V vocabulary.
"""

from collections.abc import Callable, Iterator

import torch

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


def continue_text(
    next_logits: NextLogits, prompt_BT: torch.Tensor, tokens: int, temperature: float, seed: int
) -> Iterator[int]:
    """Yield up to `tokens` tokens after a prompt of one row, each as soon as it is drawn.

    Args:
        next_logits: the model.
        prompt_BT: int64 [1, T].
        tokens: how many tokens to add.
        temperature: divides the logits; 0 takes the most likely token.
        seed: of the sampled tokens.
    """
    generator = torch.Generator(prompt_BT.device).manual_seed(seed)
    for _ in range(tokens):
        logits_BV = next_logits(prompt_BT)
        if temperature == 0:
            drawn = logits_BV.argmax(-1, keepdim=True)
        else:
            # the largest is 0, so that no temperature overflows; fp64 holds 1e-100, which draws the most likely token
            scaled = (logits_BV - logits_BV.max()).double() / max(temperature, 1e-100)
            drawn = torch.multinomial(torch.softmax(scaled, -1).float(), 1, generator=generator)
        prompt_BT = torch.cat([prompt_BT, drawn], dim=1)
        yield int(drawn)
