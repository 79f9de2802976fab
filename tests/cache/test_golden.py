"""A committed cache still reads as the teacher predicted: `python tests/cache/test_golden.py` wrote it.

If this test fails, the format has changed: raise `names.FORMAT_VERSION` and keep reading this one, or undo the change.
"""

import json
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from kdtrain.cache.build.writer import write_cache
from kdtrain.cache.format.codec import ABSENT, CodecSpec
from kdtrain.cache.format.manifest import CacheSettings, read_manifest
from kdtrain.cache.read.reader import CacheReader
from kdtrain.cache.tools.verify import verify_cache
from kdtrain.data.packed import PackedRow
from kdtrain.objective.targets import DenseTargets, SparseTargets

GOLDEN = Path(__file__).parents[1] / "golden" / "cache"
SPECS = {
    "sparse": CodecSpec(kind="sparse", vocab_size=300, top_k=4, num_samples=6),
    "dense": CodecSpec(kind="dense", vocab_size=300),
}
LENGTH = 24


def _rows(number: int, seed: int) -> Iterator[PackedRow]:
    random = np.random.RandomState(seed)
    for _ in range(number):
        tokens = (random.zipf(1.4, LENGTH + 1) % 300).astype(np.int32)
        yield PackedRow(tokens, random.rand(LENGTH) < 0.9, np.arange(LENGTH, dtype=np.int32) // 10)


def _logits(tokens_BT: torch.Tensor) -> torch.Tensor:
    """Logits that any machine computes alike: whole multiples of 1/16."""
    entry_V = torch.arange(300)
    mixed_BTV = (tokens_BT[..., None] * 7 + entry_V * 13) % 97
    return -mixed_BTV.float() / 16 - (entry_V % 64).float() / 16


def _expected(split: str) -> dict[str, np.ndarray]:
    """The teacher's log-probabilities, in fp64."""
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


if __name__ == "__main__":
    sys.exit(_write())
