"""A teacher behind a server: what it says becomes the cache of the local teacher, and what cannot be right never does.

The server is a stand-in (tests/stand_in.py) with the shipped teacher behind it, whose answers are compared with those
recorded from vLLM.
"""

import json
import random
import re
from pathlib import Path

import pytest
import requests
import torch

import kdtrain as kd
from kdtrain.config.sections import CodecConfig, DataConfig
from kdtrain.plugins.served import teacher
from kdtrain.plugins.served.fingerprint import Fingerprint
from tests.captures import PREFLIGHT, begun, capture, content, rows
from tests.stand_in import standing_in

RECORDED = Path(__file__).parents[2] / "golden" / "vllm-answers.json"


def test_the_stand_in_answers_as_vllm_does(server):
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
        assert ours["usage"] == theirs["usage"]
    assert compared > 600


@pytest.mark.parametrize("document_mask", [False, True])
def test_a_cache_of_a_server_is_that_of_the_local_teacher(server, document_mask):
    Path("docs").mkdir()
    for number in range(20):
        Path(f"docs/docs-{number}.txt").write_text(Path("text.txt").read_text()[number * 150 : number * 150 + 140])
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


@pytest.mark.parametrize(
    "fault, words",
    [
        ("429", "answers 429: fault 429"),
        ("close", "the server closed the connection|the connection was reset"),
        ("cut", "is not the requested JSON"),
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
    assert {name: each for name, each in content("cache").items() if name.endswith(".h5")}.items() <= whole.items()


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


@pytest.mark.parametrize("fault", ["noisy", "balanced"])
def test_a_resume_on_a_noisier_server_is_held_to_what_that_one_allows(server, fault, capsys):
    begun(server)
    server.always = fault
    assert len(capture(server)["train"]) == 10 and fault in server.fired
    assert "server: it reports" not in capsys.readouterr().err, "noise is no fact that a server tells"


def test_a_balancer_before_several_models_is_a_warning_that_names_it_and_stays_in_the_manifest(server, capsys):
    assert "unsteady" not in capture(server, "steady").manifest.settings.teacher
    assert "balancer" not in capsys.readouterr().err
    server.always = "balanced"
    told = capture(server).manifest.settings.teacher
    words = rf"{server.url} answers one prompt with numbers that are 0\.0\d+ nats apart: .* a balancer before several"
    assert re.search(words, capsys.readouterr().err)
    assert "a balancer before several models" in told["unsteady"] and 0.01 < told["fingerprint"]["noise"] < 0.05


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
