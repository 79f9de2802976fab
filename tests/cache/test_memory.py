"""Memory does not grow with the data: three times the sequences take no more to build and no more to read.

The test runs this file, which builds caches of several sizes in FOLDER, reads each at random, and prints a line of JSON
for each: sequences, bytes held while building, while reading, and stored. Held is what was asked of the allocator and
not given back: unlike resident memory it does not depend on which freed pages the system has taken back by then. At the
end is over the last tenth of the sequences, of which the least counts, so that a batch in the making does not.
"""

import ctypes
import json
import os
import statistics
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from kdtrain.cache.format.manifest import CacheSettings
from kdtrain.cache.format.spec import CodecSpec
from kdtrain.cache.read import reader
from kdtrain.cache.write.writer import write_cache
from kdtrain.data.packed import PackedRow

SEQ_LEN, VOCAB_SIZE, PER_SHARD, BATCH = 128, 300, 50, 5
SIZES = (100, 200, 400)


class MallInfo(ctypes.Structure):
    """glibc's `struct mallinfo`."""

    _fields_ = [(name, ctypes.c_int) for name in (
        "arena", "ordblks", "smblks", "hblks", "hblkhd", "usmblks", "fsmblks", "uordblks", "fordblks", "keepcost",
    )]  # fmt: skip


libc = ctypes.CDLL(None)
libc.mallinfo.restype = MallInfo


class Gauge:
    """The least memory held over the last tenth of `sequences`."""

    def __init__(self, sequences: int) -> None:
        self.begin, self.held = 0.9 * sequences, sys.maxsize

    def __call__(self, done: int, _: int | None = None) -> None:
        if done > self.begin:
            found = libc.mallinfo()
            self.held = min(self.held, found.uordblks + found.hblkhd)


def build(folder: Path, sequences: int) -> int:
    random, gauge = np.random.RandomState(0), Gauge(sequences)
    table = torch.randn(VOCAB_SIZE, VOCAB_SIZE, generator=torch.Generator().manual_seed(0))
    ones, zeros = np.ones(SEQ_LEN, dtype=bool), np.zeros(SEQ_LEN, dtype=np.int32)
    rows = (PackedRow(random.randint(0, VOCAB_SIZE, SEQ_LEN + 1), ones, zeros) for _ in range(sequences))
    codec = CodecSpec(kind="sparse", vocab_size=VOCAB_SIZE, top_k=100)
    settings = CacheSettings(codec=codec, seq_len=SEQ_LEN, tokenizer_size=VOCAB_SIZE, sequences_per_shard=PER_SHARD)
    options = {"teacher": lambda tokens_BT, _: table[tokens_BT], "batch_size": BATCH, "progress": gauge}
    write_cache(folder, settings, {"train": rows}, **options)
    return gauge.held


def read(folder: Path, sequences: int) -> int:
    cache, gauge = reader.CacheReader(folder, "train"), Gauge(sequences)
    order = np.random.RandomState(1).permutation(sequences)
    for start in range(0, sequences, BATCH):
        cache.read(order[start : start + BATCH])
        gauge(start + BATCH)
    return gauge.held


@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "mallinfo"), reason="asks the allocator of glibc")
def test_more_sequences_need_no_more_memory_to_build_and_to_read(tmp_path: Path) -> None:
    environment = {
        **os.environ,
        "PYTHONPATH": str(Path(__file__).parents[2]),
        "MALLOC_ARENA_MAX": "1",  # the allocator reports its main arena only
        "PYTHONMALLOC": "malloc",
    }
    done = subprocess.run([sys.executable, __file__, tmp_path], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    _, *lines = map(json.loads, done.stdout.splitlines())  # the first one fills caches of the process
    sizes = [line["sequences"] for line in lines]
    per_sequence = {
        name: statistics.linear_regression(sizes, [line[name] for line in lines]).slope
        for name in ("build", "read", "stored")
    }
    # A leak would be at least as large as the sequences on disk. Measured: up to 0.1 of that.
    assert max(per_sequence["build"], per_sequence["read"]) < 0.4 * per_sequence["stored"], per_sequence


if __name__ == "__main__":
    # Open shards and the lists of closed ones take memory, up to bounds: fewer than the smallest cache has.
    reader.MAX_OPEN, reader.MAX_LISTS = 1, 0
    for sequences in SIZES:
        folder = Path(sys.argv[1], str(sequences))
        held = {"build": build(folder, sequences), "read": read(folder, sequences)}
        stored = sum(path.stat().st_size for path in (folder / "shards").glob("*.h5"))
        print(json.dumps({"sequences": sequences, **held, "stored": stored}), flush=True)
