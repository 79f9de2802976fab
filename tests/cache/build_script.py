"""Builds the cache of the workshop in a process of its own: FOLDER CODEC [LIMIT OF A FILE IN BYTES]."""

import resource
import signal
import sys
from pathlib import Path

from kdtrain.cache.build.writer import CacheBuilder
from kdtrain.cache.format.codec import CodecSpec
from kdtrain.errors import RunError, UsageError
from tests.cache.conftest import Workshop

SPECS = {
    "both": CodecSpec(kind="sparse", vocab_size=64, top_k=4, num_samples=8),
    "dense": CodecSpec(kind="dense", vocab_size=2048),
}


def main(folder: str, codec: str, limit: str = "0") -> int:
    shop, spec = Workshop(), SPECS[codec]
    if int(limit):
        # A write beyond the limit fails in the kernel, as on a full disk.
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (int(limit), int(limit)))
    try:
        tokenizer = Path(folder).parent / "tokenizer"
        teacher, settings = shop.teacher(spec.vocab_size), shop.settings(spec)
        writer = CacheBuilder(folder, settings, teacher=teacher, tokenizer=tokenizer, batch_size=3)
        if writer.manifest is None:
            for split, rows in shop.splits(spec.vocab_size).items():
                writer.build(split, rows)
            writer.finish()
    except (RunError, UsageError) as error:
        print(error, file=sys.stderr)
        return 1 if isinstance(error, RunError) else 2
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
