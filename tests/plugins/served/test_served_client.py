"""What a server may do to those who ask it: nothing but answer, in bounds, and never with the key."""

import re
import socket
import threading
import time

import pytest

import kdtrain as kd
from kdtrain.net.request import Session, download
from kdtrain.plugins.served.client import Client, Refused, quoted
from tests.stand_in import standing_in

KEY = "sk-of-the-test"


@pytest.fixture
def server():
    with standing_in(None, None) as server:
        yield server


def ask(server, timeout=5.0, patience=0.0):
    client = Client([server.url], concurrency=1, timeout=timeout, patience=patience)
    return client.get(client.hosts[0], f"{server.url}/models", dict)


def answer(content: bytes, code: int = 200, headers: str = "") -> bytes:
    return f"HTTP/1.1 {code} x\r\n{headers}Content-Length: {len(content)}\r\n\r\n".encode() + content


def test_a_key_from_a_file_is_stripped_and_one_that_is_none_is_refused_and_not_shown(server, monkeypatch):
    server.key = "sk-secret"
    monkeypatch.setenv("KDTRAIN_SERVER_KEY", "sk-secret\n")
    assert ask(server)["object"] == "list"
    for wrong in ("sk\nsecret", "sk\x07secret", "sk secret", "sk-secr\u00e9t"):
        monkeypatch.setenv("KDTRAIN_SERVER_KEY", wrong)
        with pytest.raises(kd.UsageError, match="KDTRAIN_SERVER_KEY holds spaces or characters") as caught:
            ask(server)
        assert "secr" not in str(caught.value)


@pytest.mark.parametrize(
    "url, open",
    [
        ("HTTP://llm.example.com/v1", True),
        ("http://[2001:4860:4860::8888]:8000/v1", True),
        ("http://134744072/v1", True),
        ("http://0x08080808", True),
        ("http://llm%2Eexample%2Ecom/v1", True),
        ("http://llm\u3002example\u3002com/v1", True),
        ("https://llm.example.com/v1", False),
        ("http://gpu1:8000/v1", False),
        ("http://gpu1.internal:8000/v1", False),
        ("http://10.0.0.5:8000", False),
        ("http://[fd00::1]:8000/v1", False),
        ("http://127.1:8000/v1", False),
    ],
)
def test_a_key_goes_unencrypted_into_private_networks_only(monkeypatch, url, open):
    monkeypatch.setenv("KDTRAIN_SERVER_KEY", KEY)
    monkeypatch.delenv("KDTRAIN_ALLOW_HTTP", raising=False)
    if not open:
        Client([url], concurrency=1, timeout=5, patience=0)
        return
    with pytest.raises(kd.UsageError, match="KDTRAIN_SERVER_KEY would be sent unencrypted"):
        Client([url], concurrency=1, timeout=5, patience=0)


def test_certificates_that_are_not_there_are_one_line(server, monkeypatch, tmp_path):
    monkeypatch.setenv("REQUESTS_CA_BUNDLE", "/nowhere/certificates.pem")
    assert ask(server)["object"] == "list"
    url = server.url.replace("http:", "https:")
    client = Client([url], concurrency=1, timeout=5, patience=0)
    words = "invalid path: /nowhere/certificates.pem; set REQUESTS_CA_BUNDLE"
    with pytest.raises(kd.UsageError, match=words):
        client.get(client.hosts[0], f"{url}/models", dict)
    with pytest.raises(kd.UsageError, match=words):
        download(url, tmp_path / "part", what="it", most=100, exact=False)


def test_a_proxy_of_the_environment_sees_no_key(server, monkeypatch):
    monkeypatch.setenv("KDTRAIN_SERVER_KEY", KEY)
    monkeypatch.setenv("KDTRAIN_ALLOW_HTTP", "1")
    with standing_in(None, None) as proxy:
        for name in ("HTTP_PROXY", "http_proxy"):
            monkeypatch.setenv(name, proxy.url.removesuffix("/v1"))
        for name in ("NO_PROXY", "no_proxy"):
            monkeypatch.delenv(name, raising=False)
        ask(server)
        proxies, request = [], Session.request
        monkeypatch.setattr(Session, "request", lambda session, *_, **__: proxies.append(session.trust_env))
        for url in ("http://llm.example.com/v1", "https://llm.example.com/v1"):
            client = Client([url], concurrency=1, timeout=5, patience=0)
            with pytest.raises(TypeError):  # None is no answer
                client.get(client.hosts[0], url, dict)
        assert proxies == [False, True]  # through a tunnel
        monkeypatch.setattr(Session, "request", request)
    assert proxy.authorized == [] and {*server.authorized} == {f"Bearer {KEY}"}


ODD = "sk/of&the+test"


@pytest.mark.parametrize(
    "key, said",
    [
        (KEY, answer(b'{"error": {"message": "no such key: sk-of-\\u0074he-test"}}', 401)),
        (KEY, answer(b"sk-of-the-test", 403)),
        (KEY, answer(b"", 307, f"Location: http://127.0.0.1/?key={KEY}\r\n")),
        (ODD, answer(rb'{"error": {"message": "no such key: sk\/of\u0026the\u002Btest"}}', 401)),
        (ODD, answer(rb'{"error": "of upstream: {\"detail\": \"sk\\/of\\u0026the+test\"}"}', 400)),
        (ODD, answer(rb"no JSON: sk\/of\u0026the+test", 403)),
        (ODD, answer(b"no JSON: sk/of&amp;the+test", 403)),
        (ODD, answer(b"", 307, "Location: http://127.0.0.1/?key=sk%2Fof%26the%2btest\r\n")),
        (ODD, answer(b"", 307, "Location: http://127.0.0.1/?key=of-another\r\n")),
        (ODD, answer(b'{"error": "' + b"x" * 390 + rb' sk\/of\u0026the+test"}', 401)),
    ],
    ids=[
        *("plain message", "plain text", "plain redirect"),
        *("message", "nested", "text", "html", "redirect", "query", "cut"),
    ],
)
def test_a_key_that_a_server_quotes_is_not_shown_whatever_its_escapes(server, monkeypatch, key, said):
    monkeypatch.setenv("KDTRAIN_SERVER_KEY", key)
    server.raw = lambda connection: connection.sendall(said)
    with pytest.raises(Refused, match=r"\.\.\.|xxx$") as caught:
        ask(server)
    assert not {"sk", "the", "test", "another"} & {*re.split(r"\W", caught.value.words)}


def test_the_key_is_looked_for_in_a_long_run_of_backslashes_in_a_time_that_does_not_grow_with_its_square(monkeypatch):
    monkeypatch.setenv("KDTRAIN_SERVER_KEY", KEY)
    began = time.process_time()
    assert quoted("\\" * 10_000 + KEY + "\\" * 10_000, 10_003).endswith("\\...")
    assert time.process_time() - began < 1.0


def test_the_body_of_a_redirect_is_not_read(server, tmp_path):
    sent = []

    def endless(connection: socket.socket) -> None:
        connection.sendall(b"HTTP/1.1 302 Found\r\nLocation: http://192.0.2.1/\r\n\r\n")
        for _ in range(32):
            connection.sendall(bytes(2**20))
            sent.append(2**20)

    server.raw = endless
    with pytest.raises(Refused, match=r"it redirects to .*192.*, which is not followed"):
        ask(server)
    with pytest.raises(kd.UsageError, match=r"redirects to .*192.*, which is not read"):
        download(f"{server.url}/models", tmp_path / "part", what="it", most=2**20)
    assert sum(sent) < 2 * 2**24, "what the sockets hold"


@pytest.mark.parametrize("first", [b"HTTP/1.1 200 OK\r\nX-Slow: ", answer(bytes(10**6))[: -(10**6)]])
def test_an_answer_that_drips_is_ended_at_the_time_out(server, first):
    def drip(connection: socket.socket) -> None:
        connection.sendall(first)
        for _ in range(80):
            connection.sendall(b"x")
            time.sleep(0.05)

    server.raw, began = drip, time.monotonic()
    with pytest.raises(kd.RunError, match="the answer takes too long"):
        ask(server, timeout=0.4)
    assert time.monotonic() - began < 3


@pytest.mark.parametrize(
    "said, words",
    [
        (answer(b"x", headers="Content-Encoding: gzip\r\n"), r"what is not the requested JSON \(.*\); tried 3 times"),
        (answer(b'{"error":"\xff"}', 500), "it answers 500: "),
    ],
    ids=["packed", "no text"],
)
def test_a_packed_answer_is_not_unpacked_and_an_error_that_is_no_text_may_pass(server, said, words):
    server.raw = lambda connection: connection.sendall(said)
    with pytest.raises(kd.RunError, match=words):
        ask(server)


@pytest.mark.parametrize("page", [answer(b" " * 2**21, 503), answer(b"<html>starting</html>")], ids=["long", "html"])
def test_a_proxy_that_answers_for_its_server_while_it_starts_does_not_end_the_capture(server, page):
    server.raw = lambda connection: connection.sendall(page)
    threading.Timer(0.7, setattr, (server, "raw", None)).start()
    assert ask(server, patience=5)["object"] == "list"
