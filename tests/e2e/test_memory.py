"""What `distill` needs in memory does not grow with the cache."""

import numpy as np
import pytest
import torch

from kdtrain.cache.codec import CodecSpec
from kdtrain.cache.provenance import CacheSettings
from kdtrain.cache.writer import write_cache
from kdtrain.data.packing import PackedRow

SEQ_LEN = 128


def write(bench, name, sequences):
    """A cache of random tokens; 3,000 sequences are 7 MB on the disk and eight times that once decoded."""
    random = np.random.RandomState(0)

    def rows(number):
        for _ in range(number):
            tokens = random.randint(0, 300, SEQ_LEN + 1).astype(np.int32)
            yield PackedRow(tokens, np.ones(SEQ_LEN, dtype=bool), np.zeros(SEQ_LEN, dtype=np.int32))

    table = torch.randn(300, 300, generator=torch.Generator().manual_seed(0))
    settings = CacheSettings(
        codec=CodecSpec(kind="sparse", vocab_size=300, head=12),
        seq_len=SEQ_LEN,
        tokenizer_size=300,
        sequences_per_shard=100,
    )
    splits = {"train": rows(sequences), "validation": rows(4)}
    tokenizer = bench.root / "teacher"
    write_cache(bench.root / name, settings, splits, teacher=lambda tokens_BT, _: table[tokens_BT], tokenizer=tokenizer)


@pytest.mark.slow
def test_peak_memory_does_not_grow_with_the_number_of_sequences(bench):
    peaks = {}
    for sequences in (300, 3000):
        write(bench, f"of-{sequences}", sequences)
        argv = ("--cache", f"of-{sequences}", "--student", "student.toml", "--out", f"from-{sequences}", *bench.eager)
        # 190 steps of 16 read every sequence of the larger one
        done = bench.run("distill", *argv, "--steps", 190, "--batch-size", 16, "--micro-batch-size", 4, "--json")
        peaks[sequences] = done.json["peak_memory_mb"]
    decoded = 2700 * SEQ_LEN * 12 * (8 + 4) / 2**20  # ids and log-probabilities of the further sequences, in MiB
    tolerance = 0.02 * peaks[300]
    assert decoded > 3 * tolerance
    assert peaks[3000] < peaks[300] + tolerance
