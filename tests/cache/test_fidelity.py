"""The measured fidelity is right, and compares the gradients with which the objective trains."""

from pathlib import Path

import pytest
import torch

from kdtrain.cache.format.codec import decode, encode_sequences
from kdtrain.cache.format.compression import Coding
from kdtrain.cache.format.manifest import read_manifest
from kdtrain.cache.format.spec import CodecSpec
from kdtrain.cache.write.fidelity import (
    GRID,
    TOLERANCE,
    Angles,
    compare,
    measure,
    sample_size,
    sparse_gradients,
    temperature_range,
)
from kdtrain.models.output_head import HeadPart
from kdtrain.objective.batch import Batch
from kdtrain.objective.loss import distillation_loss
from kdtrain.objective.targets import SparseTargets
from tests.cache.test_coding import unpacked

VOCAB = 500


def _stored(arrays: dict, tokens: torch.Tensor, spec: CodecSpec) -> dict:
    """Return the arrays as a shard returns them."""
    if spec.kind == "dense":
        return arrays
    coding = Coding.fit(tokens.numpy(), arrays, spec)
    return unpacked(coding, tokens.numpy(), coding.pack(tokens.numpy(), arrays))


def _measured(spec: CodecSpec, rows: int = 4, length: int = 64) -> tuple[dict, dict]:
    """Measure the fidelity of a codec on Zipf-shaped distributions."""
    order = torch.rand(rows, length, VOCAB, generator=torch.Generator().manual_seed(2)).argsort(-1)
    logits = -1.3 * (1.0 + order).log()
    tokens = torch.zeros(rows, length + 1, dtype=torch.int64)
    tokens[:, 0] = torch.arange(rows)
    arrays = _stored(encode_sequences(logits, tokens[:, 1:], spec, seed=0, split="validation", first=0), tokens, spec)
    mask, segments = torch.ones(rows, length, dtype=torch.bool), torch.zeros(rows, length, dtype=torch.int64)
    batch = Batch(tokens, mask, segments, decode(arrays, spec))

    def teacher(tokens_BT: torch.Tensor, segments_BT: torch.Tensor | None) -> torch.Tensor:
        return logits[tokens_BT[:, 0]]

    return measure(batch, teacher, document_mask=False, positions=length)


def test_dense_is_the_full_distribution_at_every_temperature() -> None:
    found, span = _measured(CodecSpec(kind="dense", vocab_size=VOCAB))
    for temperature in ("T=1", "T=2", "T=4"):
        assert found[temperature]["kl_spread"] < 1e-4
        assert found[temperature]["gradient"]["dense"]["token_angle"] < 0.5
        assert found[temperature]["gradient"]["dense"]["token_norm"] == pytest.approx(1, abs=2e-3)
    assert (span["min"], span["max"]) == (GRID[0], GRID[-1])


def test_the_top_k_and_its_bucket_are_right_at_every_temperature() -> None:
    found, span = _measured(CodecSpec(kind="sparse", vocab_size=VOCAB, top_k=12))
    for temperature in ("T=1", "T=2", "T=4"):
        assert 0 <= found[temperature]["kl_bucket"] < 1e-4
        assert found[temperature]["kl_spread"] > 1e-2
    assert (span["min"], span["max"]) == (GRID[0], GRID[-1])
    assert span["worst_error"] < 1e-2


def test_a_larger_top_k_is_nearer_to_the_full_gradient_which_that_of_the_whole_vocabulary_is() -> None:
    angles = []
    for top_k in (4, 32, 256, VOCAB):
        found, _ = _measured(CodecSpec(kind="sparse", vocab_size=VOCAB, top_k=top_k))
        angles.append(found["T=1"]["gradient"]["ghost"]["token_angle"])
    assert angles == sorted(angles, reverse=True)
    assert found["T=2"]["gradient"]["ghost"]["token_angle"] < 0.5 and found["T=2"]["kl_spread"] < 1e-4


def test_sampled_gradients_converge_to_the_full_one() -> None:
    """255 samples for 256 tokens of one distribution: the noise of 65,280 samples is left, 7 degrees at T = 2."""
    spec = CodecSpec(kind="sparse", vocab_size=VOCAB, top_k=8, num_samples=255)
    logits = (-1.3 * torch.arange(1.0, VOCAB + 1).log()).expand(4, 64, VOCAB)
    tokens = torch.zeros(4, 65, dtype=torch.int64)
    arrays = _stored(encode_sequences(logits, tokens[:, 1:], spec, seed=0, split="validation", first=0), tokens, spec)
    mask, segments = torch.ones(4, 64, dtype=torch.bool), torch.zeros(4, 64, dtype=torch.int64)
    batch = Batch(tokens, mask, segments, decode(arrays, spec))
    found, _ = measure(batch, lambda *_: logits[:1], document_mask=False, positions=64)
    for temperature, degrees in (("T=1", 5), ("T=2", 10)):
        assert found[temperature]["gradient"]["sampled"]["mean_norm"] == pytest.approx(1, abs=0.02)
        assert found[temperature]["gradient"]["sampled"]["mean_angle"] < degrees


def test_each_rule_is_reported_where_the_kept_numbers_allow_it() -> None:
    every = ("T=1", "T=2", "T=4")
    expected = {
        (12, 0): (every, ["ghost", "drop", "renormalize"]),
        (1, 0): (every, ["ghost", "drop"]),
        (2, 9): (every, ["ghost", "drop", "renormalize", "sampled", "control-variate"]),
        (0, 9): (("T=1",), ["sampled"]),
    }
    for (top_k, num_samples), (temperatures, rules) in expected.items():
        spec = CodecSpec(kind="sparse", vocab_size=VOCAB, top_k=top_k, num_samples=num_samples)
        found, span = _measured(spec, rows=1, length=8)
        assert all(list(found[t]["gradient"]) == rules for t in temperatures)
        assert temperatures == tuple(name for name in found if name.startswith("T="))
    assert (span["min"], span["max"]) == (1, 1) and span["worst_error"] < 1e-3, "of samples without a top-k"


def test_top_k_alone_is_far_from_the_full_gradient_and_a_sampled_mean_is_close() -> None:
    found, _ = _measured(CodecSpec(kind="sparse", vocab_size=VOCAB, top_k=4, num_samples=20), rows=8, length=128)
    angle = {name: each["mean_angle"] for name, each in found["T=1"]["gradient"].items()}
    assert angle["renormalize"] > 2 * angle["control-variate"]
    near = {name: each["token_angle"] for name, each in found["T=1"]["gradient"].items()}
    assert near["control-variate"] < near["sampled"] < near["renormalize"]


def test_the_range_ends_before_the_first_error_that_is_too_large() -> None:
    errors = [{"T": t, "worst": 1e-3, "mean": 1e-4} for t in (0.7, 0.8, 0.9, 1, 2, 3, 4)]
    assert temperature_range(errors)["max"] == 4
    errors[5]["worst"] = TOLERANCE
    errors[1]["worst"] = 1.0
    found = temperature_range(errors)
    assert (found["min"], found["max"], found["worst_error"]) == (0.9, 2, 1e-3)


@pytest.mark.parametrize(
    "sequences, seq_len, vocab_size, expected",
    [(64, 512, 2048, (16, 512)), (3, 16, 64, (3, 16)), (64, 512, 262_144, (16, 8)), (1, 4096, 151_936, (1, 220))],
)
def test_the_held_sample_is_bounded(sequences: int, seq_len: int, vocab_size: int, expected: tuple) -> None:
    assert sample_size(sequences, seq_len, vocab_size) == expected


def test_the_manifest_holds_the_fidelity_of_the_validation_split(tmp_path: Path, workshop, codecs) -> None:
    manifest = read_manifest(workshop.build(tmp_path / "c", codecs["both"]))
    assert manifest.fidelity
    assert manifest.fidelity["split"] == "validation"
    assert manifest.fidelity["sample"] == {"sequences": 3, "tokens": 48}
    rules = {"ghost", "drop", "renormalize", "sampled", "control-variate"}
    assert set(manifest.fidelity["T=1"]["gradient"]) == rules
    assert len(manifest.fidelity["log_partition_error"]) == len(GRID)


WIDTH, SIZE = 60, 40
LABELS = torch.zeros(SIZE, dtype=torch.int64)


def _targets(top_k: int, num_samples: int) -> SparseTargets:
    logits = 2 * torch.randn(1, SIZE, WIDTH, generator=torch.Generator().manual_seed(0))
    spec = CodecSpec(kind="sparse", vocab_size=WIDTH, top_k=top_k, num_samples=num_samples)
    labels = torch.zeros(1, SIZE, dtype=torch.int64)
    targets = decode(encode_sequences(logits, labels, spec, seed=0, split="train", first=0), spec)
    assert isinstance(targets, SparseTargets)
    return targets


def _student() -> torch.Tensor:
    """Make a student near enough to the teacher for a share of the control variate, far enough for its bounds."""
    teacher = 2 * torch.randn(1, SIZE, WIDTH, generator=torch.Generator().manual_seed(0))[0]
    return 0.8 * teacher + 0.7 * torch.randn(SIZE, WIDTH, generator=torch.Generator().manual_seed(1))


def _spread(targets: SparseTargets, z_NV: torch.Tensor, beta: float, rule: str) -> torch.Tensor:
    q_NV = (beta * z_NV).softmax(-1).double()
    found, ids_NK = sparse_gradients(targets, z_NV, LABELS, beta)
    scale_N, extra_NK = found[rule]
    return (scale_N[:, None] * q_NV).scatter_add(1, ids_NK, extra_NK)


@pytest.mark.parametrize("temperature", [1.0, 2.0, 4.0])
@pytest.mark.parametrize(
    "rule, top_k, num_samples",
    [
        ("ghost", 7, 0),
        ("drop", 7, 0),
        ("renormalize", 7, 0),
        ("sampled", 7, 12),
        ("sampled", 0, 12),
        ("control-variate", 7, 12),
    ],
)
def test_gradients_are_those_of_the_objective(rule: str, top_k: int, num_samples: int, temperature: float) -> None:
    targets, z_NV = _targets(top_k, num_samples), _student().requires_grad_()
    mask = torch.ones(SIZE, dtype=torch.bool)
    tail = "ghost" if rule == "sampled" else rule
    settings = {"temperature": temperature, "alpha": 1.0, "tail": tail, "vocab_size": WIDTH, "normalizer": 1.0}
    distillation_loss(z_NV, HeadPart(), LABELS, mask, targets, **settings).loss.backward()
    found = temperature * _spread(targets, z_NV.detach(), 1 / temperature, rule)
    assert z_NV.grad is not None
    assert (found - z_NV.grad).norm() < 1e-5 * z_NV.grad.norm()


def test_inner_products_of_the_short_form_are_those_of_the_whole_gradients() -> None:
    targets, z_NV = _targets(5, 9), _student()
    q_NV = z_NV.softmax(-1)
    full_NV = q_NV - torch.rand(SIZE, WIDTH, generator=torch.Generator().manual_seed(2)).softmax(-1)
    short, plain = Angles(), Angles()
    for part in (slice(0, 13), slice(13, SIZE)):
        few, ids_NK = sparse_gradients(targets[part], z_NV[part], LABELS[part], 1.0)
        short.add_full(full_NV[part])
        short.add_sparse(few, ids_NK, full_NV[part], q_NV[part])
    plain.add_full(full_NV)
    for rule in short.inner:
        plain.add(rule, full_NV, _spread(targets, z_NV, 1.0, rule))
    for rule, expected in plain.result().items():
        assert short.result()[rule] == pytest.approx(expected, rel=1e-4), rule


def test_an_angle_is_in_degrees_and_a_zero_gradient_has_none() -> None:
    assert compare(1.0, 1.0, 2.0) == pytest.approx((45.0, 2**0.5))
    assert compare(0.0, 1.0, 0.0) == (90.0, 0.0)
    assert compare(1.0 + 1e-15, 1.0, 1.0)[0] == 0.0
