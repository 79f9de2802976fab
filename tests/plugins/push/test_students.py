"""`kdtrain push` of students: an export goes up whole, in one commit, and nothing of others is replaced."""

import hashlib
import json
import re
import tomllib

import pytest
import yaml

from kdtrain.config.commands import DistillConfig
from kdtrain.config.values import options_of, written
from kdtrain.files import publish_json, read_sealed
from kdtrain.plugins.push.model_card import student_card
from tests.web import Repository


@pytest.fixture
def run(workbench):
    """Train a tiny student of the tiny teacher, which is exported."""
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
    card, record = tree["README.md"].decode(), json.loads(tree["kdtrain.json"])
    assert record["files"]["README.md"] == hashlib.sha256(tree["README.md"]).hexdigest()
    ours = ("README.md", "kdtrain.json")  # with the head and the recipe, and the digest of that
    assert there["README.md"].decode() in card and card.startswith("---\n")
    assert {name: tree.get(name) for name in there if name not in ours} == {
        name: content for name, content in there.items() if name not in ours
    }
    assert {"README.md", "recipe.toml", "model.safetensors", "tokenizer.json", "kdtrain.json"} <= there.keys()


def card_of(folder) -> str:
    """Return the text that is published as the README.md of an export."""
    return student_card(folder, [path.name for path in folder.iterdir()])


@pytest.mark.parametrize(
    "license, stated", [("apache-2.0", ("apache-2.0", None)), ("my: <own>", ("other", "my: <own>"))]
)
def test_the_card_has_the_hubs_head_and_the_options_that_differ_from_the_defaults(run, tmp_path, license, stated):
    out = tmp_path / "out"
    run.json("export", "run", "--out", out, "--license", license)
    card = card_of(out)
    head = yaml.safe_load(card.split("---\n")[1])
    assert (head["license"], head.get("license_name")) == stated and head["library_name"] == "transformers"
    assert head["tags"] == ["kdtrain", "knowledge-distillation"] and not head.keys() & {"base_model", "datasets"}
    shown, whole = (
        tomllib.loads(each) for each in (card.split("```toml\n")[1].split("```")[0], (out / "recipe.toml").read_text())
    )
    usual = {name: written(each.field, each.default) for name, each in options_of(DistillConfig).items()}
    assert all(whole[section].items() > table.items() for section, table in shown.items()) and len(shown) < len(whole)
    kept = {name: value for table in whole.values() for name, value in table.items()}
    assert {name for name in kept if kept[name] != usual[name]} == {name for table in shown.values() for name in table}


@pytest.mark.parametrize("where", ["options", "the text of its cache"])
def test_the_head_has_the_base_model_and_the_data_sets_of_the_hub(run, tmp_path, where):
    out = tmp_path / "out"
    run.json("export", "run", "--out", out)
    recipe, page = out / "recipe.toml", out / "README.md"
    recipe.write_text(recipe.read_text().replace('student = "student.toml"', 'student = "Org/Base"'))
    if where == "options":
        recipe.write_text(recipe.read_text() + '[data]\ndata = "hf:Org/Text:subset"\n')
    else:
        page.write_text(page.read_text().replace("source text.txt,", "source hf:datasets/Org/Text,"))
    found = yaml.safe_load(card_of(out).split("---\n")[1])
    assert (found["base_model"], found["base_model_relation"]) == ("Org/Base", "finetune")
    assert found["datasets"] == ["Org/Text"] and "license" not in found
    for file, library, relation in (("adapter_config.json", "peft", "adapter"), ("x.gguf", "gguf", "finetune")):
        found = yaml.safe_load(student_card(out, ["recipe.toml", file]).split("---\n")[1])
        assert (found["library_name"], found["base_model_relation"]) == (library, relation)
    page.write_text("---\nlicense: mit\n---\n# of an earlier version")
    assert card_of(out) is None


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
