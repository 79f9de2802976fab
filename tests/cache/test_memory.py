"""Memory does not follow the data: ten times the sequences need no more to build and, once read, no more to hold."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).with_name("memory_script.py")
FEW = 320
GROWTH = 12.0
"""MiB, for ten times the sequences: eight more shards are open, at 0.6 MiB each; the rest is noise of the allocator."""


def _peak(action: str, folder: Path, sequences: int) -> float:
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2]), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, str(SCRIPT), action, str(folder), str(sequences)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    return float(done.stdout)


@pytest.mark.slow
def test_ten_times_the_sequences_need_no_more_memory_to_build_and_to_read(tmp_path: Path) -> None:
    for action in ("build", "read"):
        few, many = (_peak(action, tmp_path / str(number), number) for number in (FEW, 10 * FEW))
        assert many - few < GROWTH, action
    stored = sum(path.stat().st_size for path in (tmp_path / str(10 * FEW)).rglob("*.h5"))
    assert stored / 2**20 > GROWTH, "the data are too few to show"
