"""A cache removed while a student trains from it: the last finished step is saved, and the export needs no cache."""

import shutil
import threading
import time

import pytest
from transformers import AutoTokenizer

TRAIN = ("distill", "--student", "student.toml", "--batch-size", 4, "--warmup-steps", 0, "--lr", 1e-3)


@pytest.fixture(scope="module")
def shards(forks):
    """Build `shards`: a cache of more shards than a reader keeps open, one sequence each."""
    argv = ("cache-teacher", "--teacher", "teacher", "--out", "shards", *forks.small, "--top-k", 4)
    forks.run(*argv, "--sequences-per-shard", 1).ok()
    return forks.root / "shards"


def removed(forks, argv, out, what):
    """Start a run, and remove `what` of its cache after its first step."""

    def remove() -> None:
        while not (path := out / "metrics.jsonl").exists() or '"loss"' not in path.read_text():
            time.sleep(0.01)
        # at once: no shard is missed before the rest
        shutil.rmtree(what.rename(what.with_name(f"{what.name}-away")))

    remover = threading.Thread(target=remove, daemon=True)
    remover.start()
    done = forks.run(*argv, "--out", out.name)
    remover.join(60)
    return done


def test_a_cache_removed_in_training_ends_the_run_by_its_name_and_the_same_command_resumes(forks, shards):
    cache, out = forks.root / "short-lived", forks.root / "bereft"
    shutil.copytree(shards, cache)
    argv = (*TRAIN, "--cache", cache.name, "--steps", 40, *forks.eager, "--checkpoint-freq", 1000)
    done = removed(forks, argv, out, cache)
    assert (done.code, done.stdout) == (1, "")
    assert "the cache short-lived is gone" in done.refusal() and "put it back" in done.refusal()
    last = forks.metrics(out.name)[-1]["step"]
    assert forks.newest(out.name).name == f"interrupted-{last:08d}"

    shutil.copytree(shards, cache)
    forks.run(*argv, "--out", out.name).ok()
    assert [line["step"] for line in forks.metrics(out.name)] == list(range(1, 41))
    forks.run(*argv, "--out", "undisturbed").ok()
    assert forks.differing("undisturbed", out.name) == []


def test_a_tokenizer_removed_in_training_is_in_the_exported_student_all_the_same(forks, shards):
    cache, out = forks.root / "without-tokenizer", forks.root / "exported-all-the-same"
    shutil.copytree(shards, cache)
    argv = (*TRAIN, "--cache", cache.name, "--steps", 40, *forks.eager)
    removed(forks, argv, out, cache / "tokenizer").ok()
    student, teacher = (AutoTokenizer.from_pretrained(forks.root / each) for each in (out / "student", "teacher"))
    assert student("def f(x):")["input_ids"] == teacher("def f(x):")["input_ids"]


@pytest.mark.parametrize("engine, fault", [("ddp", "cache.read:enospc:20@1"), ("fsdp", "cache.read:enospc:32@0")])
def test_a_rank_that_cannot_read_ends_all_and_they_save_the_last_finished_step(ranks_of, shards, engine, fault):
    argv = (*TRAIN, "--cache", "shards", "--steps", 40, *ranks_of.eager, "--checkpoint-freq", 1000)
    argv += ("--parallel", engine, "--micro-batch-size", 1, "--out", f"one-cannot-{engine}")
    ended = ranks_of.launch(2, *argv, fault=fault)
    assert [each.code for each in ended] == [1, 1]
    said = [line for each in ended for line in each.stderr.splitlines() if line.startswith("kdtrain: ")]
    assert len(said) == 1 and "cannot be read" in said[0] and "shards/shards/train-" in said[0]
    last = ranks_of.metrics(f"one-cannot-{engine}")[-1]["step"]
    assert last > 1 and ranks_of.newest(f"one-cannot-{engine}").name == f"interrupted-{last:08d}"
    ranks_of.ok(2, *argv)
    ranks_of.ok(2, *argv, "--out", f"both-can-{engine}")
    assert ranks_of.differing(f"both-can-{engine}", f"one-cannot-{engine}") == []
