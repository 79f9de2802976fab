import json
from pathlib import Path

import pytest

from kdtrain.testing import END_OF_TEXT
from tests.token_kinds import train

RUN = ("distill", "--cache", "cache", "--student", "other.toml", "--steps", 6, "--eval-freq", 3, "--checkpoint-freq", 3)


@pytest.fixture
def bench(workbench):
    """The workbench, with a student whose tokenizer has words where the teacher's has bytes."""
    if not Path("other.toml").exists():
        train("gpt2", 400, Path("text.txt").read_text()).save_pretrained("words")
        Path("other.toml").write_text(Path("student.toml").read_text().replace("'teacher'", "'words'"))
    return workbench


def distil(bench, out, *more):
    return bench.call(*RUN, "--out", out, *bench.plain, *more)


def losses(out):
    lines = [json.loads(line) for line in (Path(out) / "metrics.jsonl").read_text().splitlines()]
    return [line["loss"] for line in lines if "loss" in line]


def test_a_student_of_another_tokenizer_is_refused_without_the_option_which_is_named(bench):
    code, _, err = distil(bench, "refused")
    assert code == 2 and "another tokenizer" in err and "--cross-tokenizer auto" in err


def test_a_cache_of_less_than_one_row_of_the_student_is_one_line(bench):
    words = ("cache-teacher", "--teacher", "teacher", "--top-k", 4, *bench.text, "--precision", "fp32")
    code, _, err = bench.call(*words, "--out", "short", "--num-sequences", 40, "--validation-sequences", 1)
    assert code == 0, err
    run = ("distill", "--cache", "short", *RUN[3:], *bench.plain)
    code, _, err = bench.call(*run, "--out", "less", "--cross-tokenizer", "auto")
    assert code == 2 and "the text of 'validation' in short is less than one row of" in err and "Traceback" not in err


@pytest.mark.parametrize("terms", ["auto", "chunks", "cells"])
def test_a_student_of_another_tokenizer_learns_from_the_cache(bench, terms):
    # the teacher is a random one, so that the text alone makes the validation better
    code, _, err = distil(bench, terms, "--cross-tokenizer", terms, "--alpha", 0.1, "--lr", 3e-3)
    assert code == 0, err
    assert losses(terms)[-1] < losses(terms)[0]
    result = json.loads((Path(terms) / "result.json").read_text())
    assert result["stop_reason"] == "done" and result["last_validation_loss"] < result["first_validation_loss"]
    assert "of the student's labels begin where one of the teacher's does" in err
    assert (Path(terms) / "student" / "tokenizer.json").read_text() == Path("words/tokenizer.json").read_text()
    assert (Path(terms) / "data" / "view.json").is_file()


def test_the_same_tokenizer_is_the_ordinary_run_to_the_bit(bench):
    argv = [*RUN]
    argv[4] = "student.toml"
    for out, more in (("plain", ()), ("across", ("--cross-tokenizer", "both"))):
        code, _, err = bench.call(*argv, "--out", out, *bench.plain, *more)
        assert code == 0, err
    assert losses("plain") == losses("across") and len(losses("plain")) > 0


@pytest.mark.parametrize(
    "options, message",
    [
        (("--cross-tokenizer", "words"), "--cross-tokenizer 'words' is unknown; use auto, cells, chunks, both"),
        (("--cross-tokenizer", "both", "--temperature", 2), "right at T = 1 only"),
        (("--cross-tokenizer", "both", "--divergence", "reverse-kl"), "cannot be computed"),
        (("--cross-tokenizer", "both", "--cache", "cache"), "--cross-tokenizer reads one cache"),
        (("--special-tokens", "a=b"), "--special-tokens has no effect without --cross-tokenizer"),
        (("--cross-tokenizer", "both", "--special-tokens", "a"), "--special-tokens 'a' is not TEACHER'S=STUDENT'S"),
    ],
)
def test_what_is_impossible_across_tokenizers_is_one_line(bench, options, message):
    code, _, err = distil(bench, "impossible", *options)
    assert code == 2 and message in err and "Traceback" not in err


def bits(bench, *argv):
    return bench.json("evaluate", *argv)


def test_bits_per_byte_compare_a_student_with_the_teacher_of_another_tokenizer(bench):
    code, _, err = distil(bench, "bits", "--cross-tokenizer", "cells", "--lr", 3e-3)
    assert code == 0, err
    result = json.loads(Path("bits/result.json").read_text())
    last = json.loads(Path("bits/metrics.jsonl").read_text().splitlines()[-1])
    last = {name.removeprefix("validation/"): value for name, value in last.items()}
    assert f"{last['bits_per_byte']:.3f} bits/byte teacher {last['teacher_bits_per_byte']:.3f}" in err
    assert result["last_bits_per_byte"] == pytest.approx(last["bits_per_byte"])
    assert result["teacher_bits_per_byte"] == pytest.approx(last["teacher_bits_per_byte"])
    # the teacher's own tokens of this text, without the student's
    teacher = bits(bench, "--student", "teacher", "--cache", "cache")
    assert result["teacher_bits_per_byte"] == pytest.approx(teacher["bits_per_byte"], rel=0.02)
    assert teacher["teacher_bits_per_byte"] == pytest.approx(teacher["bits_per_byte"], rel=1e-3)  # cached in 16 bits
    again = bits(bench, "--student", "bits/student", "--cache", "cache", "--cross-tokenizer", "auto")
    assert again["bits_per_byte"] == pytest.approx(min(result["best_bits_per_byte"], again["bits_per_byte"]))
    assert again["teacher_bits_per_byte"] == pytest.approx(result["teacher_bits_per_byte"])
    assert 0 < again["boundaries"] <= 1 and again["kl"] > 0 and 0 < again["entropy_kept"] <= 1
    assert result["alignment"]["terms"] == ["cells"] and result["alignment"]["entropy_kept"] == again["entropy_kept"]
    code, out, _ = bench.call("compare", "bits", "--json")
    (group,) = json.loads(out)["groups"]
    for name in ("bits_per_byte", "teacher_bits_per_byte", "boundaries", "entropy_kept", "kl"):
        assert group["numbers"][name]["mean"] > 0


def test_runs_of_one_cache_compare_and_the_card_names_the_cache_and_bits(bench):
    for terms in ("cells", "chunks"):
        code, _, err = distil(bench, f"of-{terms}", "--cross-tokenizer", terms, "--alpha", 0.1, "--lr", 3e-3)
        assert code == 0, err
    assert "different caches" not in bench.call("compare", "of-cells", "of-chunks")[1]
    digest = json.loads(Path("cache/manifest.json").read_text())["digest"]
    card = Path("of-cells/student/README.md").read_text()
    assert f"| cache | {digest} |" in card and "bits a byte" in card and "| text |" in card
    assert json.loads(Path("of-cells/student/kdtrain.json").read_text())["cache"] == digest


def test_the_sanity_checks_of_a_run_across_tokenizers_leave_out_what_has_no_meaning_there(bench):
    code, out, err = distil(bench, "sane", "--cross-tokenizer", "both", "--sanity", "--json")
    assert code in (0, 1) and "no logits of the same tokens to compare" in out, err


def test_the_table_of_special_tokens_can_be_given(bench):
    given = ("--special-tokens", f"{END_OF_TEXT}=<|im_end|>")
    code, _, err = distil(bench, "given", "--cross-tokenizer", "auto", "--alpha", 0.1, *given)
    assert code == 0 and f"given: {END_OF_TEXT} is <|im_end|>" in err
    code, _, err = distil(bench, "unknown", "--cross-tokenizer", "auto", "--special-tokens", f"{END_OF_TEXT}=nothing")
    assert code == 2 and "'nothing' is not a special token of" in err


def test_an_online_teacher_of_another_tokenizer_teaches_by_the_same_door(bench):
    run = ("distill", "--teacher", "teacher", "--student", "other.toml", *RUN[5:], *bench.text, *bench.plain)
    more = ("--num-sequences", 40, "--alpha", 0.1, "--lr", 3e-3)
    code, _, err = bench.call(*run, *more, "--cross-tokenizer", "both", "--out", "online")
    assert code == 0, err
    result = json.loads(Path("online/result.json").read_text())
    cached = ("--cache", "cache", "--alpha", 0.1, "--lr", 3e-3)
    code, _, err = bench.call(*RUN, *cached[2:], *bench.plain, "--cross-tokenizer", "both", "--out", "as-cached")
    assert code == 0, err
    # the same rows of the same text: the cache has 12 entries where the teacher has all of its cells
    for name in ("tokens", "teacher_bits_per_byte", "first_validation_loss"):
        assert result[name] == pytest.approx(json.loads(Path("as-cached/result.json").read_text())[name], rel=1e-3)
    assert losses("online") == pytest.approx(losses("as-cached"), rel=0.05)
    assert result["alignment"]["terms"] == ["cells", "chunks"] and (Path("online") / "view" / "view.json").is_file()
    code, out, _ = bench.call("verify", "online", "--json")
    assert code == 0, out
    code, _, err = bench.call(*run, *more, "--cross-tokenizer", "both", "--out", "online", "--hidden-loss", "mse")
    assert code == 2 and "compares states token by token" in err
