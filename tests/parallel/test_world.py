"""Devices, and what a process says of itself."""

import subprocess
import sys

import pytest
import torch

from kdtrain.errors import UsageError
from kdtrain.parallel.world import peak_memory_mb, pick_device, refuse_many_processes


def test_the_peak_is_of_this_process_and_not_of_the_one_that_started_it():
    held = b"x" * (600 * 2**20)
    script = (
        "import torch; from kdtrain.parallel.world import peak_memory_mb; print(peak_memory_mb(torch.device('cpu')))"
    )
    child = float(subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True).stdout)
    assert 50 < child < 600 < len(held) / 2**20 + 1
    assert peak_memory_mb(torch.device("cpu")) > 600


@pytest.mark.parametrize("name", ["tpu", "cuda:99", "mps", "cpu:x"])
def test_a_device_that_is_not_there_is_refused_by_name(name):
    with pytest.raises(UsageError, match=f"--device '{name}'"):
        pick_device(name)


def test_one_of_several_processes_is_refused(monkeypatch):
    refuse_many_processes()
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(UsageError, match="torchrun"):
        refuse_many_processes()
