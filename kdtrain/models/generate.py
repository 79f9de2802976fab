"""Continues prompts with a split model, token by token.

A step reads one token and the keys and values of those before it (the KV cache of transformers), where that gives the
logits of a whole forward: `decoding` compares both on a short probe, once a model. A model that fails it, or takes no
cache, is read whole at each step, with the same text and more time. How far rounding may move the logits: a step sums
in another order than a forward, which in fp32 is 1e-6 to 1e-5 of their spread, and in bf16 a fiftieth of it; a lost or
misplaced key moves them by a share of the spread itself.

A draw is a function of the logits, the seed, the row and the position alone, whatever other rows are beside it.

What it gives up: frequencies of position that change with the length of a text (longrope) are not seen by a short
probe, so that such a model has no KV cache. Keys beyond a sliding window are held.

Shape suffixes: B rows, T tokens so far, V vocabulary.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext

import numpy as np
import torch
from torch import Tensor
from transformers import DynamicCache

from kdtrain.errors import log
from kdtrain.models.attention import CAUSAL, use_cached_attention
from kdtrain.models.head import FAILURES, SplitModel, default_probe

_PROBE = 16  # tokens; longer ones on a GPU cost memory
_APART = {False: 1e-3, True: 0.1}  # of the spread of the logits, by whether a forward rounds to 16 bits


class Decoder:
    """A split model as a decoder: it returns the next token's logits, and keeps the keys of its last call's tokens.

    Args:
        model: in evaluation mode.
        width: entries of the vocabulary that count.
        inside: makes the context of each forward, such as an autocast.
    """

    def __init__(self, model: SplitModel, width: int, inside: Callable[[], AbstractContextManager[object]]) -> None:
        self._model, self._width, self._inside = model, width, inside
        self._past = DynamicCache()
        self._held_BT = torch.empty(0, 0, dtype=torch.int64)

    @torch.no_grad()
    def __call__(self, tokens_BT: Tensor) -> Tensor:
        """Return logits [B, V] of the token behind `tokens_BT`; only what follows the last call's beginning is read."""
        if not self._model.keeps_keys:
            return self._logits(tokens_BT)[:, -1]
        past, held_BT = self._past, self._held_BT
        self._held_BT, same = held_BT[:0], 0  # if it is interrupted, some layers have new keys
        if len(held_BT) == len(tokens_BT):
            most = min(held_BT.shape[1], tokens_BT.shape[1] - 1)
            same = int((held_BT[:, :most] == tokens_BT[:, :most]).all(0).int().cumprod(0).sum())
        if same == 0:
            past = DynamicCache()
        elif same < held_BT.shape[1]:
            past.crop(same - held_BT.shape[1])
        logits_BV = self._logits(tokens_BT[:, same:], past)[:, -1]
        self._past, self._held_BT = past, tokens_BT
        return logits_BV

    def _logits(self, tokens_BT: Tensor, past: DynamicCache | None = None, last: int = 1) -> Tensor:
        """Return the logits of the last `last` tokens, [B, last, V]."""
        with self._inside():
            hidden_BTD = self._model(tokens_BT, past=past)
        return self._model.head(hidden_BTD[:, -last:])[..., : self._width]

    @torch.no_grad()
    def steps_agree(self) -> bool:
        """Compare a beginning, a piece and single tokens behind it, by their keys, with one forward over all."""
        if "longrope" in str(getattr(self._model.model.config.get_text_config(), "rope_parameters", "")):
            return False
        tokens_BT = default_probe(self._model.model)[:, :_PROBE]
        past = DynamicCache()
        cut = tokens_BT.shape[1] // 2
        length = tokens_BT.shape[1]
        whole_BTV = self._logits(tokens_BT, last=length - cut).float()
        pieces = [slice(cut, cut + 3), *(slice(at, at + 1) for at in range(cut + 3, length))]
        try:
            self._logits(tokens_BT[:, :cut], past)
            found = [self._logits(tokens_BT[:, each], past, last=each.stop - each.start) for each in pieces]
        except torch.OutOfMemoryError:
            raise
        except FAILURES:
            return False
        with self._inside():
            rounds = torch.is_autocast_enabled(tokens_BT.device.type)
        rounds = rounds or any(each.dtype.itemsize == 2 for each in self._model.parameters())
        apart = (torch.cat(found, 1).float() - whole_BTV).abs().mean()
        return bool(apart <= _APART[rounds] * whole_BTV.std(-1).mean())


@contextmanager
def decoding(
    model: SplitModel, width: int, inside: Callable[[], AbstractContextManager[object]] = nullcontext
) -> Iterator[Decoder]:
    """Yield the `Decoder` of a model, whose attention looks back at keys within the block, where the model has any."""
    whole = model.model
    decoder = Decoder(model, width, inside)
    causal = whole.config.get_text_config()._attn_implementation == CAUSAL
    try:
        if model.keeps_keys is not False:
            use_cached_attention(whole)
        if model.keeps_keys is None:
            model.keeps_keys = decoder.steps_agree()
            if not model.keeps_keys:
                log.info("%s: no KV cache gives its logits; each token takes a whole forward", type(whole).__name__)
                if causal:
                    whole.set_attn_implementation(CAUSAL)
        yield decoder
    finally:
        if causal:
            whole.set_attn_implementation(CAUSAL)


def generate(
    next_logits: Callable[[Tensor], Tensor],
    prompts_BT: Tensor,
    tokens: int,
    temperature: float,
    seed: int,
    first_row: int = 0,
    *,
    rows: Sequence[int] | None = None,
    top_p: float = 1.0,
) -> Iterator[Tensor]:
    """Yield up to `tokens` tokens [B] after the prompts, each as soon as it is drawn.

    Args:
        next_logits: the model: tokens_BT -> logits_BV of the next token, as a `Decoder`.
        prompts_BT: int64, all of the same length.
        tokens: how many tokens to add.
        temperature: divides the logits; 0 takes the most likely token.
        seed: of the sampled tokens.
        first_row: the number of the first row, for its draws.
        rows: the numbers of all rows, where they do not follow each other.
        top_p: draw from the most likely tokens that have this probability together.
    """
    numbers = range(first_row, first_row + len(prompts_BT)) if rows is None else rows
    chances = [np.random.default_rng([seed, row]) for row in numbers]
    for _ in range(tokens):
        chance_B = torch.tensor([each.random() for each in chances], dtype=torch.float64)
        drawn_B = draw(next_logits(prompts_BT), chance_B, temperature, top_p)
        prompts_BT = torch.cat([prompts_BT, drawn_B[:, None]], dim=1)
        yield drawn_B


def draw(logits_BV: Tensor, chance_B: Tensor, temperature: float, top_p: float = 1.0) -> Tensor:
    """Draw samples [B], by the inverse CDF at chances in [0, 1), of the likeliest entries that have `top_p` together.

    A row without a distribution gives any id.
    """
    if temperature == 0:
        return logits_BV.argmax(-1)
    # the largest is 0, so that no temperature overflows
    scaled_BV = (logits_BV - logits_BV.amax(-1, keepdim=True)).double() / max(temperature, 1e-100)
    weights_BV = scaled_BV.exp().nan_to_num()
    ids_BV = None
    if top_p < 1:
        weights_BV, ids_BV = torch.sort(weights_BV, dim=-1, descending=True, stable=True)
        before_BV = weights_BV.cumsum(-1) - weights_BV
        weights_BV = weights_BV.where(before_BV < top_p * weights_BV.sum(-1, keepdim=True), 0.0)
    cdf_BV = weights_BV.cumsum(-1)
    point_B1 = chance_B.to(cdf_BV.device)[:, None] * cdf_BV[:, -1:]
    last_B1 = weights_BV.shape[1] - 1 - (weights_BV.flip(-1) > 0).int().argmax(-1, keepdim=True)
    found_B1 = torch.searchsorted(cdf_BV, point_B1, right=True).minimum(last_B1)
    return (found_B1 if ids_BV is None else ids_BV.gather(1, found_B1))[:, 0]
