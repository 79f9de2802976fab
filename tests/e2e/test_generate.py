"""`cache-teacher --generate`: the teacher's text, its distributions and why it ended, whatever happens meanwhile."""

import json
import shutil
import signal

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import kdtrain as kd
from kdtrain.cache.write.generated_text import finish_reasons
from kdtrain.testing import tiny_model, write_model_folder
from tests.stand_in import standing_in

ENDS = [*range(0, 300, 20), 299]


@pytest.fixture(scope="module")
def writes(bench):
    """Return the command's options, with a teacher that has several end tokens."""
    shutil.copytree(bench.root / "teacher", bench.root / "writer")
    settings = {"eos_token_id": ENDS, "temperature": 0.3, "do_sample": True, "repetition_penalty": 3.0}
    (bench.root / "writer" / "generation_config.json").write_text(json.dumps(settings))
    asks = ("cache-teacher", "--teacher", "writer", *bench.data, "--num-sequences", 12, "--validation-sequences", 4)
    asks += ("--precision", "fp32", "--sequences-per-shard", 6, "--batch-size", 4, "--generate", "--seed", 3)
    return (*asks, "--prompt-tokens", 8, "--max-new-tokens", 20, "--gen-temperature", 0.9, "--gen-top-p", 0.95)


def content(folder):
    return {path.relative_to(folder): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_a_killed_and_resumed_capture_equals_an_undisturbed_one_bit_by_bit(bench, writes):
    asks = (*writes, "--top-k", 8, "--num-samples", 4)
    made = bench.run(*asks, "--out", "whole", "--json").json
    for point in ("cache.shard.after-batch:kill:3", "cache.before-finish:kill"):  # in the second shard, and behind all
        assert bench.run(*asks, "--out", "killed", fault=point).code == -signal.SIGKILL
    bench.run(*asks, "--out", "killed").ok()
    assert content(bench.root / "killed") == content(bench.root / "whole")
    assert bench.run("verify", "killed").ok()
    cache = kd.Cache(bench.root / "whole")
    teacher = AutoModelForCausalLM.from_pretrained(bench.root / "writer").eval()
    for split, stated in made["generated"].items():
        rows = [cache[split][number] for number in range(len(cache[split]))]
        tokens, mask = (np.stack([row[name].numpy() for row in rows]) for name in ("tokens", "loss_mask"))
        reasons = finish_reasons(tokens, mask.astype(bool), cache.manifest.end_tokens)
        assert (reasons.count("stop"), reasons.count("length")) == (stated["stop"], stated["length"])
        assert mask.sum() == stated["tokens"] and not mask[:, :7].any() and mask[:, 7].all()
        for row, reason in zip(rows, reasons, strict=True):
            written = row["tokens"][1:][row["loss_mask"].bool()].tolist()
            assert [each for each in written[:-1] if each in ENDS] == []
            assert reason == ("stop" if written[-1] in ENDS else "length")
            assert reason == "stop" or len(written) == 20
            assert not set(row["tokens"][8 + len(written) :].tolist()) & {*ENDS}  # no end token is invented
            with torch.no_grad():
                scored_TV = teacher(row["tokens"][None, :-1]).logits[0].log_softmax(-1)
            here = row["loss_mask"].bool()
            top = scored_TV[here].topk(8)
            assert (row["ids"][here][:, :8].long() == top.indices).float().mean() > 0.99
            torch.testing.assert_close(row["logprobs"][here][:, :8].float(), top.values, rtol=0, atol=2e-2)
    assert {"stop", "length"} <= {reason for each in made["generated"].values() for reason in each if each[reason]}
    assert cache.manifest.fidelity["T=1"]["kl_bucket"] < 1e-3
    page = " ".join(bench.run("inspect", "whole").ok().stdout.split())
    assert "the teacher continued 8 tokens of each sequence (temperature 0.9, top-p 0.95, seed 3)" in page
    assert "written by the teacher" in (bench.root / "whole" / "README.md").read_text()
    other = bench.run(*asks, "--out", "whole", "--gen-top-p", 0.5)
    assert other.code == 2 and "data.generated.top_p: 0.95 there, 0.5 here" in other.refusal()


def test_answers_to_conversations_are_the_same_from_two_ranks(bench, writes):
    asks = ["cache-teacher", "--generate", "--teacher", "writer", "--data", "chat.jsonl"]
    asks += ["--messages-column", "messages"]
    asks += ["--seq-len", 120, "--num-sequences", 10, "--validation-sequences", 2, "--max-new-tokens", 9, "--top-k", 4]
    asks += ["--precision", "fp32", "--sequences-per-shard", 4, "--batch-size", 3]
    made = bench.run(*asks, "--out", "alone", "--json").json
    assert [each.code for each in bench.launch(2, *asks, "--out", "shared")] == [0, 0]
    assert content(bench.root / "shared") == content(bench.root / "alone")
    assert sum(made["generated"]["train"][reason] for reason in ("stop", "length")) == 10
    tokenizer = AutoTokenizer.from_pretrained(bench.root / "writer")
    lines = (bench.root / "chat.jsonl").read_text().splitlines()
    asked = {json.loads(line)["messages"][0]["content"] for line in lines}
    for row in kd.Cache(bench.root / "alone")["train"]:
        prompt = tokenizer.decode(row["tokens"][: int(row["loss_mask"].int().argmax()) + 1])
        assert prompt.startswith("<user>") and prompt.removeprefix("<user>").removesuffix("\n") in asked
        assert 1 <= int(row["loss_mask"].sum()) <= 9
    page = " ".join(bench.run("inspect", "alone").ok().stdout.split())
    assert "the teacher continued the turns before the last answer" in page


def test_a_student_with_another_end_learns_the_teachers_and_its_export_stops_at_either(bench, writes):
    bench.run(*writes, "--top-k", 8, "--out", "taught").ok()
    model = tiny_model("llama", 300, seed=2)
    model.generation_config.eos_token_id = 298
    write_model_folder(bench.root / "base", model, AutoTokenizer.from_pretrained(bench.root / "teacher"))
    train = ("distill", "--cache", "taught", "--student", "base", "--steps", 2, *bench.fast, *bench.eager)
    done = bench.run(*train, "--out", "student-run").ok()
    (line,) = [each for each in done.stderr.splitlines() if "the teacher's texts end with" in each]
    assert (
        "end with 0 (!), 20 (5), 40 (I), 60 (]) and 12 more, the student's own with 298 (<|unused-298|>): one event"
        in line
    )
    exported = json.loads((bench.root / "student-run" / "student" / "generation_config.json").read_text())
    assert exported["eos_token_id"] == sorted({*ENDS, 298})


@pytest.fixture
def stand_in(bench, writes):
    model = AutoModelForCausalLM.from_pretrained(bench.root / "writer").eval()
    with standing_in(model, AutoTokenizer.from_pretrained(bench.root / "writer"), name="writer") as server:
        server.ends = ENDS
        yield server


def test_a_server_writes_the_text_and_what_it_says_of_it_is_that_of_the_local_teacher(bench, writes, stand_in):
    writes = [each for each in writes if each not in ("--precision", "fp32")]  # which are the server's
    asks = (*writes, "--top-k", 8, "--teacher-server", stand_in.url)
    made = bench.run(*asks, "--out", "served", "--json").json
    first, *sent = [body for body in stand_in.bodies if "return_token_ids" in body]
    assert (first["temperature"], first["top_p"]) == (0.5, 0.5)  # of the preflight
    assert {(body["temperature"], body["top_p"], body["top_k"], body["repetition_penalty"]) for body in sent} == {
        (0.9, 0.95, 0, 1.0)
    }
    assert len({body["seed"] for body in sent}) == len(sent) == 16
    cache, killed = (
        kd.Cache(bench.root / "served"),
        bench.run(*asks, "--out", "again", fault="cache.shard.after-batch:raise:3"),
    )
    assert killed.code != 0
    bench.run(*asks, "--out", "again").ok()
    assert content(bench.root / "again") == content(bench.root / "served")
    assert sum(each["stop"] + each["length"] for each in made["generated"].values()) == 16
    for row in cache["train"]:
        here = row["loss_mask"].bool()
        scored_TV = stand_in.logprobs(row["tokens"][:-1].tolist())[here]
        torch.testing.assert_close(row["logprobs"][here].float(), scored_TV.topk(8).values, rtol=0, atol=2e-2)
    for fault, words in {
        "finish": "finish_reason",
        "untold": "no token_ids",
        "short": "where 20 or an end token",
        "strings": "not named by their ids",
    }.items():
        stand_in.always, stand_in.after = fault, len(stand_in.bodies) + 25  # after the preflight
        wrong = bench.run(*asks, "--out", f"wrong-{fault}")
        assert wrong.code == 1 and words in wrong.refusal(), wrong.stderr
