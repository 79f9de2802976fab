"""Tensors keep every bit, files stay small, nothing is unpickled, and incomplete tensors are not read."""

import json
import os
import pickle
import struct
import threading
import time
from pathlib import Path

import pytest
import torch
from checkpoint_kit import SHARD, assert_equal, tensors
from safetensors.torch import load_file, save_file

from kdtrain.checkpoint import shards
from kdtrain.errors import RunError


@pytest.mark.parametrize("max_bytes", [1, 64, shards.MAX_BYTES])
def test_tensors_read_equal_the_tensors_written(tmp_path, monkeypatch, max_bytes):
    monkeypatch.setattr(shards, "MAX_BYTES", max_bytes)
    whole = tensors() | {"h": torch.randn(4).to(torch.float8_e4m3fn).float(), "i": torch.empty(0), "j": torch.tensor(7)}
    files = shards.write(tmp_path, whole)
    assert sorted(files) == sorted(os.listdir(tmp_path))
    assert (len(files) == 1) is (max_bytes > 64)
    assert_equal(shards.read(tmp_path), whole)


@pytest.mark.parametrize("dtype", list(shards.DTYPES), ids=str)
def test_every_type_keeps_its_bits(tmp_path, dtype):
    raw = (torch.arange(64) % (2 if dtype is torch.bool else 256)).to(torch.uint8)
    shards.write(tmp_path, {"x": raw.view(dtype)})
    read = shards.read(tmp_path)["x"]
    assert read.dtype == dtype and torch.equal(read.view(torch.uint8), raw)


def test_the_files_are_plain_safetensors(tmp_path):
    whole = tensors()
    shards.write(tmp_path, whole)
    assert_equal(load_file(tmp_path / SHARD), {name: tensor.contiguous() for name, tensor in whole.items()})


def test_a_file_is_closed_before_it_grows_beyond_the_limit(tmp_path, monkeypatch):
    monkeypatch.setattr(shards, "MAX_BYTES", 1000)
    files = shards.write(tmp_path, {str(n): torch.zeros(100) for n in range(10)})
    assert len(files) == 5 and all(size < 1000 + 600 for size, _ in files.values())


def test_a_tensor_that_cannot_be_written_is_named(tmp_path):
    with pytest.raises(shards.EntryError) as caught:
        shards.write(tmp_path / "nowhere", tensors())
    assert caught.value.entry == f"header in {SHARD}" and "No such file" in caught.value.cause


class Bomb:
    """An object that writes a file when it is unpickled."""

    def __init__(self, target: Path) -> None:
        self.target = target

    def __reduce__(self):
        return (Path.touch, (self.target,))


def test_a_pickle_in_a_checkpoint_is_never_opened(tmp_path):
    target, folder = tmp_path / "exploded", tmp_path / "c"
    folder.mkdir()
    shards.write(folder, tensors())
    for name in (".metadata", "__0_0.distcp", "tensors.pt"):
        (folder / name).write_bytes(pickle.dumps(Bomb(target)))
    assert_equal(shards.read(folder), tensors())
    (folder / SHARD).write_bytes(pickle.dumps(Bomb(target)))
    with pytest.raises(RunError, match="cannot be read"):
        shards.read(folder)
    assert not target.exists()
    pickle.loads((folder / SHARD).read_bytes())
    assert target.exists()


def test_a_tensor_of_which_a_part_is_missing_is_refused(tmp_path):
    places = {"x": {"saved_offsets": [2]}}
    save_file({"x": torch.ones(2)}, tmp_path / SHARD, metadata={"DCP_SHARDING_INFO": json.dumps(places)})
    with pytest.raises(RunError, match="x is not complete"):
        shards.read(tmp_path)


def test_an_invalid_header_is_refused(tmp_path):
    (tmp_path / SHARD).write_bytes(struct.pack("<Q", 2**40) + b"{")
    with pytest.raises(RunError, match="cannot be read"):
        shards.read(tmp_path)


def test_other_threads_run_while_tensors_are_written(tmp_path):
    # What holds the interpreter lock for a whole file would leave one gap of about its time. The time of this process:
    # while others are at work nothing stands still.
    whole = {str(n): torch.zeros(2**22) for n in range(8)}
    gaps, done = [], threading.Event()

    def work():
        shards.write(tmp_path, whole)
        done.set()

    thread = threading.Thread(target=work)
    started = last = time.process_time()
    thread.start()
    while not done.is_set():
        time.sleep(0.001)
        gaps.append(time.process_time() - last)
        last = time.process_time()
    thread.join()
    assert len(gaps) > 5 and max(gaps) < 0.5 * (last - started)


TWO_RANKS = """
import json, sys
from pathlib import Path
import torch
from torch import distributed
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from kdtrain.checkpoint import shards

distributed.init_process_group("gloo")
mesh, folder, whole = init_device_mesh("cpu", (2,)), Path(sys.argv[1]), torch.arange(15.0).reshape(5, 3)
parts = {
    "rows": distribute_tensor(whole, mesh, [Shard(0)]),
    "columns": distribute_tensor(whole.bfloat16(), mesh, [Shard(1)]),
    "one": distribute_tensor(whole[:1].contiguous(), mesh, [Shard(0)]),
    "same": distribute_tensor(whole * 2, mesh, [Replicate()]),
    "plain": torch.tensor(3),
}
files = shards.write(folder / "c", parts)
if distributed.get_rank() == 0:
    (folder / "files.json").write_text(json.dumps(files))
distributed.destroy_process_group()
"""


def test_the_shards_of_two_processes_are_read_whole_by_one(run_ranks, tmp_path):
    (tmp_path / "c").mkdir()
    (tmp_path / "script.py").write_text(TWO_RANKS)
    run_ranks(tmp_path / "script.py", 2, tmp_path)
    files = json.loads((tmp_path / "files.json").read_text())
    assert sorted(files) == sorted(os.listdir(tmp_path / "c")) == [SHARD, SHARD.replace("-00001-", "-00002-", 1)]
    whole = torch.arange(15.0).reshape(5, 3)
    expected = {"rows": whole, "columns": whole.bfloat16(), "one": whole[:1], "same": whole * 2}
    assert_equal(shards.read(tmp_path / "c"), expected | {"plain": torch.tensor(3)})
