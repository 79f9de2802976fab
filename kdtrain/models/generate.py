"""Continues prompts with a model, token by token.

Sampling uses its own generator with the same seed each time, so that two samples of a run differ by what the student
learned in between. There is no KV cache: this works with every kind of model, at the price of a whole forward a token.

Shape suffixes: B rows, T tokens so far, V vocabulary.
"""

from collections.abc import Callable, Iterator

import torch


@torch.no_grad()
def generate(
    next_logits: Callable[[torch.Tensor], torch.Tensor],
    prompts_BT: torch.Tensor,
    tokens: int,
    temperature: float,
    seed: int,
) -> Iterator[torch.Tensor]:
    """Yield up to `tokens` tokens [B] after the prompts, each as soon as it is drawn.

    Args:
        next_logits: the model: tokens_BT -> logits_BV of the next token.
        prompts_BT: int64, all of the same length.
        tokens: how many tokens to add.
        temperature: divides the logits; 0 takes the most likely token.
        seed: of the sampled tokens.
    """
    generator = torch.Generator(prompts_BT.device).manual_seed(seed)
    for _ in range(tokens):
        logits_BV = next_logits(prompts_BT)
        if temperature == 0:
            drawn_B1 = logits_BV.argmax(-1, keepdim=True)
        else:
            # the largest is 0, so that no temperature overflows; fp64 holds 1e-100, which draws the most likely token
            scaled_BV = (logits_BV - logits_BV.amax(-1, keepdim=True)).double() / max(temperature, 1e-100)
            drawn_B1 = torch.multinomial(torch.softmax(scaled_BV, -1).float(), 1, generator=generator)
        prompts_BT = torch.cat([prompts_BT, drawn_B1], dim=1)
        yield drawn_B1[:, 0]
