"""Ranks with different jobs are refused before the first step, on every rank, with what differs.

Each rank is a fork with a command line of its own, or in a folder of its own: on two nodes one name may be two files.
"""

import shutil
import sys
import types
from pathlib import Path

import pytest

import kdtrain
from kdtrain.config.choices import DIVERGENCES
from kdtrain.models.tokenizer import load_tokenizer
from kdtrain.parallel import agreement
from kdtrain.testing import tiny_model, write_model_folder

RUN = ("distill", "--cache", "cache", "--student", "student.toml", "--steps", 2, "--batch-size", 4, "--lr", 1e-3)
BUILD = ("cache-teacher", "--teacher", "teacher", "--top-k", 4)


@pytest.fixture(scope="module")
def ranks(ranks_of, cached):
    """Return the bench in ranks, with a cache."""
    return ranks_of


@pytest.fixture
def elsewhere(ranks, tmp_path):
    """Copy the bench, as on another node."""
    for name in ("teacher", "cache", "corpus"):
        shutil.copytree(ranks.root / name, tmp_path / name)
    shutil.copy2(ranks.root / "student.toml", tmp_path)
    return tmp_path


def refused(ranks, argv, out: Path, other=None, folder: Path | None = None, **environment: str) -> str:
    """Return the refusal by rank 0 of a rank with another command line, or in another folder."""
    ended = ranks.launch_each([(argv, ranks.root), (other or argv, folder or ranks.root)], **environment)
    assert [each.code for each in ended] == [2, 2], [each.stderr for each in ended]
    assert ended[1].stderr == ""
    assert not (out / "checkpoints").exists() and not (out / "shards").exists() and not (out / "config.toml").exists()
    return ended[0].refusal()


@pytest.mark.parametrize(
    "option, shown",
    [
        (("--lr", 0.01), "--lr is 0.001 on rank 0 and 0.01 on rank 1"),
        (("--cache", "other-cache"), "--cache is cache on rank 0 and other-cache on rank 1"),
        (("--micro-batch-size", 1), "--micro-batch-size is not given on rank 0 and 1 on rank 1"),
        (("--tensor-parallel", 2), "--tensor-parallel is 1 on rank 0 and 2 on rank 1"),
        (("--dry-run",), "--dry-run is False on rank 0 and True on rank 1"),
    ],
)
def test_ranks_with_different_options_are_refused_by_what_differs(ranks, option, shown):
    argv = (*RUN, *ranks.eager, "--out", "options")
    other = (*argv, *option)
    if option[0] in argv:
        at = argv.index(option[0])
        other = (*argv[:at], *option, *argv[at + 2 :])
    assert shown in refused(ranks, argv, ranks.root / "options", other)


def test_ranks_may_differ_in_options_of_one_rank(ranks):
    argv = (*RUN, *ranks.eager, "--out", "own-affairs")
    ended = ranks.launch_each([(argv, ranks.root), ((*argv, "--json", "--rank-timeout", 60), ranks.root)])
    assert [each.code for each in ended] == [0, 0], [each.stderr for each in ended]


def test_ranks_whose_cache_of_one_name_is_another_are_refused(ranks, elsewhere):
    shutil.rmtree(elsewhere / "cache")
    ranks.ok(1, *BUILD, *ranks.small, "--seed", 1, "--num-samples", 2, "--out", elsewhere / "cache")
    out = ranks.root / "caches"
    said = refused(ranks, (*RUN, *ranks.eager, "--out", out), out, folder=elsewhere)
    assert "the ranks do not run the same: cache is " in said and " on rank 1" in said


def test_ranks_whose_student_of_one_name_is_another_are_refused(ranks, elsewhere):
    spec = elsewhere / "student.toml"
    spec.write_text(spec.read_text().replace("intermediate_size = 64", "intermediate_size = 48"))
    out = ranks.root / "students"
    said = refused(ranks, (*RUN, *ranks.eager, "--out", out), out, folder=elsewhere)
    assert "student.architecture.intermediate_size is 64 on rank 0 and 48 on rank 1" in said


def test_ranks_whose_student_has_other_weights_are_refused(ranks, elsewhere):
    for folder, seed in ((ranks.root, 1), (elsewhere, 2)):
        write_model_folder(folder / "pretrained", tiny_model("llama", 300, seed=seed))
    out = ranks.root / "weights"
    argv = (*("pretrained" if word == "student.toml" else word for word in RUN), *ranks.eager, "--out", out)
    assert "the student's weights is " in refused(ranks, argv, out, folder=elsewhere)


def put_another_teacher(folder: Path) -> None:
    """Put other weights under the name of the teacher, with its tokenizer."""
    tokenizer = load_tokenizer(folder / "teacher")
    shutil.rmtree(folder / "teacher")
    write_model_folder(folder / "teacher", tiny_model("llama", 300, seed=5), tokenizer)


def test_ranks_with_another_online_teacher_are_refused(ranks, elsewhere):
    put_another_teacher(elsewhere)
    out = ranks.root / "teachers"
    argv = ("distill", "--teacher", "teacher", "--student", "student.toml", "--steps", 2, "--batch-size", 4)
    argv += (*ranks.small, *ranks.eager, "--out", out)
    assert "teacher is " in refused(ranks, argv, out, folder=elsewhere)


def test_a_cache_is_not_built_by_ranks_with_different_options(ranks):
    argv = (*BUILD, *ranks.small, "--out", "built")
    said = refused(ranks, argv, ranks.root / "built", (*argv, "--top-k", 6))
    assert "--top-k is 4 on rank 0 and 6 on rank 1" in said


def test_a_cache_is_not_built_by_ranks_with_different_teachers(ranks, elsewhere):
    put_another_teacher(elsewhere)
    out = ranks.root / "of-teachers"
    assert "teacher.weights_digest is " in refused(ranks, (*BUILD, *ranks.small, "--out", out), out, folder=elsewhere)


@pytest.mark.parametrize("changed", ["other text", "less text"])
def test_a_cache_is_not_built_of_different_data(ranks, elsewhere, changed):
    if changed == "other text":
        for path in (elsewhere / "corpus").iterdir():
            path.write_text(path.read_text().replace("return", "REturn"))
    else:
        for path in sorted((elsewhere / "corpus").iterdir())[3:]:
            path.unlink()
    out = ranks.root / f"of-{changed.replace(' ', '-')}"
    argv = (*BUILD, *ranks.data, "--precision", "fp32", "--sequences-per-shard", 16, "--out", out)
    ended = ranks.launch_each([(argv, ranks.root), (argv, elsewhere)])
    assert [each.code for each in ended] == [2, 2], [each.stderr for each in ended]
    said = ended[0].refusal()
    assert "the train data differ between the ranks from sequence" in said
    assert not (out / "manifest.json").exists() and ended[1].stderr == ""


def test_a_packages_registered_part_is_compared_by_its_source(tmp_path, monkeypatch):
    module = types.ModuleType("a_package_of_ours")
    module.__file__ = str(tmp_path / "loss.py")
    (tmp_path / "loss.py").write_text("# a formula\n")
    before = agreement.code()
    monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.setitem(DIVERGENCES.modules, "mine", module.__name__)
    registered = agreement.code()
    (tmp_path / "loss.py").write_text("# another formula\n")
    digests = [code["the code of kdtrain"] for code in (before, registered, agreement.code())]
    assert len(set(digests)) == 3


def test_code_of_another_version_is_another_run(ranks, tmp_path, monkeypatch):
    copy = tmp_path / "kdtrain"
    shutil.copytree(Path(kdtrain.__file__).parent, copy, ignore=shutil.ignore_patterns("__pycache__"))
    same = agreement.code()
    monkeypatch.setattr(agreement, "__file__", str(copy / "commands" / "agreement.py"))
    assert agreement.code() == same
    (copy / "objective" / "loss.py").write_text("# another formula\n")
    assert agreement.code()["the code of kdtrain"] != same["the code of kdtrain"]
