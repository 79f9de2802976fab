import dataclasses
import json
import shutil
from collections import Counter
from contextlib import ExitStack
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoTokenizer

from kdtrain import faults
from kdtrain.config.commands import DistillConfig
from kdtrain.errors import UsageError
from kdtrain.library import Cache
from kdtrain.models.spec import ModelSpec
from kdtrain.run.folder import changes
from kdtrain.testing import END_OF_TEXT, tiny_model, write_model_folder
from kdtrain.tokenizers import alignment as alignments
from kdtrain.training.sources.plan import CachedData, PlanRequest
from tests.token_kinds import train
from tests.web import serving

RUN = ("distill", "--cache", "cache", "--student", "other.toml", "--steps", 6, "--eval-freq", 3, "--checkpoint-freq", 3)
SAME = (*RUN[:4], "student.toml", *RUN[5:])


@pytest.fixture
def bench(workbench):
    """Add to the workbench a student whose tokenizer has words where the teacher's has bytes."""
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
    assert code == 2 and "another tokenizer" in err and "--cross-tokenizer" in err


def test_a_cache_of_less_than_one_row_of_the_student_is_one_line(bench):
    words = ("cache-teacher", "--teacher", "teacher", "--top-k", 4, *bench.text, "--precision", "fp32")
    code, _, err = bench.call(*words, "--out", "short", "--num-sequences", 40, "--validation-sequences", 1)
    assert code == 0, err
    run = ("distill", "--cache", "short", *RUN[3:], *bench.plain)
    code, _, err = bench.call(*run, "--out", "less", "--cross-tokenizer")
    assert code == 2 and "the text of 'validation' in short is less than one row of" in err and "Traceback" not in err


@pytest.fixture
def learned(bench):
    """Make `learns`, a run across tokenizers, once; return what it printed."""
    printed = Path("learns.log")
    if not printed.exists():
        code, _, err = distil(bench, "learns", "--cross-tokenizer", "--alpha", 0.1, "--lr", 3e-3)
        assert code == 0, err
        printed.write_text(err)
    return printed.read_text()


def test_a_student_of_another_tokenizer_learns_from_the_cache(bench, learned):
    # the teacher is a random one, so that the text alone makes the validation better
    assert losses("learns")[-1] < losses("learns")[0]
    result = json.loads(Path("learns/result.json").read_text())
    assert result["stop_reason"] == "done" and result["last_validation_loss"] < result["first_validation_loss"]
    assert "of the student's labels of 'train' begin where one of the teacher's does" in learned
    assert "loss = .1 cells + .9 ce" in learned and ".1 cells + .9 ce of one" in bench.call("inspect", "learns")[1]
    assert Path("learns/student/tokenizer.json").read_text() == Path("words/tokenizer.json").read_text()
    assert Path("learns/data/view.json").is_file()


@pytest.mark.parametrize(("before", "resumes"), [("cells", True), ("auto", True), ("chunks", False), ("both", False)])
def test_a_run_of_version_0_2_resumes_if_its_term_was_cells(bench, before, resumes):
    config = DistillConfig(student="other.toml", out=Path("never"), cache=("cache",), cross_tokenizer=True)
    saved = config.deciding()
    saved["run"]["cross_tokenizer"] = before
    found = changes(saved, config)
    assert found == [] if resumes else len(found) == 1 and "version 0.2.0 (commit ab61eace)" in found[0]
    code, _, err = distil(bench, "never", "--cross-tokenizer", before)
    assert code == 2 and f"--cross-tokenizer {before} is " in err and not Path("never").exists()


def test_the_same_tokenizer_is_the_ordinary_run_to_the_bit(bench):
    for out, more in (("plain", ()), ("across", ("--cross-tokenizer",))):
        code, _, err = bench.call(*SAME, "--out", out, *bench.plain, *more)
        assert code == 0, err
    assert losses("plain") == losses("across") and len(losses("plain")) > 0


def test_the_rows_of_a_view_of_the_same_tokenizer_train_to_the_bits_of_the_ordinary_run(bench, monkeypatch):
    argv = ("--num-samples", 20, "--num-sequences", 40, *bench.text, "--precision", "fp32", "--out", "samples")
    code, _, err = bench.call("cache-teacher", "--teacher", "teacher", *argv)
    assert code == 0, err
    argv = ("distill", "--cache", "samples", "--student", "student.toml", "--steps", 60, "--eval-freq", 60)
    argv += (*bench.plain, "--lr", 3e-3, "--alpha", 0.5)  # by itself alpha takes groups of tokens across tokenizers
    monkeypatch.setattr("kdtrain.run.tokenizer_view.differ", lambda *_: True)
    for out, more in (("ordinary", ()), ("identity", ("--cross-tokenizer",))):
        code, _, err = bench.call(*argv, "--out", out, *more)
        assert code == 0, err
    assert (Path("identity") / "data" / "view.json").is_file() and not Path("ordinary/data").exists()
    assert losses("identity") == losses("ordinary") and len(losses("ordinary")) > 1
    one, other = (load_file(f"{out}/student/model.safetensors") for out in ("identity", "ordinary"))
    assert one.keys() == other.keys() and all(torch.equal(each, other[name]) for name, each in one.items())


@pytest.mark.parametrize(
    "options, message",
    [
        (("--cross-tokenizer", "--temperature", 2), "right at T = 1 only"),
        (("--cross-tokenizer", "--divergence", "reverse-kl"), "cannot be computed"),
        (("--cross-tokenizer", "--tail", "drop"), "with --tail drop cannot be computed across tokenizers"),
        (("--cross-tokenizer", "--cache", "cache"), "--cross-tokenizer reads one cache"),
        (("--special-tokens", "a=b"), "--special-tokens has no effect without --cross-tokenizer"),
        (("--cross-tokenizer", "--special-tokens", "a"), "--special-tokens 'a' is not TEACHER'S=STUDENT'S"),
        (("--cross-tokenizer", "--special-tokens", "a=b", "--special-tokens", "a="), "gives 'a' twice"),
    ],
)
def test_what_is_impossible_across_tokenizers_is_one_line(bench, options, message):
    code, _, err = distil(bench, "impossible", *options)
    assert code == 2 and message in err and "Traceback" not in err
    assert not Path("impossible").exists()


def test_a_student_whose_tokenizer_has_more_entries_than_its_model_is_refused_before_the_view_is_made(bench):
    words_model()
    small = json.loads(Path("words-model/config.json").read_text())
    shutil.copytree("words-model", "small", dirs_exist_ok=True)
    write_model_folder(
        Path("small"), tiny_model("llama", small["vocab_size"] - 9), AutoTokenizer.from_pretrained("words")
    )
    size = small["vocab_size"]
    words = f"small has a tokenizer of {size} entries, and its model {size - 9}; name"
    run = ("distill", "--cache", "cache", "--student", "small", *RUN[5:], *bench.plain, "--out", "refused")
    for argv in (run, ("evaluate", "--student", "small", "--cache", "cache")):
        code, _, err = bench.call(*argv, "--cross-tokenizer")
        assert code == 2 and words in err and "entries: " not in err and not Path("refused").exists()


def crossed(cells, *_):
    """Return cells that no text agrees with."""
    return dataclasses.replace(cells, of_teacher=cells.of_teacher[::-1].copy())


def test_cells_that_disagree_with_the_text_too_often_are_one_line(bench, monkeypatch):
    monkeypatch.setattr(alignments, "merge", crossed)
    code, _, err = distil(bench, "crossed", "--cross-tokenizer")
    assert code == 2 and "in different cells at" in err.splitlines()[-1] and "at most 5%" in err.splitlines()[-1]
    code, _, err = bench.call("evaluate", "--student", "words-model", "--cache", "cache", "--cross-tokenizer")
    assert code == 2 and "give the student another tokenizer" in err.splitlines()[-1]


def words_model():
    """Make a model folder with the tokenizer of words."""
    if not Path("words-model").exists():
        tokenizer = AutoTokenizer.from_pretrained("words")
        write_model_folder(Path("words-model"), tiny_model("llama", len(tokenizer), seed=2), tokenizer)


def planned(config):
    """Plan what a run of `config` would read."""
    student, more = ModelSpec.read(config.student), {"device": torch.device("cpu"), "held": ExitStack(), "trial": False}
    more |= {"capturing": None, "teacher": None, "names": (*config.plans,)}
    return PlanRequest(config=config, student=student, **more).next()


def test_a_student_of_the_layers_of_a_model_has_its_tokenizer(bench):
    words_model()
    Path("layers.toml").write_text("init = 'teacher-layers'\nteacher = 'words-model'\nlayers = [0]\n")
    config = DistillConfig(student="layers.toml", out=Path("never"), cache=("cache",), cross_tokenizer=True)
    facts = planned(config).facts
    assert facts is not None and facts.vocab_size == len(AutoTokenizer.from_pretrained("words"))


@pytest.mark.parametrize("spec", ["init = 'teacher-layers'\nteacher = 'teacher'\nlayers = [0]\n", None])
def test_a_student_of_the_teachers_layers_or_without_a_tokenizer_takes_the_ordinary_path(bench, spec):
    spec = spec or Path("student.toml").read_text().replace("tokenizer = 'teacher'", "")
    Path("same.toml").write_text(spec)
    config = DistillConfig(student="same.toml", out=Path("never"), cache=("cache",), cross_tokenizer=True)
    assert isinstance(planned(config), CachedData)
    with pytest.raises(UsageError, match=r"--special-tokens has no effect: .*tokenizer"):
        planned(dataclasses.replace(config, special_tokens=("a=b",)))


def bits(bench, *argv):
    return bench.json("evaluate", *argv)


def test_bits_per_byte_compare_a_student_with_the_teacher_of_another_tokenizer(bench, learned):
    result = json.loads(Path("learns/result.json").read_text())
    last = json.loads(Path("learns/metrics.jsonl").read_text().splitlines()[-1])
    last = {name.removeprefix("validation/"): value for name, value in last.items()}
    assert f"{last['bits_per_byte']:.3f} bits/byte teacher {last['teacher_bits_per_byte']:.3f}" in learned
    assert result["last_bits_per_byte"] == pytest.approx(last["bits_per_byte"])
    assert result["teacher_bits_per_byte"] == pytest.approx(last["teacher_bits_per_byte"])
    # the teacher's own tokens of this text, without the student's
    teacher = bits(bench, "--student", "teacher", "--cache", "cache")
    assert result["teacher_bits_per_byte"] == pytest.approx(teacher["bits_per_byte"], rel=5e-3)
    assert teacher["teacher_bits_per_byte"] == pytest.approx(teacher["bits_per_byte"], rel=1e-3)  # cached in 16 bits
    code, _, err = bench.call("evaluate", "--student", "learns/student", "--cache", "cache")
    assert code == 2 and "--cross-tokenizer" in err
    again = bits(bench, "--student", "learns/student", "--cache", "cache", "--cross-tokenizer")
    assert again["bits_per_byte"] == pytest.approx(result["best_bits_per_byte"], rel=1e-5)
    assert again["teacher_bits_per_byte"] == pytest.approx(result["teacher_bits_per_byte"])
    assert 0 < again["compared"] <= 1 and again["kl"] > 0 and 0 < again["entropy_kept"] <= 1
    assert result["alignment"]["terms"] == ["cells"] and result["alignment"]["entropy_kept"] == again["entropy_kept"]
    code, out, _ = bench.call("compare", "learns", "--json")
    (group,) = json.loads(out)["groups"]
    for name in ("bits_per_byte", "teacher_bits_per_byte", "compared", "entropy_kept", "kl"):
        assert group["numbers"][name]["mean"] > 0


def test_runs_of_one_cache_compare_and_the_card_names_the_cache_and_bits(bench, learned):
    code, _, err = bench.call(*SAME, "--out", "of-its-own", *bench.plain)
    assert code == 0, err
    assert "different caches" not in bench.call("compare", "learns", "of-its-own")[1]
    compared = json.loads(bench.call("compare", "of-its-own", "learns", "--json")[1])
    numbers = compared["groups"][1]["numbers"]
    assert numbers["bits_per_byte"]["difference"] is not None and "different tokenizers" in compared["notes"][0]
    for name in ("best_validation_loss", "kl", "accuracy"):
        assert numbers[name]["mean"] is not None and numbers[name]["difference"] is None
    digest = json.loads(Path("cache/manifest.json").read_text())["digest"]
    card = Path("learns/student/README.md").read_text()
    assert f"| cache | {digest} |" in card and "bits a byte" in card and "| text |" in card
    assert json.loads(Path("learns/student/kdtrain.json").read_text())["cache"] == digest


def test_packed_text_takes_the_place_of_a_view_that_was_begun_and_a_view_is_no_cache(bench, monkeypatch):
    monkeypatch.setattr(faults, "_faults", {"view.after-shard": ("enospc", "1")})
    monkeypatch.setattr(faults, "_calls", Counter())
    code, _, _ = distil(bench, "mixed", "--cross-tokenizer")
    assert code == 1 and Path("mixed/data/cells.npy").is_file()
    monkeypatch.setattr(faults, "_faults", {})
    for command in ("verify", "inspect"):
        code, out, err = bench.call(command, "mixed/data")
        assert code != 0 and "is not a cache but a view of one, in a student's tokens" in out + err
    text = ("distill", *bench.text, "--num-sequences", 40, *RUN[3:])
    code, _, err = bench.call(*text, "--out", "mixed", *bench.plain)
    assert code == 0, err
    assert Path("mixed/data/manifest.json").is_file() and not Path("mixed/data/cells.npy").exists()
    assert Path("mixed/data.left-1/cells.npy").is_file()


def test_the_sanity_checks_run_across_tokenizers(bench):
    code, _, err = distil(bench, "sane", "--cross-tokenizer", "--sanity", "--json")
    assert code == 0 and "check 5 of 5" in err, err


def test_a_student_and_an_online_teacher_of_another_tokenizer_are_measured_on_the_same_text(bench):
    text = ("--data", "text.txt", "--seq-len", 32, "--num-workers", 0, "--split", "train")
    both = ("--student", "words-model", "--teacher", "teacher", *text)
    words_model()
    code, _, err = bench.call("evaluate", *both)
    assert code == 2 and "different tokenizers; add --cross-tokenizer" in err
    found = bits(bench, *both, "--cross-tokenizer")
    alone = {name: bits(bench, "--student", name, *text)["bits_per_byte"] for name in ("teacher", "words-model")}
    assert found["bits_per_byte"] == pytest.approx(alone["words-model"], rel=0.02)
    assert found["teacher_bits_per_byte"] == pytest.approx(alone["teacher"], rel=5e-3)
    assert abs(alone["teacher"] - alone["words-model"]) > 0.1 * alone["teacher"]
    assert 0 < found["compared"] <= 1 and found["kl"] > 0


@pytest.mark.parametrize(
    "options, message",
    [
        (("--student", "bare", "--cache", "cache"), "--student bare has no tokenizer to match"),
        (("--student", "teacher", "--cache", "cache", "--special-tokens", "a=b"), "--special-tokens has no effect"),
        (("--student", "teacher", "--data", "text.txt"), "--cross-tokenizer has no effect without a teacher"),
    ],
)
def test_an_option_of_evaluate_without_an_effect_is_refused(bench, options, message):
    if not Path("bare").exists():
        shutil.copytree("teacher", "bare", ignore=shutil.ignore_patterns("*tokenizer*"))
    code, _, err = bench.call("evaluate", *options, "--cross-tokenizer")
    assert code == 2 and message in err and len(err.splitlines()) == 1


def test_the_view_of_a_split_elsewhere_reads_through_its_connection(bench, tmp_path, monkeypatch):
    monkeypatch.setenv("KDTRAIN_HOME", str(tmp_path / "home"))
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    with serving(Path("cache")) as web:
        cache = Cache(web.url)
        rows = cache["train"].aligned("words")
        assert rows.view.cache.remote is cache.remote and rows[0]["tokens"].shape == (33,)
        assert web.requests.count("/manifest.json") == 1


def test_the_table_of_special_tokens_can_be_given(bench):
    given = ("--special-tokens", f"{END_OF_TEXT}=<|im_end|>")
    code, _, err = distil(bench, "given", "--cross-tokenizer", "--alpha", 0.1, *given)
    assert code == 0 and f"given: {END_OF_TEXT} is <|im_end|>" in err
    code, _, err = distil(bench, "unknown", "--cross-tokenizer", "--special-tokens", f"{END_OF_TEXT}=nothing")
    assert code == 2 and "'nothing' is not a special token of" in err


def test_an_online_teacher_of_another_tokenizer_teaches_by_the_same_door(bench, learned):
    run = ("distill", "--teacher", "teacher", "--student", "other.toml", *RUN[5:], *bench.text, *bench.plain)
    more = ("--num-sequences", 40, "--alpha", 0.1, "--lr", 3e-3)
    code, _, err = bench.call(*run, *more, "--cross-tokenizer", "--out", "online")
    assert code == 0, err
    result = json.loads(Path("online/result.json").read_text())
    # the same rows of the same text: the cache has 12 entries where the teacher has all of its cells
    for name in ("tokens", "teacher_bits_per_byte", "first_validation_loss"):
        assert result[name] == pytest.approx(json.loads(Path("learns/result.json").read_text())[name], rel=1e-3)
    assert losses("online") == pytest.approx(losses("learns"), rel=0.05)
    assert result["alignment"]["terms"] == ["cells"] and (Path("online") / "view" / "view.json").is_file()
    code, out, _ = bench.call("verify", "online", "--json")
    assert code == 0, out
    code, _, err = bench.call(*run, *more, "--cross-tokenizer", "--out", "online", "--hidden-loss", "mse")
    assert code == 2 and "compares states token by token" in err
