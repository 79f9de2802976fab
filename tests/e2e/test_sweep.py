"""A sweep by the real command: killed and resumed it makes the table of one that ran through, and of its commands."""

import json
import os
import re
import shlex
import signal
import subprocess
import sys
import time

import pytest

FILE = """
seeds = [0]

[caches.c]
teacher = "teacher"
data = "corpus"
seq_len = 32
num_sequences = 24
validation_sequences = 8
num_workers = 0
precision = "fp32"

[common]
student = "student.toml"
cache = "c"
steps = 6
batch_size = 6
warmup_steps = 0
lr = 1e-2
compile = false
precision = "fp32"
log_to = "none"

[arms.kd]

[arms.diverges]
lr = 1e6
clip = 1e6
spike_patience = 0

[test]
teacher = "teacher"
data = "corpus"
split = "test"
seq_len = 32
num_sequences = 4
"""


@pytest.fixture(scope="module")
def swept(bench):
    """Kill a sweep's process while its first student trains, and resume the sweep."""
    (bench.root / "s.toml").write_text(FILE)
    words = [sys.executable, "-m", "kdtrain", "sweep", "s.toml", "--json"]
    with open(bench.root / "said", "w") as said:
        first = subprocess.Popen(words, cwd=bench.root, stdout=said, stderr=said)
        begun = time.monotonic()
        while not (bench.root / "s/kd/seed-0/metrics.jsonl").exists():
            assert time.monotonic() - begun < 300 and first.poll() is None, (bench.root / "said").read_text()
            time.sleep(0.02)
        os.kill(first.pid, signal.SIGKILL)
        first.wait()
    return bench.alone(*words[3:])


@pytest.mark.slow
def test_a_killed_sweep_is_resumed_and_a_run_that_ended_badly_is_a_result_of_its_arm(bench, swept):
    groups = {each["name"]: each for each in swept.json["groups"]}
    assert groups.keys() == {"kd", "diverges"} and "diverges/seed-0: " in swept.stderr
    assert [run["status"] for run in groups["kd"]["runs"]] == ["done 6/6"]
    assert all(not run["status"].startswith("done") for run in groups["diverges"]["runs"])
    numbers = groups["kd"]["numbers"]
    assert [numbers[f"test_{name}"]["seeds"] for name in ("loss", "kl", "agreement")] == [1, 1, 1]
    again = bench.alone("sweep", "s.toml", "--json")
    assert again.json == swept.json and "step " not in again.stderr


@pytest.mark.slow
def test_each_run_is_that_of_its_command_by_hand(bench, swept):
    (bench.root / "more.toml").write_text(FILE.replace("[0]", "[0, 1]"))
    plan = bench.run("sweep", "more.toml", "--out", "s", "--dry-run", "--json").ok().json
    found = {each["name"]: each for each in plan["commands"]}
    assert [name for name, each in found.items() if not each["done"]] == ["kd/seed-1", "diverges/seed-1"]
    assert found["kd/seed-1"]["how"] == "as kd/seed-0" and found["kd/seed-1"]["seconds"] > 0
    tried = found["diverges/seed-1"]  # by its own dry run: none of its arm ended well
    assert tried["how"] == "measured" or tried["how"].startswith("step 2"), tried
    line = found["kd/seed-0"]["command"]
    words = [each if each != "s/kd/seed-0" else "by-hand" for each in shlex.split(line)[1:]]
    bench.run(*words).ok()
    ours, theirs = (json.loads((bench.root / each / "result.json").read_text()) for each in ("by-hand", "s/kd/seed-0"))
    assert ours["best_validation_loss"] == theirs["best_validation_loss"] and ours["tokens"] == theirs["tokens"]


def test_an_arm_that_was_begun_with_other_options_is_refused(bench, swept):
    (bench.root / "s.toml").write_text(FILE.replace("steps = 6", "steps = 7"))
    refused = bench.run("sweep", "s.toml")
    assert refused.code == 2 and re.search(
        r"kd/seed-0 was begun with other options \(--steps was 6\); rename", refused.refusal()
    )
    (bench.root / "s.toml").write_text(FILE)
