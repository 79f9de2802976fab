"""The memory of `distill` does not grow with the cache."""

import numpy as np
import torch

from kdtrain.cache.format.manifest import CacheSettings
from kdtrain.cache.format.spec import CodecSpec
from kdtrain.cache.write.writer import write_cache
from kdtrain.data.packed import PackedRow

SEQ_LEN, SHARDS, KEPT, BATCH = 64, 17, 200, 16
SIZES = (85, 340)


def write(bench, name, sequences):
    """Write a cache of text that counts, soon learned: the smallest has as many open shards as the largest."""
    random = np.random.RandomState(0)

    def rows(number):
        for _ in range(number):
            tokens = ((random.randint(300) + np.arange(SEQ_LEN + 1)) % 300).astype(np.int32)
            yield PackedRow(tokens, np.ones(SEQ_LEN, dtype=bool), np.zeros(SEQ_LEN, dtype=np.int32))

    table = torch.randn(300, 300, generator=torch.Generator().manual_seed(0))
    settings = CacheSettings(
        codec=CodecSpec(kind="sparse", vocab_size=300, top_k=KEPT),
        seq_len=SEQ_LEN,
        tokenizer_size=300,
        sequences_per_shard=sequences // SHARDS,
    )
    splits = {"train": rows(sequences), "validation": rows(4)}
    tokenizer = bench.root / "teacher"
    write_cache(bench.root / name, settings, splits, teacher=lambda tokens_BT, _: table[tokens_BT], tokenizer=tokenizer)


def test_peak_memory_does_not_grow_with_the_number_of_sequences(forks):
    peaks = []
    for sequences in SIZES:
        write(forks, f"of-{sequences}", sequences)
        argv = ("--cache", f"of-{sequences}", "--student", "student.toml", "--out", f"from-{sequences}", *forks.eager)
        argv += ("--lr", 1e-2, "--warmup-steps", 0)
        steps = sequences // BATCH + 1  # reads every sequence
        done = forks.run("distill", *argv, "--steps", steps, "--batch-size", BATCH, "--micro-batch-size", 4, "--json")
        peaks.append(done.json["peak_memory_mb"])
    decoded = SEQ_LEN * KEPT * (8 + 4) / 2**20  # ids and log-probabilities of a sequence, in MiB
    # Seen: peaks within 2 MiB, where the sequences that the largest cache has more are 37 MiB decoded.
    assert (peaks[1] - peaks[0]) / (SIZES[1] - SIZES[0]) < 0.2 * decoded
