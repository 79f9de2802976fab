"""A cache of the shipped teacher is right at every temperature, or its manifest states the error."""

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch

from kdtrain.cache.format.manifest import CacheSettings
from kdtrain.cache.format.spec import CodecSpec
from kdtrain.cache.read.reader import CacheReader
from kdtrain.cache.write.writer import write_cache
from kdtrain.config.sections import DataConfig
from kdtrain.data.packing import packed_rows
from kdtrain.models.spec import ModelSpec
from kdtrain.models.tokenizer import load_tokenizer
from kdtrain.objective.targets import SparseTargets
from kdtrain.teaching.teacher import Teacher

SPEC = Path(__file__).parents[2] / "teachers" / "stdlib-5m.toml"
SPLITS, LENGTH = {"train": 6, "validation": 6}, 256
TEMPERATURES = torch.linspace(1, 4, 13, dtype=torch.float64).tolist()


@dataclass(frozen=True)
class Shipped:
    """The shipped teacher, its text, and its log p [N, V] in fp64 for each split."""

    teacher: object
    parts: dict
    energies: dict


@pytest.fixture(scope="module")
def shipped() -> Shipped:
    if not (SPEC.with_suffix("") / "model.safetensors").exists():
        pytest.skip("the shipped teacher is not here; make teacher makes it")
    spec, cpu = ModelSpec.read(str(SPEC)), torch.device("cpu")
    teacher = Teacher.open(spec, cpu, "fp32")
    teacher.load()
    data, tokenizer = DataConfig(data="stdlib", seq_len=LENGTH, num_workers=0), load_tokenizer(spec)
    parts = {split: list(packed_rows(data, split, tokenizer, number)) for split, number in SPLITS.items()}
    tokens = {
        split: torch.from_numpy(np.stack([r.tokens for r in part]).astype(np.int64)) for split, part in parts.items()
    }
    energies = {s: teacher.logits(t[:, :-1], None).flatten(0, 1).double().log_softmax(-1) for s, t in tokens.items()}
    return Shipped(teacher.logits, parts, energies)


@pytest.mark.parametrize("top_k, num_samples", [(0, 12), (2, 0), (8, 24), (50, 0)])
def test_a_cache_is_right_to_a_hundredth_of_a_nat_and_states_its_error_of_log_z(
    shipped: Shipped, tmp_path: Path, top_k: int, num_samples: int
) -> None:
    """log of top-k mass, tail mass, Z and the factor of the samples' weights, at every T in [1, 4]."""
    spec = CodecSpec(kind="sparse", vocab_size=2048, top_k=top_k, num_samples=num_samples)
    settings = CacheSettings(codec=spec, seq_len=LENGTH, tokenizer_size=2048, data={}, sequences=dict(SPLITS))
    manifest = write_cache(tmp_path, settings, shipped.parts, teacher=shipped.teacher, batch_size=6)  # type: ignore[arg-type]
    assert manifest is not None and manifest.fidelity is not None and manifest.temperature_range is not None
    read = {split: CacheReader(tmp_path, split).read(range(number)).targets for split, number in SPLITS.items()}
    targets, energy = read["train"], shipped.energies["train"]
    tail = energy.scatter(1, energy.topk(top_k).indices, -torch.inf)
    for temperature in TEMPERATURES if top_k > 2 else ():
        assert isinstance(targets, SparseTargets)
        beta = 1 / temperature
        whole, partition = (beta * energy).logsumexp(-1), targets.log_partition(beta).double()
        top_mass = (beta * energy.topk(top_k).values).logsumexp(-1) - whole
        errors = {
            "Z": partition - whole,
            "top_k": targets.top_logprobs(beta).logsumexp(-1) - top_mass,
            "tail": targets.log_tail(beta) - partition - ((beta * tail).logsumexp(-1) - whole),
            "weights": targets.log_tail(1.0) - partition - (tail.logsumexp(-1) - whole),
        }
        worst = {name: error.abs().max().item() for name, error in errors.items()}
        assert max(worst.values()) < 1e-2, (temperature, worst)
    targets, energy, span = read["validation"], shipped.energies["validation"], manifest.temperature_range
    assert isinstance(targets, SparseTargets)
    for row in manifest.fidelity["log_partition_error"]:
        beta = 1 / row["T"]
        found = (targets.log_partition(beta).double() - (beta * energy).logsumexp(-1)).abs().max().item()
        assert row["worst"] == pytest.approx(found, abs=2e-5)
    within = [row for row in manifest.fidelity["log_partition_error"] if span["min"] <= row["T"] <= span["max"]]
    assert span["worst_error"] == max(row["worst"] for row in within) < 2e-2
