"""Builds a cache of N sequences, or reads it at random, and prints the peak memory in MiB: ACTION FOLDER N."""

import sys

import numpy as np
import torch

from kdtrain.cache.codec import CodecSpec
from kdtrain.cache.provenance import CacheSettings
from kdtrain.cache.reader import CacheReader
from kdtrain.cache.writer import write_cache
from kdtrain.data.packing import PackedRow
from kdtrain.parallel.world import peak_memory_mb

SEQ_LEN, VOCAB_SIZE, PER_SHARD = 256, 300, 40


def build(folder: str, sequences: int) -> None:
    random = np.random.RandomState(0)
    table = torch.randn(VOCAB_SIZE, VOCAB_SIZE, generator=torch.Generator().manual_seed(0))
    ones, zeros = np.ones(SEQ_LEN, dtype=bool), np.zeros(SEQ_LEN, dtype=np.int32)
    rows = (PackedRow(random.randint(0, VOCAB_SIZE, SEQ_LEN + 1), ones, zeros) for _ in range(sequences))
    codec = CodecSpec(kind="sparse", vocab_size=VOCAB_SIZE, head=12)
    facts = {"seq_len": SEQ_LEN, "tokenizer_size": VOCAB_SIZE, "sequences_per_shard": PER_SHARD}
    settings = CacheSettings(codec=codec, **facts)
    write_cache(folder, settings, {"train": rows}, teacher=lambda tokens_BT, _: table[tokens_BT], batch_size=8)


def read(folder: str, sequences: int) -> None:
    reader = CacheReader(folder, "train")
    assert len(reader) == sequences
    order = np.random.RandomState(1).permutation(sequences)
    for start in range(0, sequences, 8):
        reader.read(order[start : start + 8])


if __name__ == "__main__":
    {"build": build, "read": read}[sys.argv[1]](sys.argv[2], int(sys.argv[3]))
    print(peak_memory_mb(torch.device("cpu")))
