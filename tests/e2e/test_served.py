"""The commands that ask a server for its teacher: stopped, refused and resumed, and a run that captures for itself."""

import shutil

import pytest
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.stand_in import standing_in


@pytest.fixture
def stand_in(bench):
    model = AutoModelForCausalLM.from_pretrained(bench.root / "teacher").eval()
    tokenizer = AutoTokenizer.from_pretrained(bench.root / "teacher")
    with standing_in(model, tokenizer, name="teacher") as stand_in:
        yield stand_in


def content(folder):
    return {path.name: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_a_capture_from_a_server_that_is_killed_and_resumed_equals_an_undisturbed_one(bench, stand_in):
    asks = ("cache-teacher", "--teacher", "teacher", "--teacher-server", stand_in.url, *bench.data, "--top-k", 8)
    asks += ("--num-sequences", 12, "--validation-sequences", 4, "--sequences-per-shard", 4, "--batch-size", 2)
    whole = bench.run(*asks, "--out", "asked").ok()
    assert "kept mass 0." in whole.stdout and "nats, in 128 positions" in whole.stdout
    killed = bench.run(*asks, "--out", "killed", fault="cache.shard.after-batch:kill:4")
    assert killed.code != 0 and not (bench.root / "killed" / "manifest.json").exists()
    before = content(bench.root / "killed" / "shards")
    again = bench.run(*asks, "--out", "killed", "--json")
    assert again.json["capture"]["positions"] == 128
    assert "the same teacher as when the cache was begun" in again.stderr
    assert content(bench.root / "killed") == content(bench.root / "asked")
    kept = {name: each for name, each in before.items() if name.endswith(".json")}
    assert kept and content(bench.root / "killed").items() >= kept.items()
    asked = len(stand_in.bodies)
    bench.run(*asks, "--out", "killed").ok()  # it is whole: nobody is asked
    assert len(stand_in.bodies) == asked
    assert [each.code for each in bench.launch(2, *asks, "--out", "ranks")] == [0, 0]
    assert content(bench.root / "ranks") == content(bench.root / "asked")
    assert "kept mass 0." in bench.run("inspect", "killed").ok().stdout
    stand_in.max_logprobs = 4
    refused = bench.run(*asks, "--out", "refused")
    assert refused.code == 2 and "start the server with --max-logprobs 8" in refused.refusal()
    stand_in.max_logprobs, stand_in.always, stand_in.after = 64, "500", len(stand_in.bodies) + 25
    failed = bench.run(*asks, "--out", "failed", "--server-patience", 0.3)
    assert failed.code == 1 and "it answers 500: fault 500, for" in failed.refusal()


def test_a_run_captures_what_a_server_says_once_and_reads_its_cache(bench, stand_in):
    asks = ("--student", "student.toml", "--steps", 3, *bench.fast, *bench.eager)
    run = ("distill", "--teacher", "teacher", "--teacher-server", stand_in.url, "--server-top-k", 8, *bench.data)
    run += ("--num-sequences", 12, "--validation-sequences", 4, *asks, "--out", "taught")
    stand_in.always, stand_in.after = "500", 21
    failed = bench.run(*run, "--server-patience", 0.3)
    assert failed.code == 1 and not (bench.root / "taught" / "checkpoints").exists()
    stand_in.always = ""
    result = bench.run(*run, "--json").json
    assert result["steps"] == 3
    asked = len(stand_in.bodies)
    stand_in.close()
    resumed = bench.run(*run, "--steps", 5, "--yes", "--json").json
    assert resumed["steps"] == 5 and len(stand_in.bodies) == asked
    shutil.copytree(bench.root / "taught" / "data", bench.root / "mine")
    same = bench.run("distill", "--cache", "mine", *asks, "--out", "read", "--json").json
    assert same["best_validation_loss"] == result["best_validation_loss"]
    assert stand_in.url not in (bench.root / "taught" / "config.toml").read_text()
    assert bench.run("verify", "taught").code == 0
    refused = bench.run(*run[:-1], "hot", "--temperature", 2)
    assert refused.code == 2 and "gives a top-k, which is right at T = 1 only" in refused.refusal()


def test_a_file_that_may_have_been_downloaded_cannot_name_a_server(bench):
    folder = bench.root / "downloaded"
    folder.mkdir()
    (folder / "manifest.json").write_text("{}")
    (folder / "mine.toml").write_text('[server]\nteacher_server = "http://127.0.0.1:9/v1"\n')
    config = ("cache-teacher", "--config", "downloaded/mine.toml", "--teacher", "teacher", *bench.data, "--out", "no")
    done = bench.run(*config, "--top-k", 8)
    assert done.code == 2 and "teacher_server sends the text to a server, and this file lies with" in done.refusal()
    (bench.root / "served.toml").write_text("kind = 'served'\ntokenizer = 'teacher'\n")
    alone = bench.run("cache-teacher", "--teacher", "served.toml", *bench.data, "--top-k", 8, "--out", "no")
    assert alone.code == 2 and "give --teacher-server URL, the address of the server that runs it" in alone.refusal()
