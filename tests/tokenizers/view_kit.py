"""Caches that students with other tokenizers get views of, for the tests of views."""

import torch

from kdtrain.cache.format.manifest import CacheSettings
from kdtrain.cache.format.spec import CodecSpec
from kdtrain.cache.write.writer import write_cache
from kdtrain.data.corpus import Document
from kdtrain.data.packing import pack
from kdtrain.library import Cache
from kdtrain.models.tokenizer import tokenizer_digest
from tests.token_kinds import TEXTS, train

SEQ_LEN = 12
ROWS = 4
"""Of a view's shard."""
CODECS = {"samples": (0, 20), "top-k": (5, 0)}
"""Top-k entries and samples of the caches."""


def packed(texts, tokenizer, seq_len=SEQ_LEN):
    return list(pack([Document(f"{n}", text=each) for n, each in enumerate(texts)], tokenizer, seq_len))


def made_cache(folder, tokenizer, splits, seq_len=SEQ_LEN, data=None, **codec):
    """Make a cache of a teacher whose logits stand in a random table, by the last token.

    The kind `tokens` has no teacher.
    """
    size = len(tokenizer)
    settings = CacheSettings(
        codec=CodecSpec(vocab_size=size, **codec),
        seq_len=seq_len,
        tokenizer_size=size,
        tokenizer_digest=tokenizer_digest(tokenizer),
        sequences_per_shard=8,
        data={"source": "texts", **(data or {})},
    )
    table = 2 * torch.randn(size, size, generator=torch.Generator().manual_seed(1))
    teacher = None if settings.codec.kind == "tokens" else lambda tokens, _: table[tokens]
    write_cache(folder, settings, splits, teacher=teacher, batch_size=3, tokenizer=tokenizer)
    return Cache(folder)


def foreign_cache(folder, top_k, num_samples):
    """Make a cache of a teacher with a tokenizer of the Llama 3 kind."""
    tokenizer = train("llama3")
    splits = {split: packed(texts, tokenizer) for split, texts in (("train", TEXTS * 2), ("validation", TEXTS[:2]))}
    return made_cache(folder, tokenizer, splits, kind="sparse", top_k=top_k, num_samples=num_samples)
