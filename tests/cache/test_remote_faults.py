"""Downloads that go wrong: tried again, resumed, or one line, and what is read is what the manifest names."""

import time
from pathlib import Path

import pytest

from kdtrain.cache.read.remote import cache_folder
from kdtrain.cache.tools.verify import verify_cache
from kdtrain.errors import RunError
from kdtrain.library import Cache
from kdtrain.net.request import Unreachable
from tests.fetched import assert_same, shards_here
from tests.web import Web

PASSING = [
    *("close", "garbage", "500", "502", "503", "504", "429", "408", "later:429=0", "later:503=1", "drop", "stall"),
    *("later:503=Thu, 01 Jan 1970 00:00:00 GMT", "later:429=soon", "flip", "whole", "slow", "unsized", "digits"),
    *(
        "drop,whole",
        "drop,begin",
        "drop,416",
        f"drop,range:bytes {'9' * 5000}-9/*",
    ),  # it does not resume, or as it should
]
LASTING = {
    **{"404": "not there", "401": "refuses", "403": "refuses", "410": "not there", "400": "answers 400"},
    **{"418": "answers 418", "cut": "bytes there", "more": "bytes there", "empty": "bytes there"},
    **{"html": "bytes there", "endless": "sends more", "flip": "not what the manifest states", "gzip": None},
    **{"redirect:file:///etc/passwd": "redirects to file", "redirect:ftp://127.0.0.1/x": "redirects to ftp"},
    **{"redirect:https://[::1": "redirects to no URL", "redirect:http://[::1]:x/": "no URL|tried"},
    **{"redirect:http://192.0.2.1/x?key=a": r"redirects to http.*x\?\.\.\.", "loop": "redirects more than"},
    **{"500": "answers 500"},
    **{"close": "tried", "drop": None, "garbage": "tried", "429": "answers 429"},
}


@pytest.mark.parametrize("fault", PASSING, ids=lambda fault: fault[:40])
def test_a_fault_that_passes_is_tried_again_and_the_numbers_are_right(web: Web, whole: Path, fault: str) -> None:
    faults = fault.split(",") if fault.startswith("drop,") else [fault]
    for each in faults:
        web.fail("train-00000.h5", each)
    assert_same(Cache(web.url)["train"][0], Cache(whole)["train"][0])
    assert web.fired == faults


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


def test_a_download_that_broke_off_resumes_where_it_was(web: Web, home: Path) -> None:
    reader = Cache(web.url)["train"]
    size = Cache(web.url).manifest.splits["train"]["shards"][0]["bytes"]
    web.fail("train-00000.h5", "drop")
    reader[0]
    first, second = [each for each in web.ranges if each[0].endswith("train-00000.h5")]
    assert first[1] is None and second[1] == f"bytes={size // 2}-"
    assert not list(home.rglob("train-00000*.part*"))


@pytest.mark.parametrize("fault", ["drip headers", "drip"])
def test_a_server_that_sends_a_byte_a_moment_is_given_up(web: Web, monkeypatch: pytest.MonkeyPatch, fault: str) -> None:
    reader = Cache(web.url)["train"]
    monkeypatch.setattr("kdtrain.net.request._MINUTE", 0.3)
    web.fail("train-00000.h5", fault, times=100)
    began = time.monotonic()
    with pytest.raises(RunError, match="the server does not answer; tried 6 times"):
        reader[0]
    assert time.monotonic() - began < 15 and set(web.fired) == {fault}


def test_nothing_of_netrc_is_sent(web: Web, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "netrc").write_text("machine 127.0.0.1 login me password secret\n")
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    Cache(web.url)["train"][0]
    assert web.passwords == 0


def test_a_server_that_takes_back_what_it_gave_does_not_go_on_for_ever(web: Web) -> None:
    reader = Cache(web.url)["train"]
    for _ in range(20):
        web.fail("train-00000.h5", "drop")
        web.fail("train-00000.h5", "416")
    with pytest.raises(Unreachable, match="tried 6 times"):
        reader[0]
    assert len(web.fired) <= 12  # six by the reader, and six by the thread that fetches ahead


def test_what_lies_in_a_part_is_checked_like_everything_else(web: Web, home: Path, whole: Path) -> None:
    cache = Cache(web.url)
    part = home / "caches" / cache.manifest.digest / "shards" / "train-00000.h5.part"
    part.parent.mkdir(parents=True)
    for content in (b"x" * 1000, b"x" * cache.manifest.splits["train"]["shards"][0]["bytes"], b"x" * 10**6):
        part.write_bytes(content)
        assert_same(cache["train"][0], Cache(whole)["train"][0])
        cache["train"].close()
        next(home.rglob("train-00000.h5")).unlink()


READ = """
import sys
from kdtrain.library import Cache
cache = Cache(sys.argv[1])
print(sum(int(cache["train"][row]["tokens"].sum()) for row in range(10)))
"""


def test_a_process_that_is_killed_while_it_fetches_leaves_what_the_next_one_resumes(
    web: Web, home: Path, whole: Path, server
) -> None:
    size = Cache(whole).manifest.splits["train"]["shards"][0]["bytes"]
    environment = {"KDTRAIN_HOME": str(home), "HF_HUB_OFFLINE": ""}
    web.fail(".h5", "slow", times=100)  # three at once, each with a piece written before so many bytes
    (killed,) = server.run("-c", READ, web.url, **environment, KDTRAIN_FAULT=f"cache.fetch.bytes:kill:{size}")
    assert killed.returncode == -9
    folder = Cache(whole)
    expected = sum(int(folder["train"][row]["tokens"].sum()) for row in range(10))
    readers = server.run("-c", READ, web.url, world=2, **environment)  # both share the folder
    assert [int(each.stdout) for each in readers] == [expected] * 2, readers[0].stderr
    fetched = [path for path, _ in web.ranges if path.endswith(".h5")]
    assert len(fetched) <= 3 + 3  # the killed one's with what was ahead, then each shard once
    assert any(asked for path, asked in web.ranges if path.endswith(".h5"))


def test_a_disk_that_fills_while_a_shard_comes_is_one_line_and_what_was_here_stays(
    web: Web, monkeypatch: pytest.MonkeyPatch, whole: Path
) -> None:
    from kdtrain import faults

    cache = Cache(web.url)
    reader, published, again = cache["train"], cache["validation"][0], Cache(web.url)
    monkeypatch.setenv("KDTRAIN_FAULT", "cache.fetch.bytes:enospc:1-1000000000")
    faults.read()
    try:
        with pytest.raises(RunError, match=r"cannot write .*train-00000.h5.part: No space left") as caught:
            reader[0]
        assert "\n" not in str(caught.value)
        assert_same(again["validation"][0], published)  # what was here before is whole
    finally:
        monkeypatch.delenv("KDTRAIN_FAULT")
        faults.read()
    assert_same(reader[0], Cache(whole)["train"][0])


@pytest.mark.parametrize("name", ["settings.json", "shards/train-00001.json"])
@pytest.mark.parametrize("content", [b"<html>proxy error</html>", None])
def test_a_record_that_came_wrong_is_not_kept_and_is_fetched_again(
    web: Web, whole: Path, home: Path, name: str, content: bytes | None
) -> None:
    sealed = (whole / "shards" / "train-00002.json").read_bytes()  # a seal that is right, over something else
    web.replaced[name] = sealed if content is None else content
    (problem,) = verify_cache(web.url)
    assert f"{name} is not what the manifest states" in problem
    folder = cache_folder(Cache(web.url).manifest.digest)
    assert not (folder / name).exists()
    web.replaced.clear()
    assert verify_cache(web.url) == []
    (folder / name).write_bytes(b"damaged here")
    assert verify_cache(web.url) == [] and (folder / name).read_bytes() == (whole / name).read_bytes()
