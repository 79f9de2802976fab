"""Prompts for a teacher to continue, a row each: of text its beginnings, of conversations all before the last answer.

A conversation that ends with the user is a prompt whole, and so is a row that has a prompt and no completion. What it
gives up: a conversation is one prompt, for its last answer; those for its earlier ones are not used.
"""

import itertools
import logging
from collections.abc import Iterator
from typing import TYPE_CHECKING

import numpy as np

from kdtrain.config import DataConfig
from kdtrain.data.corpus import documents_of
from kdtrain.data.masks import Masks
from kdtrain.data.packed import PackedRow
from kdtrain.data.packing import Encoder, packed_rows

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

log = logging.getLogger("kdtrain")


def prompt_rows(
    data: DataConfig,
    split_name: str,
    tokenizer: "PreTrainedTokenizerFast",
    limit: int | None,
    *,
    prompt_tokens: int | None,
    max_new_tokens: int | None,
    filler: int,
) -> Iterator[PackedRow]:
    """Yield the first `limit` prompts of a split, a row each, for the teacher to continue.

    prompt_tokens: of text, the prompts are the beginnings of its packed rows; None: of conversations, and of prompts
    with completions (`corpus.has_prompts`), they are what stands before the last answer, and one that fills a row is
    left out, with a warning. `loss_mask` is true for the labels that the teacher may write, and their tokens, like all
    behind them, are `filler`.

    UsageError: as `packed_rows`.
    """
    length = data.seq_len

    def row(prompt: list[int]) -> PackedRow:
        tokens, mask = np.full(length + 1, filler, dtype=np.int32), np.zeros(length, dtype=np.bool_)
        tokens[: len(prompt)] = prompt
        mask[len(prompt) - 1 :][:max_new_tokens] = True
        return PackedRow(tokens, mask, np.zeros(length, dtype=np.int32))

    if prompt_tokens is None:
        return itertools.islice(map(row, _before_answers(data, split_name, tokenizer)), limit)
    packed = packed_rows(data, split_name, tokenizer, limit)
    return (row(each.tokens[:prompt_tokens].tolist()) for each in packed)


def _before_answers(data: DataConfig, split_name: str, tokenizer: "PreTrainedTokenizerFast") -> Iterator[list[int]]:
    """What stands before the last answer of each document, where it leaves room for one."""
    masks, wide = Masks("", data.seq_len), 0
    encoder = Encoder(tokenizer, masks, opening=True, parse=data.parse_special_tokens)
    try:
        for each in documents_of(data, split_name, prompts=True):
            prompt = encoder.prompt(each)
            wide += len(prompt) > data.seq_len
            if 0 < len(prompt) <= data.seq_len:
                yield prompt
        masks.refuse_none()
    finally:
        encoder.close()
        if wide:
            log.warning("%s: left out %s conversations whose prompt fills --seq-len %s", split_name, wide, data.seq_len)
        if masks.refused:
            log.warning("%s: left out %s conversations that the chat template refuses", split_name, masks.refused)
