"""A run from a cache of another tokenizer: in ranks, killed anywhere, and resumed, it ends with the same bits."""

import json
import shutil
import signal

import pytest

from kdtrain.library import Cache
from kdtrain.tokenizers.view import View
from tests.token_kinds import train

RUN = (
    *("distill", "--cache", "cache", "--student", "other.toml", "--cross-tokenizer", "--steps", 10),
    *("--batch-size", 6, "--micro-batch-size", 3, "--lr", 1e-2, "--warmup-steps", 2, "--eval-freq", 5, "--alpha", 0.1),
    *("--checkpoint-freq", 5, "--log-to", "none", "--log-freq", 1, "--no-compile", "--precision", "fp32"),
)


@pytest.fixture(scope="module")
def ranks(ranks_of, cached):
    """Add to the bench in ranks a student of another tokenizer."""
    text = "".join(path.read_text() for path in sorted((ranks_of.root / "corpus").rglob("*.txt"))[:2])
    train("gpt2", 500, text[:20000]).save_pretrained(ranks_of.root / "words")
    ranks_of.student("other", tokenizer="words", num_hidden_layers=1)
    return ranks_of


@pytest.fixture(scope="module")
def whole(ranks):
    """Make `whole-1` and `whole-2`: runs of one and two ranks that nothing interrupts."""
    ranks.ok(1, *RUN, "--out", "whole-1")
    ranks.ok(2, *RUN, "--out", "whole-2")
    return ranks


def view_of(folder):
    return {path.name: path.read_bytes() for path in folder.rglob("*") if path.is_file() and path.suffix != ".lock"}


def test_two_ranks_train_what_one_process_trains(whole):
    runs = ["whole-1", "whole-2"]
    first, second = map(whole.tensors, runs)
    names = [name for name in first if not name.startswith("optimizer.")]
    assert max(float((first[name] - second[name]).abs().max()) for name in names) <= 1e-5
    for line, other in zip(*map(whole.lines, runs), strict=True):
        for name in line.keys() & {"loss", "kd", "validation/bits_per_byte", "validation/kl", "validation/compared"}:
            assert other[name] == pytest.approx(line[name], rel=1e-4), (line["step"], name)
    assert whole.lines(runs[0])[-1]["validation/bits_per_byte"] > 0


@pytest.mark.parametrize("fault", ["train.after-micro-batch:kill:15", "checkpoint.write:kill:30000"])
def test_a_killed_run_resumes_to_the_bit(whole, fault):
    out = f"killed-{fault[:5]}"
    assert whole.run(*RUN, "--out", out, fault=fault).code == -signal.SIGKILL
    whole.ok(1, *RUN, "--out", out)
    assert whole.differing("whole-1", out) == []


def test_a_killed_rank_ends_the_other_and_the_same_command_finishes_with_the_same_bits(whole):
    ended = whole.launch(2, *RUN, "--out", "killed-2", fault="train.after-micro-batch:kill:7@1")
    assert [each.code for each in ended] == [1, -signal.SIGKILL]
    whole.ok(2, *RUN, "--out", "killed-2")
    assert whole.differing("whole-2", "killed-2") == []


def test_a_view_killed_while_it_is_made_is_completed_and_is_the_same(whole):
    points = ("settings.before-rename", "after-shard", "record.before-rename")
    for number, fault in enumerate(f"view.{point}:kill:1" for point in points):
        out = f"view-{number}"
        assert whole.run(*RUN, "--out", out, fault=fault).code == -signal.SIGKILL
        assert not (whole.root / out / "data" / "view.json").exists()
        whole.ok(1, *RUN, "--out", out, "--steps", 5)  # trained on bytes that are the same
        assert view_of(whole.root / "whole-1" / "data") == view_of(whole.root / out / "data")


def test_a_view_that_was_damaged_between_two_launches_is_one_line_and_made_anew_once_removed(whole):
    shutil.copytree(whole.root / "whole-1", whole.root / "damaged", symlinks=True)
    shard = whole.root / "damaged" / "data" / "train-00000.npy"
    content = bytearray(shard.read_bytes())
    content[len(content) // 2] ^= 4
    shard.write_bytes(content)
    more = (*RUN, "--out", "damaged", "--steps", 12)
    done = whole.run(*more)
    assert done.code == 1 and "train-00000.npy cannot be read (its SHA-256 differs)" in done.stderr.splitlines()[-1]
    assert "Traceback" not in done.stderr
    shutil.rmtree(whole.root / "damaged" / "data")
    whole.ok(1, *more)
    assert json.loads((whole.root / "damaged" / "result.json").read_text())["step"] == 12
    view = View(whole.root / "damaged" / "data", Cache(whole.root / "cache"))
    assert len(view["train"]) > 10
