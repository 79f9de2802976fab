"""`kdtrain cache-teacher --dry-run`: what a cache will hold and take, measured or computed; nothing is left on disk."""

import json
import shutil
import time
from itertools import chain, repeat
from pathlib import Path
from types import SimpleNamespace

import pytest

from benchmarks.harness import models
from kdtrain.cache.format.spec import CodecSpec
from kdtrain.run import capture

BUILD = ("cache-teacher", "--precision", "fp32", "--batch-size", 8, "--out")
RESULTS = Path(__file__).parents[2] / "benchmarks" / "results"


def test_a_dry_run_measures_two_batches_of_the_cache_that_the_same_command_makes(workbench):
    for number, more in enumerate(((), ("--top-k", 12, "--num-sequences", 30), ("--generate", "--num-sequences", 20))):
        before, options = workbench.everything(), ("--teacher", "teacher", *workbench.text, *more)
        plan = workbench.json(*BUILD, f"deep/er/{number}", *options, "--dry-run")
        assert workbench.everything() == before
        assert plan["begins"] == "from the beginning" and plan["numbers below"].startswith("measured on two batches")
        real = workbench.json(*BUILD, f"made-{number}", *options)
        assert (plan["sequences"], plan["tokens"]) == (real["sequences"], real["tokens"])
        assert plan["counted"] == "exactly"
        each, tokens = plan["seconds"], sum(plan["tokens"].values())
        hours = (each["first batch"] - each["second batch"] + tokens / plan["tokens_per_second"]) / 3600
        assert plan["estimated_hours"] == pytest.approx(hours, abs=2e-4) and each["second batch"] > 0
        assert plan["bytes per token"] == pytest.approx(real["bytes_per_token"], rel=0.25)
        assert 0 < plan["disk (MiB)"] < plan["disk free (MiB)"]
    refined = workbench.json(*BUILD, "more", "--teacher", "teacher", "--refine", "made-0", "--dry-run")
    finished = (*BUILD, "made-0", "--teacher", "teacher", *workbench.text, "--dry-run")
    assert (refined["tokens"], refined["kept"]) == (workbench.json(*finished)["tokens"], "50 samples")
    assert workbench.json(*finished)["begins"] == "it is finished"
    (workbench.root / "made-0/manifest.json").unlink()
    assert workbench.json(*finished)["begins"].startswith("at 2 shards, ")
    code, _, err = workbench.call(*finished, "--seed", 1)
    assert code == 2 and "holds an unfinished cache with other settings (seed: 0 there" in err


def test_a_vocabulary_that_no_cache_holds_is_refused(workbench):
    shutil.copytree("teacher", "vast")
    settings = json.loads(Path("vast/config.json").read_text())
    Path("vast/config.json").write_text(json.dumps(settings | {"vocab_size": 2**32}))
    code, out, err = workbench.call(*BUILD, "of-vast", "--teacher", "vast", *workbench.text, "--dry-run")
    assert (code, out) == (2, "") and "a vocabulary of 4294967296 cannot be cached; it must be 2 to " in err, err
    assert err.splitlines()[-1].startswith("kdtrain: ") and "Traceback" not in err


def test_without_weights_or_room_for_them_the_numbers_are_computed_and_marked(workbench):
    shutil.copytree("teacher", "bare", ignore=shutil.ignore_patterns("*.safetensors"))
    (workbench.root / "sharded").mkdir()
    for path in (workbench.root / "bare").iterdir():
        shutil.copy(path, "sharded")
    index = {"weight_map": {"a": "model-1.safetensors", "b": "model-2.safetensors"}}
    (workbench.root / "sharded/model.safetensors.index.json").write_text(json.dumps(index))
    shutil.copy("teacher/model.safetensors", "sharded/model-1.safetensors")
    command = (*BUILD, "x", *workbench.text, "--dry-run", "--teacher")
    before, measured = workbench.everything(), workbench.json(*command, "teacher")
    reasons = {
        ("bare",): "the weights of bare are not on this machine",
        ("sharded",): "the weights of sharded are not on this machine",
        ("teacher", "--device-memory", 1e-6): "the teacher teacher needs ",
    }
    for more, why in reasons.items():
        plan = workbench.json(*command, *more)
        said = plan["numbers below"]
        assert said.startswith(f"computed from those of other teachers and caches, not measured: {why}")
        assert (plan["tokens"], plan["bytes per token"]) == (measured["tokens"], capture.BYTES[2_048][2])
        rates, hours = plan["tokens_per_second"], plan["estimated_hours"]
        assert rates.keys() == hours.keys() == capture.RATES.keys() and "seconds" not in plan
        assert rates["NVIDIA H200"] > 1000 * rates["two CPU cores"]
    assert workbench.everything() == before
    assert workbench.json(*command, "bare", "--generate")["estimated_hours"] == {}  # nothing was measured that writes
    code, _, err = workbench.call(*BUILD, "x", *workbench.text, "--teacher", "bare")
    assert code == 2 and "no weights in safetensors there" in err


def test_of_a_long_text_a_part_is_tokenized_and_its_rest_estimated_or_left_out(workbench, monkeypatch):
    lines = (workbench.root / "text.txt").read_text().splitlines()
    rows = "".join(json.dumps({"text": f"{number} {lines[number % 400]}"}) + "\n" for number in range(3000))
    (workbench.root / "rows.jsonl").write_text(rows)
    command = (*BUILD, "x", "--teacher", "teacher", "--data", "rows.jsonl", "--seq-len", 32, "--dry-run")
    exact = workbench.json(*command)
    assert exact["counted"] == "exactly"
    for later, how, more in ((22.0, "about", ()), (50.0, "at least", ()), (22.0, "about", ("--num-sequences", 500))):
        clock = chain((0.0, 21.0), repeat(later))
        monkeypatch.setattr(capture, "time", SimpleNamespace(perf_counter=time.perf_counter, monotonic=clock.__next__))
        found = workbench.json(*command, *more)
        assert found["counted"] == how and found["sequences"]["validation"] == exact["sequences"]["validation"]
        share = found["sequences"]["train"] / (500 if more else exact["sequences"]["train"])
        assert share == pytest.approx(1, abs=0.0 if more else 0.03) if how == "about" else 0.05 < share < 0.3


def test_the_tables_are_those_of_the_records() -> None:
    gpu, cpu = (json.loads((RESULTS / name).read_text()) for name in ("gpu/cache.json", "cache.json"))
    figures = cpu["figures"]
    rates = {
        gpu["machine"]["device"]: [(name, gpu["figures"][f"build-{name}"]["tokens_a_second"]) for name in ("1b", "8b")],
        "two CPU cores": [
            ("demo-teacher", figures["build"]["build_tokens_per_second"]),
            ("100m-teacher", figures["build-100m"]["build_tokens_per_second"]),
        ],
    }
    assert cpu["machine"]["cores"] == 2
    known = {
        device: tuple((int(models.forward_flops(name, 0) / 2), round(rate)) for name, rate in each)
        for device, each in rates.items()
    }
    assert known == capture.RATES
    for device, each in capture.RATES.items():
        for weights, rate in each:
            model = SimpleNamespace(active=weights + 600, tied=False, vocabulary=30, width=20)
            assert capture.computed_rates(model)[device] == pytest.approx(rate)
    codecs = {"top-k 12": (12, 0), "top-k 50": (50, 0), "samples 50": (0, 50), "top-k 8 + samples 24": (8, 24)}
    for vocabulary, stated in capture.BYTES.items():
        measured = [figures[f"V = {vocabulary}, {name}"]["bytes_per_token"]["total"] for name in codecs]
        assert list(stated) == [round(each, 1) for each in measured]
        for (top_k, samples), each in zip(codecs.values(), stated, strict=True):
            codec = CodecSpec(kind="sparse", vocab_size=vocabulary, top_k=top_k, num_samples=samples)
            assert capture.computed_bytes(codec) == pytest.approx(each)
    assert round(figures["V = 2048, dense"]["bytes_per_token"]["total"] / 2048, 2) == capture.DENSE
