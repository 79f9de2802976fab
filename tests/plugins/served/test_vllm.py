"""A real vLLM as the teacher: `KDTRAIN_VLLM=/path/to/vllm pytest -m vllm tests/teaching/test_vllm.py`, by hand.

It needs a vLLM in an environment of its own (0.32 on a CPU is what was tried), and takes a minute to start.
"""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import kdtrain as kd
from kdtrain.config import CodecConfig, DataConfig, TextConfig
from kdtrain.models.loading import load_teacher
from kdtrain.models.spec import read_spec
from kdtrain.plugins.served.options import ServerConfig
from tests.vllm_server import NAME, TEACHER, free_port, vllm, worn

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(1500)]


@pytest.fixture(scope="module")
def url(tmp_path_factory) -> Iterator[str]:
    with vllm(tmp_path_factory.mktemp("vllm"), TEACHER) as server:
        yield f"{server.url}/v1"


def asked(**options) -> dict:
    data = DataConfig(data="stdlib", seq_len=128, num_sequences=24, validation_sequences=8, num_workers=0)
    return {"teacher": NAME, "data": data, "codec": CodecConfig(top_k=64), "sequences_per_shard": 8, **options}


def served(url: str, out: Path | str, patience: float = 30, **options) -> kd.Cache:
    server = ServerConfig(teacher_server=url, server_patience=patience, server_concurrency=4)
    return kd.cache_teacher(kd.CacheTeacherConfig(out=out, plugins={"server": server}, **asked(**options)))


def test_a_cache_of_vllm_is_that_of_the_local_teacher(url, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    there = served(url, "served")
    here = kd.cache_teacher(kd.CacheTeacherConfig(out="local", precision="fp32", **asked()))
    same = total = 0
    worst = 0.0
    for split in ("train", "validation"):
        for one, other in zip(here[split], there[split], strict=True):
            assert torch.equal(one["tokens"], other["tokens"])
            same += int((one["ids"][:, :8] == other["ids"][:, :8]).all(-1).sum())
            total += len(one["ids"])
            off = (one["logprobs"].float() - other["logprobs"].float()).abs() / (1 - one["logprobs"].float())
            worst = max(worst, float(off.max()))
    print(f"{same} of {total} positions have the same top 8; log p differs by at most {worst:.2g} of 1 - log p")
    print(there.manifest.capture, there.manifest.settings.teacher["fingerprint"]["noise"])
    assert same >= 0.99 * total and worst < 1 / 100
    assert there.manifest.settings.teacher["version"].startswith("0.")


def test_what_vllm_refuses_is_quoted_with_the_remedy(url, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(kd.UsageError, match=r"max allowed: 64 .* --max-logprobs 65, or use a smaller --top-k"):
        served(url, "more", codec=CodecConfig(top_k=65))
    long = DataConfig(data="stdlib", seq_len=700, num_sequences=2, num_workers=0)
    with pytest.raises(kd.UsageError, match="takes 600 tokens, and a row needs 701"):
        served(url, "long", data=long)


def test_a_vllm_that_comes_back_with_another_model_is_refused(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    port = free_port()
    with vllm(tmp_path, TEACHER, port=port) as server:
        url = f"{server.url}/v1"
        whole = served(url, "whole")
        served(url, "cache")
    for path in [Path("cache/manifest.json"), *Path("cache/shards").glob("train-0000[12].*")]:
        path.unlink()
    with (
        vllm(tmp_path, worn(tmp_path / "worn"), port=port),
        pytest.raises(kd.UsageError, match="its fingerprint is") as caught,
    ):
        served(url, "cache")
    print(caught.value)
    with vllm(tmp_path, TEACHER, port=port):
        resumed = served(url, "cache")
    assert [len(resumed[each]) for each in resumed] == [len(whole[each]) for each in whole]


def test_text_that_vllm_writes_has_the_distributions_of_the_local_teacher(url, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    cache = served(url, "written", text=TextConfig(generate=True, prompt_tokens=16, max_new_tokens=60))
    model = load_teacher(read_spec(NAME, "teachers"), "cpu").float()
    worst, labels = 0.0, 0
    for row in cache["train"]:
        here = row["loss_mask"].bool()
        with torch.no_grad():
            scored_TV = model(row["tokens"][None, :-1]).logits[0].log_softmax(-1)[here]
        top = scored_TV.topk(64).values
        worst = max(worst, float(((row["logprobs"][here].float() - top).abs() / (1 - top)).max()))
        labels += int(here.sum())
    counted = cache.manifest.generated["train"]
    assert labels == counted["tokens"] and counted["stop"] + counted["length"] == 24
    assert worst < 1 / 100
