"""Samples from inside a server's engine, and text that a server writes: the cache of the local teacher, or one line."""

from contextlib import ExitStack
from functools import partial
from pathlib import Path

import pytest
import torch

import kdtrain as kd
from kdtrain.config.sections import DataConfig, ObjectiveConfig, TextConfig
from kdtrain.plugins.served.engine_samples import SampleRequest, sample
from kdtrain.plugins.served.options import RunServerConfig
from kdtrain.run.capture import capturing
from kdtrain.training.sources.plan import PlanRequest
from tests.captures import PREFLIGHT, samples_of


@pytest.mark.parametrize("document_mask", [False, True])
def test_a_cache_of_served_samples_is_that_of_the_local_teacher(plugin, document_mask):
    there = samples_of(plugin, document_mask=document_mask, seed=4)
    data = DataConfig(
        data="text.txt",
        seq_len=24,
        num_sequences=10,
        validation_sequences=3,
        num_workers=0,
        document_mask=document_mask,
    )
    here = kd.cache_teacher(
        kd.CacheTeacherConfig(teacher="stdlib-5m", out="local", data=data, precision="fp32", seed=4)
    )
    same = total = 0
    for split in ("train", "validation"):
        for one, other in zip(here[split], there[split], strict=True):
            drawn = [(256 * each["ids"] + each["counts"].long()).sort(-1).values for each in (one, other)]
            same, total = same + int((drawn[0] == drawn[1]).all(-1).sum()), total + len(drawn[0])
            assert torch.equal(one["tokens"], other["tokens"])
            for name in ("label_logprob", "tail"):
                assert torch.allclose(one[name].float(), other[name].float(), atol=0.05), name
    assert same >= 0.98 * total, "a point that lies on the border of two entries may fall to either"
    assert there.manifest.settings.sampling == here.manifest.settings.sampling == "grid"
    assert there.temperature_range == (1.0, 1.0) and there.manifest.capture is None
    assert there.verify() == []


def test_text_that_a_server_writes_is_kept_as_samples_of_what_it_says_of_it(plugin, shipped):
    how = TextConfig(generate=True, prompt_tokens=6, max_new_tokens=9, gen_temperature=0.8)
    cache = samples_of(plugin, text=how, seed=4)
    texts = [body for body in plugin.bodies if "return_token_ids" in body]
    rows = sum(len(cache[split]) for split in ("train", "validation"))
    assert len(texts) == rows and all("logprobs" not in body for body in texts)
    assert cache.manifest.generated["train"]["tokens"] == sum(int(row["loss_mask"].sum()) for row in cache["train"])
    same = total = 0
    for number, row in enumerate(cache["train"]):
        here, tokens = row["loss_mask"].bool(), row["tokens"]
        assert here.nonzero()[0] == 5 and 1 <= here.sum() <= 9
        asked = SampleRequest(number=50, seed=4, split="train", row=number)
        ids_NC, counts_NC, _ = sample(shipped[0](tokens[None, :-1]).logits[0].detach(), tokens[1:], asked, 0)
        for at in here.nonzero().flatten().tolist():
            drawn = {int(i): int(n) for i, n in zip(ids_NC[at, 4:], counts_NC[at, 4:], strict=True) if n}
            kept = {int(i): int(n) for i, n in zip(row["ids"][at], row["counts"][at], strict=True) if n}
            same, total = same + (drawn == kept), total + 1
    assert same >= 0.98 * total >= 40


def test_a_server_without_the_plugin_is_refused_before_anything_is_captured(server):
    with pytest.raises(kd.UsageError, match=r"is kdtrain installed where the server runs.* or give --top-k 64"):
        samples_of(server, server_patience=0.3)
    assert not list(Path("cache").glob("shards/*"))


def test_a_server_that_comes_back_without_the_plugin_is_refused(plugin, monkeypatch):
    whole = samples_of(plugin, "whole")
    calls = iter(range(10**6))
    tables = plugin.tables

    def forgetting(*given):
        plugin.plugin = next(calls) < PREFLIGHT + 14
        return tables(*given)

    monkeypatch.setattr(plugin, "tables", forgetting)
    with pytest.raises(kd.RunError, match="not sampled by kdtrain as asked"):
        samples_of(plugin, server_patience=0.3)
    monkeypatch.setattr(plugin, "tables", tables)
    plugin.plugin = True
    assert samples_of(plugin).manifest.splits == whole.manifest.splits


@pytest.mark.parametrize(
    "fault, words", [("row", "not sampled by kdtrain as asked"), ("broken", "no distribution at position 3")]
)
def test_samples_that_are_wrong_once_are_asked_for_again_and_always_end_the_capture(plugin, fault, words):
    plugin.faults = {PREFLIGHT + 5: fault, PREFLIGHT + 11: fault}
    assert len(samples_of(plugin)["train"]) == 10
    assert plugin.fired == [fault, fault]
    plugin.always, plugin.after = fault, len(plugin.bodies) + PREFLIGHT + 5
    with pytest.raises(kd.RunError, match=words):
        samples_of(plugin, "other", server_patience=0.3)


def planned(config):
    given = {"student": None, "teacher": None, "device": torch.device("cpu"), "held": ExitStack(), "trial": False}
    given["capturing"] = partial(capturing, config, None, given["device"])
    return PlanRequest(config=config, names=(*config.plans,), **given).next()


def test_a_run_that_cannot_learn_from_what_a_server_gives_is_refused_before_it_is_asked():
    def config(objective=None, **server) -> kd.DistillConfig:
        server = RunServerConfig(teacher_server="http://host/v1", **server)
        given = {"data": DataConfig(data="text.txt"), "objective": objective or ObjectiveConfig()}
        return kd.DistillConfig(student="s", out="o", teacher="t", plugins={"server": server}, **given)

    with pytest.raises(kd.UsageError, match="--tail drop would throw away the 50 samples"):
        planned(config(ObjectiveConfig(tail="drop"), server_num_samples=50))
    with pytest.raises(kd.UsageError, match=r"--tail .* needs a cache with samples"):
        planned(config(ObjectiveConfig(tail="sampled")))
    with pytest.raises(kd.UsageError, match="--server-num-samples are instead of --server-top-k"):
        config(server_num_samples=50, server_top_k=32)
