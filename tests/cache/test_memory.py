"""Memory does not grow with the data: three times the sequences take no more to build and no more to read."""

import ctypes
import json
import os
import statistics
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).with_name("memory_script.py")


@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "mallinfo"), reason="asks the allocator of glibc")
def test_more_sequences_need_no_more_memory_to_build_and_to_read(tmp_path: Path) -> None:
    environment = {
        **os.environ,
        "PYTHONPATH": str(Path(__file__).parents[2]),
        "MALLOC_ARENA_MAX": "1",  # the allocator reports its main arena only
        "PYTHONMALLOC": "malloc",
    }
    done = subprocess.run([sys.executable, SCRIPT, tmp_path], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    _, *lines = map(json.loads, done.stdout.splitlines())  # the first one fills caches of the process
    sizes = [line["sequences"] for line in lines]
    per_sequence = {
        name: statistics.linear_regression(sizes, [line[name] for line in lines]).slope
        for name in ("build", "read", "stored")
    }
    # A leak would be at least as large as the sequences on disk. Measured: up to 0.1 of that.
    assert max(per_sequence["build"], per_sequence["read"]) < 0.4 * per_sequence["stored"], per_sequence
