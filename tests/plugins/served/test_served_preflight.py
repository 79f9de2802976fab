"""What is asked of a server before its first sequence, and which servers and options are refused."""

import re
import socket
import time
from pathlib import Path

import pytest
import torch

import kdtrain as kd
from kdtrain.config.sections import CodecConfig, DataConfig
from kdtrain.models.spec import ModelSpec
from kdtrain.plugins.served import preflight
from kdtrain.plugins.served.options import RunServerConfig, ServerConfig
from kdtrain.plugins.served.teacher import ServedTeacher
from kdtrain.teaching import teacher
from tests.captures import WRITES, capture, content
from tests.stand_in import standing_in


def test_stale_prompts_are_kept_away_by_a_salt_and_found_without_one(server, whole):
    server.faults = dict.fromkeys(range(200), "stale")
    capture(server)
    assert content("cache") == whole
    server.bodies.clear()
    server.always = "no-salt"
    with pytest.raises(kd.UsageError, match="cached prompts give stale ones"):
        capture(server, "other")


def page_of_html(connection: socket.socket) -> None:
    page = b"<!doctype html><p>welcome"
    connection.sendall(f"HTTP/1.1 200 OK\r\nContent-Length: {len(page)}\r\n\r\n".encode() + page)


@pytest.mark.parametrize(
    "change, words",
    [
        ({"name": "other", "server_model": "stdlib-5m"}, "serves other, not stdlib-5m; give --server-model NAME"),
        ({"max_model_len": 20}, "takes 20 tokens, and a row needs 25 .* --max-model-len 26, or use --seq-len 18"),
        ({"max_logprobs": 8}, "max allowed: 8 .*; start the server with --max-logprobs 16, or use a smaller --top-k"),
        ({"key": "secret"}, r"says: Unauthorized \(401\); set KDTRAIN_SERVER_KEY"),
        ({"always": "processed-mode"}, "returns processed log-probabilities: temperature and top-p move them"),
        ({"always": "processed"}, "processed log-probabilities|processed_logprobs|raw_logprobs"),
        ({"always": "tokenizer"}, "reads id [0-9]+ as '.*', the local tokenizer as '.*'; it serves another model"),
        ({"always": "drift"}, "nats apart: cached prompts give stale ones; start .* --no-enable-prefix-caching"),
        ({"always": "stale"}, "nats apart: cached prompts give stale ones; start .* --no-enable-prefix-caching"),
        ({"always": "bos"}, "it counts [0-9]+ tokens, [0-9]+ were sent: it adds or drops some"),
        ({"always": "none"}, "nothing for token 2"),
        ({"always": "low"}, "not log-probabilities: .* leave more probability than 2,048 entries can have; .* raw_"),
        ({"always": "redirect:http://example.com/v1"}, "it redirects to http://example.com/v1, which is not followed"),
        ({"raw": page_of_html}, r"\(a page of HTML\); tried 3 times; check the address, which ends in /v1"),
    ],
)
def test_a_server_that_cannot_serve_the_teacher_is_refused_before_the_first_sequence(server, change, words):
    model = change.pop("server_model", None)
    for name, value in change.items():
        setattr(server, name, value)
    with pytest.raises(kd.UsageError, match=words) as caught:
        capture(server, server_patience=0.3, **({"server_model": model} if model else {}))
    assert "\n" not in str(caught.value) and not Path("cache").exists()


@pytest.mark.parametrize(
    "fault, said", [("no-scores", r"not supported \(400\)"), ("unscored", "an answer without prompt_")]
)
@pytest.mark.parametrize("version, owner", [(None, "library"), ({"name": "x"}, "library"), ({"version": "1"}, "me")])
def test_a_server_that_is_not_vllm_is_named_as_such_at_once(server, capsys, fault, said, version, owner):
    server.version, server.owner, server.always, server.max_model_len = version, owner, fault, None
    words = (
        f"{server.url} does not look like vLLM: .*{said}.*; kdtrain needs vLLM's completions endpoint with prompt_log"
    )
    with pytest.raises(kd.UsageError, match=words) as caught:
        capture(server)
    assert (
        "\n" not in str(caught.value)
        and len(server.bodies) == 1
        and "asking again" not in (log := capsys.readouterr().err)
    )
    assert "serves stdlib-5m, and does not tell its length" in log


@pytest.mark.parametrize(
    "change, stated",
    [
        ({"version": None, "owner": "proxy", "max_model_len": None}, {"version": None, "max_model_len": None}),
        (
            {"name": "somebody/else", "always": "no-salt", "root": "/srv/me/weights"},
            {"model": "somebody/else", "root": "weights", "max_model_len": 600},
        ),
        ({"max_model_len": 18}, {"max_model_len": 18}),
    ],
    ids=["a proxy without a version", "its only model, without salts", "the least length"],
)
def test_a_server_that_gives_less_is_taken_as_it_is(server, change, stated):
    for name, value in change.items():
        setattr(server, name, value)
    cache = capture(server, seq_len=16)
    told = cache.manifest.settings.teacher
    assert {name: told.get(name) for name in stated} == stated and len(cache["train"]) == 10
    assert ("cache_salt" in server.bodies[-1]) == (server.always != "no-salt")


def test_an_address_that_is_silent_is_not_waited_for_as_an_answer_is(server, monkeypatch):
    monkeypatch.setattr(preflight, "_SILENT", 0.1)
    began = time.monotonic()
    with socket.create_server(("127.0.0.1", 0)) as silent, pytest.raises(kd.UsageError, match=r"/v1: .*, for \d s"):
        capture(f"http://127.0.0.1:{silent.getsockname()[1]}", server_timeout=60.0, server_patience=0.2)
    assert time.monotonic() - began < 30


def test_entries_about_the_token_after_the_next_are_found_whatever_the_batches_and_shards(server):
    server.always = "ahead"  # batches and shards of four
    with pytest.raises(kd.RunError, match=r"as the server answers: shifted by \+1"):
        capture(server)


@pytest.mark.parametrize(
    "name, value, words",
    [
        ("always", "processed-text", "processed log-probabilities of what it writes: .* raw_logprobs"),
        ("ends", [*range(1, 2048)], r"the server ends a text at \d+, and .* add it to eos_token_id in gen"),
    ],
    ids=["processed numbers", "an end of its own"],
)
def test_what_cannot_be_in_the_text_of_a_server_is_refused_after_one_question(server, name, value, words):
    setattr(server, name, value)
    with pytest.raises(kd.UsageError, match=words):
        capture(server, **WRITES)
    assert len([body for body in server.bodies if "return_token_ids" in body]) == 1


@pytest.mark.parametrize("ends", [(2047,), tuple(range(1, 901))], ids=["cut", "ended"])
def test_texts_that_were_all_cut_are_one_warning(server, capsys, monkeypatch, ends):
    monkeypatch.setattr(teacher, "ends_of", lambda *_: ends)
    ended = sum(each["stop"] for each in capture(server, **WRITES).manifest.generated.values())
    assert (ended == 0) == (len(ends) == 1)
    assert ("all were cut: nothing teaches the student to stop" in capsys.readouterr().err) == (ended == 0)


def test_the_key_comes_from_the_environment_and_is_written_nowhere(server, monkeypatch, capsys, tmp_path):
    (tmp_path / ".netrc").write_text("machine 127.0.0.1 login me password of-netrc\n")
    monkeypatch.setenv("NETRC", str(tmp_path / ".netrc"))
    monkeypatch.setenv("OPENAI_API_KEY", "of-openai")
    capture(server, "open")
    assert {*server.authorized} == {None}
    monkeypatch.setenv("KDTRAIN_SERVER_KEY", "the-secret")
    server.key = "the-secret"
    server.authorized.clear()
    capture(server)
    assert {*server.authorized} == {"Bearer the-secret"}
    assert b"the-secret" not in b"".join(content("cache").values()) and "the-secret" not in capsys.readouterr().err
    with pytest.raises(kd.UsageError, match="KDTRAIN_SERVER_KEY would be sent unencrypted; give https://"):
        capture("http://llm.example.com/v1")
    with standing_in(server.model, server.tokenizer) as second:
        server.always = f"redirect:{second.url}/completions"
        with pytest.raises(kd.UsageError, match=r"it redirects to .* which is not followed"):
            capture(server, "redirected")
        assert second.authorized == [] == second.bodies


def test_a_key_that_a_server_writes_back_is_in_no_file_and_no_line_whatever_its_escapes(server, monkeypatch, capsys):
    key = "sk/of&the-test"
    monkeypatch.setenv("KDTRAIN_SERVER_KEY", key)
    server.escaped = {b"/": rb"\/", b"&": rb"\u0026", b"k": rb"\u006B"}
    server.version, server.root, server.build = {"version": f"1 for {key}"}, f"m of {key}", f"{'x' * 95} {key}"
    told = capture(server).manifest.settings.teacher
    assert told["version"] == "1 for ..." and told["system_fingerprint"] == f"{'x' * 95} ..."
    server.faults = dict.fromkeys(range(len(server.bodies), 999), "model")
    server.another = key
    with pytest.raises(kd.UsageError, match=r"an answer of the model \.\.\."):
        capture(server, "other")
    server.name = f"m-{key}"
    with pytest.raises(kd.UsageError, match="serves nothing, not stdlib-5m"):
        capture(server, "another")
    seen = b"".join(content("cache").values()).decode("latin1") + capsys.readouterr().err
    assert len(seen) > 10_000 and not re.search(r"sk\W+of|the-test", seen)


def test_an_address_that_nothing_listens_at_is_refused_soon(server):
    server.close()
    words = r"http://127.0.0.1:\d+/v1: the connection was refused, for \d s; check the address and the port, and that"
    with pytest.raises(kd.UsageError, match=words) as caught:
        capture(server, server_patience=0.3)
    assert "what is here stays" not in str(caught.value)


@pytest.mark.parametrize(
    "options, words",
    [
        ({"teacher_server": "host:8000"}, "host:8000 is not an address; give one such as http://HOST:8000/v1"),
        ({"teacher_server": "http://me:word@host/v1"}, "a password would end in logs; use KDTRAIN_SERVER_KEY"),
        ({"teacher_server": "http://host/v1?key=word"}, r"http://host/v1\?\.\.\.: leave out what follows"),
        ({"teacher_server": "http:/host/v1?key=word"}, r"http:/host/v1\?\.\.\. is not an address"),
        ({"teacher_server": ("http://host", "http://host")}, "one address is given twice"),
        ({"teacher_server": ("http://host:8000", "HTTP://Host:8000/v1/")}, "one address is given twice"),
        ({"teacher_server": "http://[::1/v1"}, r"http://\[::1/v1 is not an address"),
        ({"teacher_server": "http://[foo]/v1"}, "is not an address"),
        ({"teacher_server": "http://host:abc/v1"}, "http://host:abc/v1 is not an address"),
        ({"teacher_server": "http://host:99999999"}, "is not an address"),
        ({"teacher_server": "me:word@host/v1"}, "a password would end in logs"),
        ({"server_model": "m"}, "--server-model has no effect without --teacher-server"),
    ],
)
def test_an_address_that_is_none_is_refused(options, words):
    with pytest.raises(kd.UsageError, match=words) as caught:
        ServerConfig(**options)
    assert "word" not in str(caught.value).replace("password", "")


@pytest.mark.parametrize("size", ["151936", True, 0, 1.5])
def test_the_size_of_a_vocabulary_is_a_whole_number(size):
    spec = ModelSpec(name="m", kind="served", tokenizer="org/model", options={"vocab_size": size})
    with pytest.raises(kd.UsageError, match=r"vocab_size under \[options\] must be a whole number of at least 2"):
        ServedTeacher(spec, torch.device("cpu"), "fp32")


def test_a_tokenizer_without_a_configuration_asks_for_the_size_of_the_vocabulary(tmp_path):
    (tmp_path / "tokenizer.json").write_text("{}")
    spec = ModelSpec(name="m", kind="served", tokenizer=str(tmp_path))
    words = r"not known: .* has no config.json; add vocab_size = N under \[options\] of a TOML with kind = 'served'$"
    with pytest.raises(kd.UsageError, match=words):
        _ = ServedTeacher(spec, torch.device("cpu"), "fp32").vocab_size


USE = "--top-k, or --num-samples where the server has kdtrain's plugin"


@pytest.mark.parametrize(
    "kind, given, words",
    [
        ("cache", {"codec": CodecConfig(dense=True)}, f"--dense: no server gives whole .* {USE}"),
        ("cache", {"codec": CodecConfig(top_k=8, num_samples=24)}, f"exclude each other .* use either {USE}"),
        ("cache", {"compile": False}, "--no-compile has no effect with --teacher-server"),
        ("cache", {"precision": "fp32"}, "--precision has no effect with --teacher-server: no teacher runs here"),
        ("cache", {"device": "cuda:1"}, "--device has no effect with --teacher-server"),
        ("cache", {"teacher_weights": "int8"}, "--teacher-weights has no effect with --teacher-server"),
        ("run", {"teacher_weights": "int8"}, "--teacher-weights has no effect with --teacher-server"),
        ("run", {"cross_tokenizer": True}, "capture the server's answers with cache-teacher"),
        ("run", {"teacher": "self"}, "--teacher self is the student, which no server runs"),
    ],
)
def test_options_that_have_no_effect_with_a_server_are_refused(kind, given, words):
    make, options = (kd.CacheTeacherConfig, ServerConfig) if kind == "cache" else (kd.DistillConfig, RunServerConfig)
    given = {"teacher": "t", "out": "o", **({} if kind == "cache" else {"student": "s"}), **given}
    server = {"server": options(teacher_server="http://host/v1")}
    with pytest.raises(kd.UsageError, match=words):
        make(data=DataConfig(data="text.txt"), plugins=server, **given)
