"""`cache-teacher --refine`, `merge` and `subset`, as a user calls them, and what reads their caches."""

import hashlib
import re
from pathlib import Path

import pytest

from kdtrain.library import Cache
from tests.web import serving

SMALL = ("--num-sequences", 30, "--precision", "fp32", "--sequences-per-shard", 8)


@pytest.fixture
def pair(workbench):
    """Capture `five`, its refinement `five-more`, and `ten`, a capture of the sum."""
    if not Path("ten").exists():
        text = ("cache-teacher", "--teacher", "teacher", *workbench.text, *SMALL)
        workbench.json(*text, "--num-samples", 5, "--out", "five")
        workbench.json("cache-teacher", "--teacher", "teacher", "--refine", "five", "--out", "five-more")
        workbench.json(*text, "--num-samples", 10, "--out", "ten")
    return workbench


def digests(folder: str) -> dict[str, str]:
    named = ("manifest.json", "README.md")
    paths = [path for path in Path(folder).rglob("*") if path.is_file() and path.name not in named]
    return {str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest() for path in paths}


def test_a_refined_and_merged_cache_is_the_capture_of_the_sum(pair) -> None:
    made = pair.json("merge", "five-more", "five", "--out", "sum")
    assert digests("sum") == digests("ten")
    assert (made["num_samples"], made["sampling"], made["format_version"]) == (10, "grid", 3)
    assert pair.json("inspect", "five-more")["sequences"] == {"train": 30, "validation": 8}
    code, page, _ = pair.call("inspect", "sum")
    assert code == 0 and "made of" in page and page.count("5 samples, 0.5 of the sum") == 2
    assert pair.json("merge", "five", "five-more", "--out", "sum")["digest"] == made["digest"]  # it is finished


def test_caches_from_elsewhere_are_merged_and_cut_on_a_fresh_machine(pair, tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("KDTRAIN_HOME", str(tmp_path))
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    with serving(Path.cwd()) as web:
        one, other = f"{web.url}/five", f"{web.url}/five-more"
        pair.json("merge", one, other, "--out", "fetched-sum")
        pair.json("subset", one, "--rows", ":12", "--out", "fetched-head")
    pair.json("merge", "five", "five-more", "--out", "local-sum")
    pair.json("subset", "five", "--rows", ":12", "--out", "local-head")
    assert digests("fetched-sum") == digests("local-sum") and digests("fetched-head") == digests("local-head")


def test_a_cut_and_appended_cache_trains_evaluates_and_verifies(pair) -> None:
    pair.json("subset", "five", "--rows", ":12", "--out", "head")
    pair.json("subset", "five", "--rows", "12:", "--out", "rest")
    made = pair.json("merge", "rest", "head", "--out", "again")
    assert made["sequences"] == {"train": 30, "validation": 8} and made["format_version"] == 4
    assert pair.json("verify", "again")["ok"]
    code, page, _ = pair.call("inspect", "head")
    assert code == 0 and "rows :12 of train" in page.replace("0:12", ":12")
    run = ("--student", "student.toml", *pair.plain, "--steps", 3, "--eval-freq", 3, "--warmup-steps", 0)
    ended = pair.json("distill", "--cache", "again", *run, "--out", "run-again")
    assert ended["step"] == 3
    assert pair.json("evaluate", "--student", "run-again", "--cache", "again")["kl"] > 0
    assert len(Cache("again")["train"]) == 30


def test_what_makes_a_cache_ends_with_what_it_is_where_and_the_next_command(pair) -> None:
    for words, kept in (
        (("merge", "five", "five-more", "--out", "sum"), "10 samples"),
        (("subset", "five", "--rows", "0:3", "--out", "three"), "5 samples"),
        (
            ("cache-teacher", "--teacher", "teacher", *pair.text, *SMALL, "--num-samples", 5, "--out", "five"),
            "5 sample",
        ),
    ):
        code, page, _ = pair.call(*words)
        lines, out = page.splitlines(), words[-1]
        assert code == 0 and lines[0].startswith(f"{out}: {kept}") and len(lines) < 12 and max(map(len, lines)) <= 100
        assert "\nbytes per token: " in page and "\ntemperatures: for T = 1 only" in page
        assert lines[-1] == f"Next: kdtrain distill --cache {out} --student SPEC --out runs/NAME"


@pytest.mark.parametrize(
    "words, said",
    [
        (("merge", "five", "five", "--out", "x"), "five is named twice, which adds nothing.*--refine"),
        (("merge", "five", "cache", "--out", "cache"), "--out cache is one of the caches; choose another"),
        (("merge", "five", "cache", "--out", "./cache/"), "is one of the caches; choose another"),
        (("subset", "five", "--rows", "0:3", "--out", "five"), "--out five is the cache itself; choose another"),
        (
            ("cache-teacher", "--teacher", "teacher", "--refine", "five", "--out", "five"),
            "--out five is the cache itself; choose another",
        ),
        (("merge", "five", "--out", "x"), "give two or more caches"),
        (("merge", "five", "cache", "--out", "x"), "keep different things|only caches of samples|top-k of a sum"),
        (("merge", "five", "ten", "--weights", "1,2", "--out", "x"), "--weights is gone.*--cache-weights"),
        (("merge", "five", "nowhere", "--out", "x"), "nowhere: no cache is there"),
        (("merge", "five", "five-more", "--out", "cache"), "holds a finished cache with other settings"),
        (("subset", "five", "--out", "x"), "one of them"),
        (("subset", "five", "--rows", "5:3", "--out", "x"), "not 5 to 3"),
        (("subset", "five", "--rows", "0:31", "--out", "x"), "rows 0 to 30 of train, not 0 to 31"),
        (("subset", "five", "--rows", "three", "--out", "x"), "is not START:STOP"),
        (("subset", "five", "--fraction", "1.5", "--out", "x"), "above 1"),
        (("subset", "five", "--fraction", "0.0", "--out", "x"), "'0.0' is not a number above 0"),
        (("subset", "five", "--rows", "0:3", "--split", "test", "--out", "x"), "no split 'test'"),
        (("cache-teacher", "--teacher", "teacher", "--refine", "cache", "--out", "x"), "only a cache of samples alone"),
        (
            ("cache-teacher", "--teacher", "teacher", "--refine", "five", "--seq-len", "8", "--out", "x"),
            "with --refine",
        ),
        (
            ("cache-teacher", "--teacher", "teacher", "--refine", "five", "--num-samples", "8", "--out", "x"),
            "takes it from",
        ),
        (("cache-teacher", "--teacher", "student.toml", "--refine", "five", "--out", "x"), "kdtrain: "),
    ],
)
def test_what_cannot_be_is_one_line_and_writes_nothing(pair, words: tuple, said: str) -> None:
    code, _, err = pair.call(*words)
    last = err.splitlines()[-1]
    assert code == 2 and last.startswith("kdtrain: ") and "Traceback" not in err
    assert re.search(said, last), last
    assert not Path("x").exists() or not any(Path("x").iterdir())
