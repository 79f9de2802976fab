"""Commands on a cache that lies elsewhere: the same results as from its folder, to the bit."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.web import Web, hurry, serving


@pytest.fixture
def web(made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Web]:
    monkeypatch.setenv("KDTRAIN_HOME", str(tmp_path / "home"))
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    hurry(monkeypatch)
    with serving(made / "cache") as found:
        yield found


def weights(run: Path) -> dict[str, torch.Tensor]:
    return load_file(run / "student" / "model.safetensors")


def test_a_run_from_a_server_that_drops_and_stumbles_has_the_bits_of_the_local_one(
    workbench, web: Web, tmp_path
) -> None:
    def train(cache: object, out: Path, *more: object) -> None:
        words = ("distill", "--cache", cache, "--student", "student.toml", "--out", out, "--steps", 4, *workbench.plain)
        code, _, err = workbench.call(*words, *more)
        assert code == 0, err

    for fault in ("drop", "500", "later:429=0", "flip"):
        web.fail(".h5", fault)
    train("cache", tmp_path / "here")
    train(web.url, tmp_path / "there")
    assert sorted(web.fired) == sorted(["drop", "500", "later:429=0", "flip"])
    here, there = weights(tmp_path / "here"), weights(tmp_path / "there")
    assert here.keys() == there.keys() and all(torch.equal(each, there[name]) for name, each in here.items())
    train(web.url, tmp_path / "there")  # finished: it resumes, and the cache is the same
    workbench.call("inspect", tmp_path / "there")


def test_a_resume_on_another_cache_at_the_address_is_refused_by_digest(workbench, web: Web, made, tmp_path) -> None:
    words = ("distill", "--student", "student.toml", "--out", tmp_path / "run", *workbench.plain)
    assert workbench.call(*words, "--cache", web.url, "--steps", 2)[0] == 0
    workbench.call("cache-teacher", "--teacher", "teacher", *workbench.text, "--top-k", 5, "--out", tmp_path / "other")
    web.root = tmp_path / "other"
    code, _, err = workbench.call(*words, "--cache", web.url, "--steps", 4)
    assert code == 2 and "cache" in err and "Traceback" not in err


def test_inspect_evaluate_and_verify_read_a_cache_elsewhere(workbench, web: Web, tmp_path: Path) -> None:
    shown, here = workbench.json("inspect", web.url), workbench.json("inspect", "cache")
    assert shown["digest"] == here["digest"] and shown["shards not here"] == shown["shards"]
    assert web.requests == ["/manifest.json"]
    code, out, _ = workbench.call("inspect", web.url)
    assert code == 0 and f"kdtrain distill --cache {web.url}" in out
    options = ("--student", "teacher", "--precision", "fp32")
    assert workbench.json("evaluate", "--cache", web.url, *options) == workbench.json(
        "evaluate", "--cache", "cache", *options
    )
    found = workbench.json("verify", web.url)
    assert (found["ok"], found["kind"], found["path"]) == (True, "cache", web.url)
    web.fail("train-00000.h5", "404", times=99)
    for path in (tmp_path / "home").rglob("train-00000.h5"):
        path.unlink()
    code, out, _ = workbench.call("verify", web.url)
    assert code == 1 and "is not there" in out
    code, _, err = workbench.call("verify", web.url, "--repair")
    assert code == 2 and "ask the author" in err


@pytest.mark.parametrize(
    "where, words",
    [
        ("hf:org", "names no data set on the hub; give hf:datasets/ORG/NAME"),
        ("hf:models/org/name", "a cache is a data set"),
        ("s3://bucket/cache", "caches are not read from s3:"),
        ("file:///tmp/cache", "caches are not read from file:"),
        ("http://example.org/cache", "http can be altered on the way"),
        ("https://user:secret@example.org/c", "a password would end in logs"),
        ("https://example.org/c?key=secret", "leave out what follows"),
        ("https://me:secret@example.org/a b?key=secret", "an address has no spaces"),
        ("https://me@corp.com:secret@example.org/a b", "an address has no spaces"),
        ("https:///c", "names no host"),
    ],
)
def test_an_address_that_is_none_is_refused_before_anything_is_asked(workbench, where: str, words: str) -> None:
    for command in (("inspect", where), ("verify", where), ("evaluate", "--cache", where, "--student", "student.toml")):
        code, _, err = workbench.call(*command)
        assert code == 2 and words in err and "secret" not in err and err.count("\n") == 1
