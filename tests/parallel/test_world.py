"""Devices, and the peak memory of a process."""

import subprocess
import sys

import pytest
import torch

from kdtrain.errors import UsageError
from kdtrain.process import refuse_many_processes
from kdtrain.ranks import peak_memory_mb, pick_device


def test_the_peak_is_of_this_process_and_not_of_the_one_that_started_it():
    held = b"x" * (600 * 2**20)
    script = "import torch; from kdtrain.ranks import peak_memory_mb; print(peak_memory_mb(torch.device('cpu')))"
    child = float(subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True).stdout)
    assert 50 < child < 600 < len(held) / 2**20 + 1
    assert peak_memory_mb(torch.device("cpu")) > 600


@pytest.mark.parametrize("name", ["tpu", "cuda:99", "mps", "cpu:x"])
def test_a_missing_device_is_refused_by_name(name):
    with pytest.raises(UsageError, match=f"--device '{name}'"):
        pick_device(name)


@pytest.mark.parametrize("name, world, used", [("cuda:1", 1, 1), ("cuda", 1, None), ("cuda", 4, 3), ("cpu:0", 1, None)])
def test_a_gpu_with_a_number_is_the_one_that_the_process_uses(monkeypatch, name, world, used):
    """Else what asks for "cuda", in a library too, takes GPU 0."""
    present = []
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    monkeypatch.setattr(torch.cuda, "set_device", present.append)
    monkeypatch.setenv("WORLD_SIZE", f"{world}")
    monkeypatch.setenv("LOCAL_RANK", f"{world - 1}")
    device = pick_device(name)
    assert present == ([] if used is None else [torch.device("cuda", used)]) and device.type in name


def test_one_of_several_processes_is_refused(monkeypatch):
    refuse_many_processes()
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(UsageError, match="torchrun"):
        refuse_many_processes()
