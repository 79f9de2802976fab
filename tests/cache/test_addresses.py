"""Addresses of caches: the hub and its revisions, tokens, private networks, hosts that do not answer."""

import hashlib
import io
import re
import socket
import threading
from pathlib import Path

import pytest
import requests
from urllib3.util.retry import Retry

from kdtrain.errors import RunError, UsageError
from kdtrain.library import Cache
from kdtrain.net import request
from kdtrain.net.address import is_private
from kdtrain.net.hub import ask
from tests.fetched import assert_same, files_of
from tests.web import TOKEN, Repository, Web


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
        request.download("https://example.com/x", tmp_path / "part", what="it", most=10)
    assert asked == ["https://example.com/x"]
    with pytest.raises(UsageError, match="redirects more than"):  # who is inside knows what is there
        request.download("https://10.0.0.1/x", tmp_path / "part", what="it", most=10)


@pytest.mark.parametrize(
    "host", ["example.com", "1.1.1.1", "[2606:4700::1111]", "localhost.example.com", "10.example.com"]
)
def test_a_public_host_is_one(host: str) -> None:
    assert not is_private(f"https://{host}/x")


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


def test_a_file_of_the_hub_has_its_size_before_it_is_fetched_and_its_digest_before_it_is_read(
    hub: Web, whole: Path
) -> None:
    cache, name = Cache("hf:org/cache"), "shards/train-00000.h5"
    assert cache.remote is not None
    content = (whole / name).read_bytes()
    path = cache.remote.ensure(cache.manifest.splits["train"]["shards"][0])
    path.write_bytes(b"x" * len(content))  # damaged here, so fetched again
    assert_same(cache["train"][0], Cache(whole)["train"][0])
    hub.hub["org/cache"].commit({name: b"x" * len(content)})
    with pytest.raises(RunError, match=r"train-00000.h5 is not what the manifest states: .* ask its author"):
        Cache("hf:org/cache")["train"][0]
    larger = content + b"x"
    hub.hub["org/cache"].commit({name: larger})
    with pytest.raises(RunError, match=r"train-00000.h5 has .* bytes there instead of"):
        Cache("hf:org/cache")["train"][0]
    assert f"/cdn/{hashlib.sha256(larger).hexdigest()}" not in hub.requests


def test_without_a_connection_what_is_here_of_the_hub_is_read(
    hub: Web, whole: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = Cache("hf:org/cache")["validation"]
    [first[row] for row in range(len(first))]  # all of it, so that nothing is fetched ahead later
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    hub.requests.clear()
    cache = Cache("hf:org/cache")
    assert_same(cache["validation"][1], Cache(whole)["validation"][1])
    with pytest.raises(RunError, match=r"train-00001.h5 is not here, and there is no connection \(HF_HUB_OFFLINE\)"):
        cache["train"][4]
    with pytest.raises(UsageError, match="nothing of it is here"):
        Cache("hf:org/other")
    assert hub.requests == []


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
    hub.fail("/manifest.json", "503", times=2)
    Cache("hf:org/cache")["validation"][0]
    hub.fail("/manifest.json", "503", times=1000)
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
    assert len(tried) == 2 and sum(tried) < 10 * 0.5
    said = [each.getMessage() for each in caplog.records if each.thread == own]
    assert said and all(
        re.fullmatch(r".*: the connection was refused; trying again in [\d.]+ s", each) for each in said
    )


@pytest.mark.parametrize("retry, times", [(request.CONTACT, 3), (request.RETRY, 6)])
def test_the_hub_is_given_up_sooner_where_it_was_never_reached(hub: Web, retry: Retry, times: int) -> None:
    asked = []

    def question() -> None:
        asked.append(1)
        raise OSError("[Errno -2] Name or service not known")

    with pytest.raises(RunError, match="the name of the server is not known"):
        ask("hf:org/cache", question, retry)
    assert len(asked) == times
