"""What the student writes: a few prompts, each continued greedily and by sampling.

The sampling draws from a generator of its own with the same seed each time: training's random numbers are not touched,
and two samples differ by what the student has learned in between. There is no cache of keys and values: every kind of
model can be asked, at the price of a whole forward a token.

Shape suffixes: B rows, T tokens so far, V vocabulary.
"""

from collections.abc import Callable

import torch

NextLogits = Callable[[torch.Tensor], torch.Tensor]
"""tokens_BT -> logits_BV of the token after the last one."""


@torch.no_grad()
def generate(next_logits: NextLogits, prompts_BT: torch.Tensor, tokens: int, seed: int) -> tuple[torch.Tensor, ...]:
    """Continue each prompt by `tokens` tokens: greedily, and sampled at temperature 1; both int64 [B, tokens].

    Args:
        next_logits: the model.
        prompts_BT: int64, all of one length.
        tokens: how many are added.
        seed: of the draws.
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
