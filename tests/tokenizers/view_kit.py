"""A cache that students with other tokenizers get views of, for the tests of views."""

import torch

from kdtrain.cache.build.writer import write_cache
from kdtrain.cache.format.codec import CodecSpec
from kdtrain.cache.format.manifest import CacheSettings
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


def foreign_cache(folder, top_k, num_samples):
    """Of a teacher with a tokenizer of the Llama 3 kind."""
    tokenizer = train("llama3")
    size = len(tokenizer)
    codec = CodecSpec(kind="sparse", vocab_size=size, top_k=top_k, num_samples=num_samples)
    settings = CacheSettings(
        codec=codec,
        seq_len=SEQ_LEN,
        tokenizer_size=size,
        tokenizer_digest=tokenizer_digest(tokenizer),
        sequences_per_shard=8,
        data={"source": "texts"},
    )
    texts = {"train": TEXTS * 2, "validation": TEXTS[:2]}
    splits = {
        split: pack([Document(f"{n}", text=each) for n, each in enumerate(found)], tokenizer, SEQ_LEN)
        for split, found in texts.items()
    }
    table = 2 * torch.randn(size, size, generator=torch.Generator().manual_seed(1))
    write_cache(folder, settings, splits, teacher=lambda tokens, _: table[tokens], batch_size=3, tokenizer=tokenizer)
    return Cache(folder)
