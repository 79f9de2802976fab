"""A committed cache still reads as the teacher predicted: `python tests/cache/test_golden.py` wrote it.

If this test fails, the format has changed: raise `names.FORMAT_VERSION` and keep reading this one, or undo the change.
"""

import hashlib
import json
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import h5py
import numpy as np
import pytest
import torch

from kdtrain.cache.format import hdf5_writing
from kdtrain.cache.format.codec import encode_sequences
from kdtrain.cache.format.compression import Arrays
from kdtrain.cache.format.manifest import CacheSettings, read_manifest
from kdtrain.cache.format.spec import ABSENT, CodecSpec
from kdtrain.cache.read.reader import CacheReader
from kdtrain.cache.tools.verify import verify_cache
from kdtrain.cache.write.answers import ShardRows
from kdtrain.cache.write.shard_writer import ShardWriter
from kdtrain.cache.write.writer import write_cache
from kdtrain.data.packed import PackedRow
from kdtrain.objective.targets import FLOOR, DenseTargets, SparseTargets

GOLDEN = Path(__file__).parents[1] / "golden" / "cache"
SPECS = {
    "sparse": CodecSpec(kind="sparse", vocab_size=300, top_k=4, num_samples=6),
    "dense": CodecSpec(kind="dense", vocab_size=300),
}
WRITTEN = {
    "dense": SPECS["dense"],
    "samples": CodecSpec(kind="sparse", vocab_size=300, num_samples=6),
    "top-k": CodecSpec(kind="sparse", vocab_size=300, top_k=4, knots=(1.0, 0.5)),
    "both": CodecSpec(kind="sparse", vocab_size=300, top_k=4, num_samples=6, knots=(1.5, 1.0)),
}
LENGTH = 24


def _rows(number: int, seed: int) -> Iterator[PackedRow]:
    random = np.random.RandomState(seed)
    for _ in range(number):
        tokens = (random.zipf(1.4, LENGTH + 1) % 300).astype(np.int32)
        yield PackedRow(tokens, random.rand(LENGTH) < 0.9, np.arange(LENGTH, dtype=np.int32) // 10)


def _logits(tokens_BT: torch.Tensor) -> torch.Tensor:
    """Compute logits that are the same on any machine: whole multiples of 1/16."""
    entry_V = torch.arange(300)
    mixed_BTV = (tokens_BT[..., None] * 7 + entry_V * 13) % 97
    return -mixed_BTV.float() / 16 - (entry_V % 64).float() / 16


def _expected(split: str) -> dict[str, np.ndarray]:
    """Compute the teacher's log-probabilities, in fp64."""
    number, seed = {"train": (5, 0), "validation": (2, 1)}[split]
    tokens = torch.from_numpy(np.stack([row.tokens for row in _rows(number, seed)])).long()
    energy = _logits(tokens[:, :-1]).double().log_softmax(-1).flatten(0, 1)
    return {"tokens": tokens, "energy": energy}


@pytest.mark.parametrize("name", SPECS)
def test_the_golden_cache_is_whole_and_its_manifest_describes_it(name: str) -> None:
    folder = GOLDEN / name
    assert verify_cache(folder) == []
    manifest = read_manifest(folder)
    assert manifest.codec == SPECS[name]
    assert [shard["sequences"] for shard in manifest.splits["train"]["shards"]] == [3, 2]
    assert manifest.digest == json.loads((GOLDEN / "digests.json").read_text())[name]


@pytest.mark.parametrize("split", ["train", "validation"])
@pytest.mark.parametrize("name", SPECS)
def test_the_golden_cache_reads_as_the_teacher_predicted(name: str, split: str) -> None:
    reader, expected = CacheReader(GOLDEN / name, split), _expected(split)
    batch, energy = reader.read(range(len(reader))), expected["energy"]
    assert torch.equal(batch.tokens, expected["tokens"])
    labels = energy.gather(1, batch.tokens[:, 1:].reshape(-1, 1))[:, 0]
    assert batch.targets is not None
    assert ((batch.targets.label_logprob - labels).abs() <= (1 - labels) / 383).all()
    if isinstance(batch.targets, DenseTargets):
        assert torch.allclose(batch.targets.logprobs.double(), energy, rtol=1e-3)
        return
    targets = batch.targets
    assert isinstance(targets, SparseTargets)
    here = targets.ids != ABSENT
    known = energy.gather(1, targets.ids.masked_fill(~here, 0))
    assert ((targets.logprobs - known).abs() <= (1 - known) / 383)[here].all()
    assert torch.allclose(known[:, :4], energy.topk(4).values)
    assert (targets.counts.sum(-1) == 6).all()
    for temperature in (1.0, 2.0, 4.0):
        whole = (energy / temperature).logsumexp(-1)
        assert (targets.log_partition(1 / temperature) - whole).abs().max() < 1e-2


def _kept(tokens_nT1: np.ndarray, spec: CodecSpec) -> Arrays:
    """Make the arrays of a teacher that never was: numbers of a generator, without any sum that a machine may order."""
    random, (number, width) = np.random.RandomState(444), tokens_nT1[:, 1:].shape
    if spec.kind == "dense":  # all but one entry weigh 0, so log p are the logits; halves of fp16's steps among them
        logits_nTV = -(110 + random.randint(0, 2**12, (number, width, 300)) / np.float32(16)).astype(np.float32)
        logits_nTV[..., 5] = 0
        labels_nT = torch.from_numpy(tokens_nT1[:, 1:]).long()
        return encode_sequences(torch.from_numpy(logits_nTV), labels_nT, spec, seed=0, split="train", first=0)
    near_nTK = random.rand(number, width, 12).argsort(-1)[..., : spec.columns]
    counts_nTD = np.array([[6, 0, 0, 0, 0, 0], [3, 2, 1, 0, 0, 0], [2, 2, 1, 1, 0, 0], [1] * 6])
    counts_nTK = np.zeros((number, width, spec.columns), np.uint8)
    counts_nTK[..., spec.top_k :] = counts_nTD[random.randint(0, 4, (number, width)), : spec.num_samples]
    absent_nTK = (counts_nTK == 0) & (np.arange(spec.columns) >= spec.top_k)
    logprobs_nTK = -np.sort(18 + 30 * random.rand(number, width, spec.columns)).astype(np.float32)
    logprobs_nTK[..., 0] = 0  # the others vanish beside it: the top-k's mass is 1, whatever `exp` a machine has
    numbers = -random.rand(number, width, 2 * len(spec.knots)).astype(np.float32)
    numbers[0, :9, : len(spec.knots)] = FLOOR  # tails that are empty
    numbers[1, :9] = 0.5 * np.array([0.008, 0.04], np.float32).repeat(len(spec.knots))  # half a step
    return {
        "ids": np.where(absent_nTK, spec.absent, (tokens_nT1[:, :-1, None] * 7 + near_nTK) % 300).astype(spec.id_dtype),
        "logprobs": np.where(absent_nTK, np.float32(np.nan), logprobs_nTK),
        "counts": counts_nTK,
        "tail": numbers,
        "label_logprob": -9 * random.rand(number, width).astype(np.float32),
        "logit_mean": -random.rand(number, width).astype(np.float32),
        "logit_std": random.rand(number, width).astype(np.float32),
    }


def _written(path: Path, spec: CodecSpec) -> dict[str, str]:
    """Write a shard; return dtype, shape and digest of each data set, before HDF5 and zstd shuffle and compress it."""
    rows = ShardRows.of("train", 0, 0, list(_rows(3, 0)))
    with hdf5_writing.creating(path) as (file, check):
        hdf5_writing.create_shard(file, spec, LENGTH, "train", 0, len(rows))
        writer = ShardWriter(file, check, spec, LENGTH)
        writer.add(rows, _kept(rows.tokens, spec))
        writer.finish()
    found: dict[str, str] = {}

    def add(name: str, each: h5py.Group | h5py.Dataset) -> None:
        if isinstance(each, h5py.Dataset):
            found[name] = f"{each.dtype.str} {each.shape} {hashlib.sha256(each[()].tobytes()).hexdigest()[:16]}"

    with h5py.File(path) as file:
        file.visititems(add)
    return found


@pytest.mark.parametrize("name", WRITTEN)
def test_what_a_shard_holds_is_the_same_to_the_bit_as_ever(name: str, tmp_path: Path) -> None:
    """A bit that differs makes caches of one teacher differ, and a resumed build a mixture of both."""
    assert _written(tmp_path / "0.h5", WRITTEN[name]) == json.loads((GOLDEN / "written.json").read_text())[name]


def _write() -> None:
    for name, spec in SPECS.items():
        settings = CacheSettings(
            codec=spec,
            seq_len=LENGTH,
            tokenizer_size=300,
            data={"source": "golden"},
            sequences_per_shard=3,
            sequences={"train": 5, "validation": 2},
        )
        splits = {"train": _rows(5, 0), "validation": _rows(2, 1)}
        write_cache(GOLDEN / name, settings, splits, teacher=lambda tokens_BT, _: _logits(tokens_BT))
    digests = {name: read_manifest(GOLDEN / name).digest for name in SPECS}
    (GOLDEN / "digests.json").write_text(json.dumps(digests, indent=1) + "\n")
    with tempfile.TemporaryDirectory() as folder:
        written = {name: _written(Path(folder, f"{name}.h5"), spec) for name, spec in WRITTEN.items()}
    (GOLDEN / "written.json").write_text(json.dumps(written, indent=1) + "\n")


if __name__ == "__main__":
    sys.exit(_write())
