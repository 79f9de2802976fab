"""A teacher behind a server: what it says becomes the cache of the local teacher, and what cannot be right never does.

The server is a stand-in (tests/stand_in.py) with the shipped teacher behind it, whose answers are compared with those
recorded from vLLM.
"""

import json
import random
import re
import socket
import time
from pathlib import Path

import numpy as np
import pytest
import requests
import torch

import kdtrain as kd
from kdtrain.cache.codec import CodecSpec
from kdtrain.cache.engine_samples import SampleRequest, sample
from kdtrain.commands.captured import captured
from kdtrain.config import CodecConfig, DataConfig, ObjectiveConfig, RunServerConfig, ServerConfig, TextConfig
from kdtrain.models.loading import load_teacher, load_tokenizer
from kdtrain.models.spec import ModelSpec, read_spec
from kdtrain.teaching.served import preflight, teacher
from kdtrain.teaching.served.answers import Answers, Entry, Span, Wrong, spans_of
from kdtrain.teaching.served.client import SMALL, Client
from kdtrain.teaching.served.fingerprint import Fingerprint
from kdtrain.teaching.served.teacher import ServedTeacher
from tests.stand_in import StandIn, standing_in

RECORDED = Path(__file__).parents[1] / "golden" / "vllm-answers.json"
PREFLIGHT = 25
"""More requests for completions than the preflight makes."""


@pytest.fixture(scope="module")
def shipped():
    spec = read_spec("stdlib-5m", "teachers")
    return load_teacher(spec, "cpu").float(), load_tokenizer(spec)


@pytest.fixture(scope="module")
def another(shipped):
    """The shipped teacher, a little worn."""
    model = load_teacher(read_spec("stdlib-5m", "teachers"), "cpu").float()
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1 + 0.03 * torch.randn(parameter.shape, generator=generator))
    return model


@pytest.fixture(scope="module")
def whole(shipped, tmp_path_factory):
    """The files of the undisturbed capture, by name."""
    folder = tmp_path_factory.mktemp("whole")
    with pytest.MonkeyPatch.context() as monkeypatch, standing_in(*shipped) as server:
        monkeypatch.chdir(folder)
        write_text(folder / "text.txt")
        capture(server, "whole")
    return content(str(folder / "whole"))


@pytest.fixture
def server(shipped, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write_text(tmp_path / "text.txt")
    with standing_in(*shipped) as server:
        yield server


def write_text(path: Path) -> None:
    source = Path(json.__file__).with_name("decoder.py").read_text()
    path.write_text(source[:3500])


def capture(server: StandIn | str | list[str], out: str = "cache", top_k: int = 16, **options) -> kd.Cache:
    """A small cache of what a server says."""
    urls = server.url if isinstance(server, StandIn) else server
    given = {"server_patience": 5.0, **{name: options.pop(name) for name in [*options] if name.startswith("server_")}}
    data = {"data": "text.txt", "seq_len": 24, "num_sequences": 10, "validation_sequences": 3, "num_workers": 0}
    data |= {name: options.pop(name) for name in [*options] if name in DataConfig.__dataclass_fields__}
    config = kd.CacheTeacherConfig(
        teacher=options.pop("teacher", "stdlib-5m"),
        out=out,
        data=DataConfig(**data),
        codec=CodecConfig(top_k=top_k, num_samples=options.pop("num_samples", None)),
        server=ServerConfig(teacher_server=urls, **given),
        sequences_per_shard=4,
        batch_size=4,
        **options,
    )
    return kd.cache_teacher(config)


def rows(server: StandIn) -> list[dict]:
    """The requests that were about rows of text."""
    return [body for body in server.bodies if body["prompt_logprobs"] == 16 and len(body["prompt"]) <= 25]


def content(folder: str) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in Path(folder).rglob("*") if path.is_file()}


def test_the_stand_in_answers_as_vllm_does(server):
    def shape(value, known):
        if isinstance(value, dict) and all(key.isdecimal() for key in value):
            return [*map(shape, value.values(), known.values())]
        if isinstance(value, dict):
            assert value.keys() == known.keys()
            return {key: shape(each, known[key]) for key, each in value.items() if key not in ("text", "decoded_token")}
        if isinstance(value, list):
            assert len(value) == len(known)
            return [shape(*each) for each in zip(value, known, strict=True)]
        return round(value, 2) if isinstance(value, float) else value

    recorded = json.loads(RECORDED.read_text())
    assert requests.get(f"{server.url}/models").json()["data"] == recorded["models"]
    assert requests.get(f"{server.url[:-3]}/version").json() == recorded["version"]
    compared = 0
    for each in recorded["exchanges"]:
        answer = requests.post(server.url.removesuffix("/v1") + each["path"], json=each["request"])
        theirs, ours = each["response"], answer.json()
        assert answer.status_code == each["status"]
        assert ours.keys() - {"id", "created"} == theirs.keys() - {"id", "created"}
        if "choices" not in theirs:
            assert ours == theirs
            continue
        for mine, known in zip(ours["choices"], theirs["choices"], strict=True):
            assert mine.keys() == known.keys()
            for table, known_table in zip(mine["prompt_logprobs"], known["prompt_logprobs"], strict=True):
                assert (table is None) == (known_table is None)
                for token, entry in (known_table or {}).items():
                    assert table[token].keys() == entry.keys()
                    assert table[token]["logprob"] == pytest.approx(entry["logprob"], abs=1e-3)
                    assert table[token]["decoded_token"] == entry["decoded_token"]
                    compared += table[token]["rank"] == entry["rank"]
        assert shape(ours["usage"], theirs["usage"]) == theirs["usage"]
    assert compared > 600


@pytest.mark.parametrize("document_mask", [False, True])
def test_a_cache_of_a_server_is_that_of_the_local_teacher(server, document_mask):
    for number in range(20):
        Path(f"docs-{number}.txt").write_text(Path("text.txt").read_text()[number * 150 : number * 150 + 140])
    Path("docs").mkdir()
    for path in Path().glob("docs-*.txt"):
        path.rename(f"docs/{path.name}")
    data = DataConfig(
        data="docs", seq_len=24, num_sequences=9, validation_sequences=2, num_workers=0, document_mask=document_mask
    )
    local = kd.CacheTeacherConfig(
        teacher="stdlib-5m", out="local", data=data, codec=CodecConfig(top_k=16), precision="fp32"
    )
    mine = kd.cache_teacher(local)
    theirs = capture(server, data="docs", num_sequences=9, validation_sequences=2, document_mask=document_mask)
    same = total = 0
    assert sum(int(row["segments"].max()) for row in mine["train"]) > 2
    for split in ("train", "validation"):
        for here, there in zip(mine[split], theirs[split], strict=True):
            assert torch.equal(here["tokens"], there["tokens"]) and torch.equal(here["loss_mask"], there["loss_mask"])
            counted = here["loss_mask"]
            same += int((here["ids"][counted, :8] == there["ids"][counted, :8]).all(-1).sum())
            total += int(counted.sum())
            for name in ("logprobs", "label_logprob"):
                one, other = here[name][counted].float(), there[name][counted].float()
                off = (one - other).abs() / (1 - one)
                assert off.max() < 1 / 100, name  # kept in steps of 1/192, and the label outside of a top-k in others
    assert same >= 0.99 * total > 150
    manifest = theirs.manifest
    assert theirs.temperature_range == (1.0, 1.0) and manifest.fidelity is None
    assert 0.5 < manifest.capture["kept_mass"] < 1 and manifest.capture["mass_loss"] > 0
    assert manifest.settings.teacher["model"] == "stdlib-5m" and manifest.settings.teacher["version"] == "0.32.0"
    assert Fingerprint.from_json(manifest.settings.teacher["fingerprint"]) is not None
    lengths = {len(body["prompt"]) for body in rows(server)}
    assert (max(lengths) == 25) and (len(lengths) > 3) is document_mask
    salts = [body["cache_salt"] for body in server.bodies]
    assert len({*salts}) == len(salts)


FAULTS = [
    *("429", "500", "503", "close", "drop", "cut", "html", "deep", "nan", "text", "fewer", "longer", "usage", "model"),
    *("shifted", "processed", "id", "far-id", "positive", "none", "bos", "huge", "logits"),
    *("hang", "stale"),
]


def test_the_cache_is_the_undisturbed_one_whatever_happens_to_thirty_answers(server, whole):
    capture(server, "other")
    asked, chance = len(server.bodies), random.Random(0)
    first = next(i for i, body in enumerate(server.bodies) if body in rows(server))
    assert first < PREFLIGHT
    places = range(first, first + 60, 2)  # never two of one request
    faults = chance.sample([*FAULTS, *chance.choices(FAULTS, k=30 - len(FAULTS))], 30)
    server.faults = {asked + place: fault for place, fault in zip(places, faults, strict=True)}
    server.fired.clear()
    capture(server, "disturbed", server_concurrency=1, server_patience=60.0, server_timeout=2.0)
    assert sorted(server.fired) == sorted(faults)
    assert content("disturbed") == whole
    salts = [body["cache_salt"] for body in server.bodies]
    assert len({*salts}) == len(salts), "a second try has a salt of its own"


def test_stale_prompts_are_kept_away_by_a_salt_and_found_without_one(server, whole):
    server.faults = dict.fromkeys(range(200), "stale")
    capture(server)
    assert content("cache") == whole
    server.bodies.clear()
    server.always = "no-salt"
    with pytest.raises(kd.UsageError, match="cached prompts give stale ones"):
        capture(server, "other")


@pytest.mark.parametrize(
    "fault, words",
    [
        ("429", "answers 429: fault 429"),
        ("close", "the server closed the connection|the connection was reset"),
        ("cut", "is not the JSON that was asked for"),
        ("bos", "it counts 2[0-9] tokens, 2[0-9] were sent: it adds or drops some"),
        ("shifted", "is about another one: the answer is shifted"),
        ("processed", "processed log-probabilities: .* --logprobs-mode raw_logprobs"),
        ("far-id", "beyond the teacher's vocabulary of 2048"),
        ("drift", "other numbers than before, .* nats apart .* nothing of this shard is kept"),
        ("warm", "is another teacher than the one|gives other numbers than before"),
    ],
)
def test_a_fault_that_stays_ends_the_capture_in_one_line_and_nothing_of_it_is_kept(server, whole, fault, words):
    server.always, server.after = fault, PREFLIGHT + 4
    with pytest.raises(kd.RunError, match=words) as caught:
        capture(server, server_patience=0.3)
    assert "\n" not in str(caught.value) and server.fired
    kept = list(Path("cache/shards").glob("*.h5"))
    server.always = ""
    before = {path: path.read_bytes() for path in kept}
    capture(server)
    assert {path: path.read_bytes() for path in kept} == before
    assert content("cache") == whole


@pytest.mark.parametrize(
    "change, words",
    [
        ({"name": "other", "server_model": "stdlib-5m"}, "serves other, not stdlib-5m; give --server-model NAME"),
        ({"max_model_len": 20}, "takes 20 tokens, and a row needs 25 .* --max-model-len 26, or use --seq-len 18"),
        ({"max_logprobs": 8}, "max allowed: 8 .*; start the server with --max-logprobs 16, or use a smaller --top-k"),
        ({"key": "secret"}, r"says: Unauthorized \(401\); set KDTRAIN_SERVER_KEY"),
        ({"always": "processed-mode"}, "returns processed log-probabilities: temperature and top-p move them"),
        ({"always": "processed"}, "processed log-probabilities|processed_logprobs|raw_logprobs"),
        ({"always": "tokenizer"}, "has another tokenizer: .* the first other one is number 1"),
        ({"always": "drift"}, "nats apart: cached prompts give stale ones; start .* --no-enable-prefix-caching"),
        ({"always": "stale"}, "nats apart: cached prompts give stale ones; start .* --no-enable-prefix-caching"),
        ({"always": "bos"}, "it counts [0-9]+ tokens, [0-9]+ were sent: it adds or drops some"),
        ({"always": "none"}, "nothing for token 2"),
        ({"always": "low"}, "not log-probabilities: .* leave more probability than 2,048 entries can have; .* raw_"),
        ({"always": "redirect:http://example.com/v1"}, "it redirects to http://example.com/v1, which is not followed"),
    ],
)
def test_a_server_that_cannot_serve_the_teacher_is_refused_before_the_first_sequence(server, change, words):
    model = change.pop("server_model", None)
    for name, value in change.items():
        setattr(server, name, value)
    with pytest.raises(kd.UsageError, match=words) as caught:
        capture(server, server_patience=0.3, **({"server_model": model} if model else {}))
    assert "\n" not in str(caught.value) and not Path("cache").exists()


def test_a_server_without_salts_and_tokenize_is_taken_and_its_only_model_whatever_its_name(server, capsys):
    server.name, server.always, server.root = "somebody/else", "no-salt", "/srv/me/weights"
    cache = capture(server)
    told = cache.manifest.settings.teacher
    assert (told["model"], told["root"], told["max_model_len"]) == ("somebody/else", "weights", 600)
    assert "cache_salt" not in server.bodies[-1]
    server.always = "no-tokenize"
    capture(server, "other")
    assert "/tokenize is not there (404); " in capsys.readouterr().err


def test_a_resume_is_of_the_same_teacher_and_equal_to_an_undisturbed_capture(server, another, capsys, whole):
    begun(server)
    good = server.model
    server.model = another
    with pytest.raises(kd.UsageError, match=r"another teacher .* fingerprint is [0-9a-f]{8} .* of the cache [0-9a-f]"):
        capture(server)
    assert not Path("cache/shards/train-00001.h5").exists()
    server.model = good
    capture(server)
    assert "the same teacher as when the cache was begun, by its fingerprint" in capsys.readouterr().err
    assert content("cache") == whole
    with pytest.raises(kd.UsageError, match=r"holds a finished cache with other settings \(codec.top_k: 16 there, 8"):
        capture(server, top_k=8)


def begun(server: StandIn) -> None:
    """A capture that was stopped after its first shard."""
    capture(server)
    for path in [Path("cache/manifest.json"), *Path("cache/shards").glob("train-0000[12].*")]:
        path.unlink()


def test_a_resume_waits_for_a_server_that_is_away_and_one_that_stays_away_ends_it_as_a_failed_run(server, monkeypatch):
    begun(server)
    monkeypatch.setattr(teacher, "_FIRST_PATIENCE", 0.0)
    server.faults = dict.fromkeys(range(len(server.bodies), len(server.bodies) + 3), "503")
    capture(server)
    assert server.fired == ["503"] * 3
    Path("cache/manifest.json").unlink()
    server.always = "429"
    with pytest.raises(kd.RunError, match=r"answers 429: fault 429, for .* run the same command again"):
        capture(server, server_patience=0.3)
    with pytest.raises(kd.UsageError, match="answers 429"):
        capture(server, "new")


def test_an_address_that_is_silent_is_not_waited_for_as_an_answer_is(server, monkeypatch):
    monkeypatch.setattr(preflight, "_SILENT", 0.1)
    began = time.monotonic()
    with socket.create_server(("127.0.0.1", 0)) as silent, pytest.raises(kd.UsageError, match=r"/v1: .*, for \d s"):
        capture(f"http://127.0.0.1:{silent.getsockname()[1]}", server_timeout=60.0, server_patience=0.2)
    assert time.monotonic() - began < 30


def test_a_resume_on_a_noisier_server_is_held_to_what_that_one_allows(server):
    begun(server)
    server.always = "noisy"
    assert len(capture(server)["train"]) == 10 and "noisy" in server.fired


def test_entries_about_the_token_after_the_next_are_found_whatever_the_batches_and_shards(server):
    server.always = "ahead"  # batches and shards of four
    with pytest.raises(kd.RunError, match=r"as the server answers: shifted by \+1"):
        capture(server)


def test_a_server_with_the_least_length_is_enough(server):
    server.max_model_len = 18
    assert len(capture(server, seq_len=16)["train"]) == 10


WRITES = {"text": TextConfig(generate=True, prompt_tokens=6, max_new_tokens=9)}


def test_numbers_that_are_processed_in_what_a_server_writes_are_refused_before_the_first_text(server):
    server.always = "processed-text"
    with pytest.raises(kd.UsageError, match=r"processed log-probabilities of what it writes: .* raw_logprobs"):
        capture(server, **WRITES)
    assert len([body for body in server.bodies if "return_token_ids" in body]) == 1


def test_a_text_that_ends_at_a_token_of_the_servers_own_is_asked_for_once_and_the_remedy_is_named(server):
    server.ends = [*range(1, 2048)]
    with pytest.raises(kd.UsageError, match=r"the server ends a text at \d+, and .* add it to eos_token_id in gen"):
        capture(server, **WRITES)
    assert len([body for body in server.bodies if "return_token_ids" in body]) == 1


def test_a_server_that_comes_back_as_another_is_refused_and_nothing_of_it_is_kept(server, another, whole):
    server.faults = {PREFLIGHT + 6: "close"}
    server.swap = (PREFLIGHT + 7, another)
    good = server.model
    with pytest.raises(kd.RunError, match=r"is another teacher than the one .* nothing of this shard is kept"):
        capture(server, server_concurrency=1)
    assert server.fired == ["close"] and server.swap is None
    done = {path.name for path in Path("cache/shards").glob("*.h5")}
    server.model = good
    capture(server)
    assert content("cache") == whole
    assert done < {path.name for path in Path("cache/shards").glob("*.h5")}


def test_several_servers_of_one_teacher_share_the_work_and_another_model_is_refused(
    server, shipped, another, whole, capsys
):
    with standing_in(*shipped) as second:
        server.delay = second.delay = 0.005
        server.most_at_once = 0
        capture([server.url, second.url], "both", server_concurrency=8)
        assert content("both") == whole
        assert len(rows(second)) > 4 and 1 < server.most_at_once <= 8
        second.always = "503"
        second.after = len(second.bodies) + PREFLIGHT
        capture([server.url, second.url], "away", server_patience=0.5)
        assert content("away") == whole and second.fired
        assert f"{second.url}: it answers 503" in capsys.readouterr().err
        second.always, second.model = "", another
        with pytest.raises(kd.UsageError, match=r"serves another teacher than http.* or give --server-tolerance"):
            capture([server.url, second.url], "mixed")
        assert len(capture([server.url, second.url], "allowed", server_tolerance=9.0)["train"]) == 10


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


def test_an_address_that_nothing_listens_at_is_refused_soon(server):
    server.close()
    with pytest.raises(kd.UsageError, match=r"http://127.0.0.1:\d+/v1: the connection was refused"):
        capture(server, server_patience=0.3)


@pytest.mark.parametrize(
    "options, words",
    [
        ({"teacher_server": "host:8000"}, "host:8000 is not an address; give one such as http://HOST:8000/v1"),
        ({"teacher_server": "http://me:word@host/v1"}, "a password would end in logs; use KDTRAIN_SERVER_KEY"),
        ({"teacher_server": "http://host/v1?key=1"}, "leave out what follows"),
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


def test_options_that_a_server_cannot_serve_are_refused():
    server = ServerConfig(teacher_server="http://host/v1")
    for codec in (CodecConfig(dense=True), CodecConfig(top_k=8, num_samples=24)):
        with pytest.raises(kd.UsageError, match="gives --top-k, or --num-samples alone where the server has"):
            kd.CacheTeacherConfig(teacher="t", out="c", data=DataConfig(data="text.txt"), codec=codec, server=server)
    with pytest.raises(kd.UsageError, match="exclude each other"):
        kd.CacheTeacherConfig(teacher="t", out="c", from_logprobs="f", codec=CodecConfig(top_k=4), server=server)


# Samples from inside the engine ---------------------------------------------------------------------------------------


@pytest.fixture
def plugin(server):
    server.plugin = True
    return server


def samples_of(server, out="cache", number=50, **options) -> kd.Cache:
    return capture(server, out, top_k=0, num_samples=number, **options)


@pytest.mark.parametrize("document_mask", [False, True])
def test_a_cache_of_served_samples_is_that_of_the_local_teacher(plugin, document_mask):
    there = samples_of(plugin, document_mask=document_mask, seed=4)
    data = DataConfig(
        data="text.txt",
        seq_len=24,
        num_sequences=10,
        validation_sequences=3,
        num_workers=0,
        document_mask=document_mask,
    )
    here = kd.cache_teacher(
        kd.CacheTeacherConfig(teacher="stdlib-5m", out="local", data=data, precision="fp32", seed=4)
    )
    same = total = 0
    for split in ("train", "validation"):
        for one, other in zip(here[split], there[split], strict=True):
            drawn = [(256 * each["ids"] + each["counts"].long()).sort(-1).values for each in (one, other)]
            same, total = same + int((drawn[0] == drawn[1]).all(-1).sum()), total + len(drawn[0])
            assert torch.equal(one["tokens"], other["tokens"])
            for name in ("label_logprob", "tail"):
                assert torch.allclose(one[name].float(), other[name].float(), atol=0.05), name
    assert same >= 0.98 * total, "a point that lies on the border of two entries may fall to either"
    assert there.manifest.settings.sampling == here.manifest.settings.sampling == "grid"
    assert there.temperature_range == (1.0, 1.0) and there.manifest.capture is None
    assert there.verify() == []


def test_text_that_a_server_writes_is_kept_as_samples_of_what_it_says_of_it(plugin, shipped):
    how = TextConfig(generate=True, prompt_tokens=6, max_new_tokens=9, gen_temperature=0.8)
    cache = samples_of(plugin, text=how, seed=4)
    texts = [body for body in plugin.bodies if "return_token_ids" in body]
    rows = sum(len(cache[split]) for split in ("train", "validation"))
    assert len(texts) == rows and all("logprobs" not in body for body in texts)
    assert cache.manifest.generated["train"]["tokens"] == sum(int(row["loss_mask"].sum()) for row in cache["train"])
    same = total = 0
    for number, row in enumerate(cache["train"]):
        here, tokens = row["loss_mask"].bool(), row["tokens"]
        assert here.nonzero()[0] == 5 and 1 <= here.sum() <= 9
        asked = SampleRequest(number=50, seed=4, split="train", row=number)
        ids_NC, counts_NC, _ = sample(shipped[0](tokens[None, :-1]).logits[0].detach(), tokens[1:], asked, 0)
        for at in here.nonzero().flatten().tolist():
            drawn = {int(i): int(n) for i, n in zip(ids_NC[at, 4:], counts_NC[at, 4:], strict=True) if n}
            kept = {int(i): int(n) for i, n in zip(row["ids"][at], row["counts"][at], strict=True) if n}
            same, total = same + (drawn == kept), total + 1
    assert same >= 0.98 * total >= 40


def test_a_server_without_the_plugin_is_refused_before_anything_is_captured(server):
    with pytest.raises(kd.UsageError, match=r"is kdtrain installed where the server runs.* or give --top-k 64"):
        samples_of(server, server_patience=0.3)
    assert not list(Path("cache").glob("shards/*"))


def test_a_server_that_comes_back_without_the_plugin_is_refused(plugin, monkeypatch):
    whole = samples_of(plugin, "whole")
    calls = iter(range(10**6))
    tables = plugin.tables

    def forgetting(*given):
        plugin.plugin = next(calls) < PREFLIGHT + 14
        return tables(*given)

    monkeypatch.setattr(plugin, "tables", forgetting)
    with pytest.raises(kd.RunError, match="was not sampled by kdtrain as asked"):
        samples_of(plugin, server_patience=0.3)
    monkeypatch.setattr(plugin, "tables", tables)
    plugin.plugin = True
    assert samples_of(plugin).manifest.splits == whole.manifest.splits


@pytest.mark.parametrize(
    "fault, words", [("row", "was not sampled by kdtrain as asked"), ("broken", "no distribution at position 3")]
)
def test_samples_that_are_wrong_once_are_asked_for_again_and_always_end_the_capture(plugin, fault, words):
    plugin.faults = {PREFLIGHT + 5: fault, PREFLIGHT + 11: fault}
    assert len(samples_of(plugin)["train"]) == 10
    assert plugin.fired == [fault, fault]
    plugin.always, plugin.after = fault, len(plugin.bodies) + PREFLIGHT + 5
    with pytest.raises(kd.RunError, match=words):
        samples_of(plugin, "other", server_patience=0.3)


def test_the_student_itself_is_no_teacher_behind_a_server():
    server = RunServerConfig(teacher_server=("http://host/v1",))
    config = kd.DistillConfig(student="s", out="o", teacher="self", data=DataConfig(data="text.txt"), server=server)
    with pytest.raises(kd.UsageError, match="--teacher self is the student, which no server runs"):
        captured(config, torch.device("cpu")).__enter__()


def test_a_run_that_cannot_learn_from_what_a_server_gives_is_refused_before_it_is_asked():
    def config(objective=None, **server) -> kd.DistillConfig:
        server = RunServerConfig(teacher_server="http://host/v1", **server)
        given = {"data": DataConfig(data="text.txt"), "objective": objective or ObjectiveConfig(), "server": server}
        return kd.DistillConfig(student="s", out="o", teacher="t", **given)

    with pytest.raises(kd.UsageError, match="--tail drop would throw away the 50 samples"):
        captured(config(ObjectiveConfig(tail="drop"), server_num_samples=50), torch.device("cpu")).__enter__()
    with pytest.raises(kd.UsageError, match=r"--tail .* needs a cache with samples"):
        captured(config(ObjectiveConfig(tail="sampled")), torch.device("cpu")).__enter__()
    with pytest.raises(kd.UsageError, match="--server-num-samples are instead of --server-top-k"):
        config(server_num_samples=50, server_top_k=32)


# The codec of an answer ---------------------------------------------------------------------------------------------

SPEC = CodecSpec(kind="sparse", top_k=3, vocab_size=10)
SPAN = Span("train", 0, 0, [1, 2, 3])


def lists(**changes):
    """An answer about `SPAN`: the label of the first position is among the entries, that of the second is not."""
    first = {2: Entry(-0.5, 1), 4: Entry(-1.5, 2), 5: Entry(-3.0, 3)}
    second = {3: Entry(-6.0, 7), 9: Entry(-2.0, 3), 8: Entry(-1.0, 2), 7: Entry(-0.9, 1)}
    return [None, first | changes.get("first", {}), second | changes.get("second", {})]


def test_entries_are_ordered_by_their_probability_and_the_label_outside_is_no_entry():
    arrays = Answers(SPEC).read(SPAN, lists())
    assert arrays["ids"].tolist() == [[2, 4, 5], [7, 8, 9]]
    np.testing.assert_allclose(arrays["logprobs"], [[-0.5, -1.5, -3.0], [-0.9, -1.0, -2.0]])
    np.testing.assert_allclose(arrays["label_logprob"], [-0.5, -6.0])
    rest = np.log(1 - np.exp(arrays["logprobs"]).sum(-1))
    one = SPEC.knots.index(1.0)
    np.testing.assert_allclose(arrays["tail"][:, one], rest, atol=1e-5)
    tied = lists(first={4: Entry(-3.0, 3), 5: Entry(-3.0, 2)})
    assert Answers(SPEC).read(SPAN, tied)["ids"][0].tolist() == [2, 5, 4]


@pytest.mark.parametrize(
    "change, words",
    [
        ({"first": {6: Entry(-4.0)}, "second": {1: Entry(-9.0)}}, "token 1 is more likely than|5 entries for token 2"),
        ({"second": {1: Entry(-9.0), 0: Entry(-9.0)}}, "6 entries for token 2 instead of 3"),
        ({"first": {2: Entry(-5000.0)}}, "processed log-probabilities"),
        ({"first": {2: Entry(0.01)}}, "not log-probabilities"),
        ({"first": {4: Entry(-0.5)}}, "their sum is above 1"),
        ({"second": {i: Entry(p) for i, p in {3: -9, 9: -8, 8: -7, 7: -6}.items()}}, "than 10 entries can have"),
        ({"first": {2: Entry(float("inf"))}}, "not finite"),
        ({"second": {3: Entry(-0.1, 1)}}, "more likely than entry 3, and is not among them|sum is above 1"),
    ],
)
def test_numbers_that_cannot_be_are_refused(change, words):
    with pytest.raises(Wrong, match=words):
        Answers(SPEC).read(SPAN, lists(**change))


def test_only_the_span_of_the_loss_is_asked_for():
    tokens, segments = np.arange(9), np.array([0, 0, 0, 1, 1, 1, 2, 2])
    counted = np.array([0, 1, 0, 0, 1, 1, 0, 0], bool)
    assert [each.tokens for each in spans_of("train", 5, tokens, counted, None)] == [[0, 1, 2, 3, 4, 5, 6]]
    found = spans_of("train", 5, tokens, counted, segments)
    assert [(each.start, each.tokens) for each in found] == [(0, [0, 1, 2]), (3, [3, 4, 5, 6])]
    assert spans_of("train", 5, tokens, counted & False, None) == []


def test_a_fingerprint_of_a_stranger_is_typed(server):
    good = capture(server).manifest.settings.teacher["fingerprint"]
    assert Fingerprint.from_json(good).to_json() == good
    for key, value in (("tokens", [[1]]), ("ids", [[[1, 2]]]), ("ids", "x"), ("noise", None), ("logprobs", [[["a"]]])):
        assert Fingerprint.from_json({**good, key: value}) is None
    assert Fingerprint.from_json({**good, "ids": [[[10**40] * 4] * 31] * 2}) is None


def test_a_record_beyond_its_bound_is_not_read(server):
    client = Client([server.url], concurrency=1, timeout=5, patience=0)
    server.name = "x" * (SMALL + 1)
    with pytest.raises(kd.RunError, match="more than 1,048,576 bytes; asked 3 times"):
        client.get(client.hosts[0], f"{server.url}/models", dict)
    assert re.fullmatch(r"http://127.0.0.1:\d+/v1", str(client.hosts[0]))
