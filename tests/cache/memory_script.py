"""Builds a cache, or reads it at random: ACTION FOLDER. Prints the median memory in MiB, at first and at last.

"At first" is the first tenth of the sequences, "at last" the last tenth: ten times as many have then been seen.
"""

import re
import statistics
import sys
from pathlib import Path

import numpy as np
import torch

from kdtrain.cache.codec import CodecSpec
from kdtrain.cache.provenance import CacheSettings
from kdtrain.cache.reader import CacheReader
from kdtrain.cache.writer import write_cache
from kdtrain.data.packing import PackedRow

SEQ_LEN, VOCAB_SIZE, PER_SHARD, SEQUENCES = 256, 300, 40, 3200


class Gauge:
    """Samples of the memory of this process's own, by how many sequences are done."""

    def __init__(self) -> None:
        self.samples: list[tuple[int, int]] = []

    def __call__(self, done: int, _: int | None = None) -> None:
        found = re.search(r"RssAnon:\s*(\d+) kB", Path("/proc/self/status").read_text())
        assert found
        self.samples.append((done, int(found[1])))

    def median(self, first: int, last: int) -> float:
        return statistics.median(kib for done, kib in self.samples if first < done <= last) / 1024


def build(folder: str, gauge: Gauge) -> None:
    random = np.random.RandomState(0)
    table = torch.randn(VOCAB_SIZE, VOCAB_SIZE, generator=torch.Generator().manual_seed(0))
    ones, zeros = np.ones(SEQ_LEN, dtype=bool), np.zeros(SEQ_LEN, dtype=np.int32)
    rows = (PackedRow(random.randint(0, VOCAB_SIZE, SEQ_LEN + 1), ones, zeros) for _ in range(SEQUENCES))
    codec = CodecSpec(kind="sparse", vocab_size=VOCAB_SIZE, head=12)
    facts = {"seq_len": SEQ_LEN, "tokenizer_size": VOCAB_SIZE, "sequences_per_shard": PER_SHARD}
    settings = CacheSettings(codec=codec, **facts)
    options = {"teacher": lambda tokens_BT, _: table[tokens_BT], "batch_size": 8, "progress": gauge}
    write_cache(folder, settings, {"train": rows}, **options)


def read(folder: str, gauge: Gauge) -> None:
    reader = CacheReader(folder, "train")
    order = np.random.RandomState(1).permutation(SEQUENCES)
    for start in range(0, SEQUENCES, 8):
        reader.read(order[start : start + 8])
        gauge(start + 8)


if __name__ == "__main__":
    gauge = Gauge()
    {"build": build, "read": read}[sys.argv[1]](sys.argv[2], gauge)
    print(gauge.median(0, SEQUENCES // 10), gauge.median(SEQUENCES * 9 // 10, SEQUENCES))
