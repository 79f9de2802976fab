"""Memory does not follow the data: ten times the sequences need no more to build and no more to read."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).with_name("memory_script.py")
GROWTH = 8.0
"""MiB; with one arena of the allocator, building was seen to grow by up to 5, without a trend, and reading by 1."""


def _memory(action: str, folder: Path) -> tuple[float, float]:
    environment = {
        **os.environ,
        "PYTHONPATH": str(Path(__file__).parents[2]),
        "OMP_NUM_THREADS": "1",
        "MALLOC_ARENA_MAX": "1",
    }
    command = [sys.executable, str(SCRIPT), action, str(folder)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    first, last = done.stdout.split()
    return float(first), float(last)


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="reads the memory of a process from /proc")
def test_ten_times_the_sequences_need_no_more_memory_to_build_and_to_read(tmp_path: Path) -> None:
    for action in ("build", "read"):
        first, last = _memory(action, tmp_path / "cache")
        assert last - first < GROWTH, action
    stored = sum(path.stat().st_size for path in (tmp_path / "cache" / "shards").glob("*.h5"))
    assert 0.9 * stored / 2**20 > 1.5 * GROWTH, "the data are too few to show"
