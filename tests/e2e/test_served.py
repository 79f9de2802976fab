"""The commands that ask a server for its teacher: stopped, refused and resumed, and a run that captures for itself."""

import os
import shutil
import signal
import time

import pytest
from transformers import AutoModelForCausalLM, AutoTokenizer

import kdtrain as kd
from kdtrain.training.state import read_saved
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
    planned = bench.run(*asks, "--out", "asked", "--dry-run", "--json").json
    assert planned["sequences"] == {"train": 12, "validation": 4} and "measured on two" in planned["numbers below"]
    assert not [*bench.root.glob("*asked*")]
    whole = bench.run(*asks, "--out", "asked").ok()
    assert "kept mass: 0." in whole.stdout and " nats, in 128 positions" in whole.stdout
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
    assert "kept mass 0." in " ".join(bench.run("inspect", "killed").ok().stdout.split())
    stand_in.max_logprobs = 4
    refused = bench.run(*asks, "--out", "refused")
    assert refused.code == 2 and "start the server with --max-logprobs 8" in refused.refusal()
    stand_in.max_logprobs, stand_in.always, stand_in.after = 64, "500", len(stand_in.bodies) + 25
    failed = bench.run(*asks, "--out", "failed", "--server-patience", 0.3)
    assert failed.code == 1 and "it answers 500: fault 500, for" in failed.refusal()


TEXT = ("--num-sequences", 100, "--validation-sequences", 4)
TRAIN = ("--student", "student.toml", "--steps", 40, "--batch-size", 2, "--checkpoint-freq", 5, "--eval-freq", 20)


@pytest.fixture(scope="module")
def asked(bench):
    """Run `captured`, which reads a server's answers while they arrive, and return how to start another such run."""

    def run(out, stand_in, *more, **options):
        words = ("distill", "--teacher", "teacher", "--teacher-server", stand_in.url, "--server-top-k", 8, *bench.data)
        words += (*TEXT, *TRAIN, "--lr", 1e-2, *bench.eager, "--out", out, *more)
        if (world := options.pop("world", 1)) > 1:
            return bench.ok(world, *words)
        return bench.run(*words, **options) if options.pop("wait", True) else bench.begin(*words)

    model = AutoModelForCausalLM.from_pretrained(bench.root / "teacher").eval()
    with standing_in(model, AutoTokenizer.from_pretrained(bench.root / "teacher"), name="teacher") as stand_in:
        run("captured", stand_in).ok()
    return run


def same_runs(bench, one, other):
    """Assert that two runs ended in the same bits; return whether they left the same cache."""
    assert bench.differing(one, other) == []
    return content(bench.root / one / "served") == content(bench.root / other / "served")


def test_a_run_that_reads_while_a_server_answers_is_the_run_of_a_cache_that_was_captured_before(bench, stand_in, asked):
    served = kd.Cache(bench.root / "captured" / "served")
    assert (len(served["train"]), len(served["validation"])) == (96, 4)  # three shards: what 40 steps read
    assert bench.run("verify", "captured").code == 0 and bench.run("verify", "captured/served").code == 0
    assert stand_in.url not in (bench.root / "captured" / "config.toml").read_text()
    before = ("cache-teacher", "--teacher", "teacher", "--teacher-server", stand_in.url, *bench.data, *TEXT)
    bench.run(*before, "--top-k", 8, "--out", "before").ok()
    bench.run("distill", "--cache", "before", *TRAIN, "--lr", 1e-2, "--alpha", 0.9, *bench.eager, "--out", "plain").ok()
    losses, others = ([step["loss"] for step in bench.metrics(run)] for run in ("captured", "plain"))
    # not to the last bit: each shard codes its tail numbers in steps that its first sequences decide
    assert len(losses) == 40 and losses == pytest.approx(others, abs=1e-3)
    stand_in.close()
    state = read_saved(bench.root / "captured/checkpoints/latest")
    assert state["source"]["shards"] == 3  # a checkpoint names what it was trained on
    shutil.copytree(bench.root / "captured", bench.root / "longer", symlinks=True)
    assert asked("longer", stand_in, "--steps", 44, "--json").json["steps"] == 44  # read, and nobody is asked


def test_a_run_is_killed_while_it_captures_and_while_it_trains_and_ends_in_the_same_bits(bench, stand_in, asked):
    killed = asked("interrupted", stand_in, fault="cache.shard.after-batch:kill:5")
    assert killed.code != 0 and not (bench.root / "interrupted" / "served" / "manifest.json").exists()
    assert asked("interrupted", stand_in, fault="train.after-step:kill:22").code != 0
    again = asked("interrupted", stand_in).ok()
    assert "resuming from" in again.stderr and same_runs(bench, "captured", "interrupted")


def test_a_student_trains_on_what_is_there_and_a_server_that_goes_away_ends_the_run_behind_it(bench, stand_in, asked):
    stand_in.always, stand_in.after = "500", 25 + 4 + 2 + 40  # after the first shard
    failed = asked("away", stand_in, "--server-patience", 0.3)
    assert failed.code == 1 and "it answers 500: fault 500, for" in failed.refusal()
    trained = bench.metrics("away")[-1]["step"]
    assert 8 <= trained <= 16 and bench.newest("away").name.endswith(f"{trained:08d}")
    stand_in.always, stand_in.after = "hang", len(stand_in.bodies) + 25 + 8
    (process,) = asked("away", stand_in, wait=False)
    said, until = bench.root / "said.0.err", time.monotonic() + 60
    while "resuming from" not in said.read_text() and time.monotonic() < until:
        time.sleep(0.05)
    time.sleep(1)  # its first step waits for the server, which hangs
    assert "hang" in stand_in.fired
    os.kill(process, signal.SIGTERM)
    (stopped,) = bench.end()
    assert stopped.code == 0 and f"stopped by SIGTERM after step {trained}" in stopped.stderr
    stand_in.always = ""
    asked("away", stand_in).ok()
    assert same_runs(bench, "captured", "away")


def test_a_trial_asks_the_server_for_what_it_reads_alone(bench, stand_in, asked):
    plan = asked("tried", stand_in, "--dry-run", "--json").json
    assert plan["sequences"] == {"train": 100, "validation": 4} and plan["server"]["sequences"] == 84
    assert plan["server"]["tokens_per_second"] > 0 and plan["teacher"] == "teacher"
    rows = [body for body in stand_in.bodies if body["prompt_logprobs"] == 8 and len(body["prompt"]) == 33]
    assert len({tuple(body["prompt"]) for body in rows}) <= 4 + 2 * 8 + 4
    checks = {each["check"]: each["verdict"] for each in asked("tried", stand_in, "--sanity", "--json").json["checks"]}
    assert checks["resume"] == "ok" and checks["overfitting"] == "ok", checks
    assert not (bench.root / "tried").exists()
    stand_in.max_logprobs = 4
    refused = asked("tried", stand_in, "--dry-run")
    assert refused.code == 2 and "start the server with --max-logprobs 8" in refused.refusal()


def test_two_ranks_capture_before_they_train_and_one_reads_what_they_captured(bench, stand_in, asked):
    few = ("--num-sequences", 40, "--eval-freq", 2)
    asked("pair", stand_in, *few, "--steps", 2, world=2)
    assert len(kd.Cache(bench.root / "pair" / "served")["train"]) == 40
    stand_in.close()
    assert asked("pair", stand_in, *few, "--steps", 4, "--json").json["steps"] == 4
    assert [line["step"] for line in bench.metrics("pair")] == [1, 2, 3, 4]
    refused = asked("pair", stand_in, *few, "--steps", 4, "--resume", "never", "--overwrite")
    assert refused.code == 2 and "--resume never would move aside the server's answers" in refused.refusal()


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
