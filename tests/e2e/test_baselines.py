"""What a run logs before its first step: the losses of its teacher, a bigram and the best run beside it."""

import json
import math
import random
import shutil
from collections import Counter
from itertools import pairwise
from pathlib import Path

import pytest

from kdtrain.library import Cache
from kdtrain.run.baselines import label_loss
from kdtrain.training.sources.cache import CachedSource

ROOT = Path(__file__).resolve().parents[2]
TEACHER = ROOT / "teachers/stdlib-5m"
SIZE = ("--seq-len", 64, "--num-sequences", 24, "--validation-sequences", 8, "--precision", "fp32", "--num-workers", 0)
RUN = ("--student", "any.toml", "--steps", 1, "--batch-size", 4, "--precision", "fp32", "--no-compile")


@pytest.fixture(scope="module")
def taught(bench):
    """Capture the standard library: `right` by the shipped teacher, `wrong` by one whose tokenizer has shuffled ids."""
    shutil.copytree(TEACHER, bench.root / "shuffled")
    file = bench.root / "shuffled/tokenizer.json"
    tokenizer = json.loads(file.read_text())
    vocabulary = tokenizer["model"]["vocab"]
    special = {each["content"] for each in tokenizer["added_tokens"]}
    words = [word for word in vocabulary if word not in special]
    ids = [vocabulary[word] for word in words]
    random.Random(0).shuffle(ids)
    vocabulary.update(zip(words, ids, strict=True))
    file.write_text(json.dumps(tokenizer))
    spec = (ROOT / "students/stdlib-1m.toml").read_text().splitlines(keepends=True)
    (bench.root / "any.toml").write_text("".join(line for line in spec if not line.startswith("tokenizer")))
    made = {}
    for name, teacher in (("right", TEACHER), ("wrong", "shuffled")):
        words = ("cache-teacher", "--teacher", teacher, "--data", "stdlib", "--out", name, *SIZE, "--json")
        made[name] = bench.run(*words).json["teacher_loss"]
    bench.run("distill", "--cache", "right", *RUN, "--out", "runs/text", "--alpha", 0, "--log-to", "none").ok()
    return made


def test_a_cache_and_a_run_begin_with_the_teachers_loss_and_a_bigrams(bench, taught):
    ended = bench.run("distill", "--cache", "right", *RUN, "--out", "runs/right", "--alpha", "auto", "--log-to", "none")
    (line,) = (each for each in ended.ok().stderr.splitlines()[:10] if "a bigram of the text" in each)
    reader = Cache(bench.root / "right")
    losses = {split: label_loss(reader[split]) for split in ("train", "validation")}
    assert taught["right"] == {split: pytest.approx(loss) for split, loss in losses.items()}
    first = bench.lines("runs/right")[0]
    assert first["validation/teacher_loss"] == pytest.approx(losses["validation"], abs=1e-4)
    teacher = f"teacher {losses['validation']:.3f} on validation, {losses['train']:.3f} on train"
    best = json.loads((bench.root / "runs/text/result.json").read_text())["best_validation_loss"]
    bigram = CachedSource(reader["train"]).bigram_loss(reader["validation"])
    assert line.endswith(f"{teacher}; a bigram of the text {bigram:.3f}; best here runs/text {best:.3f}; alpha 0.9")
    assert "weak-teacher" not in (bench.root / "runs/right/events.jsonl").read_text()


def test_a_teacher_with_a_shuffled_tokenizer_is_a_warning(bench, taught):
    ended = bench.run("distill", "--cache", "wrong", *RUN, "--out", "runs/wrong", "--log-to", "none").ok()
    (line,) = (each for each in ended.stderr.splitlines()[:10] if "is above that of a bigram" in each)
    assert f"the teacher's loss on this text, {taught['wrong']['validation']:.3f}" in line
    events = [json.loads(each) for each in (bench.root / "runs/wrong/events.jsonl").read_text().splitlines()]
    assert [each["level"] for each in events if each["event"] == "weak-teacher"] == ["warning"]


def test_the_bigram_is_that_of_witten_and_bell(bench, taught):
    train, validation = (Cache(bench.root / "right")[split] for split in ("train", "validation"))
    rows = [train.text([row])["tokens"][0].tolist() for row in range(len(train))]
    single, pairs = Counter(token for row in rows for token in row), Counter()
    for row in rows:
        pairs.update(pairwise(row))
    held = [validation.text([row])["tokens"][0].tolist() for row in range(len(validation))]
    number, kinds = single.total(), len(single)
    size = max(token for row in (*rows, *held) for token in row) + 1
    after: dict[int, Counter[int]] = {}
    for (before, token), count in pairs.items():
        after.setdefault(before, Counter())[token] = count
    total, tokens = 0.0, 0
    for row in held:
        for before, token in pairwise(row):
            chance = (single[token] + kinds / size) / (number + kinds)
            if seen := after.get(before):
                chance = (seen[token] + len(seen) * chance) / (seen.total() + len(seen))
            total, tokens = total - math.log(chance), tokens + 1
    assert CachedSource(train).bigram_loss(validation) == pytest.approx(total / tokens, rel=1e-12)
