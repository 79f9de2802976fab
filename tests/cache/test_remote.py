"""Caches that lie elsewhere: what is fetched when, what is kept, and that nothing unverified is ever read.

The clients are the real ones, against a server of this machine (tests/web.py).
"""

import hashlib
import io
import json
import os
import pickle
import re
import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import requests
import torch

from kdtrain.cache import download, local
from kdtrain.cache.address import Address, is_private
from kdtrain.cache.hub import ask
from kdtrain.cache.reader import Cache
from kdtrain.cache.verify import verify_cache
from kdtrain.errors import RunError, UsageError
from kdtrain.files import publish_json
from tests.web import TOKEN, Repository, Web, serving


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("KDTRAIN_HOME", str(tmp_path / "home"))
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    monkeypatch.setattr(download, "WAIT", 0.001)
    monkeypatch.setattr(download, "TIMEOUT", (1.0, 1.0))
    return tmp_path / "home"


@pytest.fixture
def web(whole: Path, home: Path) -> Iterator[Web]:
    with serving(whole) as found:
        yield found


@pytest.fixture
def hub(whole: Path, home: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Web]:
    """A stand-in of the hub with the cache as the data set org/cache."""
    from huggingface_hub import constants

    with serving() as found:
        monkeypatch.setenv("HF_ENDPOINT", found.url)
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
        found.hub["org/cache"] = Repository()
        found.hub["org/cache"].commit(files_of(whole))
        yield found


def files_of(folder: Path) -> dict[str, bytes]:
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def shards_here(home: Path) -> set[str]:
    return {path.stem for path in home.rglob("*.h5") if path.parent.name == "shards"}


def assert_same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> None:
    assert one.keys() == other.keys()
    assert all(torch.equal(value, other[name]) for name, value in one.items())


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


def test_the_same_cache_from_two_places_is_kept_once(web: Web, whole: Path, home: Path) -> None:
    with serving(whole.parent) as other:
        Cache(web.url)["train"][0]
        Cache(f"{other.url}/{whole.name}")["train"][0]
        assert not [path for path in other.requests if path.endswith(".h5")]
    rows, _ = local.listing()
    assert [len(row["from"]) for row in rows] == [2] and len(list((home / "caches").iterdir())) == 1


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


PASSING = [
    *("close", "garbage", "500", "502", "503", "504", "429", "408", "later:429=0", "later:503=1", "drop", "stall"),
    *("later:503=Thu, 01 Jan 1970 00:00:00 GMT", "later:429=soon", "flip", "whole", "weak", "slow", "unsized"),
]
LASTING = {
    **{"404": "not there", "401": "refuses", "403": "refuses", "410": "not there", "400": "answers 400"},
    **{"418": "answers 418", "cut": "bytes there", "more": "bytes there", "empty": "bytes there"},
    **{"html": "bytes there", "endless": "sends more", "flip": "SHA-256 differs", "gzip": None},
    **{"redirect:file:///etc/passwd": "redirects to file", "redirect:ftp://127.0.0.1/x": "redirects to ftp"},
    **{"redirect:https://[::1": "redirects to no URL", "redirect:http://[::1]:x/": "no URL|tried"},
    **{"redirect:http://192.0.2.1/x": "redirects to http", "loop": "redirects more than", "500": "answers 500"},
    **{"close": "tried", "drop": None, "garbage": "tried", "429": "answers 429"},
}


@pytest.mark.parametrize("fault", PASSING)
def test_a_fault_that_passes_is_tried_again_and_the_numbers_are_right(web: Web, whole: Path, fault: str) -> None:
    web.fail("train-00000.h5", fault)
    cache = Cache(web.url)
    assert_same(cache["train"][0], Cache(whole)["train"][0])
    assert web.fired == [fault]


@pytest.mark.parametrize("fault", LASTING)
def test_a_fault_that_lasts_ends_in_one_line_and_no_shard(web: Web, home: Path, whole: Path, fault: str) -> None:
    cache = Cache(web.url)
    reader = cache["train"]
    web.fail("train-00000.h5", fault, times=1000)
    if LASTING[fault] is None:  # the bytes are right, whatever the server calls them
        assert_same(reader[0], Cache(whole)["train"][0])
        return
    with pytest.raises(RunError, match=LASTING[fault]) as error:
        reader[0]
    assert "\n" not in str(error.value) and web.url in str(error.value)
    assert "train-00000" not in shards_here(home) and fault in web.fired
    web.heal()
    assert_same(reader[0], Cache(whole)["train"][0])


def test_a_download_that_broke_off_resumes_where_it_was_if_the_server_has_the_same(web: Web, home: Path) -> None:
    reader = Cache(web.url)["train"]
    size = Cache(web.url).manifest.splits["train"]["shards"][0]["bytes"]
    web.fail("train-00000.h5", "drop")
    reader[0]
    first, second = [each for each in web.ranges if each[0].endswith("train-00000.h5")]
    assert first[1] is None and second[1] == f"bytes={size // 2}-" and second[2]
    assert not list(home.rglob("train-00000*.part*"))


@pytest.mark.parametrize("fault", ["tag", "whole", "begin", "416"])
def test_a_download_starts_anew_where_the_server_does_not_go_on_with_it(web: Web, whole: Path, fault: str) -> None:
    reader = Cache(web.url)["train"]
    web.fail("train-00000.h5", "drop")
    web.fail("train-00000.h5", fault)
    assert_same(reader[0], Cache(whole)["train"][0])
    assert web.fired == ["drop", fault]


def fetched(web: Web, whole: Path, part: Path) -> bool:
    """Whether `fetch` brings the first shard."""
    content = (whole / "shards" / "train-00000.h5").read_bytes()
    sha256 = hashlib.sha256(content).hexdigest()
    url = f"{web.url}/shards/train-00000.h5"
    download.fetch(url, part, what="it", most=len(content), exact=True, sha256=sha256)
    return part.read_bytes() == content


@pytest.mark.parametrize("faults", [("digits",), ("drop", f"range:bytes {'9' * 5000}-9/*")], ids=["length", "range"])
def test_numbers_of_any_length_in_an_answer_are_no_traceback(
    web: Web, whole: Path, tmp_path: Path, faults: tuple[str, ...]
) -> None:
    for fault in faults:
        web.fail("train-00000.h5", fault)
    assert fetched(web, whole, tmp_path / "part") and web.fired == list(faults)


def test_a_server_that_takes_back_what_it_gave_does_not_go_on_for_ever(web: Web, whole: Path, tmp_path: Path) -> None:
    for _ in range(20):
        web.fail("train-00000.h5", "drop")
        web.fail("train-00000.h5", "416")
    with pytest.raises(download.Unreachable, match="tried 6 times"):
        fetched(web, whole, tmp_path / "part")
    assert len(web.fired) < 10


@pytest.mark.parametrize(
    "host",
    [
        *("127.0.0.1", "127.1", "0x7f000001", "2130706433", "0.0.0.0", "[::1]", "[::]", "[::ffff:127.0.0.1]"),
        *("10.1.2.3", "192.168.0.1", "172.16.0.1", "169.254.169.254", "100.64.0.1", "[fe80::1]", "[fd00::1]"),
        *("localhost", "LOCALHOST", "localhost.", "a.localhost", "127.0.0.1:8080"),
    ],
)
def test_a_public_host_does_not_lead_into_a_private_network(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, host: str
) -> None:
    asked: list[str] = []

    def get(self: requests.Session, url: str, **_: object) -> requests.Response:
        asked.append(url)
        answer = requests.Response()
        answer.status_code, answer.raw = 302, io.BytesIO()
        answer.headers["Location"] = f"https://{host}/x"
        return answer

    monkeypatch.setattr(requests.Session, "get", get)
    with pytest.raises(UsageError, match=r"it: the server redirects to .*, which is not a public host"):
        download.fetch("https://example.com/x", tmp_path / "part", what="it", most=10)
    assert asked == ["https://example.com/x"]
    with pytest.raises(UsageError, match="redirects more than"):  # who is inside knows what is there
        download.fetch("https://10.0.0.1/x", tmp_path / "part", what="it", most=10)


@pytest.mark.parametrize(
    "host", ["example.com", "1.1.1.1", "[2606:4700::1111]", "localhost.example.com", "10.example.com"]
)
def test_a_public_host_is_one(host: str) -> None:
    assert not is_private(f"https://{host}/x")


def test_what_lies_in_a_part_is_checked_like_everything_else(web: Web, home: Path, whole: Path) -> None:
    cache = Cache(web.url)
    part = home / "caches" / cache.manifest.digest / "shards" / "train-00000.h5.part"
    part.parent.mkdir(parents=True)
    for content in (b"x" * 1000, b"x" * cache.manifest.splits["train"]["shards"][0]["bytes"], b"x" * 10**6):
        part.write_bytes(content)
        assert_same(cache["train"][0], Cache(whole)["train"][0])
        cache["train"].close()
        next(home.rglob("train-00000.h5")).unlink()


def test_a_shard_that_was_replaced_upstream_is_never_read(web: Web, home: Path, whole: Path) -> None:
    reader = Cache(web.url)["train"]
    content = bytearray((whole / "shards" / "train-00001.h5").read_bytes())
    content[3000] ^= 1
    web.replaced["shards/train-00001.h5"] = bytes(content)
    with pytest.raises(RunError, match=r"train-00001 is not what the manifest states \(its SHA-256 differs\)"):
        reader[4]
    assert "train-00001" not in shards_here(home) and not list(home.rglob("train-00001.h5.part"))
    assert_same(reader[0], Cache(whole)["train"][0])


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
    path = one.ensure(record)
    path.write_bytes(b"x" * record["bytes"])
    other.ensure(record)
    one.put_aside(record)
    other.put_aside(record)  # it is gone
    path.with_name(f"{path.name}.damaged-1").rename(path)
    one.ensure(record)
    other.ensure(record)
    one.put_aside(record)
    assert one.ensure(record).read_bytes() == (whole / "shards" / path.name).read_bytes()
    other.put_aside(record)  # what is there now is good
    assert path.exists() and len(list(path.parent.glob("*damaged*"))) == 1


def test_a_shard_that_was_set_aside_makes_room_before_any_other(
    web: Web, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    limit = room_for(web, home, 2.2)
    cache = Cache(web.url, local_limit=limit)
    assert cache.remote is not None
    record = cache.manifest.splits["train"]["shards"][0]
    cache.remote.ensure(record).write_bytes(b"x" * record["bytes"])
    cache.remote.put_aside(record)
    cache["train"][0]
    monkeypatch.setattr("kdtrain.cache.remote._FULL", 0.3)
    cache["train"][4]
    assert not list(home.rglob("*damaged*")) and shards_here(home) >= {"train-00000", "train-00001"}
    assert local.listing()[1] <= limit * local.GB


@pytest.mark.parametrize(
    "change, words",
    [
        (lambda record: {**record, "seq_len": 0}, "altered or damaged"),
        (lambda record: {**record, "format_version": 99}, "format version 99"),
        (lambda record: {"hello": 1}, "format version None"),
        (lambda record: {**record, "tokenizer_files": {"../../x": "0" * 64}}, "altered or damaged"),
        (lambda record: {**record, "splits": {}}, "has no split 'train'"),
    ],
)
def test_a_manifest_that_is_not_one_is_refused_in_one_line(web: Web, home: Path, tmp_path: Path, change, words) -> None:
    record = json.loads((web.root / "manifest.json").read_text())
    publish_json(tmp_path / "m.json", change(record), "test")
    web.replaced["manifest.json"] = (tmp_path / "m.json").read_bytes()
    with pytest.raises(UsageError, match=words) as error:
        Cache(web.url)["train"]
    assert "\n" not in str(error.value) and not (home / "caches" / "x").exists()


@pytest.mark.parametrize(
    "content, words",
    [
        (b"", "altered or damaged"),
        (b"<html>", "altered or damaged"),
        (b"[" * 10**6, "altered or damaged"),
        (bytes(2**25 + 1), "bytes there instead of at most"),
    ],
)
def test_a_manifest_of_a_stranger_is_bounded(web: Web, content: bytes, words: str) -> None:
    web.replaced["manifest.json"] = content
    with pytest.raises((UsageError, RunError), match=words):
        Cache(web.url)


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
        with pytest.raises(RunError, match=f"{web.url}: shard train-00001 is not here, and there is no connection"):
            cache["train"][4]
    assert len(web.requests) == asked
    with pytest.raises(RunError, match=r"cannot be fetched: the connection was refused"):
        Cache(f"{web.url}/another")


def test_another_cache_under_a_known_address_is_said(
    web: Web, tmp_path: Path, workshop, codecs, caplog: pytest.LogCaptureFixture
) -> None:
    reader = Cache(web.url)["train"]
    web.root = workshop.build(tmp_path / "other", codecs["dense"])
    with pytest.raises(RunError, match=r"instead of|SHA-256 differs"):  # the manifest that was read first counts
        reader[0]
    assert Cache(web.url).manifest.digest != reader.manifest.digest
    assert "another cache lies there than before" in caplog.text


def test_the_local_folder_never_grows_past_its_limit_and_what_was_read_longest_ago_goes_first(
    web: Web, home: Path, whole: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = home / "other"
    other.mkdir(parents=True)
    (other / "mine.h5").write_bytes(bytes(1000))
    sizes = [each["bytes"] for each in Cache(web.url).manifest.splits["train"]["shards"]]
    rest = sum(each.lstat().st_size for each in home.rglob("*") if each.is_file()) + 2000
    limit = (rest + sizes[0] + sizes[1] + 10) / local.GB
    monkeypatch.setattr("kdtrain.cache.reader.MAX_OPEN", 1)
    cache = Cache(web.url, local_limit=limit)
    order = [0, 4, 8, 0, 9, 5, 1, 8]
    for row in order:
        assert_same(cache["train"][row], Cache(whole)["train"][row])
        assert local.listing()[1] <= limit * local.GB
        assert len(shards_here(home)) <= 2
    assert (other / "mine.h5").exists()
    cache["train"].close()
    assert shards_here(home) == {"train-00000", "train-00002"}


def test_a_limit_below_the_largest_shard_is_refused_and_files_of_others_are_never_removed(
    web: Web, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(RunError, match=r"no room for manifest.json below --local-limit"):
        Cache(web.url, local_limit=1e-6)
    Cache(web.url)
    with pytest.raises(UsageError, match=r"--local-limit 1e-06 is less than its largest shard"):
        Cache(web.url, local_limit=1e-6)
    largest = max(local.sizes(Cache(web.url).manifest).values())
    mine = home / "mine.bin"
    mine.write_bytes(bytes(2 * largest))
    monkeypatch.setattr("kdtrain.cache.remote._FULL", 0.2)
    with pytest.raises(RunError, match=r"no room for .* below --local-limit"):
        Cache(web.url, local_limit=2 * largest / local.GB)["train"][0]
    assert mine.stat().st_size == 2 * largest


def test_a_shard_that_another_process_has_open_is_not_removed_for_room(
    web: Web, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = Cache(web.url)["train"]
    one[0]
    time.sleep(0.2)
    handle = local.hold(next(home.rglob("train-00000.h5")))
    assert handle is not None
    monkeypatch.setattr("kdtrain.cache.remote._FULL", 0.3)
    for name in ("train-00001", "train-00002"):
        for path in home.rglob(f"{name}.h5"):
            path.unlink()
    taken = local.listing()[1]
    two = Cache(web.url, local_limit=(taken + 100) / local.GB)["train"]
    with pytest.raises(RunError, match="in use"):
        two[4]
    os.close(handle)
    assert two[4]["tokens"].numel() and "train-00000" not in shards_here(home)


def room_for(web: Web, home: Path, shards: float) -> float:
    """The limit in GB at which so many of the largest shards fit beside the small files."""
    manifest = Cache(web.url).manifest
    Cache(web.url).remote.bring_tokenizer()  # type: ignore[union-attr]
    rest = sum(each.lstat().st_size for each in home.rglob("*") if each.is_file())
    return (rest + 2000 + shards * max(local.sizes(manifest).values())) / local.GB


@pytest.mark.parametrize("caches", [1, 2])
def test_readers_give_way_to_one_another_below_a_small_limit(
    web: Web, home: Path, whole: Path, monkeypatch: pytest.MonkeyPatch, caches: int
) -> None:
    limit = room_for(web, home, 2.2)
    monkeypatch.setattr("kdtrain.cache.remote._FULL", 0.5)
    opened = [Cache(web.url, local_limit=limit) for _ in range(caches)]
    train, validation = opened[0]["train"], opened[-1]["validation"]
    for reader, split in ((train, "train"), (validation, "validation"), (train, "train")):
        for row in range(len(reader)):
            assert_same(reader[row], Cache(whole)[split][row])
        assert local.listing()[1] <= limit * local.GB


def test_readers_in_two_threads_give_way_to_one_another(
    web: Web, home: Path, whole: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache, folder = Cache(web.url, local_limit=room_for(web, home, 2.2)), Cache(whole)
    monkeypatch.setattr("kdtrain.cache.remote._FULL", 5.0)
    readers = {split: cache[split] for split in cache}
    for row in range(len(folder["train"])):  # all the room is taken
        readers["train"][row]

    def read(split: str) -> None:
        for row in [0, len(folder[split]) - 1] * 8:
            assert_same(readers[split][row], folder[split][row])

    with ThreadPoolExecutor(2) as pool:
        for done in [pool.submit(read, split) for split in readers]:
            done.result(timeout=60)


def test_no_link_in_the_local_folder_is_followed(web: Web, home: Path, tmp_path: Path) -> None:
    Cache(web.url)["train"][0]
    path = next(home.rglob("train-00000.h5"))
    path.unlink()
    (tmp_path / "target").write_bytes(b"precious")
    path.symlink_to(tmp_path / "target")
    with pytest.raises(UsageError, match="is a link"):
        Cache(web.url)
    assert (tmp_path / "target").read_bytes() == b"precious"


READ = """
import sys
from kdtrain.cache import download
from kdtrain.cache.reader import Cache
download.WAIT = 0.01
cache = Cache(sys.argv[1])
print(sum(int(cache["train"][row]["tokens"].sum()) for row in range(10)))
"""


def test_a_process_that_is_killed_while_it_fetches_leaves_what_the_next_one_resumes(
    web: Web, home: Path, whole: Path, server
) -> None:
    size = Cache(whole).manifest.splits["train"]["shards"][0]["bytes"]
    environment = {"KDTRAIN_HOME": str(home), "HF_HUB_OFFLINE": ""}
    web.fail("train-00000.h5", "slow")
    (killed,) = server.run("-c", READ, web.url, **environment, KDTRAIN_FAULT=f"cache.fetch.bytes:kill:{size // 2}")
    assert killed.returncode == -9
    folder = Cache(whole)
    expected = sum(int(folder["train"][row]["tokens"].sum()) for row in range(10))
    web.fail(".h5", "slow", times=100)
    readers = server.run("-c", READ, web.url, world=2, **environment)  # both share the folder
    assert [int(each.stdout) for each in readers] == [expected] * 2, readers[0].stderr
    fetched = [path for path, _, _ in web.ranges if path.endswith(".h5")]
    assert len(fetched) <= 3 + 3  # the killed one's with what was ahead, then each shard once
    assert any(asked for path, asked, _ in web.ranges if path.endswith(".h5"))


def test_a_full_disk_is_an_error_that_names_the_path(web: Web, monkeypatch: pytest.MonkeyPatch, whole: Path) -> None:
    from kdtrain import faults

    reader = Cache(web.url)["train"]
    monkeypatch.setenv("KDTRAIN_FAULT", "cache.fetch.bytes:enospc:1-1000000000")
    faults.read()
    try:
        with pytest.raises(RunError, match=r"cannot write .*train-00000.h5.part: No space left"):
            reader[0]
    finally:
        monkeypatch.delenv("KDTRAIN_FAULT")
        faults.read()
    assert_same(reader[0], Cache(whole)["train"][0])


def test_verify_reads_all_of_a_cache_elsewhere_and_names_what_is_wrong(web: Web, whole: Path) -> None:
    assert verify_cache(web.url) == []
    for path in local.cache_folder(Cache(web.url).manifest.digest).rglob("*"):
        if path.is_file() and path.name not in ("manifest.json",):
            path.unlink()
    web.replaced["index.h5"] = b"x"
    web.replaced["shards/train-00002.json"] = b"{}"
    web.fail("validation-00000.h5", "404", times=100)
    found = verify_cache(web.url)
    assert len(found) == 3 and "index.h5 is not what the manifest states" in found[0]
    assert "train-00002.json" in found[1] and "validation-00000 is not there" in found[2]


@pytest.mark.parametrize("name", ["settings.json", "shards/train-00001.json"])
@pytest.mark.parametrize("content", [b"<html>proxy error</html>", None])
def test_a_record_that_came_wrong_is_not_kept_and_is_fetched_again(
    web: Web, whole: Path, home: Path, name: str, content: bytes | None
) -> None:
    sealed = (whole / "shards" / "train-00002.json").read_bytes()  # a seal that is right, over something else
    web.replaced[name] = sealed if content is None else content
    (problem,) = verify_cache(web.url)
    assert f"{name} is not what the manifest states" in problem
    folder = local.cache_folder(Cache(web.url).manifest.digest)
    assert not (folder / name).exists()
    web.replaced.clear()
    assert verify_cache(web.url) == []
    (folder / name).write_bytes(b"damaged here")
    assert verify_cache(web.url) == [] and (folder / name).read_bytes() == (whole / name).read_bytes()


# The hub --------------------------------------------------------------------------------------------------------------


def test_a_cache_on_the_hub_is_pinned_to_the_commit_of_its_revision(hub: Web, whole: Path) -> None:
    cache = Cache("hf:org/cache")
    commit = hub.hub["org/cache"].commits[-1][0]
    assert cache.name == f"hf:datasets/org/cache@{commit}"
    hub.hub["org/cache"].commit(dict.fromkeys(files_of(whole), b"replaced"))
    for row in range(10):  # the commit that was read first counts
        assert_same(cache["train"][row], Cache(whole)["train"][row])
    with pytest.raises(UsageError, match="altered or damaged"):
        Cache("hf:org/cache")
    hub.requests.clear()
    assert Cache(f"hf:datasets/org/cache@{commit}").manifest == cache.manifest
    assert hub.requests == []  # a commit does not change


def test_a_token_goes_to_the_hub_and_to_no_other_host(hub: Web, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    hub.hub["org/cache"].private = True
    Cache("hf:org/cache")["train"][0]
    assert "hub" in hub.authorized and "cdn" not in hub.authorized


@pytest.mark.parametrize(
    "where, change, words",
    [
        ("hf:org/nowhere", {}, "no such repository on the hub, or it is private"),
        ("hf:org/cache", {"private": True}, "no such repository on the hub, or it is private"),
        ("hf:org/cache", {"gated": True}, "it is gated; ask for access on its page on the hub, and log in"),
        ("hf:org/cache@v9", {}, "it has no such revision"),
        ("hf:org/empty", {}, "holds no cache that kdtrain wrote"),
    ],
)
def test_a_data_set_that_is_not_to_be_had_is_one_line(hub: Web, where: str, change: dict, words: str) -> None:
    hub.hub["org/empty"] = Repository()
    for name, value in change.items():
        setattr(hub.hub["org/cache"], name, value)
    with pytest.raises(UsageError, match=words) as error:
        Cache(where)
    assert "\n" not in str(error.value)


def test_a_hub_that_does_not_answer_leaves_what_is_here(hub: Web, whole: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kdtrain.cache.hub.WAIT", 0.001)
    hub.fail("/main", "503", times=2)
    Cache("hf:org/cache")["validation"][0]
    hub.fail("/main", "503", times=1000)
    assert_same(Cache("hf:org/cache")["validation"][1], Cache(whole)["validation"][1])
    with pytest.raises(RunError, match="the hub does not answer"):
        Cache("hf:org/other")


def test_an_address_that_cannot_be_right_is_given_up_at_once_and_an_unreachable_one_soon(
    web: Web, home: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    tried, own = list[float](), threading.get_ident()  # a test before may still read ahead in another thread
    monkeypatch.setattr("time.sleep", lambda seconds: tried.append(seconds) if threading.get_ident() == own else None)
    with pytest.raises(RunError, match=r"^[^\n(]*does not speak https there; check the address[^\n(]*$"):
        Cache(web.url.replace("http://", "https://"))
    assert tried == []
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        nowhere = f"http://127.0.0.1:{free.getsockname()[1]}/cache"
    with caplog.at_level("INFO", "kdtrain"), pytest.raises(RunError, match="connection was refused; tried 3 times"):
        Cache(nowhere)
    assert len(tried) == 2 and sum(tried) < 10 * download.WAIT
    said = [each.getMessage() for each in caplog.records if each.thread == own]
    assert said and all(
        re.fullmatch(r".*: the connection was refused; trying again in [\d.]+ s", each) for each in said
    )


@pytest.mark.parametrize("contacts, times", [(3, 3), (6, 6)])
def test_the_hub_is_given_up_sooner_where_it_was_never_reached(
    hub: Web, monkeypatch, contacts: int, times: int
) -> None:
    asked = []

    def question() -> None:
        asked.append(1)
        raise OSError("[Errno -2] Name or service not known")

    monkeypatch.setattr("kdtrain.cache.hub.WAIT", 0.001)
    with pytest.raises(RunError, match="the name of the server is not known"):
        ask(Address("hf:org/cache", "org/cache", "main"), question, 6, contacts)
    assert len(asked) == times
