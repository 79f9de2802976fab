"""A committed checkpoint is read as it was written; `python tests/checkpoint/test_golden.py` writes it anew.

If this test fails, the format has changed: raise `sealed.VERSION` and keep reading this one, or undo the change.
"""

import json
import shutil
import sys
from pathlib import Path
from unittest import mock

import pytest
import torch

from kdtrain.checkpoint import shards
from kdtrain.checkpoint.sealed import entry_of, problem
from kdtrain.checkpoint.store import Store, load
from kdtrain.files import typed
from kdtrain.training.state import Progress

GOLDEN = Path(__file__).parents[1] / "golden" / "checkpoint"
STATE = {
    "progress": {"step": 250, "sequences": 4000, "best_loss": 2.25, "best_step": None, "loss": 1.0 / 3.0},
    "options": {"run": {"seed": 2**63 - 1}, "optimizer": {"lr": 3e-4, "betas": [0.9, 0.95]}},
    "cache": "0123abcd",
    "text": "Schrödinger's \N{CAT FACE} \u0000",
    "numbers": [float("inf"), -0.0, 5e-324, 1e300],
}


def _tensors() -> dict[str, torch.Tensor]:
    """Make tensors that are the same on every machine."""
    return {
        "student.embed.weight": torch.arange(48.0).reshape(8, 6) / 16 - 1,
        "student.norm.weight": torch.tensor([1.0, float("nan"), float("inf"), -0.0, 1e-45, 3.4e38]),
        "student.half.weight": torch.arange(6).to(torch.bfloat16),
        "temperature.beta": torch.tensor(0.5),
        "optimizer.student.embed.weight.exp_avg": torch.zeros(8, 6),
        "optimizer.student.embed.weight.step": torch.tensor(250.0),
        "generator": torch.arange(16, dtype=torch.uint8),
        "cursor": torch.tensor(2**62),
        "mask": torch.tensor([True, False, True]),
        "none": torch.empty(0, 3),
    }


def test_the_golden_checkpoint_is_whole_and_states_its_place_in_the_run() -> None:
    assert problem(GOLDEN) is None
    entry = entry_of(GOLDEN, "golden")
    assert (entry.step, entry.rollbacks) == (250, 2)
    assert len(list(GOLDEN.glob("shard-00001-*.safetensors"))) > 1


def test_the_golden_checkpoint_reads_as_it_was_written_bit_by_bit() -> None:
    checkpoint = load(GOLDEN)
    assert json.dumps(checkpoint.state) == json.dumps(STATE)
    expected = _tensors()
    assert checkpoint.tensors.keys() == expected.keys()
    for name, tensor in expected.items():
        read = checkpoint.tensors[name]
        assert (read.dtype, read.shape) == (tensor.dtype, tensor.shape), name
        assert read.reshape(-1).view(torch.uint8).tolist() == tensor.reshape(-1).view(torch.uint8).tolist(), name


def test_the_golden_progress_is_of_a_run_before_bytes_were_counted_and_says_nothing_of_them() -> None:
    stated = load(GOLDEN).state["progress"]
    progress = typed(stated, Progress)
    assert {name: getattr(progress, name) for name in stated} == stated
    assert progress.bytes_per_token is None and progress.bits_per_byte(progress.best_loss) is None
    with pytest.raises(ValueError, match="bytes_per_token"):
        typed({**stated, "bytes_per_token": 0.0}, Progress)


def test_the_golden_checkpoint_written_today_is_the_same_byte_by_byte(tmp_path: Path) -> None:
    written = _write(tmp_path)
    assert {each.name: each.read_bytes() for each in written.iterdir()} == {
        each.name: each.read_bytes() for each in GOLDEN.iterdir()
    }


def _write(folder: Path) -> Path:
    with mock.patch.object(shards, "MAX_BYTES", 300):
        return Store(folder).save("golden", 250, _tensors(), STATE, rollbacks=2)


if __name__ == "__main__":
    shutil.rmtree(GOLDEN, ignore_errors=True)
    shutil.move(_write(GOLDEN.with_name("written")), GOLDEN)
    shutil.rmtree(GOLDEN.with_name("written"))
    sys.exit(0)
