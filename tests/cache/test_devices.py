"""A cache built on any device, in blocks of any size, equals one built on a CPU."""

import numpy as np
import pytest
import torch

from kdtrain.cache.build.answers import SideStream
from kdtrain.cache.build.writer import write_cache
from kdtrain.cache.format import codec
from kdtrain.cache.format.codec import CodecSpec, encode_sequences
from kdtrain.cache.read.reader import CacheReader

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
SPECS = [
    CodecSpec(kind="sparse", vocab_size=500, top_k=12),
    CodecSpec(kind="sparse", vocab_size=500, top_k=3, num_samples=9),
    CodecSpec(kind="sparse", vocab_size=500, top_k=500),
    CodecSpec(kind="dense", vocab_size=500),
]


def encoded(spec, device):
    g = torch.Generator().manual_seed(0)
    logits_BTV = 3 * torch.randn(3, 20, 500, generator=g)
    logits_BTV[1, 4, 7] = torch.nan  # a non-finite sequence
    labels_BT = torch.randint(0, 500, (3, 20), generator=g)
    return encode_sequences(logits_BTV.to(device), labels_BT, spec, seed=0, split="train", first=5)


@pytest.mark.parametrize("spec", SPECS, ids=lambda spec: f"{spec.kind}-{spec.top_k}-{spec.num_samples}")
@pytest.mark.parametrize("cells", [1, 3000, 2**27])
def test_kept_numbers_do_not_depend_on_the_size_of_a_block(spec, cells, monkeypatch):
    expected = encoded(spec, "cpu")
    monkeypatch.setitem(codec._CELLS, "cpu", cells)
    found = encoded(spec, "cpu")
    assert found.keys() == expected.keys()
    for name, values in expected.items():
        assert found[name].dtype == values.dtype and found[name].shape == values.shape
        assert np.allclose(found[name], values, rtol=1e-5, atol=1e-5, equal_nan=True), name


def topk_of_the_last(self, k, dim=-1):
    """`Tensor.topk` along the last axis, which breaks ties the other way round."""
    assert dim in (-1, self.ndim - 1)
    found = self.sort(dim=-1, stable=True)
    return torch.return_types.topk((found.values[..., -k:].flip(-1), found.indices[..., -k:].flip(-1)))


@pytest.mark.parametrize("spec", SPECS, ids=lambda spec: f"{spec.kind}-{spec.top_k}-{spec.num_samples}")
@pytest.mark.parametrize("device", [*DEVICES, "cpu-last"])
def test_a_device_keeps_the_numbers_that_a_cpu_keeps(spec, device, monkeypatch):
    expected = encoded(spec, "cpu")
    if device == "cpu-last":  # a device that takes the last of equal entries first
        monkeypatch.setattr(torch.Tensor, "topk", topk_of_the_last)
    found = encoded(spec, device.removesuffix("-last"))
    assert found.keys() == expected.keys()
    for name, values in expected.items():
        assert found[name].dtype == values.dtype and found[name].shape == values.shape
        if name == "ids":  # entries as likely as each other, to rounding, may change places; all of a broken sequence
            whole = ~expected["broken"]
            assert whole.sum() == 2 and (found[name][whole] == values[whole]).mean() > 0.99
            for kept in found[name][~whole].reshape(-1, values.shape[-1]):
                present = kept[kept < spec.vocab_size]
                assert len(set(present)) == len(present) >= spec.top_k
        elif name != "counts":
            bound = 0.01 if spec.kind == "dense" else 1e-3
            assert np.allclose(found[name], values, rtol=bound, atol=bound, equal_nan=True), name


@pytest.mark.gpu
def test_a_cache_built_on_a_device_reads_as_one_built_on_a_cpu(workshop, tmp_path):
    settings, on_cpu, found = workshop.settings(SPECS[1]), workshop.teacher(500), []
    for device in ("cpu", "cuda"):

        def teacher(tokens_BT, segments_BT, device=device):
            return on_cpu(tokens_BT, segments_BT).to(device)

        write_cache(tmp_path / device, settings, workshop.splits(), teacher=teacher, batch_size=2)
        found.append(CacheReader(tmp_path / device, "train").read(range(10)).targets)
    assert torch.equal(found[0].ids[:, :3], found[1].ids[:, :3])
    assert torch.allclose(found[0].logprobs[:, :3], found[1].logprobs[:, :3], atol=1e-2)


@pytest.mark.parametrize("device", DEVICES)
def test_work_on_a_side_stream_sees_the_results_of_the_main_stream(device):
    made = torch.full((1024, 1024), 1e-4, device=device)
    for _ in range(5):
        made = made @ made + 1e-4
    side = SideStream()
    with side.after(side.ready(made)):
        copied = made.cpu()
    assert torch.equal(copied, made.cpu()) and torch.isfinite(copied).all()
    with side.after(side.ready(None)):
        pass
