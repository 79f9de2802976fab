"""A plan of somebody's package whose text the student writes between two steps: alone, resumed, rolled back, mixed."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

import kdtrain as kd
from kdtrain.data.order import batch
from kdtrain.models.generate import decoding, generate
from kdtrain.models.head import split

PACKAGE = Path(__file__).parent / "packages" / "selfwritten.py"
BEHIND, SIZE, SEQUENCES = 20, 6, 40
ONLINE = ("--data", "corpus", "--seq-len", 32, "--num-workers", 0, "--num-sequences", SEQUENCES, "--teacher", "teacher")
BESIDE = ("--cache", "cache", "--write-beside")


@pytest.fixture(scope="module")
def run(forks):
    """Run `distill --write-behind` with the package."""
    path = forks.install(PACKAGE, "sections", "plans")

    def run(out, *argv, world=1, fault=None, code=0):
        words = ("distill", "--student", "student.toml", "--out", out, *forks.eager, *forks.fast, "--alpha", 0.2)
        more = ("--write-behind", BEHIND, "--steps", 6, "--checkpoint-freq", 1, "--eval-freq", 3, "--no-async-save")
        ended = forks.launch(world, *words, *more, *argv, fault=fault, PYTHONPATH=path)
        assert ended[0].code == code, ended[0].stderr
        return written(forks, out)

    return run


@pytest.fixture(scope="module")
def whole(run):
    return run("whole", *ONLINE)


def written(forks, out):
    """Return the text that the student of a run wrote, by row."""
    return {int(path.stem): json.loads(path.read_text()) for path in (forks.root / out / "selfwritten").glob("*.json")}


def rows(step):
    """Return the rows that a step is the first to read."""
    return batch(0, SIZE * (step - 1), SIZE, SEQUENCES).tolist()


def test_the_student_writes_the_rows_of_a_step_by_the_weights_of_the_step_before(forks, run, whole):
    assert sorted(whole) == sorted(row for step in range(1, 7) for row in rows(step))
    tokens = kd.Cache(forks.root / "whole" / "data")["train"].read(np.arange(SEQUENCES)).tokens
    assert all(text[:BEHIND] == tokens[row, :BEHIND].tolist() for row, text in whole.items())
    forks.run("export", "whole", "--checkpoint", "step-00000003", "--out", "third").ok()
    model = split(AutoModelForCausalLM.from_pretrained(forks.root / "third").eval())
    for step, same in (4, True), (6, False):
        texts = []
        with decoding(model, model.vocab_size) as next_logits:
            for row in rows(step):
                new = generate(next_logits, tokens[row : row + 1, :BEHIND], 33 - BEHIND, 1.0, 0, row)
                texts.append(torch.cat([tokens[row, :BEHIND], *new]).tolist())
        assert (texts == [whole[row] for row in rows(step)]) == same
    assert all("kd" in line for line in forks.metrics("whole"))  # the teacher answers on it
    assert forks.state("whole")["source"]["sequences"] == 6 * SIZE


def test_validation_is_the_text_of_the_other_options(forks, whole):
    forks.run(
        *("distill", "--student", "student.toml", "--out", "plain", *ONLINE, *forks.eager, *forks.fast),
        *("--alpha", 0.2, "--steps", 1),
    ).ok()
    first = [next(line for line in forks.lines(out) if "validation/loss" in line) for out in ("whole", "plain")]
    assert first[0]["validation/loss"] == first[1]["validation/loss"]
    assert forks.metrics("whole")[0]["loss"] != forks.metrics("plain")[0]["loss"]


def test_a_run_that_is_killed_in_a_writing_ends_with_the_same_text_and_bits(forks, run, whole):
    part = run("killed", *ONLINE, fault=f"selfwritten.before-rename:kill:{3 * SIZE + 3}", code=-9)
    assert len(part) == 3 * SIZE + 2
    assert run("killed", *ONLINE) == whole
    forks.assert_same("killed", "whole")


def test_what_was_written_before_a_rollback_stays_and_the_run_goes_on_behind_it(forks, run, whole):
    nan = "train.gradient:nan:4-5"
    argv = (*ONLINE, "--max-skips", 1)
    texts = run("back", *argv, fault=nan)
    progress = forks.state("back")["progress"]
    assert (progress["rollbacks"], progress["step"]) == (1, 6) and progress["skipped_data"] == [[2 * SIZE, 5 * SIZE]]
    assert all(texts[row] == whole[row] for step in range(1, 5) for row in rows(step))
    assert any(texts[row] != whole[row] for row in rows(6))  # by the weights of step 2
    run("back-killed", *argv, fault=f"{nan},selfwritten.before-rename:kill:{5 * SIZE + 3}", code=-9)
    assert run("back-killed", *argv) == texts
    forks.assert_same("back-killed", "back")


@pytest.fixture(scope="module")
def mixed(run):
    return run("mixed", *BESIDE)


@pytest.mark.parametrize("kind", ["fsdp", "ddp"])
def test_a_student_writes_beside_a_cache_in_step_on_all_ranks(forks, run, mixed, kind):
    argv = (*BESIDE, "--parallel", kind, "--micro-batch-size", 1)
    ranks = run(kind, *argv, world=2)
    assert mixed.keys() == ranks.keys() and 0 < len(mixed) < 6 * SIZE
    # rounding may turn a draw, and all that follows it
    assert sum(text == ranks[row] for row, text in mixed.items()) > len(mixed) / 2
    losses = [[line["loss"] for line in forks.metrics(out)] for out in ("mixed", kind)]
    assert losses[0] == pytest.approx(losses[1], rel=2e-2)
    killed = f"{kind}-killed"
    run(killed, *argv, world=2, fault=f"selfwritten.before-rename:kill:{len(ranks) // 2}@0", code=-9)
    assert run(killed, *argv, world=2) == ranks
    forks.assert_same(killed, kind)
