"""Last-word accuracy: how often a model writes the last word of a passage, greedily, given the rest.

The measure of LAMBADA (Paperno et al., "The LAMBADA dataset", ACL 2016) on any text. A word is the longest run of
letters, digits and underscores, and what follows the last one is cut off. It is right if each of its tokens is the most
likely one after those before it, as greedy decoding would write it; the word's tokens are those that reach into it, so
that the space before it may belong to them.
"""

import re
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor

from kdtrain.data.formats import Document
from kdtrain.errors import UsageError

_WORDS = re.compile(r"\w+")
Logits = Callable[[Tensor], Tensor]
"""tokens_BT -> logits_BTV."""


def passages(documents: Iterable[Document], tokenizer: Any, seq_len: int) -> Iterator[tuple[list[int], int]]:
    """Yield each passage's tokens up to its last word's end, the last `seq_len` at most, and how many are the word's.

    UsageError: a row is a conversation, has no last word after others, or none of the other words within `seq_len`.
    """
    for document in documents:
        if document.text is None:
            raise UsageError(f"{document.key}: a conversation is not a passage; --last-word takes rows of text")
        words = list(_WORDS.finditer(document.text))
        if len(words) < 2:
            raise UsageError(f"{document.key} has no last word after others; --last-word takes passages")
        last = words[-1]
        coded = tokenizer(document.text[: last.end()], return_offsets_mapping=True, add_special_tokens=False)
        ids = coded["input_ids"]
        ends = [end for _, end in coded["offset_mapping"]]
        own = sum(end > last.start() for end in ends)
        if own >= min(len(ids), seq_len):
            raise UsageError(
                f"{document.key}: its last word alone has {own} tokens; raise --seq-len, or leave the row out"
            )
        yield ids[-seq_len:], own


def is_right(logits: Logits, tokens: list[int], own: int, device: torch.device) -> bool:
    """Return whether a model writes the last `own` of `tokens` greedily after the others."""
    tokens_BT = torch.tensor([tokens], device=device)
    with torch.no_grad():
        likely_T = logits(tokens_BT[:, :-1])[0, -own:].argmax(-1)
    return bool((likely_T == tokens_BT[0, -own:]).all())
