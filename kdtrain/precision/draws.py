"""Random numbers of ranks that draw the same, but for parts: masks of heads, rounding of gradients of a part.

All ranks that compute a forward together seed their generators alike. What each has a part of draws from generators
that are seeded for the time being by the next common number and the rank: nothing else has a state, so that a
checkpoint, a resumed run and a layer that is computed again draw what was drawn.
"""

import torch


class DrawsApart:
    """Gives each of several ranks, which draw the same random numbers before and after, numbers of its own.

    Within a block, or for hooks from `begin` to `end`; nothing waits for an end that a forward leaves out. They follow
    from the state of the CPU's generator, which a repeated forward restores.

    Args:
        number: of this rank among them.
        device: whose numbers, besides the CPU's.
    """

    def __init__(self, number: int, device: torch.device) -> None:
        self.number, self.device = number, device

    def begin(self) -> None:
        """Draw numbers of this rank's own from now on."""
        common = int(torch.randint(2**62, ()))
        self.on_cpu = torch.get_rng_state()
        self.on_gpu = torch.cuda.get_rng_state(self.device) if self.device.type == "cuda" else None
        torch.manual_seed(common + self.number)

    def end(self) -> None:
        """Draw the same numbers as the other ranks again."""
        torch.set_rng_state(self.on_cpu)
        if self.on_gpu is not None:
            torch.cuda.set_rng_state(self.on_gpu, self.device)

    def __enter__(self) -> None:
        self.begin()

    def __exit__(self, *error: object) -> None:
        self.end()
