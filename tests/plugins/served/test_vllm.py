"""A real vLLM as the teacher, without and with the plugin: caches, samples, answers to others, refusals. By hand.

`KDTRAIN_VLLM=/path/to/vllm pytest -m vllm tests/plugins/served/test_vllm.py`; each start takes a minute. vLLM 0.32
on a CPU, in an environment of its own, is what was tried.
"""

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import msgspec
import numpy as np
import pytest
import requests
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import kdtrain as kd
from kdtrain.cache.format.codec import encode_sequences
from kdtrain.cache.format.spec import CodecSpec
from kdtrain.config.sections import CodecConfig, DataConfig, TextConfig
from kdtrain.models.loading import load_teacher
from kdtrain.models.spec import ModelSpec
from kdtrain.plugins.served.answers import Entry
from kdtrain.plugins.served.engine_samples import SampleRequest, read_samples
from kdtrain.plugins.served.options import ServerConfig
from tests.vllm_server import NAME, ROOT, TEACHER, Vllm, free_port, vllm, worn

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(1500)]

ROWS, LENGTH, SAMPLES = 24, 200, 50
SPEC = CodecSpec(kind="sparse", vocab_size=2048, num_samples=SAMPLES)


class Served:
    """A server, and requests to it."""

    def __init__(self, server: Vllm) -> None:
        self.url, self.log = server.url, server.log

    def post(self, tokens: list[int], **more: object) -> requests.Response:
        body = {"model": NAME, "prompt": tokens, "max_tokens": 1, "temperature": 1.0} | more
        return requests.post(f"{self.url}/v1/completions", json=body, timeout=120)

    def lists(self, tokens: list[int], **more: object) -> list[dict[int, Entry] | None]:
        answer = self.post(tokens, **more)
        assert answer.status_code == 200, answer.text
        found = json.dumps(answer.json()["choices"][0]["prompt_logprobs"])
        return msgspec.json.decode(found, type=list[dict[int, Entry] | None])

    def samples(self, tokens: list[int], row: int, **more: object) -> dict[str, np.ndarray]:
        asked = asked_for(row)
        return read_samples(self.sampled(tokens, row, **more), tokens, asked, SPEC)

    def sampled(self, tokens: list[int], row: int, **more: object) -> list[dict[int, Entry] | None]:
        return self.lists(tokens, prompt_logprobs=0, vllm_xargs=asked_for(row).to_args(), **more)


def asked_for(row: int) -> SampleRequest:
    return SampleRequest(number=SAMPLES, seed=0, split="train", row=row)


@pytest.fixture(scope="module")
def server(tmp_path_factory) -> Iterator[Served]:
    """Start a server with the plugin that cuts every prompt into chunks and keeps prefixes."""
    chunks = ["--enable-chunked-prefill", "--max-num-batched-tokens", "64", "--max-num-seqs", "8"]
    chunks += ["--enable-prefix-caching"]
    with vllm(tmp_path_factory.mktemp("vllm"), TEACHER, *chunks, plugin=True) as server:
        yield Served(server)


@pytest.fixture(scope="module")
def rows() -> list[list[int]]:
    """Cut rows of text, LENGTH + 1 tokens each."""
    tokenizer = AutoTokenizer.from_pretrained(TEACHER)
    text = (ROOT / "kdtrain/cache/format/codec.py").read_text() + (ROOT / "kdtrain/files.py").read_text()
    tokens = tokenizer(text)["input_ids"]
    assert len(tokens) > ROWS * LENGTH + 1
    return [tokens[row * LENGTH : (row + 1) * LENGTH + 1] for row in range(ROWS)]


@pytest.fixture(scope="module")
def logits(rows) -> torch.Tensor:
    """Compute the teacher's own logits, [ROWS, LENGTH, V]."""
    model = AutoModelForCausalLM.from_pretrained(TEACHER, dtype=torch.float32).eval()
    with torch.no_grad():
        return torch.cat([model(torch.tensor([row[:-1]])).logits for row in rows])


def test_the_samples_of_a_served_teacher_are_those_of_a_local_one(server, rows, logits):
    labels = torch.tensor(rows)[:, 1:]
    expected = encode_sequences(logits, labels, SPEC, seed=0, split="train", first=0)
    with ThreadPoolExecutor(6) as threads:  # several prompts in a batch
        found = list(threads.map(server.samples, rows, range(ROWS)))
    same = 0
    for row, kept in enumerate(found):
        same += int((kept["ids"] == expected["ids"][row]).all(-1).sum())  # in one order, by log p: so are the counts
        for name in ("label_logprob", "logit_mean", "logit_std", "tail"):
            np.testing.assert_allclose(kept[name], expected[name][row], rtol=1e-4, atol=1e-3)
    away = chi_square(found, logits)
    print(f"{same} of {ROWS * LENGTH} positions have the same samples; chi-square {away:.2f} standard deviations away")
    assert same >= 0.99 * ROWS * LENGTH and abs(away) < 4


def chi_square(found: list[dict[str, np.ndarray]], logits: torch.Tensor) -> float:
    """Compute the standard deviations by which the counts of all positions differ from the teacher's probabilities.

    The count of an entry is n p rounded down or up, with variance f (1 - f), f its fraction; positions are independent.
    """
    expected_RTV = SAMPLES * logits.double().softmax(-1).numpy()
    counts_RTV = np.zeros((*expected_RTV.shape[:2], expected_RTV.shape[2] + 1))
    for row, kept in enumerate(found):
        places = np.where(kept["counts"] > 0, kept["ids"], expected_RTV.shape[2]).astype(np.int64)
        np.put_along_axis(counts_RTV[row], places, kept["counts"].astype(float), -1)
    counts_RTV = counts_RTV[..., :-1]
    fraction = expected_RTV % 1
    variance_V = (fraction * (1 - fraction)).sum((0, 1))
    often = variance_V > 5
    squares = (counts_RTV - expected_RTV).sum((0, 1))[often] ** 2 / variance_V[often]
    return float((squares.sum() - often.sum()) / np.sqrt(2 * often.sum()))


def test_an_answer_does_not_depend_on_what_was_asked_before_or_beside(server, rows):
    """The prompt is in the prefix cache by now, and other requests are in the batch."""
    alone = server.sampled(rows[3], 3)
    assert server.sampled(rows[3], 3, cache_salt="other") == alone
    with ThreadPoolExecutor(6) as threads:
        asked = [threads.submit(server.sampled, rows[row], row) for row in (1, 3, 3, 5)]
        plain = threads.submit(server.lists, rows[3], prompt_logprobs=5)
        words = threads.submit(server.post, rows[4][:50], max_tokens=8, temperature=0.0, logprobs=2)
        assert asked[1].result() == asked[2].result() == alone
        check_top_k(plain.result(), rows[3])
        assert words.result().status_code == 200


def check_top_k(lists: list[dict[int, Entry] | None], tokens: list[int]) -> None:
    assert len(lists) == len(tokens) and lists[0] is None
    for position, token in zip(lists[1:], tokens[1:], strict=True):
        assert 5 <= len(position) <= 6 and token in position
        assert {1, 2, 3, 4, 5} <= {entry.rank for entry in position.values()}


def test_requests_of_others_get_what_a_server_without_the_plugin_gives(server, rows, tmp_path):
    with vllm(tmp_path, TEACHER) as started:
        plain = Served(started)
        for more in ({"prompt_logprobs": 5}, {"max_tokens": 12, "logprobs": 3}):
            more |= {"temperature": 0.0}
            theirs, ours = plain.post(rows[2], **more).json(), server.post(rows[2], **more).json()
            assert ours["choices"][0]["text"] == theirs["choices"][0]["text"]
            lists = [answer["choices"][0]["prompt_logprobs"] or [] for answer in (ours, theirs)]
            for one, other in zip(*lists, strict=True):
                assert (one or {}).keys() == (other or {}).keys()
        with pytest.raises(ValueError, match="is kdtrain installed where the server runs"):
            plain.samples(rows[2], 2)


@pytest.mark.parametrize(
    "args, words",
    [
        ({"kdtrain_samples": 0}, "kdtrain_samples"),
        ({"kdtrain_row": "x"}, "kdtrain_row"),
        ({"kdtrain_top_k": 8}, "together"),
    ],
)
def test_a_wrong_request_is_refused_and_the_server_goes_on(server, rows, args, words):
    answer = server.post(rows[0], prompt_logprobs=0, vllm_xargs=asked_for(0).to_args() | args)
    assert answer.status_code == 400 and words in answer.text
    answer = server.post(rows[0], vllm_xargs=asked_for(0).to_args())
    assert answer.status_code == 400 and "prompt_logprobs" in answer.text
    assert server.samples(rows[0], 0)["counts"].sum() == SAMPLES * LENGTH


RUNNER_2 = """
import sys
from types import SimpleNamespace
import numpy as np, torch
from kdtrain.plugins.served import vllm_plugin
from kdtrain.plugins.served.engine_samples import SampleRequest, entries, sample
import vllm.v1.worker.gpu.sample.prompt_logprob as version_2
from vllm.sampling_params import SamplingParams

vllm_plugin.register()
vllm_plugin._extend_runner(lambda: None, SimpleNamespace(worker=SimpleNamespace(model_runner=object())))
worker = version_2.PromptLogprobsWorker(4, torch.device("cpu"))
asked = SampleRequest(number=50, seed=0, split="train", row=1)
logits, tokens = torch.randn(9, 300), torch.randint(300, (4, 20))
worker.add_request("a", 2, SamplingParams(prompt_logprobs=0, extra_args=asked.to_args()))
found = {}
for start, stop in ((0, 4), (4, 9)):
    batch = SimpleNamespace(
        req_ids=["a"], idx_mapping_np=np.array([2]), num_computed_prefill_tokens_np=np.array([start]),
        num_scheduled_tokens=np.array([stop - start]), prefill_len_np=np.array([9]), num_tokens=stop - start,
        query_start_loc_np=np.array([0, stop - start]),
    )
    lengths = np.array([0, 0, 9, 0])
    found |= worker.compute_prompt_logprobs(lambda each: each, logits[start:stop], batch, tokens, None, lengths)
assert list(entries(*found["a"][:3])) == list(entries(*sample(logits[:8], tokens[2, 1:9], asked, 0)))
worker.remove_request("a")
assert not worker.kdtrain
print("sampled", type(found["a"]).__name__)
"""


def test_the_second_runner_samples_too(tmp_path):
    """Its own class, in chunks; on a CPU without Triton vLLM does not serve with it."""
    python = Path(os.environ["KDTRAIN_VLLM"]).with_name("python")
    done = subprocess.run(
        [python, "-c", RUNNER_2],
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        cwd=tmp_path,
        capture_output=True,
        text=True,
    )
    assert done.stdout.splitlines()[-1:] == ["sampled LogprobsTensors"], done.stderr[-3000:]


def test_the_servers_log_says_that_it_answers_requests_for_samples(server):
    assert server.log.read_text().count("kdtrain answers requests for samples") == 1


def test_text_of_an_exported_student_is_that_of_transformers(tmp_path, rows):
    """Greedy, 20 prompts of 32 tokens, in fp32: the export of a run of 20 steps."""
    command = [sys.executable, "-m", "kdtrain", "distill", "--student", "stdlib-1m", "--teacher", "stdlib-5m"]
    small = ["--data", str(ROOT / "kdtrain"), "--seq-len", "64", "--steps", "20", "--warmup-steps", "2"]
    options = ["--precision", "fp32", "--no-compile", "--batch-size", "4", "--num-sequences", "80"]
    end = ["--validation-sequences", "4", "--out", "run", "--log-to", "none"]
    subprocess.run([*command, *small, *options, *end], cwd=tmp_path, check=True, timeout=240)
    subprocess.run(
        [sys.executable, "-m", "kdtrain", "export", "run", "--out", "exported"], cwd=tmp_path, check=True, timeout=120
    )
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "exported", dtype=torch.float32).eval()
    prompts = [row[:32] for row in rows[:20]]
    with vllm(tmp_path, tmp_path / "exported") as server:
        for prompt in prompts:
            answer = Served(server).post(prompt, max_tokens=32, temperature=0.0, ignore_eos=True, return_token_ids=True)
            theirs = answer.json()["choices"][0]["token_ids"]
            with torch.no_grad():
                ours = model.generate(torch.tensor([prompt]), max_new_tokens=32, min_new_tokens=32, do_sample=False)
            assert theirs == ours[0, 32:].tolist()


CAPTURE = ("--teacher", NAME, "--data", "stdlib", "--seq-len", "128", "--num-sequences", "64", "--num-samples", "50")
CAPTURE += ("--validation-sequences", "8", "--sequences-per-shard", "8", "--server-concurrency", "1")


def capture(folder: Path, url: str, out: str) -> subprocess.Popen:
    """Start `kdtrain cache-teacher` as it is typed, which waits for a server that is away."""
    command = [sys.executable, "-m", "kdtrain", "cache-teacher", *CAPTURE, "--server-patience", "400"]
    command += ["--teacher-server", f"{url}/v1", "--out", out]
    return subprocess.Popen(command, cwd=folder, stderr=subprocess.PIPE, text=True)


def content(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in (folder / "shards").iterdir()}


def wait_for_shards(folder: Path, number: int) -> dict[str, bytes]:
    """Wait for so many shards, and return the published files."""
    until = time.monotonic() + 300
    while len(found := [*folder.glob("shards/*.json")]) < number:
        assert time.monotonic() < until, f"{len(found)} shards"
        time.sleep(0.05)
    return {path.name: path.read_bytes() for each in found for path in (each, each.with_suffix(".h5"))}


def test_a_capture_survives_its_servers_deaths_and_refuses_one_that_came_back_as_another(tmp_path):
    port, out = free_port(), tmp_path / "cache"
    with vllm(tmp_path, TEACHER, plugin=True, port=port) as server:
        assert capture(tmp_path, server.url, "whole").wait() == 0
        running = capture(tmp_path, server.url, "cache")
        kept = wait_for_shards(out, 2)
        server.kill()
    with vllm(tmp_path, worn(tmp_path / "worn"), plugin=True, port=port):
        _, said = running.communicate()
        print(said.splitlines()[-1])
        assert running.returncode == 1 and "its fingerprint is" in said.splitlines()[-1]
    for name, bytes_ in content(out).items():
        assert name.endswith(".tmp") or kept.setdefault(name, bytes_) == content(tmp_path / "whole")[name]
    with vllm(tmp_path, TEACHER, port=port) as server:
        refused = capture(tmp_path, server.url, "cache")
        _, said = refused.communicate()
        print(said.splitlines()[-1])
        assert refused.returncode == 2 and "is kdtrain installed where the server runs" in said
    with vllm(tmp_path, TEACHER, plugin=True, port=port) as server:
        running = capture(tmp_path, server.url, "cache")
        wait_for_shards(out, len(kept) // 2 + 2)
        server.kill()
    with vllm(tmp_path, TEACHER, plugin=True, port=port):
        _, said = running.communicate()
        assert running.returncode == 0, said
    assert content(out) == content(tmp_path / "whole")


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


def test_text_that_vllm_writes_has_the_distributions_of_the_local_teacher(url, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    cache = served(url, "written", text=TextConfig(generate=True, prompt_tokens=16, max_new_tokens=60))
    model = load_teacher(ModelSpec.read(NAME, "teachers"), "cpu").float()
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
