"""Caches that lie elsewhere: what is fetched when, what is kept, and that nothing unverified is ever read.

The clients are the real ones, against a server of this machine (tests/web.py).
"""

import json
import pickle
import threading
import time
from pathlib import Path

import pytest

from kdtrain.cache.read.remote import cache_folder
from kdtrain.cache.tools.verify import verify_cache
from kdtrain.errors import RunError, UsageError
from kdtrain.files import publish_json
from kdtrain.library import Cache
from tests.fetched import assert_same, shards_here
from tests.web import Web, serving


def test_a_cache_on_a_web_server_reads_as_the_folder_does_and_each_file_is_fetched_once(web: Web, whole: Path) -> None:
    cache, folder = Cache(web.url), Cache(whole)
    assert web.requests == ["/manifest.json"]
    assert cache.manifest == folder.manifest and cache.name == web.url
    for split in cache:
        for row in range(len(folder[split])):
            assert_same(cache[split][row], folder[split][row])
    assert len(web.requests) == len(set(web.requests)) == 1 + 1 + 4  # manifest, tokenizer, shards
    cache = Cache(web.url)
    cache["train"][0]
    assert web.requests[6:] == ["/manifest.json"]


def test_the_shards_after_the_one_that_is_read_are_fetched_ahead(web: Web, home: Path) -> None:
    cache = Cache(web.url)
    cache["train"][0]
    until = time.monotonic() + 10
    while len(shards_here(home)) < 3 and time.monotonic() < until:
        time.sleep(0.01)
    assert shards_here(home) == {"train-00000", "train-00001", "train-00002"}


def test_a_reader_that_was_fetched_travels_into_another_process(web: Web, whole: Path) -> None:
    reader = Cache(web.url)["train"]
    reader[0]
    assert_same(pickle.loads(pickle.dumps(reader))[9], Cache(whole)["train"][9])


def test_a_shard_that_was_replaced_upstream_is_never_read(web: Web, home: Path, whole: Path) -> None:
    reader = Cache(web.url)["train"]
    content = bytearray((whole / "shards" / "train-00001.h5").read_bytes())
    content[3000] ^= 1
    web.replaced["shards/train-00001.h5"] = bytes(content)
    with pytest.raises(RunError, match=r"train-00001.h5 is not what the manifest states: it was altered"):
        reader[4]
    assert "train-00001" not in shards_here(home) and not list(home.rglob("train-00001.h5.part"))
    assert_same(reader[0], Cache(whole)["train"][0])


@pytest.mark.parametrize(
    "change, words",
    [
        (lambda record: {**record, "seq_len": 0}, "altered or damaged"),
        (lambda record: {**record, "format_version": 99}, "format version 99"),
        (lambda record: {"hello": 1}, "format version None"),
        (lambda record: {**record, "tokenizer_files": {"../../x": "0" * 64}}, "altered or damaged"),
        (lambda record: {**record, "splits": {}}, "splits: there is none"),
        (b"", "altered or damaged"),
        (b"<html>", "altered or damaged"),
        (b"[" * 10**6, "altered or damaged"),
        (bytes(2**25 + 1), "bytes there instead of at most"),
    ],
    ids=["length", "version", "another", "tokenizer", "no split", "empty", "html", "deep", "long"],
)
def test_a_manifest_that_is_not_one_is_refused_in_one_line(web: Web, home: Path, tmp_path: Path, change, words) -> None:
    web.replaced["manifest.json"] = change
    if callable(change):
        publish_json(tmp_path / "m.json", change(json.loads((web.root / "manifest.json").read_text())), "test")
        web.replaced["manifest.json"] = (tmp_path / "m.json").read_bytes()
    with pytest.raises((UsageError, RunError), match=words) as error:
        Cache(web.url)["train"]
    assert "\n" not in str(error.value) and not (home / "caches" / "x").exists()


def test_no_cache_at_an_address_is_one_line(web: Web) -> None:
    with pytest.raises(UsageError, match="holds no cache that kdtrain wrote"):
        Cache(f"{web.url}/nowhere")


def test_without_a_connection_what_is_here_is_read_and_what_is_missing_is_named(
    web: Web, whole: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    Cache(web.url)["validation"][0]
    asked = len(web.requests)
    for offline in (True, False):
        if offline:
            monkeypatch.setenv("HF_HUB_OFFLINE", "1")
        else:
            monkeypatch.delenv("HF_HUB_OFFLINE")
            web.close()
        caplog.clear()
        cache = Cache(web.url)
        assert_same(cache["validation"][1], Cache(whole)["validation"][1])
        assert "there is no connection, and 3 of its shards are not here (train-00000, ...)" in caplog.text
        with pytest.raises(RunError, match=f"{web.url}: shards/train-00001.h5 is not here, and there is no connection"):
            cache["train"][4]
    assert len(web.requests) == asked
    with pytest.raises(RunError, match=r"cannot be fetched: the connection was refused"):
        Cache(f"{web.url}/another")


def test_verify_reads_all_of_a_cache_elsewhere_and_names_what_is_wrong(web: Web, whole: Path) -> None:
    assert verify_cache(web.url) == []
    for thread in [each for each in threading.enumerate() if each.name == "cache-fetch"]:
        thread.join()  # or it would fetch again what is deleted below
    for path in cache_folder(Cache(web.url).manifest.digest).rglob("*"):
        if path.is_file() and path.name not in ("manifest.json",):
            path.unlink()
    web.replaced["index.h5"] = b"x"
    web.replaced["shards/train-00002.json"] = b"{}"
    web.fail("validation-00000.h5", "404", times=100)
    found = verify_cache(web.url)
    assert len(found) == 3 and "index.h5 is not what the manifest states" in found[0]
    assert "train-00002.json" in found[1] and "validation-00000.h5 is not there" in found[2]


def test_the_same_cache_from_two_places_is_kept_once(web: Web, whole: Path, home: Path) -> None:
    with serving(whole.parent) as other:
        Cache(web.url)["train"][0]
        Cache(f"{other.url}/{whole.name}")["train"][0]
        assert not [path for path in other.requests if path.endswith(".h5")]
    assert len(list((home / "names").iterdir())) == 2 and len(list((home / "caches").iterdir())) == 1


def test_a_shard_that_was_damaged_here_is_moved_aside_and_fetched_again(web: Web, home: Path, whole: Path) -> None:
    Cache(web.url)["train"][0]
    path = next(home.rglob("train-00000.h5"))
    content = bytearray(path.read_bytes())
    content[3000] ^= 1
    path.write_bytes(content)
    assert_same(Cache(web.url)["train"][0], Cache(whole)["train"][0])
    assert [each.name for each in path.parent.glob("*damaged*")] == ["train-00000.h5.damaged-1"]
    path.write_bytes(b"short")
    assert_same(Cache(web.url)["train"][0], Cache(whole)["train"][0])


def test_a_damaged_shard_that_another_process_set_aside_first_is_fetched_once(
    web: Web, home: Path, whole: Path
) -> None:
    one, other = Cache(web.url).remote, Cache(web.url).remote
    assert one is not None and other is not None
    record = one.manifest.splits["train"]["shards"][0]
    one.ensure(record).write_bytes(b"x" * record["bytes"])
    assert one.ensure(record, altered=True).read_bytes() == (whole / "shards" / "train-00000.h5").read_bytes()
    asked = len(web.requests)
    path = other.ensure(record, altered=True)  # what is there now is good
    assert len(web.requests) == asked and len(list(path.parent.glob("*damaged*"))) == 1


def test_another_cache_under_a_known_address_is_logged(
    web: Web, tmp_path: Path, workshop, codecs, caplog: pytest.LogCaptureFixture
) -> None:
    reader = Cache(web.url)["train"]
    web.root = workshop.build(tmp_path / "other", codecs["dense"])
    with pytest.raises(RunError, match=r"instead of|not what the manifest states"):  # of the one that was read
        reader[0]
    assert Cache(web.url).manifest.digest != reader.manifest.digest
    assert "another cache lies there than before" in caplog.text


def test_no_link_in_the_local_folder_is_followed(web: Web, home: Path, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr("kdtrain.net.request.BRIEF.total", 9)  # a busy machine's server may be too slow for a short try
    Cache(web.url)["train"][0]
    (path := next(home.rglob("train-00000.h5"))).unlink()
    (tmp_path / "target").write_bytes(b"precious")
    path.symlink_to(tmp_path / "target")
    with pytest.raises(UsageError, match="is a link"):
        Cache(web.url)
    assert (tmp_path / "target").read_bytes() == b"precious"
