"""`kdtrain push` of students: an export goes up whole, in one commit, and nothing of others is replaced."""

import re

import pytest

from kdtrain.files import publish_json, read_sealed
from tests.web import Repository


@pytest.fixture
def run(workbench):
    """A run of a tiny student of the tiny teacher, whose student is exported."""
    if not (workbench.root / "run").exists():
        argv = ("distill", "--cache", "cache", "--student", "student.toml", "--out", "run", "--steps", 2)
        workbench.json(*argv, *workbench.plain)
    return workbench


@pytest.mark.parametrize("private", [(), ("--private",)])
def test_the_student_of_a_run_is_published_whole(run, hub, private):
    found = run.json("push", "run", "hf:org/name", *private)
    repository = hub.hub["org/name"]
    there = {path.name: path.read_bytes() for path in (run.root / "run/student").iterdir()}
    assert found["url"] == f"{hub.url}/org/name" and repository.private == bool(private)
    commit, tree = repository.commits[-1]
    assert len(repository.commits) == 2 and found["commit"] == commit  # one commit names all
    assert {name: tree.get(name) for name in there} == there
    assert {"README.md", "recipe.toml", "model.safetensors", "tokenizer.json", "kdtrain.json"} <= there.keys()


def test_a_later_export_replaces_the_files_of_the_earlier_one_and_leaves_those_of_others(run, hub, tmp_path):
    out = tmp_path / "out"

    def publish(*more: object) -> str:
        run.json("export", "run", "--out", out, "--overwrite", *more)
        code, _, err = run.call("push", out, "hf:org/name")
        assert code == 0, err
        return err

    publish("--shard-size", 2e-5)
    repository = hub.hub["org/name"]
    assert "model.safetensors.index.json" in repository.commits[-1][1]
    repository.commit({"mine.gguf": b"x"})
    publish("--dtype", "bf16")
    tree = repository.commits[-1][1]
    assert {*tree} == {path.name for path in out.iterdir()} | {".gitattributes", "mine.gguf"}
    assert "bfloat16" in tree["README.md"].decode() and len(repository.commits) == 4
    repository.commit({"README.md": b"# My own words"})
    for _ in range(2):
        assert "has a README.md that kdtrain did not write; it stays as it is" in publish()
        assert repository.commits[-1][1]["README.md"] == b"# My own words"


def test_a_repository_of_another_model_is_refused_and_one_with_a_card_alone_keeps_it(run, hub):
    hub.hub["org/name"], hub.hub["org/new"] = Repository(), Repository()
    hub.hub["org/name"].commit({"model.safetensors": b"mine", "README.md": b"# Mine"})
    hub.hub["org/new"].commit({"README.md": b"# A plan"})
    code, _, err = run.call("push", "run", "hf:org/name")
    assert code == 2 and "hf:org/name holds model.safetensors, which kdtrain did not publish" in err
    assert len(hub.hub["org/name"].commits) == 2
    run.json("push", "run", "hf:org/new")
    assert hub.hub["org/new"].commits[-1][1]["README.md"] == b"# A plan"


@pytest.mark.parametrize(
    "change, message",
    [
        ("no token", "hf:org/name: no token for the hub; log in with hf auth login"),
        ("wrong token", r"hf:org/name: the hub refuses it \(.*401.*\); check the name, and log in with hf auth login"),
        ("public", "hf:org/name is public; leave --private out, or make it private on the hub first"),
        ("licence", "a student's licence is kdtrain export --license"),
        ("changed", "model.safetensors is not as it was exported; export the student again"),
        ("outside", "student/../teacher/config.json is not as it was exported"),
        ("nothing", "there is no such folder"),
        ("no student", "neither a cache nor an exported student"),
    ],
)
def test_what_cannot_be_published_is_one_line_and_sends_nothing(run, hub, tmp_path, monkeypatch, change, message):
    words, out = ["run", "hf:org/name", "--private"], tmp_path / "student"
    if change == "no token":
        monkeypatch.delenv("HF_TOKEN")
    if change == "wrong token":
        monkeypatch.setenv("HF_TOKEN", "hf_bad")
    if change == "public":
        hub.hub["org/name"] = Repository()
    if change == "licence":
        words += [each for name in ("text", "teacher", "outputs") for each in (f"--license-{name}", "mit")]
    if change in ("changed", "outside"):
        words[0] = str(out)
        run.json("export", "run", "--out", out)
    if change == "changed":
        (out / "model.safetensors").write_bytes(b"x")
    if change == "outside":
        (tmp_path / "teacher").mkdir()
        (tmp_path / "teacher/config.json").write_bytes(b"")
        record = read_sealed(out / "kdtrain.json")
        publish_json(out / "kdtrain.json", {**record, "files": {"../teacher/config.json": "0" * 64}}, "test")
    if change in ("nothing", "no student"):
        words[0] = "nowhere" if change == "nothing" else str(tmp_path)
    code, _, err = run.call("push", *words)
    (line,) = (each for each in err.splitlines() if each.startswith("kdtrain: "))
    assert code == 2 and re.search(message, line)
    assert all(len(each.commits) == 1 for each in hub.hub.values())  # nothing was uploaded


@pytest.mark.parametrize("when", ["from the beginning", "at the upload"])
def test_a_hub_that_does_not_answer_is_a_failed_command(run, hub, monkeypatch, when):
    if when == "at the upload":
        hub.fail("/commit/main", "503", times=99)
    else:
        monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    code, _, err = run.call("push", "run", "hf:org/name")
    assert code == 1 and "hf:org/name" in err and "the hub does not answer" in err


def test_an_address_that_is_none_and_the_options_of_before_are_refused(run):
    for where in ("org/name", "hf:name", "hf:org/name/more", "hf:../x", "https://example.org/x"):
        code, _, err = run.call("push", "run", where)
        assert code == 2 and "hf:" in err and err.count("\n") == 1
    code, _, err = run.call("export", "run", "--out", "out", "--push", "hf:org/name")
    assert code == 2 and "--push is a command: kdtrain push OUT hf:ORG/NAME" in err


def test_adapters_are_published_only_where_others_find_their_base(run, hub, tmp_path):
    pytest.importorskip("peft")
    argv = ("distill", "--cache", "cache", "--student", "teacher", "--lora-rank", 2, "--steps", 1)
    run.json(*argv, "--out", tmp_path / "lora", *run.plain)
    run.json("export", tmp_path / "lora", "--adapter", "--out", tmp_path / "out")
    code, _, err = run.call("push", tmp_path / "out", "hf:org/name")
    assert code == 2 and "nobody else has teacher, the base of these adapters" in err
